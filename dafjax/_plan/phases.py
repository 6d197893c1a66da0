"""Sines and cosines, recomputed from the phase of their argument.

What a sine reads may be many periods long, as positions encoded in many frequencies
are, or the layers of a network of sines. A step of a code that spans it all is then
longer than a period, and the sine of what is restored tells nothing. (Fourier features
at 2 bits: a bias of 0.71 of the gradient's norm.) Only the phase matters, the argument
less whole periods: it is what is kept, and as its range is at most one period, a step
of a code is a small part of that. Both the sine and the cosine come of the same phase.
"""

import dataclasses
import math
from collections.abc import Container, Mapping, Sequence
from typing import final

import jax
import jax.core
import jax.numpy as jnp

from dafjax._trace.equation import Equation, call_equation
from dafjax._trace.residuals import Program


# A period in two terms. The first has eight binary digits, so that its multiples are
# exact up to 65536 periods: what is left of an argument has no error but its own.
_PERIOD = 6.28125
_REST_OF_PERIOD = 2 * math.pi - _PERIOD

_DTYPES = ("float32", "bfloat16", "float16")


@final
@dataclasses.dataclass(frozen=True, eq=False)
class WithPhases:
    """A program that makes the phases of what sines and cosines read.

    Attributes:
        program: It.
        phases: The values that are phases.
        sines: How each sine and cosine is computed from a phase, by its value.
    """

    program: Program
    phases: frozenset[int]
    sines: Mapping[int, Equation]


def note_phases(program: Program) -> WithPhases:
    """Lets the forward pass make phases, beside what it computes without them.

    A phase has the names of the argument that it is kept in place of.
    """
    avals, tags = list(program.avals), dict(program.tags)
    forward: list[Equation] = []
    producers: dict[int, Equation] = {}
    phases: dict[int, int] = {}
    sines: dict[int, Equation] = {}
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
            inputs = (phases[operand],)
            sines[eqn.outputs[0]] = dataclasses.replace(eqn, inputs=inputs)
        forward.append(eqn)
        producers.update(dict.fromkeys(eqn.outputs, eqn))
    return WithPhases(
        program=dataclasses.replace(
            program, avals=tuple(avals), forward=tuple(forward), tags=tags
        ),
        phases=frozenset(phases.values()),
        sines=sines,
    )


def without_phases(
    program: Program, phases: Container[int], kept: Container[int]
) -> Program:
    """Returns the program without the phases that are not kept."""
    forward = tuple(
        eqn
        for eqn in program.forward
        if not any(v in phases and v not in kept for v in eqn.outputs)
    )
    return dataclasses.replace(program, forward=forward)


def phase(x: jax.Array) -> jax.Array:
    """Returns arguments of a sine less whole periods: from -pi to pi."""
    wide = x.astype(jnp.float32)
    periods = jnp.round(wide * (0.5 / math.pi))
    return (wide - periods * _PERIOD - periods * _REST_OF_PERIOD).astype(x.dtype)


def _argument_of_sine(
    eqn: Equation, avals: Sequence[jax.core.ShapedArray]
) -> int | None:
    """Returns what a sine or a cosine of packable numbers reads."""
    if eqn.primitive not in ("cos", "sin"):
        return None
    (operand,) = eqn.input_values or (None,)
    has_phase = operand is not None and avals[operand].dtype.name in _DTYPES
    return operand if has_phase else None
