"""Derivative rules: pairs of a forward and a backward pass."""

import abc
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import jax
from jax import lax

from dafjax._native import first_order, installed_plugins, tie
from dafjax._options import Options
from dafjax._passes.pipeline import Context
from dafjax._plan.plan import ProgramPlan, current_recorder
from dafjax._plan.planner import plan_arguments, save_arguments
from dafjax._schedule.chunking import usual_parts, usual_parts_apart
from dafjax._schedule.forward import run_forward
from dafjax._schedule.instructions import Instruction
from dafjax._schedule.interpreter import run_backward
from dafjax._schedule.lower import lower, restore_arguments
from dafjax._schedule.schedule import schedule_backward
from dafjax._schedule.steps import Step
from dafjax._schedule.values import can_be_apart, codecs_in, parts_apart, parts_in
from dafjax._trace.residuals import Program, vjp_of_perturbed
from dafjax._trace.tracing import is_staging
from dafjax.codecs import AbstractCodec


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Stages:
    """A wrapped function at each stage, for `dafjax.explain`.

    Attributes:
        traced: The function and its transpose as JAX has them.
        context: What passes knew of it.
        plan: What is saved, and what is recomputed.
        options: The options of `remat_compress`.
        iterations: How often it runs, if it is the body of a loop.
    """

    traced: Program
    context: Context
    plan: ProgramPlan
    options: Options
    iterations: int

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """The backward pass on CPUs."""
        schedule = _schedule(self.plan, self.options)
        codecs = codecs_in(self.options.store, self.plan, schedule)
        ties = self.options.ties
        return lower(self.plan, codecs, schedule, ties, fills_late=True).instructions


class Rule(abc.ABC):
    """A forward and a backward pass.

    Attributes:
        perturbed: For every argument, whether it is differentiated.
        stages: The function at each stage, for `dafjax.explain`; `None` if there is
            nothing to compress.
    """

    perturbed: tuple[bool, ...]
    stages: Stages | None = None

    @abc.abstractmethod
    def forward(self, seed: Any, arguments: Sequence[Any]) -> tuple[list[Any], Any]:
        """Returns the results, and a pytree of residuals for the backward pass."""

    @abc.abstractmethod
    def backward(self, residuals: Any, cotangents: Sequence[Any]) -> Sequence[Any]:
        """Returns the cotangents of the perturbed arguments."""


@final
class PlainRule(Rule):
    """Plain reverse-mode differentiation by JAX, where nothing is compressed.

    Its results equal JAX's bit for bit, and can be differentiated any number of times.
    """

    def __init__(
        self,
        perturbed: tuple[bool, ...],
        differentiable: tuple[bool, ...],
        function: Callable[..., list[Any]],
    ) -> None:
        self.perturbed = perturbed
        self._differentiable = differentiable
        self.function = function

    def forward(self, seed: Any, arguments: Sequence[Any]) -> tuple[list[Any], Any]:
        del seed
        return vjp_of_perturbed(
            self.function, arguments, self.perturbed, self._differentiable
        )

    def backward(self, residuals: Any, cotangents: Sequence[Any]) -> Sequence[Any]:
        return residuals(list(cotangents))


