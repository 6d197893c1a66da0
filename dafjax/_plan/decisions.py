"""Asks a policy about each value, and corrects decisions that are impossible."""

from collections.abc import Collection, Container, Mapping
from typing import Any, final

import jax
import jax.numpy as jnp

from dafjax import config
from dafjax._plan.analysis import find_steering
from dafjax._plan.extents import find_statistics
from dafjax._trace.bodies import reads_packed
from dafjax._trace.equation import Equation
from dafjax._trace.graph import (
    Operation,
    live_equations,
    names_of_user,
    naming,
    operations_of,
)
from dafjax._trace.residuals import Program, Recipe
from dafjax._trace.rules import Cost, Error
from dafjax.codecs import Affine, Bitmask
from dafjax.policies import (
    AbstractPolicy,
    Compress,
    Decision,
    Recompute,
    Residual,
    Save,
    is_inexact,
)


def decide(
    program: Program,
    wanted: tuple[int, ...],
    policy: AbstractPolicy,
    *,
    names: Mapping[int, tuple[str, ...]],
    activations: Collection[int],
    iterations: int,
) -> dict[int, Decision]:
    """Asks the policy about every value `wanted` could be recomputed from.

    Asks about values in the order of computation, so that `known` and `sources` of a
    value's operands are settled before the value. Does not ask about values that a pass
    has decided about. A value with a recipe is recomputed by the recipe.
    """
    decider = _Decider(program, policy, names, iterations)
    decider.add_arguments(activations)
    for eqn in live_equations(program.forward, wanted):
        decider.add(eqn)
    return decider.decisions


@final
class _Decider:
    """Decides about values, one after another, and notes how each is recomputed.

    Attributes:
        decisions: The decision about each value.
    """

    def __init__(
        self,
        program: Program,
        policy: AbstractPolicy,
        names: Mapping[int, tuple[str, ...]],
        iterations: int,
    ) -> None:
        self._program = program
        self._policy = policy
        self._names = names
        self._iterations = iterations
        self._steering = find_steering(program)
        self._statistics = find_statistics(program)
        self._producers = program.producers
        self._packed = {v for eqn in program.backward for v in reads_packed(eqn)}
        self._exact = _read_exactly(program)
        self._most_products = max(
            (e.num_products for e in program.forward if e.rule.is_product), default=1
        )
        self.decisions: dict[int, Decision] = {}
        # Values that follow cheaply from arguments.
        self._known: dict[int, bool] = {}
        # For each value, the values in inexact codes that recomputing it unpacks. If it
        # is itself stored in inexact codes: the value alone.
        self._sources: dict[int, frozenset[int]] = {}
        # Values that follow from keys by random draws and cheap operations alone.
        self._drawn: set[int] = set()
        # Arguments and parts of them. The backward pass reads them with the same bits.
        self._still: set[int] = set()
        # Values whose recomputation runs an exponential or a similar function.
        self._amplified: set[int] = set()
        # Values whose recomputation runs a matrix product.
        self._multiplied: set[int] = set()

    def add_arguments(self, activations: Collection[int]) -> None:
        """Decides about the arguments; `activations` are not kept alive."""
        for value in range(self._program.num_arguments):
            if value in activations:
                argument = self._describe(
                    value, "argument", known=False, reduced_from=0, sources=0
                )
                self._settle(value, argument, frozenset())
            else:
                self._still.add(value)
                self.decisions[value] = Recompute()
                self._known[value] = True
                self._sources[value] = frozenset()

    def add(self, eqn: Equation) -> None:
        """Decides about the results of the next equation."""
        inputs = _recomputation(self._program, eqn, self.decisions).input_values
        reached = frozenset().union(*(self._sources[v] for v in inputs))
        known = eqn.rule.is_cheap and all(self._known[v] for v in inputs)
        self._note_exact(eqn, inputs, known=known)
        found = {
            "known": known,
            "divides": self._divides(eqn, inputs),
            "amplified": not self._amplified.isdisjoint(inputs),
            "reduced_from": max(eqn.operand_sizes, default=0),
            "sources": len(reached),
            "source_elements": sum(self._program.avals[v].size for v in reached),
            "contracted": eqn.contracted_size,
            "multiplied": not self._multiplied.isdisjoint(inputs),
        }
        for value in eqn.outputs:
            residual = self._describe(
                value, eqn.primitive, draw_cost=self._draw_cost(value), **found
            )
            if self._follows_codes(value) and not self._policy.saves_exactly(residual):
                self.decisions[value] = Recompute()
                self._known[value] = False
                # A softmax denominator has hardly any noise, and only noise that its
                # numerators have too.
                is_noisy = value in self._program.from_codes
                self._sources[value] = reached if is_noisy else frozenset()
                continue
            self._settle(value, residual, reached, eqn)
            if reached and isinstance(self.decisions[value], Recompute):
                if found["amplified"] or eqn.is_amplifying:
                    self._amplified.add(value)
                if found["multiplied"] or eqn.contracted_size > 0:
                    self._multiplied.add(value)

    def _divides(self, eqn: Equation, inputs: Collection[int]) -> bool:
        """Returns whether codes must not give the results of an equation."""
        if not self._program.from_codes.isdisjoint(inputs):
            return True
        divisor = eqn.divisor
        if divisor is None or self._known[divisor]:
            return False
        # Codes of numerators have a scale of their own, unless the divisor is a
        # statistic of them.
        return bool(self._sources[divisor]) or divisor not in self._statistics

    def _note_exact(
        self, eqn: Equation, inputs: Collection[int], *, known: bool
    ) -> None:
        """Notes whether results are parts of arguments, or follow from keys."""
        moves = eqn.rule.keeps_magnitudes or eqn.rule.slices
        if moves and self._still.issuperset(inputs):
            self._still.update(eqn.outputs)
        is_certain = all(self._known[v] or v in self._drawn for v in inputs)
        can_draw = eqn.rule.cost is Cost.DRAW or eqn.rule.is_cheap
        if can_draw and is_certain and not known:
            self._drawn.update(eqn.outputs)

    def _settle(
        self,
        value: int,
        residual: Residual,
        reached: frozenset[int],
        eqn: Equation | None = None,
    ) -> None:
        decision = self._program.decided.get(value) or self._policy(residual)
        if (
            value in self._program.from_codes
            and (reached or is_inexact(decision))
            and not self._policy.saves_exactly(residual)
        ):
            decision = Recompute()
        if isinstance(decision, Recompute) and eqn is not None and self._flips(eqn):
            # A custom call for a few bits costs more than it saves.
            is_small = residual.nbytes * residual.copies <= config.SMALL_NBYTES
            decision = Save() if is_small else Compress(Bitmask())
        is_off = is_inexact(decision) or (
            isinstance(decision, Recompute) and residual.sources > 0
        )
        must_be_saved = (
            value in self._packed
            or (eqn is not None and eqn.has_effect)
            or (value in self._exact and is_off)
            or _only_pads(decision, residual)
        )
        if must_be_saved and not residual.known:
            decision = Save()
        if not isinstance(decision, (Save, Compress, Recompute)):
            raise TypeError(
                f"`policy` must return `Save()`, `Compress(...)` or `Recompute()`, but "
                f"`{self._policy!r}` returned `{decision!r}`."
            )
        self.decisions[value] = decision
        self._known[value] = residual.known
        if isinstance(decision, Recompute):
            self._sources[value] = reached
        else:
            inexact = is_inexact(decision)
            self._sources[value] = frozenset({value}) if inexact else frozenset()

    def _describe(self, value: int, primitive: str, **found: Any) -> Residual:
        program = self._program
        aval = program.avals[value]
        return Residual(
            shape=tuple(aval.shape),
            dtype=aval.dtype,
            primitive=primitive,
            steers=value in self._steering,
            copies=self._iterations,
            names=self._names[value],
            program=program.fingerprint,
            number=value,
            # A range-reduced argument has the names of the argument, which is another
            # value.
            operations=()
            if primitive == "phase"
            else (
                *_named_by(program, value),
                *operations_of(self._producers.get(value)),
            ),
            **found,
        )

    def _flips(self, eqn: Equation) -> bool:
        """Returns whether recomputed operands can round, and compare, differently."""
        return eqn.rule.error is Error.FLIPS and any(
            v not in self._still
            and jnp.issubdtype(self._program.avals[v].dtype, jnp.inexact)
            for v in eqn.input_values
        )

    def _follows_codes(self, value: int) -> bool:
        recipe = self._program.recipes.get(value)
        return (
            recipe is not None
            and recipe.needs_codes
            and bool(self._sources.get(recipe.needs))
        )

    def _draw_cost(self, value: int) -> float:
        if value not in self._drawn:
            return 0
        size = self._program.avals[value].size
        return size * config.PRODUCTS_OF_DRAW / self._most_products


