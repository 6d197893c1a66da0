"""The derivative rule of a traced function: a plan, run forward and backward."""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from dafjax._graph import ClosedJaxpr, as_function
from dafjax._passes import Ties, run_backward, run_forward
from dafjax._plan import Plan, make_plan
from dafjax._residuals import differentiate
from dafjax._schedule import schedule_backward
from dafjax._typing import ArrayTree
from dafjax.codecs import AbstractCodec
from dafjax.policies import AbstractPolicy
from dafjax.stores import AbstractStore


@final
@dataclasses.dataclass(frozen=True)
class Options:
    """What a wrapped function was told."""

    policy: AbstractPolicy
    codec: AbstractCodec
    store: AbstractStore
    ties: Ties


def differentiable(
    closed: ClosedJaxpr, options: Options, activations: tuple[int, ...]
) -> Callable[..., list[Any]]:
    """Returns `function(seed, *arguments)` with a compressing derivative rule."""
    evaluate = as_function(closed)

    @functools.lru_cache(maxsize=16)
    def derivative(perturbed: tuple[bool, ...]) -> "_Derivative":
        # Wrapped functions inside this one are traced here; their residuals are part of
        # this plan.
        token = _RECORDER.set(None)
        try:
            plan = make_plan(
                differentiate(closed, perturbed),
                policy=options.policy,
                codec=options.codec,
                activations=activations,
            )
        finally:
            _RECORDER.reset(token)
        return _Derivative(plan, options)

    @jax.custom_vjp
    def function(seed: jax.Array, *arguments: Any) -> list[Any]:
        del seed
        return evaluate(*arguments)

    def forward(seed: Any, *arguments: Any) -> tuple[list[Any], Any]:
        rule = derivative(tuple(_is_perturbed(argument) for argument in arguments))
        recorder = _RECORDER.get()
        if recorder is not None and rule.plan not in recorder:
            recorder.append(rule.plan)
        values = [_primal(argument) for argument in arguments]
        results, stored = rule.forward(_primal(seed), values)
        kept = {number: values[number] for number in rule.plan.arguments}
        return results, (_Rule(rule), stored, kept)

    def backward(residuals: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        rule, stored, kept = residuals
        program = rule.derivative.plan.program
        wanted = [
            _instantiate(cotangent)
            for cotangent, wanted in zip(
                cotangents, program.differentiable, strict=True
            )
            if wanted
        ]
        gradients = iter(rule.derivative.backward(kept, stored, wanted))
        return None, *(next(gradients) if p else None for p in program.perturbed)

    function.defvjp(forward, backward, symbolic_zeros=True)
    return function


@final
class _Derivative:
    """The two passes of one plan, each compiled once when called eagerly."""

    def __init__(self, plan: Plan, options: Options) -> None:
        self.plan = plan
        schedule = schedule_backward(plan)

        def forward(
            seed: Any, arguments: Sequence[Any]
        ) -> tuple[list[Any], list[ArrayTree]]:
            return run_forward(
                plan, arguments, store=options.store, ties=options.ties, seed=seed
            )

        def backward(
            kept: dict[int, Any], stored: Sequence[ArrayTree], cotangents: Sequence[Any]
        ) -> list[Any]:
            return run_backward(
                plan,
                schedule,
                kept,
                stored,
                cotangents,
                store=options.store,
                ties=options.ties,
            )

        self.forward = jax.jit(forward, inline=True)
        self.backward = jax.jit(backward, inline=True)


@final
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Rule:
    """Carries the derivative from forward to backward rule in the tree structure."""

    derivative: _Derivative


def _is_perturbed(argument: Any) -> bool:
    if isinstance(argument, CustomVJPPrimal):
        return argument.perturbed and jnp.issubdtype(
            jnp.result_type(argument.value), jnp.inexact
        )
    # Some transformations of JAX hand over the bare value and tell nothing.
    return jnp.issubdtype(jnp.result_type(argument), jnp.inexact)


def _primal(argument: Any) -> Any:
    return argument.value if isinstance(argument, CustomVJPPrimal) else argument


def _instantiate(cotangent: Any) -> Any:
    if isinstance(cotangent, SymbolicZero):
        return jnp.zeros(cotangent.aval.shape, cotangent.aval.dtype)
    return cotangent


@contextlib.contextmanager
def record_plans() -> Iterator[list[Plan]]:
    """Collects the plans of the wrapped functions that are differentiated meanwhile."""
    plans: list[Plan] = []
    token = _RECORDER.set(plans)
    try:
        yield plans
    finally:
        _RECORDER.reset(token)


_RECORDER: contextvars.ContextVar[list[Plan] | None] = contextvars.ContextVar(
    "plans", default=None
)
