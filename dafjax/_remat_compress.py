"""`remat_compress`: used like `jax.checkpoint`, but stores residuals in a few bits."""

import collections
import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Literal, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.api_util import debug_info
from jax.core import Tracer

from dafjax._batch_noise import measuring
from dafjax._bits import (
    AUTO,
    TARGETS,
    AnyBits,
    BatchNoise,
    Bits,
    Target,
    as_bits,
    matches,
)
from dafjax._call import (
    StaticArguments,
    bind,
    explained_concretization,
    explained_forward_mode,
    find_examples,
    positional_parameters,
    positions,
    run,
    unwritten,
)
from dafjax._contexts import (
    Choice,
    Mode,
    batch_measurement,
    current_choice,
    current_stand_in,
    current_wraps,
    inside,
    outer_mode,
)
from dafjax._derivative import with_compressed_residuals
from dafjax._numbers import shown
from dafjax._options import Options, choose, conflict
from dafjax._passes.pipeline import NAMES
from dafjax._schedule.steps import Ties
from dafjax._trace.tracing import (
    ClosedJaxpr,
    as_function,
    names_in,
    trace,
    trace_context,
)
from dafjax.policies import AbstractPolicy, as_policy
from dafjax.stores import AbstractStore, Arrays


def remat_compress(
    fun: Callable[..., Any] | None = None,
    *,
    policy: AbstractPolicy | Callable[..., Any] | None = None,
    bits: AnyBits | Target | None = 2,
    store: AbstractStore | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    activation_argnums: int | Sequence[int] = (),
    rematerialize: bool | Literal["exact"] = False,
    max_parts: int | None = None,
    without_passes: Sequence[str] = (),
    seed: int | jax.Array = 0,
    prevent_cse: bool | Sequence[bool] = True,
    concrete: bool = False,
) -> Callable[..., Any]:
    """Makes a function store the residuals of its backward pass in a few bits.

    Use it like `jax.checkpoint`, on one block or on a whole loss, as a call or as a
    decorator, with the same keywords. `jax.checkpoint` computes the forward pass again.
    This function stores the outputs of expensive operations in codes of `bits` bits
    instead, and recomputes only values that follow cheaply from them. Results are never
    quantized (they can differ from the results of `fun` by float rounding, where XLA
    fuses differently). Gradients have a small error, by default unbiased. Without
    differentiation the result is the function itself.

    If wrapped functions are nested, the outermost decides. Only inputs that are
    differentiated cause residuals. Arguments that the backward pass needs are used as
    they are, never quantized.

    A loss with few residuals may need as much memory with codes as without. A static
    model of XLA tells, and then the loss stays as JAX has it, without noise. With a
    `policy` of yours it is compressed in any case.

    Args:
        fun: The function. Its arguments and results are pytrees of arrays.
        policy: The rule that decides about each residual. `None`:
            `dafjax.policies.CompressExpensive()`. A policy of `jax.checkpoint`, such as
            `jax.checkpoint_policies.dots_saveable`, says which values are saved
            exactly; `CompressExpensive()` decides about all others (see
            `dafjax.policies.SaveSaveable`).
        bits: Bits of a code: 1, 2, 3, 4 or 8. Residuals that enter gradients
            nonlinearly get twice as many, and so do residuals that are small beside the
            others. Alternatives are a preset: `"safe"` (4, 8), `"balanced"` (2, 4; the
            default) or `"tight"` (2, 2); bits by name, such as `{"attention*": 4}`; or
            `dafjax.Bits(...)`, which explains them. `"auto"`: as few as keep the noise
            of rounding at a tenth of that of the batch (`dafjax.BatchNoise`). A target
            (this, `dafjax.AverageBits(...)`, `dafjax.Budget(...)` or
            `dafjax.NoiseCeiling(...)`) allocates bits while the program runs: in a
            `dafjax.stores.PagePool` or, with other stores, by `dafjax.jit`.
            `None` turns dafjax off: `fun` is returned as it is, gradients included.
        store: Where packed residuals are stored. `None`: `dafjax.stores.Arrays()`.
        static_argnums: Positions of arguments that are not arrays, hashable.
        static_argnames: Names of keyword arguments that are not arrays, hashable.
        activation_argnums: Positions of arguments that nothing else keeps alive, such
            as the input of a block that is wrapped on its own. If the backward pass
            needs such an argument, the policy decides about it as about a value made
            inside.
        rematerialize: Whether the forward pass runs twice, as with `jax.checkpoint`,
            where that saves memory. The function is cut into segments at places that
            one value crosses, as between the blocks of a transformer. These values are
            stored in 8 bits. The backward pass recomputes one segment after another,
            stores its residuals in codes of `bits`, and uses them at once. In loops
            each iteration is recomputed. Recomputed values have the error of the 8
            bits: ReLU masks flip for values near 0. Segments with callbacks that read
            or write (`io_callback`) run once. Needs a store with fixed bits.
            `"exact"`: such segments without any codes, as `jax.checkpoint` of each
            would do it. Gradients have no noise; `bits`, `store` and `max_parts` have
            no effect.
        max_parts: Maximum number of batch chunks per stage of the backward pass. With n
            chunks, unpacked residuals and the values computed from them exist for 1/n
            of the batch at a time. Each chunk launches every operation again. `None`: 8
            on CPUs; on GPUs 1, or 4 if some residuals are in a page pool. One chunk
            takes as little memory on GPUs, because the kernels that read residuals
            unpack them. GPUs use at most 4 chunks, of 8 MiB or more each.
        without_passes: Names of rewrites that are left out, for experts who ask what
            one is worth. `dafjax.explain` lists them with their effect.
        seed: Seed of the rounding noise, an integer or a uint32 scalar, traced or not.
            The noise also depends on the values that are rounded. So a constant seed
            gives fresh noise in every step, and a step can be repeated exactly.
        prevent_cse: Accepted as in `jax.checkpoint`, where `False` leaves out barriers.
            It has no effect: without its barriers, dafjax saves no memory.
        concrete: Accepted as in `jax.checkpoint`, which takes only `False`. It has no
            effect.

    Returns:
        A function with the signature of `fun`.

    Raises:
        TypeError: An option or an argument of the function has a wrong type.
        ValueError: An option has a value outside its set.
        NotImplementedError: `rematerialize=True` with a store or `bits` that change at
            run time, or with a policy of `jax.checkpoint`; or `concrete=True`.

    Warns:
        UserWarning: A pattern of `bits` or `policy` matches no name in the function.

    Example:
        >>> import dafjax, jax, jax.numpy as jnp
        >>> def loss(w, x):
        ...     return jnp.mean(jnp.tanh(x @ w["in"]) @ w["out"])
        >>> w = {"in": jnp.ones((64, 256)), "out": jnp.ones((256, 1))}
        >>> x = jnp.ones((128, 64))
        >>> gradient = jax.grad(dafjax.remat_compress(loss, bits=2))(w, x)
        >>> gradient["in"].shape
        (64, 256)
    """
    if fun is None:
        return functools.partial(
            remat_compress,
            policy=policy,
            bits=bits,
            store=store,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            activation_argnums=activation_argnums,
            rematerialize=rematerialize,
            max_parts=max_parts,
            without_passes=without_passes,
            seed=seed,
            prevent_cse=prevent_cse,
            concrete=concrete,
        )
    if not callable(fun):
        raise TypeError(
            f"`remat_compress(fun)` must be given a function, but got `{fun!r}`. Wrap "
            "the function, then call the result: `remat_compress(f)(x)`."
        )
    checked_store = _checked_store(store)
    mode = _checked_mode(rematerialize)
    if isinstance(bits, str) and bits == AUTO:
        bits = BatchNoise()
    if isinstance(bits, TARGETS):
        checked_store = checked_store.allocate_for(bits)
        # These bits hold until others are allocated, and tell which uses need more.
        bits = Bits()
    _check_prevent_cse(prevent_cse)
    if _checked_flag("concrete", concrete):
        raise NotImplementedError(
            "`remat_compress(concrete=True)` is not supported, as in `jax.checkpoint`. "
            "Name arguments that are not arrays in `static_argnums` or "
            "`static_argnames`."
        )
    options = Options(
        own_policy=_checked_policy(policy),
        bits=Bits()
        if bits is None
        else as_bits(bits, "remat_compress(bits=...)", others=[AUTO]),
        store=checked_store,
        ties=Ties(),
        mode=mode,
        max_parts=_checked_max_parts(max_parts),
        left_out=_checked_passes(without_passes),
    )
    error = conflict(options)
    if error is not None:
        raise error
    if bits is None:
        return fun
    return _wrap(
        fun,
        options,
        static=StaticArguments(
            _checked_numbers("static_argnums", static_argnums),
            _checked_names(static_argnames),
        ),
        activation_argnums=_checked_numbers("activation_argnums", activation_argnums),
        seed=_checked_seed(seed),
    )


