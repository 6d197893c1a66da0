"""What is there while the backward pass runs, each value whole or in parts."""

from collections.abc import Iterable, Mapping
from typing import Any, final

from dafjax._schedule.rows import Rows
from dafjax._typing import Array


@final
class Values(dict[int, Any]):
    """The values at hand; what is there in parts is joined when it is read.

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
        """Adds values in parts."""
        for value, parts in made.items():
            self.pop(value, None)
            self._in_parts[value] = rows, parts

    def parts(
        self, value: int, rows: Rows, wholes: Mapping[int, Any]
    ) -> tuple[Array, ...]:
        """Returns the parts of a value.

        Args:
            value: The value.
            rows: Which parts.
            wholes: Where it is read if these are not there.
        """
        known, parts = self._in_parts.get(value, (None, ()))
        return parts if known == rows else rows.split(wholes[value])

    def arrays(self, values: Iterable[int]) -> list[tuple[Any, ...]]:
        """Returns of each value what there is: the whole, or all of its parts."""
        return [
            self._in_parts[v][1] if v in self._in_parts else (self[v],) for v in values
        ]

    def replace(self, values: Iterable[int], arrays: Iterable[Any]) -> None:
        """Replaces what `arrays` returned of these values, all in one sequence."""
        new = iter(arrays)
        for value in values:
            if value in self._in_parts:
                rows, parts = self._in_parts[value]
                self._in_parts[value] = rows, tuple(next(new) for _ in parts)
            else:
                self[value] = next(new)
