"""Ledgers: accumulators of backward statistics, and the call that adds to them."""

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching
from jax.sharding import PartitionSpec

from dafjax._native import _library
from dafjax._native._codes import check_dtype
from dafjax._native._primitive import (
    DivisionRule,
    can_pass_through,
    independent,
    make_primitive,
    refuse_derivatives,
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
    importances: Array,
    *after: Array,
    ledger: int,
    sites: tuple[int, ...],
    facts: tuple[Hashable, ...],
) -> Array:
    """Adds the measurements of a backward pass to a ledger.

    Args:
        importances: float32 `[*batch, n + 1]`: for each residual its sensitivity, the
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

    Raises:
        TypeError: `importances` has another dtype.
        ValueError: `importances` does not have `n + 1` columns.
    """
    return ledger_note_p.bind(
        importances,
        *filter(can_pass_through, after),
        ledger=ledger,
        sites=sites,
        facts=facts,
    )


def _abstract_eval(
    importances: Any,
    *after: Any,
    ledger: int,
    sites: tuple[int, ...],
    facts: tuple[Hashable, ...],
) -> Any:
    del after, ledger
    dtypes = (jnp.dtype(jnp.float32),)
    check_dtype("ledger_note", "importances", importances.dtype, dtypes)
    if importances.shape[-1:] != (len(sites) + 1,) or len(facts) != len(sites):
        raise ValueError(
            f"ledger_note: `importances` must be `[*batch, {len(sites) + 1}]` and "
            f"`facts` as many as sites, but they are {importances.shape} and "
            f"{len(facts)}."
        )
    return importances.update(
        shape=(),
        dtype=jnp.dtype(jnp.uint8),
        weak_type=False,
        sharding=importances.sharding.update(spec=PartitionSpec()),
    )


def _attributes(
    *, ledger: int, sites: tuple[int, ...], facts: tuple[Hashable, ...]
) -> dict[str, Any]:
    del facts
    return {
        # Attributes are signed, so pass the signed numbers of the same 64 bits.
        "ledger": np.uint64(ledger).astype(np.int64),
        "sites": np.array(sites, np.uint64).astype(np.int64),
    }


def _divide(importances: Any, *after: Any, **_: Any) -> DivisionRule:
    # No dimension is divided: every device has the sums over all devices.
    names = tuple(f"n{axis}" for axis in range(importances.ndim))
    return DivisionRule(
        operands=(names, *independent(after)), results=((),), whole=names
    )


def _batch(
    operands: Sequence[Array], axes: Sequence[int | None], **params: Any
) -> tuple[Array, None]:
    importances, *after = operands
    if axes[0] is not None:
        importances = jnp.moveaxis(importances, axes[0], 0)
    return ledger_note_p.bind(importances, *after, **params), None


def _note_by_callback(
    importances: Array,
    *after: Array,
    ledger: int,
    sites: tuple[int, ...],
    facts: tuple[Hashable, ...],
) -> Array:
    """Adds to the ledger by a Python callback, where there is no custom call."""
    del facts
    importances, *_ = lax.optimization_barrier((importances, *after))
    note = functools.partial(_note_on_host, ledger, sites)
    return jax.pure_callback(note, jax.ShapeDtypeStruct((), jnp.uint8), importances)


def _note_on_host(ledger: int, sites: tuple[int, ...], importances: Any) -> np.ndarray:
    rows = np.asarray(importances, np.float32).reshape(-1, len(sites) + 1)
    _library.load().note_ledger(ledger, list(sites), rows)
    return np.zeros((), np.uint8)


ledger_note_p: Primitive = make_primitive(
    LEDGER_NOTE,
    abstract_eval=_abstract_eval,
    reference=_note_by_callback,
    multiple_results=False,
    attributes=_attributes,
    division=_divide,
)
batching.primitive_batchers[ledger_note_p] = _batch
refuse_derivatives(ledger_note_p, num_data=1)
