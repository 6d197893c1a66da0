"""The derivative rule of a wrapped function: a plan, run forward and backward.

The seed of its rounding noise changes with the parameters, so that each step has
different noise.
"""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax

from dafjax import config
from dafjax._contexts import Mode
from dafjax._memory.predict import (
    predict_temp_nbytes,
    predict_temp_nbytes_of_passes,
)
from dafjax._native import tie
from dafjax._numbers import Array
from dafjax._options import Options
from dafjax._passes.pipeline import Context, run_passes
from dafjax._plan.plan import (
    ProgramPlan,
    current_recorder,
    find_brief,
    record_plans,
)
from dafjax._plan.planner import make_plan
from dafjax._plan.segments import cut
from dafjax._rules import (
    ExactRule,
    PlainRule,
    RerunRule,
    Rule,
    ScheduledRule,
    Stages,
)
from dafjax._trace.bodies import Body, has_bodies, perturbed_values, with_wrapped_bodies
from dafjax._trace.equation import look_up
from dafjax._trace.graph import mark_as_wrapped, stopped_outputs
from dafjax._trace.residuals import (
    Program,
    differentiate,
    fingerprint_of_function,
    instantiate,
    is_differentiable,
    is_perturbed,
    primal_of,
    trace_like,
)
from dafjax._trace.tracing import ClosedJaxpr, as_function, nbytes_of
from dafjax.policies import SaveAll
from dafjax.stores import Arrays


# Number of arrays to hash, the smallest ones: enough to tell one step from the next.
_MOST_ARRAYS = 8

_GOLDEN_RATIO = 0x9E3779B9
_FACTOR = 0x7FEB352D


def freshen(seed: Array, differentiated: Sequence[Any]) -> Array:
    """Mixes a hash of the differentiated arguments into a seed.

    Rounding noise depends on the seed and on the content of the rounded array. Below
    the first trained layer of a frozen network, an example has the same content in
    every epoch. The parameters differ, because the optimizer changes them in each step.
    Equal parameters give equal seeds, so a step can be repeated exactly.

    Args:
        seed: uint32 scalar.
        differentiated: The differentiated arguments.

    Returns:
        uint32 scalar. All examples of a `vmap` have the same seed.
    """
    arrays = [x for x in differentiated if _can_be_hashed(x)]
    chosen = sorted(arrays, key=jnp.size)[:_MOST_ARRAYS]
    return _mix(seed, *chosen) if chosen else seed


def _can_be_hashed(x: Any) -> bool:
    aval: Any = jax.typeof(x)
    # In `shard_map` devices that share an array must have the same seed.
    return aval.size > 0 and not getattr(aval, "vma", frozenset())


@functools.partial(jax.jit, inline=True)
def _mix(seed: Array, *arrays: Array) -> Array:
    for checksum in _checksums(*map(lax.stop_gradient, map(jnp.asarray, arrays))):
        # Packing scrambles the seed once more.
        seed = (seed ^ checksum) * jnp.uint32(_FACTOR)
        seed += jnp.uint32(_GOLDEN_RATIO)
    return seed


@jax.custom_batching.custom_vmap
def _checksums(*arrays: Array) -> tuple[Array, ...]:
    """Returns the sum of the bit patterns of each array, as uint32.

    Small arrays of one type are stacked first: XLA compiles a kernel for each sum.
    """
    alike: dict[Any, list[int]] = {}
    for number, x in enumerate(arrays):
        is_small = nbytes_of(x) <= config.SMALL_NBYTES
        alike.setdefault(jax.typeof(x) if is_small else number, []).append(number)
    found: dict[int, Array] = {}
    for numbers in alike.values():
        bits = [_bits_of(arrays[number]) for number in numbers]
        if len(bits) == 1:
            sums = [jnp.sum(bits[0], dtype=jnp.uint32)]
        else:
            axes = tuple(range(1, 1 + bits[0].ndim))
            sums = jnp.sum(jnp.stack(bits), axes, jnp.uint32)
        found.update(zip(numbers, sums, strict=True))
    return tuple(found[number] for number in range(len(arrays)))


@_checksums.def_vmap
def _checksums_of_all(
    axis_size: int, is_batched: Sequence[bool], *arrays: Array
) -> tuple[tuple[Array, ...], tuple[bool, ...]]:
    del axis_size, is_batched
    return _checksums(*arrays), (False,) * len(arrays)


