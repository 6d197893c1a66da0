"""A program as XLA:CPU has it: operations on numbered values."""

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, final

from dafjax._trace.rules import Lowering, OpRule, rule_of


# A value that is known when the program is traced. It takes no temporary memory.
CONSTANT = -1


@final
@dataclasses.dataclass(eq=False)
class Op:
    """An operation. Values are given by number.

    Attributes:
        name: The primitive.
        operands: The values that it reads.
        results: The values that it makes.
        params: The parameters of the primitive.
        inner_nbytes: Bytes that it needs while it runs.
        carried: The operands whose buffers hold the first results, of a loop or a
            barrier.
    """

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    params: Mapping[str, Any]
    inner_nbytes: int = 0
    carried: tuple[int, ...] = ()

    @functools.cached_property
    def rule(self) -> OpRule:
        """The row of the primitive in the table of primitives."""
        return rule_of(self.name)

    @property
    def lowering(self) -> Lowering:
        """How XLA runs it."""
        return self.rule.lowering

    def aliased(self, position: int) -> int | None:
        """Returns the operand whose buffer a result takes over, if there is one."""
        if position < len(self.carried):
            return self.carried[position]
        return self.operands[0] if Lowering.IN_PLACE in self.lowering else None


@final
@dataclasses.dataclass(frozen=True, eq=False)
class XlaProgram:
    """The operations of a program that its results depend on.

    Attributes:
        ops: The operations, in order.
        avals: Shape and dtype of every value.
        arguments: The values that the program is called with.
        outputs: The values that it returns.
    """

    ops: Sequence[Op]
    avals: Sequence[Any]
    arguments: Sequence[int]
    outputs: Sequence[int]

    @functools.cached_property
    def nbytes(self) -> list[int]:
        """Bytes of every value."""
        return [
            math.prod(shape_of(aval))
            * getattr(getattr(aval, "dtype", None), "itemsize", 0)
            for aval in self.avals
        ]

    @functools.cached_property
    def users(self) -> Mapping[int, list[Op]]:
        """The operations that read each value."""
        users: dict[int, list[Op]] = collections.defaultdict(list)
        for op in self.ops:
            for value in dict.fromkeys(op.operands):
                users[value].append(op)
        return users

    @functools.cached_property
    def makers(self) -> Mapping[int, Op]:
        """The operation that makes each value."""
        return {value: op for op in self.ops for value in op.results}

    def shape(self, value: int) -> tuple[int, ...]:
        """Returns the shape of a value; `()` for a constant."""
        return () if value == CONSTANT else shape_of(self.avals[value])


def shape_of(aval: Any) -> tuple[int, ...]:
    """Returns the shape of a type; `()` for a token."""
    return getattr(aval, "shape", ())
