"""Which residuals wait only while a program needs far less memory than at its peak.

XLA gives a program one piece of memory, as large as what is alive at its peak. What is
kept of the late layers of a convolutional network, whose values are small, is packed
after the early ones have run and is read before their cotangents are made: it waits in
memory that is there for the early layers. Anywhere else it would cost its bytes.
"""

import itertools
from collections.abc import Iterable, Iterator

from dafjax._plan.plan import ProgramPlan
from dafjax._trace.equation import values_of
from dafjax._trace.graph import live_equations
from dafjax._trace.tracing import largest_nbytes


# So much of the largest value, of which a step has some three at its peak, is the most
# that may be made while brief residuals wait, and the most that they take together.
_FAR_LESS = 1 / 2


def find_brief(plan: ProgramPlan) -> frozenset[int]:
    """Returns the residuals in inexact codes beside which no large value is made.

    None of a function whose results, arguments left out, are together as large: what
    they are for may need much memory before the backward pass begins.

    Args:
        plan: What is kept of a function whose backward pass follows its forward pass,
            as it does not in the body of a loop.
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
    # What is cheap, or in a loop, may never be there as a whole.
    largest = max(
        (program.nbytes(v) for eqn in expensive for v in eqn.outputs), default=0
    )
    most = int(largest * _FAR_LESS)
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
    """Returns, for each value that is restored, the bytes of what is made by then.

    Those of the largest value that the backward pass has computed, or restored, when it
    reads the value for the last time.
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
    # What is restored first in the reverse order is read there for the last time.
    last_reads = _restored_first(plan, reversed(reads))
    for nbytes, new in zip(reversed(largest), last_reads, strict=True):
        found.update(dict.fromkeys(new, nbytes))
    return found


def _restored_first(
    plan: ProgramPlan, reads: Iterable[Iterable[int]]
) -> Iterator[list[int]]:
    """Yields what is unpacked or recomputed for each read, and was for none before."""
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
