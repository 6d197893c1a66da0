"""What waits of a plan's values between its forward and its backward pass."""

import collections
from collections.abc import Sequence
from typing import NamedTuple

import jax

from dafjax._plan.plan import ProgramPlan
from dafjax._plan.sites import site_names
from dafjax._schedule.steps import Step
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

    To decode, the schedule of the backward pass is needed.
    """
    reads = collections.Counter(v for step in schedule for v in step.unpacked)
    return {
        item.value: store.codec(item.codec, site=site, reads=reads[item.value])
        for item, site in zip(plan.kept, site_names(plan), strict=True)
        if item.codec is not None
    }
