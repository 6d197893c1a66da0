"""Primitive that encodes per-channel groups and sums each column.

A batch norm sums the output of a convolution, and its squares. On GPUs the kernel that
packs this output has all of it in registers, so it sums too (reduction fused with
packing).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from dafjax._native import _cuda_library
from dafjax._native._affine import pack_affine_p, pack_attributes
from dafjax._native._primitive import make_primitive, refuse_derivatives
from dafjax._native._sharding import is_divided, reshaped, rows_like
from dafjax._native._sum_rows import sum_together
from dafjax._typing import Array


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
    is_call = not is_divided(context) and _cuda_library.register()
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
