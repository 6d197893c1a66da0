"""The custom calls against a NumPy oracle, bit for bit.

Grids call the kernels directly, for every instruction set of this machine; a spread of
sizes goes through XLA, where the same kernels and the `jax.numpy` reference must agree.
"""

import functools
import itertools
from types import ModuleType

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dafjax._native import Format, _library, _reference, pack_affine, unpack_affine
from tests import oracle
from tests.helpers import FLOAT_DTYPES, assert_same_bits, mixed_rows, storage


SEED = 20_240_917
# The reference is compiled anew for each.
SPREAD = (0, 1, 512, 513, 2049)

every_dtype = pytest.mark.parametrize("dtype", FLOAT_DTYPES)
every_rounding = pytest.mark.parametrize(
    "stochastic", [True, False], ids=["stochastic", "nearest"]
)


@pytest.fixture(scope="module")
def library() -> ModuleType:
    return _library.load()


def grid_rows(dtype: str, step: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns rows of lengths up to 1025, their lengths, and their noise."""
    sizes = np.arange(1026)[::-step]
    x = mixed_rows(sizes.size, 2048, dtype, seed=len(dtype))
    x[np.arange(2048) >= sizes[:, None]] = 0
    return x, sizes, oracle.noise_words(SEED, x.astype(np.float32))


@every_dtype
def test_kernels_equal_the_oracle_at_lengths_of_every_kind(
    library: ModuleType, dtype: str
) -> None:
    # Odd steps meet every place in a vector. Kernels widen other dtypes to float32,
    # which has more of them.
    x, sizes, words = grid_rows(dtype, step=3 if dtype == "float32" else 9)
    for bits, block_size, stochastic in itertools.product(
        oracle.BITS, oracle.BLOCK_SIZES, (True, False)
    ):
        encoded = oracle.encode(x, SEED, bits, block_size, stochastic, sizes, words)
        expected = encoded.packed()
        for name, (i, size) in itertools.product(
            library.instruction_sets(), enumerate(sizes)
        ):
            row = storage(x[i : i + 1, :size].copy())
            packed = library.pack_affine(
                name, row, SEED, bits, block_size, stochastic, 1, dtype
            )
            where = f"{name} {dtype} {bits=} {block_size=} {stochastic=} {size=}"
            for got, wanted in zip(packed, expected[i], strict=True):
                assert np.array_equal(got[0], wanted), where


@every_dtype
def test_kernels_decode_as_the_oracle_at_lengths_of_every_kind(
    library: ModuleType, dtype: str
) -> None:
    x, sizes, words = grid_rows(dtype, step=5)
    for bits, block_size in itertools.product(oracle.BITS, oracle.BLOCK_SIZES):
        encoded = oracle.encode(x, SEED, bits, block_size, True, sizes, words)
        full = [
            p.reshape(x.shape[0], -1) for p in oracle.pack_planes(encoded.codes, bits)
        ]
        scale = encoded.scale.astype(ml_dtypes.bfloat16).view(np.uint16)
        minimum = encoded.minimum.astype(ml_dtypes.bfloat16).view(np.uint16)
        decoded = oracle.decode(
            np.concatenate(full, axis=1),
            scale,
            minimum,
            x.shape[1],
            x.dtype,
            bits,
            block_size,
        )
        rows = encoded.packed()
        for name, (i, size) in itertools.product(
            library.instruction_sets(), enumerate(sizes)
        ):
            packed = [part[None] for part in rows[i]]
            got = library.unpack_affine(name, *packed, size, bits, block_size, dtype)
            where = f"{name} {dtype} {bits=} {block_size=} {size=}"
            wanted = storage(decoded[i, :size])
            integer = np.uint16 if wanted.dtype.itemsize == 2 else np.uint32
            assert np.array_equal(got[0].view(integer), wanted.view(integer)), where


@every_rounding
@pytest.mark.parametrize("bits", oracle.BITS)
def test_threads_and_batches_do_not_change_the_bytes(
    library: ModuleType, bits: int, stochastic: bool
) -> None:
    x = mixed_rows(8, 70_001, "float32", seed=bits)
    expected = oracle.encode(x, 7, bits, 256, stochastic).packed()
    for name, threads in itertools.product(library.instruction_sets(), (1, 2, 4, 8)):
        packed = library.pack_affine(name, x, 7, bits, 256, stochastic, threads)
        for row, wanted in enumerate(expected):
            for got, part in zip(packed, wanted, strict=True):
                assert np.array_equal(got[row], part), (name, threads, row)
        sizes = (70_001, bits, 256, "float32")
        alone = library.unpack_affine(name, *packed, *sizes, 1)
        assert_same_bits(library.unpack_affine(name, *packed, *sizes, threads), alone)


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1])
def test_every_seed_gives_the_oracles_noise(library: ModuleType, seed: int) -> None:
    x = mixed_rows(8, 1500, "float32", seed=3)
    expected = oracle.encode(x, seed, 2, 256, True).packed()
    for name in library.instruction_sets():
        codes, _, _ = library.pack_affine(name, x, seed, 2, 256, True, 1)
        assert_same_bits(codes, np.stack([row[0] for row in expected]))


def test_bitmask_kernels_equal_the_oracle_at_every_length(library: ModuleType) -> None:
    mask = np.random.default_rng(5).random((1026, 1536)) < 0.5
    sizes = np.arange(1026)
    mask &= np.arange(1536) < sizes[:, None]
    (plane,) = oracle.pack_planes(mask.astype(np.uint32), bits=1)
    for name, size in itertools.product(library.instruction_sets(), sizes):
        row = mask[size : size + 1, :size].copy()
        words = library.pack_bitmask(name, row)
        wanted = plane[size : size + 1, : -(-size // 512)].reshape(1, -1)
        assert np.array_equal(words, wanted), (name, size)
        assert np.array_equal(library.unpack_bitmask(name, words, size), row), name


@pytest.mark.parametrize("turn", range(len(SPREAD)))
def test_custom_call_reference_and_oracle_agree(turn: int) -> None:
    # The other parameters take turns too, because the reference is slow to compile.
    check_all_agree(
        SPREAD[turn],
        bits=oracle.BITS[turn % 5],
        block_size=oracle.BLOCK_SIZES[turn * 2 % 5],
        stochastic=turn % 2 == 0,
        dtype=FLOAT_DTYPES[turn % 3],
    )


@pytest.mark.parametrize(
    ("bits", "stochastic"),
    [(1, True), (2, False), (3, True), (4, False), (8, True), (8, False)],
)
def test_custom_call_reference_and_oracle_agree_for_all_bits(
    bits: int, stochastic: bool
) -> None:
    check_all_agree(1400, bits, 128 << int(stochastic), stochastic, "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_custom_call_reference_and_oracle_agree_for_all_dtypes(dtype: str) -> None:
    check_all_agree(1400, 3, 1024, True, dtype)


@pytest.mark.slow
@every_rounding
@pytest.mark.parametrize("bits", oracle.BITS)
@pytest.mark.parametrize("block_size", oracle.BLOCK_SIZES)
def test_the_reference_equals_the_oracle_at_every_length(
    bits: int, block_size: int, stochastic: bool
) -> None:
    x, sizes, words = grid_rows("float32")
    expected = oracle.encode(x, SEED, bits, block_size, stochastic, sizes, words)
    # One program for all lengths: the length is traced.
    got = jax.jit(
        functools.partial(
            _reference.encode_padded,
            dtype=np.dtype(np.float32),
            format=Format(bits, block_size, stochastic=stochastic),
        )
    )(x.view(np.uint32), jnp.uint32(SEED), jnp.asarray(sizes, jnp.uint32)[:, None])
    assert np.array_equal(got[0], expected.codes)
    held = np.arange(x.shape[1] // block_size) < -(-sizes[:, None] // block_size)
    for part, wanted in zip(got[1:], (expected.scale, expected.minimum), strict=True):
        np.testing.assert_array_equal(
            np.where(held, part, 0).view(np.uint32),
            np.where(held, wanted, 0).astype(np.float32).view(np.uint32),
        )


def check_all_agree(
    size: int, bits: int, block_size: int, stochastic: bool, dtype: str
) -> None:
    x = mixed_rows(16, size, dtype, seed=size)
    rows = oracle.encode(x, SEED, bits, block_size, stochastic).packed()
    codes, scale, minimum = (np.stack(part) for part in zip(*rows, strict=True))
    decoded = oracle.decode(codes, scale, minimum, size, x.dtype, bits, block_size)
    code = {"format": Format(bits, block_size, stochastic=stochastic)}
    for pack, unpack in (
        (pack_affine, unpack_affine),
        (_reference.pack_affine, _reference.unpack_affine),
    ):
        pack = jax.jit(functools.partial(pack, **code))
        unpack = jax.jit(functools.partial(unpack, **code, size=size, dtype=x.dtype))
        packed = pack(jnp.asarray(x), jnp.uint32(SEED))
        assert_same_bits(packed[0], codes)
        assert_same_bits(np.asarray(packed[1]).view(np.uint16), scale)
        assert_same_bits(np.asarray(packed[2]).view(np.uint16), minimum)
        assert_same_bits(unpack(*packed), decoded)


@every_dtype
@pytest.mark.parametrize("bits", oracle.BITS)
def test_ranges_beyond_float32_decode_alike(
    library: ModuleType, bits: int, dtype: str
) -> None:
    # minimum + code * scale is in range, but the product alone may not be.
    largest = float(jnp.finfo(dtype).max)
    values = np.random.default_rng(bits).uniform(-1, 1, (4, 1300)) * largest
    x = np.array(jnp.asarray(values.astype(np.float32)).astype(dtype))
    x[2:, ::100] = np.inf
    rows = oracle.encode(x, SEED, bits, 256, True).packed()
    parts = [np.stack(part) for part in zip(*rows, strict=True)]
    expected = storage(oracle.decode(*parts, 1300, x.dtype, bits, 256))
    for name in library.instruction_sets():
        packed = library.pack_affine(name, storage(x), SEED, bits, 256, True, 1, dtype)
        for got, wanted in zip(packed, parts, strict=True):
            assert_same_bits(got, wanted)
        got = library.unpack_affine(name, *packed, 1300, bits, 256, dtype)
        integer = np.uint16 if got.dtype.itemsize == 2 else np.uint32
        np.testing.assert_array_equal(got.view(integer), expected.view(integer), name)


def test_subnormals_do_not_depend_on_the_thread(library: ModuleType) -> None:
    # XLA's threads flush subnormals, Python's do not.
    x = mixed_rows(8, 5000, "float32", seed=11)
    pack = functools.partial(pack_affine, format=Format(8, 64))
    through_xla = pack(jnp.asarray(x), jnp.uint32(1))
    direct = library.pack_affine(library.instruction_set(), x, 1, 8, 64, True, 1)
    for got, wanted in zip(through_xla, direct, strict=True):
        assert_same_bits(np.asarray(got).view(np.uint16), wanted)
