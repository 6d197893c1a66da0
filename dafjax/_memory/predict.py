"""Predicts the temporary memory of a program on XLA:CPU, without compiling it.

It follows those steps of XLA's compiler that memory depends on:

1. `read.py` inlines calls, merges equal operations and drops unused ones.
2. `kernels.py` fuses cheap operations into the kernels that read their results, and
   orders the kernels.
3. `_Buffers` finds the first and last use of every buffer, computes in place, and
   reuses the buffers of results before these exist.

The largest sum of live buffers is the answer. `python -m benchmarks.memory_model`
compares it with the compiler's.
"""

import collections
import functools
from collections.abc import Iterator, Sequence
from typing import final

from dafjax._memory.kernels import Kernel, breadth_first, depth_first, find_kernels
from dafjax._memory.read import XlaProgram, read, read_program
from dafjax._trace.residuals import Program
from dafjax._trace.rules import Lowering
from dafjax._trace.tracing import ClosedJaxpr


def predict_temp_nbytes(closed: ClosedJaxpr, *, memory_optimized: bool = False) -> int:
    """Returns about as many bytes as XLA:CPU needs for temporary arrays.

    Args:
        closed: The program. Its arguments and results do not count.
        memory_optimized: Whether XLA runs with its memory-optimized scheduler. Its
            default scheduler on CPUs runs each operation as early as possible.
    """
    return _peak(closed, slice(0), memory_optimized=memory_optimized)


def predict_temp_nbytes_of_passes(program: Program) -> int:
    """Returns the same for both passes of a program, without tracing them again."""
    inner = functools.partial(_peak, memory_optimized=False)
    return _peak_of(read_program(program, inner), slice(0), memory_optimized=False)


def _peak(closed: ClosedJaxpr, carried: slice, *, memory_optimized: bool) -> int:
    """Returns the bytes at the peak of a program, of a branch, or of a loop's body."""
    program = read(closed, functools.partial(_peak, memory_optimized=memory_optimized))
    return _peak_of(program, carried, memory_optimized=memory_optimized)


def _peak_of(program: XlaProgram, carried: slice, *, memory_optimized: bool) -> int:
    kernels = find_kernels(program)
    order = depth_first if memory_optimized else breadth_first
    return _Buffers(program, carried).peak(order(program, kernels))


# Buffers begin at multiples of so many bytes.
_ALIGNMENT = 64


