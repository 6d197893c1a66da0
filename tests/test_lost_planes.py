"""Codes that have lost planes: all implementations, and how far off they may be."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dafjax._native import Format, _cpu, _reference
from tests import oracle
from tests.helpers import FLOAT_DTYPES, assert_same_bits, mixed_rows, storage


PREFIXES = [
    (bits, sum(widths[:count]))
    for bits, widths in oracle.PLANES.items()
    for count in range(len(widths))
]
SIZE = 48 * 70


def _packed(x, bits, columns):
    return _cpu.pack_affine(
        "scalar", storage(x), 7, bits, 64, True, 1, x.dtype.name, columns
    )


def _unpacked(variant, packed, dtype, bits, columns, kept):
    codes, scale, minimum = packed
    words = codes.shape[1] // bits * kept
    return _cpu.unpack_affine(
        variant,
        np.ascontiguousarray(codes[:, :words]),
        scale,
        minimum,
        SIZE,
        bits,
        64,
        dtype,
        1,
        columns,
        kept,
    )


@pytest.mark.parametrize("columns", [0, 48])
@pytest.mark.parametrize(("bits", "kept"), PREFIXES)
def test_every_implementation_decodes_what_is_left_alike(bits, kept, columns):
    # Dtypes take turns.
    dtype = FLOAT_DTYPES[(PREFIXES.index((bits, kept)) + columns // 48) % 3]
    x = mixed_rows(16, SIZE, dtype, seed=bits)
    packed = codes, scale, minimum = _packed(x, bits, columns)
    left = codes[:, : codes.shape[1] // bits * kept]
    expected = oracle.decode(
        left, scale, minimum, SIZE, x.dtype, bits, 64, columns, kept
    )
    for variant in _cpu.instruction_sets():
        got = _unpacked(variant, packed, dtype, bits, columns, kept)
        np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8))
    reference = jax.jit(
        functools.partial(
            _reference.unpack_affine,
            size=SIZE,
            dtype=x.dtype,
            format=Format(bits, 64, columns),
            kept_bits=kept,
        )
    )
    parts = (scale, minimum)
    as_bfloat16 = (jax.lax.bitcast_convert_type(p, jnp.bfloat16) for p in parts)
    assert_same_bits(reference(jnp.asarray(left), *as_bfloat16), expected)


@pytest.mark.parametrize(("bits", "kept"), PREFIXES)
def test_what_is_left_is_off_by_half_a_step_of_its_own(bits, kept, rng):
    x = rng.standard_normal((2, SIZE)).astype(np.float32)
    packed = _packed(x, bits, 0)
    whole = _unpacked("scalar", packed, "float32", bits, 0, bits)
    left = _unpacked("scalar", packed, "float32", bits, 0, kept)
    step = (packed[1].astype(np.uint32) << 16).view(np.float32)
    step = np.repeat(step, 64, axis=1)[:, :SIZE]
    worst = np.max(np.abs(whole - left) / step)
    assert worst == pytest.approx((2 ** (bits - kept) - 1) / 2, rel=1e-4)


@pytest.mark.parametrize(("bits", "kept"), PREFIXES)
def test_what_is_not_finite_is_never_taken_for_finite(bits, kept, rng):
    x = rng.standard_normal((1, SIZE)).astype(np.float32)
    x[0, ::100] = np.inf
    left = _unpacked("scalar", _packed(x, bits, 0), "float32", bits, 0, kept)
    assert not np.isfinite(left[0, ::100]).any()
    if kept > 0:
        assert np.isfinite(left).sum() == np.isfinite(x).sum()


@pytest.mark.parametrize("kept", [3, 5, 8, -1])
def test_a_number_of_bits_that_no_planes_have_is_refused(kept):
    packed = _packed(np.zeros((1, SIZE), np.float32), 4, 0)
    message = "`kept_bits` must be what planes of codes of 4 bits begin with, but got"
    with pytest.raises(ValueError, match=message):
        _unpacked("scalar", packed, "float32", 4, 0, kept)
