"""Max-pooling whose gradient reads stored argmax indices instead of searching.

The gradient of max-pooling goes to the maximum of each window. JAX searches the pooling
operand for it again. For this search the operand must be exact, so it would be stored
raw. Here the forward pass stores the argmax index, the place of the maximum in its
window, as exact bits: 2 bits for a window of 2 x 2, 4 bits for 3 x 3.

The operand is then often recomputed from codes, and the layer above needs the pooled
values. The maximum of values with rounding noise is too large. The element at the
stored index has no bias, as in `nonlinear.py`.

Equal elements, padding and NaN are treated as in JAX. The first of equal elements wins,
in row-major order. Padding counts as -infinity; it wins if it comes first and nothing
is larger. An element after a NaN always wins, so the argmax is the first maximum after
the last NaN, or a NaN that comes last.

The pooled value of a window with a NaN is NaN. (With jaxlib 0.10.2 on CPUs, it is the
maximum of the other elements in large float32 arrays.) So the forward pass also stores
which rows of the last axis have pooled values that are not finite, 1 bit per row. In
the other rows no pooled value is recomputed as NaN, even though codes of few bits
cannot tell -infinity from NaN.
"""

import dataclasses
import itertools
import math
from collections.abc import (
    Callable,
    Container,
    Iterator,
    Sequence,
)
from typing import final

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray

from dafjax import config
from dafjax._trace.equation import Constant, Equation, call_equation
from dafjax._trace.graph import operations_of
from dafjax._trace.residuals import Program, Recipe
from dafjax._trace.tracing import names_of_place
from dafjax.codecs import Bitmask
from dafjax.policies import AbstractPolicy, Compress, Residual, is_inexact


# For each comparison that keeps the element found before, the pooling that uses it.
_POOLINGS = {"ge": "reduce_window_max", "le": "reduce_window_min"}


@final
@dataclasses.dataclass(frozen=True)
class Windows:
    """The windows of a pooling, and the arithmetic of places in them.

    Attributes:
        shape: The shape of the pooling operand.
        lengths: The lengths of a window.
        strides: The distances between windows.
        padding: How many elements are added before and after.
        pooling: `"reduce_window_max"` or `"reduce_window_min"`.
    """

    shape: tuple[int, ...]
    lengths: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    pooling: str

    @property
    def num_bits(self) -> int:
        """Bits of an argmax index."""
        return (len(self._places()) - 1).bit_length()

    @property
    def _keeps(self) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """The comparison that keeps the first of two elements."""
        return lax.ge if self.pooling == "reduce_window_max" else lax.le

    def find_places(self, x: jax.Array) -> jax.Array:
        """Returns the argmax index of every window, `bool[num_bits, *pooled]`."""
        keeps = self._keeps
        elements = self._elements(x)
        best = next(elements)
        number = jnp.zeros(best.shape, jnp.uint8)
        for place, element in enumerate(elements, start=1):
            keep = keeps(best, element)
            best = lax.select(keep, best, element)
            number = lax.select(keep, number, lax.full_like(number, place))
        return jnp.stack(
            [(number >> bit) % 2 == 1 for bit in map(jnp.uint8, range(self.num_bits))]
        )

    def pick_places(self, bits: jax.Array, rows: jax.Array, x: jax.Array) -> jax.Array:
        """Returns the element of every window at its argmax index.

        Args:
            bits: The argmax indices, as from `find_places`.
            rows: The result of `find_rows`. A window in such a row is NaN if one of its
                elements is. In other rows, the maximum of the other elements replaces a
                NaN.
            x: The operand of the pooling.
        """
        keeps = self._keeps
        number = _number(bits)
        elements = self._elements(x)
        picked = best = next(elements)
        has_nan = picked != picked
        for place, element in enumerate(elements, start=1):
            is_nan = element != element
            picked = lax.select(number == jnp.uint8(place), element, picked)
            best = lax.select(keeps(best, element) | is_nan, best, element)
            has_nan |= is_nan
        finite = lax.select(picked == picked, picked, best)
        is_nan = jnp.expand_dims(rows, -1) & has_nan
        return lax.select(is_nan, lax.full_like(picked, jnp.nan), finite)

    def find_rows(self, pooled: jax.Array) -> jax.Array:
        """Returns which rows of the last axis have a value that is not finite."""
        return jnp.any(~jnp.isfinite(pooled), axis=-1)

    def scatter_to_places(self, bits: jax.Array, cotangent: jax.Array) -> jax.Array:
        """Adds the cotangent of every window to the element at its argmax index."""
        number = _number(bits)
        zero = jnp.zeros((), cotangent.dtype)
        total = jnp.zeros(self.shape, cotangent.dtype)
        # Later windows hold an element at earlier places. So this order adds windows
        # from first to last, as JAX does.
        for place, start in reversed(list(enumerate(self._places()))):
            part = lax.select(
                number == jnp.uint8(place), cotangent, lax.full_like(cotangent, 0)
            )
            edges = []
            for length, (before, _), at, stride, count in zip(
                self.shape, self.padding, start, self.strides, number.shape, strict=True
            ):
                low = at - before
                edges.append((low, length - low - (count - 1) * stride - 1, stride - 1))
            total += lax.pad(part, zero, edges)
        return total

    def _places(self) -> list[tuple[int, ...]]:
        return list(itertools.product(*map(range, self.lengths)))

    def _elements(self, x: jax.Array) -> Iterator[jax.Array]:
        """Yields the elements of all windows, place by place."""
        lowest = jnp.inf if self.pooling == "reduce_window_min" else -jnp.inf
        edges = [(before, after, 0) for before, after in self.padding]
        padded = lax.pad(x, jnp.asarray(lowest, x.dtype), edges)
        steps = [
            (length - window) // stride * stride
            for length, window, stride in zip(
                padded.shape, self.lengths, self.strides, strict=True
            )
        ]
        for start in self._places():
            limits = [at + step + 1 for at, step in zip(start, steps, strict=True)]
            yield lax.slice(padded, start, limits, self.strides)


