"""Runs the forward pass and packs its residuals.

A batch norm sums a convolution's result and its squares over all axes but the channels.
If that value is packed with per-channel groups, packing also returns these sums (on
GPUs from values in registers), and no other kernel reads the whole value for them.

A packed value passes through a barrier. A sum after the barrier is a kernel of its own
that reads the whole value again; before the barrier XLA:GPU fuses the sum into the
kernel that computes the value. Examples are the mean and variance of a residual stream
for the next norm.
"""

import itertools
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np

from dafjax import config
from dafjax._native import hold, pin, pin_late, tie
from dafjax._numbers import ArrayTree
from dafjax._plan.plan import ProgramPlan
from dafjax._schedule.schedule import last_uses
from dafjax._schedule.steps import Ties, can_be_tied, not_before
from dafjax._schedule.values import MeasuredHandle
from dafjax._trace.equation import Atom, Equation, evaluate, look_up, values_of
from dafjax._trace.graph import live_equations, readers_of
from dafjax._trace.residuals import Program
from dafjax.codecs import AbstractCodec
from dafjax.codecs._affine import sample_rounding_noise
from dafjax.stores import AbstractStore


class ColumnSums(NamedTuple):
    """Equations that packing a value replaces.

    Attributes:
        of_values: Equations that sum the value over all axes but the last.
        of_squares: Equations that sum its squares over these axes.
    """

    of_values: tuple[Equation, ...]
    of_squares: tuple[Equation, ...]


def find_column_sums(
    program: Program,
    equations: Sequence[Equation],
    codecs: Mapping[int, AbstractCodec],
) -> dict[int, ColumnSums]:
    """Returns the equations whose sums packing can compute, for each such value.

    Args:
        program: The program of the equations.
        equations: The equations of the forward pass that run.
        codecs: The codec of each value.
    """
    squares = {
        eqn.outputs[0]: eqn.input_values[0] for eqn in equations if eqn.is_square
    }
    sums = [eqn for eqn in equations if _sums_columns(program, eqn)]
    found: dict[int, ColumnSums] = {}
    for value, codec in codecs.items():
        aval = program.avals[value]
        like = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        if aval.dtype != np.float32 or not codec.sums_columns(like):
            continue
        of_values = [eqn for eqn in sums if eqn.input_values == (value,)]
        of_squares = [eqn for eqn in sums if squares.get(eqn.input_values[0]) == value]
        if of_values and of_squares:
            found[value] = ColumnSums(tuple(of_values), tuple(of_squares))
    return found


def _sums_columns(program: Program, eqn: Equation) -> bool:
    if eqn.primitive != "reduce_sum" or len(eqn.input_values) != 1:
        return False
    aval = program.avals[eqn.input_values[0]]
    is_shared = bool(aval.sharding.mesh.explicit_axes)
    axes = tuple(range(len(aval.shape) - 1))
    return bool(axes) and tuple(eqn.params["axes"]) == axes and not is_shared


class Stage(NamedTuple):
    """One step of the forward pass.

    Attributes:
        equation: The equation.
        made: Values that can be packed after it: its own results and those of earlier
            steps that wait for it.
        sums: Sums over the first of these values.
    """

    equation: Equation
    made: tuple[int, ...]
    sums: tuple[int, ...] = ()


