"""Runs a function of sums over examples, one microbatch after another.

The function is split in two. The body computes the sums, and what it returns for each
example; it runs once for each microbatch, in a loop. The tail goes on from the sums of
the whole batch, once. Its derivative with respect to the sums is what the body's
backward pass starts from. If it depends on some of the sums, as a mean over the tokens
that a mask keeps depends on their number, a loop before computes these.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax

from dafjax._numbers import Array
from dafjax._trace.bodies import perturbed_values_of
from dafjax._trace.equation import Atom, Equation, evaluate, look_up, with_literals_of
from dafjax._trace.examples import Examples, Kind, Pair, Status
from dafjax._trace.graph import Graph, flatten, live_equations
from dafjax._trace.tracing import trace


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Microbatches:
    """A function whose batch is split.

    Attributes:
        examples: What it computes for each example.
        of_part: For each value, the value in the program of a microbatch.
        equations: The equations of that program.
        part_size: How many examples a microbatch has.
        number: How many microbatches there are.
        wrap: Gives the body the derivative rule that the function had.
    """

    examples: Examples
    of_part: Mapping[int, Atom]
    equations: Sequence[Pair]
    part_size: int
    number: int
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]

    @functools.cached_property
    def sums(self) -> tuple[int, ...]:
        """The sums over examples that the tail reads or returns."""
        read = {v for eqn in self._tail for v in eqn.input_values}
        read.update(a for a in self.examples.graph.outputs if isinstance(a, int))
        status = self.examples.status
        return tuple(sorted(v for v in read if status[v].kind is Kind.SUM))

    @functools.cached_property
    def rows(self) -> tuple[int, ...]:
        """The results with a part for each example."""
        outputs = self.examples.graph.outputs
        rows = (a for a in outputs if self.examples.status_of(a).has_rows)
        return tuple(dict.fromkeys(a for a in rows if isinstance(a, int)))

    def values(self, inputs: Sequence[Array]) -> list[Array]:
        """Returns the results of the function."""
        made = self._loop(inputs, (*self.sums, *self.rows))
        outputs = self.examples.graph.outputs
        return self._finish(inputs, made, outputs, with_effects=True)

    def values_and_gradients(
        self, inputs: Sequence[Array], perturbed: Sequence[bool]
    ) -> tuple[list[Array], dict[int, Array]]:
        """Returns the results, and the gradients of the first one.

        Args:
            inputs: The arguments of the function.
            perturbed: For each, whether to return its gradient.
        """
        moving = perturbed_values_of(self.examples.graph, perturbed)
        active = [v for v in self.sums if v in moving]
        wanted = [n for n, moves in enumerate(perturbed) if moves]
        # The tail reads no argument that holds examples.
        direct = [n for n in wanted if not self._status(n).has_rows]

        graph = self.examples.graph

        def cotangents(*operands: Array) -> tuple[list[Array], list[Array]]:
            sums = dict(zip(self.sums, operands[len(inputs) :], strict=True))
            given = list(operands[: len(inputs)])

            def loss(of_active: Sequence[Array], of_direct: Sequence[Array]) -> Array:
                known = sums | dict(zip(active, of_active, strict=True))
                for n, x in zip(direct, of_direct, strict=True):
                    given[n] = x
                (value,) = self._finish(given, known, graph.outputs[:1])
                return value

            start = [sums[v] for v in active], [given[n] for n in direct]
            return jax.grad(loss, argnums=(0, 1))(*start)

        avals = [*map(jax.typeof, inputs), *map(self._aval, self.sums)]
        closed, consts, _ = trace(lambda *x: cotangents(*x)[0], avals)
        read = _inputs_read(flatten(closed))
        offset = len(consts) + len(inputs)
        first = [v for n, v in enumerate(self.sums, offset) if n in read]
        known = self._loop(inputs, first) if first else {}
        zeros = {v: jnp.zeros(a.shape, a.dtype) for v, a in self._avals().items()}
        at_first = [(zeros | known)[v] for v in self.sums]
        of_sums, _ = cotangents(*inputs, *at_first)
        made, gradients = self._loop_with_gradients(
            inputs, wanted, dict(zip(active, of_sums, strict=True)), known
        )
        made = known | made
        _, of_direct = cotangents(*inputs, *(made[v] for v in self.sums))
        for n, x in zip(direct, of_direct, strict=True):
            gradients[n] += x.astype(gradients[n].dtype)
        results = {n: x.astype(inputs[n].dtype) for n, x in gradients.items()}
        return self._finish(inputs, made, graph.outputs, with_effects=True), results

    def _status(self, atom: Atom) -> Status:
        return self.examples.status_of(atom)

    def _aval(self, value: int) -> Any:
        return self.examples.graph.avals[value]

    def _avals(self) -> dict[int, Any]:
        return {v: self._aval(v) for v in self.sums}

    @functools.cached_property
    def _tail(self) -> tuple[Equation, ...]:
        return tuple(e for e in self.examples.graph.equations if self._is_late(e))

    def _is_late(self, eqn: Equation) -> bool:
        return any(self._status(v).is_late for v in eqn.input_values)

    def _finish(
        self,
        inputs: Sequence[Array],
        made: Mapping[int, Array],
        outputs: Sequence[Atom],
        *,
        with_effects: bool = False,
    ) -> list[Array]:
        """Returns results of the function: runs the tail.

        Args:
            inputs: The arguments of the function.
            made: The sums, and the results with a part for each example.
            outputs: The results to return.
            with_effects: Whether equations run that only print or write.
        """
        equations = [
            eqn
            for eqn in self.examples.graph.equations
            if not self._is_of_body(eqn) and (with_effects or eqn.outputs)
        ]
        env: dict[int, Any] = dict(enumerate(inputs)) | dict(made)
        for eqn in live_equations(equations, outputs):
            results = evaluate(eqn, look_up(eqn.inputs, env))
            env.update(zip(eqn.outputs, results, strict=True))
        return list(map(jnp.asarray, look_up(outputs, env)))

    def _is_of_body(self, eqn: Equation) -> bool:
        """Returns whether an equation reads or makes parts for each example."""
        read = map(self._status, eqn.input_values)
        made = map(self._status, eqn.outputs)
        return any(s.has_rows or s.kind is Kind.MIXED for s in (*read, *made))

    def _body(self, wanted: Sequence[int]) -> Callable[..., list[Array]]:
        """Returns a function from the inputs of a microbatch to some of its values."""
        made = [self.of_part[v] for v in wanted]
        # What prints or writes once for the whole batch is left to the tail.
        equations = [
            _with_numbers_of_batch(part, whole)
            for whole, part in self.equations
            if whole is None or not whole.has_effect or self._is_of_body(whole)
        ]
        live = live_equations(equations, made)

        def body(*inputs: Array) -> list[Array]:
            env: dict[int, Any] = dict(enumerate(inputs))
            for eqn in live:
                outputs = evaluate(eqn, look_up(eqn.inputs, env))
                env.update(zip(eqn.outputs, outputs, strict=True))
            return look_up(made, env)

        return body

    def _inputs_of(self, inputs: Sequence[Array], number: Array) -> list[Array]:
        """Returns the inputs of a microbatch."""
        return [self._input_of(n, x, number) for n, x in enumerate(inputs)]

    def _input_of(self, argument: int, x: Array, number: Array) -> Array:
        status = self._status(argument)
        if argument in self.examples.drawn:
            return _folded(x, number)
        if not status.has_rows:
            return x
        shape = list(x.shape)
        shape[status.axis : status.axis + 1] = [-1, self.number]
        apart = x.reshape(shape)
        return lax.dynamic_index_in_dim(apart, number, status.axis + 1, keepdims=False)

    def _loop(self, inputs: Sequence[Array], wanted: Sequence[int]) -> dict[int, Array]:
        """Returns values of the whole batch: sums, and parts for each example."""
        made, _ = self._loop_with_gradients(inputs, (), {}, {}, wanted)
        return made

    def _loop_with_gradients(
        self,
        inputs: Sequence[Array],
        wanted: Sequence[int],
        cotangents: Mapping[int, Array],
        known: Mapping[int, Array],
        values: Sequence[int] | None = None,
    ) -> tuple[dict[int, Array], dict[int, Array]]:
        """Returns values of the whole batch, and gradients.

        Args:
            inputs: The arguments of the function.
            wanted: The arguments whose gradients to return.
            cotangents: The cotangents of sums.
            known: Sums that are known already.
            values: The values to return; `None` for all that are not known.
        """
        if values is None:
            values = [v for v in (*self.sums, *self.rows) if v not in known]
        pulled = list(cotangents)
        rest = [v for v in values if v not in cotangents]
        body = self.wrap(self._body([*pulled, *rest]))
        stacked = [v for v in values if self._status(v).has_rows]
        summed = [v for v in values if v not in stacked]

        def step(
            carry: tuple[dict[int, Array], dict[int, Array]], number: Array
        ) -> tuple[Any, Any]:
            sums, gradients = carry
            given = self._inputs_of(inputs, number)

            def run(*of_wanted: Array) -> tuple[list[Array], list[Array]]:
                arguments = list(given)
                for n, x in zip(wanted, of_wanted, strict=True):
                    arguments[n] = x
                results = body(*arguments)
                return results[: len(pulled)], results[len(pulled) :]

            starts = [given[n] for n in wanted]
            if wanted:
                results, pull, others = jax.vjp(run, *starts, has_aux=True)
                pulled_back = pull([cotangents[v] for v in pulled])
            else:
                (results, others), pulled_back = run(), ()
            made = dict(zip([*pulled, *rest], [*results, *others], strict=True))
            found = dict(zip(wanted, pulled_back, strict=True))
            sums = {v: x + made[v] for v, x in sums.items()}
            gradients = {n: x + found[n].astype(x.dtype) for n, x in gradients.items()}
            parts = {n: found[n] for n in wanted if n not in gradients}
            return (sums, gradients), ({v: made[v] for v in stacked}, parts)

        zeros = {v: jnp.zeros(self._aval(v).shape, self._aval(v).dtype) for v in summed}
        whole = [n for n in wanted if not self._status(n).has_rows]
        start = {n: jnp.zeros(inputs[n].shape, _sum_dtype(inputs[n])) for n in whole}
        carry, (rows, parts) = lax.scan(
            step, (zeros, start), jnp.arange(self.number, dtype=jnp.uint32)
        )
        sums, gradients = carry
        made = sums | {v: self._joined(v, x) for v, x in rows.items()}
        gradients |= {n: self._joined(n, x) for n, x in parts.items()}
        return made, gradients

    def _joined(self, value: int, parts: Array) -> Array:
        """Returns an array of the whole batch, given those of the microbatches."""
        status, shape = self._status(value), self._aval(value).shape
        axis, inner = status.axis, max(status.inner, 1)
        apart = parts.shape[1:]
        before, after = apart[:axis], apart[axis + 1 :]
        size = self.part_size
        outer = apart[axis] // (size * inner)
        split = parts.reshape(self.number, *before, outer, size, inner, *after)
        return jnp.moveaxis(split, 0, axis + 2).reshape(shape)


def _with_numbers_of_batch(part: Equation, whole: Equation | None) -> Equation:
    """Returns an elementwise equation with the numbers that the whole batch has."""
    if whole is None or not part.rule.is_elementwise:
        return part
    return with_literals_of(part, whole)


def _inputs_read(graph: Graph) -> set[int]:
    """Returns the inputs that the outputs of a program depend on."""
    live = live_equations(graph.equations, graph.outputs)
    read = {v for eqn in live for v in eqn.input_values}
    read.update(a for a in graph.outputs if isinstance(a, int))
    return {v for v in read if v < graph.num_inputs}


def _folded(key: Array, number: Array) -> Array:
    """Returns keys for a microbatch; `key` may be an array of keys, typed or not."""
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        fold = jax.random.fold_in
        rank = key.ndim
    else:
        fold, rank = jax.random.fold_in, key.ndim - 1
    for _ in range(rank):
        fold = jax.vmap(fold, (0, None))
    return fold(key, number)


def _sum_dtype(x: Array) -> Any:
    """Returns the dtype in which the gradients of microbatches are added."""
    is_short = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32
    return jnp.float32 if is_short else x.dtype
