"""Where a function is cut into segments that can be run again one by one.

Between two segments a single large value waits, beside what is alive anyway: the
residual stream of a transformer, or the output of a layer that only the next one reads.
A backward pass that has kept these values alone, in codes, needs at its peak all of
them and what one segment keeps for itself. More cuts make the first more and the second
less; the cuts are those for which the sum is least.
"""

import dataclasses
import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, final

import jax.numpy as jnp

from dafjax._trace.bodies import alive_values, has_bodies
from dafjax._trace.equation import (
    Atom,
    Equation,
    evaluate,
    look_up,
    scan_arity,
    values_of,
)
from dafjax._trace.graph import Graph, flatten, live_equations
from dafjax._trace.residuals import trace_like
from dafjax._trace.tracing import ClosedJaxpr


# Smaller values are no reason not to cut, and none to run anything again.
_SMALL_NBYTES = 16 * 1024

# Bits of an element of what waits between segments, and about that of what is kept of
# one segment: most are in 2 bits, some in 4.
_BETWEEN_BITS = 8
_WITHIN_BITS = 3

# So many places are tried for the first cut.
_MOST_FIRSTS = 16


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """A stretch of a function, as a function.

    Attributes:
        closed: What it computes.
        inputs: The values that it reads.
        outputs: Those of the values that it makes that are read later.
        activations: Positions of the inputs that nothing keeps alive.
        may_repeat: Whether all that it does may be done twice.
        ends: Whether all outputs are small, as a loss. The backward pass of such a
            segment follows at once.
        nbits_of_loops: About how many bits wait of its loops while other segments run
            again: what each iteration is run again from, which is what the loop
            carries. Loops in loops and in branches are not counted, nor what is
            stacked; loops that nobody trains are.
    """

    closed: ClosedJaxpr
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    activations: tuple[int, ...]
    may_repeat: bool
    ends: bool
    nbits_of_loops: int

    @property
    def runs_again(self) -> bool:
        """Whether the backward pass runs it again.

        Not if it starts from arguments alone, nor right before its backward pass; of
        loops and branches the iterations are run again.
        """
        starts_inside = bool(self.activations) and not self.ends
        return starts_inside and self.may_repeat and not has_bodies(self.closed)


def cut(
    closed: ClosedJaxpr, activations: Sequence[int]
) -> tuple[tuple[Segment, ...], tuple[Atom, ...]]:
    """Cuts a program, not differentiated yet, into segments.

    What follows cheaply from the arguments that are alive anyway is computed in every
    segment that reads it.

    Args:
        closed: The program.
        activations: Its arguments that nothing keeps alive for the backward pass.

    Returns:
        The segments, in order, and the results of the program. Values are numbered as
        in `flatten`: arguments come first.
    """
    graph = flatten(closed, is_differentiated=False)
    alive = alive_values(graph, activations)
    equations = live_equations(graph.equations, graph.outputs)
    others = [
        eqn for eqn in equations if eqn.has_effect or not alive.issuperset(eqn.outputs)
    ]
    cheap = set(equations).difference(others)
    cuts = _choose(
        _find_cuts(graph, others, alive),
        [_effort(graph, eqn) for eqn in others],
        starts_from_arguments=not activations,
    )
    segments = []
    for start, end in itertools.pairwise((0, *cuts, len(others))):
        wanted = {v for eqn in others[end:] for v in eqn.input_values} - alive
        if end == len(others):
            wanted.update(values_of(graph.outputs))
        else:
            wanted.update(set(values_of(graph.outputs)) - alive)
        chosen = cheap.union(others[start:end])
        own = [eqn for eqn in equations if eqn in chosen]
        segments.append(_segment(graph, own, wanted, alive))
    return tuple(segments), graph.outputs


def _find_cuts(
    graph: Graph, equations: Sequence[Equation], alive: Container[int]
) -> dict[int, int]:
    """Returns before which equations a cut can be: the elements that wait there.

    Not where a reduction waits, as the first token of the last layer: what a segment
    starts from is packed, and a reduction inside of one is not.
    """
    last_use = {v: now for now, eqn in enumerate(equations) for v in eqn.input_values}
    last_use.update(dict.fromkeys(values_of(graph.outputs), len(equations)))

    def waits(value: int, now: int) -> bool:
        is_large = _nbytes(graph, value) > _SMALL_NBYTES
        return is_large and value not in alive and last_use.get(value, -1) > now

    waiting = {v for v in range(graph.num_inputs) if waits(v, -1)}
    reductions = _reductions(graph, equations, alive)
    cuts: dict[int, int] = {}
    for now, eqn in enumerate(equations):
        if now > 0 and len(waiting) == 1 and reductions.isdisjoint(waiting):
            (value,) = waiting
            cuts[now] = graph.avals[value].size
        waiting = {v for v in (*waiting, *eqn.outputs) if waits(v, now)}
    return cuts


