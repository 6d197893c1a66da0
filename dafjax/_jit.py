"""`dafjax.jit`: like `jax.jit`, with options that fit into a limit of memory."""

import bisect
import dataclasses
import functools
import itertools
import math
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeAlias, final

import jax

from dafjax._contexts import Choice, Mode, choosing
from dafjax._memory.predict import predict_temp_nbytes
from dafjax._numbers import align, parse_nbytes, readable
from dafjax._step_memory import StepMemory, measure, nothing_is_wrapped
from dafjax._trace.paired import NotSeparableError
from dafjax._trace.tracing import is_tracing, trace_context


# At most so many programs are compiled for arguments of the same shapes.
_MOST_COMPILES = 3


# The modes and bits to try: the least noisy first, then the fastest.
_Kind: TypeAlias = tuple[Mode, int | None]
_KINDS: tuple[_Kind, ...] = (
    (Mode.PLAIN, None),
    (Mode.EXACT, None),
    *((mode, bits) for bits in (8, 4, 2) for mode in (Mode.CODES, Mode.RERUN)),
)


def jit(
    step: Callable[..., Any] | None = None, *, memory: int | str, **jit_options: Any
) -> Any:
    """Compiles a training step so that it fits into a limit of memory.

    Use it like `jax.jit`, on a whole training step that calls functions wrapped by
    `remat_compress`. It chooses their options `bits` and `rematerialize`: of the
    programs that fit, the one with the least noise, and of these the fastest. It tries,
    in this order: plain JAX; `rematerialize="exact"`; 8, 4 and 2 bits, each first
    without and then with `rematerialize=True`. For each of these it also chooses the
    number of microbatches of losses in `dafjax.accumulate(loss)`: the smallest that
    fits. The other options of `remat_compress` stay as they are. A wrapped function
    whose policy excludes `rematerialize` runs without it: with the same bits, or as in
    plain JAX in place of `"exact"`. The report names it.

    The limit covers the memory that the step holds while it runs: arguments, temporary
    arrays, and results that do not reuse donated arguments. Leave room for the rest of
    the process.

    A static model of XLA:CPU predicts which programs fit; the compiler's figure for the
    first program corrects its scale. The compiler's own figure decides. At most three
    programs are compiled for arguments of the same shapes.

    Args:
        step: The step, differentiation included.
        memory: The limit per device: bytes, or text such as `"512MiB"`, `"2GiB"` or
            `"1.5GB"`.
        **jit_options: Options of `jax.jit`.

    Returns:
        A `Jit`: a function with the signature of `step`.

    Raises:
        TypeError: `step` is not a function.
        ValueError: `memory` is not a number of bytes. When it is called: the step calls
            no function wrapped by `remat_compress`, or no program fits.

    Example:
        >>> import dafjax, jax, jax.numpy as jnp
        >>> @dafjax.remat_compress
        ... def loss(w, x):
        ...     for _ in range(8):
        ...         x = jnp.tanh(x @ w)
        ...     return jnp.mean(x)
        >>> step = dafjax.jit(jax.grad(loss), memory="8MiB")
        >>> step(jnp.ones((256, 256)), jnp.ones((1024, 256))).shape
        (256, 256)
        >>> step.report().memory.total_nbytes <= 8 * 2**20
        True
    """
    if step is None:
        return functools.partial(jit, memory=memory, **jit_options)
    if not callable(step):
        raise TypeError(f"`jit(step)` must be given a function, but got `{step!r}`.")
    return Jit(step, parse_nbytes("jit(memory=...)", memory), jit_options)


@final
@dataclasses.dataclass(frozen=True)
class TriedProgram:
    """A program that was considered.

    Attributes:
        options: The options of wrapped functions, as text.
        predicted_nbytes: Bytes of the whole step that the model predicts; `None` if
            nothing was predicted, because a program before fits.
        compiled: The compiler's figures, if it was compiled.
        others: The wrapped functions whose own options exclude these, with the options
            that they get instead, as text.
        is_skipped: Whether all functions are such: another program is the same.
    """

    options: str
    predicted_nbytes: int | None
    compiled: StepMemory | None
    others: tuple[tuple[str, str], ...] = ()
    is_skipped: bool = False


@final
@dataclasses.dataclass(frozen=True)
class JitReport:
    """What `dafjax.jit` chose for arguments of given shapes. Prints as a table.

    Attributes:
        limit_nbytes: The limit in bytes.
        options: The options of wrapped functions that were chosen, as text.
        memory: The memory of the chosen program.
        tried: All programs, the least noisy first.
        notes: Why programs were left out.
    """

    limit_nbytes: int
    options: str
    memory: StepMemory
    tried: tuple[TriedProgram, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("options", "predicted", "compiled", "")]
        for tried in self.tried:
            compiled = tried.compiled
            total = None if compiled is None else compiled.total_nbytes
            verdict = "" if total is None or total <= self.limit_nbytes else "too large"
            if tried.options == self.options:
                verdict = "chosen"
            if tried.is_skipped:
                verdict = "skipped"
            cells = map(_shown, (tried.predicted_nbytes, total))
            rows.append((tried.options, *cells, verdict))
        table = align(rows, right=range(1, 3))
        notes = (
            f"{tried.options}: `{name}` gets {options}, because of its policy"
            for tried in self.tried
            for name, options in tried.others
        )
        lines = f"limit {readable(self.limit_nbytes)}", table, *notes, *self.notes
        return "\n".join(lines)


