"""The live values of the backward pass, each whole or in chunks."""

from collections.abc import Iterable, Mapping
from typing import Any, final

from dafjax._schedule.rows import Rows
from dafjax._typing import Array


@final
class Values(dict[int, Any]):
    """The live values; reading a chunked value concatenates its chunks.

    Example:
        >>> import jax.numpy as jnp
        >>> from dafjax._schedule.rows import Rows
        >>> values = Values()
        >>> values.put_parts({7: (jnp.zeros(2), jnp.ones(2))}, Rows(2, False))
        >>> values[7]
        Array([0., 0., 1., 1.], dtype=float32)
    """

    def __init__(self) -> None:
        super().__init__()
        self._in_parts: dict[int, tuple[Rows, tuple[Array, ...]]] = {}

    def __missing__(self, value: int) -> Any:
        if value not in self._in_parts:
            raise KeyError(value)
        rows, parts = self._in_parts.pop(value)
        self[value] = rows.join(parts)
        return self[value]

    def put_parts(self, made: Mapping[int, tuple[Array, ...]], rows: Rows) -> None:
        """Adds chunked values."""
        for value, parts in made.items():
            self.pop(value, None)
            self._in_parts[value] = rows, parts

    def parts(
        self, value: int, rows: Rows, wholes: Mapping[int, Any]
    ) -> tuple[Array, ...]:
        """Returns the chunks of a value.

        Args:
            value: The value.
            rows: The chunks to return.
            wholes: Live whole values, used if these chunks do not exist.
        """
        known, parts = self._in_parts.get(value, (None, ()))
        return parts if known == rows else rows.split(wholes[value])

    def arrays(self, values: Iterable[int]) -> list[tuple[Any, ...]]:
        """Returns the arrays of each value: the whole, or all of its chunks."""
        return [
            self._in_parts[v][1] if v in self._in_parts else (self[v],) for v in values
        ]

    def replace(self, values: Iterable[int], arrays: Iterable[Any]) -> None:
        """Replaces the arrays that `arrays` returned, given as one flat sequence."""
        new = iter(arrays)
        for value in values:
            if value in self._in_parts:
                rows, parts = self._in_parts[value]
                self._in_parts[value] = rows, tuple(next(new) for _ in parts)
            else:
                self[value] = next(new)
