"""Drops the batch axis of a batch of one, so that chunks can divide the next axis.

Chunks of the backward pass divide the first axis of residuals. In a batch of one, or in
microbatches of one, that axis has length 1. Also, XLA:CPU drops it in matrix products
alone, and then does not compute in place between a product and what reads it.

So values `[1, ...]` lose this axis. Arguments, results and gradients keep it. Equations
that cannot do without it run with it, between two reshapes.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from dafjax._trace.axis_rules import JaxprEqn, Params, shape_of
from dafjax._trace.equation import Atom, Constant, Equation, in_place_of
from dafjax._trace.residuals import Program
from dafjax._trace.rules import rule_of


def drop_unit_axes(program: Program) -> Program:
    """Returns the program without such an axis, if its largest value has one."""
    equations = (*program.forward, *program.backward)
    made = [v for eqn in equations for v in eqn.outputs]
    largest = max(made, key=program.nbytes, default=None)
    if largest is None or not _has_unit_axis(program.avals[largest]):
        return program
    if any(aval.sharding.mesh.explicit_axes for aval in program.avals):
        return program
    return _Dropping(program).run()


def _has_unit_axis(aval: jax.core.ShapedArray) -> bool:
    is_number = not jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    return is_number and len(aval.shape) > 1 and aval.shape[0] == 1


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
        changed = None if eqn.has_effect else self._without_axis(eqn)
        if changed is not None:
            self._learn(eqn.outputs)
            self._equations.append(changed)
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
            self._avals[value] = aval.update(shape=aval.shape[1:])
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
            self._short[value] = self._new(aval.update(shape=aval.shape[1:]))
            self._equations.append(self._reshape(value, self._short[value], source))
        return self._short[value]

    def _full_of(self, value: int, source: Equation) -> int:
        """Returns the value with the axis."""
        if not self._is_unit(value):
            return value
        if value not in self._full:
            self._full[value] = self._new(self._program.avals[value])
            self._equations.append(self._reshape(value, self._full[value], source))
        return self._full[value]

    def _full_atoms(self, atoms: Sequence[Atom]) -> tuple[Atom, ...]:
        if not self._equations:
            return tuple(atoms)
        last = self._equations[-1]
        return tuple(self._full_of(x, last) if isinstance(x, int) else x for x in atoms)

    def _without_axis(self, eqn: Equation) -> Equation | None:
        """Returns the equation on values without the axis, `None` if it needs it."""
        (old,) = eqn.jaxpr.eqns
        bind = _without_axis(old)
        if bind is None:
            return None
        shapes = [
            shape_of(var)[1:] if self._is_unit(v) else shape_of(var)
            for v, var in zip(eqn.outputs, old.outvars, strict=True)
        ]
        avals = []
        for atom, var in zip(eqn.inputs, eqn.jaxpr.invars, strict=True):
            aval: Any = var.aval
            avals.append(
                aval.update(shape=aval.shape[1:]) if self._is_unit(atom) else aval
            )

        def run(*operands: Any) -> Any:
            known = dict(zip(eqn.inputs, operands, strict=True))
            atoms = eqn.operand_atoms
            return bind([known[a] if a in known else _value(a) for a in atoms])

        jaxpr = jax.make_jaxpr(run)(*avals).jaxpr
        if len(jaxpr.eqns) != 1 or [shape_of(v) for v in jaxpr.outvars] != shapes:
            return None
        inputs = tuple(
            (self._short_of(x, eqn) if self._is_unit(x) else x)
            if isinstance(x, int)
            else Constant(x.value[0] if self._is_unit(x) else x.value)
            for x in eqn.inputs
        )
        return in_place_of(Equation(jaxpr, inputs, eqn.outputs), eqn)


def _value(atom: Atom) -> Any:
    return atom.value if isinstance(atom, Constant) else None


def _reshaped(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    return lax.reshape_p.bind(x, new_sizes=tuple(shape), dimensions=None, sharding=None)


def _is_dropped(atom: Any) -> bool:
    shape = shape_of(atom)
    return len(shape) > 1 and shape[0] == 1


def _without_axis(
    eqn: JaxprEqn,
) -> Callable[[Sequence[Any]], Any] | None:
    """Returns the operation on operands `[1, ...]` without this axis.

    Its results may have other shapes than those of the equation without the axis. Then
    the equation cannot do without it.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "squeeze" or (name == "reshape" and params["dimensions"] is None):
        shape = shape_of(eqn.outvars[0])
        shape = shape[1:] if _is_dropped(eqn.outvars[0]) else shape
        return lambda operands: _reshaped(operands[0], shape)
    rule = _RULES.get(name)
    if rule is None:
        rule = _each if rule_of(name).is_elementwise else _reduce
    changed = rule(eqn)
    if changed is None:
        return None
    return lambda operands: eqn.primitive.bind(*operands, **{**params, **changed})


