"""Reads primitives of the coming JAX as those that they replace.

With `jax_remat3` (JAX 0.11 and later; later the default), `jax.checkpoint` and
`checkpoint_name` make primitives that JAX differentiates into two runs of a function,
before dafjax sees it. Those before leave the decision to whoever differentiates. With
`jax_custom_vjp3` a function with a derivative rule has another primitive, too.
"""

from collections.abc import Mapping
from typing import Any

import jax.extend.core as jex_core
from jax._src.ad_checkpoint import name_p, remat_p


def as_before(jaxpr: jex_core.Jaxpr) -> jex_core.Jaxpr:
    """Returns a program with the primitives of `jax.checkpoint` as they were before.

    It is the same object where nothing changes.
    """
    equations = [equation_as_before(eqn) for eqn in jaxpr.eqns]
    if all(new is old for new, old in zip(equations, jaxpr.eqns, strict=True)):
        return jaxpr
    return jaxpr.replace(eqns=equations)


def with_name(x: Any, name: str) -> Any:
    """Returns an array with a name, as `checkpoint_name` made it before."""
    return name_p.bind(x, name=name)


def name_of(eqn: jex_core.JaxprEqn) -> str:
    """Returns the name of an equation's primitive, of a derivative rule as before."""
    return "custom_vjp_call" if _has_rule(eqn) else eqn.primitive.name


def params_of(eqn: jex_core.JaxprEqn) -> Mapping[str, Any]:
    """Returns the parameters of an equation, the called function among them."""
    if not _has_rule(eqn):
        return eqn.params
    return {**eqn.params, "call_jaxpr": eqn.params["_prim"].traced.jaxpr}


def _has_rule(eqn: jex_core.JaxprEqn) -> bool:
    return type(eqn.params.get("_prim")).__name__ == "CustomVJPTraced"


def equation_as_before(eqn: jex_core.JaxprEqn) -> jex_core.JaxprEqn:
    """Returns an equation, and programs in it, with primitives as they were before."""
    new: Any = eqn.params.get("_prim")
    match type(new).__name__:
        case "CheckpointName":
            return eqn.replace(primitive=name_p, params={"name": new.name})
        case "RematTraced":
            body = _opened(new.jaxpr)
            if body is None:
                return eqn
            params = {
                "jaxpr": as_before(body),
                "prevent_cse": getattr(new, "prevent_cse", True),
                "differentiated": False,
                "policy": new.policy,
            }
            return eqn.replace(primitive=remat_p, params=params)
    params = {name: _as_before(value) for name, value in eqn.params.items()}
    return eqn if _are_same(params, eqn.params) else eqn.replace(params=params)


def _opened(body: Any) -> jex_core.Jaxpr | None:
    """Returns a body as `jax.checkpoint` had it before; `None` if that is impossible.

    Until JAX 0.10 bodies are closed, and their constants have no place in an open one.
    """
    is_open = isinstance(body, jex_core.Jaxpr)
    if is_open or body.consts:
        return body if is_open else None
    return body.jaxpr


def _as_before(param: Any) -> Any:
    """Returns a parameter of an equation, with programs in it as they were before."""
    if isinstance(param, (tuple, list)):
        parts = [_as_before(part) for part in param]
        same = all(new is old for new, old in zip(parts, param, strict=True))
        return param if same else type(param)(parts)
    if isinstance(param, jex_core.Jaxpr):
        return as_before(param)
    if isinstance(param, jex_core.ClosedJaxpr):
        inner = as_before(param.jaxpr)
        return param if inner is param.jaxpr else param.replace(jaxpr=inner)
    return param


def _are_same(params: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    return all(params[name] is others[name] for name in others)
