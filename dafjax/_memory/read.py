"""A program as XLA:CPU has it: operations on numbered values, read from a jaxpr."""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, final

import numpy as np

from dafjax._trace.coming import equation_as_before, name_of, params_of
from dafjax._trace.equation import Atom, scan_arity, with_constants
from dafjax._trace.graph import CALLS, RULED_CALLS
from dafjax._trace.residuals import Program
from dafjax._trace.rules import Combines, Lowering, OpRule, rule_of
from dafjax._trace.tracing import ClosedJaxpr


# A value that is known when the program is traced. It takes no temporary memory.
CONSTANT = -1


@final
@dataclasses.dataclass(eq=False)
class Op:
    """An operation. Values are given by number.

    Attributes:
        name: The primitive.
        operands: The values that it reads.
        results: The values that it makes.
        params: The parameters of the primitive.
        inner_nbytes: Bytes that it needs while it runs.
        carried: The operands whose buffers hold the first results, of a loop or a
            barrier.
    """

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    params: Mapping[str, Any]
    inner_nbytes: int = 0
    carried: tuple[int, ...] = ()

    @functools.cached_property
    def rule(self) -> OpRule:
        """The row of the primitive in the table of primitives."""
        return rule_of(self.name)

    @property
    def lowering(self) -> Lowering:
        """How XLA runs it."""
        return self.rule.lowering

    def aliased(self, position: int) -> int | None:
        """Returns the operand whose buffer a result takes over, if there is one."""
        if position < len(self.carried):
            return self.carried[position]
        return self.operands[0] if Lowering.IN_PLACE in self.lowering else None


@final
@dataclasses.dataclass(frozen=True, eq=False)
class XlaProgram:
    """The operations of a program that its results depend on.

    Attributes:
        ops: The operations, in order.
        avals: Shape and dtype of every value.
        arguments: The values that the program is called with.
        outputs: The values that it returns.
    """

    ops: Sequence[Op]
    avals: Sequence[Any]
    arguments: Sequence[int]
    outputs: Sequence[int]

    @functools.cached_property
    def nbytes(self) -> list[int]:
        """Bytes of every value."""
        return [
            math.prod(shape_of(aval))
            * getattr(getattr(aval, "dtype", None), "itemsize", 0)
            for aval in self.avals
        ]

    @functools.cached_property
    def users(self) -> Mapping[int, list[Op]]:
        """The operations that read each value."""
        users: dict[int, list[Op]] = collections.defaultdict(list)
        for op in self.ops:
            for value in dict.fromkeys(op.operands):
                users[value].append(op)
        return users

    @functools.cached_property
    def makers(self) -> Mapping[int, Op]:
        """The operation that makes each value."""
        return {value: op for op in self.ops for value in op.results}

    def shape(self, value: int) -> tuple[int, ...]:
        """Returns the shape of a value; `()` for a constant."""
        return () if value == CONSTANT else shape_of(self.avals[value])


def shape_of(aval: Any) -> tuple[int, ...]:
    """Returns the shape of a type; `()` for a token."""
    return getattr(aval, "shape", ())


# Returns the bytes at the peak of the body of a loop, or of a branch. The slice tells
# which arguments a loop carries.
Inner: TypeAlias = Callable[[ClosedJaxpr, slice], int]


def read(closed: ClosedJaxpr, inner: Inner) -> XlaProgram:
    """Returns the operations that the results of a program depend on.

    Calls are inlined, and equal operations are merged.
    """
    reader = _Reader(inner)
    arguments = [reader.new_value(var.aval) for var in closed.jaxpr.invars]
    return _xla_program(reader, arguments, reader.splice(closed, arguments))


