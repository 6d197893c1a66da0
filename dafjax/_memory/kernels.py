"""Kernels: which operations share one, what they read, and the order they run in.

A value is written to memory if something that reads it is a kernel of its own, such as
a matrix product, or if it is costly and several kernels read it.

XLA:CPU has two schedulers, each with an order of its own.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

from dafjax._memory.read import CONSTANT, Op, XlaProgram
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


def breadth_first(program: XlaProgram, kernels: Sequence[Kernel]) -> list[Kernel]:
    """Returns the kernels in the order of XLA:CPU's default scheduler.

    A kernel runs as soon as its operands are computed, in the order of a queue.
    """
    makers = _makers(kernels)
    # Each of several results takes one more turn of the queue.
    waits: dict[Any, int] = {}
    users: dict[Any, list[Any]] = collections.defaultdict(list)
    for kernel in kernels:
        sources = set()
        for value in kernel.reads:
            maker = makers.get(value)
            has_one = maker is not None and len(maker.op.results) == 1
            sources.add(maker if has_one else value)
        waits[kernel] = len(sources)
        for source in sources:
            users[source].append(kernel)
        if len(kernel.op.results) > 1:
            waits.update((value, 1) for value in kernel.op.results)
            users[kernel].extend(kernel.op.results)
    queue: collections.deque[Any] = collections.deque(program.arguments)
    queue.extend(kernel for kernel in kernels if waits[kernel] == 0)
    order: list[Kernel] = []
    while queue:
        item = queue.popleft()
        if isinstance(item, Kernel):
            order.append(item)
        for user in users[item]:
            waits[user] -= 1
            if waits[user] == 0:
                queue.append(user)
    return order


def depth_first(program: XlaProgram, kernels: Sequence[Kernel]) -> list[Kernel]:
    """Returns the kernels in the order of XLA's memory-optimized scheduler.

    It begins with the operand that has the most readers before it, and among equal ones
    with the largest.
    """
    makers = _makers(kernels)
    sources = {
        kernel: list(dict.fromkeys(makers[v] for v in kernel.reads if v in makers))
        for kernel in kernels
    }
    num_users = collections.Counter(s for found in sources.values() for s in found)
    sizes = {k: sum(program.nbytes[v] for v in k.op.results) for k in kernels}
    limits = len(kernels), sum(sizes.values())
    rank: dict[Kernel, tuple[int, int]] = {}
    for kernel in kernels:
        extra = max(num_users[kernel] - 1, 0) + sum(rank[s][0] for s in sources[kernel])
        total = sizes[kernel] + sum(rank[s][1] for s in sources[kernel])
        rank[kernel] = min(extra, limits[0]), min(total, limits[1])

    def last_first(found: Iterable[Kernel]) -> list[Kernel]:
        # A stack takes the last one first.
        return sorted(found, key=rank.__getitem__, reverse=True)[::-1]

    order: dict[Kernel, None] = {}
    stack = last_first(kernel for kernel in kernels if not num_users[kernel])
    visited: set[Kernel] = set()
    while stack:
        kernel = stack[-1]
        if kernel in visited:
            order.setdefault(stack.pop())
            continue
        visited.add(kernel)
        stack.extend(last_first(s for s in sources[kernel] if s not in visited))
    return list(order)


def _makers(kernels: Sequence[Kernel]) -> dict[int, Kernel]:
    return {value: kernel for kernel in kernels for value in kernel.op.results}
