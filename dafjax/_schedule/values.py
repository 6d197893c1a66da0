"""The state of the backward pass: its live values, and how they are read."""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, TypeAlias, final

from dafjax._schedule.instructions import Unpack
from dafjax._schedule.rows import Rows
from dafjax._schedule.steps import Division
from dafjax._trace.by_rows import evaluate_on_rows
from dafjax._trace.equation import Equation, evaluate, look_up
from dafjax._typing import Array, ArrayTree


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

    def __init__(self, wholes: Mapping[int, Any] | None = None) -> None:
        super().__init__(wholes or {})
        # The chunks of values that are tuples of chunks.
        self._rows: dict[int, Rows] = {}

    def __getitem__(self, value: int) -> Any:
        if value in self._rows:
            self[value] = self._rows.pop(value).join(self.raw(value))
        return super().__getitem__(value)

    def raw(self, value: int) -> Any:
        """Returns a value as it is: the whole, or a tuple of its chunks."""
        return super().__getitem__(value)

    def put_parts(self, made: Mapping[int, tuple[Array, ...]], rows: Rows) -> None:
        """Adds chunked values."""
        self.update(made)
        self._rows.update(dict.fromkeys(made, rows))

    def parts(
        self, value: int, rows: Rows, wholes: Mapping[int, Any]
    ) -> tuple[Array, ...]:
        """Returns the chunks of a value.

        Args:
            value: The value.
            rows: The chunks to return.
            wholes: Live whole values, used if these chunks do not exist.
        """
        is_there = self._rows.get(value) == rows
        return self.raw(value) if is_there else rows.split(wholes[value])


# Returns the codes that an instruction decodes, and a new token if a barrier takes them
# with the given one.
Codes: TypeAlias = Callable[[Unpack, Array], tuple[ArrayTree, Array]]


@final
@dataclasses.dataclass
class Frame:
    """The state of the interpreter, outside of chunks or in one.

    Attributes:
        values: The live values; in a chunk, those of the chunk.
        token: A scalar 0 that waits for the last barrier.
        codes: Returns codes to decode.
        wholes: In a chunk, the whole values that it may read.
        division: In a chunk, the chunk plan.
        late: Delayed reads of values.
    """

    values: Values
    token: Array
    codes: Codes
    wholes: MutableMapping[int, Any] = dataclasses.field(default_factory=dict)
    division: Division | None = None
    late: Mapping[int, Any] = dataclasses.field(default_factory=dict)

    def at_hand(self, late: Iterable[int] = ()) -> MutableMapping[int, Any]:
        """Returns the values to read; of those in `late` the delayed reads."""
        delayed = {v: self.late[v] for v in late}
        return collections.ChainMap(delayed, self.values, self.wholes)

    def operands(self, equation: Equation, late: Iterable[int] = ()) -> list[Any]:
        """Returns what an equation reads."""
        return look_up(equation.inputs, self.at_hand(late))

    def evaluate(self, equation: Equation, operands: list[Any]) -> Iterable[Any]:
        """Runs an equation, on whole arrays or on a chunk."""
        if self.division is None:
            return evaluate(equation, operands)
        rows = self.division.num_rows, self.division.num_rows_of_part
        return evaluate_on_rows(equation, operands, *rows)
