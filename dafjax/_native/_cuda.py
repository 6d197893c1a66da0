"""The CUDA library: finding, loading and registering it.

Also the state of CUDA on this machine, with the first problem and its remedy; facts
that determine how fast a device's kernels run; and the names of all custom calls.
"""

import contextlib
import ctypes
import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
from collections.abc import Sequence

import jax

from dafjax._native import _library
from dafjax._native._library import dotted
from dafjax._numbers import Device


# Custom call names, and the library functions that implement them.
_CALLS = (
    "pack_affine", "pack_affine_and_sum", "unpack_affine", "pack_bitmask",
    "unpack_bitmask", "minmax", "sum_of_squares", "time_reductions", "tie", "pool_put",
    "pool_get", "pool_note", "ledger_note",
)  # fmt: skip
HANDLERS = {f"dafjax_{name}": f"dafjax_cuda_{name}" for name in _CALLS}
_FILE = "libdafjax_cuda.so"


def find() -> pathlib.Path | None:
    """Returns the library's path, or None if dafjax was built without CUDA."""
    # It is next to the extension module, which an editable install keeps apart from
    # the sources.
    spec = importlib.util.find_spec("dafjax._native._cpu")
    if spec is None or spec.origin is None:
        return None
    path = pathlib.Path(spec.origin).with_name(_FILE)
    return path if path.exists() else None


@functools.cache
def load(path: pathlib.Path) -> ctypes.CDLL:
    """Loads the library; this needs no driver.

    Raises:
        LibraryError: It does not load, or was built against newer FFI headers.
    """
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise _library.LibraryError(
            f"The CUDA library `{path}` does not load: {error}. {_library.REBUILD}"
        ) from error
    for name in ("architectures", "error"):
        getattr(library, f"dafjax_cuda_{name}").restype = ctypes.c_char_p
    built = library.dafjax_cuda_ffi_major(), library.dafjax_cuda_ffi_minor()
    _library.check_api_version(built, _library.jaxlib_ffi_api(), path.name)
    return library


def connect(library: ctypes.CDLL) -> None:
    """Passes the library the extension module's pools, ledgers and CPU packing."""
    module = _library.load()
    library.dafjax_cuda_serve_pools(
        ctypes.c_void_p(module.attachable_pool_finder()),
        ctypes.c_void_p(module.pack_bytes_function()),
    )
    library.dafjax_cuda_serve_ledgers(ctypes.c_void_p(module.note_function()))


@functools.cache
def register() -> bool:
    """Registers the custom calls with XLA's CUDA client, once per process.

    Returns False if dafjax was built without CUDA; raises if the library is unusable.
    """
    path = find()
    if path is None:
        return False
    library = load(path)
    try:
        connect(library)
        handlers = {n: getattr(library, symbol) for n, symbol in HANDLERS.items()}
    except AttributeError as error:
        raise _library.LibraryError(
            f"The CUDA library `{path}` is of another version of dafjax: {error}. "
            f"{_library.REBUILD}"
        ) from error
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="CUDA")
    return True


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
        path = find()
        if path is not None:
            status = dataclasses.replace(status, path=str(path))
            status = _ask(load(path), status)
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

    def runs(architecture: str) -> bool:
        number, _, kind = architecture.partition("-")
        built = divmod(int(number), 10)
        is_fit = kind == "virtual" or built[0] == capability[0]
        return is_fit and built <= capability

    return any(map(runs, architectures))


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
            f"The driver supports CUDA {dotted(status.driver_version)}, but dafjax "
            f"was built with CUDA {dotted(runtime)}.",
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
                f"{dotted(device.capability)}): it was built for "
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
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return tuple(found)


def _version(number: int) -> tuple[int, int]:
    """Splits a CUDA version number: 13020 is 13.2."""
    return number // 1000, number % 1000 // 10


# Jetsons write their power mode to this file.
_POWER_MODE = pathlib.Path("/var/lib/nvpmodel/status")


def describe(device: Device) -> dict[str, str]:
    """Returns the facts that kernel times depend on: hardware, driver, versions."""
    facts = {
        "dafjax": importlib.metadata.version("dafjax"),
        "platform": device.platform,
        "kind": device.device_kind,
        "power mode": power_mode(),
    }
    if device.platform == "cpu":
        facts["kind"] = processor()
        facts["instructions"] = _library.library_status().instruction_set or ""
        facts["threads"] = str(os.cpu_count())
        return facts
    status = cuda_status()
    facts["capability"] = str(getattr(device, "compute_capability", ""))
    facts["cores"] = str(getattr(device, "core_count", ""))
    facts["driver"] = str(status.driver_version)
    facts["built for"] = " ".join(status.architectures)
    return facts


def processor() -> str:
    """Returns the name of the machine's processor."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    names = [
        line.partition(":")[2] for line in text.splitlines() if "model name" in line
    ]
    return names[0].strip() if names else platform.machine()


def power_mode() -> str:
    """Returns a Jetson's power mode, as the system records it; else an empty text."""
    try:
        return _POWER_MODE.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def custom_calls() -> tuple[str, ...]:
    """Returns the names of the custom calls that dafjax's programs contain.

    `jax.export` refuses unknown custom calls unless they are allowed by name, because
    a later version of a library may lack them. An exported program runs with the
    version of dafjax that exported it.

    This function also registers the custom calls with XLA, for CPUs and, if dafjax was
    built with it, for CUDA. A process that loads an exported program but wraps no
    function itself must call it first.

    Returns:
        The names, sorted.

    Raises:
        ImportError: The compiled library is missing or does not fit jaxlib.

    Example:
        >>> import dafjax, jax, jax.numpy as jnp
        >>> from jax import export
        >>> f = dafjax.remat_compress(lambda w: jnp.sum(jnp.sin(w @ w) @ w))
        >>> allowed = [
        ...     export.DisabledSafetyCheck.custom_call(name)
        ...     for name in dafjax.custom_calls()
        ... ]
        >>> w = jnp.ones((128, 128))
        >>> exported = export.export(jax.jit(jax.grad(f)), disabled_checks=allowed)(w)
        >>> exported.call(w).shape
        (128, 128)
    """
    _library.register()
    register()
    return tuple(sorted(_library.load().handlers()))
