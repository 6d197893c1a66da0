"""Page pools and the custom calls of programs that use them.

The calls put rows into a pool as affine codes, and get them back. They have no effects
for XLA: it drops a call whose result is unused, and then the pool has no entry. The
number of bits of a code is not part of the program; the pool decides it when the call
runs.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching

from dafjax._native import _library
from dafjax._native._codes import DTYPES, check_columns, check_dtype, check_parameters
from dafjax._native._primitive import (
    batch_size,
    can_pass_through,
    make_primitive,
    refuse_derivatives,
    to_front,
)
from dafjax._numbers import Array


class PoolExhausted(MemoryError):
    """The budget of a page pool cannot hold a residual, not even its group means."""


class StaleHandle(RuntimeError):
    """A handle matches no residual of its page pool: freed already, or never stored."""


def make_pool(
    name: str,
    *,
    budget: int | None,
    growth_share: float | None,
    growth_nbytes: int | None,
    executions_in_flight: int,
    backward_once: bool,
    packer: str,
) -> Any:
    """Makes a pool, which lives as long as the returned object.

    Args:
        name: The name that custom calls use to find it, unique among pools in use.
        budget: The most bytes that it takes, or None for no limit.
        growth_share: It grows by this share of recent peak use, or None.
        growth_nbytes: It grows by this number of bytes, or None.
        executions_in_flight: An execution is over when this many newer executions have
            started on its device.
        backward_once: Whether to free residuals once the backward pass has read them.
        packer: Which processor packs for GPU programs: "auto", "gpu" or "cpu".

    Raises:
        ValueError: Another pool in use has the name.
    """
    return _library.load().Pool(
        name,
        budget=budget,
        growth_share=growth_share,
        growth_nbytes=growth_nbytes,
        executions_in_flight=executions_in_flight,
        backward_once=backward_once,
        packer=packer,
    )


def pool_hash(name: str) -> int:
    """Returns the 64-bit hash that custom calls carry in place of a pool's name."""
    return _library.load().pool_hash(name)


# Number of uint32 in a handle.
HANDLE_SIZE = 4


def pool_put(
    x: Array,
    seed: Array,
    *,
    pool: int,
    site: int,
    bits: int,
    max_bits: int,
    block_size: int,
    stochastic: bool,
    columns: int = 0,
) -> Array:
    """Puts batches of rows into a page pool: `xla_ffi/README.md`, sections 2 to 6.

    It makes the same codes as `pack_affine`, with the number of bits that the pool
    chooses.

    Args:
        x: float32, bfloat16 or float16 `[*batch, m, n]`; `[m, n]` is one entry.
        seed: uint32 scalar; not read if `stochastic` is false.
        pool: Hash of the pool's name, an unsigned 64-bit number.
        site: Hash of the residual id, an unsigned 64-bit number.
        bits: Bits of a code unless the pool has others set or allocated: 1, 2, 4 or 8.
        max_bits: The most bits of a code: 1, 2, 4 or 8.
        block_size: Elements that share a scale: 64, 128, 256, 512 or 1024.
        stochastic: Whether to round codes stochastically (unbiased) or to nearest.
        columns: The columns of a row, a divisor of `n`; 0 for groups of consecutive
            elements.

    Returns:
        Handles, uint32 `[*batch, 4]`. The pool frees entries some time after the
        execution that put them. A handle is invalid in other processes.

    Raises:
        TypeError: `x` or `seed` has another dtype.
        ValueError: `x` has no rows, `seed` is not a scalar, or a parameter is not in
            its set.
    """
    return pool_put_p.bind(
        x,
        seed,
        pool=pool,
        site=site,
        bits=bits,
        max_bits=max_bits,
        block_size=block_size,
        stochastic=stochastic,
        columns=columns,
    )


