"""The memory of a training step: predicted by a model, or told by the compiler."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import jax
from jax.sharding import NamedSharding, Sharding

from dafjax._memory.predict import predict_temp_nbytes
from dafjax._trace.tracing import has_primitive, nbytes_of


@final
@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Bytes that one step needs per device.

    Attributes:
        temp_nbytes: Bytes of temporary arrays, including residuals.
        argument_nbytes: Bytes of arguments: parameters, optimizer state, data.
        output_nbytes: Bytes of results.
        donated_nbytes: Bytes of results that reuse donated arguments.
    """

    temp_nbytes: int
    argument_nbytes: int
    output_nbytes: int
    donated_nbytes: int

    @property
    def total_nbytes(self) -> int:
        """Bytes while the step runs; donated arguments count once."""
        new_nbytes = self.output_nbytes - self.donated_nbytes
        return self.argument_nbytes + new_nbytes + self.temp_nbytes


def measure(
    lowered: Any, compiler_options: Mapping[str, Any] | None = None
) -> StepMemory:
    """Compiles a lowered step, and returns the compiler's figures."""
    options = None if compiler_options is None else dict(compiler_options)
    memory = lowered.compile(compiler_options=options).memory_analysis()
    return StepMemory(
        temp_nbytes=memory.temp_size_in_bytes,
        argument_nbytes=memory.argument_size_in_bytes,
        output_nbytes=memory.output_size_in_bytes,
        donated_nbytes=memory.alias_size_in_bytes,
    )


def predict(traced: Any, args: Any, kwargs: Any) -> StepMemory:
    """Predicts the memory of a traced step on XLA:CPU, without compiling it.

    On several devices it knows only the shardings of arguments. It assumes that a
    result is divided like an argument of its shape and dtype, and that temporary arrays
    are divided along all axes of the mesh along which some argument is. In a
    `shard_map` they have the shapes of one device.

    Args:
        traced: The result of the method `trace` of a function that `jax.jit` returned.
        args: The positional arguments of the step.
        kwargs: Its keyword arguments.
    """
    # Flax NNX wraps JAX's object.
    traced = getattr(traced, "traced", traced)
    # By shape and dtype: whether each argument is donated, and its number of shards.
    alike: dict[Any, list[tuple[bool, int]]] = collections.defaultdict(list)
    argument_nbytes = output_nbytes = donated_nbytes = 0
    mesh_axes: dict[str, int] = {}
    for info, sharding in _arguments(traced, (args, kwargs)):
        num_shards = _num_shards(sharding, info.shape)
        alike[info.shape, info.dtype].append((info.donated, num_shards))
        argument_nbytes += nbytes_of(info) // num_shards
        mesh_axes |= _mesh_axes(sharding)
    for found in alike.values():
        found.sort(key=lambda argument: not argument[0])
    for result in jax.tree.leaves(traced.out_info):
        found = alike[result.shape, result.dtype]
        is_donated, num_shards = found.pop(0) if found else (False, 1)
        output_nbytes += nbytes_of(result) // num_shards
        donated_nbytes += is_donated * nbytes_of(result) // num_shards
    temp_nbytes = predict_temp_nbytes(traced.jaxpr)
    if not has_primitive(traced.jaxpr, {"shard_map"}):
        temp_nbytes //= math.prod(mesh_axes.values())
    return StepMemory(temp_nbytes, argument_nbytes, output_nbytes, donated_nbytes)


def _arguments(traced: Any, arguments: Any) -> Iterator[tuple[Any, Sharding | None]]:
    """Returns the `ArgInfo` and the sharding of each argument."""
    infos = jax.tree.leaves(traced.args_info)
    # Options of `jax.jit`; closed-over arrays come first.
    given = list(getattr(traced, "_params", {}).get("in_shardings", ()))[-len(infos) :]
    # By shape and dtype, the shardings of arguments, in order.
    of_leaves: dict[Any, list[Any]] = collections.defaultdict(list)
    for leaf in jax.tree.leaves(arguments):
        if hasattr(leaf, "shape"):
            of_leaves[leaf.shape, leaf.dtype].append(getattr(leaf, "sharding", None))
    for info, sharding in itertools.zip_longest(infos, given):
        found = of_leaves[info.shape, info.dtype]
        of_leaf = found.pop(0) if found else None
        yield info, sharding if isinstance(sharding, Sharding) else of_leaf


def _num_shards(sharding: Sharding | None, shape: tuple[int, ...]) -> int:
    if sharding is None or not math.prod(shape):
        return 1
    return math.prod(shape) // math.prod(sharding.shard_shape(shape))


def _mesh_axes(sharding: Sharding | None) -> dict[str, int]:
    """Returns the axes of the mesh that divide an array, with their sizes."""
    if not isinstance(sharding, NamedSharding):
        return {}
    sizes = sharding.mesh.shape
    return {axis: sizes[axis] for axis in jax.tree.leaves(tuple(sharding.spec))}


def nothing_is_wrapped(caller: str, name: object) -> ValueError:
    """Returns the error for a step that calls no wrapped function."""
    return ValueError(
        f"`{caller}(step, ...)`: `{name!s}` calls no function wrapped by "
        "`remat_compress` (or one with `bits=None`). Wrap the loss or its blocks "
        "first, and pass the step that differentiates it."
    )


def largest_that_fits(
    nbytes_of: Callable[[int], int], limit_nbytes: int, most: int
) -> int:
    """Returns a count that fits, while the next does not or is more than `most`.

    Args:
        nbytes_of: Function from a count to its bytes; costly, and nearly linear.
        limit_nbytes: The limit in bytes.
        most: The largest count.

    Returns:
        The count; 0 if 1 does not fit.
    """
    # Invariant: `low` fits; `high` does not, or is out of range.
    low, high = 0, most + 1
    known: dict[int, int] = {}
    guess = 1
    while high - low > 1:
        known[guess] = nbytes_of(guess)
        if known[guess] <= limit_nbytes:
            low = guess
        else:
            high = guess
        if high - low > 1:
            guess = _next_guess(known, low, high, limit_nbytes)
    return low


# The second count is this many times the first: far enough apart to separate the bytes
# of the batch from the bytes of the parameters.
_SECOND = 8
# A line through two points is extrapolated at most to this multiple of the last count.
_FARTHEST = 32


def _next_guess(
    known: Mapping[int, int], low: int, high: int, limit_nbytes: int
) -> int:
    if len(known) == 1:
        guess = _SECOND * low
    elif len(known) > 2 and len(known) % 3 == 2:
        # Every third guess halves the range, or doubles the count if no upper bound is
        # known. So the search ends, however the bytes grow.
        guess = (low + high) // 2 if high in known else 2 * low
    else:
        other = high if high in known else max(n for n in known if n < low)
        slope = (known[other] - known[low]) / (other - low)
        room = limit_nbytes - known[low]
        guess = _FARTHEST * low
        if room < slope * (guess - low):
            guess = low + int(room / slope)
    return min(max(guess, low + 1), high - 1)
