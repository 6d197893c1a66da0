"""Ledgers: sums of what backward passes measure, and the call that adds to them."""

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
from dafjax._native._affine import check_dtype
from dafjax._native._primitive import (
    can_pass_through,
    make_primitive,
    refuse_derivatives,
)
from dafjax._native._sharding import DivisionRule, independent
from dafjax._typing import Array


# The primitive's name, by which the sites of a traced program are found.
LEDGER_NOTE = "dafjax_ledger_note"


def make_ledger(name: str, sites: Sequence[int]) -> Any:
    """Makes a ledger, which lives as long as what is returned.

    Args:
        name: What custom calls find it by; no two ledgers in use share one.
        sites: Hashes of the names of the sites that it has sums for.

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
    """Adds to a ledger what a backward pass has measured.

    Args:
        importances: float32 `[*batch, n + 1]`: for each site the variance of the
            gradient at 1 bit, then the squared norm of the gradient. Rows are added up.
        *after: Arrays of any shape that are computed first. They are not read.
        ledger: Hash of the ledger's name, an unsigned number of 64 bits. If there is no
            such ledger any more, nothing happens.
        sites: Hashes of the names of `n` sites, likewise.
        facts: What a reader of the traced program learns of each site. It is no part of
            the call.

    Returns:
        A uint8 scalar. The call is made only if something depends on it. Where XLA
        divides the program among devices, each of them makes it.

    Raises:
        TypeError: `importances` has another dtype.
        ValueError: There are not `n + 1` of them.
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
        # Attributes are signed: the numbers of the same 64 bits.
        "ledger": np.uint64(ledger).astype(np.int64),
        "sites": np.array(sites, np.uint64).astype(np.int64),
    }


def _divide(importances: Any, *after: Any, **_: Any) -> DivisionRule:
    # Sums over all devices are there on each.
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
    """Has Python make the note, where there is no custom call."""
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