def pool_get(
    handle: Array,
    *after: Array,
    pool: int,
    rows: tuple[int, int],
    dtype: np.dtype,
    block_size: int,
    columns: int = 0,
    reads: int = 0,
) -> Array:
    """Decodes an entry from its remaining bit planes; may be called repeatedly.

    A handle of zeros decodes to zeros. JAX makes such handles for branches that are not
    taken.

    Args:
        handle: uint32 `[*batch, 4]`.
        *after: Arrays of any shape that are computed first. They are not read.
        pool: The argument of `pool_put`.
        rows: `(m, n)`, the shape of the entry.
        dtype: The dtype of the entry.
        block_size: The argument of `pool_put`.
        columns: The argument of `pool_put`.
        reads: How often one backward pass reads the entry; 0 if unknown. After this
            many reads, a collection frees the entry.

    Returns:
        An array `[*batch, m, n]` of `dtype`.

    Raises:
        TypeError: An operand or `dtype` is not of the dtypes above.
        ValueError: The shapes do not fit the parameters.
    """
    return pool_get_p.bind(
        handle,
        *filter(can_pass_through, after),
        pool=pool,
        rows=rows,
        dtype=jnp.dtype(dtype),
        block_size=block_size,
        columns=columns,
        reads=reads,
    )


def pool_note(
    sensitivities: Array, *after: Array, pool: int, sites: tuple[int, ...]
) -> Array:
    """Passes the measurements of a backward pass to a page pool.

    Args:
        sensitivities: float32 `[*batch, n + 1]`: for each residual the variance of the
            gradient at 1 bit and a mean squared group range of 1; then the squared norm
            of the gradient. Rows are added up.
        *after: Arrays of any shape that are computed first. They are not read.
        pool: Hash of the pool's name.
        sites: Hashes of `n` residual ids.

    Returns:
        A uint8 scalar. The call is made only if something depends on this scalar.

    Raises:
        TypeError: `sensitivities` has another dtype.
        ValueError: `sensitivities` does not have `n + 1` columns.
    """
    return pool_note_p.bind(
        sensitivities, *filter(can_pass_through, after), pool=pool, sites=sites
    )


def _note_abstract_eval(
    sensitivities: Any, *after: Any, pool: int, sites: tuple[int, ...]
) -> Any:
    dtypes = (jnp.dtype(jnp.float32),)
    check_dtype("pool_note", "sensitivities", sensitivities.dtype, dtypes)
    if sensitivities.shape[-1:] != (len(sites) + 1,):
        raise ValueError(
            f"pool_note: `sensitivities` must be `[*batch, {len(sites) + 1}]`, but has "
            f"{sensitivities.shape}."
        )
    return sensitivities.update(shape=(), dtype=jnp.dtype(jnp.uint8), weak_type=False)


def _note_attributes(*, pool: int, sites: tuple[int, ...]) -> dict[str, Any]:
    return {
        "pool": _signed(pool),
        "sites": np.array([_signed(site) for site in sites], np.int64),
    }


def _batch_note(
    operands: Sequence[Array], axes: Sequence[int | None], **params: Any
) -> tuple[Array, None]:
    sensitivities, *after = operands
    if axes[0] is not None:
        sensitivities = jnp.moveaxis(sensitivities, axes[0], 0)
    return pool_note_p.bind(sensitivities, *after, **params), None


def _put_abstract_eval(
    x: Any,
    seed: Any,
    *,
    pool: int,
    site: int,
    bits: int,
    max_bits: int,
    block_size: int,
    stochastic: bool,
    columns: int,
) -> Any:
    for name, value in (("bits", bits), ("max_bits", max_bits)):
        check_parameters("pool_put", value, block_size)
        if value == 3:
            raise ValueError(f"pool_put: `{name}` must be one of (1, 2, 4, 8), not 3.")
    check_dtype("pool_put", "x", x.dtype, DTYPES)
    check_dtype("pool_put", "seed", seed.dtype, (jnp.dtype(jnp.uint32),))
    if x.ndim < 2:
        raise ValueError(f"pool_put: `x` must be `[*batch, m, n]`, but has {x.shape}.")
    if seed.shape != ():
        raise ValueError(f"pool_put: `seed` must be a scalar, not {seed.shape}.")
    check_columns("pool_put", columns, x.shape[-1])
    _refuse_explicit_axes(x)
    return x.update(
        shape=(*x.shape[:-2], HANDLE_SIZE),
        dtype=jnp.dtype(jnp.uint32),
        weak_type=False,
    )


