"""`accumulate`: the loss of a batch and its gradient, a microbatch at a time."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from dafjax._call import Arguments, find_examples, is_key, name_of_function
from dafjax._contexts import Transform, current_choice, listing_wraps
from dafjax._microbatches import Microbatches
from dafjax._numbers import Array, as_count
from dafjax._trace.examples import Examples, Kind, Status, follow_examples
from dafjax._trace.graph import Graph, flatten
from dafjax._trace.paired import NotSeparableError, pair
from dafjax._trace.residuals import is_differentiable
from dafjax._trace.tracing import ClosedJaxpr, trace


def accumulate(
    fun: Callable[..., Any],
    microbatches: int | Literal["auto"] = "auto",
    *,
    in_axes: Any = None,
) -> Callable[..., Any]:
    """Computes a loss and its gradient one microbatch after another.

    Use it on a loss, below `jax.grad`: `jax.grad(dafjax.accumulate(loss, 8))`. Values
    and gradients equal those of the whole batch, up to rounding, but only one
    microbatch is in memory at a time. To save more, wrap the loss by `remat_compress`
    first: `dafjax.accumulate(dafjax.remat_compress(loss), 8)`.

    The loss is a function of sums over the examples: a sum, a mean, a mean over the
    tokens that a mask keeps (the mask is summed over the whole batch first), a mean
    plus a penalty on the parameters. If the gradient depends on the sums in another
    way, as for the root of a mean, a first loop computes these sums. A loss that
    computes one example from others, as batch normalization and contrastive losses do,
    raises an error that names the line; so does one that dafjax cannot follow.

    Microbatch j of m holds the examples j, j + m, j + 2 m, and so on. Keys of random
    numbers that are arguments are folded with j, so that each microbatch draws numbers
    of its own. Gradients are added in float32 if they have fewer bits.

    Args:
        fun: The loss. It returns a scalar, or a scalar and auxiliary results, which are
            not differentiated. Auxiliary results with a part for each example are
            returned for the whole batch.
        microbatches: How many there are; it must divide the number of examples.
            `"auto"`: as many as `dafjax.jit` chooses, or 1 without it.
        in_axes: For each positional argument, the axis that holds the examples, or
            `None` if it holds none, as in `jax.vmap`; also a pytree of these. `None`:
            of the arguments after the first, those whose arrays, scalars and keys
            aside, have a first axis of one length. Keyword arguments are always treated
            in this way.

    Returns:
        A function with the signature of `fun`. Arguments that are no arrays, such as
        `True`, reach `fun` as they are.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: An argument has a value outside its set. When it is called: the
            microbatches do not divide the batch, or the loss is no function of sums
            over its examples.

    Example:
        >>> import dafjax, jax, jax.numpy as jnp
        >>> def loss(w, x, mask):
        ...     return jnp.sum(jnp.square(x @ w) * mask) / jnp.sum(mask)
        >>> w, x, mask = jnp.ones(3), jnp.ones((8, 3)), jnp.arange(8.0)
        >>> value, gradient = jax.value_and_grad(dafjax.accumulate(loss, 4))(w, x, mask)
        >>> jnp.allclose(gradient, jax.grad(loss)(w, x, mask)).item()
        True
    """
    if not callable(fun):
        raise TypeError(
            f"`accumulate(fun)` must be given a function, but got `{fun!r}`. Wrap the "
            "loss, then differentiate it: `jax.grad(accumulate(loss, 8))`."
        )
    count = _checked_count(microbatches)

    @functools.wraps(fun)
    def accumulated(*args: Any, **kwargs: Any) -> Any:
        choice = current_choice() if count is None else None
        number = count or (1 if choice is None else choice.microbatches)
        if number == 1 and choice is None:
            return fun(*args, **kwargs)
        arguments = find_examples(fun, args, kwargs, in_axes)
        if choice is not None:
            choice.batches.append(arguments.size)
        if number == 1:
            return fun(*args, **kwargs)
        _check_divides(number, arguments.size)
        return _run(fun, arguments, number)

    return accumulated


def _checked_count(microbatches: Any) -> int | None:
    """Returns the number of microbatches; `None` for `"auto"`."""
    if isinstance(microbatches, str) and microbatches == "auto":
        return None
    return as_count(
        "accumulate(microbatches=...)",
        microbatches,
        least=1,
        remedy='Use `"auto"` to leave it to `dafjax.jit`.',
    )


def _check_divides(number: int, size: int) -> None:
    if size % number:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        raise ValueError(
            f"`accumulate(microbatches={number})` must divide the number of examples, "
            f"{size}. Take one of {', '.join(map(str, divisors))}."
        )


def _run(fun: Callable[..., Any], arguments: Arguments, number: int) -> Any:
    """Returns the results of the function for the whole batch."""
    traces = _Traces(fun, arguments, number, opens=False)
    wraps = traces.wraps.of_scalars
    batch = None
    if not wraps:
        batch = traces.split(_unchanged)
        wraps = traces.wraps_of_mixed()
    if batch is None and wraps:
        # A wrapped function both sums over examples and goes on from the sums.
        traces = _Traces(fun, arguments, number, opens=True)
        batch = traces.split(wraps[0])
    if batch is None:
        raise _not_separable(fun, traces.reason)
    results = _with_gradients(batch)(*traces.consts, *arguments.arrays)
    return jax.tree.unflatten(traces.structure, results)


def _check_results(fun: Callable[..., Any], whole: ClosedJaxpr, structure: Any) -> None:
    """Raises if a function returns no scalar, nor a pair that begins with one."""
    results: Any = whole.out_avals
    parts = jax.tree_util.treedef_children(structure)
    is_pair = len(parts) == 2 and parts[0].num_leaves == 1
    if not (len(results) == 1 or is_pair) or results[0].shape != ():
        raise TypeError(
            f"`accumulate(fun)`: `{name_of_function(fun)}` must return a scalar, or a "
            "pair of a scalar and auxiliary results, but got "
            f"{jax.tree.unflatten(structure, results)!r}."
        )


def _is_same_const(const: Any, other: Any) -> bool:
    if const is other or isinstance(const, Tracer) or isinstance(other, Tracer):
        return const is other
    return const.shape == other.shape and np.array_equal(const, other)


def _of_arguments(arguments: Arguments, offset: int) -> list[Status]:
    return [
        _same(n, x) if axis is None else Status(Kind.ROWS, axis, 1)
        for n, (x, axis) in enumerate(
            zip(arguments.arrays, arguments.axes, strict=True), offset
        )
    ]


def _same(number: int, x: Any) -> Status:
    keys = frozenset([number]) if is_key(x) else frozenset[int]()
    return Status(Kind.SAME, keys=keys)


def _not_separable(fun: Callable[..., Any], reason: str) -> NotSeparableError:
    return NotSeparableError(
        f"`accumulate`: `{name_of_function(fun)}` cannot be computed in microbatches: "
        f"{reason}."
    )


@final
class _Traces:
    """Traces of a function: for the whole batch, and for fewer examples.

    Attributes:
        consts: The arrays that the function closes over.
        structure: The structure of its results.
        wraps: The wrapped functions that it calls.
        reason: Why it cannot be split.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        arguments: Arguments,
        number: int,
        *,
        opens: bool,
    ) -> None:
        self._fun = fun
        self._arguments = arguments
        self._part_size = arguments.size // number
        self._number = number
        self._opens = opens
        with listing_wraps(opens=opens) as self.wraps:
            whole, self.consts, self.structure = self._trace(arguments.size)
        _check_results(fun, whole, self.structure)
        self._whole = self._flat(whole)
        self._examples: Examples | None = None
        self.reason = ""

    def split(self, wrap: Transform) -> Microbatches | None:
        """Returns the function with its batch split; `None` if it cannot be.

        Args:
            wrap: Gives the part that runs in microbatches a derivative rule.
        """
        try:
            part = self._traced(self._part_size)
            self._examples = examples = self._follow(part)
            self.reason = _reason(examples)
            if self.reason:
                return None
            of_part, equations = pair(self._whole, examples.status, part)
        except NotSeparableError as error:
            self.reason = str(error)
            return None
        sizes = self._part_size, self._number
        return Microbatches(examples, of_part, equations, *sizes, wrap)

    def wraps_of_mixed(self) -> list[Transform]:
        """Returns how functions are wrapped that cannot stay whole."""
        if self._examples is None:
            return [wrap for wrap, _ in self.wraps.found]
        status = self._examples.status
        return [
            functools.partial(jax.checkpoint, policy=eqn.params["policy"])
            for eqn in self._whole.equations
            if "prevent_cse" in eqn.params
            and any(status[v].kind is Kind.MIXED for v in eqn.outputs)
        ]

    def _follow(self, part: Graph) -> Examples:
        """Follows the examples through the function."""
        size, other = self._arguments.size, self._part_size
        if other == 1:
            # A program of one example lacks what tells examples apart.
            other = 2 if size > 2 else 3
            part = self._traced(other)
        known = [_same(n, x) for n, x in enumerate(self.consts)]
        known += _of_arguments(self._arguments, len(known))
        return follow_examples(self._whole, part, known, (size, other))

    def _traced(self, size: int) -> Graph:
        """Returns the program for some number of examples."""
        try:
            with listing_wraps(opens=self._opens):
                closed, consts, _ = self._trace(size)
        except Exception as error:
            # It ran for the whole batch.
            raise NotSeparableError(
                f"for {size} examples it raises {type(error).__name__}: {error}"
            ) from error
        if len(consts) != len(self.consts) or not all(
            map(_is_same_const, consts, self.consts)
        ):
            raise NotSeparableError(
                "it closes over an array that depends on the number of examples: pass "
                "it as an argument"
            )
        return self._flat(closed)

    def _trace(self, size: int) -> tuple[ClosedJaxpr, tuple[Any, ...], Any]:
        return trace(self._arguments.apply(self._fun), self._arguments.avals(size))

    def _flat(self, closed: ClosedJaxpr) -> Graph:
        return flatten(closed, is_differentiated=False, opens_wrapped=self._opens)


