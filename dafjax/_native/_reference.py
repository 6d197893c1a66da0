"""The packed formats in `jax.numpy`: the same bytes as the custom calls.

It serves platforms without a kernel. `xla_ffi/README.md` has the format and every
formula. This module must reproduce that arithmetic exactly. So every product that a
compiler could contract into a fused multiply-add is exact, and operations that a
compiler could flush or approximate work on bits. (One operation of the decoder that
XLA:GPU fuses into other kernels may see subnormals, but XLA:GPU does not flush them.)
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from dafjax._native._format import (
    LANES,
    ROWS,
    TILE,
    Format,
    checksums,
    checksums_of_codes,
    noise_words,
    num_tiles,
    pack_planes,
    unpack_planes,
)
from dafjax._numbers import Array


EXPONENT_MASK = 0x7F800000
_MANTISSA_MASK = 0x007FFFFF
_SIGN_MASK = 0x80000000
_HIGH_HALF = 0xFFFF0000


def to_bits(x: Array) -> Array:
    """Returns the uint32 pattern of a float32 array."""
    return lax.bitcast_convert_type(x, jnp.uint32)


def from_bits(bits: Array) -> Array:
    """Returns the float32 array of a uint32 pattern."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def widened_bits(x: Array) -> Array:
    """Returns the float32 pattern of a float32, bfloat16 or float16 array, exactly."""
    if x.dtype == jnp.bfloat16:
        return bfloat16_bits(x) << jnp.uint32(16)
    # Every float16 is a normal float32 or zero, so this flushes nothing.
    return to_bits(x.astype(jnp.float32))


def is_finite(bits: Array) -> Array:
    """Tells which float32 patterns are neither infinite nor NaN."""
    return (bits & jnp.uint32(EXPONENT_MASK)) != jnp.uint32(EXPONENT_MASK)


def flush(bits: Array) -> Array:
    """Turns the patterns of subnormals and of -0 into the pattern of +0."""
    has_exponent = (bits & jnp.uint32(EXPONENT_MASK)) != jnp.uint32(0)
    return jnp.where(has_exponent, bits, jnp.uint32(0))


def bfloat16_down(x: Array) -> Array:
    """Rounds float32 towards minus infinity to a bfloat16 value, kept in float32."""
    return _truncate_or_extend(x, extend_negative=True)


def bfloat16_up(x: Array) -> Array:
    """Rounds float32 towards plus infinity to a bfloat16 value, kept in float32."""
    return _truncate_or_extend(x, extend_negative=False)


def _truncate_or_extend(x: Array, *, extend_negative: bool) -> Array:
    bits = to_bits(x)
    is_negative = (bits & jnp.uint32(_SIGN_MASK)) != jnp.uint32(0)
    extend = is_negative == jnp.asarray(extend_negative)
    bits = bits + jnp.where(extend, jnp.uint32(0xFFFF), jnp.uint32(0))
    return from_bits(bits & jnp.uint32(_HIGH_HALF))


def bfloat16_bits(x: Array) -> Array:
    """Returns the pattern of a bfloat16 array, in the low half of a uint32."""
    return lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)


def to_bfloat16_exact(x: Array) -> Array:
    """Converts float32 that holds bfloat16 values to bfloat16."""
    return _from_half_bits(to_bits(x) >> jnp.uint32(16), jnp.bfloat16)


def round_to(x: Array, dtype: jnp.dtype) -> Array:
    """Rounds finite float32 to nearest even in `dtype`.

    It computes in integers, because XLA may drop a narrowing cast before a widening
    cast.
    """
    if dtype == jnp.float32:
        return x
    bits = to_bits(x)
    if dtype == jnp.bfloat16:
        return _from_half_bits(_round_off(bits, 16) >> jnp.uint32(16), jnp.bfloat16)
    sign = (bits >> jnp.uint32(16)) & jnp.uint32(0x8000)
    magnitude = bits & jnp.uint32(~_SIGN_MASK & 0xFFFFFFFF)
    # The exponent bias is 127 in float32 and 15 in float16.
    normal = (_round_off(magnitude, 13) - jnp.uint32(112 << 23)) >> jnp.uint32(13)
    # Below 2^-14 float16 has the spacing 2^-24, as float32 has from 0.5 to 1.
    half = jnp.float32(0.5)
    subnormal = to_bits(from_bits(magnitude) + half) - to_bits(half)
    is_normal = magnitude >= jnp.uint32((127 - 14) << 23)
    return _from_half_bits(sign | jnp.where(is_normal, normal, subnormal), jnp.float16)


