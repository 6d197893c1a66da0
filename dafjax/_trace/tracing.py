"""Traces functions, and searches whole programs."""

import collections
import math
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
from jax._src import config
from jax._src.core import jaxprs_in_params, trace_ctx, trace_state_clean
from jax._src.interpreters.partial_eval import DynamicJaxprTrace
from jax.extend.core import ClosedJaxpr as ClosedJaxpr

from dafjax._trace.coming import as_before
from dafjax._trace.equation import place_of


def trace(
    fun: Callable[..., Any], leaves: Sequence[Any]
) -> tuple[ClosedJaxpr, tuple[Any, ...], Any]:
    """Traces a function of flat arguments; values that it closes over become arguments.

    Args:
        fun: The function. It may return any pytree of arrays.
        leaves: Its arguments, or their shapes and dtypes.

    Returns:
        The traced function, which takes the values closed over before the arguments;
        the values closed over; the structure of the result.
    """
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*leaves)
    jaxpr = as_before(closed.jaxpr)
    hoisted = jaxpr.replace(
        constvars=[],
        invars=[*jaxpr.constvars, *jaxpr.invars],
        debug_info=jaxpr.debug_info._replace(arg_names=None, result_paths=None),
    )
    return (
        ClosedJaxpr(hoisted, ()),
        tuple(closed.consts),
        jax.tree.structure(shapes),
    )


def as_function(closed: ClosedJaxpr) -> Callable[..., list[Any]]:
    """Returns a program as a function with flat arguments and a flat result."""
    return jex_core.jaxpr_as_fun(closed)


def trace_context() -> Any:
    """Returns everything that a trace depends on beside its arguments, hashable.

    This includes settings, such as `jax_enable_x64` and the default matmul precision,
    and the axes that `vmap` and `shard_map` have named.
    """
    return config.trace_context()


def is_staging() -> bool:
    """Returns whether operations are recorded in a jaxpr, and none is run or mapped."""
    return isinstance(trace_ctx.trace, DynamicJaxprTrace)


def is_tracing() -> bool:
    """Returns whether JAX is running a transformation."""
    return not trace_state_clean()


def largest_nbytes(jaxpr: jex_core.Jaxpr) -> int:
    """Returns the bytes of the largest value that a program computes, at any depth.

    0 if it computes none.
    """
    largest = 0
    for eqn in jaxpr.eqns:
        made = (nbytes_of(var.aval) for var in eqn.outvars)
        bodies = map(largest_nbytes, jaxprs_in_params(eqn.params))
        largest = max((largest, *made, *bodies))
    return largest


def nbytes_of(aval: Any) -> int:
    """Returns the bytes of an array; 0 for dtypes without a size, such as keys."""
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 0)


def count_calls(closed: ClosedJaxpr) -> collections.Counter[str]:
    """Counts how often a program calls each function that `jax.jit` wraps, by name.

    A call in the body of a `scan` counts once for each iteration. JAX may split a
    function, to move the part that is the same in every iteration out of a loop. Then
    only the largest part counts.
    """
    calls: dict[str, collections.Counter[int]] = {}

    def visit(jaxpr: jex_core.Jaxpr, times: int) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("jit", "pjit"):
                num_equations = len(eqn.params["jaxpr"].eqns)
                of_name = calls.setdefault(eqn.params["name"], collections.Counter())
                of_name[num_equations] += times
            length = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            for body in jaxprs_in_params(eqn.params):
                visit(body, times * length)

    visit(closed.jaxpr, 1)
    return collections.Counter({name: n[max(n)] for name, n in calls.items()})


def count_live(closed: ClosedJaxpr, reader: str, maker: str) -> list[tuple[Any, int]]:
    """Counts, for each reader in a program, how many copies of its values are live.

    If one loop makes values and another reads them, the first stacks them. If a loop
    both makes and reads values, as a loop over micro-batches does, only the values of
    one iteration are live.

    Args:
        closed: The program.
        reader: Name of the primitive that reads.
        maker: Name of the primitive that makes.

    Returns:
        The equations that read, each with the number of iterations whose values are
        live at once.
    """

    def visit(jaxpr: jex_core.Jaxpr) -> tuple[bool, list[tuple[Any, int]]]:
        makes, counts = False, []
        for eqn in jaxpr.eqns:
            makes |= eqn.primitive.name == maker
            if eqn.primitive.name == reader:
                counts.append((eqn, 1))
            length = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            in_bodies = list(map(visit, jaxprs_in_params(eqn.params)))
            # The equation comes from `lax.platform_dependent`: only one body runs.
            if eqn.params.get("branches_platforms"):
                makes_inside = any(makes for makes, _ in in_bodies)
                in_bodies = [(makes_inside, _most_of_each(c for _, c in in_bodies))]
            for makes_inside, inside in in_bodies:
                times = 1 if makes_inside else length
                makes |= makes_inside
                counts += [(inner, n * times) for inner, n in inside]
        return makes, counts

    return visit(closed.jaxpr)[1]


def _most_of_each(branches: Iterable[list[tuple[Any, int]]]) -> list[tuple[Any, int]]:
    """Returns the counts of the branches, merged: for equal equations, the largest."""
    most: dict[Any, list[tuple[Any, int]]] = {}
    for counts in branches:
        alike: dict[Any, list[tuple[Any, int]]] = {}
        for eqn, n in counts:
            alike.setdefault(frozenset(eqn.params.items()), []).append((eqn, n))
        for key, found in alike.items():
            known = most.get(key, [])
            most[key] = max(known, found, key=lambda pairs: sum(n for _, n in pairs))
    return [pair for found in most.values() for pair in found]


def names_in(closed: ClosedJaxpr, *, with_primitives: bool) -> frozenset[str]:
    """Returns the names of values and scopes of a program, at any depth.

    Args:
        closed: The program.
        with_primitives: Whether to add the names that listings show.
    """
    names: set[str] = set()

    def visit(jaxpr: jex_core.Jaxpr) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "name":
                names.add(eqn.params["name"])
            place = place_of(eqn)
            names.update(names_of_place(place))
            if with_primitives:
                names.add(listed_name(place, eqn.params.get("name", "")))
                names.add(listed_name(place, eqn.primitive.name))
            for body in jaxprs_in_params(eqn.params):
                visit(body)

    visit(closed.jaxpr)
    return frozenset(names)


def names_of_place(place: str) -> tuple[str, ...]:
    """Returns a place in the model and each part of its path."""
    return (place, *place.split("/")) if place else ()


def listed_name(place: str, primitive: str) -> str:
    """Returns the name of a value in listings: its place and what computes it."""
    return "/".join(part for part in (place, primitive) if part)


def has_primitive(closed: ClosedJaxpr, names: Container[str]) -> bool:
    """Returns whether a program runs any of the named primitives, at any depth."""

    def found(jaxpr: jex_core.Jaxpr) -> bool:
        return any(
            eqn.primitive.name in names or any(map(found, jaxprs_in_params(eqn.params)))
            for eqn in jaxpr.eqns
        )

    return found(closed.jaxpr)
