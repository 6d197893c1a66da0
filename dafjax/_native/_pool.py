"""Page pools, ledgers, and the custom calls of programs that use them.

A ledger accumulates statistics of backward passes.

The calls of a pool put rows into it as affine codes, and get them back. They have no
effects for XLA: it drops a call whose result is unused, and then the pool has no entry.
The number of bits of a code is not part of the program; the pool decides it when the
call runs.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching

from dafjax._native import _library
from dafjax._native._codes import (
    DTYPES,
    UINT32,
    check_dtype,
    check_rows_and_seed,
    int_attributes,
)
from dafjax._native._format import Format
from dafjax._native._primitive import (
    CustomCall,
    DivisionRule,
    batch_rows,
    batch_seeded,
    can_pass_through,
    independent,
    make_primitive,
    refuse_derivatives,
    retyped,
)
from dafjax._numbers import Array


# The primitive's name. Readers of a traced program use it to find its residual ids.
LEDGER_NOTE = "dafjax_ledger_note"


def make_ledger(name: str, sites: Sequence[int]) -> Any:
    """Makes a ledger, which lives as long as the returned object.

    Args:
        name: The name that custom calls use to find it, unique among ledgers in use.
        sites: Hashes of the residual ids that it has sums for.

    Raises:
        ValueError: Another ledger in use has the name.
    """
    return _library.load().Ledger(name, list(sites))


def ledger_note(
    sensitivities: Array,
    *after: Array,
    ledger: int,
    sites: tuple[int, ...],
    facts: tuple[Hashable, ...],
) -> Array:
    """Adds the measurements of a backward pass to a ledger.

    Args:
        sensitivities: float32 `[*batch, n + 1]`: for each residual its sensitivity, the
            variance of the gradient at 1 bit; then the squared norm of the gradient.
            Rows are added up.
        *after: Arrays of any shape that are computed first. They are not read.
        ledger: Hash of the ledger's name, an unsigned 64-bit number. If the ledger no
            longer exists, nothing happens.
        sites: Hashes of `n` residual ids, also unsigned 64-bit numbers.
        facts: Facts about each residual for readers of the traced program. The custom
            call does not carry them.

    Returns:
        A uint8 scalar. The call is made only if something depends on this scalar. If
        XLA divides the program among devices, each device makes the call.
    """
    assert len(facts) == len(sites)
    after = tuple(filter(can_pass_through, after))
    return ledger_note_p.bind(
        sensitivities, *after, ledger=ledger, sites=sites, facts=facts
    )


def make_note(
    name: str, reference: Callable[..., Array], call: CustomCall
) -> Primitive:
    """Makes a primitive that adds up rows of measurements, and returns a scalar.

    Args:
        name: Name of the primitive, which has a parameter `sites`.
        reference: Its function where there is no custom call.
        call: The custom call.
    """

    def abstract_eval(
        sensitivities: Any, *after: Any, sites: tuple[int, ...], **_: Any
    ) -> Any:
        del after
        function = name.removeprefix("dafjax_")
        float32 = jnp.dtype(jnp.float32)
        check_dtype(function, "sensitivities", sensitivities.dtype, (float32,))
        if sensitivities.shape[-1:] != (len(sites) + 1,):
            raise ValueError(
                f"{function}: `sensitivities` must be `[*batch, {len(sites) + 1}]`, "
                f"but has {sensitivities.shape}."
            )
        dtype = jnp.dtype(jnp.uint8)
        return retyped(sensitivities, (), dtype=dtype, weak_type=False)

    def batch(
        operands: Sequence[Array], axes: Sequence[int | None], **params: Any
    ) -> tuple[Array, None]:
        sensitivities, *after = operands
        if axes[0] is not None:
            sensitivities = jnp.moveaxis(sensitivities, axes[0], 0)
        return note_p.bind(sensitivities, *after, **params), None

    note_p = make_primitive(
        name, abstract_eval=abstract_eval, reference=reference, call=call
    )
    batching.primitive_batchers[note_p] = batch
    refuse_derivatives(note_p, num_data=1)
    return note_p


def signed(hashes: Any) -> Any:
    """Returns the signed numbers of the same 64 bits, because attributes are signed."""
    return np.array(hashes, np.uint64).astype(np.int64)


def _attributes(*, ledger: int, sites: tuple[int, ...], **_: Any) -> dict[str, Any]:
    return {"ledger": np.int64(signed(ledger)), "sites": signed(sites)}


def _divide(sensitivities: Any, *after: Any, **_: Any) -> DivisionRule:
    # No dimension is divided: every device has the sums over all devices.
    names = tuple(f"n{axis}" for axis in range(sensitivities.ndim))
    return DivisionRule((names, *independent(after)), results=((),), whole=names)


def _note_by_callback(
    sensitivities: Array, *after: Array, ledger: int, sites: tuple[int, ...], **_: Any
) -> Array:
    """Adds to the ledger by a Python callback, where there is no custom call."""
    sensitivities = lax.optimization_barrier((sensitivities, *after))[0]
    note = functools.partial(_note_on_host, ledger, sites)
    return jax.pure_callback(note, jax.ShapeDtypeStruct((), jnp.uint8), sensitivities)


def _note_on_host(
    ledger: int, sites: tuple[int, ...], sensitivities: Any
) -> np.ndarray:
    rows = np.asarray(sensitivities, np.float32).reshape(-1, len(sites) + 1)
    _library.load().note_ledger(ledger, list(sites), rows)
    return np.zeros((), np.uint8)


ledger_note_p: Primitive = make_note(
    LEDGER_NOTE, _note_by_callback, CustomCall(LEDGER_NOTE, _divide, _attributes)
)


class PoolExhausted(MemoryError):
    """The budget of a page pool cannot hold a residual, not even its group means."""


class StaleHandle(RuntimeError):
    """A handle matches no residual of its page pool: freed already, or never stored."""


def make_pool(name: str, **options: Any) -> Any:
    """Makes a pool, which lives as long as the returned object.

    Its name, by which custom calls find it, must be unique among pools in use.
    `stores.PagePool` has the options, with `growth` as `growth_share` or as
    `growth_nbytes`.
    """
    return _library.load().Pool(name, **options)


def pool_hash(name: str) -> int:
    """Returns the 64-bit hash that custom calls carry in place of a pool's name."""
    return _library.load().pool_hash(name)


