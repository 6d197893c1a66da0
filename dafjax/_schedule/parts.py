"""In which parts of their rows residuals can be unpacked."""

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, final

import jax
from jax.sharding import AxisType

from dafjax._typing import Like
from dafjax.codecs import AbstractCodec


# Smaller parts take longer, and the whole is not large either.
_LEAST_NBYTES_OF_PART = 1 << 20

# A stretch of the backward pass takes some five times its largest residual as a whole,
# and some three times in parts. So where that residual is less than this share of the
# largest of all, parts of it save little (up to 3 %, where many codes still wait then),
# and on GPUs each is many launches.
_LEAST_SHARE = 0.6


@final
@dataclasses.dataclass(frozen=True)
class Parts:
    """In which parts of rows, places of the first dimension, residuals can be unpacked.

    Attributes:
        codecs: How each residual is unpacked.
        most: The most parts.
        likes: Shape and dtype of each residual.
    """

    codecs: Mapping[int, AbstractCodec]
    most: int
    likes: Mapping[int, Like]

    def count(self, values: Collection[int]) -> int:
        """Returns into how many parts some residuals are divided, 1 if they are not.

        All of them have as many rows.
        """
        largest = max((self.likes[v] for v in values), key=_nbytes)
        if _nbytes(largest) < _LEAST_SHARE * self._largest_nbytes:
            return 1
        for count in range(most_parts(largest, self.most), 1, -1):
            if _can_have_parts(largest, count) and all(
                self.codecs[v].packs_parts(self.likes[v], count) for v in values
            ):
                return count
        return 1

    @functools.cached_property
    def _largest_nbytes(self) -> int:
        return max(map(_nbytes, self.likes.values()))

    def can_be_interleaved(self, values: Iterable[int]) -> bool:
        """Returns whether parts need not be rows that follow each other."""
        return all(self.codecs[v].packs_rows(self.likes[v]) for v in values)


def most_parts(like: Like, most: int) -> int:
    """Returns into how many parts it is worth dividing an array, 1 if it has none.

    Args:
        like: Its shape and dtype.
        most: The most parts.
    """
    counts = range(most, 1, -1)
    return next((count for count in counts if _can_have_parts(like, count)), 1)


def are_shared_by_type(avals: Iterable[Any]) -> bool:
    """Returns whether types of arrays say how devices share them.

    So they do on meshes with explicit axes and in `shard_map`. Then parts would have
    types of their own.
    """
    types = {t for aval in avals for t in aval.sharding.mesh.axis_types}
    return not types.isdisjoint({AxisType.Explicit, AxisType.Manual})


def _can_have_parts(like: Like, count: int) -> bool:
    """Returns whether an array has so many equal parts, which are large enough."""
    if not like.shape:
        return False
    there, rest = divmod(like.shape[0], count)
    # Where devices share the rows, each has some of every part.
    if rest or there % jax.device_count():
        return False
    return _nbytes(like) >= count * _LEAST_NBYTES_OF_PART


def _nbytes(like: Like) -> int:
    return math.prod(like.shape) * like.dtype.itemsize
