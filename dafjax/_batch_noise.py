"""Measures the noise of a batch: the variance of its gradient as a sample.

A batch of examples is drawn at random, so its gradient is a noisy sample of the
gradient of all examples. Two halves of the batch tell how noisy it is. Let `g1` and
`g2` be the parts of the halves in the gradient `g = g1 + g2`. They are independent, so

    variance of g = E |g - E[g]|^2 = E |g1 - g2|^2.

The part of a half is its own gradient for a loss that is a sum over the examples, and
half of that for a mean. Values tell which of the two a loss is.

Gradients of the halves are exact. Only the norm of a difference is needed, so each
array is reduced to a sketch as soon as it is computed: sums of its elements with random
signs, whose norm is right on average (Charikar, Chen and Farach-Colton 2002).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from dafjax._call import Arguments, folded, is_key, name_of_function
from dafjax._contexts import BatchMeasurement, measuring_batches
from dafjax._native import hold, ledger_note
from dafjax._numbers import Array
from dafjax._sensitivity.importance import units_of_variance
from dafjax._trace.residuals import (
    instantiate,
    is_differentiable,
    is_perturbed,
    primal_of,
    vjp_of_perturbed,
)
from dafjax._trace.tracing import ClosedJaxpr, as_function, trace


# Numbers of a sketch: with 256 the squared norm of a single array is off by 9 %.
_SKETCH = 256


def measuring(
    fun: Callable[..., Any],
    exact: Callable[..., Any],
    arguments: Arguments,
    ledger: int,
) -> Any:
    """Calls a function whose backward pass also measures the noise of the batch.

    Args:
        fun: The wrapped function.
        exact: The same function, with exact gradients.
        arguments: The arguments of the call, with the axes that hold examples.
        ledger: Hash of the name of the ledger that the variance is added to.
    """
    size = arguments.size // 2
    if size == 0:
        raise ValueError(
            f'`remat_compress(bits="auto")`: `{name_of_function(fun)}` is called with '
            "one example, but the noise of a batch is measured in its halves. Give two "
            "examples or more, or say with `dafjax.BatchNoise(in_axes=...)` which axes "
            "hold the examples."
        )
    with measuring_batches(BatchMeasurement(ledger, has_begun=True)):
        avals = arguments.avals(arguments.size)
        whole, consts, structure = trace(arguments.apply(fun), avals)
    half, others, _ = _traced_half(fun, arguments.apply(exact), arguments.avals(size))
    axes = [None] * len(consts) + list(arguments.axes)
    if len(others) != len(consts):
        raise _not_halved(fun, "it closes over another number of arrays")
    halves = _Halves(half, tuple(axes), size)
    run = _with_measurement(whole, halves, ledger)
    return jax.tree.unflatten(structure, run(*consts, *arguments.arrays))


def _traced_half(
    fun: Callable[..., Any], of_arrays: Callable[..., Any], avals: Sequence[Any]
) -> Any:
    try:
        return trace(of_arrays, avals)
    except Exception as error:
        raise _not_halved(fun, f"{type(error).__name__}: {error}") from error


def _not_halved(fun: Callable[..., Any], reason: str) -> ValueError:
    return ValueError(
        f'`remat_compress(bits="auto")`: the noise of a batch is measured in its '
        f"halves, but `{name_of_function(fun)}` does not run on half of the examples: "
        f"{reason}. Say with `dafjax.BatchNoise(in_axes=...)` which axes hold "
        "examples, or give `bits` as a number."
    )


@final
@dataclasses.dataclass(frozen=True, eq=False)
class _Halves:
    """A function for half of a batch.

    Attributes:
        program: The function.
        axes: For each argument, the axis that holds the examples, if one does.
        size: How many examples a half has.
    """

    program: ClosedJaxpr
    axes: tuple[int | None, ...]
    size: int

    def variance(
        self,
        gradients: Mapping[int, Array],
        values: Sequence[Any],
        results: Sequence[Array],
        cotangents: Mapping[int, Any],
    ) -> Array:
        """Returns the variance of a gradient of the whole batch, float32.

        It is the sum over all elements, each in the unit of `units_of_variance`.

        Args:
            gradients: The gradient by argument. None of them holds examples.
            values: All arguments.
            results: The results for the whole batch.
            cotangents: The cotangents of those that have one, by result.
        """
        function = as_function(self.program)
        shapes = [aval.shape for aval in self.program.out_avals]
        numbers = jnp.arange(2, dtype=jnp.uint32)
        # Results of all examples together, such as a loss, whose gradient is asked for.
        summed = [
            n
            for n, cotangent in cotangents.items()
            if results[n].shape == shapes[n] and not isinstance(cotangent, SymbolicZero)
        ]

        def values_of(number: Array) -> list[Array]:
            found = function(*self._inputs(values, number))
            return [found[n] for n in summed]

        parts = {n: instantiate(x) for n, x in cotangents.items()}
        for n, (first, second) in zip(summed, lax.map(values_of, numbers), strict=True):
            parts[n] *= _share(results[n], first + second)

        def gradient_of(number: Array) -> list[Array]:
            given = self._inputs(values, number)
            wanted = [n in gradients for n in range(len(given))]
            has_part = [n in parts for n in range(len(shapes))]
            _, pull = vjp_of_perturbed(function, given, wanted, has_part)
            found = pull([_half_of(x, shapes[n], number) for n, x in parts.items()])
            return list(map(_sketch, found))

        sketches = lax.map(gradient_of, numbers)
        variances = [jnp.sum((x[0] - x[1]) ** 2) for x in sketches]
        energies = [jnp.sum(jnp.square(jnp.abs(x))) for x in gradients.values()]
        units = units_of_variance(
            jnp.stack(energies).astype(jnp.float32),
            [x.size for x in gradients.values()],
        )
        return jnp.sum(jnp.stack(variances) / units)

    def _inputs(self, values: Sequence[Any], number: Array) -> list[Any]:
        pairs = zip(values, self.axes, strict=True)
        return [_half(x, axis, number, self.size) for x, axis in pairs]


def _with_measurement(
    whole: ClosedJaxpr, halves: _Halves, ledger: int
) -> Callable[..., list[Any]]:
    """Returns a function of arrays, with a backward pass that measures.

    Args:
        whole: The function for the whole batch.
        halves: The function for halves of it.
        ledger: As in `measuring`.
    """
    run = as_function(whole)
    differentiable = list(map(is_differentiable, whole.out_avals))

    @jax.custom_vjp
    def function(*inputs: Array) -> list[Any]:
        return run(*inputs)

    def forward(*inputs: Any) -> tuple[list[Any], Any]:
        values = list(map(primal_of, inputs))
        perturbed = list(map(is_perturbed, inputs))
        results, pull = vjp_of_perturbed(run, values, perturbed, differentiable)
        # The keys of a dictionary are not traced.
        moving = dict.fromkeys(n for n, moves in enumerate(perturbed) if moves)
        return results, (pull, moving, values, results)

    def backward(saved: Any, all_cotangents: Sequence[Any]) -> tuple[Any, ...]:
        pull, moving, values, results = saved
        pairs = enumerate(all_cotangents)
        cotangents = {n: x for n, x in pairs if differentiable[n]}
        gradients = pull(list(map(instantiate, cotangents.values())))
        gradients = dict(zip(moving, gradients, strict=True))
        shared = {n: x for n, x in gradients.items() if halves.axes[n] is None}
        if shared:
            variance = halves.variance(shared, values, results, cotangents)
            done = ledger_note(variance[None], ledger=ledger, sites=(), facts=())
            least = min(shared, key=lambda number: shared[number].size)
            (gradients[least],) = hold(gradients[least], after=[done])
        return tuple(gradients.get(number) for number in range(len(values)))

    function.defvjp(forward, backward, symbolic_zeros=True)
    return function


def _half(x: Any, axis: int | None, number: Array, size: int) -> Any:
    """Returns an argument for a half of the batch: every other example.

    Keys of random numbers are folded, so that the halves draw numbers of their own.
    """
    if axis is None:
        return folded(x, number) if is_key(x) else x
    return _every_other(x, axis, number, size)


def _half_of(cotangent: Any, shape: Sequence[int], number: Array) -> Any:
    """Returns the cotangent of a result for a half, where the result has that shape."""
    lengths = zip(cotangent.shape, shape, strict=True)
    axis = next((n for n, (whole, part) in enumerate(lengths) if whole != part), None)
    if axis is None:
        return cotangent
    return _every_other(cotangent, axis, number, shape[axis])


def _share(whole: Array, total: Array) -> Array:
    """Returns 1 if a result is the sum of two halves, 1/2 if it is the mean.

    If the halves draw other numbers, neither is exact, and the mean is more likely.
    """
    of_sum = jnp.sum(jnp.abs(whole - total))
    of_mean = jnp.sum(jnp.abs(whole - total / 2))
    return jnp.where(4 * of_sum < of_mean, 1, 0.5).astype(whole.dtype)


def _every_other(x: Array, axis: int, number: Array, size: int) -> Array:
    """Returns `size` rows: `number`, `number + 2` and so on."""
    even = lax.slice_in_dim(x, 0, 2 * size, axis=axis)
    shape = [*x.shape[:axis], size, 2, *x.shape[axis + 1 :]]
    return lax.dynamic_index_in_dim(
        even.reshape(shape), number, axis + 1, keepdims=False
    )


def _sketch(x: Array) -> Array:
    """Returns a few numbers, which have an array's squared norm on average."""
    parts = [x.real, x.imag] if jnp.iscomplexobj(x) else [x]
    flat = jnp.concatenate([part.astype(jnp.float32).ravel() for part in parts])
    count = min(_SKETCH, max(flat.size, 1))
    bits = lax.iota(jnp.uint32, flat.size) * jnp.uint32(0x9E3779B1)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x85EBCA77)
    signed = jnp.where(bits >> 31, flat, -flat)
    rows = lax.pad(signed, np.float32(0), [(0, -flat.size % count, 0)])
    return jnp.sum(rows.reshape(-1, count), axis=0)
