"""Chooses the number of batch chunks in which residuals can be decoded."""

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, final

import jax
from jax.sharding import AxisType

from dafjax import config
from dafjax._schedule.rows import Rows
from dafjax._typing import Like
from dafjax.codecs import AbstractCodec


@final
@dataclasses.dataclass(frozen=True)
class Parts:
    """How residuals can be decoded in chunks of rows (of the first dimension).

    Attributes:
        codecs: The codec of each residual.
        most: Maximum number of chunks.
        likes: Shape and dtype of each residual.
        are_apart: Whether the chunks are unrolled in the program and their results stay
            separate arrays (`chunks.py`). Otherwise they run in a loop.
        serves_gpus: Whether residuals stored for a chunk loop may also be read in
            unrolled chunks.
    """

    codecs: Mapping[int, AbstractCodec]
    most: int
    likes: Mapping[int, Like]
    are_apart: bool = False
    serves_gpus: bool = False

    def rows(self, values: Collection[int], there: Iterable[Rows]) -> Rows:
        """Returns the chunks of some residuals, a single one if they cannot be chunked.

        All residuals have the same number of rows.

        Args:
            values: The residuals.
            there: The chunks of the already chunked values that are read with them.
        """
        known = set(there)
        if known:
            rows = known.pop()
            if not known and self._can_be_divided(values, rows):
                return rows
            return Rows(1, is_interleaved=False)
        largest = max((self.likes[v] for v in values), key=_nbytes)
        if _nbytes(largest) >= config.LEAST_SHARE_OF_LARGEST * self._largest_nbytes:
            # Devices do not share arrays that are read in unrolled chunks.
            is_interleaved = not self.are_apart and all(
                self.codecs[v].packs_rows(self.likes[v]) for v in values
            )
            if not (self.are_apart or is_interleaved or self._are_on_one_device):
                # A chunk of consecutive rows would be gathered from other devices.
                return Rows(1, is_interleaved=False)
            for count in self._counts(largest):
                rows = Rows(count, is_interleaved)
                if self._can_be_divided(values, rows):
                    return rows
        return Rows(1, is_interleaved=False)

    def _counts(self, like: Like) -> Iterator[int]:
        """Yields the possible numbers of chunks of an array, the best first."""
        if not self.are_apart:
            serves_gpus = self.serves_gpus and self._calls_unpack
            return _counts(like, self.most, serves_gpus=serves_gpus)
        # If GPUs share the batch axis, each chunk's sums would need an all-reduce.
        if _gpus_may_share() and not self._calls_unpack:
            return iter(())
        return _counts(
            like,
            min(self.most, config.MOST_UNROLLED),
            least=config.LEAST_NBYTES_UNROLLED,
        )

    @property
    def _are_on_one_device(self) -> bool:
        """Whether no devices share residuals, as they never do in a page pool."""
        return jax.device_count() == 1 or self._calls_unpack

    @functools.cached_property
    def _calls_unpack(self) -> bool:
        return _calls_unpack(self.codecs.values())

    @functools.cached_property
    def _largest_nbytes(self) -> int:
        return max(map(_nbytes, self.likes.values()))

    def _can_be_divided(self, values: Iterable[int], rows: Rows) -> bool:
        pairs = [(self.codecs[v], self.likes[v]) for v in values]
        return all(
            codec.packs_parts(like, rows.num_parts)
            and (codec.packs_rows(like) or not rows.is_interleaved)
            for codec, like in pairs
        )


def usual_parts() -> int:
    """Returns the default maximum number of chunks of a chunk loop."""
    return config.CHUNKS_IN_LOOPS


def usual_parts_apart(codecs: Iterable[AbstractCodec]) -> int:
    """Returns the default maximum number of unrolled chunks.

    Args:
        codecs: The codecs of the residuals.
    """
    return (
        config.CHUNKS_UNROLLED_OF_CALLS
        if _calls_unpack(codecs)
        else config.CHUNKS_UNROLLED
    )


def most_parts(like: Like, most: int, *, serves_gpus: bool = False) -> int:
    """Returns the number of chunks that suits an array, 1 if it cannot be chunked.

    Args:
        like: Shape and dtype of the array.
        most: Maximum number of chunks of a chunk loop.
        serves_gpus: As in `Parts`.
    """
    return next(_counts(like, most, serves_gpus=serves_gpus), 1)


def are_shared_by_type(avals: Iterable[Any]) -> bool:
    """Returns whether array types contain how devices share the arrays.

    This is so on meshes with explicit axes and in `shard_map`. Chunks would then have
    types of their own.
    """
    types = {t for aval in avals for t in aval.sharding.mesh.axis_types}
    return not types.isdisjoint({AxisType.Explicit, AxisType.Manual})


def _counts(
    like: Like, most: int, *, least: int | None = None, serves_gpus: bool = False
) -> Iterator[int]:
    """Yields the possible numbers of chunks of an array, the best first.

    The largest is best. With `serves_gpus`, those are best that combine into the
    unrolled chunks of GPUs.
    """
    counts: Iterable[int] = range(most, 1, -1)
    if serves_gpus:
        counts = sorted(counts, key=lambda n: (math.gcd(n, config.MOST_UNROLLED), n))[
            ::-1
        ]
    for count in counts:
        if _can_have_parts(like, count, least or config.LEAST_NBYTES_OF_CHUNK):
            yield count


def _calls_unpack(codecs: Iterable[AbstractCodec]) -> bool:
    """Returns whether a custom call decodes a residual, outside of its consumers."""
    return not all(codec.decodes_fused for codec in codecs)


def _gpus_may_share() -> bool:
    return jax.default_backend() == "gpu" and jax.device_count() > 1


def _can_have_parts(like: Like, count: int, least_nbytes: int) -> bool:
    """Returns whether an array has `count` equal chunks of `least_nbytes` or more."""
    if not like.shape:
        return False
    there, rest = divmod(like.shape[0], count)
    # If devices share the batch axis, each holds some rows of every chunk.
    if rest or there % jax.device_count():
        return False
    return _nbytes(like) >= count * least_nbytes


def _nbytes(like: Like) -> int:
    return math.prod(like.shape) * like.dtype.itemsize