def _get_abstract_eval(
    handle: Any,
    *after: Any,
    pool: int,
    rows: tuple[int, int],
    dtype: np.dtype,
    block_size: int,
    columns: int,
    reads: int,
) -> Any:
    check_parameters("pool_get", 1, block_size)
    check_dtype("pool_get", "dtype", dtype, DTYPES)
    check_dtype("pool_get", "handle", handle.dtype, (jnp.dtype(jnp.uint32),))
    if handle.ndim < 1 or handle.shape[-1] != HANDLE_SIZE:
        raise ValueError(
            f"pool_get: `handle` must be `[*batch, {HANDLE_SIZE}]`, but has "
            f"{handle.shape}."
        )
    check_columns("pool_get", columns, rows[-1])
    _refuse_explicit_axes(handle)
    return handle.update(
        shape=(*handle.shape[:-1], *rows), dtype=dtype, weak_type=False
    )


def _refuse_explicit_axes(x: Any) -> None:
    if not x.sharding.mesh.empty and any(axes is not None for axes in x.sharding.spec):
        _refuse_division()


def _refuse_division(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        "A `dafjax.stores.PagePool` does not serve programs that XLA divides among "
        "devices: the entries of each device would need handles of their own. Use "
        "`dafjax.stores.Arrays()` there, or divide the program yourself with "
        "`jax.shard_map`."
    )


def _refuse_platform(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        "A `dafjax.stores.PagePool` is in the memory of the host and serves programs "
        "for CPUs and, where dafjax was built with CUDA (`dafjax.cuda_status()`), for "
        "NVIDIA GPUs. Use `dafjax.stores.Arrays()` on this platform."
    )


def _put_attributes(
    *, pool: int, site: int, stochastic: bool, **code: int
) -> dict[str, Any]:
    return {
        **{name: np.int64(value) for name, value in code.items()},
        "pool": _signed(pool),
        "site": _signed(site),
        "stochastic": np.int64(stochastic),
    }


def _get_attributes(
    *, pool: int, rows: tuple[int, int], dtype: np.dtype, **code: int
) -> dict[str, Any]:
    return {
        **{name: np.int64(value) for name, value in code.items()},
        "pool": _signed(pool),
    }


def _signed(number: int) -> np.int64:
    """Returns the signed number of the same 64 bits, because attributes are signed."""
    return np.uint64(number).astype(np.int64)


def _batch_put(
    operands: Sequence[Array], axes: Sequence[int | None], **params: Any
) -> tuple[Array, int]:
    x, seed = operands
    x = to_front(x, axes[0], batch_size(operands, axes))
    if axes[1] is None:
        return pool_put_p.bind(x, seed, **params), 0
    # The custom call takes one seed, so entries with different seeds go one by one.
    handles = lax.map(
        lambda entry: pool_put_p.bind(*entry, **params),
        (x, jnp.moveaxis(seed, axes[1], 0)),
    )
    return handles, 0


def _batch_get(
    operands: Sequence[Array], axes: Sequence[int | None], **params: Any
) -> tuple[Array, int | None]:
    handle, *after = operands
    if axes[0] is None:
        return pool_get_p.bind(*operands, **params), None
    handle = jnp.moveaxis(handle, axes[0], 0)
    return pool_get_p.bind(handle, *after, **params), 0


pool_put_p: Primitive = make_primitive(
    "dafjax_pool_put",
    abstract_eval=_put_abstract_eval,
    reference=_refuse_platform,
    multiple_results=False,
    attributes=_put_attributes,
    division=_refuse_division,
)
pool_get_p: Primitive = make_primitive(
    "dafjax_pool_get",
    abstract_eval=_get_abstract_eval,
    reference=_refuse_platform,
    multiple_results=False,
    attributes=_get_attributes,
    division=_refuse_division,
)
pool_note_p: Primitive = make_primitive(
    "dafjax_pool_note",
    abstract_eval=_note_abstract_eval,
    reference=_refuse_platform,
    multiple_results=False,
    attributes=_note_attributes,
    division=_refuse_division,
)
batching.primitive_batchers[pool_note_p] = _batch_note
batching.primitive_batchers[pool_put_p] = _batch_put
batching.primitive_batchers[pool_get_p] = _batch_get
refuse_derivatives(pool_put_p, num_data=2)
refuse_derivatives(pool_get_p, num_data=1)
refuse_derivatives(pool_note_p, num_data=1)
