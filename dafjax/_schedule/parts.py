"""In which parts of their rows residuals can be unpacked."""

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, final

import jax
from jax.sharding import AxisType

from dafjax._schedule.rows import Rows
from dafjax._typing import Like
from dafjax.codecs import AbstractCodec


# Smaller parts take longer, and the whole is not large either. Apart they are kernels
# of their own, each of which takes some microseconds by itself.
_LEAST_NBYTES_OF_PART = 1 << 20
_LEAST_NBYTES_APART = 8 << 20

# Each is launches, and a loop over eight takes next to no less memory (below).
_MOST_APART = 4

# Where kernels unpack what they read, the backward pass has as many large arrays at a
# time as the forward pass, mostly three. So parts on GPUs are launches, and save next
# to nothing: of 17 programs for an H200 two parts changed the memory of two by 0.5 % or
# more: 60 instead of 72 MB, where XLA's heap came out worse, and 88 instead of 76.
# Where calls of their own unpack what others read, as from a page pool, four parts do:
# a ResNet-18 of 256 images takes 213 MB, at once 277, in two parts 245; in a loop over
# eight, 210 MB and 1643 kernels instead of 695.
_USUAL_IN_LOOPS = 8
_USUAL_APART = 1
_USUAL_APART_OF_CALLS = 4

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
        are_apart: Whether they run one after another in the program, and what they make
            stays in parts (`apart.py`). Else they run in a loop.
        serves_gpus: Whether what is stored for a loop may be read in parts apart, too.
    """

    codecs: Mapping[int, AbstractCodec]
    most: int
    likes: Mapping[int, Like]
    are_apart: bool = False
    serves_gpus: bool = False

    def rows(self, values: Collection[int], there: Iterable[Rows]) -> Rows:
        """Returns into which parts some residuals are divided, one if they are not.

        All of them have as many rows.

        Args:
            values: The residuals.
            there: In which parts what is read with them is there, if in any.
        """
        known = set(there)
        if known:
            rows = known.pop()
            if not known and self._can_be_divided(values, rows):
                return rows
            return Rows(1, is_interleaved=False)
        largest = max((self.likes[v] for v in values), key=_nbytes)
        if _nbytes(largest) >= _LEAST_SHARE * self._largest_nbytes:
            # Apart, parts are of arrays that devices do not share.
            is_interleaved = not self.are_apart and all(
                self.codecs[v].packs_rows(self.likes[v]) for v in values
            )
            for count in self._counts(largest):
                rows = Rows(count, is_interleaved)
                if self._can_be_divided(values, rows):
                    return rows
        return Rows(1, is_interleaved=False)

    def _counts(self, like: Like) -> Iterator[int]:
        """Yields into how many parts an array may be divided, the best first."""
        if not self.are_apart:
            serves_gpus = self.serves_gpus and self._calls_unpack
            return _counts(like, self.most, serves_gpus=serves_gpus)
        # Where GPUs share rows, each part's sums would go round all of them. What is in
        # a page pool they do not share.
        if _gpus_may_share() and not self._calls_unpack:
            return iter(())
        return _counts(like, min(self.most, _MOST_APART), least=_LEAST_NBYTES_APART)

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
    """Returns in how many parts a backward pass loops at most, if nobody says."""
    return _USUAL_IN_LOOPS


def usual_parts_apart(codecs: Iterable[AbstractCodec]) -> int:
    """Returns in how many parts that stay apart it runs at most, if nobody says.

    Args:
        codecs: How residuals are unpacked.
    """
    return _USUAL_APART_OF_CALLS if _calls_unpack(codecs) else _USUAL_APART


def most_parts(like: Like, most: int, *, serves_gpus: bool = False) -> int:
    """Returns into how many parts it is worth dividing an array, 1 if it has none.

    Args:
        like: Its shape and dtype.
        most: The most parts, of a loop.
        serves_gpus: As in `Parts`.
    """
    return next(_counts(like, most, serves_gpus=serves_gpus), 1)


def are_shared_by_type(avals: Iterable[Any]) -> bool:
    """Returns whether types of arrays say how devices share them.

    So they do on meshes with explicit axes and in `shard_map`. Then parts would have
    types of their own.
    """
    types = {t for aval in avals for t in aval.sharding.mesh.axis_types}
    return not types.isdisjoint({AxisType.Explicit, AxisType.Manual})


def _counts(
    like: Like, most: int, *, least: int | None = None, serves_gpus: bool = False
) -> Iterator[int]:
    """Yields into how many parts an array can be divided, the best first.

    These are the most; if what is stored for them serves GPUs, those that can be put
    together to the parts of GPUs.
    """
    counts: Iterable[int] = range(most, 1, -1)
    if serves_gpus:
        counts = sorted(counts, key=lambda n: (math.gcd(n, _MOST_APART), n))[::-1]
    for count in counts:
        if _can_have_parts(like, count, least or _LEAST_NBYTES_OF_PART):
            yield count


def _calls_unpack(codecs: Iterable[AbstractCodec]) -> bool:
    """Returns whether calls unpack some residuals, and not the kernels that read."""
    return not all(codec.decodes_fused for codec in codecs)


def _gpus_may_share() -> bool:
    return jax.default_backend() == "gpu" and jax.device_count() > 1


def _can_have_parts(like: Like, count: int, least_nbytes: int) -> bool:
    """Returns whether an array has so many equal parts of so many bytes or more."""
    if not like.shape:
        return False
    there, rest = divmod(like.shape[0], count)
    # Where devices share the rows, each has some of every part.
    if rest or there % jax.device_count():
        return False
    return _nbytes(like) >= count * least_nbytes


def _nbytes(like: Like) -> int:
    return math.prod(like.shape) * like.dtype.itemsize
