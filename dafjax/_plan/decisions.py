"""Asks a policy about each value, and corrects decisions that are impossible."""

from collections.abc import Collection, Container, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dafjax._plan.steering import find_steering
from dafjax._trace.equation import Equation
from dafjax._trace.graph import live_equations, names_of_user
from dafjax._trace.operation import Operation, naming, operations_of
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
    packed: Container[int],
    iterations: int,
) -> dict[int, Decision]:
    """Asks the policy about every value `wanted` could be recomputed from.

    Asks about values in the order of computation, so that `known` and `sources` of a
    value's operands are settled before the value. Does not ask about values that a pass
    has decided about. A value with a recipe is recomputed by the recipe.
    """
    decisions: dict[int, Decision] = {}
    known: dict[int, bool] = {}
    # Values that follow from keys by random draws and cheap operations alone.
    drawn: set[int] = set()
    most_products = max(
        (e.num_products for e in program.forward if e.rule.is_product), default=1
    )

    def cost_of_draw(value: int) -> float:
        return program.avals[value].size * _PRODUCTS_OF_DRAW / most_products

    # For each value, the values in inexact codes that recomputing it unpacks. If it is
    # itself stored in inexact codes: the value alone.
    sources: dict[int, frozenset[int]] = {}
    # Arguments and parts of them. The backward pass reads them with the same bits.
    still = set(range(program.num_arguments)).difference(activations)
    # Values whose recomputation runs an exponential or a similar function.
    amplified: set[int] = set()
    # Values whose recomputation runs a matrix product.
    multiplied: set[int] = set()

    exact = {
        value
        for eqn in program.backward
        if eqn.rule.error is Error.SEARCHES
        for value in eqn.input_values
    }
    # Divisors must be exact: a code near 0 may decode to 0.
    exact.update(eqn.divisor for eqn in program.backward if eqn.divisor is not None)
    steering = find_steering(program)
    producers = {v: eqn for eqn in program.forward for v in eqn.outputs}

    def settle(
        value: int,
        residual: Residual,
        reached: frozenset[int],
        *,
        has_effect: bool = False,
        flips: bool = False,
    ) -> None:
        decision = program.decided.get(value) or policy(residual)
        if flips and isinstance(decision, Recompute):
            decision = Compress(Bitmask())
        is_off = is_inexact(decision) or (
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
            inexact = is_inexact(decision)
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
            program=program.fingerprint,
            number=value,
            # A range-reduced argument has the names of the argument, which is another
            # value.
            operations=()
            if primitive == "phase"
            else (*_named_by(program, value), *operations_of(producers.get(value))),
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
        inputs = _recomputation(program, eqn, decisions).input_values
        reached = frozenset().union(*(sources[v] for v in inputs))
        is_certain = all(known[v] or v in drawn for v in inputs)
        all_known = eqn.rule.is_cheap and all(known[v] for v in inputs)
        moves = eqn.rule.keeps_magnitudes or eqn.rule.slices
        if moves and still.issuperset(inputs):
            still.update(eqn.outputs)
        # Recomputed values can round differently, and then compare differently.
        flips = eqn.rule.error is Error.FLIPS and any(
            v not in still and jnp.issubdtype(program.avals[v].dtype, jnp.inexact)
            for v in inputs
        )
        can_draw = eqn.rule.cost is Cost.DRAW or eqn.rule.is_cheap
        if can_draw and is_certain and not all_known:
            drawn.update(eqn.outputs)
        amplifies = not amplified.isdisjoint(inputs)
        multiplies = not multiplied.isdisjoint(inputs)
        divides = eqn.divisor is not None and bool(sources[eqn.divisor])
        for value in eqn.outputs:
            residual = describe(
                value,
                eqn.primitive,
                known=all_known,
                draw_cost=cost_of_draw(value) if value in drawn else 0,
                divides=divides,
                amplified=amplifies,
                reduced_from=max(eqn.operand_sizes, default=0),
                sources=len(reached),
                source_elements=sum(program.avals[v].size for v in reached),
                contracted=eqn.contracted_size,
                multiplied=multiplies,
            )
            recipe = program.recipes.get(value)
            sums_codes = (
                recipe is not None and recipe.needs_codes and applies(recipe, decisions)
            )
            if sums_codes and not policy.saves_exactly(residual):
                # A softmax denominator has hardly any noise, and only noise that its
                # numerators have too.
                decisions[value] = Recompute()
                known[value] = False
                sources[value] = frozenset()
                continue
            settle(value, residual, reached, has_effect=eqn.has_effect, flips=flips)
            amplifies_now = amplifies or eqn.is_amplifying
            if not reached or not isinstance(decisions[value], Recompute):
                continue
            if amplifies_now:
                amplified.add(value)
            if multiplies or eqn.contracted_size > 0:
                multiplied.add(value)
    return decisions


# The time to draw one number, in multiplications of a matrix product. (On two cores
# with AVX2, a normal number takes 13 ns. A multiplication takes 0.1 to 0.024 ns in
# products of matrices of width 256 to 1024.)
_PRODUCTS_OF_DRAW = 200


def applies(recipe: Recipe, decisions: Mapping[int, Decision]) -> bool:
    """Returns whether the values that a recipe needs are stored as it needs them."""
    decision = decisions.get(recipe.needs, Recompute())
    if recipe.needs_codes:
        return is_inexact(decision)
    return not isinstance(decision, Recompute)


def _recomputation(
    program: Program, eqn: Equation, decisions: Container[int]
) -> Equation:
    """Returns the recipe of an equation's result, if what it reads is decided about."""
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