def _each(eqn: JaxprEqn) -> Params | None:
    are_dropped = (not shape_of(x) or _is_dropped(x) for x in eqn.invars)
    return {} if all(are_dropped) else None


def _reduce(eqn: JaxprEqn) -> Params | None:
    axes = tuple(axis - 1 for axis in eqn.params.get("axes", ()) if axis)
    return {"axes": axes} if axes and _is_dropped(eqn.invars[0]) else None


def _along(name: str) -> Callable[[JaxprEqn], Params | None]:
    def rule(eqn: JaxprEqn) -> Params | None:
        axis = eqn.params[name]
        are_dropped = all(map(_is_dropped, (*eqn.invars, *eqn.outvars)))
        return {name: axis - 1} if axis and are_dropped else None

    return rule


def _iota(eqn: JaxprEqn) -> Params | None:
    shape, axis = eqn.params["shape"], eqn.params["dimension"]
    return {"shape": shape[1:], "dimension": axis - 1} if axis else None


def _broadcast(eqn: JaxprEqn) -> Params | None:
    shape, axes = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    if _is_dropped(eqn.invars[0]):
        axes = axes[1:]
    if _is_dropped(eqn.outvars[0]):
        if 0 in axes:
            return None
        shape, axes = shape[1:], tuple(axis - 1 for axis in axes)
    return {"shape": shape, "broadcast_dimensions": axes}


def _transpose(eqn: JaxprEqn) -> Params | None:
    first, *others = eqn.params["permutation"]
    if first or not _is_dropped(eqn.invars[0]):
        return None
    return {"permutation": tuple(axis - 1 for axis in others)}


def _pad(eqn: JaxprEqn) -> Params | None:
    first, *others = eqn.params["padding_config"]
    if first != (0, 0, 0) or not _is_dropped(eqn.invars[0]):
        return None
    return {"padding_config": tuple(others)}


def _slice(eqn: JaxprEqn) -> Params | None:
    if not _is_dropped(eqn.invars[0]):
        return None
    names = "start_indices", "limit_indices", "strides"
    return {n: eqn.params[n] and eqn.params[n][1:] for n in names}


def _multiply(eqn: JaxprEqn) -> Params | None:
    dropped = [_is_dropped(x) for x in eqn.invars]
    numbers = []
    for pair in eqn.params["dimension_numbers"]:
        kept: tuple[list[int], list[int]] = [], []
        for axes in zip(*pair, strict=True):
            gone = [
                axis == 0 and drop for axis, drop in zip(axes, dropped, strict=True)
            ]
            if gone[0] != gone[1]:
                return None
            if not gone[0]:
                for axis, drop, side in zip(axes, dropped, kept, strict=True):
                    side.append(axis - drop)
        numbers.append(tuple(map(tuple, kept)))
    return {"dimension_numbers": tuple(numbers)}


_RULES: Mapping[str, Callable[[JaxprEqn], Params | None]] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _along("dimension"),
    "cumlogsumexp": _along("axis"),
    "cummax": _along("axis"),
    "cummin": _along("axis"),
    "cumprod": _along("axis"),
    "cumsum": _along("axis"),
    "dot_general": _multiply,
    "iota": _iota,
    "pad": _pad,
    "slice": _slice,
    "split": _along("axis"),
    "transpose": _transpose,
}