def _wrap(
    fun: Callable[..., Any],
    options: Options,
    *,
    static: StaticArguments,
    activation_argnums: tuple[int, ...],
    seed: np.uint32 | jax.Array,
) -> Callable[..., Any]:
    cache = _TraceCache(fun)
    parameters = positional_parameters(fun)
    wrap_alike = functools.partial(
        _wrap,
        options=options,
        static=StaticArguments((), ()),
        activation_argnums=(),
        seed=seed,
    )

    wrap_again = functools.partial(
        _wrap, fun, static=static, activation_argnums=activation_argnums, seed=seed
    )

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call = bind(fun, parameters, static, args, kwargs)
        leaves, structure = jax.tree.flatten((call.args, call.kwargs))
        stand_in = current_stand_in()
        if stand_in is not None:
            return stand_in(_of_leaves(fun, call.static, structure, leaves), leaves)
        outer = outer_mode()
        measurement, target = batch_measurement(), options.batch_noise
        if measurement is not None and measurement.has_begun:
            measurement = None
        if measurement is not None and outer is None and target is not None:
            arguments = find_examples(
                fun, args, kwargs, target.in_axes, option="BatchNoise"
            )
            exact, _ = choose(options, Mode.EXACT, options.bits)
            functions = wrap_again(options), wrap_again(exact)
            return measuring(*functions, arguments, measurement.ledger)
        wraps = current_wraps()
        chosen = _chosen(fun, options, current_choice(), is_outermost=outer is None)
        opens = wraps is not None and wraps.opens
        if chosen.mode is Mode.PLAIN or outer is Mode.PLAIN or opens:
            with contextlib.nullcontext() if opens else inside(Mode.PLAIN):
                return _of_leaves(fun, call.static, structure, leaves)(*leaves)
        activations = call.leaf_numbers(
            positions("activation_argnums", activation_argnums, args)
        )
        traced = cache.trace(chosen, call.static, structure, leaves, activations)
        operands = (*traced.consts, *leaves)
        if any(isinstance(operand, Tracer) for operand in operands):
            with explained_forward_mode(fun):
                results = traced.function(seed, *operands)
        else:
            # Nothing is differentiated, and skipping the derivative rule is faster.
            results = traced.evaluate(*operands)
        if wraps is not None and outer is None:
            wraps.found.append((wrap_alike, results))
        return jax.tree.unflatten(traced.out_structure, results)

    return wrapped


