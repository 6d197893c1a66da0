"""How a plan is made: a policy is asked about each value, and about bits."""

from collections.abc import Container, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dafjax._bits import Bits, Use
from dafjax._bodies import reads_packed
from dafjax._channels import find_channels
from dafjax._equation import Equation
from dafjax._graph import live_equations
from dafjax._linearity import find_uses
from dafjax._plan import Kept, ProgramPlan
from dafjax._pooling import Pooling, find_poolings, note_places
from dafjax._primitives import is_amplifying, is_cheap, needs_exact_operands
from dafjax._rectifiers import find_rectifiers, selection
from dafjax._residuals import Program
from dafjax._shares import Total, find_totals, total_of_codes
from dafjax._spare_bits import with_spare_bits
from dafjax._steering import find_steering
from dafjax._tracing import names_of_place
from dafjax.codecs import AbstractCodec, Affine
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

    Returns:
        The plan.
    """
    activations = frozenset(activations)
    fingerprint = program.fingerprint
    packings = _packings_of_places(program, policy, activations, iterations)
    pooled = note_places(program, packings)
    program = pooled.program
    names = _find_names(program)
    residuals = program.residuals()
    rectifiers = find_rectifiers(program)
    totals = find_totals(program)
    producers = {v: eqn for eqn in program.forward for v in eqn.outputs}
    packed = {v for eqn in program.backward for v in reads_packed(eqn)}
    decisions = _decide(
        program,
        (
            *residuals,
            *(r.mask for r in rectifiers.values()),
            *(total.operand for total in totals.values()),
        ),
        policy,
        fingerprint=fingerprint,
        names=names,
        activations=activations,
        packed=packed,
        totals=totals,
        decided=dict(zip(pooled.places, packings.values(), strict=True)),
        iterations=iterations,
    )
    kept: list[int] = []
    arguments: list[int] = []
    recomputed: dict[int, Equation] = {}
    seen = set(residuals)
    stack = list(residuals)
    while stack:
        value = stack.pop()
        if not isinstance(decisions[value], Recompute):
            kept.append(value)
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
        total = totals.get(value)
        if total is not None and _is_inexact(decisions[total.operand]):
            equation = total_of_codes(program, total)
        recomputed[value] = equation
        new = [v for v in equation.input_values if v not in seen]
        seen.update(new)
        stack.extend(new)
    inexact = [value for value in kept if _is_inexact(decisions[value])]
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
        num_bits |= with_spare_bits(of_default, sizes)
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
            for value in sorted(kept)
        ),
        arguments=tuple(sorted(arguments)),
        recomputed=recomputed,
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


def _is_inexact(decision: Decision) -> bool:
    return isinstance(decision, Compress) and (
        decision.codec is None or not decision.codec.is_exact
    )


def _only_pads(decision: Decision, residual: Residual) -> bool:
    """Returns whether a code of a value, of however few bits, is no smaller than it.

    Such a value is exact: nothing is gained by recomputing others from it.
    """
    if decision != Compress() or not residual.is_floating:
        return False
    like = jax.ShapeDtypeStruct(residual.shape, residual.dtype)
    return Affine(bits=1).packed_nbytes(like) >= residual.nbytes


def _find_names(program: Program) -> dict[int, tuple[str, ...]]:
    """Returns the names of every value: tags first, then its place in the model."""
    names: dict[int, tuple[str, ...]] = dict.fromkeys(range(len(program.avals)), ())
    for eqn in program.forward:
        names.update(dict.fromkeys(eqn.outputs, names_of_place(eqn.place)))
    for value, tags in program.tags.items():
        names[value] = (*tags, *names[value])
    return names


def _decide(
    program: Program,
    wanted: tuple[int, ...],
    policy: AbstractPolicy,
    *,
    fingerprint: str,
    names: Mapping[int, tuple[str, ...]],
    activations: Container[int],
    packed: Container[int],
    totals: Mapping[int, Total],
    decided: Mapping[int, Decision],
    iterations: int,
) -> dict[int, Decision]:
    """Asks the policy about every value `wanted` could be recomputed from.

    Values are asked about in the order in which they are made, so that `known` and
    `sources` of a value's operands are settled before it; not those that are `decided`.
    """
    decisions: dict[int, Decision] = {}
    known: dict[int, bool] = {}
    # The values in inexact codes that recomputing a value unpacks; or itself
    sources: dict[int, frozenset[int]] = {}
    # What is recomputed by way of an exponential or the like.
    amplified: set[int] = set()

    exact = {
        value
        for eqn in program.backward
        if needs_exact_operands(eqn.primitive)
        for value in eqn.input_values
    }
    # A code near 0 may stand for 0.
    exact.update(eqn.divisor for eqn in program.backward if eqn.divisor is not None)
    steering = find_steering(program)

    def settle(
        value: int,
        residual: Residual,
        reached: frozenset[int],
        *,
        has_effect: bool = False,
    ) -> None:
        decision = decided.get(value) or policy(residual)
        is_off = _is_inexact(decision) or (
            isinstance(decision, Recompute) and residual.sources > 0
        )
        must_be_saved = (
            value in packed
            or has_effect
            or (value in exact and is_off)
            or _only_pads(decision, residual)
        )
        if must_be_saved and not residual.known:
            decision = Save()
        if not isinstance(decision, (Save, Compress, Recompute)):
            raise TypeError(
                f"`policy` must return `Save()`, `Compress(...)` or `Recompute()`, but "
                f"`{policy!r}` returned `{decision!r}`."
            )
        decisions[value] = decision
        known[value] = residual.known
        if isinstance(decision, Recompute):
            sources[value] = reached
        else:
            inexact = _is_inexact(decision)
            sources[value] = frozenset({value}) if inexact else frozenset()

    def describe(value: int, primitive: str, **found: Any) -> Residual:
        aval = program.avals[value]
        return Residual(
            shape=tuple(aval.shape),
            dtype=aval.dtype,
            primitive=primitive,
            steers=value in steering,
            copies=iterations,
            names=names[value],
            program=fingerprint,
            number=value,
            **found,
        )

    for value in range(program.num_arguments):
        if value in activations:
            argument = describe(
                value, "argument", known=False, reduced_from=0, sources=0
            )
            settle(value, argument, frozenset())
        else:
            decisions[value] = Recompute()
            known[value] = True
            sources[value] = frozenset()

    for eqn in live_equations(program.forward, wanted):
        inputs = eqn.input_values
        reached = frozenset().union(*(sources[v] for v in inputs))
        all_known = is_cheap(eqn.primitive) and all(known[v] for v in inputs)
        amplifies = not amplified.isdisjoint(inputs)
        divides = eqn.divisor is not None and bool(sources[eqn.divisor])
        for value in eqn.outputs:
            total = totals.get(value)
            if total is not None and _is_inexact(decisions[total.operand]):
                # It has hardly any noise, and what there is is that of its shares.
                decisions[value] = Recompute()
                known[value] = False
                sources[value] = frozenset()
                continue
            residual = describe(
                value,
                eqn.primitive,
                known=all_known,
                divides=divides,
                amplified=amplifies,
                reduced_from=max(eqn.operand_sizes, default=0),
                sources=len(reached),
                source_elements=sum(program.avals[v].size for v in reached),
                contracted=eqn.contracted_size,
            )
            settle(value, residual, reached, has_effect=eqn.has_effect)
            amplifies_now = amplifies or is_amplifying(eqn.primitive)
            if reached and amplifies_now and isinstance(decisions[value], Recompute):
                amplified.add(value)
    return decisions


def _packings_of_places(
    program: Program,
    policy: AbstractPolicy,
    activations: Container[int],
    iterations: int,
) -> dict[Pooling, Decision]:
    """Asks the policy which poolings are to note places: those that it would pack."""
    packings: dict[Pooling, Decision] = {}
    for pooling in find_poolings(program, activations):
        places = Residual(
            shape=pooling.places.shape,
            dtype=pooling.places.dtype,
            primitive=pooling.gradient.primitive,
            reduced_from=0,
            known=False,
            sources=0,
            steers=False,
            copies=iterations,
            names=names_of_place(pooling.gradient.place),
            program=program.fingerprint,
            number=pooling.value,
        )
        decision = policy(places)
        if isinstance(decision, Compress) and not _is_inexact(decision):
            packings[pooling] = decision
    return packings


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
