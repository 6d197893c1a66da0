"""Runs a function of sums over examples, one microbatch after another.

The function is split in two. The body computes the sums, and the results that have a
part for each example; it runs once for each microbatch, in a loop. The tail goes on
from the sums of the whole batch, once. The backward pass of the body starts from the
derivative of the tail with respect to the sums. This derivative may depend on some of
the sums: that of a mean over unmasked tokens depends on their number. Then a loop
before computes these sums.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax

from dafjax._call import folded
from dafjax._contexts import Transform
from dafjax._numbers import Array, sum_dtype
from dafjax._trace.bodies import perturbed_values_of
from dafjax._trace.equation import (
    Atom,
    Equation,
    evaluate_all,
    look_up,
    values_of,
    with_literals_of,
)
from dafjax._trace.examples import Examples, Kind, Status
from dafjax._trace.graph import flatten, live_equations
from dafjax._trace.paired import Pair
from dafjax._trace.tracing import trace


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Microbatches:
    """A function whose batch is split.

    Attributes:
        examples: How its values depend on the examples.
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
    wrap: Transform

    @functools.cached_property
    def sums(self) -> tuple[int, ...]:
        """The sums over examples that the tail reads or returns."""
        late = filter(self.examples.is_late, self.examples.graph.equations)
        read = {v for eqn in late for v in eqn.input_values}
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
        made, _ = self._loop(inputs, (*self.sums, *self.rows), (), {})
        return self._results(inputs, made)

    def values_and_gradients(
        self, inputs: Sequence[Array], perturbed: Sequence[bool]
    ) -> tuple[list[Array], dict[int, Array]]:
        """Returns the results, and the gradients of the first one, by argument.

        Args:
            inputs: The arguments of the function.
            perturbed: For each, whether to return its gradient.
        """
        moving = perturbed_values_of(self.examples.graph, perturbed)
        wanted = [n for n, moves in enumerate(perturbed) if moves]
        tail = _Tail(
            self,
            sums=[v for v in self.sums if v in moving],
            # The tail reads no argument that holds examples.
            arguments=[n for n in wanted if not self._status(n).has_rows],
        )
        first = tail.sums_read(inputs)
        known, _ = self._loop(inputs, first, (), {}) if first else ({}, {})
        cotangents, _ = tail.gradients(inputs, known)
        left = [v for v in (*self.sums, *self.rows) if v not in known]
        made, gradients = self._loop(inputs, left, wanted, cotangents)
        made = known | made
        _, of_tail = tail.gradients(inputs, made)
        gradients |= {n: gradients[n] + x for n, x in of_tail.items()}
        return self._results(inputs, made), gradients

    def _results(
        self, inputs: Sequence[Array], made: Mapping[int, Array]
    ) -> list[Array]:
        """Returns the results of the function, given those of the body."""
        outputs = self.examples.graph.outputs
        return self.finish(inputs, made, outputs, with_effects=True)

    def _status(self, atom: Atom) -> Status:
        return self.examples.status_of(atom)

    def finish(
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
            if not self.examples.has_rows(eqn) and (with_effects or eqn.outputs)
        ]
        env: dict[int, Any] = dict(enumerate(inputs)) | dict(made)
        evaluate_all(live_equations(equations, outputs), env)
        return list(map(jnp.asarray, look_up(outputs, env)))

    def _body(self, wanted: Sequence[int]) -> Callable[..., list[Array]]:
        """Returns a function from the inputs of a microbatch to some of its values."""
        made = [self.of_part[v] for v in wanted]
        # What prints or writes once for the whole batch is left to the tail.
        equations = [
            _with_numbers_of_batch(part, whole)
            for whole, part in self.equations
            if whole is None or not whole.has_effect or self.examples.has_rows(whole)
        ]
        live = live_equations(equations, made)

        def body(*inputs: Array) -> list[Array]:
            env: dict[int, Any] = dict(enumerate(inputs))
            evaluate_all(live, env)
            return look_up(made, env)

        return body

    def _input_of(self, argument: int, x: Array, number: Array) -> Array:
        status = self._status(argument)
        if argument in self.examples.drawn:
            return folded(x, number)
        if not status.has_rows:
            return x
        shape = list(x.shape)
        shape[status.axis : status.axis + 1] = [-1, self.number]
        apart = x.reshape(shape)
        return lax.dynamic_index_in_dim(apart, number, status.axis + 1, keepdims=False)

    def _loop(
        self,
        inputs: Sequence[Array],
        values: Sequence[int],
        wanted: Sequence[int],
        cotangents: Mapping[int, Array],
    ) -> tuple[dict[int, Array], dict[int, Array]]:
        """Runs the body for each microbatch.

        Args:
            inputs: The arguments of the function.
            values: The values of the body to return.
            wanted: The arguments whose gradients to return.
            cotangents: The cotangents of sums. These are returned, too.

        Returns:
            Values and gradients of the whole batch, by number.
        """
        pulled = list(cotangents)
        made = [*pulled, *(v for v in values if v not in cotangents)]
        body = self.wrap(self._body(made))

        def run_part(number: Array) -> list[Array]:
            given = [self._input_of(n, x, number) for n, x in enumerate(inputs)]
            if not wanted:
                return body(*given)

            def run(*of_wanted: Array) -> tuple[list[Array], list[Array]]:
                results = body(*_replaced(given, wanted, of_wanted))
                return results[: len(pulled)], results[len(pulled) :]

            starts = [given[n] for n in wanted]
            results, pull, others = jax.vjp(run, *starts, has_aux=True)
            return [*results, *others, *pull([cotangents[v] for v in pulled])]

        numbers = [*made, *wanted]
        avals = [self.examples.graph.avals[number] for number in numbers]
        has_rows = [self._status(number).has_rows for number in numbers]
        is_sum = list(map(operator.not_, has_rows))

        def step(total: list[Array], number: Array) -> tuple[list[Array], list[Array]]:
            found = run_part(number)
            added = itertools.compress(found, is_sum)
            total = [x + y.astype(x.dtype) for x, y in zip(total, added, strict=True)]
            return total, list(itertools.compress(found, has_rows))

        zeros = [
            jnp.zeros(aval.shape, sum_dtype(aval.dtype))
            for aval in itertools.compress(avals, is_sum)
        ]
        counts = jnp.arange(self.number, dtype=jnp.uint32)
        sums, stacked = map(iter, lax.scan(step, zeros, counts))
        results = [
            self._joined(number, next(stacked))
            if rows
            else next(sums).astype(aval.dtype)
            for number, aval, rows in zip(numbers, avals, has_rows, strict=True)
        ]
        of_values, gradients = results[: len(made)], results[len(made) :]
        return (
            dict(zip(made, of_values, strict=True)),
            dict(zip(wanted, gradients, strict=True)),
        )

    def _joined(self, value: int, parts: Array) -> Array:
        """Returns an array of the whole batch, given one for each microbatch."""
        status, shape = self._status(value), self.examples.graph.avals[value].shape
        axis, inner = status.axis, max(status.inner, 1)
        before, after = shape[:axis], shape[axis + 1 :]
        outer = shape[axis] // (self.number * self.part_size * inner)
        # The value of a single example may have another shape.
        split = parts.reshape(
            self.number, *before, outer, self.part_size, inner, *after
        )
        return jnp.moveaxis(split, 0, axis + 2).reshape(shape)


