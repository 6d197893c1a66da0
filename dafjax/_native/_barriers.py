"""Barriers: identities that order work, delay reads or fix layouts.

XLA undoes rematerialization unless something forces an order. On CPUs jaxlib up to
0.10.2 drops `optimization_barrier` before scheduling, so there a barrier is a custom
call, which is opaque to XLA. Inputs that the results only wait for need not be results
of this call.

XLA:GPU keeps `optimization_barrier` until it has scheduled the program and then removes
it, so there a barrier is an `optimization_barrier`. A custom call would cost memory:
its results reuse the buffers of its operands, and XLA computes nothing in place in a
buffer that several values share. But XLA drops unused results from an
`optimization_barrier`, and then nothing waits for them.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, partial_eval as pe

from dafjax._native._primitive import (
    CustomCall,
    DivisionRule,
    can_pass_through,
    independent,
    lower_as,
    make_primitive,
)
from dafjax._numbers import Array, ArrayTree, Static


def tie(
    *arrays: Array,
    num_awaited: int = 0,
    num_settled: int = 0,
    num_droppable: int = 0,
    only_on_cpus: bool = False,
) -> tuple[Array, ...]:
    """Returns its arguments unchanged; each result waits for all arguments.

    Results reuse the buffers of the operands, so nothing is copied. It has the
    derivative of the identity. Arrays of extended dtypes (PRNG keys) do not take part
    and are returned unchanged. On a GPU the other results do not wait for an argument
    whose result is unused: see `hold`.

    Args:
        *arrays: Arrays of any shape and dtype.
        num_awaited: Number of leading arrays that are barrier inputs only: the others
            wait for them. On a CPU they wait for nothing themselves, and XLA can
            compute in place in their buffers.
        num_settled: Number of trailing arrays that are late outputs: they wait for the
            others, but the others do not wait for them. On a GPU they wait for nothing,
            because XLA:GPU delays the consumers of barrier results.
        num_droppable: Number of leading arrays that JAX may drop from the barrier if
            their results are unused; the others then do not wait for them.
        only_on_cpus: Whether there is a barrier only on CPUs and where devices share
            the arrays. On one GPU a value that XLA fuses into its consumer need not
            wait, and XLA:GPU copies an operand at the point where it computes it.
    """
    operands = tuple(filter(can_pass_through, arrays))
    if not operands:
        return arrays
    settled = arrays[len(arrays) - num_settled :]
    tied = iter(
        tie_p.bind(
            *operands,
            num_awaited=sum(map(can_pass_through, arrays[:num_awaited])),
            num_settled=sum(map(can_pass_through, settled)),
            num_droppable=sum(map(can_pass_through, arrays[:num_droppable])),
            only_on_cpus=only_on_cpus,
        )
    )
    return tuple(next(tied) if can_pass_through(x) else x for x in arrays)


def hold(*arrays: Array, after: Sequence[Array]) -> tuple[Array, ...]:
    """Returns its arguments unchanged; each result waits for all arguments.

    Unlike `tie`, it is a custom call on GPUs, too. So the results also wait for
    arguments whose results are unused. Results reuse the buffers of the operands. It
    has the derivative of the identity.

    Args:
        *arrays: Arrays of any shape and dtype.
        after: Barrier inputs only: arrays that keep their own buffers.
    """
    awaited = tuple(filter(can_pass_through, after))
    operands = tuple(filter(can_pass_through, arrays))
    held = iter(
        hold_p.bind(*awaited, *operands, num_awaited=len(awaited)) if operands else ()
    )
    return tuple(next(held) if can_pass_through(x) else x for x in arrays)


def tie_tree(tree: ArrayTree, token: Array) -> tuple[ArrayTree, Array]:
    """Puts one barrier on all leaves of a pytree and a token, and returns both."""
    leaves, structure = jax.tree.flatten(tree)
    *tied, token = tie(*leaves, token)
    return jax.tree.unflatten(structure, tied), token


def _tie(
    *arrays: Array, num_settled: int, only_on_cpus: bool, **_: Static
) -> tuple[Array, ...]:
    # XLA drops an array from the barrier if nothing reads its result.
    return arrays if only_on_cpus else _tie_divided(*arrays, num_settled=num_settled)


def _tie_divided(*arrays: Array, num_settled: int, **_: Static) -> tuple[Array, ...]:
    # For divided arrays nothing is decoded inside its consumer's kernel (`_codes.py`).
    num_tied = len(arrays) - num_settled
    return (*lax.optimization_barrier(arrays[:num_tied]), *arrays[num_tied:])


def _hold(*arrays: Array, num_awaited: int) -> tuple[Array, ...]:
    return tuple(lax.optimization_barrier(arrays))[num_awaited:]


def _run_on_cpu(*arrays: Array, num_awaited: int, **_: Static) -> list[Array]:
    held = hold_p.bind(*arrays, num_awaited=num_awaited)
    return [*arrays[:num_awaited], *held]


def _pass_on(primitive: Primitive, num_dropped: Callable[..., int]) -> None:
    """Gives a primitive the derivative and the batching rule of the identity.

    Its results are its operands without the first `num_dropped`.
    """

    def jvp(
        primals: Sequence[Array], tangents: Sequence[Any], **params: Static
    ) -> tuple[Sequence[Array], Sequence[Any]]:
        dropped = num_dropped(**params)
        return primitive.bind(*primals, **params), list(tangents[dropped:])

    def batch(
        operands: Sequence[Array], axes: Sequence[int | None], **params: Static
    ) -> tuple[Sequence[Array], Sequence[int | None]]:
        return primitive.bind(*operands, **params), axes[num_dropped(**params) :]

    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batch


def _transpose(cotangents: Sequence[Any], *operands: Any, **_: Static) -> list[Any]:
    return [
        cotangent if ad.is_undefined_primal(operand) else None
        for cotangent, operand in zip(cotangents, operands, strict=True)
    ]


def _without_unused(used: list[bool], *rest: Any) -> tuple[list[bool], Any]:
    """Drops unused results of a barrier, as far as they are droppable.

    Args:
        used: Which results are used.
        *rest: The equation. Since JAX 0.12, before it: which operands are references
            that are read later. A barrier takes no references.
    """
    equation: JaxprEqn = rest[-1]
    if not any(used):
        return [False] * len(used), None
    droppable = equation.params["num_droppable"]
    keeps = [is_used or n >= droppable for n, is_used in enumerate(used)]
    changed = {
        name: sum(keeps[: equation.params[name]])
        for name in ("num_awaited", "num_droppable")
    }
    params = {**equation.params, **changed}
    kept = equation.replace(
        invars=list(itertools.compress(equation.invars, keeps)),
        outvars=list(itertools.compress(equation.outvars, keeps)),
        params=params,
    )
    return keeps, kept


def _divide_held(*avals: Any, num_awaited: int = 0) -> DivisionRule:
    dimensions = independent(avals)
    return DivisionRule(dimensions, dimensions[num_awaited:])


# Its results are its last operands: they reuse the buffers.
_CALL = CustomCall("dafjax_tie", _divide_held, aliased=True)
# Returns its operands without the first `num_awaited`. On CPUs `tie_p` lowers to it.
hold_p: Primitive = make_primitive(
    "dafjax_hold",
    abstract_eval=lambda *avals, num_awaited: avals[num_awaited:],
    reference=_hold,
    multiple_results=True,
    call=_CALL,
)
_pass_on(hold_p, lambda num_awaited: num_awaited)
tie_p: Primitive = make_primitive(
    "dafjax_tie",
    abstract_eval=lambda *avals, **_: avals,
    reference=_tie,
    multiple_results=True,
)
lower_as(tie_p, _run_on_cpu, platform="cpu")
lower_as(tie_p, _tie, where_divided=_tie_divided, platform="cuda")
_pass_on(tie_p, lambda **_: 0)
pe.dce_rules[tie_p] = _without_unused
ad.primitive_transposes[tie_p] = _transpose


def pin(x: Array) -> Array:
    """Returns its argument, and stops XLA:GPU from moving a layout change across it.

    Arguments and results of a program are row-major. XLA:GPU runs convolutions in other
    layouts, and elementwise operations in the layout of their operands. Without a
    constraint it transposes a weight first, for all computations that use it. It also
    transposes the optimizer's state of a weight, to match a transposed gradient.

    On a GPU it is a custom call that reuses the buffer of its operand. Elsewhere it is
    a no-op. It has the derivative of the identity.
    """
    return pin_p.bind(x) if can_pass_through(x) else x


def _make_identity(name: str, call: CustomCall | None = None) -> Primitive:
    """Makes a primitive of one array that is the identity on other platforms."""
    same = lambda x: x  # noqa: E731
    primitive = make_primitive(name, abstract_eval=same, reference=same, call=call)
    ad.deflinear2(primitive, lambda cotangent, _: [cotangent])
    batching.defvectorized(primitive)
    return primitive


pin_p: Primitive = _make_identity(
    "dafjax_pin", dataclasses.replace(_CALL, platforms=("cuda",))
)


def pin_late(x: Array, token: Array) -> tuple[Array, Array]:
    """Returns its arguments; XLA reads the first one only after the token is computed.

    It has the derivative of the identity. On CPUs a barrier on an argument would copy
    it. A `select` does not, if the array is copied anyway, for example into another
    layout. On GPUs a `select` would be a kernel, but a barrier costs nothing. There,
    however, XLA:GPU moves the layout that suits the consumers to before the barrier,
    and copies the array early. So the array crosses the barrier flattened: an array of
    one dimension has no layout.

    Args:
        x: An array of numbers.
        token: A scalar that is 0 at run time; XLA must not be able to infer this.

    Returns:
        The array, and a token that something must read: XLA drops unused results.
    """
    late, token = pin_late_p.bind(x, token)
    return late, token


def _wait_flat(x: Array, token: Array) -> tuple[Array, Array]:
    flat, token = lax.optimization_barrier((x.reshape(-1), token))
    return flat.reshape(x.shape), token


def _select_late(x: Array, token: Array) -> tuple[Array, Array]:
    return lax.select(token == 0, x, jnp.zeros_like(x)), token


def _wait_divided(x: Array, token: Array) -> tuple[Array, Array]:
    late, token = _select_late(x, token)
    return pin(late), token


def _batch_pin_late(
    operands: Sequence[Array], axes: Sequence[int | None]
) -> tuple[Sequence[Array], Sequence[int | None]]:
    x, token = operands
    if axes[1] is not None:
        # All batched tokens are 0, so any one will do.
        token = lax.index_in_dim(token, 0, axes[1], keepdims=False)
    return pin_late_p.bind(x, token), (axes[0], None)


pin_late_p: Primitive = make_primitive(
    "dafjax_pin_late",
    abstract_eval=lambda *avals: avals,
    reference=_select_late,
    multiple_results=True,
)
lower_as(pin_late_p, _wait_flat, where_divided=_wait_divided, platform="cuda")
_pass_on(pin_late_p, lambda: 0)
batching.primitive_batchers[pin_late_p] = _batch_pin_late


def row_major(x: Array) -> Array:
    """Returns its argument, which XLA:GPU computes in row-major order.

    Before a barrier XLA:GPU computes an array in the layout that is easiest to compute,
    and after the barrier transposes it for each matrix product that reads it. A layout
    constraint before the barrier costs nothing: the kernel that computes the array
    writes it in that layout.

    On other platforms, and where devices share the array, it is a no-op. It has the
    derivative of the identity.
    """
    return row_major_p.bind(x) if can_pass_through(x) else x


def _constrain(x: Array) -> Array:
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


row_major_p: Primitive = _make_identity("dafjax_row_major")
lower_as(row_major_p, _constrain, where_divided=lambda x: x, platform="cuda")
