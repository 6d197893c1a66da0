"""Finds values that are homogeneous in scales of channels, and what divides them out.

A value is homogeneous of degree `d` in the numbers of a channel if multiplying these by
`s` multiplies the value by `s**d`. The arguments and the values that are homogeneous in
them form a cone.
"""

import collections
import dataclasses
import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import jax
import jax.core
import jax.numpy as jnp

from dafjax._trace.axis_rules import shape_of
from dafjax._trace.equation import Atom, Equation
from dafjax._trace.graph import Graph, find_numbers, flatten, number_of
from dafjax._trace.residuals import trace_like
from dafjax._trace.rules import Combines, Operands, is_much_smaller


@final
@dataclasses.dataclass(frozen=True)
class Degree:
    """A value is homogeneous in the numbers of each channel.

    Attributes:
        degree: Its degree.
        axis: The axis that holds the channels.
    """

    degree: float
    axis: int


@final
@dataclasses.dataclass(frozen=True)
class Cone:
    """Some arguments, and the values that are homogeneous in them.

    Attributes:
        arguments: The arguments.
        ends: For each equation that is not homogeneous, by place, its operands that
            are.
        shifts: For each equation that adds a number to a value, by place: the number,
            and the degree of the value.
    """

    arguments: Mapping[int, Degree]
    ends: Mapping[int, Mapping[int, Degree]]
    shifts: Mapping[int, tuple[float, Degree]]


def find_cones(graph: Graph, perturbed: Sequence[bool]) -> list[Cone]:
    """Returns disjoint cones that a norm divides out.

    Args:
        graph: The program, before it is differentiated.
        perturbed: For every argument, whether it is differentiated.
    """
    facts = _Facts(graph)
    cones: list[Cone] = []
    taken: set[int] = set()
    for argument in facts.multiplied:
        if perturbed[argument] and argument not in taken:
            cone = _cone_of(facts, argument)
            if cone is not None and taken.isdisjoint(cone.arguments):
                taken.update(cone.arguments)
                cones.append(cone)
    return cones


@final
@dataclasses.dataclass(frozen=True)
class _Argument:
    """An argument with one number for each channel, in some shape.

    Attributes:
        number: The number of the argument.
        axis: The axis that holds the channels.
    """

    number: int
    axis: int


