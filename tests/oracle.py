"""The packed format in NumPy, written from `xla_ffi/README.md` and nothing else.

Many rows are encoded at once, each with a length of its own: what lies beyond it is
padding. Inside a row the code follows the text, place after place. For column blocks
all rows have one length: tables of places sort elements into tiles and blocks.
"""

import dataclasses

import ml_dtypes
import numpy as np


BITS = (1, 2, 3, 4, 8)
BLOCK_SIZES = (64, 128, 256, 512, 1024)
PLANES = {0: [], 1: [1], 2: [1, 1], 3: [1, 1, 1], 4: [1, 1, 2], 8: [1, 1, 2, 4]}
MAX_BF16 = np.float32(float.fromhex("0x1.fep127"))
GOLDEN_RATIO = np.uint32(0x9E3779B9)
bfloat16 = np.dtype(ml_dtypes.bfloat16)
f32 = np.float32


@dataclasses.dataclass(frozen=True)
class Encoded:
    """Codes of rows and the values, in float32, of scale and minimum."""

    sizes: np.ndarray  # [rows]
    bits: int
    block_size: int
    codes: np.ndarray  # uint32 [rows, width], not packed
    scale: np.ndarray  # float32 [rows, blocks], negative or -0 if flagged
    minimum: np.ndarray

    def packed(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Returns words and the patterns of scale and minimum of each row."""
        planes = pack_planes(self.codes, self.bits)
        scale = self.scale.astype(bfloat16).view(np.uint16)
        minimum = self.minimum.astype(bfloat16).view(np.uint16)
        rows = []
        for row, size in enumerate(self.sizes):
            tiles, blocks = -(-size // 512), -(-size // self.block_size)
            words = np.concatenate([p[row, :tiles].reshape(-1) for p in planes])
            rows.append((words, scale[row, :blocks], minimum[row, :blocks]))
        return rows


def round_bf16(x: np.ndarray, towards: float) -> np.ndarray:
    """Returns the bfloat16 next to float32 `x`, or `x`, in the given direction."""
    with np.errstate(over="ignore"):
        nearest = x.astype(bfloat16)
        beyond = nearest.astype(f32) > x if towards < 0 else nearest.astype(f32) < x
        next_one = np.nextafter(nearest, np.asarray(towards, bfloat16))
    return np.where(beyond, next_one, nearest).astype(f32)


def mix(x: np.ndarray) -> np.ndarray:
    """Scrambles uint32 numbers."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def noise_words(seed: int, wide: np.ndarray) -> np.ndarray:
    """Returns the 16-bit word of every element of float32 rows, padded with zeros."""
    rows, width = wide.shape
    tiles = width // 512
    patterns = np.where(np.isfinite(wide), wide, f32(0)).view(np.uint32)
    # Every other row of 32. The sum is below 2^40: nothing is lost before it wraps.
    counted = patterns.reshape(rows, tiles, 8, 64)[..., :32]
    total = counted.sum(axis=(-2, -1), dtype=np.uint64)
    checksum = (total % 2**32).astype(np.uint32)
    stream = mix(np.array([seed], np.uint32) + GOLDEN_RATIO)
    key = mix(mix(stream ^ np.arange(tiles, dtype=np.uint32)) + checksum)
    k = np.arange(16, dtype=np.uint32)
    draw = mix(key[..., None] + k * GOLDEN_RATIO)
    words = np.zeros((rows, tiles, 16, 32), np.uint32)
    words[:, :, 0, 0::2] = draw & np.uint32(0xFFFF)
    words[:, :, 0, 1::2] = draw >> np.uint32(16)
    for row in range(1, 16):
        words[:, :, row] = words[:, :, row - 1] * np.uint32(0x9F27) & np.uint32(0xFFFF)
    return words.reshape(rows, width)


def fixed_point(
    x: np.ndarray, sizes: np.ndarray, bits: int, block_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns q of every element; f, scale (signed if flagged), minimum of the blocks.

    `x` is `[rows, width]`, its width a multiple of 512 and of the block size.
    """
    rows, width = x.shape
    limit = f32(65504) if x.dtype == np.float16 else MAX_BF16
    lowest = f32(-65280) if x.dtype == np.float16 else -MAX_BF16
    wide = x.astype(f32).reshape(rows, width // block_size, block_size)
    present = (np.arange(width) < np.asarray(sizes)[:, None]).reshape(wide.shape)
    finite = np.isfinite(wide)
    value = np.where(np.abs(wide) < np.finfo(f32).tiny, f32(0), wide)

    counted = finite & present
    lo = np.min(value, axis=-1, where=counted, initial=f32(np.inf))
    hi = np.max(value, axis=-1, where=counted, initial=f32(-np.inf))
    lo = np.where(counted.any(axis=-1), lo, f32(0))
    hi = np.where(counted.any(axis=-1), hi, f32(0))
    flagged = (~finite & present).any(axis=-1)

    b = np.where(flagged, bits - 1, bits)
    levels = 2**b - 1
    f = 16 - b
    c = (2.0 / np.maximum(levels, 1)).astype(f32)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        zero = np.maximum(round_bf16(lo, -np.inf), lowest)
        room = (f32(0.5) * limit - f32(0.5) * zero) * c
        cap = round_bf16(np.minimum(room, MAX_BF16), -np.inf)
        reach = (f32(0.5) * hi - f32(0.5) * zero) * c
        scale = np.minimum(round_bf16(reach, np.inf), cap)
        scale = np.where((scale < f32(2.0**-100)) | (levels == 0), f32(0), scale)
        inv = np.where(scale > 0, (2.0**f).astype(f32) / scale, f32(0))
        start = zero - scale * (2.0 ** -(f + 1)).astype(f32)
        scaled = (value - start[..., None]) * inv[..., None]
        # An element that is not finite has no q, one of a block without levels is 0.
        scaled = np.where(counted & (inv > 0)[..., None], scaled, f32(0))
        q = np.trunc(np.clip(scaled, f32(0), f32(65535))).astype(np.uint32)
    return q.reshape(rows, width), f, np.where(flagged, -scale, scale), zero


def encode(
    x: np.ndarray,
    seed: int,
    bits: int,
    block_size: int,
    stochastic: bool,
    sizes: np.ndarray | None = None,
    words: np.ndarray | None = None,
) -> Encoded:
    """Encodes rows `[rows, n]`.

    `sizes` gives the rows lengths of their own; `words` is their noise, if it is known.
    """
    rows, size = x.shape
    sizes = np.full(rows, size) if sizes is None else np.asarray(sizes)
    # Noise needs whole tiles.
    unit = 1024 if words is None else block_size
    width = -(-size // unit) * unit
    padded = np.zeros((rows, width), x.dtype)
    padded[:, :size] = x
    present = np.arange(width) < sizes[:, None]
    padded[~present] = 0

    q, f, scale, minimum = fixed_point(padded, sizes, bits, block_size)
    f = np.repeat(f, block_size, axis=-1).astype(np.uint32)
    wide = padded.astype(f32)
    if stochastic:
        words = noise_words(seed, wide) if words is None else words
        noise = words >> (np.uint32(16) - f)
    else:
        noise = np.uint32(1) << (f - np.uint32(1))
    code = np.minimum(q + noise, np.uint32(65535)) >> f

    if bits >= 3:
        special = np.where(wide > 0, 0b110, 0b111)
        special = np.where(np.isnan(wide), 0b100, special) << (bits - 3)
    else:
        special = np.full(wide.shape, 1 << (bits - 1))
    code = np.where(np.isfinite(wide), code, special.astype(np.uint32))
    code = np.where(present, code, np.uint32(0))
    return Encoded(sizes, bits, block_size, code, scale, minimum)


def column_tables(
    size: int, columns: int, block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns which elements are in tiles and blocks; places of padding hold `size`.

    The tables are `[tiles, 512]` and `[blocks, block_size]`.
    """
    width = columns
    while width % 32 != 0:
        width += columns
    rows = -(-size // width)
    element = np.arange(size)
    row, lane = element // width, element % width
    tile = row // 16 * (width // 32) + lane // 32
    tiles = np.full((-(-rows // 16) * (width // 32), 512), size)
    tiles[tile, row % 16 * 32 + lane % 32] = element
    blocks = np.full((-(-rows // block_size) * width, block_size), size)
    blocks[row // block_size * width + lane, row % block_size] = element
    return tiles, blocks


def encode_columns(
    x: np.ndarray, seed: int, bits: int, block_size: int, stochastic: bool, columns: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Encodes rows `[rows, n]`: words and the patterns of scale and minimum."""
    rows, size = x.shape
    tiles, blocks = column_tables(size, columns, block_size)
    padded = np.concatenate([x, np.zeros((rows, 1), x.dtype)], axis=1)
    noise = np.zeros((rows, size + 1), np.uint32)
    noise[:, tiles] = noise_words(
        seed, padded[:, tiles].reshape(rows, -1).astype(f32)
    ).reshape(rows, *tiles.shape)

    # Each block is a row of its own, as long as it has elements: they come first.
    code = np.zeros((rows, size + 1), np.uint32)
    encoded = encode(
        padded[:, blocks].reshape(rows * len(blocks), block_size),
        seed,
        bits,
        block_size,
        stochastic,
        sizes=np.tile(np.sum(blocks < size, axis=1), rows),
        words=noise[:, blocks].reshape(rows * len(blocks), block_size),
    )
    of_blocks = encoded.codes[:, :block_size].reshape(rows, *blocks.shape)
    code[:, blocks] = of_blocks
    code[:, size] = 0
    planes = pack_planes(code[:, tiles].reshape(rows, -1), bits)
    words = np.concatenate([plane.reshape(rows, -1) for plane in planes], axis=1)
    patterns = (
        part[:, 0].reshape(rows, len(blocks)).astype(bfloat16).view(np.uint16)
        for part in (encoded.scale, encoded.minimum)
    )
    return words, *patterns


def pack_planes(codes: np.ndarray, bits: int) -> list[np.ndarray]:
    """Packs codes `[rows, tiles * 512]` into planes `[rows, tiles, w * 32]`."""
    rows, width = codes.shape
    cells = codes.reshape(rows, width // 512, 16, 32)
    planes = []
    shift = bits
    for w in PLANES[bits]:
        shift -= w
        field = (cells >> np.uint32(shift)) & np.uint32(2**w - 1)
        plane = np.zeros((rows, width // 512, w * 32), np.uint16)
        for p in range(w):
            for i in range(16 // w):
                row = field[:, :, p * (16 // w) + i, :] << np.uint32(w * i)
                plane[:, :, p * 32 : (p + 1) * 32] |= row.astype(np.uint16)
        planes.append(plane)
    return planes


def unpack_planes(words: np.ndarray, size: int, bits: int) -> np.ndarray:
    """Returns the codes of rows of words."""
    rows = words.shape[0]
    tiles = -(-size // 512)
    codes = np.zeros((rows, tiles, 512), np.uint32)
    element = np.arange(512)
    lane, row = element % 32, element // 32
    shift, offset = bits, 0
    for w in PLANES[bits]:
        shift -= w
        plane = words[:, offset : offset + tiles * w * 32].reshape(rows, tiles, w * 32)
        offset += tiles * w * 32
        word = plane[:, :, row // (16 // w) * 32 + lane].astype(np.uint32)
        field = word >> (w * (row % (16 // w))).astype(np.uint32)
        codes |= (field & np.uint32(2**w - 1)) << np.uint32(shift)
    return codes.reshape(rows, tiles * 512)[:, :size]


def decode(
    words: np.ndarray,
    scale: np.ndarray,
    minimum: np.ndarray,
    size: int,
    dtype: np.dtype,
    bits: int,
    block_size: int,
    columns: int = 0,
    kept_bits: int | None = None,
) -> np.ndarray:
    """Decodes rows; scale and minimum are patterns `[rows, blocks]` of bfloat16.

    `words` are those of the planes of `kept_bits`, if some planes of `bits` are lost.

    The product has 16 significant bits, so that the float64 sum is inexact only if one
    operand is below 2^-28 of the other; rounding twice then gives the same float32.
    """
    kept = bits if kept_bits is None else kept_bits
    if columns == 0:
        codes = unpack_planes(words, size, kept)
        block = np.arange(size) // block_size
    else:
        tiles, blocks = column_tables(size, columns, block_size)
        codes = np.zeros((len(words), size + 1), np.uint32)
        codes[:, tiles.ravel()] = unpack_planes(words, tiles.size, kept)
        codes = codes[:, :size]
        block = np.zeros(size + 1, np.int64)
        block[blocks] = np.arange(len(blocks))[:, None]
        block = block[:size]
    scale = scale.view(bfloat16).astype(np.float64)[:, block]
    minimum = minimum.view(bfloat16).astype(np.float64)[:, block]
    flagged = np.signbit(scale)
    if kept == 0:
        special = flagged
        step = codes
    else:
        special = flagged & (codes >> np.uint32(kept - 1) == 1)
        step = np.where(flagged, codes & np.uint32(2 ** (kept - 1) - 1), codes)
    alike = 2 ** (bits - kept)
    step = np.where(special, 0, step * np.float64(alike) + (alike - 1) / 2)
    value = (minimum + step * np.abs(scale)).astype(f32).astype(dtype)
    if kept >= 3:
        kind = codes >> np.uint32(kept - 3)
        infinite = np.where(kind == 0b111, -np.inf, np.inf)
        unusual = np.where(kind >= 0b110, infinite, np.nan)
    else:
        unusual = np.full(codes.shape, np.nan)
    return np.where(special, unusual.astype(dtype), value)
