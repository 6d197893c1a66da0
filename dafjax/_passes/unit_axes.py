"""Drops axes of length 1, so that chunks can divide the next axis.

Chunks of the backward pass divide the first axis of residuals. It has length 1 in a
batch of one, and in `jax.nn.dot_product_attention`, which adds an axis of groups of
heads. Also, XLA:CPU drops it in matrix products alone, and then does not compute in
place between a product and what reads it.

So values lose their axes of length 1, but for the last ones: `[1, m, 1, n, 1]` becomes
`[m, n, 1]`.
Arguments, results and gradients keep their shapes. Equations that cannot do without
these axes run with them, between two reshapes.
"""

import dataclasses
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, final

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from dafjax import config
from dafjax._trace.axis_rules import JaxprEqn, shape_of
from dafjax._trace.equation import (
    Atom,
    Constant,
    Equation,
    in_place_of,
    renumber,
)
from dafjax._trace.graph import Graph, flatten
from dafjax._trace.residuals import Program
from dafjax._trace.rules import rule_of


def drop_unit_axes(program: Program) -> Program:
    """Returns the program without axes of length 1, if many values begin with one.

    See `config.LEAST_SHARE_WITH_UNIT_AXIS`. (A mask may begin with one in any program.)
    """
    with_axis, total = 0, 0
    for value in (v for eqn in program.forward for v in eqn.outputs):
        nbytes = program.nbytes(value)
        total += nbytes
        with_axis += nbytes * (program.avals[value].shape[:1] == (1,))
    if with_axis <= config.LEAST_SHARE_WITH_UNIT_AXIS * total:
        return program
    if any(aval.sharding.mesh.explicit_axes for aval in program.avals):
        return program
    return _Dropping(program).run()


def _has_unit_axis(aval: jax.core.ShapedArray) -> bool:
    is_number = not jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    return is_number and _short(aval.shape) != tuple(aval.shape)


def _dropped(shape: Sequence[int]) -> list[int]:
    """Returns the axes of length 1 before a longer one."""
    last = max((axis for axis, n in enumerate(shape) if n != 1), default=0)
    return [axis for axis in range(last) if shape[axis] == 1]


def _without(shape: Sequence[int], dropped: Container[int]) -> tuple[int, ...]:
    return tuple(n for axis, n in enumerate(shape) if axis not in dropped)


def _short(shape: Sequence[int]) -> tuple[int, ...]:
    return _without(shape, _dropped(shape))