def _chosen(
    fun: Callable[..., Any],
    options: Options,
    choice: Choice | None,
    *,
    is_outermost: bool,
) -> Options:
    """Returns the options with those that `dafjax.jit` chose, if it did."""
    if choice is None:
        return options
    bits = options.bits if choice.bits is None else as_bits(choice.bits, "jit")
    chosen, excluded = choose(options, choice.mode, bits)
    if is_outermost:
        choice.count(getattr(fun, "__name__", repr(fun)), excluded=excluded)
    return chosen


@final
@dataclasses.dataclass(frozen=True, eq=False)
class _Traced:
    """A function traced at given shapes.

    Attributes:
        function: `function(seed, *consts, *leaves)`, with a derivative rule.
        evaluate: `evaluate(*consts, *leaves)`, without one.
        consts: Arrays that the function closes over.
        out_structure: Tree structure of its result.
    """

    function: Callable[..., list[Any]]
    evaluate: Callable[..., list[Any]]
    consts: tuple[Any, ...]
    out_structure: Any


@final
class _TraceCache:
    """Traces of one function, by static arguments, structure, shapes and dtypes.

    Like `jax.jit`, it assumes that the function is pure, and reads closed-over values
    once. A trace that closes over a traced value is valid only as long as that value,
    so it is not cached.
    """

    _MAX_ENTRIES = 64

    def __init__(self, fun: Callable[..., Any]) -> None:
        self._fun = fun
        self._entries: collections.OrderedDict[Any, _Traced] = collections.OrderedDict()

    def trace(
        self,
        options: Options,
        static: tuple[tuple[int | str, Hashable], ...],
        structure: Any,
        leaves: Sequence[Any],
        activations: tuple[int, ...],
    ) -> _Traced:
        key = (
            static,
            structure,
            tuple(jax.typeof(leaf) for leaf in leaves),
            activations,
            trace_context(),
        )
        traced = self._entries.get(key)
        if traced is None:
            traced = _trace(self._fun, options, static, structure, leaves, activations)
            if not any(isinstance(const, Tracer) for const in traced.consts):
                self._entries[key] = traced
                if len(self._entries) > self._MAX_ENTRIES:
                    self._entries.popitem(last=False)
        return traced