def _number(bits: jax.Array) -> jax.Array:
    number = jnp.zeros(bits.shape[1:], jnp.uint8)
    for n in range(len(bits)):
        number |= bits[n].astype(jnp.uint8) << jnp.uint8(n)
    return number


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Pooling:
    """One pooling whose gradient searches for the maximum.

    Attributes:
        gradient: The equation of the backward pass that searches.
        operand: The pooling operand.
        cotangent: The cotangent of the pooled values.
        windows: The windows.
        value: The number of the argmax indices as a value of the program.
        places: Shape and dtype of the argmax indices as bits.
    """

    gradient: Equation
    operand: int
    cotangent: int
    windows: Windows
    value: int
    places: jax.ShapeDtypeStruct


def find_poolings(program: Program, activations: Container[int]) -> tuple[Pooling, ...]:
    """Returns the poolings whose gradient reads an operand that nothing keeps alive.

    Args:
        program: The function and its transpose.
        activations: Its arguments that nothing keeps alive for the backward pass.
    """
    residuals = set(program.residuals())
    found = []
    for eqn in program.backward:
        if eqn.primitive != "select_and_scatter_add":
            continue
        cotangent, operand = eqn.operand_atoms
        if isinstance(operand, Constant) or isinstance(cotangent, Constant):
            continue
        alive = operand < program.num_arguments and operand not in activations
        if operand not in residuals or cotangent in residuals or alive:
            continue
        windows = _windows(
            program, operand, eqn, _POOLINGS[eqn.params["select_prim"].name]
        )
        if windows.num_bits > 0 and math.prod(windows.lengths) <= config.MOST_PLACES:
            pooled = program.avals[cotangent].shape
            places = jax.ShapeDtypeStruct((windows.num_bits, *pooled), jnp.bool_)
            value = len(program.avals) + len(found)
            found.append(Pooling(eqn, operand, cotangent, windows, value, places))
    return tuple(found)


