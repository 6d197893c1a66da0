"""The kernels of every instruction set give the bytes of the scalar ones."""

import itertools

import numpy as np
import pytest

from dafjax._native import _cpu


DTYPES = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}
VARIANTS = _cpu.instruction_sets()[:-1] or ["scalar"]
BLOCK_SIZES = (64, 128, 256, 512, 1024)


def _values(rng, shape, dtype):
    x = rng.normal(size=shape).astype(np.float32)
    x[rng.random(shape) < 0.002] = np.nan
    x[rng.random(shape) < 0.002] = -np.inf
    if dtype == "bfloat16":
        return (x.view(np.uint32) >> 16).astype(np.uint16)
    return x.astype(DTYPES[dtype])


def _pack(
    variant,
    x,
    *,
    bits=2,
    block_size=256,
    stochastic=True,
    threads=1,
    dtype,
    columns=0,
):
    return _cpu.pack_affine(
        variant, x, 7, bits, block_size, stochastic, threads, dtype, columns
    )


def _assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_scalar_is_always_there_and_the_best_set_is_in_use():
    assert _cpu.instruction_sets()[-1] == "scalar"
    assert _cpu.instruction_set() == _cpu.instruction_sets()[0]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_packing_and_unpacking_give_the_scalar_bytes(variant, dtype, bits):
    rng = np.random.default_rng(bits)
    sizes = [0, 1, 63, 64, 65, 511, 513, 1024, 1025, 2049, 7000]
    for block_size, size in itertools.product(BLOCK_SIZES, sizes):
        x = _values(rng, (2, size), dtype)
        for stochastic in [False, True]:
            options = {"bits": bits, "block_size": block_size, "stochastic": stochastic}
            packed = _pack("scalar", x, **options, dtype=dtype)
            _assert_same(_pack(variant, x, **options, dtype=dtype), packed)
            last = (size, bits, block_size, dtype)
            expected = _cpu.unpack_affine("scalar", *packed, *last)
            actual = _cpu.unpack_affine(variant, *packed, *last)
            np.testing.assert_array_equal(
                actual.view(np.uint8), expected.view(np.uint8)
            )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_column_blocks_have_the_scalar_bytes(variant, dtype, bits):
    rng = np.random.default_rng(bits)
    shapes = [(0, 3), (17, 3), (70, 32), (33, 96), (1040, 2), (300, 48)]
    for block_size, (rows, columns) in itertools.product(BLOCK_SIZES, shapes):
        x = _values(rng, (2, rows * columns), dtype)
        for stochastic in [False, True]:
            options = {"bits": bits, "block_size": block_size, "stochastic": stochastic}
            options |= {"dtype": dtype, "columns": columns}
            packed = _pack("scalar", x, **options)
            _assert_same(_pack(variant, x, **options), packed)
            last = (x.shape[1], bits, block_size, dtype, 1, columns)
            expected = _cpu.unpack_affine("scalar", *packed, *last)
            actual = _cpu.unpack_affine(variant, *packed, *last)
            np.testing.assert_array_equal(
                actual.view(np.uint8), expected.view(np.uint8)
            )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("threads", [1, 2, 4, 8])
def test_bytes_do_not_depend_on_threads(variant, threads):
    x = _values(np.random.default_rng(0), (3, 400_001), "float32")
    packed = _pack("scalar", x, dtype="float32")
    _assert_same(_pack(variant, x, threads=threads, dtype="float32"), packed)
    last = (x.shape[1], 2, 256, "float32")
    np.testing.assert_array_equal(
        _cpu.unpack_affine(variant, *packed, *last, threads),
        _cpu.unpack_affine("scalar", *packed, *last),
    )


@pytest.mark.parametrize("variant", _cpu.instruction_sets())
def test_every_row_is_packed_on_its_own(variant):
    x = _values(np.random.default_rng(1), (4, 3000), "float32")
    together = _pack(variant, x, dtype="float32")
    for row in range(len(x)):
        alone = _pack(variant, x[row : row + 1], dtype="float32")
        _assert_same(alone, [part[row : row + 1] for part in together])


@pytest.mark.parametrize("variant", _cpu.instruction_sets())
@pytest.mark.parametrize("offset", [1, 3, 5])
def test_arrays_need_no_alignment(variant, offset):
    x = _values(np.random.default_rng(2), (1, 5000), "float32")
    shifted = np.empty(x.size + 8, np.float32)[offset : offset + x.size].reshape(
        x.shape
    )
    shifted[...] = x
    _assert_same(
        _pack(variant, shifted, dtype="float32"), _pack(variant, x, dtype="float32")
    )


@pytest.mark.parametrize("variant", _cpu.instruction_sets())
@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 3000])
def test_booleans_come_back(variant, size):
    x = np.random.default_rng(size).random((3, size)) < 0.5
    words = _cpu.pack_bitmask(variant, x)
    np.testing.assert_array_equal(words, _cpu.pack_bitmask("scalar", x))
    np.testing.assert_array_equal(_cpu.unpack_bitmask(variant, words, size), x)


def test_the_read_pass_sums():
    x = np.ones(1_000_003, np.float32)
    assert _cpu.read_bandwidth_pass(x, 2) == pytest.approx(x.size, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"instruction_set": "sse9"},
            "`instruction_set` must be one of .*scalar.*sse9",
        ),
        ({"bits": 5}, "`bits` must be 1, 2, 3, 4 or 8, but got 5"),
        ({"block_size": 65}, "`block_size` must be 64, 128, .*, but got 65"),
        ({"columns": 2}, "`columns` must be 0 or divide .* a row \\(3\\), but got 2"),
        ({"columns": 2**60}, "`columns` must be 0 or divide .* but got 1152921504606"),
        ({"num_threads": 0}, "`num_threads` must be in 1 .. 1024, but got 0"),
        ({"dtype": "int8"}, "`dtype` must be one of float32, bfloat16, .*int8"),
        ({"x": np.zeros(3, np.float32)}, "`x` must be a C-contiguous float32"),
        ({"x": np.zeros((1, 3))}, "`x` must be a C-contiguous float32"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments = {
        "instruction_set": "scalar",
        "x": np.zeros((1, 3), np.float32),
        "seed": 0,
        "bits": 2,
        "block_size": 64,
        "stochastic": True,
    }
    with pytest.raises(ValueError, match=message):
        _cpu.pack_affine(**(arguments | change))


def test_packed_arrays_of_a_wrong_shape_are_refused():
    packed = _pack("scalar", np.zeros((1, 600), np.float32), dtype="float32")
    with pytest.raises(ValueError, match=r"`codes` must have the shape \[1, 192\]"):
        _cpu.unpack_affine("scalar", *packed, 1025, 2, 256)