def _bits_of(x: Array) -> jax.Array:
    """Returns the bit patterns of a floating-point or complex array as uint32."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _bits_of(jnp.stack([x.real, x.imag]))
    width = jnp.finfo(x.dtype).bits
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{min(width, 32)}"))
    return bits.astype(jnp.uint32)


def with_compressed_residuals(
    closed: ClosedJaxpr,
    options: Options,
    activations: tuple[int, ...],
    *,
    slices: tuple[int, ...] = (),
    iterations: int | None = None,
    perturbed: Sequence[bool] | None = None,
) -> Callable[..., list[Any]]:
    """Returns `function(seed, *arguments)` with a compressing derivative rule.

    Args:
        closed: The function.
        options: The options of `remat_compress`.
        activations: Positions of arguments that nothing keeps alive for the backward
            pass.
        slices: Positions of arguments that are slices of the arrays a loop runs over.
        iterations: How often the function runs, if it is the body of a loop or a branch
            in a wrapped function.
        perturbed: For every argument of a body, whether it is perturbed in any
            iteration. All iterations use the same rule.
    """
    if perturbed is None:
        perturbed = (False,) * len(closed.in_avals)
    if not options.mode.has_segments:
        return _with_rule(
            _Part(
                closed,
                options,
                activations,
                slices=slices,
                iterations=iterations,
                always_perturbed=tuple(perturbed),
            )
        )
    segments, results = cut(closed, activations, options.mode)
    moving = perturbed_values(closed, perturbed)
    # Segments that are not recomputed store their residuals at the same time, so they
    # share the allowance for more bits of small residuals. The loops of a segment count
    # in its own plan.
    num_waiting = max(1, sum(not segment.runs_again for segment in segments))
    of_loops = sum(segment.nbits_of_loops for segment in segments)
    parts = (
        _Part(
            segment.closed,
            options,
            segment.activations,
            slices=tuple(n for n, v in enumerate(segment.inputs) if v in slices),
            iterations=iterations,
            always_perturbed=tuple(v in moving for v in segment.inputs),
            runs_again=segment.runs_again,
            nbits_beside=(of_loops - segment.nbits_of_loops) // num_waiting,
        )
        for segment in segments
    )
    functions = [_with_rule(part) for part in parts]

    def run_segments(seed: jax.Array, *arguments: Any) -> list[Any]:
        env: dict[int, Any] = dict(enumerate(arguments))
        for segment, run in zip(segments, functions, strict=True):
            outputs = run(seed, *(env[v] for v in segment.inputs))
            env.update(zip(segment.outputs, outputs, strict=True))
        return look_up(results, env)

    return run_segments


@final
@dataclasses.dataclass(frozen=True, eq=False)
class _Part:
    """A function, or a segment of one, that gets a derivative rule.

    Attributes:
        closed: The function.
        options: The options of `remat_compress`.
        activations: Positions of arguments that nothing else keeps alive.
        slices: Positions of arguments that are slices of a loop's arrays.
        iterations: How often it runs, if it belongs to the body of a loop or a branch.
        always_perturbed: For every argument, whether it counts as perturbed always.
        runs_again: Whether the backward pass recomputes it from its inputs.
        nbits_beside: Bits of residuals that are stored at the same time.
    """

    closed: ClosedJaxpr
    options: Options
    activations: tuple[int, ...]
    slices: tuple[int, ...]
    iterations: int | None
    always_perturbed: tuple[bool, ...]
    runs_again: bool = False
    nbits_beside: int = 0

    @functools.cached_property
    def evaluate(self) -> Callable[..., list[Any]]:
        """The function of the same arguments, without a rule."""
        return as_function(self.closed)

    @functools.cached_property
    def differentiable(self) -> tuple[bool, ...]:
        """For every result, whether it has a cotangent."""
        return tuple(map(is_differentiable, self.closed.out_avals))

    def rule(
        self, perturbed: tuple[bool, ...], *, recorded: bool, absorbed: bool
    ) -> Rule:
        """Returns the derivative rule.

        Args:
            perturbed: For every argument, whether its gradient is wanted.
            recorded: Whether the plan is recorded, to be shown.
            absorbed: Whether it is part of another wrapped function, which decides.
        """
        plain = PlainRule(perturbed, self.differentiable, self.evaluate)
        if absorbed:
            return plain
        options, iterations = self.options, self.iterations or 1
        source, name, shift = self.closed, None, 0
        if has_bodies(source):
            name = fingerprint_of_function(source, perturbed)
            source = _with_wrapped_bodies(
                source, options, self.activations, perturbed, iterations
            )
            # The seed becomes the first argument.
            perturbed, shift = (False, *perturbed), 1
        numbers = tuple(number + shift for number in self.activations)
        is_exact = options.mode is Mode.EXACT
        if is_exact and not recorded:
            return self._exact(perturbed, source)
        context = Context(options.policy, frozenset(numbers), iterations)
        traced, program = self._programs(source, perturbed, context)
        plan = make_plan(
            program,
            policy=options.policy,
            bits=options.bits,
            activations=numbers,
            iterations=iterations,
            function=name,
            spares_bits=options.store.keeps_bits,
            nbits_beside=self.nbits_beside,
        )
        slices = frozenset(n + shift for n in self.slices)
        plan = dataclasses.replace(plan, slices=slices)
        # Residuals of a body are never short-lived: other iterations run meanwhile.
        if self.iterations is None and not options.store.takes_brief:
            plan = dataclasses.replace(plan, brief=find_brief(plan))
        stages = Stages(traced, context, plan, options, iterations)
        if is_exact and self.runs_again:
            return self._exact(perturbed, source, stages)
        if plan.compresses or options.policy.is_binding:
            if self.runs_again:
                return RerunRule(plan, program, options, numbers, stages)
            scheduled = ScheduledRule(plan, options, stages)
            # Loop bodies of `traced` have rules already.
            both = traced if source is self.closed else None
            if not self._is_no_smaller(plan, scheduled, plain, both):
                return scheduled
            source = self.closed
        else:
            plain = PlainRule(perturbed, self.differentiable, as_function(source))
        if recorded:
            # The residuals of `PlainRule` are hidden in JAX's pullback, so this lists
            # an equivalent plan.
            if plain.perturbed != perturbed:
                _, program = self._programs(source, plain.perturbed, context)
            plan = make_plan(program, policy=SaveAll(), bits=options.bits)
            return ScheduledRule(plan, options)
        return plain

    def _programs(
        self, source: ClosedJaxpr, perturbed: tuple[bool, ...], context: Context
    ) -> tuple[Program, Program]:
        """Returns both passes of a function, before and after rewrites."""
        # Inner wrapped functions are traced here. The outermost decides, so their
        # residuals are part of this plan.
        with _absorbing():
            traced = differentiate(source, perturbed)
            without = self.options.without_passes
            return traced, run_passes(traced, context, without=without)

    def _is_no_smaller(
        self,
        plan: ProgramPlan,
        scheduled: Rule,
        plain: PlainRule,
        traced: Program | None,
    ) -> bool:
        """Returns whether the function needs as much memory with codes as without.

        A static model of XLA answers it for losses with few residuals. The memory of a
        function whose results are arrays depends on the program around it. (Of 213
        random losses, 19 needed more memory with codes, and the model finds 13.)

        Args:
            plan: The plan.
            scheduled: The rule with codes.
            plain: The rule without.
            traced: Both passes of `plain`, if they are traced already.
        """
        options = self.options
        is_loss = all(getattr(aval, "size", 0) <= 1 for aval in self.closed.out_avals)
        if (
            not is_loss
            or self.iterations is not None
            or options.mode.has_segments
            or options.own_policy is not None
            or not isinstance(options.store, Arrays)
            or plan.values_taken_away > config.SURELY_WORTH
        ):
            return False
        if traced is None:
            plain_nbytes = self._temp_nbytes(plain)
        else:
            plain_nbytes = predict_temp_nbytes_of_passes(traced)
        return plain_nbytes <= self._temp_nbytes(scheduled)

    def _temp_nbytes(self, rule: Rule) -> int:
        """Predicts the temporary memory of both passes."""
        avals = list(self.closed.in_avals)
        wanted = itertools.compress(self.closed.out_avals, self.differentiable)

        def both(arguments: list[Any], cotangents: list[Any]) -> Any:
            seed = jnp.uint32(0)
            extra = [seed] * (len(rule.perturbed) - len(arguments))
            results, residuals = rule.forward(seed, [*extra, *arguments])
            return results, rule.backward(residuals, cotangents)

        # What is traced here is no part of what a user lists.
        with record_plans():
            return predict_temp_nbytes(trace_like(both, avals, list(wanted)))

    def _exact(
        self,
        perturbed: tuple[bool, ...],
        source: ClosedJaxpr,
        stages: Stages | None = None,
    ) -> Rule:
        plain = PlainRule(perturbed, self.differentiable, as_function(source))
        if not self.runs_again:
            return plain
        return ExactRule(plain, self.activations, self.slices, stages)

    def seed_of(self, seed: Any, perturbed: Sequence[Any]) -> jax.Array:
        """Returns the seed of the noise of one step, given the perturbed arguments."""
        seed = jnp.asarray(primal_of(seed))
        # A body gets the seed of the function that wraps it.
        return seed if self.iterations is not None else tie(freshen(seed, perturbed))[0]


def _with_rule(part: _Part) -> Callable[..., list[Any]]:
    """Returns `function(seed, *arguments)` with its own derivative rule."""
    find_rule = functools.lru_cache(maxsize=16)(part.rule)

    @jax.custom_vjp
    def function(seed: jax.Array, *arguments: Any) -> list[Any]:
        del seed
        return mark_as_wrapped(part.evaluate(*arguments))

    # `jax.disable_jit` concerns the user's function, which is traced already. dafjax
    # needs jitted calls to name its operations and to compile its passes.
    @jax.disable_jit(False)
    def forward(seed: Any, *arguments: Any) -> tuple[list[Any], Any]:
        pairs = zip(part.always_perturbed, arguments, strict=True)
        perturbed = tuple(always or is_perturbed(x) for always, x in pairs)
        recorder = current_recorder()
        # A body belongs to the function that wraps it, so it keeps its rule.
        absorbed = part.iterations is None and _ABSORBED.get()
        rule = find_rule(perturbed, recorded=recorder is not None, absorbed=absorbed)
        if recorder is not None:
            recorder.rules.append(rule)
        operands = [primal_of(argument) for argument in arguments]
        seed = part.seed_of(seed, list(itertools.compress(operands, perturbed)))
        if len(rule.perturbed) > len(perturbed):
            operands.insert(0, seed)
        results, residuals = rule.forward(seed, operands)
        return results, (_Carried(rule, perturbed), residuals)

    @jax.disable_jit(False)
    def backward(residuals: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        carried, residuals = residuals
        wanted = itertools.compress(cotangents, part.differentiable)
        found = carried.rule.backward(residuals, [instantiate(c) for c in wanted])
        gradients = iter(found)
        return None, *(next(gradients) if p else None for p in carried.perturbed)

    function.defvjp(forward, backward, symbolic_zeros=True)
    return _with_stopped_results(function, part.closed)


def _with_stopped_results(
    function: Callable[..., list[Any]], closed: ClosedJaxpr
) -> Callable[..., list[Any]]:
    """Returns the function without tangents for results that have none in the program.

    JAX gives a tangent to each result of a function with a derivative rule, and then
    fails at a callback that reads the result.
    """
    stopped = stopped_outputs(closed)
    if not any(stopped):
        return function

    def run(seed: jax.Array, *arguments: Any) -> list[Any]:
        results = function(seed, *arguments)
        pairs = zip(results, stopped, strict=True)
        return [lax.stop_gradient(x) if stops else x for x, stops in pairs]

    return run


def _with_wrapped_bodies(
    closed: ClosedJaxpr,
    options: Options,
    activations: tuple[int, ...],
    perturbed: tuple[bool, ...],
    iterations: int,
) -> ClosedJaxpr:
    """Returns the program with derivative rules for its loop bodies and branches.

    Its first argument is the seed.
    """

    def run(seed: jax.Array, *arguments: Any) -> list[Any]:
        def wrap(body: Body) -> Callable[..., list[Any]]:
            function = with_compressed_residuals(
                body.closed,
                options,
                body.activations,
                slices=body.slices,
                iterations=iterations * body.times,
                perturbed=body.perturbed,
            )
            return functools.partial(function, seed)

        wrapped = with_wrapped_bodies(closed, activations, perturbed, wrap)
        return wrapped(*arguments)

    return trace_like(run, jax.ShapeDtypeStruct((), jnp.uint32), *closed.in_avals)


# True while wrapped functions are traced as parts of another wrapped function.
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


@final
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Carried:
    """Carries the rule from the forward to the backward pass, in the tree structure."""

    rule: Rule
    perturbed: tuple[bool, ...]
