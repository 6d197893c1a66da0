"""Ledgers: accumulators of backward statistics, and the call that adds to them."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching

from dafjax._native import _library
from dafjax._native._codes import check_dtype
from dafjax._native._primitive import (
    CustomCall,
    DivisionRule,
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
