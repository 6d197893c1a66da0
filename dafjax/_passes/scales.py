"""Takes the noise out of gradients of scales that a later norm divides out.

A batch norm multiplies each channel by a trained scale and adds a trained bias. Let a
ReLU, a depthwise convolution and another batch norm follow. If scale and bias of a
channel grow by a factor, the second norm divides by this factor. So the exact gradient
has almost no component along (scale, bias). The rounding noise has such a component. In
a MobileNet at 2 bits it is eight times the gradient of the scale.

Let `p` be the numbers of one channel. A value is homogeneous of degree `d` in `p` if
multiplying `p` by `s` multiplies the value by `s**d`. This pass changes derivatives,
not values:

- The derivative of `p` loses its component along `p`. This component is carried by a
  shift, one more number for each channel, which is always 0. Its derivative is
  `<p, dp> / <p, p>`.
- An operation that is not homogeneous reads a value `v` of degree `d` with its whole
  derivative: that of `v`, plus `d v` times the derivative of the shift.
- A norm adds a small number `c` to a variance of degree 2. The sum counts as
  homogeneous, and its derivative loses `2 c` times the derivative of the shift.

In exact arithmetic the gradient stays the same, for every program. But the component
along `p` now comes from small arrays only, such as the variance, and these are exact.
"""

import collections
import dataclasses
import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import jax
import jax.core
import jax.numpy as jnp

from dafjax._trace.equation import Atom, Constant, Equation, look_up
from dafjax._trace.graph import Graph, flatten
from dafjax._trace.residuals import Program, differentiate, trace_like
from dafjax._trace.rules import Combines, Operands, is_much_smaller
from dafjax._trace.tracing import ClosedJaxpr


def hold_scales(program: Program) -> Program:
    """Returns the program with less noise in such gradients."""
    closed, perturbed = program.function, program.perturbed
    graph = flatten(closed, is_differentiated=False)
    cones = _find_cones(graph, perturbed)
    if not cones:
        return program
    held = differentiate(_with_held_scales(closed, graph, cones), perturbed)
    return dataclasses.replace(
        held, function=program.function, fingerprint=program.fingerprint
    )


@final
@dataclasses.dataclass(frozen=True)
class _Degree:
    """A value is homogeneous in the numbers of each channel.

    Attributes:
        degree: Its degree.
        axis: The axis that holds the channels.
    """

    degree: float
    axis: int


@final
@dataclasses.dataclass(frozen=True)
class _Cone:
    """Some arguments, and the values that are homogeneous in them.

    Attributes:
        arguments: The arguments.
        ends: For each equation that is not homogeneous, by place, its operands that
            are.
        shifts: For each equation that adds a number to a value, by place: the number,
            and the degree of the value.
    """

    arguments: Mapping[int, _Degree]
    ends: Mapping[int, Mapping[int, _Degree]]
    shifts: Mapping[int, tuple[float, _Degree]]


def _find_cones(graph: Graph, perturbed: Sequence[bool]) -> list[_Cone]:
    facts = _Facts(graph)
    cones: list[_Cone] = []
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
        fillings: The values that are one number, everywhere.
        moved: The values that are an argument with one number for each channel.
        multiplied: Such arguments that multiply something.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.readers: dict[int, list[int]] = collections.defaultdict(list)
        self.fillings: dict[int, Any] = {}
        self.moved: dict[int, _Argument] = {}
        multiplied: dict[int, None] = {}
        for value in range(graph.num_inputs):
            axis = _only_axis(graph.avals[value])
            if axis is not None:
                self.moved[value] = _Argument(value, axis)
        for place, eqn in enumerate(graph.equations):
            for value in eqn.input_values:
                self.readers[value].append(place)
            if eqn.filling is not None:
                self.fillings.update(dict.fromkeys(eqn.outputs, eqn.filling))
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
        value = atom.value if isinstance(atom, Constant) else self.fillings.get(atom)
        is_number = value is not None and jnp.ndim(value) == 0
        return value if is_number and jnp.isrealobj(value) else None

    def argument(self, atom: Atom) -> "_Argument | None":
        """Returns the argument that a value is, if it is one."""
        return self.moved.get(atom) if isinstance(atom, int) else None


def _only_axis(aval: Any) -> int | None:
    """Returns the only axis longer than 1 of an array of real numbers."""
    long = [axis for axis, length in enumerate(aval.shape) if length > 1]
    return long[0] if _is_real(aval) and len(long) == 1 else None


def _is_real(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.floating)


def _cone_of(facts: _Facts, argument: int) -> _Cone | None:
    """Returns the cone of an argument and of those that are added to it."""
    arguments = {argument: _Degree(1, facts.moved[argument].axis)}
    while True:
        walk = _Walk(facts, arguments)
        walk.run()
        if walk.added is None:
            break
        arguments |= walk.added
    # A large value at an end brings its noise.
    ends = (value for end in walk.ends.values() for value in end)
    if not walk.is_divided_out or not all(map(walk.is_statistic, ends)):
        return None
    return _Cone(arguments, walk.ends, walk.shifts)


