"""The custom calls that pack and unpack: affine codes, and exact bit masks.

`Format` describes codes. Every function takes rows `[*batch, n]`, and raises TypeError
for an operand of another dtype, and ValueError for a shape or format that does not fit.
Decoders take arrays `after` of any shape, which are computed first but not read.

Some variants are fused with the kernels that make or read an array. A custom call
writes its decoded array to memory, and the next kernel reads it again. That doubles the
bytes that the program moves anyway, and needs a temporary array. XLA:GPU fuses the
decoder in `jax.numpy` well with a consumer that is elementwise or a sum. A matrix
product needs its operands in memory, so a custom call decodes for it, which takes fewer
instructions. On CPUs a custom call decodes everything, because XLA:CPU's code takes far
more instructions.

A mask is packed in the kernel that makes it from the compared array. Otherwise XLA:GPU
would write booleans to memory for a custom call to read.

A batch norm sums the output of a convolution, and its squares. On GPUs the kernel that
packs this output in per-channel groups has all of it in registers, so it sums too
(reduction fused with packing).
"""

import dataclasses
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
from dafjax._native._format import Format, num_words
from dafjax._native._primitive import (
    CustomCall,
    DivisionRule,
    aligned,
    batch_rows,
    batch_seeded,
    can_pass_through,
    divide_rows,
    lower_as,
    make_primitive,
    refuse_derivatives,
    retyped,
    rows_like,
)
from dafjax._native._sums import sum_together
from dafjax._numbers import Array


DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
BFLOAT16 = jnp.dtype(jnp.bfloat16)
UINT16 = jnp.dtype(jnp.uint16)
UINT32 = jnp.dtype(jnp.uint32)


def pack_affine(x: Array, seed: Array, *, format: Format) -> tuple[Array, Array, Array]:
    """Encodes each row as affine codes: `xla_ffi/README.md`, section 2.

    Args:
        x: float32, bfloat16 or float16 `[*batch, n]`.
        seed: uint32 scalar; not read if the format rounds to nearest.
        format: The code.

    Returns:
        Codes, scale and minimum.
    """
    codes, scale, minimum, *_ = pack_affine_p.bind(x, seed, format=format, salt=0)
    return codes, scale, minimum


def pack_affine_salted(
    x: Array, seed: Array, *, format: Format, salt: int
) -> tuple[Array, ...]:
    """Encodes each row as `pack_affine` does, with the noise of `seed + salt`.

    To add the salt outside takes XLA one kernel for each array.

    Returns:
        Codes, scale and minimum; if the format is dithered, also the seeds of the rows.
    """
    return tuple(pack_affine_p.bind(x, seed, format=format, salt=salt))


def unpack_affine(
    codes: Array,
    scale: Array,
    minimum: Array,
    *after: Array,
    size: int,
    dtype: np.dtype,
    format: Format,
    seeds: Array | None = None,
) -> Array:
    """Decodes rows `[*batch, size]`: `minimum + code * |scale|`, rounded to `dtype`.

    If the format is dithered, `seeds` are the seeds of the rows, uint32 `[*batch]`, and
    the noise that encoding added is subtracted from the codes first.
    """
    packed = (codes, scale, minimum)
    operands = packed_operands(packed, seeds, after, format)
    dtype = jnp.dtype(dtype)
    return unpack_affine_p.bind(*operands, size=size, dtype=dtype, format=format)


def packed_operands(
    packed: tuple[Array, ...],
    seeds: Array | None,
    after: tuple[Array, ...],
    format: Format,
) -> list[Array]:
    """Returns the operands of a decoder: codes, scale, minimum; seeds; others."""
    assert format.dithered == (seeds is not None)
    noise = () if seeds is None else (seeds,)
    return [*packed, *noise, *filter(can_pass_through, after)]


def num_packed(*, format: Format, **_: Any) -> int:
    """Returns the number of leading operands that a decoder reads."""
    return 4 if format.dithered else 3


def _pack_type(x: Any, seed: Any, *, format: Format, salt: int = 0) -> tuple[Any, ...]:
    if not 0 <= salt < 2**32:
        raise ValueError(f"pack_affine: `salt` must fit into uint32, but is {salt}.")
    packed = _codes_type(x, seed, format=format)
    if not format.dithered:
        return packed
    seeds = retyped(x, x.shape[:-1], x.ndim - 1, dtype=UINT32, weak_type=False)
    return *packed, seeds


