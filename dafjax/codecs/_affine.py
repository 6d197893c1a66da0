"""Affine codes: a few bits per element, one scale per group.

Also an estimate of the rounding noise of an array, from the values in its groups.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any, Literal, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dafjax._native import (
    Format,
    pack_affine_and_sum,
    pack_affine_salted,
    unpack_affine,
    unpack_affine_fused,
)
from dafjax._native._format import BITS, BLOCK_SIZES, num_positions
from dafjax._numbers import Array, Like, shown
from dafjax._sampling import with_auto_axes
from dafjax.codecs._abstract import (
    AbstractCodec,
    from_rows,
    is_divided_by_type,
    rows_of,
    rows_of_groups,
    splits,
    to_rows,
)


_DTYPES = ("float32", "bfloat16", "float16")
# The valid values of each argument of `Affine`, and a remedy.
_CHOICES: dict[str, tuple[tuple[object, ...], str]] = {
    "bits": (BITS, "For exact residuals use the policy `SaveAll()`."),
    "block_size": (
        BLOCK_SIZES,
        "Smaller blocks are more accurate, for 32 / block_size bits an element.",
    ),
    "rounding": (
        ("stochastic", "dithered", "nearest"),
        "Stochastic and dithered rounding keep gradients unbiased.",
    ),
    "blocks": (("rows", "columns"), "Blocks of columns suit channels that differ."),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedAffine:
    """The result of `Affine.encode` for rows `[m, n]`, or for one row `[n]`.

    The shapes below are for `blocks="rows"`; `xla_ffi/README.md`, section 4, has the
    shapes for `blocks="columns"`.

    Attributes:
        codes: uint16 `[m, ceil(n / 512) * 32 * bits]`, bit planes of the codes.
        scale: bfloat16 `[m, ceil(n / block_size)]`, the step between codes. The sign
            bit marks a quantization group that holds infinities or NaN.
        minimum: bfloat16 `[m, ceil(n / block_size)]`, the value of code 0.
        seeds: uint32 `[m]`, seeds of the noise that `decode` subtracts. `None` unless
            rounding is dithered.
    """

    codes: Array
    scale: Array
    minimum: Array
    seeds: Array | None = None


@final
@dataclasses.dataclass(frozen=True)
class Affine(AbstractCodec):
    """Stores floating-point arrays as codes of 1 to 8 bits.

    Each index of the first dimension (in small arrays: several together) is flattened
    to a row. A row is cut into quantization groups ("blocks") of `block_size` elements.
    With `lo` and `hi` the least and greatest finite value of a group,

        minimum = lo rounded down to bfloat16
        scale   = (hi - minimum) / (2^bits - 1) rounded up to bfloat16
        code    = round((x - minimum) / scale)
        x'      = minimum + scale * code

    Stochastic rounding rounds up with a probability equal to the fraction. So the mean
    of `x'` is `x` (to 2^-(16 - bits) of a step), and the error is below one step.
    Nearest rounding has an error of at most half a step, and a bias. Zeros stay exactly
    zero in a group whose least value is zero.

    Dithered rounding has an error of at most half a step and no bias: it rounds
    stochastically, and `decode` draws the same noise again and subtracts it. The error
    variance is a twelfth of a squared step for every value; stochastic rounding has a
    sixth on average (Schuchman, 1964, "Dither signals and their effect on quantization
    noise"). Decoded values can lie half a step outside the range of their group, and
    zeros do not stay exactly zero. Each row takes four more bytes. A page pool can drop
    bits of a code, so it rounds stochastically instead.

    NaN and infinities survive with three bits or more; with fewer they become NaN.
    float32 subnormals count as zero.

    The code is the random quantization of ActNN (Chen et al., 2021, arXiv:2104.14129);
    the exact arithmetic and the packed layout are in `xla_ffi/README.md`. The noise is
    a function of the seed and the content, so equal inputs give equal codes.

    An element costs `bits + 32 / block_size` bits.

    With `blocks="columns"` a group is `block_size` values of one channel; a channel is
    an index of the last axis. This is more accurate by a few decibels if channels
    differ in mean or scale, as they do after convolutions and matrix products
    (`benchmarks/block_layout.py`). An array of `rows` rows is padded to a multiple of
    16 rows and has a scale and a minimum for each channel. An element then costs about
    `bits * ceil(rows / 16) * 16 / rows + 32 / min(rows, block_size)` bits. If the
    number of channels is not a multiple of 32, several rows count as one, so that it
    is. If one example has fewer than 64 such rows, all examples are packed as one
    array, which devices cannot divide. If all examples together have fewer than 64, or
    if the array has fewer than two dimensions, it is packed as with `blocks="rows"`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from dafjax.codecs import Affine
        >>> codec = Affine(bits=4)
        >>> x = jnp.linspace(-1.0, 1.0, 1000)
        >>> like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        >>> codec.packed_nbytes(like)
        528
        >>> bool(jnp.max(jnp.abs(codec.decode(codec.encode(x), like) - x)) < 0.04)
        True

    Args:
        bits: Bits of a code: 1, 2, 3, 4 or 8.
        block_size: Elements that share a scale: 64, 128, 256, 512 or 1024.
        rounding: `"stochastic"`, `"dithered"` or `"nearest"`.
        blocks: `"rows"` for groups of consecutive elements, or `"columns"` for groups
            of values of one channel.

    Raises:
        ValueError: An argument is not one of these.
    """

    bits: int = 2
    block_size: int = 256
    rounding: Literal["stochastic", "dithered", "nearest"] = "stochastic"
    blocks: Literal["rows", "columns"] = "rows"

    def __post_init__(self) -> None:
        for name, (choices, remedy) in _CHOICES.items():
            _check_choice(name, getattr(self, name), choices, remedy)
        # NumPy integers can overflow; Python integers cannot.
        object.__setattr__(self, "bits", int(self.bits))
        object.__setattr__(self, "block_size", int(self.block_size))

    def __str__(self) -> str:
        rounding = "" if self.rounding == "stochastic" else f", {self.rounding}"
        return f"{self.bits} bits, {self.blocks} of {self.block_size}{rounding}"

    @property
    def is_exact(self) -> bool:
        return False

    @property
    def is_dithered(self) -> bool:
        """Whether decoding subtracts the rounding noise."""
        return self.rounding == "dithered"

    def encode(self, x: Array, *, seed: int | Array = 0) -> PackedAffine:
        return self.encode_salted(x, seed=seed, salt=0)

    def encode_salted(self, x: Array, *, seed: int | Array, salt: int) -> PackedAffine:
        packed, *_ = self._packed(pack_affine_salted, x, seed, salt)
        return packed

    def sums_columns(self, like: Like) -> bool:
        _, format = self.rows_and_format(like.shape)
        return format.columns > 0 and like.dtype == jnp.float32

    def encode_and_sum(
        self, x: Array, *, seed: int | Array = 0, salt: int = 0
    ) -> tuple[PackedAffine, Array, Array]:
        if not self.sums_columns(jax.ShapeDtypeStruct(x.shape, x.dtype)):
            return super().encode_and_sum(x, seed=seed, salt=salt)
        packed, total, of_squares = self._packed(pack_affine_and_sum, x, seed, salt)
        return packed, total, of_squares

    def _packed(
        self,
        pack: Callable[..., tuple[Array, ...]],
        x: Array,
        seed: int | Array,
        salt: int,
    ) -> tuple[Any, ...]:
        """Returns the packed array, and what else `pack` returns."""
        self.check(jax.ShapeDtypeStruct(x.shape, x.dtype))
        rows, format = self.rows_and_format(x.shape)
        results = pack(to_rows(x, rows), as_seed(seed), format=format, salt=salt)
        num_packed = 4 if self.is_dithered else 3
        return PackedAffine(*results[:num_packed]), *results[num_packed:]

    def decode(
        self, packed: PackedAffine, like: Like, *, after: tuple[Array, ...] = ()
    ) -> Array:
        return from_rows(self._unpacked(unpack_affine, packed, like, after), like)

    def decode_fused(
        self, packed: PackedAffine, like: Like, *, after: tuple[Array, ...] = ()
    ) -> Array:
        if is_divided_by_type(like, jax.typeof(packed.codes)):
            return self.decode(packed, like, after=after)
        unpack = functools.partial(unpack_affine_fused, shape=tuple(like.shape))
        return self._unpacked(unpack, packed, like, after)

    def _unpacked(
        self,
        unpack: Callable[..., Array],
        packed: PackedAffine,
        like: Like,
        after: tuple[Array, ...],
    ) -> Array:
        self.check(like)
        rows, format = self.rows_and_format(like.shape)
        # A codec with another rounding may have packed it.
        format = dataclasses.replace(format, dithered=packed.seeds is not None)
        return unpack(
            packed.codes,
            packed.scale,
            packed.minimum,
            *after,
            seeds=packed.seeds,
            size=rows[-1],
            dtype=like.dtype,
            format=format,
        )

    def packs_rows(self, like: Like) -> bool:
        rows, _ = self.rows_and_format(like.shape)
        return len(rows) > 1 and rows[0] == like.shape[0]

    def packs_parts(self, like: Like, count: int) -> bool:
        return splits(self.rows_and_format, tuple(like.shape), count)

    def packed_nbytes(self, like: Like) -> int:
        self.check(like)
        (*count, size), format = self.rows_and_format(like.shape)
        nbytes = 2 * format.num_words(size) + 4 * format.num_blocks(size)
        return math.prod(count) * (nbytes + 4 * self.is_dithered)

    def has_full_columns(self, shape: tuple[int, ...]) -> bool:
        """Returns whether an array's per-channel groups are full enough to pay.

        A scale and a minimum per 64 values cost three eighths of a bit more per element
        than per 256 values. Per-channel groups gain 2 to 3 dB, which on average about
        offsets this cost, and much more for the keys of attention: in a RoBERTa with 64
        tokens, at 2 bits on average, the gradients of the adapters of queries have a
        half (first factor) and a fourth (second factor) of the noise.
        """
        if len(shape) < 2:
            return False
        return num_positions(rows_of(shape)[-1], shape[-1]) >= min(BLOCK_SIZES)

    def rows_and_format(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], Format]:
        """Returns the shape of an array as rows, and the format of a row."""
        rows, columns = rows_of(shape), 0
        if self.blocks == "columns" and len(shape) > 1:
            for candidate in (rows, rows_of_groups(shape, self.block_size)):
                if num_positions(candidate[-1], shape[-1]) >= min(BLOCK_SIZES):
                    rows, columns = candidate, shape[-1]
                    break
        return rows, Format(
            self.bits,
            self.block_size,
            columns,
            stochastic=self.rounding != "nearest",
            dithered=self.is_dithered,
        )

    def check(self, like: Like) -> None:
        name = like.dtype.name
        if name not in _DTYPES:
            raise TypeError(
                f"`Affine` packs arrays of {', '.join(_DTYPES)}, but got `{name}`. "
                "Keep such a residual exact with the decision `Save()`, or cast it to "
                "float32 first; booleans go with `dafjax.codecs.Bitmask()`."
            )


def _check_choice(
    name: str, value: object, choices: tuple[object, ...], remedy: str
) -> None:
    # `True` and 1.0 equal 1, but are not valid numbers of bits.
    is_of_kind = isinstance(value, (int, np.integer, str))
    if not is_of_kind or isinstance(value, bool) or value not in choices:
        raise ValueError(
            f"`Affine({name}=...)` must be one of {choices}, but got {shown(value)}. "
            f"{remedy}"
        )


def as_seed(seed: int | Array) -> Array:
    """Returns a seed as a uint32 scalar."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        dtype, shape = getattr(seed, "dtype", None), getattr(seed, "shape", None)
        if dtype != jnp.uint32 or shape != ():
            kind = type(seed).__name__
            if dtype is not None and shape is not None:
                kind = f"{dtype.name}{list(shape)}"
            raise TypeError(
                f"`seed` must be an int or a uint32 scalar, but got {kind}. Use "
                "`jax.random.bits(key, (), jnp.uint32)` to draw one from a PRNG key."
            )
        return jnp.asarray(seed)
    value = operator.index(seed)
    if not 0 <= value < 2**32:
        raise ValueError(
            f"`seed` must be from 0 to 2**32 - 1, but got {shown(value)}. "
            "Take it modulo 2**32."
        )
    return jnp.asarray(np.uint32(value))


# Number of sampled quantization groups, evenly spread over the array.
_NUM_BLOCKS = 32


def sample_rounding_noise(affine: Affine, x: Array) -> Array:
    """Returns the mean variance of rounding to 1 bit over the mean squared group range.

    Stochastic rounding maps an element `v` of a group from `low` to `high` to one of
    these two, with mean `v` and variance `(v - low) * (high - v)`. Divided by
    `(high - low)^2`, the variance is 1/6 if the elements are spread evenly over the
    range, up to 1/4 if most are in its middle, and 0 if all are at its ends: masks, and
    probabilities of 0 or 1, suffer no rounding. With dithered rounding it is 1/12 for
    all elements. It is measured in sampled groups of `affine`: 0 if none has a range,
    NaN if one has values that are not finite.
    """
    if x.size == 0:
        return jnp.zeros((), jnp.float32)
    return with_auto_axes(functools.partial(_mean_noise, affine), x)


def _mean_noise(affine: Affine, x: Array) -> jax.Array:
    blocks = _some_blocks(affine, x).astype(jnp.float32)
    low = jnp.min(blocks, axis=-1, keepdims=True)
    high = jnp.max(blocks, axis=-1, keepdims=True)
    variance = jnp.mean((blocks - low) * (high - blocks))
    if affine.is_dithered:
        variance = jnp.mean((high - low) ** 2) / 12
    squared_range = jnp.mean((high - low) ** 2)
    return variance / jnp.where(squared_range == 0, 1, squared_range)


def _some_blocks(affine: Affine, x: Array) -> jax.Array:
    """Returns the elements of sampled full groups, `[groups, elements]`."""
    rows, format = affine.rows_and_format(x.shape)
    channels = max(1, format.columns)
    count, size = math.prod(rows[:-1]), rows[-1] // channels
    length = min(affine.block_size, size)
    x = lax.reshape(to_rows(x, rows), (count, size, channels))
    x = x[:, : size // length * length]
    x = lax.reshape(x, (count, size // length, length, channels))
    number = (count, size // length, channels)
    of_rows, of_blocks, of_channels = _strides(number, _NUM_BLOCKS)
    x = x[::of_rows, ::of_blocks, :, ::of_channels]
    return jnp.moveaxis(x, 2, -1).reshape(-1, length)


@functools.lru_cache(maxsize=1024)
def _strides(shape: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Returns the stride of each dimension that gives at most `most` samples.

    Strides are odd, so that they are not in step with a power of two. All dimensions
    get similar numbers of samples, because it is unknown along which one groups differ.
    """
    strides = [1] * len(shape)

    def num_samples(dimension: int) -> int:
        return -(-shape[dimension] // strides[dimension])

    dimensions = range(len(shape))
    while math.prod(map(num_samples, dimensions)) > most:
        strides[max(dimensions, key=num_samples)] += 2
    return tuple(strides)