@final
@dataclasses.dataclass(frozen=True)
class _Tail:
    """The tail of a function, to differentiate.

    Attributes:
        batch: The function.
        sums: The sums that are differentiated.
        arguments: The arguments that are differentiated.
    """

    batch: Microbatches
    sums: Sequence[int]
    arguments: Sequence[int]

    def gradients(
        self, inputs: Sequence[Array], known: Mapping[int, Array]
    ) -> tuple[dict[int, Array], dict[int, Array]]:
        """Returns the gradients of the first result: by sums, and by arguments.

        Args:
            inputs: The arguments of the function.
            known: The sums that the gradients depend on.
        """
        graph = self.batch.examples.graph
        avals = ((v, graph.avals[v]) for v in self.batch.sums)
        sums = {v: jnp.zeros(aval.shape, aval.dtype) for v, aval in avals} | {**known}

        def loss(of_sums: dict[int, Array], of_arguments: dict[int, Array]) -> Array:
            given = _replaced(inputs, list(of_arguments), list(of_arguments.values()))
            (value,) = self.batch.finish(given, sums | of_sums, graph.outputs[:1])
            return value

        of_sums = {v: sums[v] for v in self.sums}
        of_arguments = {n: inputs[n] for n in self.arguments}
        return jax.grad(loss, argnums=(0, 1))(of_sums, of_arguments)

    def sums_read(self, inputs: Sequence[Array]) -> list[int]:
        """Returns the sums that the gradients by sums depend on."""
        graph, sums = self.batch.examples.graph, self.batch.sums

        def of_sums(*values: Array) -> list[Array]:
            known = dict(zip(sums, values, strict=True))
            return list(self.gradients(inputs, known)[0].values())

        closed, consts, _ = trace(of_sums, [graph.avals[v] for v in sums])
        flat = flatten(closed)
        live = live_equations(flat.equations, flat.outputs)
        read = {v for eqn in live for v in eqn.input_values}
        read.update(values_of(flat.outputs))
        return [v for n, v in enumerate(sums, len(consts)) if n in read]


def _replaced(
    values: Sequence[Array], places: Sequence[int], by: Sequence[Array]
) -> list[Array]:
    """Returns the values, with others at some places."""
    changed = dict(zip(places, by, strict=True))
    return [changed.get(n, x) for n, x in enumerate(values)]


def _with_numbers_of_batch(part: Equation, whole: Equation | None) -> Equation:
    """Returns an elementwise equation with the numbers that the whole batch has."""
    if whole is None or not part.rule.is_elementwise:
        return part
    return with_literals_of(part, whole)
