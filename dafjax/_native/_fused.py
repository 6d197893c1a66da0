"""Packing and unpacking fused with the kernels that make or read an array.

A custom call writes its decoded array to memory, and the next kernel reads it again.
That doubles the bytes that the program moves anyway, and needs a temporary array.
XLA:GPU fuses the decoder in `jax.numpy` well with a consumer that is elementwise or a
sum. A matrix product needs its operands in memory, so a custom call decodes for it,
which takes fewer instructions. On CPUs a custom call decodes everything, because
XLA:CPU's code takes far more instructions.

A mask is packed in the kernel that makes it from the compared array. Otherwise XLA:GPU
would write booleans to memory for a custom call to read.

A batch norm sums the output of a convolution, and its squares. On GPUs the kernel that
packs this output in per-channel groups has all of it in registers, so it sums too
(reduction fused with packing).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching

from dafjax._native import _cuda, _reference
from dafjax._native._codes import (
    add_salt,
    check_dtype,
    num_packed,
    pack_affine,
    pack_affine_p,
    pack_attributes,
    pack_bitmask,
    pack_bitmask_p,
    packed_operands,
    unpack_affine_p,
    unpack_bitmask_p,
)
from dafjax._native._format import Format
from dafjax._native._primitive import (
    aligned,
    can_pass_through,
    lower_as,
    make_primitive,
    refuse_derivatives,
    retyped,
)
from dafjax._native._sums import sum_together
from dafjax._numbers import Array


def unpack_affine_fused(
    codes: Array,
    scale: Array,
    minimum: Array,
    *after: Array,
    shape: tuple[int, ...],
    size: int,
    dtype: np.dtype,
    format: Format,
    seeds: Array | None = None,
) -> Array:
    """Decodes rows as `unpack_affine` does, and reshapes them to `shape`."""
    operands = packed_operands((codes, scale, minimum), seeds, after, format)
    dtype = jnp.dtype(dtype)
    return unpack_affine_fused_p.bind(
        *operands, shape=shape, size=size, dtype=dtype, format=format
    )


def unpack_bitmask_fused(
    words: Array, *after: Array, shape: tuple[int, ...], size: int
) -> Array:
    """Decodes rows as `unpack_bitmask` does, and reshapes them to `shape`."""
    after = tuple(filter(can_pass_through, after))
    return unpack_bitmask_fused_p.bind(words, *after, shape=shape, size=size)


def pack_bitmask_fused(mask: Array) -> Array:
    """Packs booleans as `pack_bitmask` does."""
    words = jax.eval_shape(pack_bitmask, mask)
    return pack_bitmask_fused_p.bind(mask, shape=words.shape)


def _make_primitive(
    name: str,
    primitive: Primitive,
    reference: Callable[..., Array],
    num_data: Callable[..., int] = lambda **_: 1,
) -> Primitive:
    """Makes the fused counterpart of a primitive.

    Args:
        name: The name of the new primitive.
        primitive: The primitive whose result it computes.
        reference: The computation in `jax.numpy`, which XLA can fuse.
        num_data: As in `batch_rows`.
    """

    def abstract_eval(*avals: Any, shape: tuple[int, ...], **params: Any) -> Any:
        rows, _ = primitive.abstract_eval(*avals, **params)
        return retyped(rows, shape)

    def as_call(*operands: Array, shape: tuple[int, ...], **params: Any) -> Array:
        return lax.reshape(primitive.bind(*operands, **params), shape)

    def batch(
        operands: Sequence[Array],
        axes: Sequence[int | None],
        *,
        shape: tuple[int, ...],
        **params: Any,
    ) -> tuple[Array, int | None]:
        operands, axis = aligned(operands, axes, num_data(**params))
        if axis is not None:
            shape = (operands[0].shape[0], *shape)
        return fused.bind(*operands, shape=shape, **params), axis

    fused = make_primitive(name, abstract_eval=abstract_eval, reference=reference)
    # Arrays that devices share follow the division rule of the other primitive.
    lower_as(fused, reference, where_divided=as_call)
    lower_as(fused, as_call, platform="cpu")
    batching.primitive_batchers[fused] = batch
    return fused


unpack_affine_fused_p: Primitive = _make_primitive(
    "dafjax_unpack_affine_fused",
    unpack_affine_p,
    _reference.unpack_affine,
    num_packed,
)
pack_bitmask_fused_p: Primitive = _make_primitive(
    "dafjax_pack_bitmask_fused", pack_bitmask_p, _reference.pack_bitmask
)
unpack_bitmask_fused_p: Primitive = _make_primitive(
    "dafjax_unpack_bitmask_fused", unpack_bitmask_p, _reference.unpack_bitmask
)
refuse_derivatives(unpack_affine_fused_p, num_data=3)
# Booleans have no tangent, so there is no operand to refuse.
refuse_derivatives(pack_bitmask_fused_p, num_data=0)
refuse_derivatives(unpack_bitmask_fused_p, num_data=0)


_TARGET = "dafjax_pack_affine_and_sum"


def pack_affine_and_sum(
    x: Array, seed: Array, *, format: Format, salt: int = 0
) -> tuple[Array, ...]:
    """Encodes float32 rows as `pack_affine_salted` does, and sums their columns.

    Returns:
        What `pack_affine_salted` returns; then the sum of each column and the sum of
        its squares, both over the batch too: float32 `[columns]`.
    """
    return tuple(pack_affine_and_sum_p.bind(x, seed, format=format, salt=salt))


def _abstract_eval(x: Any, seed: Any, **params: Any) -> Sequence[Any]:
    format = params["format"]
    packed, _ = pack_affine_p.abstract_eval(x, seed, **params)
    check_dtype("pack_affine_and_sum", "x", x.dtype, (jnp.dtype(jnp.float32),))
    if format.columns == 0:
        raise ValueError("pack_affine_and_sum: `columns` must be at least 1, not 0.")
    total = retyped(x, (format.columns,))
    return [*packed, total, total]


def _pack_and_sum(x: Array, seed: Array, *, format: Format, salt: int) -> list[Array]:
    packed = pack_affine_p.bind(x, seed, format=format, salt=salt)
    rows = x.reshape(-1, format.columns)
    return [*packed, lax.reduce_sum(rows, (0,)), lax.reduce_sum(rows * rows, (0,))]


def _sum_blocks(x: Array, seed: Array, *, format: Format, salt: int) -> list[Array]:
    if not _cuda.register():
        return _pack_and_sum(x, seed, format=format, salt=salt)
    seed, seeds = add_salt(x, seed, format=format, salt=salt)
    packed = jax.eval_shape(functools.partial(pack_affine, format=format), x, seed)
    of_blocks = jax.ShapeDtypeStruct(packed[1].shape, jnp.float32)
    call = jax.ffi.ffi_call(_TARGET, (*packed, of_blocks, of_blocks))
    *results, total, of_squares = call(x, seed, **pack_attributes(format=format))
    # Lanes of adjacent groups belong to adjacent columns.
    sums = sum_together([b.reshape(-1, format.columns) for b in (total, of_squares)])
    return [*results, *seeds, *sums]


def _batch(
    operands: Sequence[Array], axes: Sequence[int | None], **params: Any
) -> tuple[Sequence[Array], Sequence[int]]:
    def of_one(x: Array, seed: Array) -> list[Array]:
        return _pack_and_sum(x, seed, **params)

    results = jax.vmap(of_one, in_axes=tuple(axes))(*operands)
    return results, (0,) * len(results)


pack_affine_and_sum_p: Primitive = make_primitive(
    _TARGET,
    abstract_eval=_abstract_eval,
    reference=_pack_and_sum,
    multiple_results=True,
)
lower_as(
    pack_affine_and_sum_p,
    _sum_blocks,
    where_divided=_pack_and_sum,
    platform="cuda",
)
batching.primitive_batchers[pack_affine_and_sum_p] = _batch
refuse_derivatives(pack_affine_and_sum_p, num_data=2)
