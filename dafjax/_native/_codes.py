"""The custom calls that pack and unpack: affine codes, and exact bit masks."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching

from dafjax._native import _reference
from dafjax._native._format import BITS, BLOCK_SIZES, num_blocks, num_words
from dafjax._native._primitive import (
    DivisionRule,
    batch_of,
    batch_size,
    can_pass_through,
    independent,
    make_primitive,
    refuse_derivatives,
    rows_like,
    to_front,
)
from dafjax._numbers import Array


DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def pack_affine(
    x: Array,
    seed: Array,
    *,
    bits: int,
    block_size: int,
    stochastic: bool,
    dithered: bool = False,
    columns: int = 0,
) -> tuple[Array, Array, Array]:
    """Encodes each row of an array as affine codes: `xla_ffi/README.md`, section 2.

    With `columns`, each row is a matrix `[n / columns, columns]` in C order, and each
    quantization group lies within one column: section 4. Section 4 then also gives the
    sizes of the results; the sizes below are for `columns=0`.

    Args:
        x: float32, bfloat16 or float16 `[*batch, n]`.
        seed: uint32 scalar; not read if `stochastic` is false.
        bits: Bits of a code: 1, 2, 3, 4 or 8.
        block_size: Elements of a quantization group, which share a scale: 64, 128, 256,
            512 or 1024.
        stochastic: Whether to round codes stochastically (unbiased) or to nearest.
        dithered: Whether `unpack_affine` subtracts the noise of stochastic rounding,
            which halves the variance of the error: section 3.
        columns: The columns of a row, a divisor of `n`; 0 for groups of consecutive
            elements.

    Returns:
        Codes, uint16 `[*batch, ceil(n / 512) * 32 * bits]`, and scale and minimum,
        bfloat16 `[*batch, ceil(n / block_size)]`.

    Raises:
        TypeError: `x` or `seed` has another dtype.
        ValueError: `x` is a scalar, `seed` is not a scalar, or a parameter is not in
            its set.
    """
    codes, scale, minimum = pack_affine_p.bind(
        x,
        seed,
        bits=bits,
        block_size=block_size,
        stochastic=stochastic,
        dithered=dithered,
        columns=columns,
    )
    return codes, scale, minimum


def unpack_affine(
    codes: Array,
    scale: Array,
    minimum: Array,
    *after: Array,
    size: int,
    dtype: np.dtype,
    bits: int,
    block_size: int,
    columns: int = 0,
    seeds: Array | None = None,
) -> Array:
    """Decodes rows: `value = minimum + code * |scale|`, rounded to `dtype`.

    With `seeds`, it first subtracts the noise that encoding added to the codes.

    Args:
        codes: uint16 `[*batch, ceil(size / 512) * 32 * bits]`.
        scale: bfloat16 `[*batch, ceil(size / block_size)]`.
        minimum: As `scale`.
        *after: Arrays of any shape that are computed first. They are not read.
        size: Elements of a row.
        dtype: float32, bfloat16 or float16.
        bits: The argument of `pack_affine`.
        block_size: The argument of `pack_affine`.
        columns: The argument of `pack_affine`.
        seeds: uint32 `[*batch]`, the seed of every row, if the rows were encoded with
            `dithered`; else `None`.

    Returns:
        An array `[*batch, size]` of `dtype`.

    Raises:
        TypeError: An operand or `dtype` is not of the dtypes above.
        ValueError: The shapes do not fit the parameters.
    """
    return unpack_affine_p.bind(
        codes,
        scale,
        minimum,
        *(() if seeds is None else (seeds,)),
        *filter(can_pass_through, after),
        size=size,
        dtype=jnp.dtype(dtype),
        bits=bits,
        block_size=block_size,
        columns=columns,
        dithered=seeds is not None,
    )


def _pack_abstract_eval(
    x: Any,
    seed: Any,
    *,
    bits: int,
    block_size: int,
    stochastic: bool,
    dithered: bool,
    columns: int,
) -> tuple[Any, Any, Any]:
    check_parameters("pack_affine", bits, block_size)
    if dithered and not stochastic:
        raise ValueError(
            "pack_affine: `dithered` is for stochastic rounding: pass "
            "`stochastic=True` too."
        )
    check_dtype("pack_affine", "x", x.dtype, DTYPES)
    check_dtype("pack_affine", "seed", seed.dtype, (jnp.dtype(jnp.uint32),))
    if x.ndim < 1:
        raise ValueError("pack_affine: `x` must have rows, but it is a scalar.")
    if seed.shape != ():
        raise ValueError(f"pack_affine: `seed` must be a scalar, not {seed.shape}.")
    size = x.shape[-1]
    check_columns("pack_affine", columns, size)
    num = num_blocks(size, block_size, columns)
    blocks = rows_like(x, num, jnp.dtype(jnp.bfloat16))
    words = rows_like(x, num_words(size, bits, columns), jnp.dtype(jnp.uint16))
    return words, blocks, blocks


def _unpack_abstract_eval(
    codes: Any,
    scale: Any,
    minimum: Any,
    *others: Any,
    size: int,
    dtype: np.dtype,
    bits: int,
    block_size: int,
    columns: int,
    dithered: bool,
) -> Any:
    check_parameters("unpack_affine", bits, block_size)
    check_dtype("unpack_affine", "dtype", dtype, DTYPES)
    check_dtype("unpack_affine", "codes", codes.dtype, (jnp.dtype(jnp.uint16),))
    check_dtype("unpack_affine", "scale", scale.dtype, (jnp.dtype(jnp.bfloat16),))
    check_dtype("unpack_affine", "minimum", minimum.dtype, (jnp.dtype(jnp.bfloat16),))
    check_columns("unpack_affine", columns, size)
    batch = codes.shape[:-1]
    blocks = (*batch, num_blocks(size, block_size, columns))
    expected = {
        "codes": (codes, (*batch, num_words(size, bits, columns))),
        "scale": (scale, blocks),
        "minimum": (minimum, blocks),
    }
    if dithered:
        seeds = others[0]
        check_dtype("unpack_affine", "seeds", seeds.dtype, (jnp.dtype(jnp.uint32),))
        expected["seeds"] = seeds, batch
    for name, (aval, shape) in expected.items():
        if aval.shape != shape:
            raise ValueError(
                f"unpack_affine: `{name}` must have shape {shape} for size={size}, "
                f"bits={bits}, block_size={block_size} and columns={columns}, but has "
                f"{aval.shape}."
            )
    return rows_like(codes, size, dtype)


def _divide_pack(x: Any, seed: Any, **_: Any) -> DivisionRule:
    del seed
    batch = batch_of(x)
    return DivisionRule(
        operands=((*batch, "n"), ()),
        results=((*batch, "w"), (*batch, "k"), (*batch, "k")),
        whole=("n", "w", "k"),
    )


def _divide_unpack(
    codes: Any, scale: Any, minimum: Any, *others: Any, dithered: bool, **_: Any
) -> DivisionRule:
    del scale, minimum
    batch = batch_of(codes)
    num_seeds = int(dithered)
    return DivisionRule(
        operands=(
            (*batch, "w"),
            (*batch, "k"),
            (*batch, "k"),
            *[batch] * num_seeds,
            *independent(others[num_seeds:]),
        ),
        results=((*batch, "n"),),
        whole=("n", "w", "k"),
    )


def check_parameters(function: str, bits: int, block_size: int) -> None:
    """Raises ValueError unless the format supports these parameters."""
    if bits not in BITS:
        raise ValueError(f"{function}: `bits` must be one of {BITS}, not {bits}.")
    if block_size not in BLOCK_SIZES:
        raise ValueError(
            f"{function}: `block_size` must be one of {BLOCK_SIZES}, not {block_size}."
        )


def check_columns(function: str, columns: int, size: int) -> None:
    """Raises ValueError unless `columns` is 0 or divides a row of `size` elements."""
    if columns < 0 or (columns > 0 and size % columns != 0):
        raise ValueError(
            f"{function}: `columns` must be 0 or divide the elements of a row, {size}, "
            f"but is {columns}."
        )


def check_dtype(
    function: str, name: str, dtype: np.dtype, valid: Sequence[np.dtype]
) -> None:
    """Raises TypeError unless `dtype` is in `valid`."""
    if dtype not in valid:
        names = " or ".join(d.name for d in valid)
        raise TypeError(f"{function}: `{name}` must be {names}, not {dtype.name}.")


def pack_attributes(*, stochastic: bool, dithered: bool, **code: int) -> dict[str, Any]:
    return {
        **_code_attributes(**code),
        "stochastic": np.int64(stochastic),
        "dithered": np.int64(dithered),
    }


def _unpack_attributes(
    *, size: int, dtype: np.dtype, dithered: bool, **code: int
) -> dict[str, Any]:
    return {**_code_attributes(**code), "dithered": np.int64(dithered)}


def _code_attributes(*, bits: int, block_size: int, columns: int) -> dict[str, Any]:
    return {
        "bits": np.int64(bits),
        "block_size": np.int64(block_size),
        "columns": np.int64(columns),
    }


def _batch_pack(
    operands: Sequence[Array], axes: Sequence[int | None], **params: Any
) -> tuple[Sequence[Array], Sequence[int]]:
    x, seed = operands
    x = to_front(x, axes[0], batch_size(operands, axes))
    if axes[1] is None:
        return pack_affine_p.bind(x, seed, **params), (0, 0, 0)
    # The custom call takes one seed, so rows with different seeds go one by one.
    packed = lax.map(
        lambda row: pack_affine_p.bind(*row, **params),
        (x, jnp.moveaxis(seed, axes[1], 0)),
    )
    return packed, (0, 0, 0)


def _batch_unpack(
    operands: Sequence[Array],
    axes: Sequence[int | None],
    *,
    dithered: bool,
    **params: Any,
) -> tuple[Array, int | None]:
    num_data = 3 + dithered
    data, of_data = operands[:num_data], axes[:num_data]
    unpack = functools.partial(unpack_affine_p.bind, dithered=dithered, **params)
    if all(axis is None for axis in of_data):
        return unpack(*operands), None
    size = batch_size(data, of_data)
    data = [to_front(x, a, size) for x, a in zip(data, of_data, strict=True)]
    return unpack(*data, *operands[num_data:]), 0


pack_affine_p: Primitive = make_primitive(
    "dafjax_pack_affine",
    abstract_eval=_pack_abstract_eval,
    reference=_reference.pack_affine,
    multiple_results=True,
    attributes=pack_attributes,
    division=_divide_pack,
)
unpack_affine_p: Primitive = make_primitive(
    "dafjax_unpack_affine",
    abstract_eval=_unpack_abstract_eval,
    reference=_reference.unpack_affine,
    multiple_results=False,
    attributes=_unpack_attributes,
    division=_divide_unpack,
)
batching.primitive_batchers[pack_affine_p] = _batch_pack
batching.primitive_batchers[unpack_affine_p] = _batch_unpack
refuse_derivatives(pack_affine_p, num_data=2)
refuse_derivatives(unpack_affine_p, num_data=3)


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


def _abstract_mask(mask: Any) -> Any:
    if mask.dtype != jnp.bool_:
        raise TypeError(f"pack_bitmask: `mask` must be bool, not {mask.dtype.name}.")
    if mask.ndim < 1:
        raise ValueError("pack_bitmask: `mask` must have rows, but it is a scalar.")
    return rows_like(mask, num_words(mask.shape[-1], 1), jnp.dtype(jnp.uint16))


def _abstract_unpacked_mask(words: Any, *after: Any, size: int) -> Any:
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


def _divide_mask(mask: Any, **_: Any) -> DivisionRule:
    batch = batch_of(mask)
    return DivisionRule(
        operands=((*batch, "n"),), results=((*batch, "w"),), whole=("n", "w")
    )


def _divide_unpacked_mask(words: Any, *after: Any, **_: Any) -> DivisionRule:
    batch = batch_of(words)
    return DivisionRule(
        operands=((*batch, "w"), *independent(after)),
        results=((*batch, "n"),),
        whole=("n", "w"),
    )


def _batch_mask(operands: Sequence[Array], axes: Sequence[int]) -> tuple[Array, int]:
    return pack_bitmask_p.bind(jnp.moveaxis(operands[0], axes[0], 0)), 0


def _batch_unpacked_mask(
    operands: Sequence[Array], axes: Sequence[int | None], *, size: int
) -> tuple[Array, int | None]:
    words, *after = operands
    if axes[0] is None:
        return unpack_bitmask_p.bind(words, *after, size=size), None
    words = to_front(words, axes[0], words.shape[axes[0]])
    return unpack_bitmask_p.bind(words, *after, size=size), 0


pack_bitmask_p: Primitive = make_primitive(
    "dafjax_pack_bitmask",
    abstract_eval=_abstract_mask,
    reference=_reference.pack_bitmask,
    multiple_results=False,
    division=_divide_mask,
)
unpack_bitmask_p: Primitive = make_primitive(
    "dafjax_unpack_bitmask",
    abstract_eval=_abstract_unpacked_mask,
    reference=_reference.unpack_bitmask,
    multiple_results=False,
    division=_divide_unpacked_mask,
)
batching.primitive_batchers[pack_bitmask_p] = _batch_mask
batching.primitive_batchers[unpack_bitmask_p] = _batch_unpacked_mask
# Booleans have no tangent, so neither primitive has an operand to refuse.
refuse_derivatives(pack_bitmask_p, num_data=0)
refuse_derivatives(unpack_bitmask_p, num_data=0)
