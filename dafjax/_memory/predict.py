"""Predicts the temporary memory of a program on XLA:CPU, without compiling it.

It follows those steps of XLA's compiler that memory depends on:

1. `read.py` inlines calls, merges equal operations and drops unused ones.
2. `kernels.py` fuses cheap operations into the kernels that read their results.
3. `order.py` orders the kernels.
4. `buffers.py` finds the first and last use of every buffer, computes in place, and
   reuses the buffers of results before these exist.

The largest sum of live buffers is the answer. `python -m benchmarks.memory_model`
compares it with the compiler's.
"""

import functools

from dafjax._memory.buffers import Buffers
from dafjax._memory.kernels import find_kernels
from dafjax._memory.order import breadth_first, depth_first
from dafjax._memory.program import XlaProgram
from dafjax._memory.read import read, read_program
from dafjax._trace.residuals import Program
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
    return Buffers(program, carried).peak(order(program, kernels))
