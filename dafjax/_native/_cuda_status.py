"""The state of CUDA on this machine: parts found, the first problem, its remedy."""

import ctypes
import dataclasses
import functools
import importlib.metadata
import os
from collections.abc import Sequence

from dafjax._native import _cuda_library


_BUILD = (
    "Install the CUDA toolkit (JetPack has it), put `nvcc` on the PATH, and rebuild: "
    "`pip install --no-build-isolation --force-reinstall --no-deps "
    "--config-settings=cmake.define.DAFJAX_CUDA=ON dafjax` (in a source tree: `.`)."
)
_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
_ORIN = (8, 7)
# From this capability on, XLA runs float32 convolutions in Flax's layout of images
# (channels last).
_HOPPER = (9, 0)
_CHANNELS_LAST = "xla_gpu_force_conv_nhwc"


@dataclasses.dataclass(frozen=True)
class CudaDevice:
    """A GPU, as the CUDA runtime describes it.

    Attributes:
        name: Its name.
        capability: Its compute capability, (major, minor).
        integrated: Whether it shares the host's memory, as on a Jetson.
    """

    name: str
    capability: tuple[int, int]
    integrated: bool


@dataclasses.dataclass(frozen=True)
class CudaStatus:
    """The state of CUDA, as `dafjax.cuda_status()` returns it.

    Attributes:
        path: The CUDA library, or None if dafjax was built without it.
        architectures: The architectures that the library was built for, as CMake writes
            them (`"87-real"`: machine code for compute capability 8.7; `"80-virtual"`:
            code that a driver translates for 8.0 and newer).
        runtime_version: (major, minor) of the CUDA runtime inside the library.
        driver_version: The latest CUDA version that the driver supports, or None if
            there is no driver.
        devices: The GPUs that CUDA sees.
        plugins: The installed CUDA plugins of JAX, with their versions.
        problem: The problem that keeps dafjax from using a GPU, or None.
        remedy: The way to solve the problem, or None.
        warnings: Other known problems.
    """

    path: str | None = None
    architectures: tuple[str, ...] = ()
    runtime_version: tuple[int, int] | None = None
    driver_version: tuple[int, int] | None = None
    devices: tuple[CudaDevice, ...] = ()
    plugins: tuple[str, ...] = ()
    problem: str | None = None
    remedy: str | None = None
    warnings: tuple[str, ...] = ()


def cuda_status() -> CudaStatus:
    """Tells whether dafjax can use an NVIDIA GPU and, if not, the remedy.

    Programs run on a GPU without the CUDA library, too: `jax.numpy` then makes the same
    bytes, but more slowly. `python -m dafjax doctor` prints the status.

    This function never raises, starts nothing on a GPU, and initializes no JAX backend.

    Returns:
        A `CudaStatus`. Its `problem` is None if dafjax can use a GPU; otherwise
        `remedy` says how to solve the problem.

    Example:
        >>> import dafjax
        >>> status = dafjax.cuda_status()
        >>> (status.problem is None) == (status.remedy is None)
        True
    """
    status = CudaStatus()
    # Each step adds its findings, so an error keeps the earlier findings.
    try:
        status = dataclasses.replace(status, plugins=installed_plugins())
        path = _cuda_library.find()
        if path is not None:
            status = dataclasses.replace(status, path=str(path))
            status = _ask(_cuda_library.load(path), status)
        return diagnose(status)
    except Exception as error:  # A report must survive whatever is wrong.
        return dataclasses.replace(
            status,
            problem=f"{type(error).__name__}: {error}",
            remedy="The message says what to do; otherwise: " + _BUILD,
        )


def diagnose(status: CudaStatus) -> CudaStatus:
    """Adds the first problem, its remedy and any warnings to a status."""
    problem, remedy = _obstacle(status)
    warnings = []
    if any(device.capability == _ORIN for device in status.devices):
        warnings.append(
            "JAX's wheels on PyPI have no code for Orin (compute capability 8.7): "
            "programs of JAX itself may fail there with `no kernel image`. See "
            "https://github.com/jax-ml/jax/issues/40487."
        )
    if any(
        device.capability < _HOPPER for device in status.devices
    ) and _CHANNELS_LAST not in os.environ.get("XLA_FLAGS", ""):
        warnings.append(
            "Before Hopper XLA turns images round for convolutions of float32, and "
            "what dafjax packs of them back: a third more bytes to move, a fourth more "
            f"memory. `export XLA_FLAGS=--{_CHANNELS_LAST}=true` where models have any."
        )
    return dataclasses.replace(
        status, problem=problem, remedy=remedy, warnings=tuple(warnings)
    )


