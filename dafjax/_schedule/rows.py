"""How the rows of arrays are divided into parts."""

import dataclasses
from collections.abc import Sequence
from typing import Any, final

from jax import lax

from dafjax._typing import Array


@final
@dataclasses.dataclass(frozen=True)
class Rows:
    """Into which parts rows, places of the first dimension, are divided.

    Attributes:
        num_parts: How many parts there are, all of one size.
        is_interleaved: Whether a part is every eighth row, say: where devices share the
            rows, each has some of it. Else it is rows that follow each other.
    """

    num_parts: int
    is_interleaved: bool

    def divide(self, x: Array) -> Array:
        """Returns an array with its rows divided: with parts in a dimension."""
        shape = [x.shape[0] // self.num_parts, *x.shape[1:]]
        shape.insert(self._axis, self.num_parts)
        return lax.reshape(x, shape)

    def part(self, divided: Array, number: Any) -> Array:
        """Returns a part of what `divide` returned."""
        return lax.dynamic_index_in_dim(divided, number, self._axis, keepdims=False)

    def put(self, divided: Array, part: Array, number: Any) -> Array:
        """Returns what `divide` returned with another part."""
        return lax.dynamic_update_index_in_dim(divided, part, number, self._axis)

    def split(self, x: Array) -> tuple[Array, ...]:
        """Returns the parts of an array."""
        if self.num_parts == 1:
            return (x,)
        divided = self.divide(x)
        return tuple(
            lax.index_in_dim(divided, number, self._axis, keepdims=False)
            for number in range(self.num_parts)
        )

    def join(self, parts: Sequence[Array]) -> Array:
        """Returns the array whose parts these are."""
        if self.num_parts == 1:
            return parts[0]
        divided = [lax.expand_dims(part, (self._axis,)) for part in parts]
        num_rows, *rest = parts[0].shape
        shape = (num_rows * self.num_parts, *rest)
        return lax.reshape(lax.concatenate(divided, self._axis), shape)

    @property
    def _axis(self) -> int:
        return 1 if self.is_interleaved else 0
