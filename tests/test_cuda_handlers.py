"""The handlers of CUDA, with simulated kernels, inside of XLA on the CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dafjax._native import (
    Format,
    _cpu,
    _cuda,
    _reduce,
    pack_affine,
    pack_bitmask,
    pool_hash,
    unpack_affine,
    unpack_bitmask,
)
from tests import simulated_gpu
from tests.helpers import assert_same_bits


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return simulated_gpu.built(tmp_path_factory)


@pytest.fixture(scope="module")
def handlers(library):
    """Registers the handlers as `simulated_...` on the CPU."""
    library = simulated_gpu.load(library)
    for name, function in _cuda.HANDLERS.items():
        handler = jax.ffi.pycapsule(getattr(library, function))
        jax.ffi.register_ffi_target(_simulated(name), handler, platform="cpu")


def _simulated(name):
    return name.replace("dafjax_", "simulated_")


def _call(name, results, *operands, **attributes):
    attributes = {key: np.int64(value) for key, value in attributes.items()}
    call = jax.ffi.ffi_call(f"simulated_{name}", results)
    return jax.jit(lambda *operands: call(*operands, **attributes))(*operands)


def _like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@pytest.mark.parametrize(
    ("stochastic", "dithered", "columns", "dtype"),
    [
        (False, False, 0, "float32"),
        (False, False, 48, "bfloat16"),
        (True, False, 0, "float16"),
        (True, False, 48, "float32"),
        (True, True, 0, "bfloat16"),
        (True, True, 48, "float16"),
    ],
)
def test_affine_codes_are_those_of_the_cpu(
    handlers, dtype, columns, stochastic, dithered
):
    x = jax.random.normal(jax.random.key(3), (2, 3, 1584)).astype(dtype)
    x = x.at[0, 0, 5].set(jnp.nan)
    code = {"bits": 4, "block_size": 128, "columns": columns}
    rounding = {"stochastic": stochastic, "dithered": dithered}
    format = Format(**rounding, **code)
    expected = pack_affine(x, jnp.uint32(9), format=format)
    packed = _call(
        "pack_affine", list(map(_like, expected)), x, jnp.uint32(9), **rounding, **code
    )
    for part, wanted in zip(packed, expected, strict=True):
        assert_same_bits(part, wanted)
    seeds = jnp.full((2, 3), 9, jnp.uint32) if dithered else None
    y = unpack_affine(
        *expected, size=x.shape[-1], dtype=x.dtype, seeds=seeds, format=format
    )
    # The last operand is not read.
    others = (x,) if seeds is None else (seeds, x)
    call = functools.partial(_call, "unpack_affine", _like(y), *packed, **code)
    assert_same_bits(call(*others, dithered=dithered), y)
    if dithered:
        with pytest.raises(jax.errors.JaxRuntimeError, match="a uint32 seed for each"):
            jax.block_until_ready(call(x, dithered=True))


@pytest.mark.parametrize("columns", [32, 48])
def test_sums_of_blocks_are_those_of_their_values(handlers, rng, columns):
    x = rng.standard_normal((2, 3, 1584 * columns // 16)).astype(np.float32)
    code = {"bits": 2, "block_size": 64, "columns": columns}
    expected = pack_affine(x, jnp.uint32(9), format=Format(**code))
    of_blocks = jax.ShapeDtypeStruct(expected[1].shape, jnp.float32)
    results = [*map(_like, expected), of_blocks, of_blocks]
    *packed, total, of_squares = _call(
        "pack_affine_and_sum", results, x, jnp.uint32(9),
        stochastic=True, dithered=False, **code,
    )  # fmt: skip
    for part, wanted in zip(packed, expected, strict=True):
        assert_same_bits(part, wanted)
    rows = x.reshape(-1, columns).astype(np.float64)
    for blocks, values in ((total, rows), (of_squares, rows**2)):
        # As `pack_affine_and_sum` sums them.
        sums = np.asarray(blocks).reshape(-1, columns).sum(0)
        np.testing.assert_allclose(sums, values.sum(0), rtol=1e-5, atol=1e-3)


def test_sums_of_row_blocks_are_refused(handlers):
    x = jnp.ones(512)
    code = {"bits": 2, "block_size": 64, "columns": 0}
    packed = pack_affine(x, jnp.uint32(9), format=Format(**code))
    results = [*map(_like, packed), jax.ShapeDtypeStruct((8,), jnp.float32)] * 2
    with pytest.raises(jax.errors.JaxRuntimeError, match="columns must be positive"):
        jax.block_until_ready(
            _call(
                "pack_affine_and_sum", [*results[:4], results[3]], x, jnp.uint32(9),
                stochastic=True, dithered=False, **code,
            )
        )  # fmt: skip


@pytest.mark.parametrize("size", [0, 3, 515])
def test_bitmasks_are_those_of_the_cpu(handlers, size):
    mask = jax.random.bernoulli(jax.random.key(size), 0.3, (4, size))
    words = pack_bitmask(mask)
    assert_same_bits(_call("pack_bitmask", _like(words), mask), words)
    assert_same_bits(
        _call("unpack_bitmask", _like(mask), words, mask),
        unpack_bitmask(words, size=size),
    )


def test_ties_give_what_they_get(handlers):
    arrays = [jnp.arange(7.0), jnp.zeros((0, 3)), jnp.ones((2, 2), jnp.bfloat16)]
    for x, y in zip(
        arrays, _call("tie", list(map(_like, arrays)), *arrays), strict=True
    ):
        assert_same_bits(x, y)


def _note(ledger, importances, num_sites):
    return _call(
        "ledger_note", jax.ShapeDtypeStruct((), jnp.uint8), jnp.asarray(importances),
        ledger=np.uint64(pool_hash(ledger)).astype(np.int64),
        sites=range(1, num_sites + 1),
    )  # fmt: skip


def test_notes_are_in_the_ledger(handlers):
    ledger = _cpu.Ledger("noted on a gpu", [1, 2])
    rows = np.float32([[[1, 2, 3, 4], [0.5, -1, np.nan, 8]]])
    for _ in range(2):
        assert _note("noted on a gpu", rows, 3) == 0
    assert ledger.take() == {
        "importances": {1: 3.0, 2: 4.0},
        "gradient_energy": 24.0,
        "notes": 4,
        "refused": 2,
    }
    del ledger
    # Nobody wants to know any more.
    assert _note("noted on a gpu", rows, 3) == 0


def test_a_note_of_another_number_of_sites_is_refused(handlers):
    message = r"ledger_note: importances must be \[\*batch, 3\] .* dimensions \[2, 4\]"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(_note("no ledger", np.ones((2, 4), np.float32), 2))


def test_bits_are_adapted_by_what_a_gpu_notes(library):
    some = "nan_never_enters or outlier or a_pool_measures or on_two_devices"
    simulated_gpu.run_tests(library, "tests/test_adaptive.py", "-k", some)


@pytest.mark.parametrize("strategy", range(3))
def test_reductions_are_those_of_the_cpu(handlers, strategy):
    x = jax.random.normal(jax.random.key(1), (2, 3, 9001))
    *expected, scratch = _reduce.minmax_p.bind(x, strategy="auto")
    results = [*map(_like, expected), _like(scratch)]
    *actual, _ = _call("minmax", results, x, strategy=strategy)
    for part, wanted in zip(actual, expected, strict=True):
        assert_same_bits(part, wanted)
    total, _ = _call("sum_of_squares", results[1:], x, strategy=strategy)
    np.testing.assert_allclose(total, jnp.sum(x * x, axis=-1), rtol=1e-6)


def _time(timed, *, num_words=16):
    results = [
        jax.ShapeDtypeStruct((3, len(timed) // 5), jnp.float32),
        jax.ShapeDtypeStruct((num_words,), jnp.uint32),
        *2 * [jax.ShapeDtypeStruct((2,), jnp.float32)],
    ]
    return _call("time_reductions", results, jnp.ones(20_000), timed=timed)


def test_reductions_are_timed(handlers):
    timed = [0, 2, 1, 20_000, 1, 1, 0, 2, 9000, 2]
    seconds, *_ = _time(timed)
    assert seconds.shape == (3, 2)
    assert (np.asarray(seconds) > 0).all()


@pytest.mark.parametrize(
    ("timed", "message"),
    [
        ([0, 2, 1, 20_000], "timed must have 5 numbers"),
        ([0, 3, 1, 20_000, 1], "number 0 is 0 3 1 20000 1"),
        ([0, 2, 1, 20_001, 1], "x must be float32, of at least 20001"),
        ([0, 2, 3, 5000, 1], "the first result must be float32, of at least 3"),
        ([0, 2, 4, 5000, 1], "scratch must be uint32, of at least 24"),
    ],
)
def test_what_cannot_be_timed_is_named(handlers, timed, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(_time(timed, num_words=18))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 5}, r"pack_affine: bits \(5\) must be 1, 2, 3, 4 or 8"),
        ({"block_size": 65}, r"block_size \(65\) must be 64, 128, 256, 512 or 1024"),
        ({"columns": 7}, r"columns \(7\) must be 0 or divide .* row \(128\)"),
        ({"stochastic": 2}, r"stochastic \(2\) must be 0 or 1"),
        ({"dithered": 2}, r"dithered \(2\) must be 0, or 1 where stochastic is 1"),
    ],
)
def test_bad_attributes_are_named(handlers, change, message):
    x = jnp.zeros((1, 128))
    code = {"bits": 2, "block_size": 64, "columns": 0, "stochastic": 1, "dithered": 0}
    packed = pack_affine(x, jnp.uint32(0), format=Format(2, 64))
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(
            _call(
                "pack_affine",
                list(map(_like, packed)),
                x,
                jnp.uint32(0),
                **(code | change),
            )
        )


def test_results_of_a_wrong_shape_are_named(handlers):
    mask = jnp.zeros((2, 600), bool)
    words = jax.ShapeDtypeStruct((2, 32), jnp.uint16)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"words \(\[2, 32\]\) must be \[2, 64\]"
    ):
        jax.block_until_ready(_call("pack_bitmask", words, mask))