def _reductions(
    graph: Graph, equations: Sequence[Equation], alive: Container[int]
) -> set[int]:
    """Returns reductions, and what follows from them cheaply.

    By default (`CompressExpensive`) a plan keeps them as they are.
    """

    def varies(value: int) -> bool:
        return value not in alive and _is_floating(graph, value)

    found: set[int] = set()
    for eqn in equations:
        reduced_from = max(eqn.operand_sizes, default=0)
        read = set(filter(varies, eqn.input_values))
        follows = eqn.rule.is_cheap and bool(read) and read <= found
        found.update(
            v
            for v in eqn.outputs
            if follows or eqn.rule.is_reduction(graph.avals[v].size, reduced_from)
        )
    return found


def _effort(graph: Graph, equation: Equation) -> int:
    """Returns the elements that a plan would keep of an equation, at most."""
    if equation.rule.is_cheap and not equation.is_amplifying:
        return 0
    return sum(graph.avals[v].size for v in equation.outputs)


def _choose(
    cuts: Mapping[int, int], efforts: Sequence[int], *, starts_from_arguments: bool
) -> tuple[int, ...]:
    """Returns the cuts with the least memory, out of those that are possible.

    What starts from arguments alone is not run again: all that is kept of it waits.
    """
    sums = (0, *itertools.accumulate(efforts))

    def nbits(chosen: tuple[int, ...]) -> int:
        between = sum(cuts[place] for place in chosen)
        bounds = itertools.pairwise((0, *chosen, len(efforts)))
        within = [sums[end] - sums[start] for start, end in bounds]
        always = within.pop(0) if starts_from_arguments else 0
        most = max(within, default=0)
        return between * _BETWEEN_BITS + (always + most) * _WITHIN_BITS

    possible = sorted(cuts)
    firsts = possible[:_MOST_FIRSTS] if starts_from_arguments else []
    plans = {
        tuple(_cuts_of_at_most(sums[-1] / number, first, possible, sums))
        for number in range(1, len(cuts) + 2)
        for first in firsts or (0,)
    }
    return min(plans, key=lambda chosen: (nbits(chosen), chosen))


def _cuts_of_at_most(
    most: float, first: int, possible: Sequence[int], sums: Sequence[int]
) -> Iterator[int]:
    """Cuts as seldom as segments keep no more than so much, where that is possible."""
    if first:
        yield first
    start = place = first
    for following in (*possible, len(sums) - 1):
        if following <= place:
            continue
        if place > start and sums[following] - sums[start] > most:
            yield place
            start = place
        place = following


def _segment(
    graph: Graph,
    equations: Sequence[Equation],
    wanted: Container[int],
    alive: Container[int],
) -> Segment:
    """Returns those of some equations that make what is wanted, as a function."""
    outputs = [v for eqn in equations for v in eqn.outputs if v in wanted]
    equations = live_equations(equations, outputs)
    made = {v for eqn in equations for v in eqn.outputs}
    inputs = sorted({v for eqn in equations for v in eqn.input_values} - made)

    def run(*arguments: Any) -> list[Any]:
        env = dict(zip(inputs, arguments, strict=True))

        for eqn in equations:
            results = evaluate(eqn, look_up(eqn.inputs, env))
            env.update(zip(eqn.outputs, results, strict=True))
        return [env[v] for v in outputs]

    return Segment(
        closed=trace_like(run, *map(graph.type_of, inputs)),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        activations=tuple(n for n, v in enumerate(inputs) if v not in alive),
        may_repeat=all(eqn.may_repeat for eqn in equations),
        ends=all(_nbytes(graph, v) <= _SMALL_NBYTES for v in outputs),
        nbits_of_loops=_nbits_of_loops(graph, equations),
    )


def _nbits_of_loops(graph: Graph, equations: Sequence[Equation]) -> int:
    elements = 0
    for eqn in equations:
        if eqn.primitive == "scan":
            _, num_carry = scan_arity(eqn)
            carried = (v for v in eqn.outputs[:num_carry] if _is_floating(graph, v))
            elements += eqn.params["length"] * sum(graph.avals[v].size for v in carried)
    return elements * _BETWEEN_BITS


def _is_floating(graph: Graph, value: int) -> bool:
    return bool(jnp.issubdtype(graph.avals[value].dtype, jnp.floating))


def _nbytes(graph: Graph, value: int) -> int:
    aval = graph.avals[value]
    return aval.size * getattr(aval.dtype, "itemsize", 0)