class _EndsError(Exception):
    """An equation is not homogeneous."""


@final
class _Walk:
    """Follows the degrees of some arguments through a program.

    Attributes:
        ends: As in `_Cone`.
        shifts: As in `_Cone`.
        is_divided_out: Whether some value is of degree 0.
        added: An argument that is added to a homogeneous value, with the degree that it
            must have; `None` if the walk came to its end.
    """

    def __init__(self, facts: _Facts, arguments: Mapping[int, _Degree]) -> None:
        self._facts = facts
        self._arguments = arguments
        self._degrees: dict[int, _Degree] = {}
        self._places: list[int] = []
        self._largest = 0
        self.ends: dict[int, dict[int, _Degree]] = {}
        self.shifts: dict[int, tuple[float, _Degree]] = {}
        self.is_divided_out = False
        self.added: dict[int, _Degree] | None = None

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

    def is_statistic(self, value: int) -> bool:
        """Returns whether a value is small beside the largest homogeneous value."""
        return is_much_smaller(self._facts.graph.avals[value].size, self._largest)

    def _note(self, value: int, degree: _Degree) -> None:
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

    def _degree_of(self, place: int, eqn: Equation) -> _Degree | None:
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
            return _Degree(sum(degree.degree for _, degree in found), axis)
        if eqn.primitive == "div":
            signs = (1 if n == 0 else -1 for n, _ in found)
            total = sum(s * d.degree for s, (_, d) in zip(signs, found, strict=True))
            return _Degree(total, axis)
        power = _power(eqn)
        others = [a for n, a in enumerate(atoms) if n not in dict(found)]
        if power is None or len(degrees) > 1 or not self._may_join(eqn, others):
            raise _EndsError
        return _Degree(power * degrees.pop(), axis)

    def _axis(self, eqn: Equation, found: Iterable[tuple[int, _Degree]]) -> int:
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

    def _sum(
        self, place: int, eqn: Equation, found: Sequence[_Degree]
    ) -> _Degree | None:
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
                self.added = {own.number: _Degree(first.degree, own.axis)}
                return None
            else:
                raise _EndsError
        return first


# The degree of a result, where it is not that of the operands.
_POWERS = {"cbrt": 1 / 3, "rsqrt": -0.5, "sqrt": 0.5, "square": 2}
# Homogeneous, but not linear.
_OF_DEGREE_1 = frozenset(
    [
        *("abs", "cummax", "cummin", "max", "min", "reduce_max", "reduce_min"),
        *("reduce_window_max", "reduce_window_min", "select_n"),
    ]
)


def _power(eqn: Equation) -> float | None:
    """Returns the degree of results whose operands have degree 1; `None`: of none."""
    name, rule = eqn.primitive, eqn.rule
    if name == "integer_pow":
        return eqn.params["y"]
    is_linear = rule.linear_in is Operands.ALL and rule.combines is Combines.OTHER
    if name in _OF_DEGREE_1 or (is_linear and name != "stop_gradient"):
        return 1
    if name == "custom_jvp_call" and _is_relu(eqn):
        return 1
    return _POWERS.get(name)


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


def _of_convolution(eqn: Equation, found: Sequence[tuple[int, _Degree]]) -> _Degree:
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
    return _Degree(degree.degree, numbers.out_spec[1])


def _axis_after(eqn: Equation, operand: int, axis: int) -> int | None:
    """Returns the axis of the results that holds an operand's channels, if one does."""
    aval: Any = eqn.jaxpr.eqns[0].invars[operand].aval
    shape = aval.shape
    if eqn.primitive == "broadcast_in_dim":
        place = eqn.params["broadcast_dimensions"][axis]
    elif eqn.primitive == "reshape":
        place = _axis_after_reshape(eqn, shape, axis)
    elif eqn.primitive == "transpose":
        place = eqn.params["permutation"].index(axis)
    elif eqn.primitive == "concatenate":
        place = None if eqn.params["dimension"] == axis else axis
    elif eqn.rule.is_elementwise or eqn.primitive == "custom_jvp_call":
        place = axis
    elif eqn.rule.keeps_axis is None or not eqn.rule.keeps_axis(
        eqn.params, axis, len(shape)
    ):
        place = None
    else:
        removed = eqn.params.get("axes", ())
        if eqn.primitive == "squeeze":
            removed = eqn.params["dimensions"]
        place = axis - sum(a < axis for a in removed)
        # `stack` and `unstack` change the number of axes, too.
        num_axes = aval.ndim - len(removed)
        if any(
            len(getattr(v.aval, "shape", ())) != num_axes for v in eqn.jaxpr.outvars
        ):
            place = None
    results: Any = [var.aval for var in eqn.jaxpr.outvars]
    fits = place is not None and all(
        result.shape[place : place + 1] == shape[axis : axis + 1] for result in results
    )
    return place if fits else None


