"""The packed format in NumPy, written from `xla_ffi/README.md` and nothing else.

It is slow and literal on purpose: block after block, one place of a word at a time.
"""

import dataclasses

import ml_dtypes
import numpy as np


BITS = (1, 2, 3, 4, 8)
BLOCK_SIZES = (64, 128, 256, 512, 1024)
PLANES = {1: [1], 2: [1, 1], 3: [1, 1, 1], 4: [1, 1, 2], 8: [1, 1, 2, 4]}
MAX_BF16 = np.float32(float.fromhex("0x1.fep127"))
f32 = np.float32


@dataclasses.dataclass(frozen=True)
class Encoded:
    """Patterns of the stored arrays of one row."""

    codes: np.ndarray  # uint16 [words]
    scale: np.ndarray  # uint16 [blocks], patterns of bfloat16
    minimum: np.ndarray


def bf16_down(x: np.float32) -> np.float32:
    """Returns the greatest bfloat16 that is not above `x`."""
    return _round_bf16(x, np.float32(-np.inf))


def bf16_up(x: np.float32) -> np.float32:
    """Returns the least bfloat16 that is not below `x`."""
    return _round_bf16(x, np.float32(np.inf))


def _round_bf16(x: np.float32, towards: np.float32) -> np.float32:
    nearest = ml_dtypes.bfloat16(x)
    if towards < 0 and f32(nearest) > x or towards > 0 and f32(nearest) < x:
        nearest = np.nextafter(nearest, ml_dtypes.bfloat16(towards))
    return f32(nearest)


def mix(x: np.ndarray) -> np.ndarray:
    """Scrambles uint32 numbers."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def noise_words(seed: int, wide: np.ndarray) -> np.ndarray:
    """Returns the 16-bit word of every element of one row of float32."""
    tiles = -(-wide.size // 512)
    words = np.zeros((tiles, 16, 32), np.uint32)
    golden = 0x9E3779B9
    with np.errstate(over="ignore"):
        start = mix(np.array([(seed + golden) % 2**32], np.uint32))
        for tile in range(tiles):
            part = wide[tile * 512 : (tile + 1) * 512]
            patterns = part[np.isfinite(part)].view(np.uint32)
            checksum = np.uint32(int(patterns.sum(dtype=np.uint64)) % 2**32)
            key = mix(mix(start ^ np.uint32(tile)) + checksum)
            k = np.arange(16, dtype=np.uint32)
            state = mix(key + k * np.uint32(golden)) | np.uint32(1)
            for row in range(16):
                state = state ^ (state << np.uint32(13))
                state = state ^ (state >> np.uint32(17))
                state = state ^ (state << np.uint32(5))
                words[tile, row, 0::2] = state & np.uint32(0xFFFF)
                words[tile, row, 1::2] = state >> np.uint32(16)
    return words.reshape(-1)[: wide.size]


def affine_codes(
    x: np.ndarray, seed: int, bits: int, block_size: int, stochastic: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns codes and the float32 scale (signed if flagged) and minimum of a row."""
    wide = x.astype(np.float32)
    words = noise_words(seed, wide)
    is_half = x.dtype == np.float16
    limit = f32(65504) if is_half else MAX_BF16
    lowest = f32(-65280) if is_half else -MAX_BF16

    finite = np.isfinite(wide)
    tiny = np.abs(wide) < np.finfo(np.float32).tiny
    value = np.where(tiny, f32(0), wide)

    codes = np.zeros(x.size, np.uint32)
    scales, minima = [], []
    for begin in range(0, x.size, block_size):
        at = slice(begin, begin + block_size)
        v, ok = value[at], finite[at]
        flagged = not ok.all()
        lo = v[ok].min() if ok.any() else f32(0)
        hi = v[ok].max() if ok.any() else f32(0)
        b = bits - 1 if flagged else bits
        levels, f = 2**b - 1, 16 - b

        zero = max(bf16_down(lo), lowest)
        scale = f32(0)
        if levels:
            c = f32(2.0 / levels)
            with np.errstate(over="ignore"):
                room = (f32(0.5) * limit - f32(0.5) * zero) * c
                cap = bf16_down(min(room, MAX_BF16))
                reach = (f32(0.5) * hi - f32(0.5) * zero) * c
                scale = min(bf16_up(reach), cap)
        if scale < f32(2.0**-100):
            scale = f32(0)
        inv = f32(2.0**f) / scale if scale else f32(0)
        start = zero - scale * f32(2.0 ** -(f + 1))

        q = np.zeros(v.size, np.int64)
        if scale:
            with np.errstate(over="ignore", invalid="ignore"):
                scaled = np.clip((v - start) * inv, f32(0), f32(65535))
            q[ok] = np.trunc(scaled[ok]).astype(np.int64)
        noise = words[at].astype(np.int64) >> (16 - f) if stochastic else 2 ** (f - 1)
        code = np.minimum(q + noise, 65535) >> f
        if bits >= 3:
            special = np.where(v > 0, 0b110, 0b111)
            special = np.where(np.isnan(v), 0b100, special) << (bits - 3)
        else:
            special = np.full(v.size, 1 << (bits - 1))
        codes[at] = np.where(ok, code, special)
        scales.append(-scale if flagged else scale)
        minima.append(zero)
    return codes, np.array(scales, np.float32), np.array(minima, np.float32)


