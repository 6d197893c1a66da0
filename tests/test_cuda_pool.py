"""Page pools served by the handlers of CUDA, with simulated kernels, inside of XLA."""

import uuid

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dafjax._native import Format, _cpu, _cuda, pool_get, pool_hash, pool_put
from dafjax.stores import PagePool, StaleHandle
from tests import simulated_gpu
from tests.helpers import assert_same_bits


# What a handler returns is one of them, as JAX dispatches.
ERRORS = (ValueError, jax.errors.JaxRuntimeError)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Registers the handlers of pools as `on_gpu_...` on the CPU."""
    path = simulated_gpu.built(tmp_path_factory)
    handlers = simulated_gpu.load(path)
    for name, function in _cuda.HANDLERS.items():
        if "pool" not in name:
            continue
        handler = jax.ffi.pycapsule(getattr(handlers, function))
        name = name.replace("dafjax_", "on_gpu_")
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    return path


@pytest.fixture
def pool(library):
    # A name is part of what JAX has compiled.
    return PagePool(name=f"{uuid.uuid4()}")


def _call(name, results, *operands, **attributes):
    call = jax.ffi.ffi_call(f"on_gpu_{name}", results)
    return jax.jit(lambda *operands: call(*operands, **attributes))(*operands)


def _hash(name):
    return np.uint64(pool_hash(name)).astype(np.int64)


def _code(pool, block_size, columns):
    return {
        "pool": _hash(pool.name),
        "block_size": np.int64(block_size),
        "columns": np.int64(columns),
    }


def _put(pool, x, *, bits=2, block_size=64, columns=0, site="x"):
    handle = jax.ShapeDtypeStruct((*x.shape[:-2], 4), jnp.uint32)
    code = {"bits": np.int64(bits), "max_bits": np.int64(8)}
    code |= {"site": _hash(site), "stochastic": np.int64(1)}
    code |= _code(pool, block_size, columns)
    return _call("pool_put", handle, x, jnp.uint32(5), **code)


def _get(pool, handle, like, *, block_size=64, columns=0, reads=0):
    y = jax.ShapeDtypeStruct(like.shape, like.dtype)
    code = _code(pool, block_size, columns) | {"reads": np.int64(reads)}
    return jax.block_until_ready(_call("pool_get", y, handle, **code))


def _normal(shape, dtype="float32"):
    return jax.random.normal(jax.random.key(3), shape).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("columns", [0, 48])
def test_what_a_pool_gives_back_is_what_it_gives_on_a_cpu(pool, dtype, columns):
    x = _normal((2, 3, 1584), dtype).at[0, 0, 5].set(jnp.nan)
    code = {"block_size": 128, "columns": columns}
    got = _get(pool, _put(pool, x, bits=4, **code), x, **code)
    on_cpu = PagePool(name=f"{uuid.uuid4()}")
    code = {"format": Format(4, **code), "pool": pool_hash(on_cpu.name)}
    handle = pool_put(x, jnp.uint32(5), site=0, max_bits=8, **code)
    want = pool_get(handle, rows=x.shape[-2:], dtype=x.dtype, **code)
    assert_same_bits(got, want)
    assert pool.stats().entries == on_cpu.stats().entries == 2


@pytest.mark.parametrize("columns", [0, 48])
def test_what_the_cpu_packs_is_what_the_gpu_packs(pool, columns):
    x = _normal((2, 3, 1584)).at[0, 0, 5].set(jnp.inf)
    with_cpu = PagePool(packer="cpu", name=f"{uuid.uuid4()}")
    for bits in (1, 2, 4, 8):
        code = {"block_size": 64, "columns": columns}
        want = _get(pool, _put(pool, x, bits=bits, **code), x, **code)
        got = _get(with_cpu, _put(with_cpu, x, bits=bits, **code), x, **code)
        assert_same_bits(got, want)
    assert (pool.stats().packer, with_cpu.stats().packer) == ("gpu", "cpu")
    assert PagePool().stats().packer is None


def test_packers_are_named():
    with pytest.raises(
        ValueError, match=r"`packer` must be one of 'auto', 'gpu', 'cpu"
    ):
        PagePool(packer="tpu")


def test_nothing_is_put_of_empty_arrays(pool):
    x = jnp.zeros((2, 0, 3))
    handle = _put(pool, x)
    assert not handle.any()
    assert _get(pool, handle, x).size == 0
    assert pool.stats().total_entries == 0


def test_the_handle_of_zeros_gives_zeros(pool):
    x = _normal((1, 700))
    assert not _get(pool, jnp.zeros(4, jnp.uint32), x).any()
    pool.collect()


def _assert_refused(pool, handle, like):
    """A load gives NaN, and each of those who may come next says so, once."""
    for tell in ("a call", "collect", "the end of a block"):
        before = pool.stats().refused_handles
        assert jnp.isnan(_get(pool, handle, like)).all()
        assert pool.stats().refused_handles == before + 1
        if tell == "a call":
            message = "FAILED_PRECONDITION: .*pool_put: a load .* found nothing"
            with pytest.raises(ERRORS, match=message):
                jax.block_until_ready(_put(pool, like))
        elif tell == "collect":
            with pytest.raises(StaleHandle, match="found nothing, and gave NaN"):
                pool.collect()
        else:
            with pytest.raises(StaleHandle), pool:
                pass
        pool.collect()


def test_a_residual_of_an_execution_that_is_over_is_gone(pool):
    x = _normal((1, 700))
    handle = _put(pool, x)
    # Not reused yet, and so it is still there.
    _put(pool, x)
    assert jnp.isfinite(_get(pool, handle, x)).all()
    _put(pool, x)
    pool.collect()
    _assert_refused(pool, handle, x)


@pytest.mark.parametrize("packer", ["gpu", "cpu"])
def test_collecting_frees_what_its_backward_pass_has_read(library, packer):
    pool = PagePool(packer=packer, name=f"{uuid.uuid4()}", executions_in_flight=9)
    x = _normal((1, 700))
    read, in_part, unread = (_put(pool, x) for _ in range(3))
    for _ in range(2):
        want = _get(pool, read, x, reads=2)
    _get(pool, in_part, x, reads=2)
    assert pool.stats().live_entries == 3
    pool.collect()
    assert (pool.stats().live_entries, pool.stats().entries) == (2, 2)
    for handle in (in_part, unread):
        assert_same_bits(_get(pool, handle, x), want)
    # What is put into its slot has not been read.
    _put(pool, x)
    pool.collect()
    assert pool.stats().live_entries == 3
    _assert_refused(pool, read, x)


def test_a_handle_that_this_pool_did_not_make_is_refused(pool):
    x = _normal((1, 700))
    _put(pool, x)
    _assert_refused(pool, jnp.asarray([0, 0, 1, 12345], jnp.uint32), x)
    _assert_refused(pool, jnp.asarray([2**32 - 1] * 4, jnp.uint32), x)
    other = PagePool(name=f"{uuid.uuid4()}")
    _assert_refused(pool, _put(other, x), x)


def test_a_handle_of_an_array_of_another_size_is_refused(pool):
    handle = _put(pool, _normal((1, 700)))
    assert jnp.isnan(_get(pool, handle, _normal((1, 7000)))).all()
    with pytest.raises(ValueError, match="an entry of another shape"):
        pool.collect()


def test_an_error_of_the_block_is_not_hidden(pool):
    _get(pool, jnp.ones(4, jnp.uint32), _normal((1, 700)))
    with pytest.raises(KeyError), pool:
        raise KeyError


def test_a_pool_serves_either_cpus_or_a_gpu(pool):
    x = _normal((1, 700))
    code = {"pool": pool_hash(pool.name), "site": 0, "max_bits": 8}
    on_cpu = lambda: pool_put(x, jnp.uint32(0), format=Format(2, 64), **code)
    on_cpu()
    with pytest.raises(ERRORS, match="residuals of programs for CP"):
        jax.block_until_ready(_put(pool, x))
    with pool:
        pass
    _put(pool, x)
    with pytest.raises(ERRORS, match="serves programs for a GPU"):
        jax.block_until_ready(on_cpu())


def test_backward_once_is_for_cpus(library):
    pool = PagePool(backward_once=True, name=f"{uuid.uuid4()}")
    with pytest.raises(ERRORS, match="backward_once=True"):
        jax.block_until_ready(_put(pool, _normal((1, 700))))


def test_a_pool_that_does_not_exist_is_named(library):
    gone = PagePool(name=f"{uuid.uuid4()}")
    pool = _Named(gone.name)
    del gone
    with pytest.raises(ERRORS, match="does not exist in this proc"):
        jax.block_until_ready(_put(pool, _normal((1, 700))))


class _Named:
    def __init__(self, name):
        self.name = name


def test_a_budget_holds_from_the_next_execution_on(pool):
    x = _normal((1, 200_000))
    exact = _get(pool, _put(pool, x, bits=8), x)
    pool.budget = "64KiB"
    degraded = _get(pool, _put(pool, x, bits=8), x)
    stats = pool.stats()
    assert stats.committed_nbytes <= 64 << 10
    assert stats.sites["site " + f"{pool_hash('x'):016x}"].bits_kept == 2
    assert jnp.mean((exact - x) ** 2) < 1e-3 < jnp.mean((degraded - x) ** 2) < 10


def test_sensitivities_become_importances(pool):
    pool.budget = "64MiB"
    x = _normal((1, 6400))
    sites = np.asarray([_hash("x")])
    for _ in range(3):
        _put(pool, x)
        done = jax.ShapeDtypeStruct((), jnp.uint8)
        measured = jnp.asarray([[1.0, 2.0], [0.5, 1.0]])
        attributes = {"pool": _hash(pool.name), "sites": sites}
        assert _call("pool_note", done, measured, **attributes) == 0
    (site,) = pool.stats().sites.values()
    assert 1.5 * 4 < site.importance < 1.5 * 64
    assert pool.stats().gradient_energy == 3


def test_each_thread_of_python_can_collect(pool):
    """Settling has a stream of its own."""
    x = _normal((1, 700))
    for _ in range(3):
        _put(pool, x)
        pool.collect()
    assert _cpu.find_pool(pool_hash(pool.name)).violation() is None


def test_training_gives_the_numbers_of_arrays(library):
    """Scans, branches, `vmap`, `jax.checkpoint`; pullbacks called twice and never."""
    some = "done_and_collected and (scan] or cond]) or called_twice or never_called"
    simulated_gpu.run_tests(library, "tests/test_pool_training.py", "-k", some)


# On a GPU errors come later, and `backward_once` is refused.
OTHERWISE_ON_A_GPU = (
    "is_gone_is_a_clear_error", "was_collected_is_a_clear_error", "did_not_make",
    "are_freed_when_their_backward", "second_backward_pass", "another_size",
    "micro_batches_needs_the_memory", "other_platforms",
)  # fmt: skip


@pytest.mark.slow
def test_all_of_training_is_as_on_a_cpu(library):
    as_on_a_cpu = " and ".join(f"not {name}" for name in OTHERWISE_ON_A_GPU)
    simulated_gpu.run_tests(library, "tests/test_pool_training.py", "-k", as_on_a_cpu)
