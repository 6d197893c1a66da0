"""Passes about nonlinear functions: ReLU, exp, tanh, sine.

Recomputes ReLUs from their exact masks.

The gradient of `relu(x) = max(x, 0)` needs the ReLU mask `x > 0`, which is stored as
exact bits. The layer above needs `relu(x)`. Let `y` be the unpacked `x`, with rounding
noise but no bias. `max(y, 0)` has a bias, because it cuts noise off at 0.
`where(x > 0, y, 0)` has none, and is 0 exactly where `relu(x)` is. (ResNet-18 of width
16, 2 bits, random data: the bias of the gradient is 0.25 of its norm with the first,
and 0.00 with the second.)

Finds exponentials that do not amplify errors.

An error of 1 in an exponent is a factor of 2.7 in the result. So most exponentials read
exact values. But the exponential of a negated square, as in the derivative of `erf` and
so of a GELU, is at most 1, whatever the error of the squared value, and its error is
less than 1.

Writes the derivative of `tanh` as one factor of a cotangent.

Up to version 0.10, JAX computes `c (1 - y)` from the cotangent `c` and adds `y` times
that. The two terms cancel where `y` is near -1. If the noise of the two is treated as
independent, it does not cancel. `c (1 - y^2)`, as in later versions, is a single term.

Recomputes sines and cosines from their range-reduced argument, the phase.

The argument of a sine may span many periods, as in positional encodings with many
frequencies or in networks of sines. A quantization step over this range is then longer
than a period, and the sine of the restored argument is meaningless. (Fourier features
at 2 bits: a bias of 0.71 of the gradient's norm.) Only the phase matters: the argument
less whole periods. The forward pass stores the phase. Its range is at most one period,
so a quantization step is a small part of a period. The sine and the cosine of an
argument are both recomputed from the same phase.
"""

import collections
import dataclasses
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from dafjax._trace.equation import Atom, Constant, Equation, call_equation, values_of
from dafjax._trace.graph import find_numbers, number_of
from dafjax._trace.residuals import Program, Recipe


def note_relu_masks(program: Program) -> Program:
    """Returns the program with a recipe for each `max(x, 0)` whose mask it computes."""
    numbers = find_numbers(program.forward)
    masks = {
        x: eqn.outputs[0]
        for eqn in program.forward
        for x in (
            _other_than_zero(eqn, "gt", numbers, places=(1,)),
            _other_than_zero(eqn, "lt", numbers, places=(0,)),
        )
        if x is not None
    }
    recipes = dict(program.recipes)
    for eqn in program.forward:
        x = _other_than_zero(eqn, "max", numbers, places=(0, 1))
        if x is not None and x in masks:
            inputs = masks[x], x
            operands = [program.avals[value] for value in inputs]
            selection = call_equation(
                select_rectified, operands, inputs, eqn.outputs, eqn
            )
            recipes[eqn.outputs[0]] = Recipe(selection, needs=masks[x])
    return dataclasses.replace(program, recipes=recipes)


def select_rectified(mask: jax.Array, x: jax.Array) -> jax.Array:
    """Returns `x` where the mask is true, NaN where `x` is NaN, else 0.

    It reads `x` once. If a value is read twice, XLA:GPU expects that a fused kernel
    would compute it twice, and writes it to memory instead.
    """
    zero = jax.lax.full_like(x, 0)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jax.lax.select(mask, x, zero)
    infinity = jax.lax.full_like(x, jnp.inf)
    least = jax.lax.select(mask, -infinity, zero)
    greatest = jax.lax.select(mask, infinity, zero)
    return jax.lax.clamp(least, x, greatest)