def pack_planes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Packs the codes of one row into uint16 words."""
    tiles = -(-codes.size // 512)
    padded = np.zeros(tiles * 512, np.uint32)
    padded[: codes.size] = codes
    padded = padded.reshape(tiles, 16, 32)
    planes = []
    shift = bits
    for w in PLANES[bits]:
        shift -= w
        field = (padded >> np.uint32(shift)) & np.uint32(2**w - 1)
        plane = np.zeros((tiles, w * 32), np.uint16)
        for p in range(w):
            for i in range(16 // w):
                row = field[:, p * (16 // w) + i, :] << np.uint32(w * i)
                plane[:, p * 32 : (p + 1) * 32] |= row.astype(np.uint16)
        planes.append(plane.reshape(-1))
    return np.concatenate(planes)


def unpack_planes(words: np.ndarray, size: int, bits: int) -> np.ndarray:
    """Returns the codes of one row, element after element of every tile."""
    tiles = -(-size // 512)
    codes = np.zeros((tiles, 512), np.uint32)
    element = np.arange(512)
    lane, row = element % 32, element // 32
    shift, offset = bits, 0
    for w in PLANES[bits]:
        shift -= w
        plane = words[offset : offset + tiles * w * 32].reshape(tiles, w * 32)
        offset += tiles * w * 32
        word = plane[:, row // (16 // w) * 32 + lane].astype(np.uint32)
        field = (word >> (w * (row % (16 // w))).astype(np.uint32)) & np.uint32(
            2**w - 1
        )
        codes |= field << np.uint32(shift)
    return codes.reshape(-1)[:size]


def encode(
    x: np.ndarray, seed: int, bits: int, block_size: int, stochastic: bool
) -> Encoded:
    """Encodes one row."""
    codes, scale, minimum = affine_codes(x, seed, bits, block_size, stochastic)
    return Encoded(
        codes=pack_planes(codes, bits),
        scale=scale.astype(ml_dtypes.bfloat16).view(np.uint16),
        minimum=minimum.astype(ml_dtypes.bfloat16).view(np.uint16),
    )


def decode(
    encoded: Encoded, size: int, dtype: np.dtype, bits: int, block_size: int
) -> np.ndarray:
    """Decodes one row; in float64, where the sum is exact, then rounded once."""
    codes = unpack_planes(encoded.codes, size, bits)
    block = np.arange(size) // block_size
    scale = encoded.scale.view(ml_dtypes.bfloat16).astype(np.float64)[block]
    minimum = encoded.minimum.view(ml_dtypes.bfloat16).astype(np.float64)[block]
    flagged = np.signbit(scale)
    special = flagged & (codes >> np.uint32(bits - 1) == 1)
    step = np.where(flagged, codes & np.uint32(2 ** (bits - 1) - 1), codes)
    value = _fused(step.astype(np.float64), np.abs(scale), minimum).astype(dtype)
    if bits >= 3:
        kind = codes >> np.uint32(bits - 3)
        unusual = np.where(
            kind == 0b110, np.inf, np.where(kind == 0b111, -np.inf, np.nan)
        )
    else:
        unusual = np.full(size, np.nan)
    return np.where(special, unusual.astype(dtype), value)


def _fused(code: np.ndarray, scale: np.ndarray, minimum: np.ndarray) -> np.ndarray:
    """Returns `minimum + code * scale` rounded once to float32.

    The product has 16 significant bits. The float64 sum is inexact only if one operand
    is below 2^-28 of the other, where rounding twice gives the same.
    """
    return (minimum + code * scale).astype(np.float32)