@final
class _Dropping:
    """Rewrites the equations of a program, one after another.

    A value that an equation computes keeps its number and loses its axis. Arguments and
    cotangents keep their axis, and get another number without it.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._avals = list(program.avals)
        self._equations: list[Equation] = []
        given = (*range(program.num_arguments), *program.cotangents)
        # The values without the axis, and with it.
        self._short: dict[int, int] = {}
        self._full: dict[int, int] = {v: v for v in given}
        # The equations that fill an array with a number.
        self._fills: dict[int, Equation] = {}
        # What computes the results of equations that differ in values alone.
        self._traced: dict[Any, Graph] = {}
        # Whether a product needs the axis.
        self._fails = False

    def run(self) -> Program:
        """Returns the new program, or the old one if a product needs the axis."""
        program = self._program
        for eqn in program.forward:
            self._add(eqn)
        results = self._full_atoms(program.results)
        forward = tuple(self._equations)
        self._equations = []
        for eqn in program.backward:
            self._add(eqn)
        gradients = self._full_atoms(program.gradients)
        if self._fails:
            return program
        changed = dataclasses.replace(
            program, forward=forward, results=results, gradients=gradients
        )
        return changed.with_backward(self._equations, self._avals)

    def _is_unit(self, atom: Atom) -> bool:
        if isinstance(atom, int):
            # Numbers added here stand for values of the program.
            known = atom < len(self._program.avals)
            return known and _has_unit_axis(self._program.avals[atom])
        return isinstance(atom.value, jax.Array) and _has_unit_axis(
            jax.typeof(atom.value)
        )

    def _add(self, eqn: Equation) -> None:
        atoms = (*eqn.inputs, *eqn.outputs)
        if not any(map(self._is_unit, atoms)):
            self._equations.append(eqn)
            return
        run = None if eqn.has_effect else _on_short(eqn)
        if eqn.filling is not None:
            self._fills[eqn.outputs[0]] = eqn
        if run is not None:
            self._learn(eqn.outputs)
            self._replace(eqn, run)
            return
        self._fails |= eqn.rule.is_product
        inputs = tuple(
            self._full_of(x, eqn) if isinstance(x, int) else x for x in eqn.inputs
        )
        outputs = tuple(
            self._new(self._avals[v]) if self._is_unit(v) else v for v in eqn.outputs
        )
        self._equations.append(dataclasses.replace(eqn, inputs=inputs, outputs=outputs))
        self._learn(eqn.outputs)
        for value, full in zip(eqn.outputs, outputs, strict=True):
            if value != full:
                self._full[value] = full
                self._equations.append(self._reshape(full, value, eqn))

    def _learn(self, outputs: Iterable[int]) -> None:
        for value in filter(self._is_unit, outputs):
            aval = self._avals[value]
            self._avals[value] = aval.update(shape=_short(aval.shape))
            self._short[value] = value

    def _new(self, aval: jax.core.ShapedArray) -> int:
        self._avals.append(aval)
        return len(self._avals) - 1

    def _reshape(self, value: int, result: int, source: Equation) -> Equation:
        shape = self._avals[result].shape
        jaxpr = jax.make_jaxpr(lambda x: _reshaped(x, shape))(self._avals[value]).jaxpr
        return in_place_of(Equation(jaxpr, (value,), (result,)), source)

    def _short_of(self, value: int, source: Equation) -> int:
        """Returns the value without the axis."""
        if value not in self._short:
            aval = self._avals[value]
            self._short[value] = self._new(aval.update(shape=_short(aval.shape)))
            self._equations.append(self._reshape(value, self._short[value], source))
        return self._short[value]

    def _full_of(self, value: int, source: Equation) -> int:
        """Returns the value with the axis."""
        if not self._is_unit(value):
            return value
        if value not in self._full:
            self._full[value] = full = self._new(self._program.avals[value])
            fill = self._fills.get(value)
            # A filled array is filled once more: one that is reshaped is live earlier.
            self._equations.append(
                self._reshape(value, full, source)
                if fill is None
                else in_place_of(dataclasses.replace(fill, outputs=(full,)), source)
            )
        return self._full[value]

    def _full_atoms(self, atoms: Sequence[Atom]) -> tuple[Atom, ...]:
        if not self._equations:
            return tuple(atoms)
        last = self._equations[-1]
        return tuple(self._full_of(x, last) if isinstance(x, int) else x for x in atoms)

    def _replace(self, eqn: Equation, run: Callable[..., Any]) -> None:
        """Adds equations that compute the results of one from values without axes."""
        inputs = tuple(
            self._short_of(x, eqn) if isinstance(x, int) and self._is_unit(x) else x
            for x in eqn.inputs
        )
        avals = [
            self._avals[x] if isinstance(x, int) else jax.typeof(x.value)
            for x in inputs
        ]
        graph = self._trace(eqn, run, avals)
        numbers: dict[int, Atom] = dict(enumerate(inputs))
        results = zip(graph.outputs, eqn.outputs, strict=True)
        numbers.update((new, old) for new, old in results if isinstance(new, int))
        for new in graph.equations:
            for value in new.outputs:
                if value not in numbers:
                    numbers[value] = self._new(graph.avals[value])
            changed = dataclasses.replace(
                new,
                inputs=renumber(new.inputs, numbers),
                outputs=renumber(new.outputs, numbers),
            )
            self._equations.append(in_place_of(changed, eqn))

    def _trace(
        self, eqn: Equation, run: Callable[..., Any], avals: Sequence[Any]
    ) -> Graph:
        """Traces `run`, or returns its trace for an equation of another layer."""
        form = eqn.form
        if form in self._traced:
            return self._traced[form]
        graph = flatten(jax.make_jaxpr(run)(*avals))
        if form is not None:
            self._traced[form] = graph
        return graph


def _on_short(equation: Equation) -> Callable[..., list[Any]] | None:
    """Returns an equation as a function of values without axes, `None` if unknown."""
    (eqn,) = equation.jaxpr.eqns
    name, params = eqn.primitive.name, eqn.params
    if name == "squeeze" or (name == "reshape" and params["dimensions"] is None):
        rule: _Rule | None = _reshape
    elif rule_of(name).is_elementwise:
        rule = _shift
    else:
        rule = _RULES.get(name)
    if rule is None or (rule is _shift and not _can_shift(eqn)):
        return None
    shapes = [_short(shape_of(var)) for var in eqn.outvars]

    def run(*operands: Any) -> list[Any]:
        known = dict(zip(equation.inputs, operands, strict=True))
        read = [
            atom.value
            if isinstance(atom, Constant) and atom not in known
            else known[atom]
            for atom in equation.operand_atoms
        ]
        results = rule(eqn, read)
        if not eqn.primitive.multiple_results:
            results = [results]
        pairs = zip(results, shapes, strict=True)
        # A result that is an operand gets a number of its own.
        return [
            _reshaped(x, shape) if x.shape != shape or any(x is y for y in read) else x
            for x, shape in pairs
        ]

    return run


_Rule: TypeAlias = Callable[[JaxprEqn, Sequence[Any]], Any]


def _reshaped(x: Any, shape: Sequence[int]) -> jax.Array:
    return lax.reshape_p.bind(
        jnp.asarray(x), new_sizes=tuple(shape), dimensions=None, sharding=None
    )


def _fit(x: Any, shape: Sequence[int]) -> Any:
    return x if jnp.shape(x) == tuple(shape) else _reshaped(x, shape)


def _reshape(eqn: JaxprEqn, operands: Sequence[Any]) -> Any:
    return _fit(operands[0], _short(shape_of(eqn.outvars[0])))


def _shared(eqn: JaxprEqn) -> list[int]:
    """Returns the axes that an equation can drop of all operands and results."""
    if "axes" in eqn.params:
        return _dropped(shape_of(eqn.invars[0]))
    # Along an axis an operand of length 1 may stand for all elements of the result.
    shapes = [shape for shape in map(shape_of, eqn.invars) if shape]
    units = ({a for a, n in enumerate(shape) if n == 1} for shape in shapes)
    dropped = (_dropped(shape_of(result)) for result in eqn.outvars)
    return sorted(set.intersection(*map(set, dropped), *units))


def _can_shift(eqn: JaxprEqn) -> bool:
    shared, params = _shared(eqn), eqn.params
    places = {params[name] for name in ("axis", "dimension") if name in params}
    padding = {
        params["padding_config"][a] for a in shared if "padding_config" in params
    }
    if "axes" in params and set(params["axes"]) <= set(shared):
        return False
    return places.isdisjoint(shared) and padding <= {(0, 0, 0)}


def _shift(eqn: JaxprEqn, operands: Sequence[Any]) -> Any:
    """The rule of primitives whose parameters name axes, or nothing of shapes."""
    shared, params = _shared(eqn), dict(eqn.params)

    def place(axis: int) -> int:
        return axis - sum(a < axis for a in shared)

    for name in ("axis", "dimension"):
        if name in params:
            params[name] = place(params[name])
    for name in _OF_AXES:
        if params.get(name) is not None:
            params[name] = _without(params[name], shared)
    if "axes" in params:
        params["axes"] = tuple(place(a) for a in params["axes"] if a not in shared)
    shapes = (shape_of(atom) for atom in eqn.invars)
    fitted = (
        _fit(x, _without(shape, shared)) if shape else x
        for x, shape in zip(operands, shapes, strict=True)
    )
    return eqn.primitive.bind(*fitted, **params)


# Parameters with an entry for each axis.
_OF_AXES = ("padding_config", "shape", "start_indices", "limit_indices", "strides")


def _squeezed(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    shapes = (shape_of(atom) for atom in eqn.invars)
    return [
        _fit(x, [n for n in shape if n != 1])
        for x, shape in zip(operands, shapes, strict=True)
    ]


def _places(atom: Any) -> dict[int, int]:
    """Returns the places of the axes that are longer than 1 among each other."""
    long = (axis for axis, length in enumerate(shape_of(atom)) if length != 1)
    return {axis: place for place, axis in enumerate(long)}


def _broadcast(eqn: JaxprEqn, operands: Sequence[Any]) -> Any:
    shape, axes = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    short, dropped = _short(shape), _dropped(shape)
    kept = tuple(
        axes[axis] - sum(a < axes[axis] for a in dropped)
        for axis in _places(eqn.invars[0])
    )
    changed = {"shape": short, "broadcast_dimensions": kept}
    x, *_ = _squeezed(eqn, operands)
    return eqn.primitive.bind(x, **{**eqn.params, **changed})


def _transpose(eqn: JaxprEqn, operands: Sequence[Any]) -> Any:
    places = _places(eqn.invars[0])
    order = tuple(places[a] for a in eqn.params["permutation"] if a in places)
    (x,) = _squeezed(eqn, operands)
    return x if order == tuple(sorted(order)) else lax.transpose(x, order)


def _multiply(eqn: JaxprEqn, operands: Sequence[Any]) -> Any:
    sides = [_places(atom) for atom in eqn.invars]
    numbers = tuple(
        tuple(
            tuple(places[axis] for axis in axes if axis in places)
            for places, axes in zip(sides, pair, strict=True)
        )
        for pair in eqn.params["dimension_numbers"]
    )
    changed = {**eqn.params, "dimension_numbers": numbers}
    return eqn.primitive.bind(*_squeezed(eqn, operands), **changed)


_RULES: Mapping[str, _Rule] = {
    "broadcast_in_dim": _broadcast,
    "dot_general": _multiply,
    "transpose": _transpose,
    **dict.fromkeys(
        [
            *("argmax", "argmin", "concatenate", "cumlogsumexp", "cummax", "cummin"),
            *("cumprod", "cumsum", "iota", "pad", "reduce_and", "reduce_max"),
            *("reduce_min", "reduce_or", "reduce_prod", "reduce_sum", "slice", "split"),
        ],
        _shift,
    ),
}
