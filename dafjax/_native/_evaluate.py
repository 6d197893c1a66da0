"""A tape: a sequence of operations on scalars, run by one custom call."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching

from dafjax._native._affine import check_dtype
from dafjax._native._primitive import make_primitive, refuse_derivatives
from dafjax._native._sharding import DivisionRule, batch_of, rows_like
from dafjax._typing import Array


# In the order of the enumeration in `xla_ffi/format/tape.h`.
OPERATIONS = ("add", "multiply", "divide")
_PLACE_BITS = 30


def tape_entry(operation: str, first: int, second: int) -> int:
    """Returns an entry of a tape.

    Args:
        operation: One of `OPERATIONS`.
        first: The place of the first operand. The given values have the first places;
            the results of the entries follow.
        second: The place of the second operand.

    Raises:
        ValueError: A place is negative, or 2^30 or more.
    """
    for place in (first, second):
        if not 0 <= place < 1 << _PLACE_BITS:
            raise ValueError(
                f"tape_entry: a place must be 0 to 2^{_PLACE_BITS} - 1, not {place}."
            )
    number = OPERATIONS.index(operation)
    return number << 2 * _PLACE_BITS | first << _PLACE_BITS | second


def evaluate(given: Array, *, tape: tuple[int, ...]) -> Array:
    """Runs a tape: `xla_ffi/README.md`, section 11.

    XLA:CPU compiles only about a hundred scalar operations per second, and each becomes
    a kernel or a part of one. A tape is a single call.

    Args:
        given: float32 `[*batch, m]`.
        tape: The `n` operations, as entries that `tape_entry` returned.

    Returns:
        float32 `[*batch, m + n]`: the given values, then the results.

    Raises:
        TypeError: `given` is not float32.
        ValueError: `given` is a scalar, or an entry reads its own or a later result.
    """
    return evaluate_p.bind(given, tape=tape)


def _abstract_eval(given: Any, *, tape: tuple[int, ...]) -> Any:
    check_dtype("evaluate", "given", given.dtype, (jnp.dtype(jnp.float32),))
    if given.ndim < 1:
        raise ValueError("evaluate: `given` must have rows, but it is a scalar.")
    count = given.shape[-1]
    for number, entry in enumerate(tape):
        operation, *operands = _parts(entry)
        if operation >= len(OPERATIONS) or max(operands) >= count + number:
            raise ValueError(
                f"evaluate: entry {number} of `tape`, {entry}, is no operation on what "
                f"comes before; make entries with `tape_entry`."
            )
    return rows_like(given, count + len(tape), jnp.dtype(jnp.float32))


def _parts(entry: int) -> tuple[int, int, int]:
    mask = (1 << _PLACE_BITS) - 1
    return entry >> 2 * _PLACE_BITS, entry >> _PLACE_BITS & mask, entry & mask


def _reference(given: Array, *, tape: tuple[int, ...]) -> Array:
    values = [given[..., place] for place in range(given.shape[-1])]
    for entry in tape:
        operation, first, second = _parts(entry)
        function = getattr(jnp, OPERATIONS[operation])
        values.append(function(values[first], values[second]))
    return jnp.stack(values, axis=-1) if values else given


def _attributes(*, tape: tuple[int, ...]) -> dict[str, Any]:
    return {"tape": np.array(tape, np.int64)}


def _divide(given: Any, **_: Any) -> DivisionRule:
    batch = batch_of(given)
    return DivisionRule(
        operands=((*batch, "m"),), results=((*batch, "v"),), whole=("m", "v")
    )


def _batch(
    operands: Sequence[Array], axes: Sequence[int], *, tape: tuple[int, ...]
) -> tuple[Array, int]:
    return evaluate(jnp.moveaxis(operands[0], axes[0], 0), tape=tape), 0


evaluate_p: Primitive = make_primitive(
    "dafjax_evaluate",
    abstract_eval=_abstract_eval,
    reference=_reference,
    multiple_results=False,
    attributes=_attributes,
    division=_divide,
)
batching.primitive_batchers[evaluate_p] = _batch
refuse_derivatives(evaluate_p, num_data=1)