def _trace(
    fun: Callable[..., Any],
    options: Options,
    static: tuple[tuple[int | str, Hashable], ...],
    structure: Any,
    leaves: Sequence[Any],
    activations: tuple[int, ...],
) -> _Traced:
    flat = _of_leaves(fun, static, structure, leaves)
    with explained_concretization(_TRACED_FOR), inside(options.mode):
        closed, consts, out_structure = trace(flat, leaves)
    _warn_of_names_not_found(options, closed)
    with jax.disable_jit(False):
        function = with_compressed_residuals(
            closed, options, tuple(len(consts) + number for number in activations)
        )
    return _Traced(function, as_function(closed), consts, out_structure)


def _warn_of_names_not_found(options: Options, closed: ClosedJaxpr) -> None:
    patterns = {
        **dict.fromkeys(options.bits.patterns, "bits"),
        **dict.fromkeys(options.policy.patterns, "policy"),
    }
    if not patterns:
        return
    names = sorted(names_in(closed, with_primitives=False))
    listed = [*names, *names_in(closed, with_primitives=True)]
    for pattern, option in patterns.items():
        if not matches(pattern, listed):
            warnings.warn(
                f"`remat_compress({option}=...)`: no name in the function matches "
                f"{pattern!r}. There are {_some(names)}. Names are given by "
                "`jax.ad_checkpoint.checkpoint_name`, `jax.named_scope` and Flax.",
                stacklevel=2,
            )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_MOST_SHOWN]) or "none"
    return shown + (", ..." if len(names) > _MOST_SHOWN else "")


_MOST_SHOWN = 20


def _of_leaves(
    fun: Callable[..., Any],
    static: tuple[tuple[int | str, Hashable], ...],
    structure: Any,
    leaves: Sequence[Any],
) -> Callable[..., Any]:
    """Returns the function as a function of its leaves, named in errors of JAX.

    Args:
        fun: The function.
        static: Its static arguments.
        structure: The structure of the other arguments.
        leaves: Leaves of that structure.
    """

    def flat(*leaves: Any) -> Any:
        args, kwargs = jax.tree.unflatten(structure, leaves)
        with unwritten(fun, (args, kwargs)):
            return run(fun, static, args, kwargs)

    args, kwargs = jax.tree.unflatten(structure, leaves)
    # A static argument stands as `None`, which has no leaves and no name.
    absent = {place: None for place, _ in static if isinstance(place, str)}
    # JAX looks for this attribute before it describes `flat` itself.
    vars(flat)["__fun_debug_info__"] = debug_info(
        _TRACED_FOR, fun, args, {**kwargs, **absent}
    )
    return flat


