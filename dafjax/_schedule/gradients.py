"""Delays gradients of weights until the weights have had their last use.

An optimizer that updates weights in place writes to a weight as soon as its gradient is
computed. If the backward pass reads the weight after that, for the cotangent of the
weight's other operand, XLA:CPU copies the weight at the start of the program, and the
copy is live all the time. (ResNet-18: 19 MB.)
"""

import dataclasses
from collections.abc import Sequence

from dafjax._schedule.steps import Step
from dafjax._trace.residuals import Program


def behind_last_reads(program: Program, steps: Sequence[Step]) -> tuple[Step, ...]:
    """Returns the steps, with gradients as late outputs after the weights' last use.

    Args:
        program: The program.
        steps: The steps of its backward pass.
    """
    moving = [number for number, moves in enumerate(program.perturbed) if moves]
    of_weights = {
        weight: gradient
        for weight, gradient in zip(moving, program.gradients, strict=True)
        if isinstance(gradient, int) and program.is_large(weight)
    }
    last_read: dict[int, int] = {}
    made: dict[int, int] = {}
    for now, step in enumerate(steps):
        if step.equation is None:
            continue
        for eqn in (*step.recomputed, step.equation):
            last_read.update(dict.fromkeys(eqn.input_values, now))
        made.update(dict.fromkeys(step.equation.outputs, now))
    begins = [now for now, step in enumerate(steps) if step.begins]
    settled: dict[int, tuple[int, ...]] = {}
    for weight, gradient in of_weights.items():
        read = last_read.get(weight, -1)
        behind = next((now for now in begins if now > read), None)
        if behind is not None and made.get(gradient, behind) < read:
            settled[behind] = (*settled.get(behind, ()), gradient)
    return tuple(
        dataclasses.replace(step, settled=settled.get(now, ()))
        for now, step in enumerate(steps)
    )