def with_early_sums(
    program: Program, equations: Sequence[Equation], packed: Container[int]
) -> tuple[Stage, ...]:
    """Reorders equations so that sums over packed values run before the barrier.

    Args:
        program: The program of the equations.
        equations: The equations of the forward pass that run.
        packed: The values that are packed.
    """
    readers = readers_of(equations)

    def elements(values: Iterable[int]) -> int:
        return sum(program.avals[v].size for v in values)

    def reads_alone(eqn: Equation, value: int) -> bool:
        return eqn.input_values == (value,) and not eqn.has_effect

    def sums_of(value: int) -> list[Equation]:
        """Returns the reductions that read only this value."""
        return [
            eqn
            for eqn in readers[value]
            if reads_alone(eqn, value)
            and not eqn.rule.is_elementwise
            and eqn.rule.is_reduction(elements(eqn.outputs), elements([value]))
        ]

    def are_summed(terms: Sequence[int]) -> bool:
        """Returns whether the only readers of some values are sums over them."""
        return all(
            v not in packed and readers[v] and readers[v] == sums_of(v) for v in terms
        )

    def early(eqn: Equation) -> tuple[list[Equation], list[Equation]]:
        """Returns equations for terms of a packed result, and for sums of both."""
        if not eqn.rule.adds:
            return [], []
        (value,) = eqn.outputs
        if value not in packed or not program.is_large(value):
            return [], []
        terms = [
            e
            for e in readers[value]
            if reads_alone(e, value) and e.rule.is_elementwise and are_summed(e.outputs)
        ]
        summed = [value, *(v for e in terms for v in e.outputs)]
        return terms, [e for v in summed for e in sums_of(v)]

    stages: list[Stage] = []
    done: set[Equation] = set()
    for eqn in equations:
        if eqn in done:
            continue
        terms, sums = early(eqn)
        *waiting, last = (eqn, *terms, *sums)
        done.update((*terms, *sums))
        made = tuple(v for e in (*waiting, last) for v in e.outputs)
        stages += [Stage(e, ()) for e in waiting]
        stages.append(Stage(last, made, tuple(v for e in sums for v in e.outputs)))
    return tuple(stages)


def run_forward(
    plan: ProgramPlan,
    codecs: Mapping[int, AbstractCodec],
    arguments: Sequence[jax.Array],
    *,
    store: AbstractStore,
    ties: Ties,
    seed: Any,
    after: jax.Array | None = None,
) -> tuple[list[Any], list[ArrayTree]]:
    """Computes the results and the saved residuals.

    Args:
        plan: The program and its saved residuals.
        codecs: The codec of each value, from `codecs_in`.
        arguments: The function's arguments.
        store: Where packed values are saved.
        ties: Which barriers to insert.
        seed: Seed of the rounding noise, a uint32 scalar.
        after: The token of `restore_arguments` if this forward pass is a recompute.

    Returns:
        The results, exact; and for each item of `plan.kept` the value itself if it has
        no codec, else its handle or `MeasuredHandle`.
    """
    token = jnp.zeros((), jnp.uint8) if after is None else after
    forward = _RunningForward(plan, codecs, arguments, store, ties, seed, token)
    for value in range(plan.program.num_arguments):
        forward.keep(value, -1)
    for now, stage in enumerate(forward.stages):
        forward.run(now, stage)
    return forward.finish()


