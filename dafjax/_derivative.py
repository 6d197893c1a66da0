"""The derivative rule of a traced function: a plan, run forward and backward."""

import abc
import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from dafjax._bits import Bits
from dafjax._bodies import has_bodies, with_wrapped_bodies
from dafjax._graph import mark_as_wrapped
from dafjax._native import first_order
from dafjax._passes import Ties, run_backward, run_forward
from dafjax._plan import ProgramPlan
from dafjax._planner import make_plan
from dafjax._recorder import current_recorder
from dafjax._residuals import (
    differentiate,
    fingerprint_of_function,
    is_differentiable,
    trace_like,
    vjp_of_perturbed,
)
from dafjax._schedule import schedule_backward
from dafjax._tracing import ClosedJaxpr, as_function
from dafjax.policies import AbstractPolicy, SaveAll
from dafjax.stores import AbstractStore


@final
@dataclasses.dataclass(frozen=True)
class Options:
    """What a wrapped function was told."""

    policy: AbstractPolicy
    bits: Bits
    store: AbstractStore
    ties: Ties


def with_compressed_residuals(
    closed: ClosedJaxpr,
    options: Options,
    activations: tuple[int, ...],
    *,
    iterations: int | None = None,
) -> Callable[..., list[Any]]:
    """Returns `function(seed, *arguments)` with a compressing derivative rule.

    Args:
        closed: The function.
        options: What `remat_compress` was told.
        activations: The arguments that nothing keeps alive for the backward pass.
        iterations: If the function is the body of a loop or a branch in a wrapped
            function, how often it runs.
    """
    evaluate = as_function(closed)
    differentiable = tuple(is_differentiable(aval.dtype) for aval in closed.out_avals)

    @functools.lru_cache(maxsize=16)
    def derivative(
        perturbed: tuple[bool, ...], recorded: bool, absorbed: bool
    ) -> _Rule:
        if absorbed:
            return _PlainRule(perturbed, differentiable, evaluate)
        source, numbers, name = closed, activations, None
        if has_bodies(closed):
            name = fingerprint_of_function(closed, perturbed)
            source = _with_wrapped_bodies(closed, options, activations, iterations or 1)
            # The seed is an argument too.
            perturbed = (False, *perturbed)
            numbers = tuple(number + 1 for number in activations)
        # Wrapped functions inside this one are traced here. The outermost decides:
        # their residuals are part of this plan.
        with _absorbing():
            program = differentiate(source, perturbed)
        plan = make_plan(
            program,
            policy=options.policy,
            bits=options.bits,
            activations=numbers,
            iterations=iterations or 1,
            function=name,
        )
        if plan.compresses or options.policy.is_binding:
            return _ScheduledRule(plan, options)
        if recorded:
            # What `_PlainRule` keeps is hidden in JAX's pullback: list its equal.
            plan = make_plan(program, policy=SaveAll(), bits=options.bits)
            return _ScheduledRule(plan, options)
        return _PlainRule(perturbed, differentiable, as_function(source))

    @jax.custom_vjp
    def function(seed: jax.Array, *arguments: Any) -> list[Any]:
        del seed
        return mark_as_wrapped(evaluate(*arguments))

    def forward(seed: Any, *arguments: Any) -> tuple[list[Any], Any]:
        perturbed = tuple(_is_perturbed(argument) for argument in arguments)
        rule = derivative(
            perturbed,
            current_recorder() is not None,
            # A body belongs to the function that wrapped it.
            iterations is None and _ABSORBED.get(),
        )
        operands = [_primal(argument) for argument in arguments]
        seed = jnp.asarray(_primal(seed))
        if len(rule.perturbed) > len(perturbed):
            operands.insert(0, seed)
        results, residuals = rule.forward(seed, operands)
        return results, (_Carried(rule, perturbed), residuals)

    def backward(residuals: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        carried, residuals = residuals
        gradients = iter(
            carried.rule.backward(
                residuals,
                [
                    _instantiate(cotangent)
                    for cotangent, wanted in zip(
                        cotangents, differentiable, strict=True
                    )
                    if wanted
                ],
            )
        )
        return None, *(next(gradients) if p else None for p in carried.perturbed)

    function.defvjp(forward, backward, symbolic_zeros=True)
    return function


def _with_wrapped_bodies(
    closed: ClosedJaxpr,
    options: Options,
    activations: tuple[int, ...],
    iterations: int,
) -> ClosedJaxpr:
    """Returns a program of the seed and the arguments whose bodies have rules."""

    def run(seed: jax.Array, *arguments: Any) -> list[Any]:
        def wrap(
            body: ClosedJaxpr, activations: tuple[int, ...], times: int
        ) -> Callable[..., list[Any]]:
            function = with_compressed_residuals(
                body, options, activations, iterations=iterations * times
            )
            return functools.partial(function, seed)

        return with_wrapped_bodies(closed, activations, wrap)(*arguments)

    return trace_like(run, jax.ShapeDtypeStruct((), jnp.uint32), *closed.in_avals)


# Whether wrapped functions are being traced as parts of another one.
_ABSORBED: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "absorbed", default=False
)