def read_program(program: Program, inner: Inner) -> XlaProgram:
    """Returns the operations of both passes of a program, as `read` does of a jaxpr."""
    reader = _Reader(inner)
    given = (*range(program.num_arguments), *program.cotangents)
    values = {value: reader.new_value(program.avals[value]) for value in given}
    arguments = list(values.values())

    def find(atom: Atom) -> int:
        return values.get(atom, CONSTANT) if isinstance(atom, int) else CONSTANT

    for eqn in (*program.forward, *program.backward):
        body = ClosedJaxpr(eqn.jaxpr, ())
        results = reader.splice(body, list(map(find, eqn.inputs)))
        values.update(zip(eqn.outputs, results, strict=True))
    outputs = list(map(find, (*program.results, *program.gradients)))
    return _xla_program(reader, arguments, outputs)


def _xla_program(
    reader: "_Reader", arguments: Sequence[int], outputs: Sequence[int]
) -> XlaProgram:
    ops = _without_transposed_products(_live(reader.ops, outputs), outputs)
    return XlaProgram(ops, reader.avals, arguments, outputs)


def _live(ops: Sequence[Op], outputs: Iterable[int]) -> list[Op]:
    needed = set(outputs)
    live = []
    for op in reversed(ops):
        if needed.intersection(op.results):
            live.append(op)
            needed.update(op.operands)
    return live[::-1]


def _without_transposed_products(ops: Sequence[Op], outputs: Sequence[int]) -> list[Op]:
    """Drops transposes of products: a product writes its result transposed."""
    num_users = collections.Counter(v for op in ops for v in set(op.operands))
    products: dict[int, Op] = {}
    left = []
    for op in ops:
        product = op if Lowering.MATRIX_PRODUCT in op.lowering else None
        if Lowering.TRANSPOSE in op.lowering and op.operands[0] not in outputs:
            is_read_once = num_users[op.operands[0]] == 1
            product = products.get(op.operands[0]) if is_read_once else None
        if product is not None:
            product.results = op.results
            products[op.results[0]] = product
        if product is None or product is op:
            left.append(op)
    return left


