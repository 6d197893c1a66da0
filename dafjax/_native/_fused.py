"""Sums of rows, and packing and unpacking fused with sums.

Primitives that sum over leading axes, on GPUs in two steps of our own.

XLA:GPU sums up to 4096 rows in one step, with 32 columns per thread block. With a few
hundred columns, most of a large GPU is then idle, and the sum, together with all
computation fused into it, takes as long as for an array many times as large. (H200,
`[256, 4, 4, 512]`, decoded for the gradient of a batch norm: 87 us in one step; 9 us
and 1 us in two steps.) XLA:GPU itself sums more than 4096 rows in two steps.

The second step has little to do but still takes about 2 us. So several sums, such as
the two of a norm, can share it: `sum_groups` is the first step of one sum, and
`sum_together` the second step of several.

Primitives that decode, or pack masks, inside other kernels where XLA can fuse them.

A custom call writes its decoded array to memory, and the next kernel reads it again.
That doubles the bytes that the program moves anyway, and needs a temporary array.
XLA:GPU fuses the decoder in `jax.numpy` well with a consumer that is elementwise or a
sum. A matrix product needs its operands in memory, so a custom call decodes for it,
which takes fewer instructions. On CPUs a custom call decodes everything, because
XLA:CPU's code takes far more instructions.

The packing primitive packs a mask in the kernel that makes it from the compared array.
Otherwise XLA:GPU would write booleans to memory for a custom call to read.

Primitive that encodes per-channel groups and sums each column.

A batch norm sums the output of a convolution, and its squares. On GPUs the kernel that
packs this output has all of it in registers, so it sums too (reduction fused with
packing).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from dafjax._native import _cuda, _reference
from dafjax._native._codes import (
    pack_affine_p,
    pack_attributes,
    pack_bitmask,
    pack_bitmask_p,
    unpack_affine_p,
    unpack_bitmask_p,
)
from dafjax._native._primitive import (
    batch_size,
    can_pass_through,
    is_divided,
    make_primitive,
    refuse_derivatives,
    reshaped,
    rows_like,
    to_front,
)
from dafjax._numbers import Array


def num_groups(x: Any, num_axes: int) -> tuple[int, ...]:
    """Returns the number of parts of each leading axis.

    The first step sums each group of rows to one row; a group is one part of each axis.
    Axes are divided one by one, because joining them first would copy the array into
    another layout.

    Returns:
        The number of parts of each leading axis; 1 for all if one step, or XLA's own
        two steps, are best.
    """
    whole = (1,) * num_axes
    rows = math.prod(x.shape[:num_axes])
    columns = math.prod(x.shape[num_axes:])
    if columns <= 1 or rows == 0 or x.dtype != jnp.float32:
        return whole
    is_large = rows > _ROWS_OF_ONE_STEP
    blocks = _MANY_BLOCKS_OF_THREADS if is_large else _BLOCKS_OF_THREADS
    wanted = -(-blocks * _COLUMNS_OF_BLOCK // columns)
    if is_large:
        wanted = max(wanted, math.isqrt(rows))
    wanted = in_all = min(wanted, rows // _ROWS_OF_GROUP)
    groups: list[int] = []
    for size in x.shape[: num_axes if is_large else 1]:
        counts = (n for n in range(min(wanted, size), 1, -1) if size % n == 0)
        groups.append(next(counts, 1))
        # The parts of the next axis are contiguous only if this axis is divided fully.
        if groups[-1] < size:
            break
        wanted //= size
    if is_large and 2 * math.prod(groups) < in_all:
        # The axes lack suitable divisors. XLA's own two steps pad the rows instead.
        return whole
    return (*groups, *whole[len(groups) :])


# The most rows that XLA:GPU sums in one step, and the columns of a thread block.
_ROWS_OF_ONE_STEP = 4096
_COLUMNS_OF_BLOCK = 32
# Two thread blocks per multiprocessor of the largest GPUs. A group has at least enough
# rows for all threads of its block.
_BLOCKS_OF_THREADS = 256
_ROWS_OF_GROUP = 128
# With this many thread blocks, XLA:GPU fuses decoding into the sum. On its own it would
# make as many groups as each group has rows.
_MANY_BLOCKS_OF_THREADS = 2048


def are_grouped(x: Any, num_axes: int) -> bool:
    """Returns whether GPUs sum these rows in two steps of our own."""
    return math.prod(num_groups(x, num_axes)) > 1


def sum_groups(x: Array, num_axes: int) -> Array:
    """Sums each group of rows: the first step of a sum on GPUs.

    Args:
        x: float32 `[*rows, *columns]`.
        num_axes: Number of leading axes that are rows.

    Returns:
        float32 `[groups, *columns]`. If devices share `x`, the first group has the sum
        of all rows, and the other groups are 0.
    """
    return sum_groups_p.bind(x, num_axes=num_axes)


def sum_together(arrays: Sequence[Array]) -> list[Array]:
    """Sums arrays of one shape over their first axis, in one kernel.

    Args:
        arrays: float32 `[groups, *columns]`.

    Returns:
        The sum of each array, float32 `[*columns]`.
    """
    zeros = [jnp.zeros((), x.dtype) for x in arrays]
    return list(lax.reduce(list(arrays), zeros, _add_each, (0,)))


def _add_each(a: Sequence[Array], b: Sequence[Array]) -> list[Array]:
    return [x + y for x, y in zip(a, b, strict=True)]


def _abstract_sum(x: Any, *, num_axes: int) -> Any:
    return reshaped(x, x.shape[num_axes:])


def _abstract_groups(x: Any, *, num_axes: int) -> Any:
    groups = math.prod(num_groups(x, num_axes))
    return reshaped(x, (groups, *x.shape[num_axes:]))


def _sum(x: Array, *, num_axes: int) -> Array:
    return lax.reduce_sum(x, range(num_axes))


def _sum_groups(x: Array, *, num_axes: int) -> Array:
    columns = x.shape[num_axes:]
    sums = lax.reduce_sum(_divided(x, num_axes), range(1, 2 * num_axes, 2))
    return sums.reshape(-1, *columns)


def _sum_as_one_group(x: Array, *, num_axes: int) -> Array:
    total = _sum(x, num_axes=num_axes)[jnp.newaxis]
    others = math.prod(num_groups(x, num_axes)) - 1
    return jnp.pad(total, [(0, others)] + [(0, 0)] * (total.ndim - 1))


def _sum_in_two_steps(x: Array, *, num_axes: int) -> Array:
    if not are_grouped(x, num_axes):
        return _sum(x, num_axes=num_axes)
    # Without the barrier, XLA merges both sums into one.
    sums = lax.optimization_barrier(_sum_groups(x, num_axes=num_axes))
    return lax.reduce_sum(sums, (0,))


def _divided(x: Array, num_axes: int) -> Array:
    """Splits each axis of rows in two: groups, and rows of a group."""
    groups = num_groups(x, num_axes)
    pairs = zip(groups, x.shape, strict=False)
    parts = [n for count, size in pairs for n in (count, size // count)]
    return x.reshape(*parts, *x.shape[num_axes:])


def _lowering(
    function: Callable[..., Array], where_divided: Callable[..., Array]
) -> Callable[..., Sequence[Any]]:
    """Returns the lowering rule for CUDA, with another function for divided arrays.

    Groups of rows do not match the shards of a divided array.
    """

    def lower(
        context: mlir.LoweringRuleContext, x: Any, **params: Any
    ) -> Sequence[Any]:
        chosen = where_divided if is_divided(context) else function
        return mlir.lower_fun(chosen, multiple_results=False)(context, x, **params)

    return lower


def _transpose_sum(
    cotangent: Array, x: ad.UndefinedPrimal, *, num_axes: int
) -> list[Array]:
    shape = x.aval.shape
    return [lax.broadcast_in_dim(cotangent, shape, range(num_axes, len(shape)))]


def _transpose_groups(
    cotangent: Array, x: ad.UndefinedPrimal, *, num_axes: int
) -> list[Array]:
    divided = jax.eval_shape(functools.partial(_divided, num_axes=num_axes), x.aval)
    groups = num_groups(x.aval, num_axes)
    of_groups = cotangent.reshape(*groups, *cotangent.shape[1:])
    axes = (*range(0, 2 * num_axes, 2), *range(2 * num_axes, divided.ndim))
    return [lax.broadcast_in_dim(of_groups, divided.shape, axes).reshape(x.aval.shape)]


def _batch_sum(
    operands: Sequence[Array], places: Sequence[int], *, num_axes: int
) -> tuple[Array, int]:
    x = jnp.moveaxis(operands[0], places[0], 0)
    return lax.reduce_sum(x, range(1, num_axes + 1)), 0


def _batch_groups(
    operands: Sequence[Array], places: Sequence[int], *, num_axes: int
) -> tuple[Array, int]:
    of_one = functools.partial(_sum_groups, num_axes=num_axes)
    return jax.vmap(of_one, in_axes=places[0])(operands[0]), 0


# Both primitives sum over the first `num_axes` axes.
sum_rows_p: Primitive = make_primitive(
    "dafjax_sum_rows",
    abstract_eval=_abstract_sum,
    reference=_sum,
    multiple_results=False,
    is_call_on_cpu=False,
)
_lower_sum = _lowering(_sum_in_two_steps, _sum)
mlir.register_lowering(sum_rows_p, _lower_sum, platform="cuda")
ad.deflinear2(sum_rows_p, _transpose_sum)
batching.primitive_batchers[sum_rows_p] = _batch_sum

sum_groups_p: Primitive = make_primitive(
    "dafjax_sum_groups",
    abstract_eval=_abstract_groups,
    reference=_sum_groups,
    multiple_results=False,
    is_call_on_cpu=False,
)
_lower_groups = _lowering(_sum_groups, _sum_as_one_group)
mlir.register_lowering(sum_groups_p, _lower_groups, platform="cuda")
ad.deflinear2(sum_groups_p, _transpose_groups)
batching.primitive_batchers[sum_groups_p] = _batch_groups


def unpack_affine_fused(
    codes: Array,
    scale: Array,
    minimum: Array,
    *after: Array,
    shape: tuple[int, ...],
    size: int,
    dtype: np.dtype,
    bits: int,
    block_size: int,
    columns: int = 0,
    seeds: Array | None = None,
) -> Array:
    """Decodes rows as `unpack_affine` does, and reshapes them.

    Args:
        codes: uint16 `[*batch, words]`, as `pack_affine` returns them.
        scale: bfloat16 `[*batch, blocks]`.
        minimum: As `scale`.
        *after: Arrays of any shape that are computed first. They are not read.
        shape: The shape of the result.
        size: Elements of a row.
        dtype: float32, bfloat16 or float16.
        bits: The argument of `pack_affine`; so are `block_size` and `columns`.
        block_size: Elements that share a scale.
        columns: The columns of a row; 0 for groups of consecutive elements.
        seeds: uint32 `[*batch]`, as for `unpack_affine`.

    Returns:
        An array of `shape` and `dtype`.

    Raises:
        TypeError: As `unpack_affine` raises it.
        ValueError: As `unpack_affine` raises it.
    """
    return unpack_affine_fused_p.bind(
        codes,
        scale,
        minimum,
        *(() if seeds is None else (seeds,)),
        *filter(can_pass_through, after),
        shape=shape,
        size=size,
        dtype=jnp.dtype(dtype),
        bits=bits,
        block_size=block_size,
        columns=columns,
        dithered=seeds is not None,
    )


def unpack_bitmask_fused(
    words: Array, *after: Array, shape: tuple[int, ...], size: int
) -> Array:
    """Inverts `pack_bitmask` as `unpack_bitmask` does, and reshapes the rows.

    Args:
        words: As for `unpack_bitmask`.
        *after: Arrays of any shape that are computed first. They are not read.
        shape: The shape of the result.
        size: Elements of a row.

    Returns:
        bool of `shape`.

    Raises:
        TypeError: As `unpack_bitmask` raises it.
        ValueError: As `unpack_bitmask` raises it.
    """
    after = tuple(filter(can_pass_through, after))
    return unpack_bitmask_fused_p.bind(words, *after, shape=shape, size=size)


def pack_bitmask_fused(mask: Array) -> Array:
    """Packs booleans as `pack_bitmask` does.

    Args:
        mask: bool `[*batch, n]`.

    Returns:
        uint16 `[*batch, ceil(n / 512) * 32]`.

    Raises:
        TypeError: As `pack_bitmask` raises it.
        ValueError: As `pack_bitmask` raises it.
    """
    words = jax.eval_shape(pack_bitmask, mask)
    return pack_bitmask_fused_p.bind(mask, shape=words.shape)


def _make_primitive(
    name: str,
    primitive: Primitive,
    reference: Callable[..., Array],
    num_data: int,
) -> Primitive:
    """Makes the fused counterpart of a primitive.

    Args:
        name: The name of the new primitive.
        primitive: The primitive whose result it computes.
        reference: The computation in `jax.numpy`, which XLA can fuse.
        num_data: The number of leading operands that are decoded or packed. If noise is
            subtracted, the seeds are one more such operand.
    """

    def abstract_eval(*avals: Any, shape: tuple[int, ...], **params: Any) -> Any:
        rows, _ = primitive.abstract_eval(*avals, **params)
        return reshaped(rows, shape)

    def as_call(*operands: Array, shape: tuple[int, ...], **params: Any) -> Array:
        return lax.reshape(primitive.bind(*operands, **params), shape)

    def lower(
        context: mlir.LoweringRuleContext, *operands: Any, **params: Any
    ) -> Sequence[Any]:
        # Arrays that devices share follow the division rule of the other primitive.
        function = as_call if is_divided(context) else reference
        lower = mlir.lower_fun(function, multiple_results=False)
        return lower(context, *operands, **params)

    def batch(
        operands: Sequence[Array],
        axes: Sequence[int | None],
        *,
        shape: tuple[int, ...],
        **params: Any,
    ) -> tuple[Array, int | None]:
        first = num_data + params.get("dithered", False)
        data, of_data = operands[:first], axes[:first]
        if all(axis is None for axis in of_data):
            return fused.bind(*operands, shape=shape, **params), None
        size = batch_size(data, of_data)
        data = [to_front(x, a, size) for x, a in zip(data, of_data, strict=True)]
        rest = operands[first:]
        return fused.bind(*data, *rest, shape=(size, *shape), **params), 0

    fused = make_primitive(
        name,
        abstract_eval=abstract_eval,
        reference=reference,
        multiple_results=False,
        is_call_on_cpu=False,
    )
    mlir.register_lowering(fused, lower)
    lower_as_call = mlir.lower_fun(as_call, multiple_results=False)
    mlir.register_lowering(fused, lower_as_call, platform="cpu")
    batching.primitive_batchers[fused] = batch
    refuse_derivatives(fused, num_data=num_data)
    return fused


unpack_affine_fused_p: Primitive = _make_primitive(
    "dafjax_unpack_affine_fused",
    unpack_affine_p,
    _reference.unpack_affine,
    num_data=3,
)
pack_bitmask_fused_p: Primitive = _make_primitive(
    "dafjax_pack_bitmask_fused",
    pack_bitmask_p,
    _reference.pack_bitmask,
    num_data=1,
)
# Booleans have no tangent, so `num_data` refuses nothing here; batching still needs it.
unpack_bitmask_fused_p: Primitive = _make_primitive(
    "dafjax_unpack_bitmask_fused",
    unpack_bitmask_p,
    _reference.unpack_bitmask,
    num_data=1,
)


_TARGET = "dafjax_pack_affine_and_sum"


def pack_affine_and_sum(
    x: Array,
    seed: Array,
    *,
    bits: int,
    block_size: int,
    stochastic: bool,
    dithered: bool = False,
    columns: int,
) -> tuple[Array, Array, Array, Array, Array]:
    """Encodes rows as `pack_affine` does, and sums their columns.

    Args:
        x: float32 `[*batch, n]`.
        seed: As in `pack_affine`; so are the other arguments.
        bits: Bits of a code.
        block_size: Elements that share a scale.
        stochastic: Whether to round codes stochastically.
        dithered: Whether the decoder subtracts the noise.
        columns: The columns of a row, a divisor of `n`, at least 1.

    Returns:
        Codes, scale and minimum, as `pack_affine` returns them; then the sum of each
        column and the sum of its squares, both over the batch too: float32 `[columns]`.

    Raises:
        TypeError: As `pack_affine` raises it, or `x` is not float32.
        ValueError: As `pack_affine` raises it, or `columns` is 0.
    """
    codes, scale, minimum, total, of_squares = pack_affine_and_sum_p.bind(
        x,
        seed,
        bits=bits,
        block_size=block_size,
        stochastic=stochastic,
        dithered=dithered,
        columns=columns,
    )
    return codes, scale, minimum, total, of_squares


def _abstract_eval(x: Any, seed: Any, *, columns: int, **params: Any) -> Sequence[Any]:
    packed, _ = pack_affine_p.abstract_eval(x, seed, columns=columns, **params)
    if x.dtype != jnp.float32:
        raise TypeError(
            f"pack_affine_and_sum: `x` must be float32, not {x.dtype.name}."
        )
    if columns == 0:
        raise ValueError("pack_affine_and_sum: `columns` must be at least 1, not 0.")
    total = reshaped(x, (columns,))
    return [*packed, total, total]


def _pack_and_sum(x: Array, seed: Array, *, columns: int, **params: Any) -> list[Array]:
    packed = pack_affine_p.bind(x, seed, columns=columns, **params)
    rows = x.reshape(-1, columns)
    return [*packed, lax.reduce_sum(rows, (0,)), lax.reduce_sum(rows * rows, (0,))]


def _sum_blocks(x: Array, seed: Array, *, columns: int, **params: Any) -> list[Array]:
    *packed, total, of_squares = _blocks_p.bind(x, seed, columns=columns, **params)
    # Lanes of adjacent groups belong to adjacent columns.
    sums = sum_together([b.reshape(-1, columns) for b in (total, of_squares)])
    return [*packed, *sums]


def _abstract_blocks(x: Any, seed: Any, **params: Any) -> Sequence[Any]:
    packed, _ = pack_affine_p.abstract_eval(x, seed, **params)
    of_blocks = rows_like(x, packed[1].shape[-1], jnp.dtype(jnp.float32))
    return [*packed, of_blocks, of_blocks]


def _lower_blocks(
    context: mlir.LoweringRuleContext, *operands: Any, **params: Any
) -> Sequence[Any]:
    lower = jax.ffi.ffi_lowering(_TARGET)
    return lower(context, *operands, **pack_attributes(**params))


def _lower_on_cuda(
    context: mlir.LoweringRuleContext, x: Any, seed: Any, **params: Any
) -> Sequence[Any]:
    is_call = not is_divided(context) and _cuda.register()
    lower = mlir.lower_fun(
        _sum_blocks if is_call else _pack_and_sum, multiple_results=True
    )
    return lower(context, x, seed, **params)


def _batch(
    operands: Sequence[Array], axes: Sequence[int | None], **params: Any
) -> tuple[Sequence[Array], Sequence[int]]:
    def of_one(x: Array, seed: Array) -> list[Array]:
        return _pack_and_sum(x, seed, **params)

    results = jax.vmap(of_one, in_axes=tuple(axes))(*operands)
    return results, (0,) * len(results)


_blocks_p = Primitive("dafjax_sum_blocks")
_blocks_p.multiple_results = True
_blocks_p.def_abstract_eval(_abstract_blocks)
mlir.register_lowering(_blocks_p, _lower_blocks, platform="cuda")

pack_affine_and_sum_p: Primitive = make_primitive(
    _TARGET,
    abstract_eval=_abstract_eval,
    reference=_pack_and_sum,
    multiple_results=True,
    is_call_on_cpu=False,
)
mlir.register_lowering(pack_affine_and_sum_p, _lower_on_cuda, platform="cuda")
batching.primitive_batchers[pack_affine_and_sum_p] = _batch
refuse_derivatives(pack_affine_and_sum_p, num_data=2)