def _axis_after_reshape(eqn: Equation, shape: tuple[int, ...], axis: int) -> int | None:
    """Returns the axis of the result that is an axis of the operand."""
    (aval,) = (var.aval for var in eqn.jaxpr.outvars)
    result: Any = getattr(aval, "shape", ())
    if eqn.params["dimensions"] is not None:
        return None
    before = math.prod(shape[:axis])
    same = (
        place
        for place, length in enumerate(result)
        if length == shape[axis] and math.prod(result[:place]) == before
    )
    return next(same, None)


def _with_held_scales(
    closed: ClosedJaxpr, graph: Graph, cones: Sequence[_Cone]
) -> ClosedJaxpr:
    """Returns the function with the derivatives that the module describes."""

    def run(*arguments: Any) -> list[Any]:
        env: dict[int, Any] = dict(enumerate(arguments))
        zeros = []
        for cone in cones:
            hold = _holding([degree.degree for degree in cone.arguments.values()])
            *held, zero = hold(*look_up(tuple(cone.arguments), env))
            env.update(zip(cone.arguments, held, strict=True))
            zeros.append(zero)

        def read(place: int, atoms: Iterable[Atom]) -> list[Any]:
            operands = env
            for cone, zero in zip(cones, zeros, strict=True):
                for value, degree in cone.ends.get(place, {}).items():
                    spread = _spread(zero, env[value], degree.axis)
                    # Another cone may have given its part back already.
                    whole = _give_back(degree.degree, operands[value], spread)
                    operands = {**operands, value: whole}
            return look_up(tuple(atoms), operands)

        for place, eqn in enumerate(graph.equations):
            operands = read(place, eqn.inputs)
            results = jax.core.eval_jaxpr(eqn.jaxpr, (), *operands)
            for cone, zero in zip(cones, zeros, strict=True):
                if place in cone.shifts:
                    number, degree = cone.shifts[place]
                    (result,) = results
                    spread = _spread(zero, result, degree.axis)
                    results = [result - number * degree.degree * spread]
            env.update(zip(eqn.outputs, results, strict=True))
        return read(len(graph.equations), graph.outputs)

    return trace_like(run, *closed.in_avals)


def _spread(channels: jax.Array, like: jax.Array, axis: int) -> jax.Array:
    """Returns numbers of channels as an array of the shape and dtype of another."""
    channels = channels.astype(like.dtype)
    return jax.lax.broadcast_in_dim(channels, like.shape, (axis,))


def _holding(degrees: Sequence[float]) -> Callable[..., Sequence[jax.Array]]:
    """Returns a function that takes the part along arguments out of their derivative.

    The arguments have one number for each of `n` channels. It returns them, and `n`
    zeros, whose derivative is that part.

    Args:
        degrees: The degree of each argument.
    """

    @jax.custom_jvp
    def hold(*arguments: jax.Array) -> tuple[jax.Array, ...]:
        return *arguments, jnp.zeros(arguments[0].size, _wide(arguments[0]))

    @hold.defjvp
    def push(
        arguments: Sequence[jax.Array], tangents: Sequence[jax.Array]
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        wide = _wide(arguments[0])
        pairs = zip(degrees, arguments, strict=True)
        along = jnp.stack([degree * jnp.ravel(x).astype(wide) for degree, x in pairs])
        moves = jnp.stack([jnp.ravel(tangent).astype(wide) for tangent in tangents])
        square = jnp.sum(along * along, 0)
        # Where all numbers are 0, there is no part along them.
        shift = jnp.sum(along * moves, 0) / jnp.where(square == 0, 1.0, square)
        held = [
            tangent - jnp.reshape(part, tangent.shape).astype(tangent.dtype)
            for tangent, part in zip(tangents, along * shift, strict=True)
        ]
        return hold(*arguments), (*held, shift)

    return hold


def _wide(x: jax.Array) -> Any:
    return jnp.float64 if jnp.finfo(x.dtype).bits == 64 else jnp.float32


def _give_back(degree: float, value: jax.Array, zeros: jax.Array) -> jax.Array:
    """Returns a value whose derivative has the part along the arguments, too."""

    @jax.custom_jvp
    def give_back(value: jax.Array, zeros: jax.Array) -> jax.Array:
        del zeros
        return value

    @give_back.defjvp
    def push(
        operands: Sequence[jax.Array], tangents: Sequence[jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        (value, _), (of_value, of_zeros) = operands, tangents
        return value, of_value + degree * value * of_zeros

    return give_back(value, zeros)
