"""Which residuals wait only while a program needs far less memory than at its peak.

XLA gives a program one piece of memory, as large as what is alive at its peak. What is
kept of the late layers of a convolutional network, whose values are small, is packed
after the early ones have run and is read before their cotangents are made: it waits in
memory that is there for the early layers. Anywhere else it would cost its bytes.
"""

from collections.abc import Container, Iterable

from dafjax._plan.plan import ProgramPlan
from dafjax._trace.equation import values_of
from dafjax._trace.graph import live_equations
from dafjax._trace.primitives import is_cheap
from dafjax._trace.tracing import largest_nbytes


# So much of the largest value, of which a step has some three at its peak, is the most
# that may be made while brief residuals wait, and the most that they take together.
_FAR_LESS = 1 / 2


def find_brief(plan: ProgramPlan) -> frozenset[int]:
    """Returns the residuals in inexact codes beside which no large value is made.

    None of a function with a large result: what it is for may need much memory before
    the backward pass begins.

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
    results = values_of(program.results)
    forward = live_equations(
        program.forward, (*results, *(item.value for item in plan.kept))
    )
    expensive = (eqn for eqn in forward if not is_cheap(eqn.primitive))
    # What is cheap, or in a loop, may never be there as a whole.
    largest = max(
        (program.nbytes(v) for eqn in expensive for v in eqn.outputs), default=0
    )
    most = int(largest * _FAR_LESS)
    if any(program.nbytes(v) > most for v in results):
        return frozenset()
    read_beside = _largest_until_last_read(plan, kept)
    brief = set()
    beside = taken = 0
    for eqn in reversed(forward):
        for value in kept.keys() & eqn.outputs:
            nbytes = kept[value].stored_nbytes
            is_brief = max(beside, read_beside.get(value, 0)) <= most
            if is_brief and taken + nbytes <= most:
                brief.add(value)
                taken += nbytes
        beside = max(beside, largest_nbytes(eqn.jaxpr))
    return frozenset(brief)


def _largest_until_last_read(plan: ProgramPlan, kept: Container[int]) -> dict[int, int]:
    """Returns, for each residual in codes, the bytes of what the backward pass makes.

    Those of the largest value that is computed, or restored, by then.
    """
    found = {}
    largest = 0
    for eqn in plan.program.backward:
        restored = _restored(plan, eqn.input_values)
        nbytes = map(plan.program.nbytes, restored)
        largest = max((largest, largest_nbytes(eqn.jaxpr), *nbytes))
        found.update((v, largest) for v in restored if v in kept)
    return found


def _restored(plan: ProgramPlan, wanted: Iterable[int]) -> set[int]:
    """Returns what is unpacked and recomputed for some values to be there."""
    in_codes = {item.value for item in plan.kept if item.codec is not None}
    found: set[int] = set()
    stack = list(wanted)
    while stack:
        value = stack.pop()
        if value not in found and (value in in_codes or value in plan.recomputed):
            found.add(value)
            if value not in in_codes:
                stack.extend(plan.recomputed[value].input_values)
    return found