def _codes_type(x: Any, seed: Any, *, format: Format) -> tuple[Any, Any, Any]:
    check_rows_and_seed("pack_affine", x, seed)
    size = x.shape[-1]
    format.check("pack_affine", size)
    if format.dithered and not format.stochastic:
        raise ValueError(
            "pack_affine: `dithered` is for stochastic rounding: pass "
            "`stochastic=True` too."
        )
    blocks = rows_like(x, format.num_blocks(size), BFLOAT16)
    return rows_like(x, format.num_words(size), UINT16), blocks, blocks


def _unpack_type(
    codes: Any,
    scale: Any,
    minimum: Any,
    *others: Any,
    size: int,
    dtype: np.dtype,
    format: Format,
) -> Any:
    check_dtype("unpack_affine", "dtype", dtype, DTYPES)
    format.check("unpack_affine", size)
    batch = codes.shape[:-1]
    blocks = (*batch, format.num_blocks(size))
    expected = {
        "codes": (codes, UINT16, (*batch, format.num_words(size))),
        "scale": (scale, BFLOAT16, blocks),
        "minimum": (minimum, BFLOAT16, blocks),
    }
    if format.dithered:
        expected["seeds"] = others[0], UINT32, batch
    for name, (aval, valid, shape) in expected.items():
        check_dtype("unpack_affine", name, aval.dtype, (valid,))
        if aval.shape != shape:
            raise ValueError(
                f"unpack_affine: `{name}` must have shape {shape} for size={size} and "
                f"{format}, but has {aval.shape}."
            )
    return rows_like(codes, size, dtype)


def check_rows_and_seed(function: str, x: Any, seed: Any) -> None:
    """Raises unless `x` has rows of a supported dtype and `seed` is a uint32 scalar."""
    check_dtype(function, "x", x.dtype, DTYPES)
    check_dtype(function, "seed", seed.dtype, (UINT32,))
    if x.ndim < 1:
        raise ValueError(f"{function}: `x` must have rows, but it is a scalar.")
    if seed.shape != ():
        raise ValueError(f"{function}: `seed` must be a scalar, not {seed.shape}.")


def check_dtype(
    function: str, name: str, dtype: np.dtype, valid: Sequence[np.dtype]
) -> None:
    """Raises TypeError if `dtype` is not in `valid`."""
    if dtype not in valid:
        names = " or ".join(d.name for d in valid)
        raise TypeError(f"{function}: `{name}` must be {names}, not {dtype.name}.")


def int_attributes(**numbers: int) -> dict[str, np.int64]:
    """Returns numbers as attributes of a custom call, which are signed."""
    return {name: np.int64(number) for name, number in numbers.items()}


def pack_attributes(*, format: Format) -> dict[str, Any]:
    """Returns the attributes of a call that packs."""
    return int_attributes(**dataclasses.asdict(format))


def _salted_attributes(*, format: Format, salt: int) -> dict[str, Any]:
    return {**pack_attributes(format=format), **int_attributes(salt=salt)}


def _unpack_attributes(*, format: Format, **_: Any) -> dict[str, Any]:
    attributes = pack_attributes(format=format)
    del attributes["stochastic"]
    return attributes


def _divide_pack(x: Any, seed: Any, *, format: Format, salt: int = 0) -> DivisionRule:
    del seed, salt
    packed = ("w", "k", "k", "")[: num_packed(format=format)]
    return divide_rows(x, ("n", None), packed)


def _divide_codes(x: Any, seed: Any, **_: Any) -> DivisionRule:
    del seed
    return divide_rows(x, ("n", None), ("w", "k", "k"))


def _divide_unpack(codes: Any, *others: Any, format: Format, **_: Any) -> DivisionRule:
    count = num_packed(format=format)
    packed = ("w", "k", "k", "")[:count]
    return divide_rows(codes, packed, ("n",), after=others[count - 1 :])


def add_salt(
    x: Array, seed: Array, *, format: Format, salt: int
) -> tuple[Array, tuple[Array, ...]]:
    """Returns the seed of rows, and that of each row if the format is dithered."""
    seed = seed + jnp.uint32(salt)
    if not format.dithered:
        return seed, ()
    # Divided among devices as the rows are.
    return seed, (lax.full_like(x, 0, jnp.uint32, x.shape[:-1]) + seed,)


def _pack_salted(x: Array, seed: Array, *, format: Format, salt: int) -> list[Array]:
    seed, seeds = add_salt(x, seed, format=format, salt=salt)
    return [*_pack_codes_p.bind(x, seed, format=format), *seeds]


