"""Cuts a function into segments that can be recomputed one by one.

Between two segments, a single large value is stored beside the values that are live
anyway: the residual stream of a transformer, or the output of a layer that only the
next layer reads. If the forward pass stores only these values, in codes, the backward
pass needs at its peak all of them and the residuals of one segment. More cuts make the
first larger and the second smaller. The cuts minimize the sum.
"""

import dataclasses
import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, final

import jax.numpy as jnp

from dafjax import config
from dafjax._contexts import Mode
from dafjax._trace.bodies import alive_values, has_bodies
from dafjax._trace.equation import (
    Atom,
    Equation,
    evaluate_all,
    scan_arity,
    values_of,
)
from dafjax._trace.graph import Graph, flatten, live_equations
from dafjax._trace.residuals import trace_like
from dafjax._trace.tracing import ClosedJaxpr, nbytes_of


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """A segment of a function, as a function.

    Attributes:
        closed: The segment's program.
        inputs: The values that it reads.
        outputs: The values that it computes and that are read later.
        activations: Positions of the inputs that nothing keeps alive.
        may_repeat: Whether all its operations may run twice.
        ends: Whether all outputs are small, as a loss is. The backward pass of such a
            segment follows at once.
        nbits_of_loops: About how many bits its loops store while other segments are
            recomputed: the carried values, from which each iteration is recomputed.
            Does not count loops in loops or branches, nor stacked values. Counts loops
            that are not trained.
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
        """Whether the backward pass recomputes it.

        False if it starts from arguments alone, or if its backward pass follows at
        once. False with loops or branches, whose iterations are recomputed instead.
        """
        starts_inside = bool(self.activations) and not self.ends
        return starts_inside and self.may_repeat and not has_bodies(self.closed)


def cut(
    closed: ClosedJaxpr, activations: Sequence[int], mode: Mode = Mode.RERUN
) -> tuple[tuple[Segment, ...], tuple[Atom, ...]]:
    """Cuts a program, not differentiated yet, into segments.

    Every segment computes for itself the values that follow cheaply from live
    arguments.

    Args:
        closed: The program.
        activations: Its arguments that nothing keeps alive for the backward pass.
        mode: Whether values are stored in codes, or as they are.

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
    is_exact = mode is Mode.EXACT
    cheap = set(equations).difference(others)
    cuts = _choose(
        _find_cuts(graph, others, alive),
        [_effort(graph, eqn, is_exact=is_exact) for eqn in others],
        starts_from_arguments=not activations,
        bits=(1, 1) if is_exact else (config.BETWEEN_BITS, config.WITHIN_BITS),
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
    """Returns, for each equation that a cut can precede, the elements stored there.

    A cut cannot be where a reduction is stored, such as the first token of the last
    layer: the input of a segment is packed, but a reduction within a segment is not.
    """
    last_use = {v: now for now, eqn in enumerate(equations) for v in eqn.input_values}
    last_use.update(dict.fromkeys(values_of(graph.outputs), len(equations)))

    def waits(value: int, now: int) -> bool:
        is_large = nbytes_of(graph.avals[value]) > config.SMALL_NBYTES
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
    """Returns the results of reductions, and values that follow cheaply from them.

    By default (`CompressExpensive`), a plan saves them as they are.
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


def _effort(graph: Graph, equation: Equation, *, is_exact: bool) -> int:
    """Returns the largest number of an equation's elements that a plan would store."""
    is_free = equation.rule.adds_or_moves if is_exact else not equation.is_amplifying
    if equation.rule.is_cheap and is_free:
        return 0
    return sum(graph.avals[v].size for v in equation.outputs)


def _choose(
    cuts: Mapping[int, int],
    efforts: Sequence[int],
    *,
    starts_from_arguments: bool,
    bits: tuple[int, int],
) -> tuple[int, ...]:
    """Returns the possible cuts that need the least memory.

    A segment that starts from arguments alone is not recomputed, so all its residuals
    stay stored.

    Args:
        cuts: The elements stored at each possible cut.
        efforts: The elements that a plan would store for each equation.
        starts_from_arguments: Whether the first segment does.
        bits: Bits per element between segments, and within one.
    """
    sums = (0, *itertools.accumulate(efforts))

    def nbits(chosen: tuple[int, ...]) -> int:
        between = sum(cuts[place] for place in chosen)
        bounds = itertools.pairwise((0, *chosen, len(efforts)))
        within = [sums[end] - sums[start] for start, end in bounds]
        always = within.pop(0) if starts_from_arguments else 0
        most = max(within, default=0)
        return between * bits[0] + (always + most) * bits[1]

    possible = sorted(cuts)
    firsts = possible[: config.MOST_FIRST_CUTS] if starts_from_arguments else []
    plans = {
        tuple(_cuts_of_at_most(sums[-1] / number, first, possible, sums))
        for number in range(1, len(cuts) + 2)
        for first in firsts or (0,)
    }
    return min(plans, key=lambda chosen: (nbits(chosen), chosen))


def _cuts_of_at_most(
    most: float, first: int, possible: Sequence[int], sums: Sequence[int]
) -> Iterator[int]:
    """Makes few cuts, so that each segment stores at most `most`, where possible."""
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
    """Returns the equations that the wanted values depend on, as a function."""
    outputs = [v for eqn in equations for v in eqn.outputs if v in wanted]
    equations = live_equations(equations, outputs)
    made = {v for eqn in equations for v in eqn.outputs}
    inputs = sorted({v for eqn in equations for v in eqn.input_values} - made)

    def run(*arguments: Any) -> list[Any]:
        env = dict(zip(inputs, arguments, strict=True))
        evaluate_all(equations, env)
        return [env[v] for v in outputs]

    return Segment(
        closed=trace_like(run, *map(graph.type_of, inputs)),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        activations=tuple(n for n, v in enumerate(inputs) if v not in alive),
        may_repeat=all(eqn.may_repeat for eqn in equations),
        ends=all(nbytes_of(graph.avals[v]) <= config.SMALL_NBYTES for v in outputs),
        nbits_of_loops=_nbits_of_loops(graph, equations),
    )


def _nbits_of_loops(graph: Graph, equations: Sequence[Equation]) -> int:
    elements = 0
    for eqn in equations:
        if eqn.primitive == "scan":
            _, num_carry = scan_arity(eqn.params)
            carried = (v for v in eqn.outputs[:num_carry] if _is_floating(graph, v))
            elements += eqn.params["length"] * sum(graph.avals[v].size for v in carried)
    return elements * config.BETWEEN_BITS


def _is_floating(graph: Graph, value: int) -> bool:
    return bool(jnp.issubdtype(graph.avals[value].dtype, jnp.floating))
