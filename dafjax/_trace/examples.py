"""Follows the examples of a batch through a program, and finds its sums over them.

Two traces of one function are compared: for the whole batch, and for a microbatch. An
axis whose length differs between them holds examples. The analysis follows these axes
through the program. It tells apart values that no example changes; values that hold a
part for each example, computed from that example alone; sums over the examples; and
values computed from such sums. The sums of all microbatches add up to the sum of the
whole batch, and the rest of the program goes on from there.

Batch normalization is no such program: it computes each example from all of them.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np

from dafjax._trace.axis_rules import LENGTHS
from dafjax._trace.equation import (
    Atom,
    Constant,
    Equation,
    bodies,
    call_instead,
    scan_arity,
    values_of,
    with_constants,
)
from dafjax._trace.example_rules import (
    OTHERS,
    PLACES,
    SOME,
    UNKNOWN,
    Kind as Kind,
    MixesError,
    Status as Status,
    common_inner,
    status_of_rows,
)
from dafjax._trace.graph import (
    CALLS,
    RULED_CALLS,
    Graph,
    find_numbers,
    flatten,
    is_wrapped,
)
from dafjax._trace.paired import (
    NotSeparableError,
    are_alike,
    differ,
    is_equal_atom,
    is_same_param,
    listed,
)
from dafjax._trace.residuals import trace_pullback
from dafjax._trace.rules import Cost
from dafjax._trace.tracing import ClosedJaxpr


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
    """How the values of a function depend on the examples of a batch.

    Attributes:
        graph: Its program for the whole batch.
        status: The status of each value.
        drawn: The arguments, keys of random numbers, that examples draw from.
        shared: Those that numbers for the whole batch are drawn from.
    """

    graph: Graph
    status: Mapping[int, Status]
    drawn: frozenset[int]
    shared: frozenset[int]

    def status_of(self, atom: Atom) -> Status:
        """Returns the status of a value or a constant."""
        return _status(atom, self.status)

    def read_by_tail(self) -> set[int]:
        """Returns the values, sums aside, that the program after the sums reads."""
        outputs = values_of(self.graph.outputs)
        read = {v for v in outputs if not self.status[v].has_rows}
        for eqn in reversed(self.graph.equations):
            if self.is_late(eqn) or not read.isdisjoint(eqn.outputs):
                made = [v for v in eqn.outputs if self.status[v].kind is Kind.SUM]
                if not made:
                    read.update(eqn.input_values)
        return {v for v in read if not self.status[v].is_late}

    def made_with_rows(self) -> set[int]:
        """Returns the values, sums aside, of equations that read or make examples."""
        return {
            v
            for eqn in self.graph.equations
            for v in eqn.outputs
            if self.status[v].kind is Kind.SAME and self.has_rows(eqn)
        }

    def has_rows(self, eqn: Equation) -> bool:
        """Returns whether an equation reads or makes parts for each example."""
        values = (*eqn.input_values, *eqn.outputs)
        kinds = [self.status[v] for v in values]
        return any(s.has_rows or s.kind is Kind.MIXED for s in kinds)

    def is_late(self, eqn: Equation) -> bool:
        """Returns whether an equation goes on from sums over the examples."""
        return any(self.status[v].is_late for v in eqn.input_values)


def follow_examples(
    whole: Graph, other: Graph, arguments: Sequence[Status], sizes: tuple[int, int]
) -> Examples:
    """Returns how the values of a function depend on the examples.

    Args:
        whole: Its program for the whole batch.
        other: Its program for another number of examples, two or more.
        arguments: The status of each argument.
        sizes: How many examples the batch has, and the other program.

    Raises:
        NotSeparableError: The programs differ in more than the number of examples.
    """
    walk = _Walk(sizes)
    status = walk.run(whole, other, arguments)
    return Examples(whole, status, frozenset(walk.drawn), frozenset(walk.shared))


_SAME = Status(Kind.SAME)
_LATE = Status(Kind.LATE)


@final
class _Walk:
    """Follows the examples through both traces.

    Attributes:
        drawn: The arguments that examples draw random numbers from.
        shared: Those that numbers for the whole batch are drawn from.
    """

    def __init__(self, sizes: tuple[int, int]) -> None:
        self._sizes = sizes
        # How deep in bodies the walk is; 1 in the function itself.
        self._depth = 0
        self.drawn: set[int] = set()
        self.shared: set[int] = set()

    def run(
        self, whole: Graph, other: Graph, arguments: Sequence[Status]
    ) -> dict[int, Status]:
        """Returns the status of each value of `whole`."""
        for eqn, of_other in itertools.zip_longest(whole.equations, other.equations):
            if not (eqn and of_other and are_alike(eqn, of_other)):
                raise NotSeparableError(differ(eqn, of_other))
        status = dict(enumerate(arguments))
        self._depth += 1
        try:
            for eqn, of_other in zip(whole.equations, other.equations, strict=True):
                operands = [_status(a, status) for a in eqn.operand_atoms]
                found = self._guarded(eqn, of_other, operands)
                status.update(zip(eqn.outputs, found, strict=True))
        finally:
            self._depth -= 1
        return status

    def _results(
        self, called: Sequence[ClosedJaxpr], arguments: Sequence[Status]
    ) -> list[Status]:
        """Returns the status of each result of a body."""
        graph, other = map(flatten, called)
        status = self.run(graph, other, arguments)
        return [_status(atom, status) for atom in graph.outputs]

    def _guarded(
        self, eqn: Equation, other: Equation, operands: Sequence[Status]
    ) -> list[Status]:
        """Returns the status of each result; `MIXED` with the reason where it is."""
        for status in operands:
            if status.kind is Kind.MIXED:
                return [status] * len(eqn.outputs)
        try:
            if not any(status.is_late for status in operands):
                return self._walk(eqn, other, operands)
            if not any(status.has_rows for status in operands):
                found = self._walk(eqn, other, operands)
                if self._depth > 1 and all(s.kind is Kind.SUM for s in found):
                    return found
                if not any(status.has_rows for status in found):
                    return [_LATE] * len(found)
            reason = "it computes each example from a sum over all"
        except MixesError as error:
            reason = str(error)
        reason = f"{reason}: {listed(eqn)}"
        return [Status(Kind.MIXED, reason=reason)] * len(eqn.outputs)

    def _walk(
        self, eqn: Equation, other: Equation, operands: Sequence[Status]
    ) -> list[Status]:
        """Returns the status of each result; raises where a result is `MIXED`."""
        self._check_constants(eqn, other, operands)
        of_body = _BODIES.get(eqn.jax_primitive)
        if of_body is not None:
            return _of_outputs(eqn, of_body(self, eqn, other, operands))
        if eqn.jax_primitive == "optimization_barrier":
            return _of_outputs(eqn, operands)
        avals = [
            (v.aval, w.aval) for v, w in zip(*map(_results, (eqn, other)), strict=True)
        ]
        results = [self._made(eqn, *pair, operands) for pair in avals]
        return _of_outputs(eqn, results)

    def _check_constants(
        self, eqn: Equation, other: Equation, operands: Sequence[Status]
    ) -> None:
        """Raises if a number depends on the size of the batch, but not in a scale.

        Elementwise equations of the function itself run with the numbers of the whole
        batch, as do those that follow a sum. Places are numbered within a microbatch.
        """
        if any(status.is_late for status in operands):
            return
        pairs = zip(eqn.operand_atoms, other.operand_atoms, strict=True)
        same = all(map(is_equal_atom, *zip(*pairs, strict=True))) if operands else True
        is_scale = self._depth == 1 and eqn.rule.is_elementwise
        are_places = any(status.has_places for status in operands)
        avals = [
            (v.aval, w.aval)
            for v, w in zip(_results(eqn), _results(other), strict=True)
        ]
        has_rows = any(
            _axis_of_examples(*pair, self._sizes) is not None for pair in avals
        )
        lengths = LENGTHS if has_rows else ()
        alike = all(
            is_same_param(eqn.params[name], other.params.get(name))
            for name in eqn.params
            if name not in lengths
        )
        if not alike or not (same or is_scale or are_places):
            raise MixesError("it computes with the number of examples")

    def _made(
        self, eqn: Equation, whole: Any, part: Any, operands: Sequence[Status]
    ) -> Status:
        """Returns the status of one result of a primitive without a body."""
        axis = _axis_of_examples(whole, part, self._sizes)
        has_rows = any(status.has_rows for status in operands)
        if any(status.is_late for status in operands):
            if has_rows or axis is not None:
                raise MixesError("it computes each example from a sum over all")
            # In a derivative rule, gradients of shared values are sums of several.
            are_sums = all(status.kind is Kind.SUM for status in operands)
            is_sum = self._depth > 1 and are_sums and eqn.jax_primitive in _ADDITIVE
            return Status(Kind.SUM) if is_sum else _LATE
        if not has_rows:
            return self._without_rows(eqn, axis, operands, whole)
        found = status_of_rows(eqn, whole, axis, operands)
        return self._with_inner(found, whole)

    def _without_rows(
        self, eqn: Equation, axis: int | None, operands: Sequence[Status], whole: Any
    ) -> Status:
        keys = frozenset[int]().union(*(status.keys for status in operands))
        if axis is None:
            if eqn.rule.cost is Cost.DRAW:
                self.shared |= keys
            return Status(Kind.SAME, keys=keys)
        if eqn.rule.cost is Cost.DRAW:
            if not keys:
                raise MixesError(
                    "it draws random numbers from a key that is no argument, which "
                    "would be the same in every microbatch"
                )
            self.drawn |= keys
        elif eqn.jax_primitive not in ("broadcast_in_dim", "iota"):
            raise MixesError(UNKNOWN)
        counts = eqn.jax_primitive == "iota" and eqn.params["dimension"] == axis
        if counts and whole.shape[axis] != self._sizes[0]:
            raise MixesError(PLACES)
        kind = Kind.PLACES if counts else Kind.ROWS
        status = Status(kind, axis, size=self._sizes[0] if counts else 0)
        return self._with_inner(status, whole)

    def _with_inner(self, status: Status, aval: Any) -> Status:
        """Returns a status whose `inner` fits the length of the axis."""
        size, _ = self._sizes
        if not status.has_rows:
            return status
        length = aval.shape[status.axis]
        if length % (size * max(status.inner, 1)):
            raise MixesError(OTHERS)
        return dataclasses.replace(status, inner=1) if length == size else status

    def of_call(
        self, eqn: Equation, other: Equation, operands: Sequence[Status]
    ) -> list[Status]:
        """Returns the statuses of the results of a function with a derivative rule."""
        parameter = (CALLS | RULED_CALLS)[eqn.jax_primitive]
        called = [with_constants(e.params[parameter]) for e in (eqn, other)]
        found = self._results(called, operands)
        late = any(status.is_late for status in operands)
        if not late and any(status.kind is Kind.LATE for status in found):
            raise MixesError(
                "it computes with a sum over the examples inside of a function that "
                "has a derivative rule of its own"
            )
        # The rule of a `custom_jvp` is linear in the tangents.
        has_rows = any(status.has_rows for status in operands)
        is_any_rule = eqn.jax_primitive.startswith("custom_vjp")
        is_ruled = is_any_rule or eqn.jax_primitive.startswith("custom_jvp")
        if is_ruled and not is_wrapped(called[0]) and (is_any_rule or has_rows):
            self._check_rule(eqn, other, operands, found)
        return found

    def _check_rule(
        self,
        eqn: Equation,
        other: Equation,
        operands: Sequence[Status],
        results: Sequence[Status],
    ) -> None:
        """Raises if the derivative rule of a function mixes examples."""
        pulled = [trace_pullback(e) for e in (eqn, other)]
        arguments = [_status_of_input(eqn, operands, n) for n in range(len(eqn.inputs))]
        # A sum has one cotangent for all examples. The cotangent of a value that all
        # examples share is a sum over them.
        of_kind = {Kind.SUM: _SAME, Kind.SAME: Status(Kind.SUM)}
        cotangents = [of_kind.get(s.kind, s) for s in _of_outputs(eqn, results)]
        found = self._results(pulled, [*arguments, *cotangents])
        zeros = _are_zeros(flatten(pulled[0]))
        for status, is_zero in zip(found, zeros, strict=True):
            if not (status.has_rows or status.kind is Kind.SUM or is_zero):
                raise MixesError(
                    "its derivative rule computes one example from others, or from "
                    "their number"
                )

    def of_scan(
        self, eqn: Equation, other: Equation, operands: Sequence[Status]
    ) -> list[Status]:
        """Returns the statuses of the results of a `scan`."""
        num_consts, num_carry = scan_arity(eqn.params)
        first_x = num_consts + num_carry
        consts, carry = list(operands[:num_consts]), list(operands[num_consts:first_x])
        xs = [_moved(status, -1) for status in operands[first_x:]]
        called = [bodies(e)[0] for e in (eqn, other)]

        def run(carry: Sequence[Status]) -> list[Status]:
            return self._results(called, [*consts, *carry, *xs])

        found = _repeat(lambda c: run(c)[:num_carry], carry)
        ys = run(found)[num_carry:]
        _check_no_sums([*found, *ys], operands)
        return [*found, *(_moved(status, 1) for status in ys)]

    def of_while(
        self, eqn: Equation, other: Equation, operands: Sequence[Status]
    ) -> list[Status]:
        """Returns the statuses of the results of a `while` loop."""
        of_test, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        for_test = list(operands[:of_test])
        consts = list(operands[of_test : of_test + of_body])
        called = [with_constants(e.params["body_jaxpr"]) for e in (eqn, other)]
        tests = [with_constants(e.params["cond_jaxpr"]) for e in (eqn, other)]
        carry = operands[of_test + of_body :]
        found = _repeat(lambda c: self._results(called, [*consts, *c]), carry)
        (test,) = self._results(tests, [*for_test, *found])
        if test.kind is not Kind.SAME:
            raise MixesError("all examples together decide when the loop ends")
        _check_no_sums(found, operands)
        return found

    def of_cond(
        self, eqn: Equation, other: Equation, operands: Sequence[Status]
    ) -> list[Status]:
        """Returns the statuses of the results of a `cond`."""
        index, *arguments = operands
        if index.kind is not Kind.SAME:
            raise MixesError("all examples together decide which branch runs")
        pairs = zip(*map(bodies, (eqn, other)), strict=True)
        found = [self._results(pair, arguments) for pair in pairs]
        joined = [
            functools.reduce(_join, several) for several in zip(*found, strict=True)
        ]
        _check_no_sums(joined, operands)
        return joined


# Of sums over microbatches they make the sum of their results.
_ADDITIVE = (
    *("add", "add_any", "broadcast_in_dim", "neg", "reduce_sum", "reshape"),
    *("squeeze", "sub", "transpose"),
)

_BODIES: Mapping[str, Callable[..., Sequence[Status]]] = {
    **dict.fromkeys(CALLS | RULED_CALLS, _Walk.of_call),
    "scan": _Walk.of_scan,
    "while": _Walk.of_while,
    "cond": _Walk.of_cond,
}


def _are_zeros(graph: Graph) -> list[bool]:
    """Returns, for each output of a program, whether it is filled with zeros."""
    numbers = find_numbers(graph.equations)
    return [
        bool(np.all((a.value if isinstance(a, Constant) else numbers.get(a, 1)) == 0))
        for a in graph.outputs
    ]


def _status_of_input(eqn: Equation, operands: Sequence[Status], number: int) -> Status:
    """Returns the status of one of the inputs of an equation, in which none repeats."""
    atoms = eqn.operand_atoms
    atom = eqn.inputs[number]
    return next((s for a, s in zip(atoms, operands, strict=True) if a == atom), _SAME)


def _check_no_sums(results: Sequence[Status], operands: Sequence[Status]) -> None:
    late = any(status.is_late for status in operands)
    if not late and any(status.is_late for status in results):
        raise MixesError("it sums over the examples inside of a loop or a branch")


def _moved(status: Status, by: int) -> Status:
    """Returns the status of a slice of the first axis, or of such slices, stacked."""
    if not status.has_rows:
        return status
    if status.axis + by < 0:
        raise MixesError("it loops over the examples")
    return dataclasses.replace(status, axis=status.axis + by)


def _repeat(
    run: Callable[[Sequence[Status]], Sequence[Status]], carry: Sequence[Status]
) -> list[Status]:
    """Returns the statuses of carried values, whatever the number of iterations."""
    while True:
        joined = list(map(_join, carry, run(carry)))
        if joined == list(carry):
            return joined
        carry = joined


def _join(first: Status, second: Status) -> Status:
    """Returns the status of a value that is one of two."""
    for status, other in ((first, second), (second, first)):
        if status.kind is Kind.MIXED:
            return status
        if status.kind is Kind.SAME and other.kind is not Kind.ROWS:
            return dataclasses.replace(other, keys=first.keys | second.keys)
    if first.is_late and second.is_late:
        return _LATE
    if first.kind is second.kind is Kind.ROWS and first.axis == second.axis:
        inner = common_inner([first, second])
        return dataclasses.replace(first, inner=inner)
    raise MixesError(OTHERS)


def _results(eqn: Equation) -> Sequence[Any]:
    return eqn.jaxpr.eqns[0].outvars


def _of_outputs(eqn: Equation, results: Sequence[Status]) -> list[Status]:
    """Returns the statuses of the results that are read."""
    return call_instead(eqn, lambda: results, ())


def _status(atom: Atom, known: Mapping[int, Status]) -> Status:
    return _SAME if isinstance(atom, Constant) else known[atom]


def _axis_of_examples(whole: Any, part: Any, sizes: tuple[int, int]) -> int | None:
    """Returns the axis of an array that holds examples, if one does."""
    shapes = [getattr(aval, "shape", ()) for aval in (whole, part)]
    if len(shapes[0]) != len(shapes[1]):
        raise MixesError("its rank depends on the number of examples")
    lengths = list(zip(*shapes, strict=True))
    axes = [axis for axis, (length, other) in enumerate(lengths) if length != other]
    if len(axes) > 1:
        raise MixesError("it computes something for each pair of examples")
    for axis in axes:
        length, other = lengths[axis]
        if length * sizes[1] != other * sizes[0]:
            raise MixesError(SOME)
        return axis
    return None