def _round_off(bits: Array, count: int) -> Array:
    """Rounds a pattern to nearest even at bit `count`; the bits below are garbage."""
    odd = (bits >> jnp.uint32(count)) & jnp.uint32(1)
    return bits + jnp.uint32((1 << (count - 1)) - 1) + odd


def _from_half_bits(bits: Array, dtype: jnp.dtype) -> Array:
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), dtype)


def power_over(scale: Array, exponent: Array) -> Array:
    """Divides `2^exponent` by positive bfloat16 values kept in float32.

    It divides integers, because GPU division is approximate. With
    `scale = m * 2^(e - 7)`, 128 <= m < 256, the quotient is
    `2^31 / m * 2^(exponent - e - 24)`. `2^31 / m` is between 2^23 and 2^24 and rounds
    to an integer that float32 holds, so the result is correctly rounded. No quotient is
    halfway between two integers, since m would have to be a power of two.
    """
    bits = to_bits(scale)
    mantissa = ((bits & jnp.uint32(_MANTISSA_MASK)) >> jnp.uint32(16)) + jnp.uint32(128)
    quotient = (jnp.uint32(1 << 31) + (mantissa >> jnp.uint32(1))) // mantissa
    biased = (bits >> jnp.uint32(23)).astype(jnp.int32)
    shift = exponent - (biased - jnp.int32(127)) - jnp.int32(24)
    pattern = lax.bitcast_convert_type(quotient.astype(jnp.float32), jnp.int32)
    pattern = pattern + (shift << jnp.int32(23))
    return lax.bitcast_convert_type(pattern, jnp.float32)


_MAX_BFLOAT16 = np.float32(float.fromhex("0x1.fep127"))
_SMALLEST_SCALE = np.float32(2.0**-100)
# Below this minimum a product `code * scale` may overflow though the decoded value does
# not.
_LARGE_MINIMUM = np.float32(-(2.0**100))
_TOP_CODE = 65535


def pack_affine(x: Array, seed: Array, *, format: Format) -> tuple[Array, ...]:
    """Encodes rows: section 2. Returns codes, scale and minimum."""
    size = x.shape[-1]
    pattern = _pad(widened_bits(x), format.padded_size(size))
    code, scale, minimum = encode_padded(
        pattern, seed, jnp.uint32(size), dtype=x.dtype, format=format
    )
    # Without the barrier, fusion repeats the work on elements for each plane.
    code = lax.optimization_barrier(code.astype(jnp.uint8)).astype(jnp.uint32)
    tiles = format.to_tiles(code)
    tiles = lax.slice_in_dim(tiles, 0, num_tiles(size, format.columns), axis=-3)
    stored = format.num_blocks(size)
    return (
        pack_planes(tiles, format.bits),
        _cut(to_bfloat16_exact(scale), stored),
        _cut(to_bfloat16_exact(minimum), stored),
    )