# What packs where the custom call takes no salt, as on GPUs.
_pack_codes_p: Primitive = make_primitive(
    "dafjax_pack_codes",
    abstract_eval=_codes_type,
    reference=_reference.pack_affine,
    multiple_results=True,
    call=CustomCall(
        "dafjax_pack_affine", _divide_codes, pack_attributes, platforms=("cuda",)
    ),
)
pack_affine_p: Primitive = make_primitive(
    "dafjax_pack_affine",
    abstract_eval=_pack_type,
    reference=_pack_salted,
    multiple_results=True,
    call=CustomCall(
        "dafjax_pack_affine", _divide_pack, _salted_attributes, platforms=("cpu",)
    ),
)
unpack_affine_p: Primitive = make_primitive(
    "dafjax_unpack_affine",
    abstract_eval=_unpack_type,
    reference=_reference.unpack_affine,
    call=CustomCall("dafjax_unpack_affine", _divide_unpack, _unpack_attributes),
)
batch_seeded(pack_affine_p)
batch_rows(unpack_affine_p, num_packed)
refuse_derivatives(pack_affine_p, num_data=2)
refuse_derivatives(unpack_affine_p, num_data=3)


def pack_bitmask(mask: Array) -> Array:
    """Packs bool `[*batch, n]` into uint16 `[*batch, ceil(n / 512) * 32]`.

    `xla_ffi/README.md`, section 1.
    """
    return pack_bitmask_p.bind(mask)


def unpack_bitmask(words: Array, *after: Array, size: int) -> Array:
    """Inverts `pack_bitmask` for rows of `size` booleans."""
    return unpack_bitmask_p.bind(words, *filter(can_pass_through, after), size=size)


def _mask_type(mask: Any) -> Any:
    check_dtype("pack_bitmask", "mask", mask.dtype, (jnp.dtype(jnp.bool_),))
    if mask.ndim < 1:
        raise ValueError("pack_bitmask: `mask` must have rows, but it is a scalar.")
    return rows_like(mask, num_words(mask.shape[-1], 1), UINT16)


def _unpacked_mask_type(words: Any, *after: Any, size: int) -> Any:
    del after
    check_dtype("unpack_bitmask", "words", words.dtype, (UINT16,))
    count = words.shape[-1]
    if count != num_words(size, 1):
        raise ValueError(
            f"unpack_bitmask: `words` must have {num_words(size, 1)} words a row for "
            f"size={size}, but has {count}."
        )
    return rows_like(words, size, jnp.dtype(jnp.bool_))


def _divide_mask(rows: Any, *after: Any, **_: Any) -> DivisionRule:
    return divide_rows(rows, ("from",), ("to",), after)


pack_bitmask_p: Primitive = make_primitive(
    "dafjax_pack_bitmask",
    abstract_eval=_mask_type,
    reference=_reference.pack_bitmask,
    call=CustomCall("dafjax_pack_bitmask", _divide_mask),
)
unpack_bitmask_p: Primitive = make_primitive(
    "dafjax_unpack_bitmask",
    abstract_eval=_unpacked_mask_type,
    reference=_reference.unpack_bitmask,
    # The call has the size from the type of its result.
    call=CustomCall("dafjax_unpack_bitmask", _divide_mask),
)
# Booleans have no tangent, so neither primitive has an operand to refuse.
for _primitive in (pack_bitmask_p, unpack_bitmask_p):
    batch_rows(_primitive, lambda **_: 1)
    refuse_derivatives(_primitive, num_data=0)


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


def _make_fused(
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


unpack_affine_fused_p: Primitive = _make_fused(
    "dafjax_unpack_affine_fused",
    unpack_affine_p,
    _reference.unpack_affine,
    num_packed,
)
pack_bitmask_fused_p: Primitive = _make_fused(
    "dafjax_pack_bitmask_fused", pack_bitmask_p, _reference.pack_bitmask
)
unpack_bitmask_fused_p: Primitive = _make_fused(
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


def _sums_type(x: Any, seed: Any, **params: Any) -> Sequence[Any]:
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


def _batch_sums(
    operands: Sequence[Array], axes: Sequence[int | None], **params: Any
) -> tuple[Sequence[Array], Sequence[int]]:
    def of_one(x: Array, seed: Array) -> list[Array]:
        return _pack_and_sum(x, seed, **params)

    results = jax.vmap(of_one, in_axes=tuple(axes))(*operands)
    return results, (0,) * len(results)


pack_affine_and_sum_p: Primitive = make_primitive(
    _TARGET,
    abstract_eval=_sums_type,
    reference=_pack_and_sum,
    multiple_results=True,
)
lower_as(
    pack_affine_and_sum_p,
    _sum_blocks,
    where_divided=_pack_and_sum,
    platform="cuda",
)
batching.primitive_batchers[pack_affine_and_sum_p] = _batch_sums
refuse_derivatives(pack_affine_and_sum_p, num_data=2)
