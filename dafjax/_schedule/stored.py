"""What waits of a plan's values between its forward and its backward pass."""

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
    """What is stored of a residual whose importance the backward pass measures.

    Attributes:
        handle: What the store returned.
        rounding_noise: float32 scalar, what `codecs.sample_rounding_noise` returned:
            codes of few bits do not tell how evenly their blocks were filled.
    """

    handle: ArrayTree
    rounding_noise: jax.Array


def codecs_in(
    store: AbstractStore, plan: ProgramPlan, schedule: Sequence[Step] = ()
) -> dict[int, AbstractCodec]:
    """Returns what each of a plan's values is packed with in a store.

    Args:
        store: The store.
        plan: What is kept.
        schedule: The steps of the backward pass, by which values are unpacked whole or
            in parts; none if it starts with all of them.
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
    """Returns in which parts a plan's values can be unpacked in loops.

    Args:
        store: Where they are to wait: it packs for the parts that they are read in.
        plan: The plan.
        most: The most parts.
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
    """Returns in which parts that stay apart a plan's values can be unpacked.

    Args:
        plan: The plan.
        codecs: What `codecs_in` returned: what they are packed with.
        most: The most parts.
    """
    likes = {value: like for value, *_, like in _packed(plan)}
    return Parts(codecs, most, likes, are_apart=True)


def can_be_apart(plan: ProgramPlan) -> bool:
    """Returns whether the backward pass may run with parts that stay apart.

    Not where devices share arrays by their types; and where more is done than computed.
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
