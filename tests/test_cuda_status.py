"""What is said of CUDA: each obstacle, its remedy, and what is there in this build."""

import ctypes
import dataclasses
import importlib.util
import pathlib
import shutil

import jax
import jax.numpy as jnp
import pytest

from dafjax._native import (
    CudaDevice,
    CudaStatus,
    Format,
    LibraryError,
    _cuda,
    cuda_status,
    hold,
    pack_affine,
    pack_bitmask,
    pool_get,
    pool_note,
    pool_put,
    tie,
    unpack_affine,
    unpack_bitmask,
)
from dafjax._native._cuda import diagnose, is_served
from dafjax.codecs import Affine


ORIN = CudaDevice("Orin", (8, 7), integrated=True)
H100 = CudaDevice("NVIDIA H100", (9, 0), integrated=False)
USABLE = CudaStatus(
    path="libdafjax_cuda.so",
    architectures=("87-real", "90-real"),
    runtime_version=(13, 0),
    driver_version=(13, 1),
    devices=(H100,),
    plugins=("jax-cuda13-plugin 0.11.2",),
)


def test_nothing_is_in_the_way_where_all_is_there():
    status = diagnose(USABLE)
    assert status == USABLE


OBSTACLES = [
    ({"path": None}, "built without CUDA", "DAFJAX_CUDA=ON"),
    ({"driver_version": None}, "no NVIDIA driver", "--runtime nvidia"),
    (
        {"driver_version": (12, 6)},
        "supports CUDA 12.6, .* with CUDA 13.0",
        "CUDA 12 on",
    ),
    ({"devices": ()}, "sees no GPU", "CUDA_VISIBLE_DEVICES"),
    (
        {"devices": (CudaDevice("Pascal", (6, 1), integrated=False),)},
        r"no code for Pascal \(compute capability 6.1\).*87-real, 90-real",
        "DAFJAX_CUDA_ARCHITECTURES=61-real",
    ),
    ({"plugins": ()}, "JAX has no CUDA plugin", r"jax\[cuda13\]"),
]


@pytest.mark.parametrize(("change", "problem", "remedy"), OBSTACLES)
def test_each_obstacle_has_a_remedy(change, problem, remedy):
    status = diagnose(dataclasses.replace(USABLE, **change))
    assert status.problem is not None
    assert status.remedy is not None
    with pytest.raises(ValueError, match=problem):
        raise ValueError(status.problem)
    with pytest.raises(ValueError, match=remedy):
        raise ValueError(status.remedy)


def test_an_orin_is_warned_of_wheels_without_its_code():
    assert "Orin" in diagnose(dataclasses.replace(USABLE, devices=(ORIN,))).warnings[0]
    assert diagnose(USABLE).warnings == ()


def test_convolutions_before_hopper_have_a_flag(monkeypatch):
    orin = dataclasses.replace(USABLE, devices=(ORIN,))
    assert "--xla_gpu_force_conv_nhwc=true" in diagnose(orin).warnings[1]
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_force_conv_nhwc=true")
    assert len(diagnose(orin).warnings) == 1


@pytest.mark.parametrize(
    ("capability", "architectures", "served"),
    [
        ((9, 0), ("90-real",), True),
        ((8, 9), ("80-real",), True),
        ((8, 0), ("87-real",), False),
        ((9, 0), ("80-real",), False),
        ((9, 0), ("80-virtual",), True),
        ((7, 5), ("80-virtual",), False),
        ((11, 0), ("110-real",), True),
        ((12, 1), ("120-real",), True),
        ((9, 0), (), False),
    ],
)
def test_which_gpus_code_runs_on(capability, architectures, served):
    assert is_served(capability, architectures) is served


def test_a_compiler_that_is_there_was_used():
    status = cuda_status()
    if shutil.which("nvcc") is None:
        assert status.path is None
        assert status.problem == "dafjax was built without CUDA."
        return
    assert status.path is not None
    assert status.runtime_version >= (12, 0)
    assert is_served((8, 7), status.architectures)
    # The library has been loaded: it needs no driver.
    if status.driver_version is None:
        assert status.problem == "There is no NVIDIA driver."
        assert status.devices == ()


def test_a_status_never_raises(monkeypatch, tmp_path):
    broken = tmp_path / "libdafjax_cuda.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(_cuda, "find", lambda: broken)
    status = cuda_status()
    assert status.path == str(broken)
    assert "does not load" in status.problem
    assert status.remedy is not None


