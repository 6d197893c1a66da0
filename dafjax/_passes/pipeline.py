"""The passes, in order: each turns a program into a better one for compression."""

import dataclasses
from collections.abc import Callable, Collection, Container
from typing import final

from dafjax._passes.algebra import factor_sums, finish_early
from dafjax._passes.nonlinear import (
    name_bounded,
    name_slopes,
    note_phases,
    note_relu_masks,
)
from dafjax._passes.pooling import note_places
from dafjax._passes.quotients import note_denominators, note_means
from dafjax._passes.scales import hold_scales
from dafjax._passes.unit_axes import drop_unit_axes
from dafjax._trace.residuals import Program
from dafjax.policies import AbstractPolicy


@final
@dataclasses.dataclass(frozen=True)
class Context:
    """Facts that passes need beside the equations of a program.

    Attributes:
        policy: The policy. (Some passes ask it before they change the program.)
        activations: The arguments that nothing keeps alive for the backward pass.
        iterations: How often the program runs before its backward pass does.
    """

    policy: AbstractPolicy
    activations: Container[int] = ()
    iterations: int = 1


@final
@dataclasses.dataclass(frozen=True)
class Pass:
    """A rewrite of programs.

    Attributes:
        name: Users switch it off by this name.
        reason: Its use, in a sentence.
        run: The rewrite.
    """

    name: str
    reason: str
    run: Callable[[Program, Context], Program]


PASSES: tuple[Pass, ...] = (
    Pass(
        "held_scales",
        "A norm divides out a scale; the noise of the scale's gradient would stay.",
        lambda program, _: hold_scales(program),
    ),
    Pass(
        "unit_axes",
        "Chunks divide the first axis longer than 1, such as examples or heads.",
        lambda program, _: drop_unit_axes(program),
    ),
    Pass(
        "factor_sums",
        "A batch norm's backward pass reads its cotangent once, not twice.",
        lambda program, _: factor_sums(program),
    ),
    Pass(
        "tanh_slope",
        "Terms that cancel behind a tanh would look very sensitive to noise.",
        lambda program, _: name_slopes(program),
    ),
    Pass(
        "bounded_exp",
        "The exponential of a negated square does not amplify errors.",
        lambda program, _: name_bounded(program),
    ),
    Pass(
        "gradient_epilogue",
        "A gradient is converted where it is computed, not after the layer.",
        lambda program, _: finish_early(program),
    ),
    Pass(
        "argmax_pooling",
        "The gradient of max-pooling reads 2-bit indices, not the exact operand.",
        lambda program, context: note_places(
            program, context.policy, context.activations, context.iterations
        ),
    ),
    Pass(
        "sine_phase",
        "A sine of many periods is recomputed from its argument's phase.",
        lambda program, _: note_phases(program),
    ),
    Pass(
        "softmax_denominator",
        "Probabilities sum to 1 if their denominator is the sum of what codes decode.",
        lambda program, _: note_denominators(program),
    ),
    Pass(
        "weighted_mean",
        "The noise of a mean's two sums cancels if both follow from the same codes.",
        lambda program, _: note_means(program),
    ),
    Pass(
        "relu_mask",
        "A ReLU is recomputed from its exact mask, without bias.",
        lambda program, _: note_relu_masks(program),
    ),
)

NAMES = tuple(item.name for item in PASSES)


def run_passes(
    program: Program, context: Context, *, without: Collection[str] = ()
) -> Program:
    """Returns a program after all passes, in order.

    Args:
        program: The program, as it was traced.
        context: What passes know beside.
        without: Names of passes that are left out.
    """
    for item in PASSES:
        if item.name not in without:
            program = item.run(program, context)
    return program