def encode_padded(
    pattern: Array, seed: Array, size: Array, *, dtype: np.dtype, format: Format
) -> tuple[Array, Array, Array]:
    """Returns the code of every element, and scale and minimum of every group.

    Args:
        pattern: Float32 bit patterns `[*batch, padded]`, zero beyond `size`; whole
            groups and whole tiles.
        seed: Seed of the noise.
        size: Number of elements of a row without padding; may be traced.
        dtype: The dtype of the elements before they were widened.
        format: The code.

    Returns:
        uint32 codes `[*batch, padded]`; then scale and minimum, float32
        `[*batch, padded / block_size]` that hold bfloat16 values. The sign of the scale
        flags groups with values that are not finite.
    """
    bits = format.bits
    place = lax.broadcasted_iota(jnp.uint32, pattern.shape, pattern.ndim - 1)
    present = format.to_blocks(place < size)
    tiles = format.to_tiles(pattern)
    pattern = format.to_blocks(pattern)

    finite = is_finite(pattern)
    value = from_bits(flush(pattern))
    low, high = _extremes(value, finite & present)
    flagged = jnp.any(~finite, axis=-1)

    minimum, scale = _affine_parameters(low, high, flagged, bits, dtype)
    fraction_bits = jnp.int32(16 - bits) + flagged.astype(jnp.int32)
    has_scale = scale > jnp.float32(0)
    inverse = jnp.where(has_scale, power_over(scale, fraction_bits), jnp.float32(0))
    half_step = _power_of_two(-(fraction_bits + jnp.int32(1)))
    # Truncation to `fixed` loses half a unit of the fraction on average. The dithered
    # decoder adds it: its `middle` is half a unit above the mean of the noise.
    # Otherwise `start` adds it.
    start = minimum if format.dithered else minimum - scale * half_step

    # Without the barrier, fusion repeats the work on groups for each element.
    start, inverse, fraction_bits, has_scale = lax.optimization_barrier(
        (start, inverse, fraction_bits, has_scale)
    )
    scaled = (value - start[..., None]) * inverse[..., None]
    # If the range exceeds float32, the difference is infinite; infinity times 0 is NaN.
    scaled = jnp.where(has_scale[..., None], scaled, jnp.float32(0))
    scaled = lax.clamp(jnp.float32(0), scaled, jnp.float32(_TOP_CODE))
    fixed = scaled.astype(jnp.int32).astype(jnp.uint32)

    fraction_bits = fraction_bits.astype(jnp.uint32)[..., None]
    sign = flagged.astype(jnp.uint32) << jnp.uint32(31)
    scale = from_bits(to_bits(scale) | sign)
    if format.stochastic:
        if format.dithered:
            of_tiles = format.of_tiles(_joined(scale, minimum), tiles.shape[-3])
            checksum = checksums_of_codes(*of_tiles)
        else:
            finite_tiles = jnp.where(is_finite(tiles), tiles, jnp.uint32(0))
            checksum = checksums(finite_tiles)
        words = format.from_tiles(noise_words(seed, checksum))
        noise = format.to_blocks(words) >> (jnp.uint32(16) - fraction_bits)
    else:
        noise = jnp.uint32(1) << (fraction_bits - jnp.uint32(1))
    code = jnp.minimum(fixed + noise, jnp.uint32(_TOP_CODE)) >> fraction_bits
    code = jnp.where(finite, code, _not_finite_code(pattern, bits))
    code = jnp.where(present, code, jnp.uint32(0))
    return format.from_blocks(code), scale, minimum


def _extremes(value: Array, counted: Array) -> tuple[Array, Array]:
    """Returns least and greatest counted value of each group; 0 if there is none."""
    low = jnp.min(jnp.where(counted, value, jnp.float32(np.inf)), axis=-1)
    high = jnp.max(jnp.where(counted, value, jnp.float32(-np.inf)), axis=-1)
    has_finite = low <= high
    low = jnp.where(has_finite, low, jnp.float32(0))
    high = jnp.where(has_finite, high, jnp.float32(0))
    return low, high


def _joined(scale: Array, minimum: Array) -> Array:
    """Joins the bfloat16 scale and minimum of each group in one word."""
    minimum = to_bits(minimum.astype(jnp.float32))
    return to_bits(scale.astype(jnp.float32)) | (minimum >> jnp.uint32(16))


def _affine_parameters(
    low: Array, high: Array, flagged: Array, bits: int, dtype: np.dtype
) -> tuple[Array, Array]:
    """Computes `zero` and `scale`, float32 that hold bfloat16 values."""
    half = jnp.float32(0.5)
    limit = _largest(dtype)
    lowest = np.float32(-65280) if dtype == jnp.float16 else -_MAX_BFLOAT16
    step = jnp.where(flagged, _per_level(bits - 1), _per_level(bits))

    zero = jnp.maximum(bfloat16_down(low), lowest)
    room = (jnp.float32(np.float32(0.5) * limit) - half * zero) * step
    cap = bfloat16_down(jnp.minimum(room, _MAX_BFLOAT16))
    scale = jnp.minimum(bfloat16_up((half * high - half * zero) * step), cap)
    return zero, jnp.where(scale < _SMALLEST_SCALE, jnp.float32(0), scale)


