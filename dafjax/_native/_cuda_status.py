"""What is there of CUDA, what is missing, and how to mend it."""

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
# From here on XLA runs convolutions of float32 on images as Flax has them.
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
    """What is known of CUDA; `dafjax.cuda_status()` returns it.

    Attributes:
        path: The CUDA library, or None if dafjax was built without it.
        architectures: What it was built for, as CMake writes it (`"87-real"`: machine
            code for compute capability 8.7; `"80-virtual"`: code that a driver
            translates for 8.0 and newer).
        runtime_version: (major, minor) of the CUDA runtime inside of the library.
        driver_version: The latest CUDA version that the driver supports, or None if
            there is no driver.
        devices: The GPUs that CUDA sees.
        plugins: JAX's CUDA plugins that are installed, with their versions.
        problem: What keeps dafjax from using a GPU, or None if nothing does.
        remedy: What to do about it.
        warnings: What else is known to go wrong.
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
    """Tells whether dafjax can use an NVIDIA GPU and, if not, what to do.

    Where there is no CUDA library, programs on a GPU run all the same: `jax.numpy`
    makes the same bytes there, and is slower. `python -m dafjax doctor` prints the
    status.

    Returns:
        A `CudaStatus`. Its `problem` is None if nothing is in the way; otherwise
        `remedy` says how to mend it. Nothing is started on a GPU, no backend of JAX is
        initialized, and this never raises.

    Example:
        >>> import dafjax
        >>> status = dafjax.cuda_status()
        >>> (status.problem is None) == (status.remedy is None)
        True
    """
    status = CudaStatus()
    # Each step adds what it finds, so that an error leaves the facts before it.
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
    """Adds to what is known what the first obstacle is, and what to do about it."""
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

    Machine code runs on GPUs of the same major version whose minor version is not less;
    code that drivers translate, on all that are not older.
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
    """Adds what the library knows of itself, the driver and the GPUs."""
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
    # Without a driver, or with one that is too old, this fails, and so it is 0.
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
    """Returns JAX's CUDA plugins that are installed, with their versions."""
    found = []
    for name in _PLUGINS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(found)


def _version(number: int) -> tuple[int, int]:
    """Splits a version as CUDA writes it: 13020 is 13.2."""
    return number // 1000, number % 1000 // 10


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
