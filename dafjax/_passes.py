"""The forward and the backward pass, run equation by equation as scheduled."""

import collections
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dafjax._equation import Atom, Constant, Equation, evaluate, values_of
from dafjax._graph import live_equations
from dafjax._importance import Probe
from dafjax._native import pin, tie
from dafjax._parts import num_parts, restore_in_parts
from dafjax._plan import ProgramPlan
from dafjax._primitives import is_cheap, rearranges_operands
from dafjax._residuals import Program
from dafjax._schedule import InParts, Step, Unpacking, is_large, last_uses
from dafjax._sites import site_names
from dafjax._ties import Ties
from dafjax._typing import ArrayTree
from dafjax.codecs import AbstractCodec
from dafjax.codecs._rounding_noise import sample_rounding_noise
from dafjax.stores import AbstractStore


class Measured(NamedTuple):
    """What is stored of a residual whose importance the backward pass measures.

    Attributes:
        handle: What the store returned.
        rounding_noise: float32 scalar, what `codecs.sample_rounding_noise` returned:
            codes of few bits do not tell how evenly their blocks were filled.
    """

    handle: ArrayTree
    rounding_noise: jax.Array


def run_forward(
    plan: ProgramPlan,
    arguments: Sequence[jax.Array],
    *,
    store: AbstractStore,
    ties: Ties,
    seed: Any,
    after: jax.Array | None = None,
) -> tuple[list[Any], list[ArrayTree]]:
    """Computes the results and what the plan keeps.

    Args:
        plan: What is kept.
        arguments: The function's arguments.
        store: Where packed values wait.
        ties: Which ties are made.
        seed: Seed of the rounding noise, a uint32 scalar.
        after: The token of `restore_arguments`, if it is not the first forward pass.

    Returns:
        The results, exact, and for each of `plan.kept` its value if it has no codec,
        else its handle, or `Measured`.
    """
    program = plan.program
    kept = {item.value: (site, item) for site, item in enumerate(plan.kept)}
    codecs = _codecs(plan, store)
    equations = live_equations(program.forward, [*program.results, *kept])
    last_use = last_uses(equations, program.results)
    env: dict[int, Any] = dict(enumerate(arguments))
    stored: dict[int, ArrayTree] = {}
    # Packed forms that nothing later has been tied to yet.
    pending: list[jax.Array] = []
    # Carries the dependency on the forward pass so far to what would run at its start.
    token: jax.Array = jnp.zeros((), jnp.uint8) if after is None else after

    def tie_pending(carriers: Iterable[int]) -> None:
        nonlocal token
        carrier = max(
            (v for v in carriers if _can_be_tied(env[v])),
            key=lambda v: env[v].size,
            default=None,
        )
        if pending and ties.forward and carrier is not None:
            env[carrier], token, *_ = tie(
                env[carrier], token, *pending, all_are_read=False
            )
            pending.clear()

    def keep(value: int, now: int) -> None:
        nonlocal token
        if value not in kept:
            return
        site, item = kept[value]
        if item.codec is None:
            stored[value] = env[value]
            return
        with jax.named_scope("pack"):
            # The same tensor at another site gets other noise.
            packed = codecs[value].encode(env[value], seed=seed + jnp.uint32(site))
        code = store.measured_code(codecs[value])
        noise = None if code is None else sample_rounding_noise(code, env[value])
        leaves, structure = jax.tree.flatten((packed, noise))
        if ties.forward and last_use.get(value, -1) > now:
            env[value], token, *leaves = tie(env[value], token, *leaves)
        else:
            pending.extend(leaves)
        packed, noise = jax.tree.unflatten(structure, leaves)
        handle = store.put(packed)
        stored[value] = handle if noise is None else Measured(handle, noise)

    def await_operand(equation: Equation) -> None:
        nonlocal token
        made = [v for v in equation.input_values if v >= program.num_arguments]
        if made:
            largest = max(made, key=program.nbytes)
            env[largest], token = tie(env[largest], token, num_awaited=1)

    pinned = _whole_weights(plan)

    def delay(atom: Atom, operand: Any) -> Any:
        delayed = _not_before(token, operand)
        return pin(delayed) if ties.layouts and atom in pinned else delayed

    for value in range(program.num_arguments):
        keep(value, -1)
    for now, equation in enumerate(equations):
        if not is_cheap(equation.primitive):
            # Arguments live on anyway, and a tie would copy them.
            inputs = equation.input_values
            tie_pending(v for v in inputs if v >= program.num_arguments)
        operands = _read(equation.inputs, env)
        if ties.arguments:
            late = _read_late(plan, equation)
            if not plan.slices.isdisjoint(late):
                # Where nothing is packed between two products, the token is early.
                await_operand(equation)
            operands = [
                delay(atom, operand) if atom in late else operand
                for atom, operand in zip(equation.inputs, operands, strict=True)
            ]
        outputs = evaluate(equation, operands)
        env.update(zip(equation.outputs, outputs, strict=True))
        for value in equation.outputs:
            keep(value, now)
    tie_pending(values_of(program.results))
    last = max((v for v in kept if is_large(program, v)), default=None)
    # What is kept as it is waits anyway: nothing is lost if a loss is made of it later.
    if ties.results and last is not None and kept[last][1].codec is not None:
        small = [
            v
            for v in dict.fromkeys(values_of(program.results))
            if v >= program.num_arguments and not is_large(program, v)
        ]
        leaves, structure = jax.tree.flatten(stored[last])
        tied = tie(*(env[v] for v in small), *leaves)
        env.update(zip(small, tied[: len(small)], strict=True))
        stored[last] = jax.tree.unflatten(structure, tied[len(small) :])
    return _read(program.results, env), [stored[item.value] for item in plan.kept]


