"""Column blocks: kernels, reference and oracle agree; what the codec makes of them."""

import functools
import itertools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dafjax._native import (
    Format,
    _library,
    _reference,
    pack_affine,
    pack_bitmask,
    unpack_affine,
)
from dafjax._native._format import num_tiles
from dafjax.codecs import Affine
from tests import oracle
from tests.helpers import (
    FLOAT_DTYPES,
    assert_same_bits,
    hostile_rows,
    like,
    mixed_rows,
    storage,
)


SEED = 20_240_917
# Divisors, multiples and neighbors of 32, and odd numbers: all foldings.
COLUMNS = (1, 3, 31, 32, 33, 48, 64, 100, 768)
# Around a row, a tile and a block of a folded matrix.
NUM_ROWS = (0, 1, 2, 15, 16, 17, 64, 65, 130, 1025)
LARGEST = 20_000

every_dtype = pytest.mark.parametrize("dtype", FLOAT_DTYPES)
every_width = pytest.mark.parametrize("bits", oracle.BITS)
every_columns = pytest.mark.parametrize("columns", COLUMNS)


@pytest.fixture(scope="module")
def library() -> ModuleType:
    return _library.load()


def check_kernels(
    library: ModuleType,
    x: np.ndarray,
    columns: int,
    *,
    bits: int,
    block_size: int,
    stochastic: bool,
    threads: int = 1,
) -> None:
    """Compares every instruction set with the oracle, both ways."""
    dtype = x.dtype.name
    size = x.shape[1]
    packed = oracle.encode_columns(x, SEED, bits, block_size, stochastic, columns)
    decoded = oracle.decode(*packed, size, x.dtype, bits, block_size, columns)
    format = Format(bits, block_size, columns)
    assert packed[0].shape[1] == format.num_words(size)
    assert packed[1].shape[1] == format.num_blocks(size)
    integer = np.uint16 if x.dtype.itemsize == 2 else np.uint32
    for name in library.instruction_sets():
        where = f"{name} {dtype} {columns=} {size=} {bits=} {block_size=} {stochastic=}"
        got = library.pack_affine(
            name,
            storage(x),
            SEED,
            bits,
            block_size,
            stochastic,
            threads,
            dtype,
            columns,
        )
        for part, wanted in zip(got, packed, strict=True):
            assert np.array_equal(part, wanted), where
        y = library.unpack_affine(
            name, *packed, size, bits, block_size, dtype, threads, columns
        )
        assert np.array_equal(y.view(integer), storage(decoded).view(integer)), where