@final
class _RunningForward:
    """The live and saved values while the forward pass runs."""

    def __init__(
        self,
        plan: ProgramPlan,
        codecs: Mapping[int, AbstractCodec],
        arguments: Sequence[jax.Array],
        store: AbstractStore,
        ties: Ties,
        seed: Any,
        token: jax.Array,
    ) -> None:
        results = plan.program.results
        self._plan = plan
        self._store = store
        self._ties = ties
        self._seed = seed
        self._kept = {item.value: (site, item) for site, item in enumerate(plan.kept)}
        self._codecs = codecs
        self._copied = frozenset(plan.copies.values())
        equations = live_equations(plan.program.forward, [*results, *self._kept])
        self._sums = find_column_sums(plan.program, equations, codecs)
        found = itertools.chain.from_iterable(self._sums.values())
        with_packing = set(itertools.chain.from_iterable(found))
        others = [eqn for eqn in equations if eqn not in with_packing]
        others = live_equations(others, [*results, *self._kept])
        self.stages = with_early_sums(plan.program, others, {*codecs, *self._copied})
        self._last_use = last_uses([s.equation for s in self.stages], results)
        self._env: dict[int, Any] = dict(enumerate(arguments))
        self._stored: dict[int, ArrayTree] = {}
        self._pinned = plan.whole_weights if ties.layouts else frozenset()
        # Packed arrays that no later value waits for yet.
        self._pending: list[jax.Array] = []
        # Carries the dependency on past equations to operations that XLA would
        # otherwise run at the start.
        self._token = token

    def keep(self, value: int, now: int, sums: Sequence[int] = ()) -> None:
        """Saves a value that was just computed, if the plan keeps it.

        Args:
            value: The value.
            now: The index of the last equation that ran; -1 for arguments.
            sums: Sums over the value that were computed before packing.
        """
        if value not in self._kept:
            return
        site, item = self._kept[value]
        if item.codec is None:
            self._stored[value] = self._env[value]
            return
        codec = self._codecs[value]
        is_mask = self._env[value].dtype == jnp.bool_
        if self._plan.program.is_large(value) and not is_mask:
            # Masks are excluded: the kernels that compute them also pack them.
            if self._ties.layouts:
                # Packing reads this layout. Without the constraint XLA:GPU transposes
                # the value twice.
                self._env[value] = pin(self._env[value])
            if self._ties.forward and self._is_made(value):
                # Otherwise XLA:CPU computes the value twice, for packing and for its
                # other consumers.
                self._env[value], self._token = tie(
                    self._env[value], self._token, only_on_cpus=True
                )
        with jax.named_scope("pack"):
            # Each residual id gets its own noise, even if the tensor is the same.
            packed, with_packing = self._encode(value, codec, salt=site)
        sums = (*sums, *with_packing)
        code = self._store.measured_code(codec)
        noise = None
        if code is not None:
            noise = sample_rounding_noise(code, self._env[value])
        leaves, structure = jax.tree.flatten((packed, noise))
        # Later equations read the original value, not its normalized copy.
        carrier = self._plan.copies.get(value, value)
        if self._ties.forward and self._last_use.get(carrier, -1) > now:
            through = (carrier, *sums)
            arrays = look_up(through, self._env)
            *tied, self._token = tie(
                *leaves,
                *arrays,
                self._token,
                num_awaited=len(leaves),
                num_droppable=len(leaves),
            )
            leaves, arrays = tied[: len(leaves)], tied[len(leaves) :]
            self._env.update(zip(through, arrays, strict=True))
        else:
            self._pending.extend(leaves)
        packed, noise = jax.tree.unflatten(structure, leaves)
        is_brief = value in self._plan.brief
        handle = packed if is_brief else self._store.put(packed)
        self._stored[value] = handle if noise is None else MeasuredHandle(handle, noise)
        for total in with_packing:
            self.keep(total, now)

    def _encode(
        self, value: int, codec: AbstractCodec, *, salt: int
    ) -> tuple[ArrayTree, tuple[int, ...]]:
        """Packs a value. Also returns the sums computed with the packing."""
        if value not in self._sums:
            packed = codec.encode_salted(self._env[value], seed=self._seed, salt=salt)
            return packed, ()
        packed, *totals = codec.encode_and_sum(
            self._env[value], seed=self._seed, salt=salt
        )
        summed: list[int] = []
        for equations, total in zip(self._sums[value], totals, strict=True):
            results = [v for eqn in equations for v in eqn.outputs]
            self._env.update(dict.fromkeys(results, total))
            summed += results
        return packed, tuple(summed)

    def run(self, now: int, stage: Stage) -> None:
        """Runs one forward step and saves the values that the plan keeps."""
        equation = stage.equation
        if not equation.rule.is_cheap:
            # Arguments stay live anyway, and a barrier would copy them.
            self._tie_pending(filter(self._is_made, equation.input_values))
        if self._ties.forward:
            self._tie_rectified(equation)
        operands = look_up(equation.inputs, self._env)
        if self._ties.arguments:
            late = _read_late(self._plan, equation)
            if not self._plan.slices.isdisjoint(late):
                # If nothing is packed between two products, the token is ready too
                # early.
                self._await_operand(equation)
            operands = [
                self._delay(atom, operand) if atom in late else operand
                for atom, operand in zip(equation.inputs, operands, strict=True)
            ]
        outputs = evaluate(equation, operands)
        self._env.update(zip(equation.outputs, outputs, strict=True))
        if self._ties.forward:
            self._tie_copied(equation)
        for value in stage.made:
            self.keep(value, now, stage.sums if value == stage.made[0] else ())

    def _tie_copied(self, equation: Equation) -> None:
        """Puts a barrier after values that have normalized copies.

        XLA:CPU would compute such a value three times: for the scale, for the copy and
        for its other consumers.
        """
        for value in self._copied.intersection(equation.outputs):
            self._env[value], self._token = tie(
                self._env[value], self._token, only_on_cpus=True
            )

    def _tie_rectified(self, equation: Equation) -> None:
        """Puts a barrier after a ReLU result before its mask is computed.

        XLA would otherwise recompute the result from its operands for the mask.
        """
        masks = self._plan.masks
        for result in [masks[v] for v in equation.outputs if v in masks]:
            self._env[result], self._token = tie(self._env[result], self._token)

    def finish(self) -> tuple[list[Any], list[ArrayTree]]:
        """Returns the results and the saved values."""
        results = values_of(self._plan.program.results)
        self._tie_pending(results)
        large = [v for v in self._kept if self._plan.program.is_large(v)]
        if self._ties.results and large:
            self._tie_results(results, large[-1])
        stored = [self._stored[item.value] for item in self._plan.kept]
        return look_up(self._plan.program.results, self._env), stored

    def _tie_results(self, results: Sequence[int], last: int) -> None:
        """Puts small results and the value packed last through one barrier."""
        if self._kept[last][1].codec is None:
            # The value is saved uncompressed and stays live, so computing a loss from
            # it later costs no memory.
            return
        program = self._plan.program
        made = filter(self._is_made, dict.fromkeys(results))
        small = [v for v in made if not program.is_large(v)]
        leaves, structure = jax.tree.flatten(self._stored[last])
        tied = tie(*(self._env[v] for v in small), *leaves)
        self._env.update(zip(small, tied[: len(small)], strict=True))
        self._stored[last] = jax.tree.unflatten(structure, tied[len(small) :])

    def _tie_pending(self, carriers: Iterable[int]) -> None:
        """Makes the largest of some values wait for all pending packed arrays."""
        carrier = max(
            (v for v in carriers if can_be_tied(self._env[v])),
            key=lambda v: self._env[v].size,
            default=None,
        )
        if self._pending and self._ties.forward and carrier is not None:
            self._env[carrier], self._token = hold(
                self._env[carrier], self._token, after=self._pending
            )
            self._pending.clear()

    def _await_operand(self, equation: Equation) -> None:
        made = list(filter(self._is_made, equation.input_values))
        if made:
            largest = max(made, key=self._plan.program.nbytes)
            self._env[largest], self._token = tie(
                self._env[largest], self._token, num_awaited=1
            )

    def _delay(self, atom: Atom, operand: Any) -> Any:
        if atom not in self._pinned:
            return not_before(self._token, operand)
        late, self._token = pin_late(operand, self._token)
        return late

    def _is_made(self, value: int) -> bool:
        return value >= self._plan.program.num_arguments


def _read_late(plan: ProgramPlan, equation: Equation) -> Collection[Atom]:
    """Returns the operands of an equation that must not be read early.

    If the equation computes a large result from little input, such as random bits from
    a key, these are all operands, because small inputs mostly exist from the start.
    Otherwise these are large slices, and large arguments that are copied before use:
    XLA:GPU would rearrange the weights of all convolutions at the start. Cheap
    equations have no such operands.
    """
    if equation.rule.is_cheap:
        return ()
    program = plan.program
    read = sum(program.nbytes(v) for v in equation.input_values)
    made = sum(program.nbytes(v) for v in equation.outputs)
    if read < config.LITTLE_NBYTES < made:
        return equation.inputs
    late = set(plan.slices.intersection(equation.input_values))
    if equation.rule.is_copied_before:
        late.update(v for v in equation.input_values if v < program.num_arguments)
    return [v for v in late if program.is_large(v)]
