"""Stores values that a norm reads at one scale, and stores the scale beside them.

Quantization groups would mix rows, heads or channels that a later norm keeps apart
(`extents.py`). So the forward pass makes a normalized copy of the value: it subtracts
the mean of each extent, if the norm does, and divides by about the root mean square.
The copy is stored in codes. The scale takes one byte for each extent, the mean two. The
value itself is recomputed from these.

Copies are float32 where the value is float64. A complex value has two, its real and its
imaginary part.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from dafjax._plan.extents import Extent
from dafjax._trace.equation import Equation, call_equation
from dafjax._trace.residuals import Program
from dafjax.codecs import Affine
from dafjax.policies import CODED_DTYPES


@final
@dataclasses.dataclass(frozen=True)
class Form:
    """How a value is stored: normalized, cut off, or both.

    Attributes:
        extents: The extents that have a scale of their own, the first one first.
        limit: The magnitude at which the value is cut off, because all its readers in
            the backward pass are constant beyond it. Infinite if it is not cut off.
    """

    extents: tuple[Extent, ...] = ()
    limit: float = math.inf


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Normalized:
    """One value and its normalized copy.

    Attributes:
        copies: The number of the copy. For a complex value, the numbers of two copies:
            of the real and of the imaginary part.
        statistics: The numbers of means and scales.
        equations: The equations that compute the copies and statistics.
        recompute: The equation that recomputes the value from these.
    """

    copies: tuple[int, ...]
    statistics: tuple[int, ...]
    equations: tuple[Equation, ...]
    recompute: Equation


def with_copies(
    program: Program, forms: Mapping[int, Form]
) -> tuple[Program, dict[int, Normalized]]:
    """Adds a normalized copy of each of some values.

    Args:
        program: The program.
        forms: The form of each of these values.

    Returns:
        The program with the copies, which only saturating functions read yet; and the
        copies, by the values that they stand for.
    """
    avals, tags = list(program.avals), dict(program.tags)
    producers = program.producers
    readers = {v: eqn for eqn in reversed(program.forward) for v in eqn.input_values}
    copies: dict[int, Normalized] = {}
    for value, form in forms.items():
        source = producers.get(value) or readers[value]
        copies[value] = _Normalizer(value, form, source, avals).run()
        tags.update((copy, tags.get(value, ())) for copy in copies[value].copies)
    of_arguments = (v for v in copies if v < program.num_arguments)
    forward = [eqn for v in of_arguments for eqn in copies[v].equations]
    # A saturating function has the same result for the copy, which is cut off. It reads
    # the copy, so that the value itself is no longer live.
    limited = [v for v, form in forms.items() if form.limit < math.inf]
    cut_off = {v: copies[v].copies[0] for v in limited}
    for eqn in program.forward:
        if eqn.rule.limit < math.inf:
            inputs = tuple(
                cut_off.get(a, a) if isinstance(a, int) else a for a in eqn.inputs
            )
            eqn = dataclasses.replace(eqn, inputs=inputs)
        forward.append(eqn)
        made = (copies[v] for v in eqn.outputs if v in copies)
        forward.extend(itertools.chain.from_iterable(m.equations for m in made))
    changed = dataclasses.replace(
        program, avals=tuple(avals), forward=tuple(forward), tags=tags
    )
    return changed, copies


def mixes(extent: Extent, shape: tuple[int, ...], codec: Affine) -> bool:
    """Returns whether a quantization group of an array holds parts of two extents."""
    rows, format = codec.rows_and_format(shape)
    columns = format.columns
    for _, stride in extent.kept_strides:
        if stride >= rows[-1]:
            continue
        if columns == 0 and stride % codec.block_size:
            return True
        if columns and stride >= columns and stride % (columns * codec.block_size):
            return True
    return False


def limit_in_codes(limit: float, bits: int) -> float:
    """Returns the cut-off magnitude whose next lower code is still at the limit."""
    steps = 2**bits - 1
    return limit * steps / (steps - 2) if steps > 2 else math.inf


@final
class _Normalizer:
    """Makes the equations that normalize one value, and the one that inverts them."""

    def __init__(
        self, value: int, form: Form, source: Equation, avals: list[Any]
    ) -> None:
        self._value, self._form, self._source, self._avals = value, form, source, avals
        self._dtype = jnp.dtype(avals[value].dtype)
        self._is_complex = jnp.issubdtype(self._dtype, jnp.complexfloating)
        self._take_parts = (lax.real, lax.imag) if self._is_complex else (_itself,)
        # The dtype for statistics and scaling.
        self._wide = jnp.float64 if jnp.finfo(self._dtype).bits == 64 else jnp.float32
        self._scales: list[_Scale] = []
        self._statistics: list[int] = []
        self._equations: list[Equation] = []

    def run(self) -> Normalized:
        """Adds the copies and statistics to the values of the program."""
        for extent in self._form.extents:
            self._add_scale(extent)
        copies = tuple(map(self._add_copy, self._take_parts))
        inputs = (*copies, *self._statistics)
        return Normalized(
            copies=copies,
            statistics=tuple(self._statistics),
            equations=tuple(self._equations),
            recompute=call_equation(
                self.scaled_back,
                [self._avals[v] for v in inputs],
                inputs,
                (self._value,),
                self._source,
            ),
        )

    def _add(self, function: Callable[..., jax.Array]) -> int:
        """Adds the value that a function computes of the value and its statistics."""
        inputs = (self._value, *self._statistics)
        output = len(self._avals)
        operands = [self._avals[v] for v in inputs]
        eqn = call_equation(function, operands, inputs, (output,), self._source)
        self._avals.append(eqn.jaxpr.outvars[0].aval)
        self._equations.append(eqn)
        return output

    def _add_scale(self, extent: Extent) -> None:
        place = len(self._statistics)

        def viewed(part: jax.Array, found: Sequence[jax.Array]) -> jax.Array:
            return lax.reshape(self._normalize(part, found), extent.view)

        def extent_mean(x: jax.Array, *found: jax.Array) -> jax.Array:
            return _mean(viewed(x, found), extent.reduced)

        if extent.is_centered and not self._is_complex:
            self._statistics.append(self._add(extent_mean))

        def extent_scale(x: jax.Array, *found: jax.Array) -> jax.Array:
            parts = [viewed(take(x), found[:place]) for take in self._take_parts]
            for mean in found[place:]:
                spread = lax.expand_dims(mean, extent.reduced).astype(self._wide)
                parts = [part - spread for part in parts]
            return _half_octaves(parts, extent.reduced)

        self._statistics.append(self._add(extent_scale))
        places = tuple(range(place, len(self._statistics)))
        self._scales.append(_Scale(extent, places))

    def _add_copy(self, take: Callable[[jax.Array], jax.Array]) -> int:
        dtype = self._dtype if self._dtype in CODED_DTYPES else jnp.float32

        def normalized(x: jax.Array, *found: jax.Array) -> jax.Array:
            return self._normalize(take(x), found).astype(dtype)

        return self._add(normalized)

    def _normalize(self, part: jax.Array, found: Sequence[jax.Array]) -> jax.Array:
        limit = self._form.limit
        part = jnp.clip(part.astype(self._wide), -limit, limit)
        for scale in self._scales:
            part = scale.divide(part, found)
        return part

    def scaled_back(self, *operands: jax.Array) -> jax.Array:
        """Returns the value, given its copies and statistics."""
        count = len(self._take_parts)
        parts, found = operands[:count], operands[count:]
        if self._is_complex:
            real, imaginary = (self._scale_back(part, found) for part in parts)
            return lax.complex(real, imaginary)
        (part,) = parts
        return self._scale_back(part, found).astype(self._dtype)

    def _scale_back(self, part: jax.Array, found: Sequence[jax.Array]) -> jax.Array:
        if not self._scales:
            return part
        scaled = part.astype(self._wide)
        for scale in reversed(self._scales):
            scaled = scale.multiply(scaled, found)
        # A code may decode to slightly more than the largest value of the dtype.
        most = jnp.finfo(self._dtype).max.astype(self._wide)
        return jnp.where(jnp.isfinite(part), jnp.clip(scaled, -most, most), scaled)


def _itself(x: jax.Array) -> jax.Array:
    return x


@final
@dataclasses.dataclass(frozen=True)
class _Scale:
    """The scale of each extent of an array.

    Attributes:
        extent: The extent.
        places: The indices of its statistics among all statistics: of a mean, if the
            extent is centered, and of a scale.
    """

    extent: Extent
    places: tuple[int, ...]

    def divide(self, x: jax.Array, statistics: Sequence[jax.Array]) -> jax.Array:
        """Returns an array less its mean, over its scale."""
        shape, (*means, half_octaves) = x.shape, self._spread(statistics, x.dtype)
        x = lax.reshape(x, self.extent.view)
        for mean in means:
            x = x - mean
        return lax.reshape(x * jnp.exp2(half_octaves * -0.5), shape)

    def multiply(self, x: jax.Array, statistics: Sequence[jax.Array]) -> jax.Array:
        """Inverts `divide`."""
        shape, (*means, half_octaves) = x.shape, self._spread(statistics, x.dtype)
        x = lax.reshape(x, self.extent.view) * jnp.exp2(half_octaves * 0.5)
        for mean in means:
            x = x + mean
        return lax.reshape(x, shape)

    def _spread(
        self, statistics: Sequence[jax.Array], dtype: Any
    ) -> Iterator[jax.Array]:
        for place in self.places:
            spread = lax.expand_dims(statistics[place], self.extent.reduced)
            yield spread.astype(dtype)


def _mean(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Returns the mean of the finite elements, 0 if it overflows."""
    mean = jnp.mean(jnp.where(jnp.isfinite(x), x, 0), axes).astype(jnp.bfloat16)
    return jnp.where(jnp.isfinite(mean), mean, 0)


def _half_octaves(parts: Sequence[jax.Array], axes: tuple[int, ...]) -> jax.Array:
    """Returns twice the logarithm of the scale of the finite elements, rounded.

    For float32, the scale is the root mean square, and the result is clipped to -128
    to 127. Clipping does no harm, because codes have ranges of their own. For float64,
    the scale is the largest magnitude, so that scaled values fit the range of float32.
    """
    finite = [jnp.where(jnp.isfinite(x), x, 0) for x in parts]
    info = jnp.finfo(finite[0].dtype)
    if info.bits == 64:
        largest = jnp.max(jnp.stack([jnp.max(jnp.abs(x), axes) for x in finite]), 0)
        logarithm = 2 * jnp.log2(jnp.maximum(largest, info.tiny))
        return jnp.round(logarithm).astype(jnp.int16)
    # Squares of finite numbers can overflow.
    squares = jnp.clip(jnp.mean(sum(x * x for x in finite), axes), info.tiny, info.max)
    return jnp.clip(jnp.round(jnp.log2(squares)), -128, 127).astype(jnp.int8)