_TRACED_FOR = "remat_compress"


def _checked_store(store: Any) -> AbstractStore:
    if store is None:
        return Arrays()
    if not isinstance(store, AbstractStore):
        raise TypeError(
            f"`remat_compress(store=...)` must be a store or `None`, but got "
            f"`{store!r}` of type `{type(store).__name__}`. Use "
            "`dafjax.stores.Arrays()`."
        )
    return store


def _checked_flag(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(
            f"`remat_compress({name}=...)` must be a bool, but got `{value!r}`."
        )
    return bool(value)


def _checked_policy(policy: Any) -> AbstractPolicy | None:
    return None if policy is None else as_policy(policy, "remat_compress(policy=...)")


def _checked_mode(value: Any) -> Mode:
    if isinstance(value, str) and value == "exact":
        return Mode.EXACT
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(
            '`remat_compress(rematerialize=...)` must be a bool or `"exact"`, but got '
            f"`{value!r}`."
        )
    return Mode.RERUN if value else Mode.CODES


def _check_prevent_cse(value: Any) -> None:
    several = value if isinstance(value, Sequence) else (value,)
    if not all(isinstance(prevents, (bool, np.bool_)) for prevents in several):
        raise TypeError(
            "`remat_compress(prevent_cse=...)` must be a bool or a sequence of bools, "
            f"but got `{value!r}`. It has no effect: leave it out."
        )


def _checked_passes(names: Any) -> tuple[str, ...]:
    argument = "remat_compress(without_passes=...)"
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise TypeError(
            f"`{argument}` must be a sequence of names, but got `{names!r}`. Use for "
            'example `["relu_mask"]`.'
        )
    for name in names:
        if name not in NAMES:
            raise ValueError(
                f"`{argument}` must hold names of passes, but got {name!r}. There are "
                f"{', '.join(NAMES)}."
            )
    return tuple(names)


def _checked_max_parts(value: Any) -> int | None:
    if value is None:
        return None
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_integer or value < 1:
        error = ValueError if is_integer else TypeError
        raise error(
            "`remat_compress(max_parts=...)` must be an integer from 1 (all at once) "
            f"on, or `None` for what suits the device, but got `{shown(value)}`."
        )
    return int(value)


def _checked_numbers(name: str, numbers: Any) -> tuple[int, ...]:
    several = (numbers,) if isinstance(numbers, (int, np.integer)) else numbers
    if not isinstance(several, Sequence) or not all(
        isinstance(n, (int, np.integer)) and not isinstance(n, bool) for n in several
    ):
        raise TypeError(
            f"`remat_compress({name}=...)` must be an int or a sequence of ints, "
            f"but got `{numbers!r}`."
        )
    return tuple(int(n) for n in several)


def _checked_names(names: Any) -> tuple[str, ...]:
    several = (names,) if isinstance(names, str) else names
    found = tuple(several) if isinstance(several, Iterable) else ()
    are_strings = all(isinstance(name, str) for name in found)
    if not are_strings or not isinstance(several, Iterable):
        raise TypeError(
            "`remat_compress(static_argnames=...)` must be a string or an iterable of "
            f"strings, but got `{names!r}`."
        )
    return found


def _checked_seed(seed: Any) -> np.uint32 | jax.Array:
    if isinstance(seed, (int, np.integer)) and not isinstance(seed, bool):
        return np.uint32(int(seed) % 2**32)
    is_array = isinstance(seed, (jax.Array, np.ndarray))
    if not is_array or seed.ndim != 0 or not jnp.issubdtype(seed.dtype, jnp.integer):
        raise TypeError(
            "`remat_compress(seed=...)` must be an integer or an integer scalar array, "
            f"but got `{seed!r}`. Of a random key take `jax.random.bits(key)`."
        )
    return jnp.asarray(seed).astype(jnp.uint32)