@contextlib.contextmanager
def _absorbing() -> Iterator[None]:
    token = _ABSORBED.set(True)
    try:
        yield
    finally:
        _ABSORBED.reset(token)


class _Rule(abc.ABC):
    """A forward and a backward pass.

    Attributes:
        perturbed: For every argument, whether it is differentiated.
    """

    perturbed: tuple[bool, ...]

    @abc.abstractmethod
    def forward(self, seed: Any, arguments: Sequence[Any]) -> tuple[list[Any], Any]:
        """Returns the results and a pytree of what waits for the backward pass."""

    @abc.abstractmethod
    def backward(self, residuals: Any, cotangents: Sequence[Any]) -> Sequence[Any]:
        """Returns the cotangents of the perturbed arguments."""


@final
class _PlainRule(_Rule):
    """Ordinary reverse-mode differentiation, where nothing is compressed.

    Bit for bit what JAX computes, and differentiable any number of times.
    """

    def __init__(
        self,
        perturbed: tuple[bool, ...],
        differentiable: tuple[bool, ...],
        function: Callable[..., list[Any]],
    ) -> None:
        self.perturbed = perturbed
        self._differentiable = differentiable
        self._function = function

    def forward(self, seed: Any, arguments: Sequence[Any]) -> tuple[list[Any], Any]:
        del seed
        return vjp_of_perturbed(
            self._function, arguments, self.perturbed, self._differentiable
        )

    def backward(self, residuals: Any, cotangents: Sequence[Any]) -> Sequence[Any]:
        return residuals(list(cotangents))


@final
class _ScheduledRule(_Rule):
    """Both passes equation by equation; compiled once when called eagerly."""

    def __init__(self, plan: ProgramPlan, options: Options) -> None:
        self.perturbed = plan.program.perturbed
        self._plan = plan
        self._run_forward = functools.partial(
            run_forward, plan, store=options.store, ties=options.ties
        )
        self._run_backward = functools.partial(
            run_backward,
            plan,
            schedule_backward(plan),
            store=options.store,
            ties=options.ties,
        )
        self._forward = jax.jit(self._run_forward, inline=True)
        self._backward = jax.jit(self._run_backward, inline=True)

    def forward(self, seed: Any, arguments: Sequence[Any]) -> tuple[list[Any], Any]:
        recorder = current_recorder()
        run = self._forward
        if recorder is not None:
            run = self._named(recorder.name(self._plan))
        # The passes have custom derivatives inlined, and codes have no derivative.
        results, stored = run([first_order(a) for a in arguments], seed=seed)
        kept = {number: arguments[number] for number in self._plan.arguments}
        return results, (kept, stored)

    def backward(self, residuals: Any, cotangents: Sequence[Any]) -> Sequence[Any]:
        kept, stored = residuals
        return self._backward(kept, stored, cotangents)

    def _named(self, name: str) -> Callable[..., Any]:
        def run(arguments: Sequence[Any], *, seed: Any) -> Any:
            return self._run_forward(arguments, seed=seed)

        run.__name__ = name
        return jax.jit(run)


@final
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Carried:
    """Carries the rule from the forward to the backward pass, in the tree structure."""

    rule: _Rule
    perturbed: tuple[bool, ...]


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
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    aval: Any = cotangent.aval
    return jnp.zeros(aval.shape, aval.dtype)
