"""Primitives that reduce rows to their least and greatest value or sum of squares."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from dafjax._native._affine import DTYPES, check_dtype
from dafjax._native._primitive import make_primitive
from dafjax._native._reduction_shapes import STRATEGIES, num_parts, scratch_words
from dafjax._native._sharding import DivisionRule, batch_of, rows_like
from dafjax._native._tuning import profile_for
from dafjax._typing import Array, Static


def minmax(x: Array, *, strategy: str) -> tuple[Array, Array]:
    """Returns least and greatest value of rows `[*batch, n]` as float32 `[*batch]`."""
    minimum, maximum, _ = minmax_p.bind(x, strategy=strategy)
    return minimum, maximum


def sum_of_squares(x: Array, *, strategy: str) -> Array:
    """Returns the sums of squares of rows `[*batch, n]` as float32 `[*batch]`."""
    return sum_of_squares_p.bind(x, strategy=strategy)[0]


_CHOICES = (*STRATEGIES, "auto")


def _abstract_eval(name: str, num_results: int) -> Callable[..., tuple[Any, ...]]:
    def abstract_eval(x: Any, *, strategy: str) -> tuple[Any, ...]:
        if strategy not in _CHOICES:
            raise ValueError(
                f"{name}: `strategy` must be one of {_CHOICES}, not {strategy!r}."
            )
        check_dtype(name, "x", x.dtype, DTYPES)
        if x.ndim < 1:
            raise ValueError(f"{name}: `x` must have rows, but it is a scalar.")
        scratch = rows_like(x, scratch_words(x.shape[-1]), jnp.dtype(jnp.uint32))
        result = scratch.update(
            shape=x.shape[:-1],
            dtype=jnp.dtype(jnp.float32),
            sharding=_without_last(scratch.sharding),
        )
        return (*(num_results * [result]), scratch)

    return abstract_eval


def _without_last(sharding: Any) -> Any:
    if sharding.mesh.empty:
        return sharding
    return sharding.update(spec=type(sharding.spec)(*sharding.spec[:-1]))


def minmax_reference(x: Array, *, strategy: str) -> tuple[Array, ...]:
    del strategy
    wide = _flushed(x)
    # XLA:CPU's min and max may drop NaN (xla_cpu_enable_fast_min_max).
    has_nan = jnp.any(jnp.isnan(wide), axis=-1)
    minimum = jnp.min(wide, axis=-1, initial=np.inf)
    maximum = jnp.max(wide, axis=-1, initial=-np.inf)
    # Adding 0 turns -0 into +0.
    minimum, maximum = (
        jnp.where(has_nan, jnp.float32(jnp.nan), value + 0.0)
        for value in (minimum, maximum)
    )
    return minimum, maximum, _no_scratch(x)


def _sum_of_squares_reference(x: Array, *, strategy: str) -> tuple[Array, ...]:
    del strategy
    return jnp.sum(jnp.square(_flushed(x)), axis=-1), _no_scratch(x)


def _flushed(x: Array) -> Array:
    wide = x.astype(jnp.float32)
    return jnp.where(jnp.abs(wide) < jnp.finfo(jnp.float32).tiny, 0.0, wide)


def _no_scratch(x: Array) -> Array:
    return jnp.zeros((*x.shape[:-1], scratch_words(x.shape[-1])), jnp.uint32)


def _attributes(*, strategy: str) -> dict[str, Any]:
    return {"strategy": np.int64(STRATEGIES.index(strategy))}


def _resolve(reduction: str) -> Callable[..., dict[str, Static]]:
    """Returns a function that resolves the strategy `"auto"` for a platform."""

    def resolve(platform: str, x: Any, *, strategy: str) -> dict[str, Static]:
        if strategy != "auto":
            return {"strategy": strategy}
        *batch, n = x.shape
        if num_parts(n) == 1:
            return {"strategy": "parallel"}
        profile = profile_for(platform)
        if profile is None:
            return {"strategy": "parallel" if platform == "cpu" else "hybrid"}
        return {"strategy": profile.choose(reduction, math.prod(batch), n)}

    return resolve


def _division(num_results: int) -> Callable[..., DivisionRule]:
    def division(x: Any, **_: Any) -> DivisionRule:
        batch = batch_of(x)
        return DivisionRule(
            operands=((*batch, "n"),),
            results=(*(num_results * [batch]), (*batch, "w")),
            whole=("n", "w"),
        )

    return division


def _make(
    name: str, num_results: int, reference: Callable[..., tuple[Array, ...]]
) -> Primitive:
    primitive = make_primitive(
        f"dafjax_{name}",
        abstract_eval=_abstract_eval(name, num_results),
        reference=reference,
        multiple_results=True,
        attributes=_attributes,
        division=_division(num_results),
        resolve=_resolve(name),
    )

    def batch(
        operands: Sequence[Array], axes: Sequence[int], **params: Static
    ) -> tuple[Sequence[Array], Sequence[int]]:
        results = primitive.bind(jnp.moveaxis(operands[0], axes[0], 0), **params)
        return results, [0] * len(results)

    def jvp(
        primals: Sequence[Array], tangents: Sequence[Any], **params: Static
    ) -> tuple[Any, Any]:
        if not isinstance(tangents[0], ad.Zero):
            raise NotImplementedError(
                f"`dafjax.reductions.{name}` has no derivative: it measures values. "
                "Pass `jax.lax.stop_gradient(x)`, or use `jax.numpy` for a value that "
                "is differentiated."
            )
        results = primitive.bind(*primals, **params)
        zeros = [ad.Zero(r.aval.to_tangent_aval()) for r in results]
        return results, zeros

    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = jvp
    return primitive


minmax_p = _make("minmax", 2, minmax_reference)
sum_of_squares_p = _make("sum_of_squares", 1, _sum_of_squares_reference)