def note_places(
    program: Program,
    policy: AbstractPolicy,
    activations: Container[int],
    iterations: int,
) -> Program:
    """Rewrites poolings to store argmax indices, and gradients to scatter to them.

    The policy is asked first: only the poolings whose argmax indices it compresses
    exactly are rewritten.

    Args:
        program: The function and its transpose.
        policy: The policy.
        activations: Its arguments that nothing keeps alive for the backward pass.
        iterations: How often the program runs before its backward pass does.
    """
    decided = dict(program.decided)
    poolings = []
    for pooling in find_poolings(program, activations):
        decision = policy(_describe(program, pooling, iterations))
        if isinstance(decision, Compress) and not is_inexact(decision):
            poolings.append(pooling)
            decided[pooling.value] = decision
    avals = list(program.avals)
    forward, backward = list(program.forward), list(program.backward)

    def call(
        function: Callable[..., jax.Array],
        inputs: tuple[int, ...],
        output: int,
        in_place_of: Equation,
    ) -> Equation:
        operands = [avals[value] for value in inputs]
        return call_equation(function, operands, inputs, (output,), in_place_of)

    poolings_of: list[tuple[Pooling, Equation]] = []
    for pooling in poolings:
        operand, windows, gradient = pooling.operand, pooling.windows, pooling.gradient
        bits = pooling.value
        # The numbers skipped here belong to poolings that stay as they are.
        missing = 1 + bits - len(avals)
        avals.extend([ShapedArray(pooling.places.shape, jnp.bool_)] * missing)
        pooled = [eqn for eqn in forward if _pools(program, eqn, operand, windows)]
        poolings_of.extend((pooling, eqn) for eqn in pooled)
        found = call(
            windows.find_places, (operand,), bits, pooled[0] if pooled else gradient
        )
        # Before the pooling, so that both read one array, even across a barrier.
        forward.insert(_position(forward, pooled, operand), found)
        backward[backward.index(gradient)] = call(
            windows.scatter_to_places,
            (bits, pooling.cotangent),
            gradient.outputs[0],
            gradient,
        )
    recipes = dict(program.recipes)
    for pooling, eqn in poolings_of:
        (value,) = eqn.outputs
        rows = len(avals)
        avals.append(ShapedArray(avals[value].shape[:-1], jnp.bool_))
        decided[rows] = Compress(Bitmask())
        windows = pooling.windows
        found = call(windows.find_rows, (value,), rows, eqn)
        forward.insert(forward.index(eqn) + 1, found)
        inputs = (pooling.value, rows, pooling.operand)
        pick = call(windows.pick_places, inputs, value, eqn)
        recipes[value] = Recipe(pick, needs=pooling.value)
    return dataclasses.replace(
        program,
        avals=tuple(avals),
        forward=tuple(forward),
        backward=tuple(backward),
        recipes=recipes,
        decided=decided,
    )


def _describe(program: Program, pooling: Pooling, iterations: int) -> Residual:
    """Returns the argmax indices of a pooling as policies see them."""
    return Residual(
        shape=pooling.places.shape,
        dtype=pooling.places.dtype,
        primitive=pooling.gradient.primitive,
        reduced_from=0,
        known=False,
        sources=0,
        steers=False,
        copies=iterations,
        names=names_of_place(pooling.gradient.place),
        program=program.fingerprint,
        number=pooling.value,
        # A policy that saves all pooled values leaves the search to JAX.
        operations=operations_of(pooling.gradient),
    )


def _pools(program: Program, eqn: Equation, operand: int, windows: Windows) -> bool:
    return (
        eqn.primitive == windows.pooling
        and eqn.input_values == (operand,)
        and not any(step != 1 for step in _dilations(eqn))
        and _windows(program, operand, eqn, eqn.primitive) == windows
    )


def _dilations(eqn: Equation) -> tuple[int, ...]:
    return (*eqn.params["base_dilation"], *eqn.params["window_dilation"])


def _windows(program: Program, operand: int, eqn: Equation, pooling: str) -> Windows:
    return Windows(
        shape=tuple(program.avals[operand].shape),
        lengths=tuple(eqn.params["window_dimensions"]),
        strides=tuple(eqn.params["window_strides"]),
        padding=tuple((low, high) for low, high in eqn.params["padding"]),
        pooling=pooling,
    )


def _position(
    forward: Sequence[Equation], pooled: Sequence[Equation], operand: int
) -> int:
    if pooled:
        return forward.index(pooled[0])
    made = [now for now, eqn in enumerate(forward) if operand in eqn.outputs]
    return made[0] + 1 if made else 0
