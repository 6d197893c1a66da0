"""The backward pass, run equation by equation as scheduled."""

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dafjax._native import pin, tie
from dafjax._plan.plan import ProgramPlan
from dafjax._schedule.importance import Probe
from dafjax._schedule.not_before import can_be_tied, not_before
from dafjax._schedule.parts import num_parts, restore_in_parts
from dafjax._schedule.steps import InParts, Step, Unpacking
from dafjax._schedule.stored import MeasuredHandle, codecs_in
from dafjax._schedule.ties import Ties
from dafjax._trace.equation import Equation, evaluate, look_up
from dafjax._typing import ArrayTree
from dafjax.stores import AbstractStore


def run_backward(
    plan: ProgramPlan,
    schedule: Sequence[Step],
    arguments: Mapping[int, jax.Array],
    stored: Sequence[ArrayTree],
    cotangents: Sequence[jax.Array],
    *,
    store: AbstractStore,
    ties: Ties,
) -> list[Any]:
    """Computes the cotangents of the perturbed arguments.

    Args:
        plan: What was kept.
        schedule: What `schedule_backward` made of the plan.
        arguments: The arguments that `plan.arguments` names.
        stored: What `run_forward` returned for `plan.kept`.
        cotangents: The cotangents of the differentiable results.
        store: Where packed values wait.
        ties: Which ties are made.

    Returns:
        One cotangent for each perturbed argument.
    """
    program = plan.program
    kept = {item.value: item for item in plan.kept}
    waiting = dict(zip(kept, stored, strict=True))
    measured = {
        v: item for v, item in waiting.items() if isinstance(item, MeasuredHandle)
    }
    waiting.update((v, item.handle) for v, item in measured.items())
    noise = {v: item.rounding_noise for v, item in measured.items()}
    codecs = codecs_in(store, plan, schedule)
    env: dict[int, Any] = dict(zip(program.cotangents, cotangents, strict=True))
    env.update(arguments)
    env.update((v, waiting[v]) for v, item in kept.items() if item.codec is None)
    # Carries the dependency on the backward pass to unpacking; never read.
    token: jax.Array = jnp.zeros((), jnp.uint8)

    probe = Probe(plan, noise) if measured else None
    weights = plan.whole_weights
    moving = [number for number, moves in enumerate(program.perturbed) if moves]
    pairs = zip(moving, program.gradients, strict=True)
    of_weights = {v for number, v in pairs if number in weights and ties.layouts}

    def learn(values: Mapping[int, Any]) -> None:
        env.update(values)
        if probe is not None:
            probe.see(values)

    def packed_for(item: InParts) -> dict[int, ArrayTree]:
        return {v: store.get(waiting[v]) for v in item.unpacked}

    def pieces(step: Step) -> Iterator[tuple[Unpacking | Equation | InParts, int]]:
        """Gives what a step restores, and in how many parts."""
        # Importances are measured of whole values.
        is_whole = probe is not None or not (ties.partial and ties.cotangent)
        for item in step.restored:
            count = 1
            if isinstance(item, InParts) and not is_whole:
                count = num_parts(plan, item, packed_for(item), codecs, env)
            if isinstance(item, InParts) and count == 1:
                yield from ((piece, 1) for piece in item.restored)
            else:
                yield item, count

    learn(dict(env))
    for step in schedule:
        if step.begins:
            tied = _tied_values(step, ties)
            samples = [] if probe is None else probe.waiting()
            num_awaited = sum(v in step.awaited for v in tied) if ties.in_place else 0
            *values, token = tie(
                *(env[v] for v in tied), *samples, token, num_awaited=num_awaited
            )
            env.update(zip(tied, values[: len(tied)], strict=True))
            if probe is not None:
                probe.settle(values[len(tied) :])
        delayed = {v: not_before(token, env[v]) for v in step.delayed}
        if ties.layouts:
            delayed = {v: pin(x) if v in weights else x for v, x in delayed.items()}
        at_hand = collections.ChainMap(delayed if ties.arguments else {}, env)
        for item, count in pieces(step):
            if isinstance(item, InParts):
                with jax.named_scope("unpack"):
                    value = restore_in_parts(
                        plan, item, packed_for(item), codecs, at_hand, token, count
                    )
                learn({item.value: value})
                continue
            if isinstance(item, Unpacking):
                if item.behind and ties.partial:
                    *values, token = tie(*(env[v] for v in item.behind), token)
                    env.update(zip(item.behind, values, strict=True))
                after = (token,) if ties.cotangent else ()
                codec = codecs[item.value]
                with jax.named_scope("unpack"):
                    packed = store.get(waiting[item.value])
                    unpacked = codec.decode(packed, kept[item.value].like, after=after)
                learn({item.value: unpacked})
                if probe is not None and item.value in measured:
                    probe.see_range(item.value, store.squared_range(codec, packed))
                continue
            outputs = evaluate(item, look_up(item.inputs, at_hand))
            # What is kept is taken from what was kept, never recomputed.
            made = zip(item.outputs, outputs, strict=True)
            learn({value: output for value, output in made if value not in kept})
        if step.joined and ties.operands:
            values = tie(*(env[v] for v in step.joined))
            env.update(zip(step.joined, values, strict=True))
        if step.equation is not None:
            outputs = evaluate(step.equation, look_up(step.equation.inputs, at_hand))
            made = dict(zip(step.equation.outputs, outputs, strict=True))
            learn({v: pin(x) if v in of_weights else x for v, x in made.items()})
    gradients = look_up(program.gradients, env)
    if probe is None:
        return gradients
    found = probe.sensitivities(gradients)
    done = store.note(
        found,
        [codecs[value] for value in measured],
        [kept[value].like for value in measured],
        token,
    )
    return _tied_to(gradients, done)


def _tied_values(step: Step, ties: Ties) -> tuple[int, ...]:
    cotangents = step.cotangents
    if not ties.outgoing and step.equation is not None:
        read = step.equation.input_values
        cotangents = tuple(v for v in cotangents if v in read)
    # Those that are only waited for come first.
    cotangents = tuple(sorted(cotangents, key=lambda v: v not in step.awaited))
    return cotangents + (step.given if ties.cotangent else ())


def _tied_to(gradients: list[Any], done: jax.Array) -> list[Any]:
    """Makes gradients depend on a call that is made for what else it does."""
    for number, gradient in enumerate(gradients):
        if can_be_tied(gradient) and gradient.dtype != jax.dtypes.float0:
            tied, _ = tie(gradient, done, all_are_read=False)
            return [*gradients[:number], tied, *gradients[number + 1 :]]
    return gradients