# Number of uint32 in a handle.
HANDLE_SIZE = 4


def pool_put(
    x: Array, seed: Array, *, pool: int, site: int, format: Format, max_bits: int
) -> Array:
    """Puts batches of rows into a page pool: `xla_ffi/README.md`, sections 2 to 6.

    It makes the same codes as `pack_affine`, with the number of bits that the pool
    chooses.

    Args:
        x: float32, bfloat16 or float16 `[*batch, m, n]`; `[m, n]` is one entry.
        seed: uint32 scalar; not read if the format rounds to nearest.
        pool: Hash of the pool's name, an unsigned 64-bit number.
        site: Hash of the residual id, an unsigned 64-bit number.
        format: The code: not dithered, and not of 3 bits. Its bits apply unless the
            pool has others set or allocated.
        max_bits: The most bits of a code: 1, 2, 4 or 8.

    Returns:
        Handles, uint32 `[*batch, 4]`. The pool frees entries some time after the
        execution that put them. A handle is invalid in other processes.
    """
    return pool_put_p.bind(
        x, seed, pool=pool, site=site, format=format, max_bits=max_bits
    )


def pool_get(
    handle: Array,
    *after: Array,
    pool: int,
    rows: tuple[int, int],
    dtype: np.dtype,
    format: Format,
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
        format: The argument of `pool_put`; its bits do not matter.
        reads: How often one backward pass reads the entry; 0 if unknown. After this
            many reads, a collection frees the entry.

    Returns:
        An array `[*batch, m, n]` of `dtype`.
    """
    return pool_get_p.bind(
        handle,
        *filter(can_pass_through, after),
        pool=pool,
        rows=rows,
        dtype=jnp.dtype(dtype),
        format=format,
        reads=reads,
    )


def pool_note(
    sensitivities: Array, *after: Array, pool: int, sites: tuple[int, ...]
) -> Array:
    """Passes the measurements of a backward pass to a page pool.

    As `ledger_note`, but the variances are for a mean squared group range of 1.
    """
    after = tuple(filter(can_pass_through, after))
    return pool_note_p.bind(sensitivities, *after, pool=pool, sites=sites)


def _put_type(
    x: Any, seed: Any, *, pool: int, site: int, format: Format, max_bits: int
) -> Any:
    del pool, site
    check_rows_and_seed("pool_put", x, seed)
    if x.ndim < 2:
        raise ValueError(f"pool_put: `x` must be `[*batch, m, n]`, but has {x.shape}.")
    format.check("pool_put", x.shape[-1])
    for name, value in (("bits", format.bits), ("max_bits", max_bits)):
        if value not in (1, 2, 4, 8):
            raise ValueError(
                f"pool_put: `{name}` must be one of (1, 2, 4, 8), not {value}."
            )
    assert not format.dithered, "Lost planes leave no codes to subtract noise from."
    _refuse_explicit_axes(x)
    shape = (*x.shape[:-2], HANDLE_SIZE)
    return retyped(x, shape, dtype=UINT32, weak_type=False)


def _get_type(
    handle: Any,
    *after: Any,
    rows: tuple[int, int],
    dtype: np.dtype,
    format: Format,
    **_: Any,
) -> Any:
    del after
    check_dtype("pool_get", "dtype", dtype, DTYPES)
    check_dtype("pool_get", "handle", handle.dtype, (UINT32,))
    if handle.ndim < 1 or handle.shape[-1] != HANDLE_SIZE:
        raise ValueError(
            f"pool_get: `handle` must be `[*batch, {HANDLE_SIZE}]`, but has "
            f"{handle.shape}."
        )
    format.check("pool_get", rows[-1])
    _refuse_explicit_axes(handle)
    shape = (*handle.shape[:-1], *rows)
    return retyped(handle, shape, dtype=dtype, weak_type=False)


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
    *, pool: int, site: int, format: Format, max_bits: int
) -> dict[str, Any]:
    return int_attributes(
        pool=signed(pool),
        site=signed(site),
        bits=format.bits,
        max_bits=max_bits,
        block_size=format.block_size,
        columns=format.columns,
        stochastic=format.stochastic,
    )


def _get_attributes(
    *, pool: int, format: Format, reads: int, **_: Any
) -> dict[str, Any]:
    return int_attributes(
        pool=signed(pool),
        block_size=format.block_size,
        columns=format.columns,
        reads=reads,
    )


def _note_attributes(*, pool: int, sites: tuple[int, ...]) -> dict[str, Any]:
    return {**int_attributes(pool=signed(pool)), "sites": signed(sites)}


pool_put_p: Primitive = make_primitive(
    "dafjax_pool_put",
    abstract_eval=_put_type,
    reference=_refuse_platform,
    call=CustomCall("dafjax_pool_put", _refuse_division, _put_attributes),
)
pool_get_p: Primitive = make_primitive(
    "dafjax_pool_get",
    abstract_eval=_get_type,
    reference=_refuse_platform,
    call=CustomCall("dafjax_pool_get", _refuse_division, _get_attributes),
)
pool_note_p: Primitive = make_note(
    "dafjax_pool_note",
    _refuse_platform,
    CustomCall("dafjax_pool_note", _refuse_division, _note_attributes),
)
batch_seeded(pool_put_p)
batch_rows(pool_get_p, lambda **_: 1)
refuse_derivatives(pool_put_p, num_data=2)
refuse_derivatives(pool_get_p, num_data=1)
