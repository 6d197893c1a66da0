"""Recomputes sines and cosines from their range-reduced argument, the phase.

The argument of a sine may span many periods, as in positional encodings with many
frequencies or in networks of sines. A quantization step over this range is then longer
than a period, and the sine of the restored argument is meaningless. (Fourier features
at 2 bits: a bias of 0.71 of the gradient's norm.) Only the phase matters: the argument
less whole periods. The forward pass stores the phase. Its range is at most one period,
so a quantization step is a small part of a period. The sine and the cosine of an
argument are both recomputed from the same phase.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.core
import jax.numpy as jnp

from dafjax._trace.equation import Equation, call_equation
from dafjax._trace.residuals import Program, Recipe


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
