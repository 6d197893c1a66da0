"""Finds, loads and registers the CUDA library of custom calls, once."""

import ctypes
import functools
import importlib.util
import pathlib

import jax

from dafjax._native import _library


# Custom call names, and the library functions that implement them.
HANDLERS = {
    "dafjax_pack_affine": "dafjax_cuda_pack_affine",
    "dafjax_pack_affine_and_sum": "dafjax_cuda_pack_affine_and_sum",
    "dafjax_unpack_affine": "dafjax_cuda_unpack_affine",
    "dafjax_pack_bitmask": "dafjax_cuda_pack_bitmask",
    "dafjax_unpack_bitmask": "dafjax_cuda_unpack_bitmask",
    "dafjax_minmax": "dafjax_cuda_minmax",
    "dafjax_sum_of_squares": "dafjax_cuda_sum_of_squares",
    "dafjax_time_reductions": "dafjax_cuda_time_reductions",
    "dafjax_tie": "dafjax_cuda_tie",
    "dafjax_pool_put": "dafjax_cuda_pool_put",
    "dafjax_pool_get": "dafjax_cuda_pool_get",
    "dafjax_pool_note": "dafjax_cuda_pool_note",
    "dafjax_ledger_note": "dafjax_cuda_ledger_note",
}
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
        LibraryError: The library does not load, or was built against newer FFI headers
            than jaxlib's.
    """
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise _library.LibraryError(
            f"The CUDA library `{path}` does not load: {error}. {_library.REBUILD}"
        ) from error
    for name in ("architectures", "error"):
        getattr(library, f"dafjax_cuda_{name}").restype = ctypes.c_char_p
    _library.check_api_version(built_api(library), _library.jaxlib_ffi_api(), path.name)
    return library


def connect(library: ctypes.CDLL) -> None:
    """Passes the library the pool, ledger and CPU packing functions.

    They are in the extension module.

    Raises:
        LibraryError: The extension module is missing or does not load.
    """
    module = _library.load()
    library.dafjax_cuda_serve_pools(
        ctypes.c_void_p(module.attachable_pool_finder()),
        ctypes.c_void_p(module.pack_bytes_function()),
    )
    library.dafjax_cuda_serve_ledgers(ctypes.c_void_p(module.note_function()))


def built_api(library: ctypes.CDLL) -> tuple[int, int]:
    """Returns the FFI API version that the library was built against."""
    return library.dafjax_cuda_ffi_major(), library.dafjax_cuda_ffi_minor()


@functools.cache
def register() -> bool:
    """Registers the custom calls with XLA's CUDA client, once per process.

    Returns:
        Whether there are any: False if dafjax was built without CUDA.

    Raises:
        LibraryError: The library exists but cannot be used.
    """
    path = find()
    if path is None:
        return False
    library = load(path)
    try:
        connect(library)
        handlers = {
            name: getattr(library, function) for name, function in HANDLERS.items()
        }
    except AttributeError as error:
        raise _library.LibraryError(
            f"The CUDA library `{path}` is of another version of dafjax: {error}. "
            f"{_library.REBUILD}"
        ) from error
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="CUDA")
    return True


def registered_custom_calls() -> tuple[str, ...]:
    """Registers the custom calls of all platforms and returns their names, sorted."""
    _library.register()
    register()
    return tuple(sorted(_library.load().handlers()))