@every_columns
def test_kernels_equal_the_oracle(library: ModuleType, columns: int) -> None:
    # The other parameters take turns.
    turn = 10 * COLUMNS.index(columns)
    for rows in NUM_ROWS:
        if rows * columns > LARGEST:
            continue
        turn += 1
        dtype = FLOAT_DTYPES[turn // 4 % 3]
        x = mixed_rows(8, rows * columns, dtype, seed=turn)
        check_kernels(
            library,
            x,
            columns,
            bits=oracle.BITS[turn % 5],
            block_size=oracle.BLOCK_SIZES[turn // 2 % 5],
            stochastic=turn % 3 > 0,
        )


@pytest.mark.slow
@every_columns
@pytest.mark.parametrize("block_size", oracle.BLOCK_SIZES)
@every_width
def test_kernels_equal_the_oracle_for_all_parameters(
    library: ModuleType, columns: int, block_size: int, bits: int
) -> None:
    for turn, (rows, stochastic) in enumerate(
        itertools.product(NUM_ROWS, (True, False))
    ):
        if rows * columns <= LARGEST:
            dtype = FLOAT_DTYPES[turn % 3]
            x = mixed_rows(8, rows * columns, dtype, seed=turn + bits)
            code = {"bits": bits, "block_size": block_size}
            check_kernels(library, x, columns, **code, stochastic=stochastic)


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize(("rows", "columns"), [(1300, 64), (17, 2304)])
def test_threads_and_batches_do_not_change_the_bytes(
    library: ModuleType, rows: int, columns: int, threads: int
) -> None:
    # More than a megabyte, so that there are threads.
    x = mixed_rows(8, rows * columns, "float32", seed=rows)
    code = {"bits": 2, "block_size": 128, "stochastic": True}
    check_kernels(library, x, columns, **code, threads=threads)


@pytest.mark.parametrize("offset", [1, 3, 5])
def test_arrays_need_no_alignment(library: ModuleType, offset: int) -> None:
    x = mixed_rows(1, 200 * 48, "float32", seed=offset)
    shifted = np.empty(x.size + 8, np.float32)[offset : offset + x.size][None]
    shifted[...] = x
    code = {"bits": 4, "block_size": 64, "stochastic": True}
    check_kernels(library, shifted, 48, **code)


def check_primitives(
    rows: int, columns: int, bits: int, block_size: int, stochastic: bool, dtype: str
) -> None:
    """Compares the custom calls and the reference with the oracle."""
    size = rows * columns
    x = mixed_rows(8, size, dtype, seed=size)
    expected = oracle.encode_columns(x, SEED, bits, block_size, stochastic, columns)
    decoded = oracle.decode(*expected, size, x.dtype, bits, block_size, columns)
    code = {"format": Format(bits, block_size, columns, stochastic)}
    for pack, unpack in (
        (pack_affine, unpack_affine),
        (_reference.pack_affine, _reference.unpack_affine),
    ):
        pack = jax.jit(functools.partial(pack, **code))
        unpack = jax.jit(functools.partial(unpack, **code, size=size, dtype=x.dtype))
        packed = pack(jnp.asarray(x), jnp.uint32(SEED))
        for part, wanted in zip(packed, expected, strict=True):
            assert_same_bits(np.asarray(part).view(np.uint16), wanted)
        assert_same_bits(unpack(*packed), decoded)


@pytest.mark.parametrize(("rows", "columns"), [(0, 5), (1, 3), (17, 100), (1040, 1)])
def test_custom_call_reference_and_oracle_agree(rows: int, columns: int) -> None:
    turn = rows + columns
    check_primitives(
        rows,
        columns,
        bits=oracle.BITS[turn % 5],
        block_size=oracle.BLOCK_SIZES[turn * 2 % 5],
        stochastic=turn % 2 == 0,
        dtype=FLOAT_DTYPES[turn % 3],
    )


@every_width
def test_custom_call_reference_and_oracle_agree_for_all_bits(bits: int) -> None:
    check_primitives(75, 48, bits, 64, stochastic=True, dtype="float32")


@pytest.mark.slow
@every_columns
@every_dtype
@every_width
def test_custom_call_reference_and_oracle_agree_for_all_columns(
    columns: int, dtype: str, bits: int
) -> None:
    for block_size, stochastic in ((64, True), (256, False)):
        check_primitives(21, columns, bits, block_size, stochastic, dtype)


def test_a_known_matrix_has_known_codes() -> None:
    # Two channels of three rows, 0 1 3 and 10 30 20; the other 30 are zero. Their steps
    # at two bits are 1 and 20/3, rounded up.
    matrix = np.zeros((3, 32), np.float32)
    matrix[:, 0] = 0, 1, 3
    matrix[:, 1] = 10, 30, 20
    codes, scale, minimum = pack_affine(
        jnp.asarray(matrix.ravel()),
        jnp.uint32(0),
        format=Format(2, 64, columns=32, stochastic=False),
    )
    assert scale.shape == minimum.shape == (32,)
    assert scale[:3].tolist() == [1.0, 6.6875, 0.0]
    assert minimum[:3].tolist() == [0.0, 10.0, 0.0]
    # Words of lanes 0 and 1, row i at bit i: codes 0 1 3 and 0 3 1.
    assert codes[:3].tolist() == [0b100, 0b010, 0]
    assert codes[32:35].tolist() == [0b110, 0b110, 0]


@pytest.mark.parametrize("columns", [1, 33, 48, 64])
def test_columns_are_packed_as_if_alone(columns: int) -> None:
    # To nearest: the noise depends on the tile.
    x = mixed_rows(8, 200 * columns, "float32", seed=columns).reshape(8, 200, columns)
    code = {"format": Format(3, 64, columns, stochastic=False)}
    packed = pack_affine(jnp.asarray(x.reshape(8, -1)), jnp.uint32(0), **code)
    decoded = unpack_affine(*packed, size=200 * columns, dtype=x.dtype, **code)
    decoded = np.asarray(decoded).reshape(x.shape)
    fold = 32 // np.gcd(columns, 32)
    for channel in {0, columns // 2, columns - 1}:
        for start in range(fold):
            column = x[:, start::fold, channel].copy()
            alone = oracle.encode(column, 0, 3, 64, stochastic=False).packed()
            parts = [np.stack(part) for part in zip(*alone, strict=True)]
            expected = oracle.decode(*parts, column.shape[1], x.dtype, 3, 64)
            got = decoded[:, start::fold, channel].copy()
            assert_same_bits(got, expected)


@pytest.mark.parametrize("fewer", [1, 2, 4])
def test_fewer_bits_are_a_prefix_of_eight(fewer: int, rng: np.random.Generator) -> None:
    size, columns = 90 * 48, 48
    x = jnp.asarray(rng.standard_normal(size), jnp.float32)
    format, format_of_prefix = Format(8, 64, columns), Format(fewer, 64, columns)
    packed = pack_affine(x, jnp.uint32(1), format=format)
    blocks = format.num_blocks(size)
    unit = (jnp.ones(blocks, jnp.bfloat16), jnp.zeros(blocks, jnp.bfloat16))
    unpack = functools.partial(unpack_affine, size=size, dtype=np.dtype("float32"))
    words = packed[0][: num_tiles(size, columns) * 32 * fewer]
    prefix = unpack(words, *unit, format=format_of_prefix)
    codes = np.asarray(unpack(packed[0], *unit, format=format)).astype(int)
    np.testing.assert_array_equal(prefix, codes >> (8 - fewer))


@pytest.mark.parametrize("batch", [(), (0,), (2, 3)])
def test_batches_are_matrices_packed_alone(
    batch: tuple[int, ...], key: jax.Array
) -> None:
    code = {"format": Format(2, 64, columns=40)}
    x = jax.random.normal(key, (*batch, 800))
    packed = pack_affine(x, jnp.uint32(3), **code)
    # Twenty rows of 40 are five of 160: one row of five tiles.
    assert packed[0].shape == (*batch, 5 * 64)
    assert packed[1].shape == packed[2].shape == (*batch, 160)
    for place in np.ndindex(batch):
        alone = pack_affine(x[place], jnp.uint32(3), **code)
        for part, row in zip(packed, alone, strict=True):
            assert_same_bits(part[place], row)
    y = unpack_affine(*packed, size=800, dtype=np.dtype("float32"), **code)
    assert y.shape == x.shape


def test_seeds_batched_with_the_rows_are_their_own(key: jax.Array) -> None:
    x = jax.random.normal(key, (3, 70 * 32))
    pack = functools.partial(pack_affine, format=Format(2, 64, columns=32))
    seeds = jnp.arange(3, dtype=jnp.uint32)
    packed = jax.vmap(pack)(x, seeds)
    for i in range(3):
        for part, wanted in zip(packed, pack(x[i], seeds[i]), strict=True):
            assert_same_bits(part[i], wanted)


@pytest.mark.parametrize("columns", [-1, 7, 1001])
def test_columns_that_do_not_divide_a_row_are_refused(
    library: ModuleType, columns: int
) -> None:
    code: dict[str, Any] = {"bits": 2, "block_size": 64, "columns": columns}
    x = jnp.zeros(1000)
    message = f"`columns` must be 0 or divide .*1000.*{columns}"
    with pytest.raises(ValueError, match="pack_affine: " + message):
        pack_affine(x, jnp.uint32(0), format=Format(**code))
    packed = pack_affine(x, jnp.uint32(0), format=Format(2, 64, columns=10))
    wanted = {"dtype": np.dtype("float32"), "format": Format(**code)}
    with pytest.raises(ValueError, match="unpack_affine: " + message):
        unpack_affine(*packed, size=1000, **wanted)
    with pytest.raises(ValueError, match=message):
        library.pack_affine(
            "scalar", np.zeros((1, 1000), np.float32), 0, stochastic=True, **code
        )


def test_the_custom_call_checks_the_columns_itself() -> None:
    x = jnp.zeros(1000)
    pack_bitmask(x > 0)  # registers the handlers
    call = jax.ffi.ffi_call(
        "dafjax_pack_affine",
        tuple(jax.ShapeDtypeStruct((64,), d) for d in (jnp.uint16, *["bfloat16"] * 2)),
    )
    attributes = {
        "bits": 2,
        "block_size": 64,
        "stochastic": 0,
        "dithered": 0,
        "columns": 7,
        "salt": 0,
    }
    attributes = {name: np.int64(value) for name, value in attributes.items()}
    message = r"pack_affine: columns \(7\) must be 0 or divide .*\(1000\)"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        call(x, jnp.uint32(0), **attributes)


def test_packed_of_row_blocks_is_refused() -> None:
    packed = pack_affine(jnp.zeros(6400), jnp.uint32(0), format=Format(2, 64))
    code = {"format": Format(2, 64, columns=64), "dtype": np.dtype("float32")}
    with pytest.raises(ValueError, match=r"`codes` must have shape .*columns=64"):
        unpack_affine(*packed, size=6400, **code)


def decibels(codec: Affine, x: np.ndarray) -> float:
    decoded = np.asarray(codec.decode(codec.encode(jnp.asarray(x)), like(x)))
    return float(10 * np.log10(np.sum(x**2) / np.sum((decoded - x) ** 2)))


def test_columns_are_more_accurate_where_channels_differ(
    rng: np.random.Generator,
) -> None:
    scale = np.exp(rng.standard_normal(96))
    mean = 2 * rng.standard_normal(96)
    x = (rng.standard_normal((4, 256, 96)) * scale + mean).astype(np.float32)
    gain = decibels(Affine(bits=4, blocks="columns"), x) - decibels(Affine(bits=4), x)
    assert 5 < gain < 20


@pytest.mark.parametrize(
    ("bits", "dtype"),
    [(1, "float32"), (2, "bfloat16"), (3, "float16"), (4, "float32"), (8, "bfloat16")],
)
def test_values_that_are_not_finite_stay_in_their_channel(
    bits: int, dtype: str, rng: np.random.Generator
) -> None:
    x = hostile_rows(rng, "normal", 256, 64, dtype)
    x[7, 5] = np.inf
    x[99, 20] = np.nan
    codec = Affine(bits=bits, blocks="columns")
    packed = codec.encode(jnp.asarray(x))
    flagged = np.signbit(np.asarray(packed.scale).astype(np.float32))
    assert np.flatnonzero(flagged).tolist() == [5, 20]
    decoded = np.asarray(codec.decode(packed, like(x))).astype(np.float32)
    not_finite = ~np.isfinite(decoded)
    assert np.argwhere(not_finite).tolist() == [[7, 5], [99, 20]]
    assert np.isnan(decoded[99, 20])
    assert np.isinf(decoded[7, 5]) == (bits >= 3)


@pytest.mark.parametrize("shape", [(), (5000,), (63, 64), (200, 33), (0, 64)])
def test_few_rows_are_stored_in_row_blocks(
    shape: tuple[int, ...], key: jax.Array
) -> None:
    x = jax.random.normal(key, shape)
    rows, columns = Affine(bits=3), Affine(bits=3, blocks="columns")
    assert columns.packed_nbytes(like(x)) == rows.packed_nbytes(like(x))
    for part, wanted in zip(
        jax.tree.leaves(columns.encode(x)), jax.tree.leaves(rows.encode(x)), strict=True
    ):
        assert_same_bits(part, wanted)


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ((2, 512, 64), (2, 512 * 64)),
        ((8, 128, 64), (8, 128 * 64)),
        ((8, 64, 64), (8, 64 * 64)),
        # Examples are not put together: devices divide them.
        ((8, 32, 64), None),
        # Two rows of 16 channels count as one.
        ((8, 16, 16, 16), (8, 16 * 16 * 16)),
        ((1024, 64), None),
        ((4096,), None),
    ],
)
def test_columns_are_the_default_from_64_values_of_a_channel_on(shape, rows) -> None:
    codec = Affine(blocks="columns")
    assert codec.has_full_columns(shape) == (rows is not None)
    if rows is not None:
        assert codec.rows_and_format(shape) == (rows, Format(2, 256, shape[-1]))


def test_transformations_of_the_codec_agree_with_a_loop(key: jax.Array) -> None:
    # Every matrix alone has rows enough for columns.
    codec = Affine(bits=2, block_size=64, blocks="columns")
    x = jax.random.normal(key, (3, 70, 64)) * jnp.arange(64.0)
    matrix = like(x[0])
    packed = [codec.encode(m) for m in x]
    assert packed[0].scale.shape == (128,)
    stacked = jax.tree.map(lambda *p: jnp.stack(p), *packed)
    decoded = jnp.stack([codec.decode(p, matrix) for p in packed])

    mapped = jax.jit(jax.vmap(codec.encode))(x)
    _, scanned = jax.lax.scan(lambda _, m: (None, codec.encode(m)), None, x)
    for parts in (mapped, scanned):
        for part, wanted in zip(
            jax.tree.leaves(parts), jax.tree.leaves(stacked), strict=True
        ):
            assert_same_bits(part, wanted)
    decode = jax.jit(jax.vmap(lambda p: codec.decode(p, matrix)))
    assert_same_bits(decode(stacked), decoded)


@pytest.mark.parametrize("shape", [(64, 64), (2, 40, 50, 48), (1041, 256)])
@pytest.mark.parametrize("bits", [3, 8])
def test_packed_nbytes_is_what_encode_produces(
    shape: tuple[int, ...], bits: int
) -> None:
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    codec = Affine(bits=bits, block_size=128, blocks="columns")
    packed = jax.eval_shape(codec.encode, x)
    nbytes = sum(p.size * p.dtype.itemsize for p in jax.tree.leaves(packed))
    assert codec.packed_nbytes(x) == nbytes
    assert jax.eval_shape(lambda p: codec.decode(p, x), packed).shape == shape


def test_bits_per_element_are_as_documented() -> None:
    for rows in (64, 80, 1024):
        like = jax.ShapeDtypeStruct((rows, 96), np.dtype("float32"))
        nbytes = Affine(bits=2, blocks="columns").packed_nbytes(like)
        assert nbytes * 8 / (rows * 96) == 2 + 32 / min(rows, 256)


def test_other_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"blocks=...\)`.*\('rows', 'columns'\).*'c'"):
        Affine(blocks="c")