def _unchanged(fun: Callable[..., Any]) -> Callable[..., Any]:
    return fun


def _reason(examples: Examples) -> str:
    """Returns why the function cannot be computed in microbatches, if it cannot."""
    for atom in examples.graph.outputs:
        status = examples.status_of(atom)
        if status.kind is Kind.MIXED:
            return status.reason
        if status.has_places:
            return "it returns the places of examples in the batch"
    read = examples.read_by_tail()
    if read.intersection(examples.made_with_rows()):
        return "a loop or a call returns parts for each example and a value for all"
    shared = examples.shared.union(*(examples.status_of(a).keys for a in read))
    if shared & examples.drawn:
        return (
            "a key draws numbers both for examples and for the batch as a whole: pass "
            "two keys"
        )
    return ""


def _with_gradients(batch: Microbatches) -> Callable[..., list[Array]]:
    """Returns a function of the arrays, whose forward pass computes its gradient."""

    @jax.custom_vjp
    def function(*inputs: Array) -> list[Array]:
        return batch.values(list(map(jnp.asarray, inputs)))

    def forward(*inputs: Any) -> tuple[list[Array], Any]:
        values = [jnp.asarray(x.value) for x in inputs]
        perturbed = [
            x.perturbed and is_differentiable(value)
            for x, value in zip(inputs, values, strict=True)
        ]
        results, gradients = batch.values_and_gradients(values, perturbed)
        return results, (gradients, len(inputs))

    def backward(saved: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        gradients, num_inputs = saved
        of_loss, *others = cotangents
        for cotangent in others:
            if not isinstance(cotangent, SymbolicZero):
                raise NotImplementedError(
                    "`accumulate`: only the first result, the loss, is differentiated, "
                    "but the gradient of an auxiliary result was asked for."
                )
        if isinstance(of_loss, SymbolicZero):
            return (None,) * num_inputs
        return tuple(
            gradients[n] * of_loss.astype(gradients[n].dtype)
            if n in gradients
            else None
            for n in range(num_inputs)
        )

    function.defvjp(forward, backward, symbolic_zeros=True)
    return function