def test_a_library_that_does_not_load_is_an_error_when_programs_need_it(
    monkeypatch, tmp_path
):
    broken = tmp_path / "libdafjax_cuda.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(_cuda, "find", lambda: broken)
    _cuda.register.cache_clear()
    with pytest.raises(LibraryError, match=r"does not load.*Rebuild it"):
        jax.jit(pack_bitmask).trace(jnp.ones(3) > 0).lower(lowering_platforms=("cuda",))
    _cuda.register.cache_clear()


@pytest.mark.skipif(_cuda.find() is None, reason="it is not built")
def test_a_library_of_another_version_is_an_error_when_programs_need_it(monkeypatch):
    monkeypatch.setitem(_cuda.HANDLERS, "dafjax_new", "dafjax_cuda_new")
    _cuda.register.cache_clear()
    with pytest.raises(
        LibraryError, match=r"another version.*dafjax_cuda_new.*Rebuild"
    ):
        jax.jit(pack_bitmask).trace(jnp.ones(3) > 0).lower(lowering_platforms=("cuda",))
    _cuda.register.cache_clear()


def test_without_the_extension_module_there_is_no_library(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert _cuda.find() is None


def test_programs_for_cuda_have_custom_calls_if_the_library_is_built(monkeypatch):
    monkeypatch.setattr(_cuda, "register", lambda: True)

    def roundtrip(x):
        code = {"format": Format(2, 64)}
        packed = pack_affine(x, jnp.uint32(0), **code)
        x = unpack_affine(*packed, x, size=701, dtype=jnp.float32, **code)
        (x,) = hold(x, after=packed[:1])
        mask = unpack_bitmask(pack_bitmask(x > 0), x, size=701)
        return jnp.where(mask, x, 0.0)

    # A size that no other test lowers, so that nothing is cached.
    x = jax.ShapeDtypeStruct((701,), jnp.float32)
    text = jax.jit(roundtrip).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    of_codes = ("pack_affine", "unpack_affine", "pack_bitmask", "unpack_bitmask", "tie")
    for name in of_codes:
        assert f"stablehlo.custom_call @dafjax_{name}(" in text
    assert "output_operand_alias" in text
    assert "has_side_effect = true" not in text


def test_programs_for_cuda_sum_what_they_pack_if_the_library_is_built(monkeypatch):
    codec = Affine(bits=2, blocks="columns")
    x = jax.ShapeDtypeStruct((64, 19, 32), jnp.float32)

    def lowered():
        return (
            jax.jit(lambda x: codec.encode_and_sum(x))
            .trace(x)
            .lower(lowering_platforms=("cuda",))
            .as_text()
        )

    monkeypatch.setattr(_cuda, "register", lambda: True)
    assert "stablehlo.custom_call @dafjax_pack_affine_and_sum(" in lowered()
    monkeypatch.setattr(_cuda, "register", lambda: False)
    assert "custom_call" not in lowered()


def test_programs_for_cuda_put_residuals_into_a_pool_if_the_library_is_built(
    monkeypatch,
):
    def roundtrip(x):
        code = {"format": Format(2, 64), "pool": 1}
        handle = pool_put(x, jnp.uint32(0), site=2, max_bits=8, **code)
        y = pool_get(handle, rows=(1, 703), dtype=jnp.dtype("float32"), **code)
        return y, pool_note(y[0, :2], pool=1, sites=(2,))

    x = jax.ShapeDtypeStruct((1, 703), jnp.float32)
    lower = lambda: jax.jit(roundtrip).trace(x).lower(lowering_platforms=("cuda",))
    monkeypatch.setattr(_cuda, "register", lambda: False)
    with pytest.raises(NotImplementedError, match=r"built with CUDA.*Arrays\(\)"):
        lower()
    monkeypatch.setattr(_cuda, "register", lambda: True)
    text = lower().as_text()
    for name in ("pool_put", "pool_get", "pool_note"):
        assert f"stablehlo.custom_call @dafjax_{name}(" in text


def test_a_tie_is_a_barrier_on_cuda(monkeypatch):
    monkeypatch.setattr(_cuda, "register", lambda: True)
    lowered = jax.jit(tie).trace(jnp.ones(709)).lower(lowering_platforms=("cuda",))
    assert "stablehlo.optimization_barrier" in lowered.as_text()
    assert "dafjax_tie" not in lowered.as_text()


def test_the_handlers_are_the_only_functions_that_are_needed():
    path = _cuda.find()
    if path is None:
        assert _cuda.register() is False
        return
    library = ctypes.CDLL(str(path))
    for function in _cuda.HANDLERS.values():
        assert getattr(library, function)
    assert _cuda.register() is True
    assert pathlib.Path(path).stat().st_size < 8 << 20
