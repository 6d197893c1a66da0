"""Fusion: which operations of a program share a kernel, and what kernels read.

A value is written to memory if something that reads it is a kernel of its own, such as
a matrix product, or if it is costly and several kernels read it.
"""

import dataclasses
from collections.abc import Mapping
from typing import final

from dafjax._memory.program import CONSTANT, Op, XlaProgram
from dafjax._trace.rules import Lowering


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """An operation whose results are written to memory, with those fused into it.

    Attributes:
        op: The operation.
        reads: The values that it reads from memory; for each, whether the element at
            the same place is all that an element of the result needs of it.
    """

    op: Op
    reads: Mapping[int, bool]


def find_kernels(program: XlaProgram) -> list[Kernel]:
    """Returns the kernels in the order of the program."""
    fusion = _Fusion(program)
    found: list[Kernel] = []
    # For each value, the buffers that a kernel reads to have it.
    of_value: dict[int, Mapping[int, bool]] = {v: {v: True} for v in program.arguments}
    of_repeated: dict[int, Mapping[int, bool]] = {}
    for op in program.ops:
        reads: dict[int, bool] = {}
        shape = program.shape(op.results[0])
        for value in op.operands:
            if value == CONSTANT:
                continue
            leaves = of_value[value]
            if value in of_repeated and fusion.can_join(program.makers[value], op):
                leaves = of_repeated[value]
            same = op.rule.is_elementwise and program.shape(value) == shape
            for leaf, is_same in leaves.items():
                reads[leaf] = reads.get(leaf, True) and is_same and same
        if op in fusion.kernels_of:
            of_value[op.results[0]] = reads
            continue
        found.append(Kernel(op, reads))
        is_reshaped = _is_reshaped(program, op)
        of_value.update((result, {result: not is_reshaped}) for result in op.results)
        if op in fusion.repeated:
            of_repeated[op.results[0]] = reads
    return found


def _is_reshaped(program: XlaProgram, op: Op) -> bool:
    """Returns whether XLA makes a matrix of a product's result, and reshapes it."""
    if Lowering.MATRIX_PRODUCT not in op.lowering:
        return False
    contracted, batch = op.params["dimension_numbers"]
    free = (
        len(program.shape(value)) - len(c) - len(b)
        for value, c, b in zip(op.operands, contracted, batch, strict=True)
    )
    return max(free) > 1 or len(batch[0]) > 1


@final
class _Fusion:
    """Finds the operations that are computed in the kernels of others.

    Attributes:
        kernels_of: The kernels that compute an operation, unless it has its own.
        repeated: Operations with a kernel of their own that others compute again,
            instead of reading the result.
    """

    def __init__(self, program: XlaProgram) -> None:
        self._program = program
        self.kernels_of: dict[Op, set[Op]] = {}
        self.repeated: set[Op] = set()
        # They are computed in the kernel of a reduction, and nowhere else.
        self._in_reductions: set[Op] = set()
        for op in reversed(program.ops):
            self._place(op)

    def _place(self, op: Op) -> None:
        """Finds the kernels that compute an operation."""
        (result, *others) = op.results
        is_fused = Lowering.FUSED in op.lowering and not others
        if not is_fused or result in self._program.outputs:
            return
        users = self._program.users[result]
        kernels: set[Op] = set()
        for user in users:
            kernels |= self.kernels_of.get(user, {user})
        is_once = Lowering.ONCE in op.lowering
        if not all(self.can_join(op, user) for user in users):
            if not is_once and self._is_cheap_to_repeat(op):
                self.repeated.add(op)
        elif not is_once or len(kernels) == 1:
            self.kernels_of[op] = kernels
            if any(map(self._is_for_reduction, users)):
                self._in_reductions.add(op)

    def _is_for_reduction(self, op: Op) -> bool:
        return Lowering.REDUCTION in op.lowering or op in self._in_reductions

    def can_join(self, op: Op, user: Op) -> bool:
        """Returns whether the kernel of a user can compute an operation."""
        (result,) = op.results
        if self._is_for_reduction(user):
            return len(self._program.users[result]) == 1
        repeats = Lowering.BROADCAST in user.lowering or user.rule.looks_up
        if Lowering.ONCE in op.lowering and repeats:
            # Each element would be computed many times.
            nbytes = self._program.nbytes
            return nbytes[user.results[0]] <= nbytes[result]
        return Lowering.FUSED in user.lowering

    def _is_cheap_to_repeat(self, op: Op) -> bool:
        """Returns whether the operands are at most as large as the result."""
        spreads = Lowering.RESHAPE | Lowering.BROADCAST
        if not (op.rule.is_elementwise or op.lowering & spreads):
            return False
        nbytes, shape = self._program.nbytes, self._program.shape
        (result,) = op.results
        operands = {value for value in op.operands if value != CONSTANT}
        large = [
            value
            for value in operands
            if len(shape(value)) >= len(shape(result)) and not self._is_spread(value)
        ]
        return len(large) <= 1 or sum(nbytes[v] for v in operands) <= nbytes[result]

    def _is_spread(self, value: int) -> bool:
        """Returns whether a value is made of less, or of nothing, as by `iota`."""
        maker = self._program.makers.get(value)
        return maker is not None and (
            Lowering.BROADCAST in maker.lowering or not maker.operands
        )