@final
class ExactRule(Rule):
    """Stores the arguments as they are, and recomputes the function from them.

    Like `jax.checkpoint`, but with barriers that XLA:CPU keeps: it cannot merge the
    second run with the first, nor begin it before the cotangents are there.
    """

    def __init__(
        self,
        plain: PlainRule,
        activations: Sequence[int],
        slices: Sequence[int],
        stages: Stages | None,
    ) -> None:
        """Makes the rule.

        Args:
            plain: The rule of the function, for the second run.
            activations: The arguments that nothing else keeps alive.
            slices: The arguments that are slices of arrays that a loop runs over.
            stages: The function at each stage, if it is listed.
        """
        self.perturbed = plain.perturbed
        self.stages = stages
        self._plain = plain
        self._activations = activations
        moving = itertools.compress(itertools.count(), plain.perturbed)
        self._are_whole = [number not in slices for number in moving]

    def forward(self, seed: Any, arguments: Sequence[Any]) -> tuple[list[Any], Any]:
        del seed
        recorder, run = current_recorder(), self._plain.function
        if recorder is not None and self.stages is not None:
            saved = save_arguments(self.stages.traced, self._activations)
            run = recorder.calling(saved, run)
        return run(*arguments), list(arguments)

    def backward(self, residuals: Any, cotangents: Sequence[Any]) -> Sequence[Any]:
        arguments = list(residuals)
        stored = [arguments[number] for number in self._activations]
        held = tie(*stored, *cotangents)
        for number, value in zip(self._activations, held, strict=False):
            arguments[number] = value
        _, pullback = self._plain.forward(None, arguments)
        gradients = self._plain.backward(pullback, held[len(stored) :])
        return _finished(gradients, self._are_whole)


def _finished(gradients: Sequence[Any], are_whole: Sequence[bool]) -> list[Any]:
    """Returns the gradients of a recomputed function after a barrier.

    Without it, unfinished work on gradients would keep recomputed values alive.
    Gradients of slices need none: a loop stacks them at once.
    """
    tied = iter(tie(*itertools.compress(gradients, are_whole)))
    return [
        next(tied) if is_whole else gradient
        for gradient, is_whole in zip(gradients, are_whole, strict=True)
    ]


@final
class ScheduledRule(Rule):
    """Runs both passes equation by equation, as a plan and its schedule say."""

    def __init__(
        self, plan: ProgramPlan, options: Options, stages: Stages | None = None
    ) -> None:
        self.stages = stages
        self.perturbed = plan.program.perturbed
        schedule = _schedule(plan, options)
        codecs = codecs_in(options.store, plan, schedule)
        self._forward = _ForwardPass(plan, codecs, options)
        self._backward = _make_backward_pass(plan, codecs, schedule, options)

    def forward(self, seed: Any, arguments: Sequence[Any]) -> tuple[list[Any], Any]:
        return self._forward(seed, arguments)

    def backward(self, residuals: Any, cotangents: Sequence[Any]) -> Sequence[Any]:
        return self._backward(*residuals, cotangents)


@final
class RerunRule(Rule):
    """Stores only activation arguments, and recomputes the function from them.

    The backward pass runs the function again, stores residuals as the plan says, and
    uses them at once. XLA cannot merge the second run with the first, because the
    second one starts from unpacked codes. It runs late, because unpacking these codes
    depends on the cotangents.
    """

    def __init__(
        self,
        plan: ProgramPlan,
        program: Program,
        options: Options,
        activations: Iterable[int],
        stages: Stages,
    ) -> None:
        self.stages = stages
        self.perturbed = program.perturbed
        of_arguments = plan_arguments(
            plan,
            program,
            bits=options.bits,
            activations=activations,
        )
        # The results of the second run are not used.
        without_results = dataclasses.replace(plan.program, results=())
        codecs = codecs_in(options.store, of_arguments)
        self._forward = _ForwardPass(of_arguments, codecs, options)
        self._restore = functools.partial(
            restore_arguments, of_arguments, store=options.store, ties=options.ties
        )
        schedule = _schedule(plan, options)
        codecs = codecs_in(options.store, plan, schedule)
        self._forward_again = _ForwardPass(
            dataclasses.replace(plan, program=without_results), codecs, options
        )
        self._backward = _make_backward_pass(
            plan, codecs, schedule, options, runs_again=True
        )
        self._ties = options.ties
        moving = itertools.compress(itertools.count(), program.perturbed)
        self._are_whole = [number not in plan.slices for number in moving]

    def forward(self, seed: Any, arguments: Sequence[Any]) -> tuple[list[Any], Any]:
        results, residuals = self._forward(seed, arguments)
        return results, (seed, residuals)

    def backward(self, residuals: Any, cotangents: Sequence[Any]) -> Sequence[Any]:
        seed, (kept, stored) = residuals
        arguments, cotangents, token = self._restore(kept, stored, cotangents)
        _, (kept, stored) = self._forward_again(seed, arguments, token)
        if self._ties.forward:
            # Otherwise XLA computes products of cotangents and weights too early.
            leaves, structure = jax.tree.flatten((cotangents, stored))
            cotangents, stored = jax.tree.unflatten(structure, tie(*leaves))
        gradients = self._backward(kept, stored, cotangents)
        if not self._ties.outgoing:
            return gradients
        return _finished(gradients, self._are_whole)