def with_masks_of_results(
    program: Program, kept: Container[int]
) -> tuple[Program, dict[int, int]]:
    """Returns the program with masks `max(x, 0) > 0` in place of `x > 0`.

    Then only the result is live until the mask is computed, and the next layer needs
    the result anyway.

    Args:
        program: The program.
        kept: The masks that are stored. Others stay as they are.

    Returns:
        The program, and for each of these masks the result that it is computed from.
    """
    results: dict[int, tuple[int, int]] = {}
    for result, recipe in program.recipes.items():
        if recipe.equation.primitive == "select_rectified" and recipe.needs in kept:
            mask, x = recipe.equation.input_values
            results[mask] = result, x
    made: set[int] = set()
    of_results: dict[int, int] = {}
    forward = list(program.forward)
    for place, eqn in enumerate(forward):
        made.update(eqn.outputs)
        mask = eqn.outputs[0] if eqn.outputs else -1
        result, x = results.get(mask, (-1, -1))
        if result in made:
            inputs = tuple(result if atom == x else atom for atom in eqn.inputs)
            forward[place] = dataclasses.replace(eqn, inputs=inputs)
            of_results[mask] = result
    return dataclasses.replace(program, forward=tuple(forward)), of_results


def _other_than_zero(
    eqn: Equation, primitive: str, numbers: Mapping[int, Any], places: tuple[int, ...]
) -> int | None:
    """Returns an equation's other operand, if the operand at one of `places` is 0."""
    if eqn.primitive != primitive:
        return None
    atoms = eqn.operand_atoms
    for place in places:
        other = atoms[1 - place]
        if number_of(atoms[place], numbers) == 0 and isinstance(other, int):
            return other
    return None


def name_bounded(program: Program) -> Program:
    """Returns the program with exponentials of negated squares named `bounded_exp`."""
    avals = program.avals
    producers: dict[int | None, Equation] = {
        value: eqn for eqn in program.forward for value in eqn.outputs
    }

    def operand_of(eqn: Equation | None, primitive: str) -> Equation | None:
        """Returns the producer of the operand; None if the primitive is another."""
        if eqn is None or eqn.primitive != primitive:
            return None
        (value,) = eqn.input_values or (None,)
        return producers.get(value)

    def is_bounded(eqn: Equation) -> bool:
        made = operand_of(operand_of(eqn, "exp"), "neg")
        # The square of a complex number can be anything.
        return (
            made is not None
            and made.is_square
            and jnp.issubdtype(avals[made.outputs[0]].dtype, jnp.floating)
        )

    forward = tuple(
        _bounded(eqn, avals) if is_bounded(eqn) else eqn for eqn in program.forward
    )
    return dataclasses.replace(program, forward=forward)


def bounded_exp(x: jax.Array) -> jax.Array:
    """Returns the exponential of a number that is not positive."""
    return jnp.exp(x)


def _bounded(eqn: Equation, avals: Sequence[jax.core.ShapedArray]) -> Equation:
    operands = [avals[value] for value in eqn.input_values]
    return call_equation(bounded_exp, operands, eqn.inputs, eqn.outputs, eqn)


def name_slopes(program: Program) -> Program:
    """Returns the program with such derivatives as one operation of `forward`."""
    forward, backward = program.forward, program.backward
    makers = {value: eqn for eqn in (*forward, *backward) for value in eqn.outputs}
    reads = collections.Counter(values_of((*program.results, *program.gradients)))
    for eqn in (*forward, *backward):
        reads.update(values_of(eqn.operand_atoms))
    slopes: dict[Equation, Equation | None] = {}
    for eqn in backward:
        found = _terms(eqn, makers, reads)
        if found is None:
            continue
        first, second, complement, y = found
        slopes[complement] = call_equation(
            one_minus_square, [program.avals[y]], (y,), complement.outputs, eqn
        )
        slopes[first] = slopes[second] = None
        slopes[eqn] = dataclasses.replace(first, outputs=eqn.outputs)
    return dataclasses.replace(
        program,
        forward=_replaced(forward, slopes),
        backward=_replaced(backward, slopes),
    )


def one_minus_square(x: jax.Array) -> jax.Array:
    """Returns `1 - x^2`, without cancellation near 1."""
    return (1 - x) * (1 + x)


