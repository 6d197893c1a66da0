"""Splits arrays into chunks of their rows."""

import dataclasses
from collections.abc import Sequence
from typing import Any, final

from jax import lax

from dafjax._typing import Array


@final
@dataclasses.dataclass(frozen=True)
class Rows:
    """The chunks into which rows (indices of the first dimension) are split.

    Attributes:
        num_parts: Number of chunks, all of the same size.
        is_interleaved: Whether a chunk takes every `num_parts`-th row, so that each
            device that shares the rows has some rows of every chunk. Otherwise a chunk
            takes consecutive rows.
    """

    num_parts: int
    is_interleaved: bool

    def divide(self, x: Array) -> Array:
        """Returns an array with its rows split; the chunks get their own axis."""
        shape = [x.shape[0] // self.num_parts, *x.shape[1:]]
        shape.insert(self._axis, self.num_parts)
        return lax.reshape(x, shape)

    def part(self, divided: Array, number: Any) -> Array:
        """Returns a chunk of an array that `divide` returned."""
        return lax.dynamic_index_in_dim(divided, number, self._axis, keepdims=False)

    def put(self, divided: Array, part: Array, number: Any) -> Array:
        """Returns an array of `divide` with one chunk replaced."""
        return lax.dynamic_update_index_in_dim(divided, part, number, self._axis)

    def split(self, x: Array) -> tuple[Array, ...]:
        """Returns the chunks of an array."""
        if self.num_parts == 1:
            return (x,)
        divided = self.divide(x)
        return tuple(
            lax.index_in_dim(divided, number, self._axis, keepdims=False)
            for number in range(self.num_parts)
        )

    def join(self, parts: Sequence[Array]) -> Array:
        """Returns the array that has these chunks."""
        if self.num_parts == 1:
            return parts[0]
        divided = [lax.expand_dims(part, (self._axis,)) for part in parts]
        num_rows, *rest = parts[0].shape
        shape = (num_rows * self.num_parts, *rest)
        return lax.reshape(lax.concatenate(divided, self._axis), shape)

    @property
    def _axis(self) -> int:
        return 1 if self.is_interleaved else 0