def _largest(dtype: np.dtype) -> np.float32:
    """Returns the upper limit of decoded values."""
    return np.float32(65504) if dtype == jnp.float16 else _MAX_BFLOAT16


def _per_level(bits: int) -> Array:
    """Returns `2 / levels`; 0 without levels, so that the scale becomes 0."""
    levels = 2**bits - 1
    return jnp.float32(2.0 / levels if levels else 0.0)


def _power_of_two(exponent: Array) -> Array:
    bits = (exponent + jnp.int32(127)) << jnp.int32(23)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _not_finite_code(pattern: Array, bits: int) -> Array:
    """Returns the codes 100 (NaN), 110 (+Inf), 111 (-Inf) in the top three bits."""
    if bits < 3:
        return jnp.full(pattern.shape, 1 << (bits - 1), jnp.uint32)
    is_nan = (pattern & jnp.uint32(0x7FFFFF)) != jnp.uint32(0)
    infinite = jnp.uint32(0b110) | (pattern >> jnp.uint32(31))
    return jnp.where(is_nan, jnp.uint32(0b100), infinite) << jnp.uint32(bits - 3)


def unpack_affine(
    codes: Array,
    scale: Array,
    minimum: Array,
    *others: Array,
    size: int,
    dtype: np.dtype,
    format: Format,
    kept_bits: int | None = None,
    shape: tuple[int, ...] | None = None,
) -> Array:
    """Decodes rows: section 2.

    If the format is dithered, `others[0]` are the seeds of the rows, and the noise is
    subtracted. With `kept_bits`, `codes` only have the planes of their first
    `kept_bits` bits: section 5. With `shape`, the result has this shape, and decoding
    takes fewer operations per element. One of these may see subnormal numbers; XLA:GPU
    does not flush them.
    """
    bits, dithered = format.bits, format.dithered
    kept = bits if kept_bits is None else kept_bits
    after = others[1:] if dithered else others
    codes, scale, minimum = _wait_for(after, codes, scale, minimum)
    batch = codes.shape[:-1]
    tiles = num_tiles(size, format.columns)
    code = unpack_planes(codes, kept, tiles, format.lane_groups)
    lanes = code.shape[-1]
    positions = -(-size // lanes)
    code = lax.slice_in_dim(code, 0, positions, axis=-2)

    # Compute in the shape in which consumers read the values. Otherwise, with several
    # consumers, XLA:GPU's cost model assumes that each of them repeats the computation.
    def arrange(x: Array) -> Array:
        row = x.reshape(*batch, positions * lanes)
        return _cut(row, size).reshape((*batch, size) if shape is None else shape)

    words = None
    if dithered:
        of_tiles = format.of_tiles(_joined(scale, minimum), tiles)
        words = noise_words(others[0], checksums_of_codes(*of_tiles))
        words = format.from_tiles(words).reshape(*batch, -1, lanes)
        words = arrange(lax.slice_in_dim(words, 0, positions, axis=-2))
    code = arrange(code)
    scale = arrange(format.spread(scale, positions))
    minimum = arrange(format.spread(minimum, positions))
    scale = scale.astype(jnp.float32)
    minimum = minimum.astype(jnp.float32)
    if words is None:
        half_step = _half(code)
    else:
        half_step = _half_without_noise(code, words, scale, bits)
    if kept < bits:
        alike = 2 ** (bits - kept)
        half_step = half_step * jnp.float32(alike) + jnp.float32((alike - 1) / 4)
    # Halve where the product could overflow. The product is exact either way, so a
    # fused multiply-add changes nothing; doubling the sum is exact, too.
    is_large = shape is not None or minimum <= _LARGE_MINIMUM
    shrink = jnp.where(is_large, jnp.float32(0.5), jnp.float32(1))
    grow = jnp.where(is_large, jnp.float32(2), jnp.float32(1))
    product = half_step * jnp.abs(scale)
    value = (minimum * shrink + product * (shrink + shrink)) * grow
    if dithered:
        value = lax.clamp(-_largest(dtype), value, _largest(dtype))
    return _with_not_finite(round_to(value, dtype), code, scale, kept)


def _with_not_finite(value: Array, code: Array, scale: Array, kept: int) -> Array:
    """Replaces the values of special codes: those with the top bit in flagged groups.

    The sign of a scale is the flag. It selects by integers: XLA:GPU would write
    booleans to memory, to decode less often.
    """
    dtype = value.dtype
    top = code << jnp.uint32(32 - kept) if kept else jnp.uint32(1 << 31)
    special = lax.bitcast_convert_type(to_bits(scale) & top, jnp.int32)
    word = jnp.uint32 if dtype == jnp.float32 else jnp.uint16
    mask = (special >> jnp.int32(31)).astype(word)
    finite = lax.bitcast_convert_type(value, word) & ~mask
    not_finite = _not_finite_bits(code, kept, dtype).astype(word) & mask
    return lax.bitcast_convert_type(finite | not_finite, dtype)


def _half(code: Array) -> Array:
    """Returns half of a code of at most 8 bits, exactly, by one operation on floats."""
    base = _HALF_IS_LAST.view(np.uint32)
    return from_bits(code | base) - _HALF_IS_LAST


def _half_without_noise(code: Array, words: Array, scale: Array, bits: int) -> Array:
    """Returns half of a code minus its noise, exactly."""
    flag = to_bits(scale) >> jnp.uint32(31)
    fraction = jnp.uint32(16 - bits) + flag
    noise = words >> (jnp.uint32(16) - fraction)
    middle = jnp.uint32(1) << (fraction - jnp.uint32(1))
    fixed = lax.bitcast_convert_type((code << fraction) + middle - noise, jnp.int32)
    unit = _power_of_two(-(fraction.astype(jnp.int32) + jnp.int32(1)))
    return fixed.astype(jnp.float32) * unit


# From here on the last bit of a float32 is worth 1/2.
_HALF_IS_LAST = np.float32(2.0**22)


def _not_finite_bits(code: Array, bits: int, dtype: np.dtype) -> Array:
    """Returns the bit pattern of NaN, or of the value in a code's top three bits."""
    info = jnp.finfo(dtype)
    infinity = jnp.uint32(((1 << info.nexp) - 1) << info.nmant)
    nan = jnp.uint32(1 << (info.nmant - 1))
    if bits < 3:
        return jnp.broadcast_to(infinity | nan, code.shape)
    is_infinite = (code >> jnp.uint32(bits - 2)) & jnp.uint32(1)
    is_negative = (code >> jnp.uint32(bits - 3)) & is_infinite
    sign = is_negative << jnp.uint32(info.bits - 1)
    return infinity | sign | ((is_infinite ^ jnp.uint32(1)) * nan)


def pack_bitmask(mask: Array, *, shape: tuple[int, ...] | None = None) -> Array:
    """Packs booleans into one plane, in the given shape."""
    *batch, size = mask.shape
    tiles = num_tiles(size)
    fields = _pad(mask, tiles * TILE).astype(jnp.uint32)
    words = pack_planes(fields.reshape(*batch, tiles, ROWS, LANES), 1)
    return words if shape is None else words.reshape(shape)


def unpack_bitmask(
    words: Array, *after: Array, size: int, shape: tuple[int, ...] | None = None
) -> Array:
    """Inverts `pack_bitmask`."""
    (words,) = _wait_for(after, words)
    batch = words.shape[:-1]
    fields = unpack_planes(words, 1, num_tiles(size))
    fields = _cut(fields.reshape(*batch, num_tiles(size) * TILE), size)
    fields = fields.reshape((*batch, size) if shape is None else shape)
    return fields != jnp.uint32(0)


def _wait_for(after: tuple[Array, ...], *arrays: Array) -> tuple[Array, ...]:
    if not after:
        return arrays
    return tuple(lax.optimization_barrier((*arrays, *after)))[: len(arrays)]


def _pad(x: Array, length: int) -> Array:
    """Extends the last axis with zeros to `length` elements, if it is shorter."""
    missing = max(0, length - x.shape[-1])
    if missing == 0:
        return x
    return lax.pad(
        x, jnp.zeros((), x.dtype), [(0, 0, 0)] * (x.ndim - 1) + [(0, missing, 0)]
    )


def _cut(x: Array, length: int) -> Array:
    """Keeps the first `length` elements of the last axis."""
    return lax.slice_in_dim(x, 0, length, axis=-1) if length < x.shape[-1] else x