def run_backward(
    plan: ProgramPlan,
    schedule: Sequence[Step],
    arguments: Mapping[int, jax.Array],
    stored: Sequence[ArrayTree],
    cotangents: Sequence[jax.Array],
    *,
    store: AbstractStore,
    ties: Ties,
) -> list[Any]:
    """Computes the cotangents of the perturbed arguments.

    Args:
        plan: What was kept.
        schedule: What `schedule_backward` made of the plan.
        arguments: The arguments that `plan.arguments` names.
        stored: What `run_forward` returned for `plan.kept`.
        cotangents: The cotangents of the differentiable results.
        store: Where packed values wait.
        ties: Which ties are made.

    Returns:
        One cotangent for each perturbed argument.
    """
    program = plan.program
    kept = {item.value: item for item in plan.kept}
    waiting = dict(zip(kept, stored, strict=True))
    measured = {v: item for v, item in waiting.items() if isinstance(item, Measured)}
    waiting.update((v, item.handle) for v, item in measured.items())
    noise = {v: item.rounding_noise for v, item in measured.items()}
    codecs = _codecs(plan, store, schedule)
    env: dict[int, Any] = dict(zip(program.cotangents, cotangents, strict=True))
    env.update(arguments)
    env.update((v, waiting[v]) for v, item in kept.items() if item.codec is None)
    # Carries the dependency on the backward pass to unpacking; never read.
    token: jax.Array = jnp.zeros((), jnp.uint8)

    probe = Probe(plan, noise) if measured else None
    weights = _whole_weights(plan)
    moving = [number for number, moves in enumerate(program.perturbed) if moves]
    pairs = zip(moving, program.gradients, strict=True)
    of_weights = {v for number, v in pairs if number in weights and ties.layouts}

    def learn(values: Mapping[int, Any]) -> None:
        env.update(values)
        if probe is not None:
            probe.see(values)

    def packed_for(item: InParts) -> dict[int, ArrayTree]:
        return {v: store.get(waiting[v]) for v in item.unpacked}

    def pieces(step: Step) -> Iterator[tuple[Unpacking | Equation | InParts, int]]:
        """Gives what a step restores, and in how many parts."""
        # Importances are measured of whole values.
        is_whole = probe is not None or not (ties.partial and ties.cotangent)
        for item in step.restored:
            count = 1
            if isinstance(item, InParts) and not is_whole:
                count = num_parts(plan, item, packed_for(item), codecs, env)
            if isinstance(item, InParts) and count == 1:
                yield from ((piece, 1) for piece in item.restored)
            else:
                yield item, count

    learn(dict(env))
    for step in schedule:
        if step.begins:
            tied = _tied_values(step, ties)
            samples = [] if probe is None else probe.waiting()
            num_awaited = sum(v in step.awaited for v in tied) if ties.in_place else 0
            *values, token = tie(
                *(env[v] for v in tied), *samples, token, num_awaited=num_awaited
            )
            env.update(zip(tied, values[: len(tied)], strict=True))
            if probe is not None:
                probe.settle(values[len(tied) :])
        delayed = {v: _not_before(token, env[v]) for v in step.delayed}
        if ties.layouts:
            delayed = {v: pin(x) if v in weights else x for v, x in delayed.items()}
        at_hand = collections.ChainMap(delayed if ties.arguments else {}, env)
        for item, count in pieces(step):
            if isinstance(item, InParts):
                with jax.named_scope("unpack"):
                    value = restore_in_parts(
                        plan, item, packed_for(item), codecs, at_hand, token, count
                    )
                learn({item.value: value})
                continue
            if isinstance(item, Unpacking):
                if item.behind and ties.partial:
                    *values, token = tie(*(env[v] for v in item.behind), token)
                    env.update(zip(item.behind, values, strict=True))
                after = (token,) if ties.cotangent else ()
                codec = codecs[item.value]
                with jax.named_scope("unpack"):
                    packed = store.get(waiting[item.value])
                    unpacked = codec.decode(packed, kept[item.value].like, after=after)
                learn({item.value: unpacked})
                if probe is not None and item.value in measured:
                    probe.see_range(item.value, store.squared_range(codec, packed))
                continue
            outputs = evaluate(item, _read(item.inputs, at_hand))
            # What is kept is taken from what was kept, never recomputed.
            made = zip(item.outputs, outputs, strict=True)
            learn({value: output for value, output in made if value not in kept})
        if step.joined and ties.operands:
            values = tie(*(env[v] for v in step.joined))
            env.update(zip(step.joined, values, strict=True))
        if step.equation is not None:
            outputs = evaluate(step.equation, _read(step.equation.inputs, at_hand))
            made = dict(zip(step.equation.outputs, outputs, strict=True))
            learn({v: pin(x) if v in of_weights else x for v, x in made.items()})
    gradients = _read(program.gradients, env)
    if probe is None:
        return gradients
    found = probe.sensitivities(gradients)
    done = store.note(
        found,
        [codecs[value] for value in measured],
        [kept[value].like for value in measured],
        token,
    )
    return _tied_to(gradients, done)


