"""Reading and writing one safetensors file; what is wrong with it is a `WeightsError`.

The format (https://huggingface.co/docs/safetensors) is a header of JSON, with dtype,
shape and place of each tensor, and then their bytes. The `safetensors` library checks
that the header is well-formed and that tensors fill the rest of the file exactly,
without overlaps. It maps the file: nothing is read before a tensor is asked for.
"""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import safetensors
import safetensors.numpy

from models.weights.error import WeightsError


_PICKLE_SUFFIXES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")
# Of a zip archive, as `torch.save` writes, and of a pickle.
_PICKLE_BEGINNINGS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


@dataclasses.dataclass(frozen=True)
class TensorHeader:
    """What the header says of a tensor.

    Attributes:
        dtype: As safetensors writes it, such as `"F32"` or `"BF16"`.
        shape: Its shape.
    """

    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class OpenFile:
    """A safetensors file whose header is good.

    Attributes:
        path: Where it lies.
        tensors: What the header says, by name.
        read: Returns the tensor of a name; its dtype may be `ml_dtypes.bfloat16`.
    """

    path: pathlib.Path
    tensors: Mapping[str, TensorHeader]
    read: Callable[[str], np.ndarray]


@contextlib.contextmanager
def open_file(path: pathlib.Path) -> Iterator[OpenFile]:
    """Opens a file, and reads its header alone.

    Raises:
        WeightsError: If the file is missing, is a pickle, is truncated or too long, or
            has a header that is not that of a safetensors file.
    """
    if path.suffix in _PICKLE_SUFFIXES:
        raise WeightsError(_refusal(path))
    if not path.is_file():
        raise WeightsError(f"`{path}` is not a file.")
    try:
        opened = safetensors.safe_open(path, framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        raise WeightsError(_complaint(path, error)) from error
    with opened as file:

        def read(name: str) -> np.ndarray:
            try:
                return file.get_tensor(name)
            except (safetensors.SafetensorError, OSError) as error:
                raise WeightsError(f"{_complaint(path, error)} ({name})") from error

        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        headers = {
            name: TensorHeader(part.get_dtype(), tuple(part.get_shape()))
            for name, part in slices.items()
        }
        yield OpenFile(path, headers, read)


def write_file(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a file; a reader sees the old one or all of the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    contiguous = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    # Readers of other frameworks look for this entry.
    safetensors.numpy.save_file(contiguous, temporary, metadata={"format": "pt"})
    os.replace(temporary, path)


def _complaint(path: pathlib.Path, error: Exception) -> str:
    if path.stat().st_size >= 4:
        with path.open("rb") as file:
            if file.read(4).startswith(_PICKLE_BEGINNINGS):
                return _refusal(path)
    return (
        f"`{path}` is not a whole safetensors file: {error}. It may be truncated: "
        f"compare its size, {path.stat().st_size} bytes, with that of its source."
    )


def _refusal(path: pathlib.Path) -> str:
    return (
        f"`{path}` is a pickle, which runs code when it is loaded, and is refused. Use "
        "the safetensors file of the same model."
    )
