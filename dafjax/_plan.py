"""What is kept of one traced function, and how: its plan, with bytes."""

import dataclasses
from collections.abc import Container, Iterable, Mapping
from typing import Any, final

import jax
import jax.numpy as jnp

from dafjax._bodies import reads_packed
from dafjax._graph import Equation, live_equations
from dafjax._pooling import Pooling, find_poolings, note_places
from dafjax._primitives import is_cheap, needs_exact_operands
from dafjax._rectifiers import find_masks, selection
from dafjax._residuals import Program
from dafjax._steering import find_steering
from dafjax.codecs import AbstractCodec
from dafjax.policies import (
    AbstractPolicy,
    Compress,
    Decision,
    Recompute,
    Residual,
    Save,
)


@final
@dataclasses.dataclass(frozen=True)
class Kept:
    """One value that waits for the backward pass.

    Attributes:
        value: Its number in the program.
        shape: Its shape.
        dtype: Its dtype.
        codec: How it is packed; `None` if it is kept as it is.
        name: Where in the model it is made.
        primitive: What makes it.
        source: The user's line that it comes from.
        is_packed: Whether it was packed where it was made: in the body of a loop or a
            branch, which has a plan of its own.
    """

    value: int
    shape: tuple[int, ...]
    dtype: Any
    codec: AbstractCodec | None
    name: str
    primitive: str
    source: str
    is_packed: bool = False

    @property
    def like(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype to restore."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    @property
    def raw_nbytes(self) -> int:
        """Bytes as an ordinary array."""
        return self.like.size * getattr(self.dtype, "itemsize", 0)

    @property
    def stored_nbytes(self) -> int:
        """Bytes while it waits."""
        if self.codec is None:
            return self.raw_nbytes
        return self.codec.packed_nbytes(self.like)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """All decisions for one traced function.

    Attributes:
        program: The function.
        kept: What is kept, in the order in which it is made. Everything else that the
            backward pass needs is an argument or recomputed.
        arguments: The arguments that the backward pass reads.
        recomputed: For every value that the backward pass computes again, how.
    """

    program: Program
    kept: tuple[Kept, ...]
    arguments: tuple[int, ...]
    recomputed: Mapping[int, Equation]

    @property
    def compresses(self) -> bool:
        """Whether anything is kept in codes."""
        return any(kept.codec is not None for kept in self.kept)


def make_plan(
    program: Program,
    *,
    policy: AbstractPolicy,
    codec: AbstractCodec,
    activations: Iterable[int] = (),
    iterations: int = 1,
) -> Plan:
    """Decides what is kept of a program.

    Args:
        program: The function and its transpose.
        policy: The rule.
        codec: What `Compress(None)` stands for.
        activations: The arguments that are not kept alive by the caller, so that they
            are decided about as if they were made inside.
        iterations: How often the program runs before its backward pass does, as the
            body of a loop.

    Returns:
        The plan.
    """
    activations = frozenset(activations)
    packings = _packings_of_places(program, policy, codec, activations, iterations)
    pooled = note_places(program, packings)
    program = pooled.program
    residuals = program.residuals()
    masks = find_masks(program)
    producers = {v: eqn for eqn in program.forward for v in eqn.outputs}
    packed = {v for eqn in program.backward for v in reads_packed(eqn)}
    decisions = _decide(
        program,
        (*residuals, *masks.values()),
        policy,
        codec,
        activations=activations,
        packed=packed,
        decided=dict(zip(pooled.places, packings.values(), strict=True)),
        iterations=iterations,
    )
    kept: list[Kept] = []
    arguments: list[int] = []
    recomputed: dict[int, Equation] = {}
    seen = set(residuals)
    stack = list(residuals)
    while stack:
        value = stack.pop()
        decision = decisions[value]
        if not isinstance(decision, Recompute):
            item = _describe(program, value, producers.get(value), decision, codec)
            is_packed = value in packed and item.codec is None
            kept.append(dataclasses.replace(item, is_packed=is_packed))
            continue
        if value < program.num_arguments:
            arguments.append(value)
            continue
        equation = pooled.picks.get(value, producers[value])
        mask = masks.get(value)
        if mask is not None and not isinstance(decisions[mask], Recompute):
            equation = selection(program, equation, mask)
        recomputed[value] = equation
        new = [v for v in equation.input_values if v not in seen]
        seen.update(new)
        stack.extend(new)
    return Plan(
        program=program,
        kept=tuple(sorted(kept, key=lambda item: item.value)),
        arguments=tuple(sorted(arguments)),
        recomputed=recomputed,
    )


def _decide(
    program: Program,
    wanted: tuple[int, ...],
    policy: AbstractPolicy,
    codec: AbstractCodec,
    *,
    activations: Container[int],
    packed: Container[int],
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

    exact = {
        value
        for eqn in program.backward
        if needs_exact_operands(eqn.primitive)
        for value in eqn.input_values
    }
    steering = find_steering(program)

    def settle(value: int, residual: Residual, reached: frozenset[int]) -> None:
        decision = decided.get(value) or policy(residual)
        if (value in exact or value in packed) and not residual.known:
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
            inexact = (
                isinstance(decision, Compress)
                and not (decision.codec or codec).is_exact
            )
            sources[value] = frozenset({value}) if inexact else frozenset()

    for value in range(program.num_arguments):
        if value in activations:
            aval = program.avals[value]
            argument = _residual(
                aval, "argument", iterations, known=False, steers=value in steering
            )
            settle(value, argument, frozenset())
        else:
            decisions[value] = Recompute()
            known[value] = True
            sources[value] = frozenset()

    for eqn in live_equations(program.forward, wanted):
        cheap = is_cheap(eqn.primitive)
        inputs = eqn.input_values
        reached = frozenset().union(*(sources[v] for v in inputs))
        all_known = cheap and all(known[v] for v in inputs)
        largest = max(eqn.operand_sizes, default=0)
        for value in eqn.outputs:
            aval = program.avals[value]
            residual = _residual(
                aval,
                eqn.primitive,
                iterations,
                known=all_known,
                reduced_from=largest,
                sources=len(reached),
                steers=value in steering,
            )
            settle(value, residual, reached)
    return decisions


def _packings_of_places(
    program: Program,
    policy: AbstractPolicy,
    codec: AbstractCodec,
    activations: Container[int],
    iterations: int,
) -> dict[Pooling, Decision]:
    """Asks the policy which poolings are to note places: those that it would pack."""
    packings: dict[Pooling, Decision] = {}
    for pooling in find_poolings(program, activations):
        places = _residual(
            pooling.places,
            pooling.gradient.primitive,
            iterations,
            known=False,
            steers=False,
        )
        decision = policy(places)
        if isinstance(decision, Compress) and (decision.codec or codec).is_exact:
            packings[pooling] = decision
    return packings


def _residual(
    aval: Any,
    primitive: str,
    copies: int,
    *,
    known: bool,
    steers: bool,
    reduced_from: int = 0,
    sources: int = 0,
) -> Residual:
    return Residual(
        shape=tuple(aval.shape),
        dtype=aval.dtype,
        primitive=primitive,
        reduced_from=reduced_from,
        known=known,
        sources=sources,
        steers=steers,
        copies=copies,
    )


def _describe(
    program: Program,
    value: int,
    producer: Equation | None,
    decision: Save | Compress,
    default: AbstractCodec,
) -> Kept:
    aval = program.avals[value]
    codec = None
    if isinstance(decision, Compress):
        codec = default if decision.codec is None else decision.codec
        codec.check(jax.ShapeDtypeStruct(aval.shape, jnp.dtype(aval.dtype)))
    return Kept(
        value=value,
        shape=tuple(aval.shape),
        dtype=aval.dtype,
        codec=codec,
        name="" if producer is None else producer.name_stack,
        primitive="argument" if producer is None else producer.primitive,
        source="" if producer is None else producer.source,
    )