def restore_arguments(
    plan: ProgramPlan,
    arguments: Mapping[int, jax.Array],
    stored: Sequence[ArrayTree],
    cotangents: Sequence[jax.Array],
    *,
    store: AbstractStore,
    ties: Ties,
) -> tuple[list[Any], list[Any], jax.Array]:
    """Restores what a function is run again from, when the backward pass is there.

    Args:
        plan: What was kept: arguments alone.
        arguments: The arguments that `plan.arguments` names.
        stored: What `run_forward` returned for `plan.kept`.
        cotangents: The cotangents of the differentiable results.
        store: Where packed values wait.
        ties: Which ties are made.

    Returns:
        All arguments, None for those that are not read; the cotangents, tied; and a
        token that depends on them.
    """
    program = plan.program
    token: jax.Array = jnp.zeros((), jnp.uint8)
    if ties.cotangent:
        *cotangents, token = tie(*cotangents, token)
    codecs = _codecs(plan, store)
    env: dict[int, Any] = dict(arguments)
    for item, handle in zip(plan.kept, stored, strict=True):
        if item.codec is None:
            env[item.value] = handle
            continue
        with jax.named_scope("unpack"):
            codec = codecs[item.value]
            packed = store.get(
                handle.handle if isinstance(handle, Measured) else handle
            )
            env[item.value] = codec.decode(packed, item.like, after=(token,))
    if ties.arguments:
        # Else what follows from them alone would be there since the forward pass.
        late = _small_or_rearranged(program)
        late = late.intersection(env).difference(codecs)
        env.update((v, _not_before(token, env[v])) for v in late)
    restored = [env.get(v) for v in range(program.num_arguments)]
    return restored, list(cotangents), token


