"""What is stored between the forward and the backward pass of a plan."""

import collections
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax

from dafjax._plan.plan import ProgramPlan
from dafjax._plan.sites import site_names
from dafjax._schedule.parts import Parts, are_shared_by_type, most_parts
from dafjax._schedule.steps import Step
from dafjax._schedule.stretches import stretches_of
from dafjax._typing import ArrayTree
from dafjax.codecs import AbstractCodec
from dafjax.stores import AbstractStore


class MeasuredHandle(NamedTuple):
    """The stored form of a residual whose sensitivity the backward pass measures.

    Attributes:
        handle: The handle that the store returned.
        rounding_noise: float32 scalar from `codecs.sample_rounding_noise`. Codes of few
            bits do not show how evenly the values fill their quantization groups.
    """

    handle: ArrayTree
    rounding_noise: jax.Array


def codecs_in(
    store: AbstractStore, plan: ProgramPlan, schedule: Sequence[Step] = ()
) -> dict[int, AbstractCodec]:
    """Returns the codec with which a store packs each value of a plan.

    Args:
        store: The store.
        plan: The program and its saved residuals.
        schedule: The steps of the backward pass, which decide whether values are
            decoded whole or in chunks; empty if the backward pass starts by decoding
            all of them.
    """
    reads: collections.Counter[int] = collections.Counter()
    parts: collections.defaultdict[int, int] = collections.defaultdict(lambda: 1)
    for first, *others in stretches_of(schedule):
        division = first.division
        if division is None:
            reads.update(v for step in (first, *others) for v in step.unpacked)
            continue
        reads.update(division.unpacked_in_all)
        for value in division.unpacked:
            parts[value] = math.lcm(parts[value], division.num_parts)
    return {
        value: codec
        if value in plan.brief
        else store.codec(codec, site=site, reads=reads[value], num_parts=parts[value])
        for value, site, codec, _ in _packed(plan)
    }


def parts_in(
    store: AbstractStore, plan: ProgramPlan, most: int, *, serves_gpus: bool = False
) -> Parts:
    """Returns how a plan's values can be decoded in chunk loops.

    Args:
        store: The store that saves them. It packs for the chunks that are read.
        plan: The program and its saved residuals.
        most: Maximum number of chunks.
        serves_gpus: As in `Parts`.
    """
    if are_shared_by_type(plan.program.avals):
        most = 1
    packed = list(_packed(plan))
    codecs = {
        value: codec
        if value in plan.brief
        else store.codec(
            codec,
            site=site,
            num_parts=most_parts(like, most, serves_gpus=serves_gpus),
        )
        for value, site, codec, like in packed
    }
    likes = {value: like for value, *_, like in packed}
    return Parts(codecs, most, likes, serves_gpus=serves_gpus)


def parts_apart(
    plan: ProgramPlan, codecs: Mapping[int, AbstractCodec], most: int
) -> Parts:
    """Returns how a plan's values can be decoded in unrolled chunks.

    Args:
        plan: The program and its saved residuals.
        codecs: The codec of each value, from `codecs_in`.
        most: Maximum number of chunks.
    """
    likes = {value: like for value, *_, like in _packed(plan)}
    return Parts(codecs, most, likes, are_apart=True)


def can_be_apart(plan: ProgramPlan) -> bool:
    """Returns whether the backward pass may run with unrolled chunks.

    It may not if array types contain how devices share the arrays, or if an equation
    has side effects.
    """
    return not are_shared_by_type(plan.program.avals) and not any(
        eqn.has_effect for eqn in plan.program.backward
    )


def _packed(
    plan: ProgramPlan,
) -> Iterator[tuple[int, str, AbstractCodec, jax.ShapeDtypeStruct]]:
    for item, site in zip(plan.kept, site_names(plan), strict=True):
        if item.codec is not None:
            yield item.value, site, item.codec, item.like
