"""Primitives that decode in the kernels that read the result, where XLA can do that.

And one that packs masks where they are made, of the array that is compared: XLA:GPU
would else write booleans, for a custom call to read.

What a custom call decodes is written to memory and read again: twice the bytes that a
program moves for it anyway, and a temporary array. XLA:GPU makes a good kernel of the
decoder in `jax.numpy` and of what reads the result, if that is elementwise or a sum. A
product needs its operands in memory, so that it is decoded for by a custom call, which
takes fewer instructions; and on CPUs everything is, for XLA:CPU's code takes far more.
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
        bits: As they were encoded with, and so are `block_size` and `columns`.
        block_size: Elements that share a scale.
        columns: The columns of a row, 0 for blocks of consecutive elements.
        seeds: uint32 `[*batch]`, as for `unpack_affine`.

    Returns:
        An array of `shape` and `dtype`.

    Raises:
        TypeError: As `unpack_affine` raises it.
        ValueError: So too.
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
        ValueError: So too.
    """
    after = tuple(filter(can_pass_through, after))
    return unpack_bitmask_fused_p.bind(words, *after, shape=shape, size=size)


def pack_bitmask_fused(mask: Array) -> Array:
    """Packs booleans as `pack_bitmask` does.

    Args:
        mask: bool `[*batch, n]`.

    Returns:
        As `pack_bitmask` does.

    Raises:
        TypeError: As `pack_bitmask` raises it.
        ValueError: So too.
    """
    words = jax.eval_shape(pack_bitmask, mask)
    return pack_bitmask_fused_p.bind(mask, shape=words.shape)


def _make_primitive(
    name: str,
    primitive: Primitive,
    reference: Callable[..., Array],
    num_data: int,
) -> Primitive:
    """Makes the primitive that does what another one does.

    Args:
        name: Its name.
        primitive: The other one.
        reference: What XLA can fuse, in `jax.numpy`.
        num_data: How many of the operands are decoded, or packed, the first ones. If
            noise is subtracted, seeds are one more.
    """

    def abstract_eval(*avals: Any, shape: tuple[int, ...], **params: Any) -> Any:
        rows, _ = primitive.abstract_eval(*avals, **params)
        return reshaped(rows, shape)

    def as_call(*operands: Array, shape: tuple[int, ...], **params: Any) -> Array:
        return lax.reshape(primitive.bind(*operands, **params), shape)

    def lower(
        context: mlir.LoweringRuleContext, *operands: Any, **params: Any
    ) -> Sequence[Any]:
        # What devices share goes by the rule that the other primitive has for it.
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
# Booleans have no tangent: there is no operand to refuse, but there is data.
unpack_bitmask_fused_p: Primitive = _make_primitive(
    "dafjax_unpack_bitmask_fused",
    unpack_bitmask_p,
    _reference.unpack_bitmask,
    num_data=1,
)
