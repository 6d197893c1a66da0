"""Primitives that decode, or pack masks, inside other kernels where XLA can fuse them.

A custom call writes its decoded array to memory, and the next kernel reads it again.
That doubles the bytes that the program moves anyway, and needs a temporary array.
XLA:GPU fuses the decoder in `jax.numpy` well with a consumer that is elementwise or a
sum. A matrix product needs its operands in memory, so a custom call decodes for it,
which takes fewer instructions. On CPUs a custom call decodes everything, because
XLA:CPU's code takes far more instructions.

The packing primitive packs a mask in the kernel that makes it from the compared array.
Otherwise XLA:GPU would write booleans to memory for a custom call to read.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from dafjax._native import _reference
from dafjax._native._affine import unpack_affine_p
from dafjax._native._bitmask import pack_bitmask, pack_bitmask_p, unpack_bitmask_p
from dafjax._native._primitive import (
    batch_size,
    can_pass_through,
    make_primitive,
    refuse_derivatives,
    to_front,
)
from dafjax._native._sharding import is_divided, reshaped
from dafjax._typing import Array


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