@final
class _Reader:
    """Collects the operations of a program."""

    def __init__(self, inner: Inner) -> None:
        self.inner = inner
        self.avals: list[Any] = []
        self.ops: list[Op] = []
        # The results of operations that were added, by a key of the operation.
        self._known: dict[Any, tuple[int, ...]] = {}
        self._zeros: set[int] = set()

    def new_value(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def shape(self, value: int) -> tuple[int, ...]:
        return () if value == CONSTANT else shape_of(self.avals[value])

    def add(
        self,
        name: str,
        operands: tuple[int, ...],
        avals: Sequence[Any],
        params: Mapping[str, Any],
        **more: Any,
    ) -> tuple[int, ...]:
        """Adds an operation, unless there is an equal one, and returns its results."""
        key: Any = (name, operands, tuple(sorted(params.items())), tuple(avals))
        try:
            hash(key)
        except TypeError:
            # It is equal to no other.
            key = object()
        if key not in self._known:
            self._known[key] = tuple(map(self.new_value, avals))
            self.ops.append(Op(name, operands, self._known[key], params, **more))
        return self._known[key]

    def add_transpose(self, value: int, **params: Any) -> int:
        """Adds a copy of a value with its axes in another order."""
        return self.add("transpose", (value,), [self.avals[value]], params)[0]

    def splice(self, closed: ClosedJaxpr, arguments: Sequence[int]) -> list[int]:
        """Adds the operations of a program, and returns its results."""
        jaxpr = closed.jaxpr
        values: dict[Any, int] = dict(zip(jaxpr.invars, arguments, strict=True))

        def find(atom: Any) -> int:
            is_literal = hasattr(atom, "val")
            return CONSTANT if is_literal else values.get(atom, CONSTANT)

        for eqn in jaxpr.eqns:
            results = self._read(eqn, tuple(map(find, eqn.invars)))
            values.update(zip(eqn.outvars, results, strict=True))
        return list(map(find, jaxpr.outvars))

    def _read(self, eqn: Any, operands: tuple[int, ...]) -> Sequence[int]:
        """Adds the operations that XLA makes of an equation; returns its results."""
        if eqn.primitive.name == "call_hi_primitive":
            eqn = equation_as_before(eqn)
        name, params = name_of(eqn), params_of(eqn)
        rule = rule_of(name)
        body = params.get(_INLINED.get(name, ""))
        if body is not None:
            return self.splice(with_constants(body), operands)
        if Lowering.IDENTITY in rule.lowering:
            return operands
        if name in READERS:
            return READERS[name](self, eqn, operands)
        avals = _avals(eqn)
        zeros = [
            _is_zero(atom) if value == CONSTANT else value in self._zeros
            for atom, value in zip(eqn.invars, operands, strict=True)
        ]
        if rule.adds and any(zeros):
            kept = operands[0] if zeros[1] else operands[1]
            is_sum = rule.combines is Combines.ADD or zeros[1]
            if is_sum and self.shape(kept) == avals[0].shape:
                return (kept,)
        if rule.is_elementwise and len(avals) == 1:
            operands = tuple(self._widened(value, avals[0]) for value in operands)
        results = self.add(name, operands, avals, params)
        if zeros == [True] and rule.lowering & (Lowering.RESHAPE | Lowering.BROADCAST):
            self._zeros.update(results)
        return results

    def _widened(self, value: int, aval: Any) -> int:
        """Returns an operand with the shape of the result, as XLA needs it."""
        if value == CONSTANT or self.shape(value) == aval.shape:
            return value
        wide = aval.update(dtype=self.avals[value].dtype)
        return self.add("broadcast_in_dim", (value,), [wide], {})[0]


def _avals(eqn: Any) -> list[Any]:
    return [var.aval for var in eqn.outvars]


def _is_zero(atom: Any) -> bool:
    value = np.asarray(getattr(atom, "val", 1))
    # Tangents of integers have a dtype without numbers.
    return value.ndim == 0 and value.dtype.kind in "biufc" and value == 0


# The readers of single primitives.
_Operands: TypeAlias = tuple[int, ...]


def _read_barrier(reader: _Reader, eqn: Any, operands: _Operands) -> Sequence[int]:
    """Adds a barrier. Its results are its operands, in their buffers."""
    num_awaited = eqn.params["num_awaited"]
    held, avals = operands[num_awaited:], _avals(eqn)
    # Only one of the two barriers returns the operands that it merely awaits.
    awaited = operands[: len(avals) - len(held)]
    return *awaited, *reader.add(
        "dafjax_hold", operands, avals[len(awaited) :], eqn.params, carried=held
    )


def _read_draw(reader: _Reader, eqn: Any, operands: _Operands) -> Sequence[int]:
    avals = _avals(eqn)
    inner = sum(4 * math.prod(aval.shape) for aval in avals)
    name = eqn.primitive.name
    return reader.add(name, operands, avals, eqn.params, inner_nbytes=inner)


def _read_split(reader: _Reader, eqn: Any, operands: _Operands) -> Sequence[int]:
    return [
        reader.add("slice", operands, [aval], {"number": n, **eqn.params})[0]
        for n, aval in enumerate(_avals(eqn))
    ]


def _read_branches(reader: _Reader, eqn: Any, operands: _Operands) -> Sequence[int]:
    branches = list(map(with_constants, eqn.params["branches"]))
    platforms = eqn.params.get("branches_platforms")
    if platforms:
        on_cpus = (p is None or "cpu" in p for p in platforms)
        pairs = zip(branches, on_cpus, strict=True)
        body = next(branch for branch, is_chosen in pairs if is_chosen)
        return reader.splice(body, operands[1:])
    inner = max(reader.inner(branch, slice(0)) for branch in branches)
    return reader.add("cond", operands, _avals(eqn), {}, inner_nbytes=inner)


def _read_while(reader: _Reader, eqn: Any, operands: _Operands) -> Sequence[int]:
    in_condition, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carried = operands[in_condition + consts :]
    return _add_loop(reader, eqn, operands, "body_jaxpr", consts, carried)


def _read_scan(reader: _Reader, eqn: Any, operands: _Operands) -> Sequence[int]:
    consts, num_carried = scan_arity(eqn.params)
    carried = operands[consts : consts + num_carried]
    return _add_loop(reader, eqn, operands, "jaxpr", consts, carried)


def _add_loop(
    reader: _Reader,
    eqn: Any,
    operands: _Operands,
    body: str,
    consts: int,
    carried: _Operands,
) -> Sequence[int]:
    """Adds a loop, whose body carries some arguments after `consts` others."""
    arguments = slice(consts, consts + len(carried))
    inner = reader.inner(with_constants(eqn.params[body]), arguments)
    # Loops are never merged: the body is no part of the parameters.
    params = {"number": len(reader.ops)}
    return reader.add(
        "scan", operands, _avals(eqn), params, inner_nbytes=inner, carried=carried
    )


def _read_product(reader: _Reader, eqn: Any, operands: _Operands) -> Sequence[int]:
    """Adds a product, after copies of operands whose axes are in another order."""
    contracted, batch = eqn.params["dimension_numbers"]
    ready = []
    for value, c, b in zip(operands, contracted, batch, strict=True):
        shape = reader.shape(value)
        free = [d for d in range(len(shape)) if d not in (*c, *b)]
        order = (*b, *c, *free) if ready else (*b, *free, *c)
        order = tuple(d for d in order if shape[d] != 1) if shape else ()
        # The product of two matrices reads a transposed one as it is.
        is_read_as_it_is = len(order) == 2 and not b
        if list(order) != sorted(order) and not is_read_as_it_is:
            value = reader.add_transpose(value, order=order)
        ready.append(value)
    return reader.add("dot_general", tuple(ready), _avals(eqn), eqn.params)


def _read_convolution(reader: _Reader, eqn: Any, operands: _Operands) -> Sequence[int]:
    """Adds a convolution, and copies to and from the layout with channels last."""
    numbers = eqn.params["dimension_numbers"]
    last = len(numbers.lhs_spec) - 1
    images, kernel = (0, last, *range(1, last)), (last, last - 1, *range(last - 1))
    specs = ((numbers.lhs_spec, images), (numbers.rhs_spec, kernel))
    ready = tuple(
        value
        if tuple(spec) == wanted or value == CONSTANT
        else reader.add_transpose(value, spec=tuple(spec))
        for value, (spec, wanted) in zip(operands, specs, strict=True)
    )
    avals = _avals(eqn)
    groups = eqn.params["batch_group_count"]
    # With groups, XLA:CPU computes all pairs of groups, and selects.
    nbytes = avals[0].size * avals[0].dtype.itemsize
    inner = 2 * groups * nbytes if groups > 1 else 0
    name = eqn.primitive.name
    (result,) = reader.add(name, ready, avals, eqn.params, inner_nbytes=inner)
    if tuple(numbers.out_spec) != images:
        result = reader.add_transpose(result, spec=tuple(numbers.out_spec))
    return (result,)


READERS: Mapping[str, Callable[[_Reader, Any, _Operands], Sequence[int]]] = {
    "cond": _read_branches,
    "conv_general_dilated": _read_convolution,
    "dafjax_hold": _read_barrier,
    "dafjax_tie": _read_barrier,
    "dot_general": _read_product,
    "random_bits": _read_draw,
    "scan": _read_scan,
    "split": _read_split,
    "threefry2x32": _read_draw,
    "while": _read_while,
}
# Of calls, the parameter that holds the body.
_INLINED = {**CALLS, **RULED_CALLS, "shard_map": "jaxpr", "custom_vmap_call": "call"}
