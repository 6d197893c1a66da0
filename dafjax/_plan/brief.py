"""Finds short-lived residuals: stored only while live memory is far below its peak.

XLA gives a program one piece of memory, as large as the live values at the peak. The
late layers of a convolutional network have small values. Their residuals are packed
after the early layers have run, and read before the cotangents of the early layers are
computed. So these residuals fit into memory that the program has for the early layers.
Anywhere else they would cost their bytes.
"""

import itertools
from collections.abc import Iterable, Iterator

from dafjax import config
from dafjax._plan.plan import ProgramPlan
from dafjax._trace.equation import values_of
from dafjax._trace.graph import live_equations
from dafjax._trace.tracing import largest_nbytes


def find_brief(plan: ProgramPlan) -> frozenset[int]:
    """Returns the residuals in inexact codes beside which no large value is made.

    Returns none if the results of the function, without returned arguments, together
    exceed the limit: their readers may need much memory before the backward pass
    begins.

    Args:
        plan: The plan of a function whose backward pass follows its forward pass. (The
            body of a loop is no such function.)
    """
    program = plan.program
    kept = {
        item.value: item
        for item in plan.kept
        if item.codec is not None and not item.codec.is_exact
    }
    read_beside = _largest_until_last_read(plan)
    results = values_of(program.results)
    forward = live_equations(
        program.forward, (*results, *(item.value for item in plan.kept))
    )
    expensive = (eqn for eqn in forward if not eqn.rule.is_cheap)
    # Cheap results, and values inside a loop, may never be in memory as a whole.
    largest = max(
        (program.nbytes(v) for eqn in expensive for v in eqn.outputs), default=0
    )
    most = int(largest * config.SHORT_LIVED)
    made = {v for v in results if v >= program.num_arguments}
    if sum(map(program.nbytes, made)) > most:
        return frozenset()
    brief = set()
    beside = taken = 0
    for eqn in reversed(forward):
        for value in kept.keys() & eqn.outputs:
            nbytes = kept[value].stored_nbytes
            is_brief = max(beside, read_beside[value]) <= most
            if is_brief and taken + nbytes <= most:
                brief.add(value)
                taken += nbytes
        beside = max(beside, largest_nbytes(eqn.jaxpr))
    return frozenset(brief)


def _largest_until_last_read(plan: ProgramPlan) -> dict[int, int]:
    """Returns, for each restored value, the bytes of the largest value made by then.

    "By then" is the last use of the restored value. Counts the values that the backward
    pass has computed or restored.
    """
    program = plan.program
    gradients = values_of(program.gradients)
    reads = [*(eqn.input_values for eqn in program.backward), gradients]
    made = [*(largest_nbytes(eqn.jaxpr) for eqn in program.backward), 0]
    restored = _restored_first(plan, reads)
    of_each = (
        max((nbytes, *map(program.nbytes, new)))
        for nbytes, new in zip(made, restored, strict=True)
    )
    largest = list(itertools.accumulate(of_each, max))
    found: dict[int, int] = {}
    # In reverse order, the first read of a value is its last use.
    last_reads = _restored_first(plan, reversed(reads))
    for nbytes, new in zip(reversed(largest), last_reads, strict=True):
        found.update(dict.fromkeys(new, nbytes))
    return found


def _restored_first(
    plan: ProgramPlan, reads: Iterable[Iterable[int]]
) -> Iterator[list[int]]:
    """Yields, for each read, the values that it is the first to unpack or recompute."""
    in_codes = {item.value for item in plan.kept if item.codec is not None}
    known: set[int] = set()
    for wanted in reads:
        new = []
        stack = list(wanted)
        while stack:
            value = stack.pop()
            is_packed = value in in_codes
            if value in known or not (is_packed or value in plan.recomputed):
                continue
            known.add(value)
            new.append(value)
            if not is_packed:
                stack.extend(plan.recomputed[value].input_values)
        yield new