@final
class _Facts:
    """Facts about a program that all cones need.

    Attributes:
        graph: The program.
        readers: For each value, the places of the equations that read it.
        numbers: The values that are one number, everywhere.
        moved: The values that are an argument with one number for each channel.
        multiplied: Such arguments that multiply something.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.readers: dict[int, list[int]] = collections.defaultdict(list)
        self.numbers = find_numbers(graph.equations)
        self.moved: dict[int, _Argument] = {}
        multiplied: dict[int, None] = {}
        for value in range(graph.num_inputs):
            axis = _only_axis(graph.avals[value])
            if axis is not None:
                self.moved[value] = _Argument(value, axis)
        for place, eqn in enumerate(graph.equations):
            for value in eqn.input_values:
                self.readers[value].append(place)
            sources = [self.moved[v] for v in eqn.input_values if v in self.moved]
            if eqn.rule.keeps_values and len(sources) == len(eqn.input_values) == 1:
                (source,) = sources
                axis = _axis_after(eqn, 0, source.axis)
                # Integers have no derivative.
                is_real = all(_is_real(graph.avals[v]) for v in eqn.outputs)
                if axis is not None and is_real and len(eqn.outputs) == 1:
                    self.moved[eqn.outputs[0]] = _Argument(source.number, axis)
            if eqn.rule.combines is Combines.MULTIPLY and eqn.rule.is_elementwise:
                multiplied.update((source.number, None) for source in sources)
        self.multiplied = tuple(multiplied)

    def number(self, atom: Atom) -> Any:
        """Returns the real number that a value is everywhere, or `None`."""
        number = number_of(atom, self.numbers)
        return None if jnp.iscomplexobj(number) else number

    def argument(self, atom: Atom) -> "_Argument | None":
        """Returns the argument that a value is, if it is one."""
        return self.moved.get(atom) if isinstance(atom, int) else None


def _only_axis(aval: Any) -> int | None:
    """Returns the only axis longer than 1 of an array of real numbers."""
    long = [axis for axis, length in enumerate(aval.shape) if length > 1]
    return long[0] if _is_real(aval) and len(long) == 1 else None


def _is_real(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.floating)


def _cone_of(facts: _Facts, argument: int) -> Cone | None:
    """Returns the cone of an argument and of those that are added to it."""
    arguments = {argument: Degree(1, facts.moved[argument].axis)}
    while True:
        walk = _Walk(facts, arguments)
        walk.run()
        if walk.added is None:
            break
        arguments |= walk.added
    if not walk.is_divided_out or not walk.has_quiet_ends():
        return None
    return Cone(arguments, walk.ends, walk.shifts)


class _EndsError(Exception):
    """An equation is not homogeneous."""


@final
class _Walk:
    """Follows the degrees of some arguments through a program.

    Attributes:
        ends: As in `Cone`.
        shifts: As in `Cone`.
        is_divided_out: Whether some value is of degree 0.
        added: An argument that is added to a homogeneous value, with the degree that it
            must have; `None` if the walk came to its end.
    """

    def __init__(self, facts: _Facts, arguments: Mapping[int, Degree]) -> None:
        self._facts = facts
        self._arguments = arguments
        self._degrees: dict[int, Degree] = {}
        self._places: list[int] = []
        self._largest = 0
        self.ends: dict[int, dict[int, Degree]] = {}
        self.shifts: dict[int, tuple[float, Degree]] = {}
        self.is_divided_out = False
        self.added: dict[int, Degree] | None = None

    def run(self) -> None:
        """Follows all values, or stops at an argument that is added."""
        facts = self._facts
        for argument, degree in self._arguments.items():
            self._note(argument, degree)
        last = -1
        while self._places and self.added is None:
            place = heapq.heappop(self._places)
            if place != last:
                self._read(place, facts.graph.equations[place])
            last = place
        for value in facts.graph.outputs:
            if isinstance(value, int) and value in self._degrees:
                end = self.ends.setdefault(len(facts.graph.equations), {})
                end[value] = self._degrees[value]

    def has_quiet_ends(self) -> bool:
        """Returns whether the ends bring little of the noise that the cone removes.

        A large value at an end brings its noise. A gate such as the sigmoid of SiLU
        brings far less than what it multiplies.
        """
        equations = self._facts.graph.equations
        return all(
            (place < len(equations) and equations[place].rule.is_elementwise)
            or all(map(self.is_statistic, end))
            for place, end in self.ends.items()
        )

    def is_statistic(self, value: int) -> bool:
        """Returns whether a value is small beside the largest homogeneous value."""
        return is_much_smaller(self._facts.graph.avals[value].size, self._largest)

    def _note(self, value: int, degree: Degree) -> None:
        self._largest = max(self._largest, self._facts.graph.avals[value].size)
        if degree.degree == 0:
            self.is_divided_out = True
            return
        self._degrees[value] = degree
        for place in self._facts.readers.get(value, ()):
            heapq.heappush(self._places, place)

    def _read(self, place: int, eqn: Equation) -> None:
        avals = self._facts.graph.avals
        # Numbers without a derivative: masks, indices.
        moving = [v for v in eqn.outputs if jnp.issubdtype(avals[v].dtype, jnp.inexact)]
        if not moving:
            return
        known = {v: self._degrees[v] for v in eqn.input_values if v in self._degrees}
        try:
            degree = self._degree_of(place, eqn)
        except _EndsError:
            self.ends[place] = known
            return
        if degree is not None:
            for value in moving:
                self._note(value, degree)

    def _degree_of(self, place: int, eqn: Equation) -> Degree | None:
        """Returns the degree of an equation's results.

        `None` if an argument is added, so that the walk starts anew.

        Raises:
            _EndsError: The results are not homogeneous.
        """
        atoms = eqn.operand_atoms
        found = [
            (n, self._degrees[a])
            for n, a in enumerate(atoms)
            if isinstance(a, int) and a in self._degrees
        ]
        rule = eqn.rule
        if rule.adds:
            return self._sum(place, eqn, [degree for _, degree in found])
        if eqn.primitive == "conv_general_dilated":
            return _of_convolution(eqn, found)
        axis = self._axis(eqn, found)
        degrees = {degree.degree for _, degree in found}
        if rule.combines is Combines.MULTIPLY and rule.is_elementwise:
            return Degree(sum(degree.degree for _, degree in found), axis)
        if eqn.primitive == "div":
            signs = (1 if n == 0 else -1 for n, _ in found)
            total = sum(s * d.degree for s, (_, d) in zip(signs, found, strict=True))
            return Degree(total, axis)
        power = _power(eqn)
        others = [a for n, a in enumerate(atoms) if n not in dict(found)]
        if power is None or len(degrees) > 1 or not self._may_join(eqn, others):
            raise _EndsError
        return Degree(power * degrees.pop(), axis)

    def _axis(self, eqn: Equation, found: Iterable[tuple[int, Degree]]) -> int:
        axes = {_axis_after(eqn, n, degree.axis) for n, degree in found}
        axis = axes.pop()
        if axes or axis is None:
            raise _EndsError
        return axis

    def _has(self, atom: Atom) -> bool:
        return isinstance(atom, int) and atom in self._degrees

    def _may_join(self, eqn: Equation, others: Iterable[Atom]) -> bool:
        """Returns whether a result is as homogeneous with these other operands."""
        chooses = eqn.rule.linear_in is Operands.ALL_BUT_FIRST
        if chooses:
            # The first operand of a selection is a mask.
            others = [atom for atom in others if atom != eqn.operand_atoms[0]]
        return all(self._facts.number(atom) == 0 for atom in others)

    def _sum(self, place: int, eqn: Equation, found: Sequence[Degree]) -> Degree | None:
        facts = self._facts
        first = found[0]
        if set(found) != {first}:
            raise _EndsError
        subtracts = eqn.rule.combines is Combines.SUBTRACT
        for place_of_atom, atom in enumerate(eqn.operand_atoms):
            if self._has(atom):
                continue
            number, argument = facts.number(atom), facts.argument(atom)
            if number == 0:
                continue
            if number is not None and self.is_statistic(eqn.outputs[0]):
                is_subtracted = subtracts and place_of_atom == 1
                self.shifts[place] = -number if is_subtracted else number, first
            elif (
                argument is not None
                and argument.axis == first.axis
                and argument.number not in self._arguments
            ):
                own = facts.moved[argument.number]
                self.added = {own.number: Degree(first.degree, own.axis)}
                return None
            else:
                raise _EndsError
        return first


def _power(eqn: Equation) -> float | None:
    """Returns the degree of results whose operands have degree 1; `None`: of none."""
    name, rule = eqn.primitive, eqn.rule
    if name == "integer_pow":
        return eqn.params["y"]
    is_linear = rule.linear_in is Operands.ALL and rule.combines is Combines.OTHER
    if is_linear and name != "stop_gradient":
        return 1
    if name == "custom_jvp_call" and _is_relu(eqn):
        return 1
    return rule.degree


def _is_relu(eqn: Equation) -> bool:
    """Returns whether a function with a derivative rule is `max(x, 0)`, rule included.

    Another rule, as for a spike, would not fit the degree of the result.
    """
    if len(eqn.jaxpr.invars) != 1 or len(eqn.outputs) != 1:
        return False
    (aval,) = (var.aval for var in eqn.jaxpr.invars)

    def push(x: jax.Array, tangent: jax.Array) -> Any:
        return jax.jvp(
            lambda x: jax.core.eval_jaxpr(eqn.jaxpr, (), x)[0], (x,), (tangent,)
        )

    graph = flatten(trace_like(push, aval, aval))
    facts = _Facts(graph)
    makers = {v: made for made in graph.equations for v in made.outputs}

    def operands(atom: Atom, primitive: str) -> list[Any]:
        """Returns the operands of the maker of a value, zeros as `_ZERO`."""
        made = makers.get(atom) if isinstance(atom, int) else None
        if made is None or made.primitive != primitive:
            return []
        return [_ZERO if facts.number(a) == 0 else a for a in made.operand_atoms]

    primal, tangent = graph.outputs
    x, of_x = graph.num_inputs - 2, graph.num_inputs - 1
    mask, *cases = operands(tangent, "select_n") or [primal]
    return (
        operands(primal, "max") in ([x, _ZERO], [_ZERO, x])
        and cases == [_ZERO, of_x]
        and operands(mask, "gt") == [x, _ZERO]
    )


_ZERO = "zero"


def _of_convolution(eqn: Equation, found: Sequence[tuple[int, Degree]]) -> Degree:
    """Returns the degree of a convolution of each channel by itself."""
    numbers = eqn.params["dimension_numbers"]
    (place, degree), *others = found
    avals: Any = [var.aval for var in eqn.jaxpr.eqns[0].invars]
    images, kernel = avals
    features = kernel.shape[numbers.rhs_spec[0]]
    is_alone = (
        eqn.params["feature_group_count"] == features == images.shape[degree.axis]
    )
    if others or place or degree.axis != numbers.lhs_spec[1] or not is_alone:
        raise _EndsError
    return Degree(degree.degree, numbers.out_spec[1])


def _axis_after(eqn: Equation, operand: int, axis: int) -> int | None:
    """Returns the axis of the results that holds an operand's channels, if one does."""
    (written,) = eqn.jaxpr.eqns
    is_call = eqn.primitive == "custom_jvp_call"
    place = axis if is_call else eqn.rule.axis_after(written, operand, axis)
    length = shape_of(written.invars[operand])[axis : axis + 1]
    fits = place is not None and all(
        shape_of(result)[place : place + 1] == length for result in eqn.jaxpr.outvars
    )
    return place if fits else None