def _shown(nbytes: int | None) -> str:
    return "-" if nbytes is None else readable(nbytes)


@final
class Jit:
    """The function that `dafjax.jit` returns."""

    def __init__(
        self, step: Callable[..., Any], limit_nbytes: int, options: Mapping[str, Any]
    ) -> None:
        functools.update_wrapper(self, step)
        self._step = step
        self._limit = limit_nbytes
        self._jitted: Any = jax.jit(step, **options)
        # Keyed by structure, shapes, dtypes and static arguments.
        self._programs: dict[Any, tuple[Choice, JitReport]] = {}
        self._last: JitReport | None = None
        self._lock = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step."""
        with choosing(self._choice(args, kwargs)), jax.disable_jit(False):
            return self._jitted(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Binds the step to an instance, where it is a method of a class."""
        return self if instance is None else types.MethodType(self, instance)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the program that is chosen for these arguments, as `jax.jit` does."""
        with choosing(self._choice(args, kwargs)):
            return self._jitted.lower(*args, **kwargs)

    def report(self) -> JitReport:
        """Returns the choice for the shapes of the last call, and its reasons.

        Raises:
            RuntimeError: The step was not called before.
        """
        if self._last is None:
            raise RuntimeError(
                "`report()` of a step of `dafjax.jit` says what was chosen for its "
                "arguments: call the step first, or its method `lower`."
            )
        return self._last

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A step of `dafjax.jit` cannot be copied or pickled: it owns compiled "
            "programs. Wrap the function with `dafjax.jit` again."
        )

    def __repr__(self) -> str:
        return f"<dafjax.jit of {self._step!r}, memory={readable(self._limit)!r}>"

    def _choice(self, args: Any, kwargs: Any) -> Choice:
        """Returns the options for some arguments; compiles if they are new."""
        name = getattr(self._step, "__name__", self._step)
        if is_tracing():
            raise ValueError(
                f"`{name!s}` was made by `dafjax.jit` and is called inside of "
                "`jax.jit`, `jax.grad` or another transformation, whose memory it "
                "cannot know. Put `dafjax.jit` round the whole step."
            )
        leaves, structure = jax.tree.flatten((args, kwargs))
        key = structure, tuple(map(_type_or_value, leaves)), trace_context()
        with self._lock:
            if key not in self._programs:
                search = _Search(str(name), self._jitted, self._limit, args, kwargs)
                self._programs[key] = search.run()
            choice, self._last = self._programs[key]
        return choice


def _type_or_value(leaf: Any) -> Any:
    try:
        return jax.typeof(leaf)
    except TypeError:
        return leaf


@final
class _Search:
    """Looks for the least noisy program that fits."""

    def __init__(
        self, name: str, jitted: Any, limit_nbytes: int, args: Any, kwargs: Any
    ) -> None:
        self._name = name
        self._jitted = jitted
        self._limit = limit_nbytes
        self._arguments = args, kwargs
        self._choices: dict[tuple[_Kind, int], Choice] = {}
        self._predicted: dict[Choice, int] = {}
        self._compiled: dict[Choice, StepMemory] = {}
        # Bytes of arguments and results; and the compiler's figure over the model's for
        # temporary arrays, plain and compressed.
        self._fixed = 0
        self._scale: dict[bool, float] = {}
        # Why the batch cannot be split, if it cannot.
        self._whole_only = ""

    def run(self) -> tuple[Choice, JitReport]:
        """Returns the options that were chosen, and why."""
        best: Choice | None = None
        for _ in range(_MOST_COMPILES):
            choice = self._next()
            if choice is None:
                break
            if self._compile(choice).total_nbytes <= self._limit:
                best = choice
        if best is None:
            raise self._too_little()
        numbers = sorted({number for _, number in self._choices})
        choices = (self._choices.get(key) for key in itertools.product(_KINDS, numbers))
        tried = [self._tried(choice) for choice in choices if choice is not None]
        seen = {kind for kind, _ in self._choices}
        tried += (
            TriedProgram(str(Choice(*kind)), None, None)
            for kind in _KINDS
            if kind not in seen
        )
        memory = self._compiled[best]
        notes = (self._whole_only,) if self._whole_only else ()
        report = JitReport(self._limit, str(best), memory, tuple(tried), notes)
        return best, report

    def _tried(self, choice: Choice) -> TriedProgram:
        return TriedProgram(
            str(choice),
            self._prediction(choice),
            self._compiled.get(choice),
            tuple(choice.others.items()),
            choice.is_excluded,
        )

    def _choice(self, kind: _Kind, number: int) -> Choice:
        key = kind, number
        if key not in self._choices:
            self._choices[key] = Choice(*kind, number)
        return self._choices[key]

    def _numbers(self) -> list[int]:
        """Returns the numbers of microbatches that divide all batches."""
        plain = self._choice(_KINDS[0], 1)
        self._predict(plain)
        splits = plain.batches and not self._whole_only
        size = math.gcd(*plain.batches) if splits else 1
        return [n for n in range(1, size + 1) if size % n == 0]

    def _fitting(self, kind: _Kind) -> Choice | None:
        """Returns the program of a kind with the fewest microbatches that fits."""
        choices = [self._choice(kind, number) for number in self._numbers()]

        def fits(choice: Choice) -> bool:
            return self._predict(choice) <= self._limit

        if fits(choices[0]):
            return choices[0]
        if not fits(choices[-1]):
            return None
        return choices[bisect.bisect_left(choices, True, key=fits)]

    def _next(self) -> Choice | None:
        """Returns the next program to compile; `None` if none less noisy may fit."""
        for kind in _KINDS:
            choice = self._fitting(kind)
            if choice is not None:
                # For a compiled program, `_predict` returns the compiler's figure.
                return None if choice in self._compiled else choice
        most = self._numbers()[-1]
        left = [self._choice(kind, most) for kind in _KINDS]
        left = [choice for choice in left if choice not in self._compiled]
        smallest = min(left, key=self._predict, default=None)
        found = [memory.total_nbytes for memory in self._compiled.values()]
        if smallest is None or self._predict(smallest) >= min(found, default=math.inf):
            return None
        return smallest

    def _predict(self, choice: Choice) -> float:
        """Returns the bytes that the whole step is predicted to need.

        Infinity if all functions get other options: another program is the same.
        """
        if choice not in self._predicted and not choice.is_excluded:
            args, kwargs = self._arguments
            try:
                with choosing(choice):
                    traced = self._jitted.trace(*args, **kwargs)
            except NotSeparableError as error:
                self._whole_only = str(error)
                return math.inf
            if not choice.num_calls and not choice.batches:
                raise nothing_is_wrapped("dafjax.jit", self._name)
            if choice.is_excluded:
                return math.inf
            self._fixed = self._fixed or _nbytes_of_arrays(traced)
            self._predicted[choice] = predict_temp_nbytes(traced.jaxpr)
        total = self._total(choice)
        return math.inf if total is None else total

    def _total(self, choice: Choice) -> int | None:
        """Returns the bytes of a program: the compiler's figure, or a prediction."""
        compiled = self._compiled.get(choice)
        return compiled.total_nbytes if compiled else self._prediction(choice)

    def _prediction(self, choice: Choice) -> int | None:
        predicted = self._predicted.get(choice)
        if predicted is None:
            return None
        scale = self._scale.get(choice.mode is Mode.PLAIN, 1.0)
        return self._fixed + math.ceil(scale * predicted)

    def _compile(self, choice: Choice) -> StepMemory:
        args, kwargs = self._arguments
        with choosing(choice):
            memory = measure(self._jitted.lower(*args, **kwargs), None)
        self._compiled[choice] = memory
        self._fixed = memory.total_nbytes - memory.temp_nbytes
        predicted = max(self._predicted[choice], 1)
        self._scale[choice.mode is Mode.PLAIN] = memory.temp_nbytes / predicted
        return memory

    def _too_little(self) -> ValueError:
        choice, least = min(
            self._compiled.items(), key=lambda item: item[1].total_nbytes
        )
        return ValueError(
            f"`dafjax.jit(memory=...)`: {readable(self._limit)} do not hold "
            f"`{self._name}`. The smallest program found needs "
            f"{readable(least.total_nbytes)}, with {choice}: arguments "
            f"{readable(least.argument_nbytes)}, temporary arrays "
            f"{readable(least.temp_nbytes)}, results {readable(least.output_nbytes)}, "
            f"of which {readable(least.donated_nbytes)} reuse donated arguments. "
            f"{self._others()}Raise the limit; donate arguments (`donate_argnums`); or "
            "take a smaller batch: `dafjax.fit_batch` finds the largest that fits."
        )

    def _others(self) -> str:
        """Says why smaller programs were left out, for an error."""
        whole_only = f"{self._whole_only} " if self._whole_only else ""
        names = dict.fromkeys(name for c in self._choices.values() for name in c.others)
        listed = ", ".join(f"`{name}`" for name in names)
        excluded = f"The policies of {listed} exclude `rematerialize`. "
        return whole_only + (excluded if names else "")


def _nbytes_of_arrays(traced: Any) -> int:
    """Returns the bytes of arguments, and of results that reuse none of them."""
    arguments = jax.tree.leaves(traced.args_info)
    results = jax.tree.leaves(traced.out_info)
    free = [(x.shape, x.dtype) for x in arguments if x.donated]
    nbytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in arguments)
    for result in results:
        kind = result.shape, result.dtype
        if kind in free:
            free.remove(kind)
        else:
            nbytes += math.prod(result.shape) * result.dtype.itemsize
    return nbytes