def _whole_weights(plan: ProgramPlan) -> Container[Atom]:
    """Returns the large arguments that the backward pass reads whole."""
    program = plan.program
    return {v for v in plan.arguments if v not in plan.slices and is_large(program, v)}


def _small_or_rearranged(program: Program) -> set[int]:
    """Returns the arguments that to delay costs little.

    Those that are small, and those that are copied where they are read. Of a large one
    that a product reads as it is, a copy would have to be made.
    """
    found = {v for v in range(program.num_arguments) if not is_large(program, v)}
    for equation in program.forward:
        if is_cheap(equation.primitive) or rearranges_operands(equation.primitive):
            made = sum(program.nbytes(v) for v in equation.outputs)
            found.update(
                v
                for v in equation.input_values
                if v < program.num_arguments and program.nbytes(v) <= 2 * made
            )
    return found


def _tied_to(gradients: list[Any], done: jax.Array) -> list[Any]:
    """Makes gradients depend on a call that is made for what else it does."""
    for number, gradient in enumerate(gradients):
        if _can_be_tied(gradient) and gradient.dtype != jax.dtypes.float0:
            tied, _ = tie(gradient, done, all_are_read=False)
            return [*gradients[:number], tied, *gradients[number + 1 :]]
    return gradients


def _codecs(
    plan: ProgramPlan, store: AbstractStore, schedule: Sequence[Step] = ()
) -> dict[int, AbstractCodec]:
    """Returns what each of the plan's values is packed with in a store.

    To decode, the schedule of the backward pass is needed.
    """
    reads = collections.Counter(v for step in schedule for v in step.unpacked)
    return {
        item.value: store.codec(item.codec, site=site, reads=reads[item.value])
        for item, site in zip(plan.kept, site_names(plan), strict=True)
        if item.codec is not None
    }


def _not_before(token: jax.Array, value: jax.Array) -> jax.Array:
    """Returns an array that XLA cannot read, or copy, before the token is there.

    Unlike a tie it copies nothing where the array is rearranged anyway. The token is 0,
    which XLA does not know.
    """
    if jnp.issubdtype(jnp.result_type(value), jax.dtypes.prng_key):
        data = _not_before(token, jax.random.key_data(value))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    if not _can_be_tied(value):
        return value
    return jax.lax.select(token == 0, value, jnp.zeros_like(value))


def _read_late(plan: ProgramPlan, equation: Equation) -> Collection[Atom]:
    """Returns the operands of an equation that are there long before they are needed.

    All those of an equation that makes much of little, as random bits of a key: what
    little that is, is mostly there from the start. And large slices, and large
    arguments that are copied before they are read: XLA:GPU would rearrange the weights
    of all convolutions at the start.
    """
    if is_cheap(equation.primitive):
        return ()
    program = plan.program
    read = sum(program.nbytes(v) for v in equation.input_values)
    made = sum(program.nbytes(v) for v in equation.outputs)
    if read < _LITTLE_NBYTES < made:
        return equation.inputs
    late = set(plan.slices.intersection(equation.input_values))
    if rearranges_operands(equation.primitive):
        late.update(v for v in equation.input_values if v < program.num_arguments)
    return [v for v in late if is_large(program, v)]


_LITTLE_NBYTES = 1024


def _tied_values(step: Step, ties: Ties) -> tuple[int, ...]:
    cotangents = step.cotangents
    if not ties.outgoing and step.equation is not None:
        read = step.equation.input_values
        cotangents = tuple(v for v in cotangents if v in read)
    # Those that are only waited for come first.
    cotangents = tuple(sorted(cotangents, key=lambda v: v not in step.awaited))
    return cotangents + (step.given if ties.cotangent else ())


def _read(atoms: Iterable[Atom], env: Mapping[int, Any]) -> list[Any]:
    return [a.value if isinstance(a, Constant) else env[a] for a in atoms]


def _can_be_tied(value: Any) -> bool:
    return not jnp.issubdtype(jnp.result_type(value), jax.dtypes.extended)