@final
class _Buffers:
    """The buffers of a program, or of the body of a loop.

    A buffer is called by the value that is written to it first.
    """

    def __init__(self, program: XlaProgram, carried: slice) -> None:
        """Begins with the buffers of arguments.

        Args:
            program: The program.
            carried: The arguments that it carries, if it is the body of a loop.
        """
        self._program = program
        arguments = program.arguments[carried]
        # A loop writes the new value that it carries into the buffer of the old one.
        self._old = dict(zip(program.outputs, arguments, strict=False))
        self._is_loop = bool(arguments)
        self._outputs = set(program.outputs)
        # Buffers that are not temporary: of arguments and results.
        self._given: set[int] = set(program.arguments)
        self._buffer: dict[int, int] = {v: v for v in program.arguments}
        # The live values in each buffer, and the uses of each value that are left.
        self._num_live = collections.Counter(program.arguments)
        self._uses: collections.Counter[int] = collections.Counter()
        self._start: dict[int, int] = {}
        self._end: dict[int, int] = {}

    def peak(self, order: Sequence[Kernel]) -> int:
        """Returns the largest sum of live temporary buffers."""
        for kernel in order:
            self._uses.update(kernel.reads.keys())
        for time, kernel in enumerate(order):
            self._run(time, kernel)
        for value in self._outputs.intersection(self._buffer):
            self._end[self._buffer[value]] = len(order) - 1
        change = [0] * (len(order) + 1)
        for buffer in self._beside_results():
            nbytes = self._program.nbytes[buffer]
            aligned = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
            change[self._start[buffer]] += aligned
            change[self._end[buffer] + 1] -= aligned
        live = peak = 0
        for kernel, step in zip(order, change, strict=False):
            live += step
            peak = max(peak, live + kernel.op.inner_nbytes)
        return peak

    def _run(self, time: int, kernel: Kernel) -> None:
        """Finds buffers for the results of a kernel, and ends others."""
        results = kernel.op.results
        free = [v for v in kernel.reads if self._is_free_after(v)]
        for position, value in enumerate(results):
            source = self._source(kernel, position, free)
            if source is None:
                self._buffer[value] = value
                self._start[value] = time
                if self._has_place(kernel, value):
                    self._given.add(value)
            else:
                if source in free:
                    free.remove(source)
                self._buffer[value] = self._buffer[source]
                if value in self._outputs and not self._is_loop:
                    self._given.add(self._buffer[source])
            self._num_live[self._buffer[value]] += 1
        self._uses.subtract(kernel.reads.keys())
        for value in (*kernel.reads, *results):
            self._end[self._buffer[value]] = time
            if not self._uses[value]:
                self._num_live[self._buffer[value]] -= 1

    def _is_free_after(self, value: int) -> bool:
        """Returns whether a value's buffer is free after the next use of the value."""
        buffer = self._buffer[value]
        is_last = self._uses[value] == 1 and self._num_live[buffer] == 1
        return is_last and buffer not in self._given

    def _has_place(self, kernel: Kernel, value: int) -> bool:
        """Returns whether a result is written to where the program returns it."""
        old = self._old.get(value)
        if old is None:
            return value in self._outputs
        is_last_use = kernel.reads.get(old, False) and self._uses[old] == 1
        return self._uses[old] == 0 or is_last_use

    def _source(self, kernel: Kernel, position: int, free: Sequence[int]) -> int | None:
        """Returns the value whose buffer a result takes over, if there is one."""
        op, value = kernel.op, kernel.op.results[position]
        is_output = value in self._outputs
        is_written = op.operands[:1] == tuple(kernel.reads)
        if Lowering.RESHAPE in op.lowering and is_written and not is_output:
            return op.operands[0]
        aliased = op.aliased(position)
        if aliased is not None:
            return aliased if aliased in free else None
        is_fused = Lowering.FUSED in op.lowering
        if is_output or not is_fused or self._is_carried(value):
            return None
        nbytes = self._program.nbytes
        fitting = (v for v in free if kernel.reads[v] and nbytes[v] == nbytes[value])
        return next(fitting, None)

    def _is_carried(self, value: int) -> bool:
        """Returns whether a loop or a barrier takes over the buffer of a value.

        XLA never computes such a value in the buffer of an operand.
        """
        return any(value in user.carried for user in self._program.users[value])

    def _beside_results(self) -> Iterator[int]:
        """Finds the temporary buffers that do not fit into buffers of results.

        XLA places the largest buffers first. One that ends before a result begins can
        be where the result will be.
        """
        nbytes, start, end = self._program.nbytes, self._start, self._end
        results = [] if self._is_loop else self._given.intersection(start)
        # The buffers that are placed where each result will be.
        taken: dict[int, list[int]] = {
            r: [] for r in sorted(results, key=nbytes.__getitem__)
        }
        temporary = [b for b in start if b not in self._given]
        for buffer in sorted(temporary, key=lambda b: (-nbytes[b], start[b])):
            for result, others in taken.items():
                fits = nbytes[result] >= nbytes[buffer] and end[buffer] < start[result]
                if fits and not any(self._overlap(buffer, other) for other in others):
                    others.append(buffer)
                    break
            else:
                yield buffer

    def _overlap(self, first: int, second: int) -> bool:
        start, end = self._start, self._end
        return start[first] <= end[second] and start[second] <= end[first]
