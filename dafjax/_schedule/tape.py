"""Records scalar arithmetic, and evaluates it later in one custom call."""

from collections.abc import Iterable
from typing import Literal, final

import jax.numpy as jnp
import numpy as np
from jax import lax

from dafjax._native import evaluate, tape_entry
from dafjax._typing import Array


_Operation = Literal["add", "multiply", "divide"]
# The kind of a number, and its index among the numbers of that kind.
_Place = tuple[Literal["given", "constant", "result"], int]


@final
class Tape:
    """Records arithmetic on numbers that are known later.

    Example:
        >>> tape = Tape()
        >>> a, b = tape.given(), tape.given()
        >>> print(tape.evaluate(jnp.asarray([2.0, 3.0]), [a * b + 1.0, a / b]))
        [7.        0.6666667]
    """

    def __init__(self) -> None:
        self._num_given = 0
        self._constants: dict[float, Number] = {}
        self._results: dict[tuple[_Operation, _Place, _Place], Number] = {}

    def given(self) -> "Number":
        """Returns the next of the numbers that are known later."""
        self._num_given += 1
        return Number(self, ("given", self._num_given - 1))

    def number(self, number: "Number | float") -> "Number":
        """Converts a constant to a number of the tape."""
        if isinstance(number, Number):
            return number
        if number not in self._constants:
            place: _Place = ("constant", len(self._constants))
            self._constants[number] = Number(self, place)
        return self._constants[number]

    def compute(
        self, operation: _Operation, first: "Number", second: "Number"
    ) -> "Number":
        """Records an operation, each only once, and returns its result."""
        key = (operation, first.place, second.place)
        if key not in self._results:
            self._results[key] = Number(self, ("result", len(self._results)))
        return self._results[key]

    def evaluate(self, given: Array, wanted: "Iterable[Number | float]") -> Array:
        """Evaluates the recorded arithmetic.

        Args:
            given: float32 `[given]`: the numbers, in the order of the calls of `given`.
            wanted: Numbers of this tape, and constants.

        Returns:
            float32 `[wanted]`.
        """
        numbers = list(map(self.number, wanted))
        starts = {"given": 0, "constant": self._num_given}
        starts["result"] = self._num_given + len(self._constants)

        def at(place: _Place) -> int:
            kind, number = place
            return starts[kind] + number

        constants = np.zeros(starts["result"], np.float32)
        with np.errstate(over="ignore"):
            constants[self._num_given :] = list(self._constants)
        # Pads and adds instead of concatenating: if devices share the mapped examples
        # by type, JAX cannot concatenate arrays of which only some are mapped.
        room = [(0, len(self._constants), 0)]
        numbers_there = lax.pad(given, jnp.float32(0), room) + constants
        tape = tuple(
            tape_entry(operation, at(first), at(second))
            for operation, first, second in self._results
        )
        values = evaluate(numbers_there, tape=tape)
        return values[np.array([at(number.place) for number in numbers], np.int32)]


@final
class Number:
    """A number of a tape."""

    def __init__(self, tape: Tape, place: _Place) -> None:
        self._tape = tape
        self.place = place

    def __add__(self, other: "Number | float") -> "Number":
        return self._tape.compute("add", self, self._tape.number(other))

    def __mul__(self, other: "Number | float") -> "Number":
        return self._tape.compute("multiply", self, self._tape.number(other))

    def __truediv__(self, other: "Number | float") -> "Number":
        return self._tape.compute("divide", self, self._tape.number(other))

    __radd__ = __add__
    __rmul__ = __mul__