def _terms(
    eqn: Equation, makers: Mapping[int, Equation], reads: Mapping[int, int]
) -> tuple[Equation, Equation, Equation, int] | None:
    """Returns the equations of `c (1 - y)`, `c (1 - y) y` and `1 - y`; and `y`.

    `None` if `eqn` is not a sum of the first two.
    """
    if eqn.primitive != "add_any" or len(eqn.input_values) != 2:
        return None
    first, second = (makers.get(value) for value in eqn.input_values)
    if (
        first is None
        or second is None
        or {first.primitive, second.primitive} != {"mul"}
    ):
        return None
    if first.outputs[0] not in second.input_values:
        first, second = second, first
    # If another equation reads the terms, they are computed anyway.
    if (reads[first.outputs[0]], reads[second.outputs[0]]) != (2, 1):
        return None
    for y in second.input_values:
        for value in first.input_values:
            made = makers.get(value)
            if made is None or reads[value] != 1:
                continue
            if _complemented(made, makers) == y:
                return first, second, made, y
    return None


def _complemented(eqn: Equation, makers: Mapping[int, Equation]) -> int | None:
    """Returns the value that an equation subtracts from 1; `None` if it does not."""
    if eqn.primitive != "sub":
        return None
    one, value = eqn.operand_atoms
    return value if _is_one(one, makers) and isinstance(value, int) else None


def _is_one(atom: Atom, makers: Mapping[int, Equation]) -> bool:
    if isinstance(atom, Constant):
        return np.ndim(atom.value) == 0 and atom.value == 1
    # On meshes with explicit axes, an equation places the number on devices.
    eqn = makers.get(atom)
    if eqn is None or not eqn.rule.keeps_values or len(eqn.operand_atoms) != 1:
        return False
    return _is_one(eqn.operand_atoms[0], makers)


def _replaced(
    equations: Iterable[Equation], others: Mapping[Equation, Equation | None]
) -> tuple[Equation, ...]:
    found = (others.get(eqn, eqn) for eqn in equations)
    return tuple(eqn for eqn in found if eqn is not None)


# A period as the sum of two terms. The first has eight binary digits, so its multiples
# are exact up to 65536 periods: a phase has only the error of its argument.
_PERIOD = 6.28125
_REST_OF_PERIOD = 2 * math.pi - _PERIOD

_DTYPES = ("float32", "bfloat16", "float16")


def note_phases(program: Program) -> Program:
    """Adds the computation of phases to the forward pass, and recipes for sines.

    A phase has the names of its argument, which it replaces in storage.
    """
    avals, tags = list(program.avals), dict(program.tags)
    forward: list[Equation] = []
    producers: dict[int, Equation] = {}
    phases: dict[int, int] = {}
    recipes = dict(program.recipes)
    for eqn in program.forward:
        operand = _argument_of_sine(eqn, avals)
        if operand is not None:
            if operand not in phases:
                phases[operand] = len(avals)
                forward.append(
                    call_equation(
                        phase,
                        [avals[operand]],
                        (operand,),
                        (len(avals),),
                        producers.get(operand, eqn),
                    )
                )
                tags[len(avals)] = tags.get(operand, ())
                avals.append(avals[operand])
            sine = dataclasses.replace(eqn, inputs=(phases[operand],))
            recipes[eqn.outputs[0]] = Recipe(sine, needs=phases[operand])
        forward.append(eqn)
        producers.update(dict.fromkeys(eqn.outputs, eqn))
    return dataclasses.replace(
        program,
        avals=tuple(avals),
        forward=tuple(forward),
        tags=tags,
        recipes=recipes,
    )


def phase(x: jax.Array) -> jax.Array:
    """Returns the arguments of a sine less whole periods: from -pi to pi."""
    wide = x.astype(jnp.float32)
    periods = jnp.round(wide * (0.5 / math.pi))
    return (wide - periods * _PERIOD - periods * _REST_OF_PERIOD).astype(x.dtype)


def _argument_of_sine(
    eqn: Equation, avals: Sequence[jax.core.ShapedArray]
) -> int | None:
    """Returns the argument of a sine or cosine, if its dtype can be packed."""
    if eqn.primitive not in ("cos", "sin"):
        return None
    (operand,) = eqn.input_values or (None,)
    has_phase = operand is not None and avals[operand].dtype.name in _DTYPES
    return operand if has_phase else None
