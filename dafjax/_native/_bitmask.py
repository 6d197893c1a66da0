"""Primitives that pack booleans into single bits and unpack them, exactly."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching

from dafjax._native import _reference
from dafjax._native._layout import num_words
from dafjax._native._primitive import (
    can_pass_through,
    make_primitive,
    refuse_derivatives,
    to_front,
)
from dafjax._native._sharding import DivisionRule, batch_of, independent, rows_like
from dafjax._typing import Array


def pack_bitmask(mask: Array) -> Array:
    """Packs each row of booleans into one plane: `xla_ffi/README.md`, section 1.

    Args:
        mask: bool `[*batch, n]`.

    Returns:
        uint16 `[*batch, ceil(n / 512) * 32]`.

    Raises:
        TypeError: `mask` is not bool.
        ValueError: `mask` is a scalar.
    """
    return pack_bitmask_p.bind(mask)


def unpack_bitmask(words: Array, *after: Array, size: int) -> Array:
    """Inverts `pack_bitmask`.

    Args:
        words: uint16 `[*batch, ceil(size / 512) * 32]`.
        *after: Arrays of any shape that are computed first. They are not read.
        size: Elements of a row.

    Returns:
        bool `[*batch, size]`.

    Raises:
        TypeError: `words` is not uint16.
        ValueError: The shape does not fit `size`.
    """
    return unpack_bitmask_p.bind(words, *filter(can_pass_through, after), size=size)


def _pack_abstract_eval(mask: Any) -> Any:
    if mask.dtype != jnp.bool_:
        raise TypeError(f"pack_bitmask: `mask` must be bool, not {mask.dtype.name}.")
    if mask.ndim < 1:
        raise ValueError("pack_bitmask: `mask` must have rows, but it is a scalar.")
    return rows_like(mask, num_words(mask.shape[-1], 1), jnp.dtype(jnp.uint16))


def _unpack_abstract_eval(words: Any, *after: Any, size: int) -> Any:
    if words.dtype != jnp.uint16:
        raise TypeError(
            f"unpack_bitmask: `words` must be uint16, not {words.dtype.name}."
        )
    count = words.shape[-1]
    if count != num_words(size, 1):
        raise ValueError(
            f"unpack_bitmask: `words` must have {num_words(size, 1)} words a row for "
            f"size={size}, but has {count}."
        )
    return rows_like(words, size, jnp.dtype(jnp.bool_))


def _divide_pack(mask: Any, **_: Any) -> DivisionRule:
    batch = batch_of(mask)
    return DivisionRule(
        operands=((*batch, "n"),), results=((*batch, "w"),), whole=("n", "w")
    )


def _divide_unpack(words: Any, *after: Any, **_: Any) -> DivisionRule:
    batch = batch_of(words)
    return DivisionRule(
        operands=((*batch, "w"), *independent(after)),
        results=((*batch, "n"),),
        whole=("n", "w"),
    )


def _batch_pack(operands: Sequence[Array], axes: Sequence[int]) -> tuple[Array, int]:
    return pack_bitmask_p.bind(jnp.moveaxis(operands[0], axes[0], 0)), 0


def _batch_unpack(
    operands: Sequence[Array], axes: Sequence[int | None], *, size: int
) -> tuple[Array, int | None]:
    words, *after = operands
    if axes[0] is None:
        return unpack_bitmask_p.bind(words, *after, size=size), None
    words = to_front(words, axes[0], words.shape[axes[0]])
    return unpack_bitmask_p.bind(words, *after, size=size), 0


pack_bitmask_p: Primitive = make_primitive(
    "dafjax_pack_bitmask",
    abstract_eval=_pack_abstract_eval,
    reference=_reference.pack_bitmask,
    multiple_results=False,
    division=_divide_pack,
)
unpack_bitmask_p: Primitive = make_primitive(
    "dafjax_unpack_bitmask",
    abstract_eval=_unpack_abstract_eval,
    reference=_reference.unpack_bitmask,
    multiple_results=False,
    division=_divide_unpack,
)
batching.primitive_batchers[pack_bitmask_p] = _batch_pack
batching.primitive_batchers[unpack_bitmask_p] = _batch_unpack
# Booleans have no tangent, so neither primitive has an operand to refuse.
refuse_derivatives(pack_bitmask_p, num_data=0)
refuse_derivatives(unpack_bitmask_p, num_data=0)