def _read_exactly(program: Program) -> set[int]:
    """Returns the values that the backward pass must not read from inexact codes."""
    exact: set[int] = set()
    for eqn in reversed(program.backward):
        # For example the transpose of a factor that the backward pass solves with.
        feeds_exact = eqn.rule.is_cheap and not exact.isdisjoint(eqn.outputs)
        if eqn.rule.error is Error.NEEDS_EXACT or feeds_exact:
            exact.update(eqn.input_values)
    # Divisors must be exact: a code near 0 may decode to 0.
    exact.update(eqn.divisor for eqn in program.backward if eqn.divisor is not None)
    return exact


def applies(recipe: Recipe, decisions: Mapping[int, Decision]) -> bool:
    """Returns whether the value that a recipe needs is stored as it needs it."""
    decision = decisions.get(recipe.needs, Recompute())
    if recipe.needs_codes:
        return is_inexact(decision) or isinstance(decision, Recompute)
    return not isinstance(decision, Recompute)


def _recomputation(
    program: Program, eqn: Equation, decisions: Container[int]
) -> Equation:
    """Returns the recipe of a result, once all values that it reads are decided."""
    recipes = (program.recipes[v] for v in eqn.outputs if v in program.recipes)
    for recipe in recipes:
        if all(value in decisions for value in recipe.equation.input_values):
            return recipe.equation
    return eqn


def _named_by(program: Program, value: int) -> tuple[Operation, ...]:
    """Returns the `checkpoint_name` operations of a value, rebuilt from its tags."""
    names = names_of_user(program.tags.get(value, ()))
    return tuple(naming(program.avals[value], name) for name in names)


def _only_pads(decision: Decision, residual: Residual) -> bool:
    """Returns whether codes of a value, even of 1 bit, take no less memory than it.

    Such a value is saved as it is: codes of it, to recompute other values from, would
    gain nothing.
    """
    if decision != Compress() or not residual.is_floating:
        return False
    like = jax.ShapeDtypeStruct(residual.shape, jnp.float32)
    return Affine(bits=1).packed_nbytes(like) >= residual.nbytes