@final
class _ForwardPass:
    """A scheduled forward pass; compiled once when called eagerly."""

    def __init__(
        self,
        plan: ProgramPlan,
        codecs: Mapping[int, AbstractCodec],
        options: Options,
    ) -> None:
        self._plan = plan
        self._run = functools.partial(
            run_forward, plan, codecs, store=options.store, ties=options.ties
        )
        self._inlined = _inlined(self._run)

    def __call__(
        self, seed: Any, arguments: Sequence[Any], after: Any = None
    ) -> tuple[list[Any], Any]:
        """Returns the results, and the arguments and handles of the backward pass.

        Args:
            seed: Seed of the rounding noise.
            arguments: The arguments; `None` for those that nothing reads.
            after: Token that the pass depends on. `None`: it is the first pass, whose
                residuals `saved_residuals` lists.
        """
        recorder = current_recorder()
        run = self._inlined
        if recorder is not None and after is None:
            run = recorder.calling(self._plan, self._run)
        # Custom derivatives are inlined in the passes, and codes have no derivative, so
        # the passes allow first-order differentiation only.
        operands = [None if a is None else first_order(a) for a in arguments]
        results, stored = run(operands, seed=seed, after=after)
        kept = {number: arguments[number] for number in self._plan.arguments}
        return results, (kept, stored)


def _schedule(plan: ProgramPlan, options: Options) -> tuple[Step, ...]:
    """Returns the steps of the backward pass, with chunk loops where possible."""
    most = options.max_parts or usual_parts()
    parts = parts_in(options.store, plan, most, serves_gpus=bool(installed_plugins()))
    return schedule_backward(plan, parts)


def _make_backward_pass(
    plan: ProgramPlan,
    codecs: Mapping[int, AbstractCodec],
    schedule: Sequence[Step],
    options: Options,
    *,
    runs_again: bool = False,
) -> Callable[..., Any]:
    """Returns a scheduled backward pass; compiled once when called eagerly.

    Its platform is known only at lowering. So where JAX has a GPU plugin, it is traced
    for CPUs and for GPUs.
    """

    def lowered(steps: Sequence[Step], **target: bool) -> Callable[..., Any]:
        backward = lower(plan, codecs, steps, options.ties, **target)
        return functools.partial(run_backward, backward, store=options.store)

    anywhere = lowered(schedule, fills_late=True)
    if not (installed_plugins() and can_be_apart(plan)):
        return _inlined(anywhere)
    most = options.max_parts or usual_parts_apart(codecs.values())
    steps = schedule_backward(plan, parts_apart(plan, codecs, most))
    # Late zeros only with recomputation: otherwise XLA:GPU delays the values added to
    # them, and a GPT-2 in bfloat16 on an H200 takes 72 MB instead of 53.
    on_gpus = lowered(steps, is_apart=True, fills_late=runs_again)

    def run_where_it_is(*operands: Any) -> Any:
        return lax.platform_dependent(*operands, cuda=on_gpus, default=anywhere)

    return _inlined(run_where_it_is)


def _inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose operations become part of the program around it.

    Outside of a program it is compiled once.
    """
    compiled = jax.jit(function, inline=True)

    def run(*operands: Any, **keywords: Any) -> Any:
        call = function if is_staging() else compiled
        return call(*operands, **keywords)

    return run
