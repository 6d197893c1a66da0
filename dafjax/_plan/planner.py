"""How a plan is made: a policy is asked about each value, and about bits."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from dafjax._bits import Bits, Use
from dafjax._plan.channels import find_channels
from dafjax._plan.decisions import decide, is_inexact, packings_of_places
from dafjax._plan.linearity import find_uses
from dafjax._plan.phases import note_phases, without_phases
from dafjax._plan.plan import Kept, ProgramPlan
from dafjax._plan.pooling import note_places
from dafjax._plan.rectifiers import (
    find_rectifiers,
    selection,
    with_masks_of_results,
)
from dafjax._plan.shares import find_totals, total_of_codes
from dafjax._plan.spare_bits import with_spare_bits
from dafjax._trace.bodies import reads_packed
from dafjax._trace.equation import Equation
from dafjax._trace.graph import live_equations
from dafjax._trace.residuals import Program
from dafjax._trace.tracing import names_of_place
from dafjax.codecs import AbstractCodec, Affine, Bitmask
from dafjax.policies import (
    AbstractPolicy,
    Compress,
    CompressExpensive,
    Decision,
    Recompute,
    Residual,
    Save,
)


def make_plan(
    program: Program,
    *,
    policy: AbstractPolicy,
    bits: Bits,
    activations: Iterable[int] = (),
    iterations: int = 1,
    function: str | None = None,
    spares_bits: bool = True,
    nbits_beside: int = 0,
) -> ProgramPlan:
    """Decides what is kept of a program.

    Args:
        program: The function and its transpose.
        policy: The rule.
        bits: What `Compress(None)` stands for.
        activations: The arguments that are not kept alive by the caller, so that they
            are decided about as if they were made inside.
        iterations: How often the program runs before its backward pass does, as the
            body of a loop.
        function: What tells the function from others, if not its fingerprint.
        spares_bits: Whether small residuals get more bits. Not so where bits are
            allocated: the planned ones are then bounds, and say how residuals are read.
        nbits_beside: The bits of what waits of loops in other programs, against which
            residuals of this one are small.

    Returns:
        The plan.
    """
    activations = frozenset(activations)
    fingerprint = program.fingerprint
    packings = packings_of_places(program, policy, activations, iterations)
    pooled = note_places(program, packings)
    phased = note_phases(pooled.program)
    program = phased.program
    names = _find_names(program)
    residuals = program.residuals()
    rectifiers = find_rectifiers(program)
    totals = find_totals(program)
    producers = {v: eqn for eqn in program.forward for v in eqn.outputs}
    packed = {v for eqn in program.backward for v in reads_packed(eqn)}
    decisions = decide(
        program,
        (
            *residuals,
            *(r.mask for r in rectifiers.values()),
            *(total.operand for total in totals.values()),
            *phased.phases,
            *pooled.rows,
        ),
        policy,
        fingerprint=fingerprint,
        names=names,
        activations=activations,
        packed=packed,
        totals=totals,
        decided={
            **dict(zip(pooled.places, packings.values(), strict=True)),
            **dict.fromkeys(pooled.rows, Compress(Bitmask())),
        },
        instead=phased.sines,
        iterations=iterations,
    )
    kept: set[int] = set()
    arguments: list[int] = []
    recomputed: dict[int, Equation] = {}
    seen = set(residuals)
    stack = list(residuals)
    while stack:
        value = stack.pop()
        if not isinstance(decisions[value], Recompute):
            kept.add(value)
            continue
        if value < program.num_arguments:
            arguments.append(value)
            continue
        equation = pooled.picks.get(value, producers[value])
        rectifier = rectifiers.get(value)
        if rectifier is not None and not isinstance(
            decisions[rectifier.mask], Recompute
        ):
            equation = selection(program, rectifier)
        sine = phased.sines.get(value)
        if sine is not None:
            (phase,) = sine.input_values
            if not isinstance(decisions[phase], Recompute):
                equation = sine
        total = totals.get(value)
        if total is not None and is_inexact(decisions[total.operand]):
            equation = total_of_codes(program, total)
        recomputed[value] = equation
        new = [v for v in equation.input_values if v not in seen]
        seen.update(new)
        stack.extend(new)
    inexact = [value for value in kept if is_inexact(decisions[value])]
    uses = find_uses(program, recomputed, inexact)
    channels = find_channels(program, activations)
    num_bits = {v: bits.of(names[v], uses.get(v, Use.LINEAR)) for v in kept}
    if spares_bits:
        of_default = {
            value: num_bits[value]
            for value in inexact
            if decisions[value] == Compress() and not bits.has_named(names[value])
        }
        sizes = {value: program.avals[value].size for value in of_default}
        of_bodies = 8 * sum(map(program.nbytes, packed.intersection(kept)))
        num_bits |= with_spare_bits(of_default, sizes, beside=of_bodies + nbits_beside)
    packed_masks = {v for v in kept if not isinstance(decisions[v], Save)}
    program = without_phases(program, phased.phases, kept)
    program, masks = with_masks_of_results(program, rectifiers, packed_masks)
    return ProgramPlan(
        program=program,
        fingerprint=fingerprint,
        function=fingerprint if function is None else function,
        kept=tuple(
            _describe(
                fingerprint,
                program.avals[value],
                value,
                producers.get(value),
                decisions[value],
                _default_codec(
                    num_bits[value],
                    tuple(program.avals[value].shape),
                    has_channels=value in channels,
                ),
                is_packed=value in packed,
            )
            for value in (*range(program.num_arguments), *producers)
            if value in kept
        ),
        arguments=tuple(sorted(arguments)),
        recomputed=recomputed,
        masks=masks,
    )


def plan_arguments(
    plan: ProgramPlan, program: Program, *, bits: Bits, activations: Iterable[int]
) -> ProgramPlan:
    """Decides how the arguments wait that a function is run again from.

    Activations in codes of 8 bits: all that is computed from them is off with them.

    Args:
        plan: What is kept when the function is run again.
        program: The function as the plan was made of it.
        bits: The bits of everything else.
        activations: The arguments that nothing keeps alive.

    Returns:
        A plan that keeps the activations that `plan` depends on, and nothing else.
    """
    activations = frozenset(activations)
    kept = {item.value for item in plan.kept}
    equations = live_equations(plan.program.forward, sorted(kept))
    read = {v for eqn in equations for v in eqn.input_values}
    read.update(plan.arguments, kept)
    needed = [v for v in range(program.num_arguments) if v in read]
    channels = find_channels(program, activations)
    return ProgramPlan(
        program=program,
        fingerprint=plan.fingerprint,
        function=plan.function,
        kept=tuple(
            _describe(
                plan.fingerprint,
                program.avals[value],
                value,
                None,
                _decide_argument(program.avals[value]),
                _default_codec(
                    bits.of((), Use.AMPLIFIED),
                    tuple(program.avals[value].shape),
                    has_channels=value in channels,
                ),
                is_packed=False,
            )
            for value in needed
            if value in activations
        ),
        arguments=tuple(v for v in needed if v not in activations),
        recomputed={},
        slices=plan.slices,
    )


def _decide_argument(aval: Any) -> Decision:
    described = Residual(
        shape=tuple(aval.shape),
        dtype=aval.dtype,
        primitive="argument",
        reduced_from=0,
        known=False,
        sources=0,
    )
    return CompressExpensive()(described)


def _default_codec(bits: int, shape: tuple[int, ...], *, has_channels: bool) -> Affine:
    """Returns the codec of what a policy leaves open."""
    columns = Affine(bits=bits, blocks="columns")
    if has_channels and columns.has_full_columns(shape):
        return columns
    return Affine(bits=bits)


def _find_names(program: Program) -> dict[int, tuple[str, ...]]:
    """Returns the names of every value: tags first, then its place in the model."""
    names: dict[int, tuple[str, ...]] = dict.fromkeys(range(len(program.avals)), ())
    for eqn in program.forward:
        names.update(dict.fromkeys(eqn.outputs, names_of_place(eqn.place)))
    for value, tags in program.tags.items():
        names[value] = (*tags, *names[value])
    return names


def _describe(
    fingerprint: str,
    aval: Any,
    value: int,
    producer: Equation | None,
    decision: Decision,
    default: AbstractCodec,
    *,
    is_packed: bool,
) -> Kept:
    codec = None
    if isinstance(decision, Compress):
        codec = default if decision.codec is None else decision.codec
        like = jax.ShapeDtypeStruct(aval.shape, jnp.dtype(aval.dtype))
        codec.check(like)
        # Of a few elements padding is the most.
        if codec.packed_nbytes(like) >= like.size * like.dtype.itemsize:
            codec = None
    return Kept(
        program=fingerprint,
        value=value,
        shape=tuple(aval.shape),
        dtype=aval.dtype,
        codec=codec,
        name="" if producer is None else producer.place,
        primitive="argument" if producer is None else producer.primitive,
        source="" if producer is None else producer.source,
        is_packed=is_packed and codec is None,
        sharding=getattr(aval, "sharding", None),
    )
