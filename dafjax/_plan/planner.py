"""Makes plans: asks a policy about each value, and chooses the bits of codes."""

import dataclasses
import itertools
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, final

import jax
import jax.numpy as jnp

from dafjax._bits import Bits, Use
from dafjax._passes.nonlinear import with_masks_of_results
from dafjax._plan.analysis import (
    find_channels,
    find_one_sided,
    find_uses,
    with_spare_bits,
)
from dafjax._plan.decisions import applies, decide
from dafjax._plan.extents import (
    Extent,
    extent_of_channels,
    extent_of_examples,
    extent_of_rows,
    find_apart,
    find_extents,
)
from dafjax._plan.normalized import Form, limit_in_codes, mixes, with_copies
from dafjax._plan.plan import Kept, ProgramPlan
from dafjax._trace.bodies import reads_packed
from dafjax._trace.equation import Equation, values_of
from dafjax._trace.graph import live_equations
from dafjax._trace.residuals import Program
from dafjax._trace.tracing import listed_name, names_of_place
from dafjax.codecs import AbstractCodec, Affine
from dafjax.policies import (
    CODED_DTYPES,
    AbstractPolicy,
    Compress,
    CompressExpensive,
    Decision,
    Recompute,
    Residual,
    Save,
    is_inexact,
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
    """Decides which values of a program are saved, and how.

    Args:
        program: The function and its transpose.
        policy: The policy that decides about each value.
        bits: The bits of codes for `Compress(None)`.
        activations: The arguments that the caller does not keep alive. The policy
            decides about them as about values that the function computes.
        iterations: How often the program, such as the body of a loop, runs before its
            backward pass.
        function: Identifies the function. Default: its fingerprint.
        spares_bits: Whether small residuals get more bits. False where bits are
            allocated: planned bits are then bounds, and say how residuals are read.
        nbits_beside: The bits that loops in other programs store. They add to the total
            that small residuals may exceed by a 32nd.

    Returns:
        The plan.
    """
    draft = _choose(program, policy, frozenset(activations), iterations)
    _shrink(draft)
    extents = find_extents(program)
    uses = _give_bits(draft, extents, bits, nbits_beside if spares_bits else None)
    _normalize(draft, extents)
    return _finish(draft, uses, function)


@final
@dataclasses.dataclass
class _Draft:
    """A plan in the making.

    Attributes:
        program: The program.
        activations: The arguments that the caller does not keep alive.
        residuals: The residuals.
        packed: The values that bodies of loops and branches have packed.
        decisions: The policy's decisions.
        names: The names of each value.
        kept: The values to save.
        arguments: The arguments that the backward pass reads.
        recomputed: For every other value that it reads, directly or not, how.
        num_bits: The bits of the codes of saved values.
        copies: The normalized copies of values, and the values that they stand for.
        producers: The equation that computes each value.
    """

    program: Program
    activations: frozenset[int]
    residuals: frozenset[int]
    packed: frozenset[int]
    decisions: dict[int, Decision]
    names: dict[int, tuple[str, ...]]
    producers: dict[int, Equation]
    kept: set[int] = dataclasses.field(default_factory=set)
    arguments: list[int] = dataclasses.field(default_factory=list)
    recomputed: dict[int, Equation] = dataclasses.field(default_factory=dict)
    num_bits: dict[int, int] = dataclasses.field(default_factory=dict)
    copies: dict[int, int] = dataclasses.field(default_factory=dict)

    @property
    def inexact(self) -> list[int]:
        """The values to save in inexact codes."""
        return [value for value in self.kept if is_inexact(self.decisions[value])]


def _choose(
    program: Program,
    policy: AbstractPolicy,
    activations: frozenset[int],
    iterations: int,
) -> _Draft:
    """Asks the policy, and follows each residual to saved values and arguments."""
    residuals = program.residuals()
    names = _find_names(program)
    packed = frozenset(v for eqn in program.backward for v in reads_packed(eqn))
    read_by_recipes = (r.equation.input_values for r in program.recipes.values())
    draft = _Draft(
        program=program,
        activations=activations,
        residuals=frozenset(residuals),
        packed=packed,
        decisions=decide(
            program,
            (*residuals, *itertools.chain.from_iterable(read_by_recipes)),
            policy,
            names=names,
            activations=activations,
            iterations=iterations,
        ),
        names=names,
        producers=dict(program.producers),
    )
    seen = set(residuals)
    stack = list(residuals)
    while stack:
        value = stack.pop()
        if not isinstance(draft.decisions[value], Recompute):
            draft.kept.add(value)
        elif value < program.num_arguments:
            draft.arguments.append(value)
        else:
            equation = draft.producers[value]
            recipe = program.recipes.get(value)
            if recipe is not None and applies(recipe, draft.decisions):
                equation = recipe.equation
            draft.recomputed[value] = equation
            new = [v for v in equation.input_values if v not in seen]
            seen.update(new)
            stack.extend(new)
    return draft


def _shrink(draft: _Draft) -> None:
    """Saves parts of a value in its place if that is enough for its readers."""
    for value in sorted(draft.kept - draft.packed):
        parts = _parts_read(draft.program, value, draft.recomputed, draft.residuals)
        if parts != {value}:
            draft.kept.remove(value)
            draft.kept.update(parts)
            draft.decisions.update(dict.fromkeys(parts, draft.decisions[value]))
    wanted = draft.program.residuals()
    draft.recomputed = _needed(draft.recomputed, wanted, draft.kept)


def _give_bits(
    draft: _Draft, extents: Mapping[int, Extent], bits: Bits, nbits_beside: int | None
) -> dict[int, Use]:
    """Decides about bits; returns how gradients depend on each value in codes.

    Args:
        draft: The plan.
        extents: The extents of the values that the program normalizes.
        bits: The user's bits.
        nbits_beside: The bits that loops in other programs store; `None` if small
            residuals get the same bits as others.
    """
    uses = find_uses(draft.program, draft.recomputed, draft.inexact)
    for value in uses.keys() & find_apart(draft.program, extents):
        uses[value] = max(uses[value], Use.SMOOTH)
    names, decisions = draft.names, draft.decisions
    draft.num_bits = {v: bits.of(names[v], uses.get(v, Use.LINEAR)) for v in draft.kept}
    if nbits_beside is None:
        return uses
    of_default = {
        value: draft.num_bits[value]
        for value in draft.inexact
        if decisions[value] == Compress() and not bits.has_named(names[value])
    }
    sizes = {value: draft.program.avals[value].size for value in of_default}
    of_bodies = map(draft.program.nbytes, draft.packed.intersection(draft.kept))
    beside = 8 * sum(of_bodies) + nbits_beside
    draft.num_bits |= with_spare_bits(of_default, sizes, beside=beside)
    return uses


def _normalize(draft: _Draft, extents: Mapping[int, Extent]) -> None:
    """Saves normalized copies in place of values that groups would mix."""
    forms = _find_forms(
        draft.program,
        extents,
        {value: draft.num_bits[value] for value in draft.inexact},
        draft.decisions,
        (*draft.recomputed.values(), *draft.program.backward),
        draft.activations,
    )
    draft.program, copies = with_copies(draft.program, forms)
    for value, made in copies.items():
        numbers = (*made.copies, *made.statistics)
        draft.kept.remove(value)
        draft.kept.update(numbers)
        draft.decisions.update(dict.fromkeys(made.copies, draft.decisions[value]))
        draft.decisions.update(dict.fromkeys(made.statistics, Save()))
        draft.recomputed[value] = made.recompute
        draft.names.update(dict.fromkeys(numbers, draft.names[value]))
        draft.num_bits.update(dict.fromkeys(numbers, draft.num_bits[value]))
        made_by = ((v, eqn) for eqn in made.equations for v in eqn.outputs)
        draft.producers.update(made_by)
        draft.copies.update(dict.fromkeys(made.copies, value))


def _finish(
    draft: _Draft, uses: Mapping[int, Use], function: str | None
) -> ProgramPlan:
    """Chooses codecs, and drops equations of the forward pass that nothing reads."""
    channels = find_channels(draft.program, draft.activations)
    # Dithered rounding can leave the range of the values, and a pole may be there.
    one_sided = find_one_sided(draft.program)
    spread = {v for v, use in uses.items() if use <= Use.SMOOTH} - one_sided
    spread.update(copy for copy, value in draft.copies.items() if value in spread)
    # Passes add values that a plan may not need, range-reduced arguments for example.
    wanted = (*draft.program.results, *draft.residuals, *draft.kept)
    forward = live_equations(draft.program.forward, wanted)
    compressed = {v for v in draft.kept if not isinstance(draft.decisions[v], Save)}
    program, masks = with_masks_of_results(
        dataclasses.replace(draft.program, forward=forward), compressed
    )

    def describe(value: int) -> Kept:
        # A listing shows a copy as the value that it stands for.
        stands_for = draft.copies.get(value)
        default = _default_codec(
            draft.num_bits[value],
            tuple(program.avals[value].shape),
            has_channels=value in channels,
            rounding="dithered" if value in spread else "stochastic",
        )
        return _describe(
            program,
            value,
            draft.producers.get(value if stands_for is None else stands_for),
            draft.decisions[value],
            default,
            is_packed=value in draft.packed,
            stands_for=stands_for,
        )

    return ProgramPlan(
        program=program,
        fingerprint=program.fingerprint,
        function=program.fingerprint if function is None else function,
        kept=tuple(describe(v) for v in _in_order(program) if v in draft.kept),
        arguments=tuple(sorted(draft.arguments)),
        recomputed=draft.recomputed,
        masks=masks,
        copies=draft.copies,
    )


def _parts_read(
    program: Program,
    value: int,
    recomputed: Mapping[int, Equation],
    residuals: Container[int],
) -> set[int]:
    """Returns the smallest parts of a stored value that its readers need.

    If only the low modes of a Fourier transform are read, these modes.
    """
    if value in residuals:
        return {value}
    found: set[int] = set()
    for result, eqn in recomputed.items():
        if value not in eqn.input_values:
            continue
        moves = eqn.rule.keeps_magnitudes or eqn.rule.slices
        if not moves or len(eqn.input_values) != 1:
            return {value}
        found |= _parts_read(program, result, recomputed, residuals)
    sizes = {v: math.prod(program.avals[v].shape) for v in (value, *found)}
    return found if sum(sizes[v] for v in found) < sizes[value] else {value}


def _needed(
    recomputed: Mapping[int, Equation], wanted: Iterable[int], kept: Container[int]
) -> dict[int, Equation]:
    """Returns the recomputations that are still needed once more values are stored."""
    needed: dict[int, Equation] = {}
    stack = list(wanted)
    while stack:
        value = stack.pop()
        if value in kept or value in needed or value not in recomputed:
            continue
        needed[value] = recomputed[value]
        stack.extend(recomputed[value].input_values)
    return needed


def _layout(
    decision: Decision, shape: tuple[int, ...], *, has_channels: bool
) -> Affine | None:
    """Returns a codec with the quantization groups that a value will be stored in."""
    assert isinstance(decision, Compress)
    if decision.codec is None:
        return _default_codec(1, shape, has_channels=has_channels)
    return decision.codec if isinstance(decision.codec, Affine) else None


def _in_order(program: Program) -> Iterator[int]:
    """Yields the arguments, then the forward pass's values in order of computation."""
    yield from range(program.num_arguments)
    for eqn in program.forward:
        yield from eqn.outputs


def _find_forms(
    program: Program,
    extents: Mapping[int, Extent],
    bits: Mapping[int, int],
    decisions: Mapping[int, Decision],
    readers: Sequence[Equation],
    activations: Container[int],
) -> dict[int, Form]:
    """Returns the forms of the values that are normalized or cut off.

    Args:
        program: The program.
        extents: The extents of the values that it normalizes.
        bits: The values in inexact codes, and the bits of the codes.
        decisions: The policy's decisions. Only for `Affine` are the quantization groups
            known.
        readers: The equations that read the values after unpacking.
        activations: The arguments that the caller does not keep alive.
    """
    channels = find_channels(program, activations)
    # Range-reduced arguments all have the same scale, a period.
    phases = {v for e in program.forward if e.primitive == "phase" for v in e.outputs}
    limits: dict[int, float] = {}
    for eqn in dict.fromkeys(readers):
        limit = eqn.rule.limit
        limits.update((v, max(limit, limits.get(v, 0))) for v in eqn.input_values)
    limits.update(dict.fromkeys(values_of(program.gradients), math.inf))
    found = {}
    for value in sorted(bits):
        shape = tuple(program.avals[value].shape)
        is_wide = program.avals[value].dtype not in CODED_DTYPES
        if is_wide:
            found[value] = Form((extents.get(value) or extent_of_examples(shape),))
            continue
        codec = _layout(decisions[value], shape, has_channels=value in channels)
        if codec is None or value in phases:
            continue
        limit = limit_in_codes(limits.get(value, math.inf), bits[value])
        if limit < math.inf:
            # To a saturating function, all elements have the same, absolute scale.
            found[value] = Form(limit=limit)
            continue
        wanted = [extents[value]] if value in extents else []
        if value in channels and codec.blocks == "rows":
            # A scale per channel fits all rows only once rows have the same scale.
            wanted = wanted or [extent_of_rows(shape)]
            wanted.append(extent_of_channels(shape))
        if not all(extent.is_worth_a_scale for extent in wanted):
            continue
        if any(mixes(extent, shape, codec) for extent in wanted):
            found[value] = Form(tuple({e.axes: e for e in wanted}.values()))
    return found


def plan_arguments(
    plan: ProgramPlan,
    program: Program,
    *,
    bits: Bits,
    activations: Iterable[int],
) -> ProgramPlan:
    """Decides how to store the arguments that a function is recomputed from.

    Stores activations in codes of 8 bits, because their errors enter everything that is
    computed from them.

    Args:
        plan: The plan of the function for when it is recomputed.
        program: The function that the plan was made of.
        bits: The bits of other residuals.
        activations: The arguments that nothing keeps alive.

    Returns:
        A plan that stores the activations that `plan` depends on, and nothing else.
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
                program,
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


def save_arguments(program: Program, activations: Sequence[int]) -> ProgramPlan:
    """Returns the plan of a function that is computed again from exact arguments.

    Args:
        program: The function.
        activations: The arguments that nothing else keeps alive.
    """
    return ProgramPlan(
        program=program,
        fingerprint=program.fingerprint,
        function=program.fingerprint,
        kept=tuple(
            _describe(program, value, None, Save(), None, is_packed=False)
            for value in activations
        ),
        arguments=tuple(
            v for v in range(program.num_arguments) if v not in activations
        ),
        recomputed={},
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
    decision = CompressExpensive()(described)
    is_coded = aval.dtype in CODED_DTYPES
    return decision if is_coded or not is_inexact(decision) else Save()


def _default_codec(
    bits: int,
    shape: tuple[int, ...],
    *,
    has_channels: bool,
    rounding: Literal["stochastic", "dithered"] = "stochastic",
) -> Affine:
    """Returns the codec to use if a policy names none."""
    columns = Affine(bits=bits, blocks="columns", rounding=rounding)
    if has_channels and columns.has_full_columns(shape):
        return columns
    return Affine(bits=bits, rounding=rounding)


def _find_names(program: Program) -> dict[int, tuple[str, ...]]:
    """Returns the names of each value.

    First come its tags, then its place in the model, then the name that listings show.
    """
    names: dict[int, tuple[str, ...]] = dict.fromkeys(range(len(program.avals)), ())
    for eqn in program.forward:
        listed = listed_name(eqn.place, eqn.primitive)
        found = (*names_of_place(eqn.place), listed)
        names.update(dict.fromkeys(eqn.outputs, found))
    for value, tags in program.tags.items():
        names[value] = (*tags, *names[value])
    return names


def _describe(
    program: Program,
    value: int,
    producer: Equation | None,
    decision: Decision,
    default: AbstractCodec | None,
    *,
    is_packed: bool,
    stands_for: int | None = None,
) -> Kept:
    aval: Any = program.avals[value]
    codec = None
    if isinstance(decision, Compress):
        codec = default if decision.codec is None else decision.codec
    if codec is not None:
        like = jax.ShapeDtypeStruct(aval.shape, jnp.dtype(aval.dtype))
        codec.check(like)
        # Codes of a few elements are mostly padding.
        if codec.packed_nbytes(like) >= like.size * like.dtype.itemsize:
            codec = None
    return Kept(
        program=program.fingerprint,
        value=value,
        shape=tuple(aval.shape),
        dtype=aval.dtype,
        codec=codec,
        name="" if producer is None else producer.place,
        primitive="argument" if producer is None else producer.primitive,
        source="" if producer is None else producer.source,
        is_packed=is_packed and codec is None,
        stands_for=stands_for,
        sharding=getattr(aval, "sharding", None),
    )