def is_served(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Tells whether a GPU can run code that was built for `architectures`.

    Machine code runs on GPUs of the same major version and the same or a later minor
    version. Code that the driver translates runs on the same and all later versions.
    """
    for architecture in architectures:
        number, _, kind = architecture.partition("-")
        built = divmod(int(number), 10)
        if kind == "virtual" and built <= capability:
            return True
        if kind != "virtual" and built[0] == capability[0] and built <= capability:
            return True
    return False


def _obstacle(status: CudaStatus) -> tuple[str | None, str | None]:
    """Returns the first problem and its remedy, or (None, None)."""
    if status.path is None:
        return "dafjax was built without CUDA.", _BUILD
    if status.driver_version is None:
        return (
            "There is no NVIDIA driver.",
            "Install the driver of the GPU. In a container, start it with "
            "`--gpus all` (on a Jetson: `--runtime nvidia`).",
        )
    runtime = status.runtime_version
    if runtime is not None and status.driver_version[0] < runtime[0]:
        return (
            f"The driver supports CUDA {_dotted(status.driver_version)}, but dafjax "
            f"was built with CUDA {_dotted(runtime)}.",
            "Update the driver, or rebuild dafjax with the `nvcc` of CUDA "
            f"{status.driver_version[0]} on the PATH.",
        )
    if not status.devices:
        return (
            "CUDA sees no GPU.",
            "Check that `nvidia-smi` lists one (on a Jetson: `tegrastats`), and that "
            "`CUDA_VISIBLE_DEVICES` does not hide it.",
        )
    for device in status.devices:
        if not is_served(device.capability, status.architectures):
            number = "".join(map(str, device.capability))
            return (
                f"dafjax has no code for {device.name} (compute capability "
                f"{_dotted(device.capability)}): it was built for "
                f"{', '.join(status.architectures)}.",
                f"Rebuild with `--config-settings=cmake.define."
                f"DAFJAX_CUDA_ARCHITECTURES={number}-real` added. " + _BUILD,
            )
    if not status.plugins:
        major = 13 if runtime is None else runtime[0]
        return (
            "JAX has no CUDA plugin.",
            f'Install it: `pip install "jax[cuda{major}]"`.',
        )
    return None, None


def _ask(library: ctypes.CDLL, status: CudaStatus) -> CudaStatus:
    """Adds the library's facts about itself, the driver and the GPUs."""
    architectures = library.dafjax_cuda_architectures().decode().split()
    driver = ctypes.c_int32(0)
    library.dafjax_cuda_driver_version(ctypes.byref(driver))
    status = dataclasses.replace(
        status,
        architectures=tuple(architectures),
        runtime_version=_version(library.dafjax_cuda_runtime_version()),
        driver_version=_version(driver.value) if driver.value else None,
    )
    count = ctypes.c_int32(0)
    # Without a driver, or with too old a driver, this call fails and `count` stays 0.
    library.dafjax_cuda_num_devices(ctypes.byref(count))
    devices = tuple(_device(library, index) for index in range(count.value))
    return dataclasses.replace(status, devices=devices)


class _Device(ctypes.Structure):
    """DafjaxCudaDevice of xla_ffi/ffi/cuda_handlers.h."""

    _fields_ = (
        ("name", ctypes.c_char * 256),
        ("major", ctypes.c_int32),
        ("minor", ctypes.c_int32),
        ("integrated", ctypes.c_int32),
    )


def _device(library: ctypes.CDLL, index: int) -> CudaDevice:
    device = _Device()
    error = library.dafjax_cuda_device(ctypes.c_int32(index), ctypes.byref(device))
    if error != 0:
        text = library.dafjax_cuda_error(ctypes.c_int32(error)).decode()
        raise RuntimeError(f"CUDA does not describe GPU {index}: {text}.")
    return CudaDevice(
        name=device.name.decode(errors="replace"),
        capability=(device.major, device.minor),
        integrated=device.integrated != 0,
    )


@functools.cache
def installed_plugins() -> tuple[str, ...]:
    """Returns the installed CUDA plugins of JAX, with their versions."""
    found = []
    for name in _PLUGINS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(found)


def _version(number: int) -> tuple[int, int]:
    """Splits a CUDA version number: 13020 is 13.2."""
    return number // 1000, number % 1000 // 10


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
