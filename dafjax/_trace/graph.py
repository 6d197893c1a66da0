"""A traced function as one flat list of equations, and what such lists tell.

They tell what is live, the names of values, and operations as `jax.checkpoint`
describes them to its policies.
"""

import collections
import dataclasses
import enum
import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, final

import jax
import jax.core
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax._src.ad_checkpoint import name_p
from jax._src.core import DropVar
from jax._src.interpreters.partial_eval import Offloadable, RecomputeType, SaveableType
from jax.extend.core import ClosedJaxpr, Primitive

from dafjax._trace.coming import name_of, params_of, with_name
from dafjax._trace.equation import (
    Atom,
    Constant,
    Equation,
    function_of_jax,
    values_of,
    with_constants,
)


# Calls whose body is spliced into the caller.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    # The plan decides whether to recompute its values or to save them.
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
}
_CHECKPOINTS = {"checkpoint", "remat2"}

# Calls that carry a derivative rule. They are spliced in only after differentiation,
# when the rules have been applied. A second differentiation is refused.
RULED_CALLS = {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}

# Wrapped functions inside of a wrapped function are spliced in at once, because the
# outermost decides. This name on a result distinguishes them from other functions with
# a rule.
_WRAPPED = "dafjax_wrapped"


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """A flat, closed program.

    Invariant: equations are in an order of evaluation, and values are numbered in the
    order of their computation. The inputs come first.

    Attributes:
        avals: Shape and dtype of every value.
        num_inputs: How many of the values are inputs.
        equations: The operations.
        outputs: The values and constants that the program returns.
        tags: The names that `jax.ad_checkpoint.checkpoint_name` gave to values, if its
            equations are left out.
        tokens: The types of the values that are tokens. In `avals` they are arrays
            without elements.
    """

    avals: tuple[jax.core.ShapedArray, ...]
    num_inputs: int
    equations: tuple[Equation, ...]
    outputs: tuple[Atom, ...]
    tags: Mapping[int, tuple[str, ...]]
    tokens: Mapping[int, Any]

    def type_of(self, value: int) -> Any:
        """Returns the type to trace functions of a value with."""
        return self.tokens.get(value, self.avals[value])


def live_equations(
    equations: Sequence[Equation], wanted: Iterable[Atom]
) -> tuple[Equation, ...]:
    """Returns the equations that `wanted` depends on, in order.

    Equations with an effect, such as printing, are always included.
    """
    needed = set(values_of(wanted))
    live = []
    for eqn in reversed(equations):
        if eqn.has_effect or needed.intersection(eqn.outputs):
            live.append(eqn)
            needed.update(eqn.input_values)
    return tuple(reversed(live))


def readers_of(equations: Iterable[Equation]) -> dict[int, list[Equation]]:
    """Returns, for each value, the equations that read it."""
    readers: dict[int, list[Equation]] = collections.defaultdict(list)
    for eqn in equations:
        for value in dict.fromkeys(eqn.input_values):
            readers[value].append(eqn)
    return readers


def flatten(
    closed: ClosedJaxpr,
    *,
    is_differentiated: bool = True,
    opens_wrapped: bool = True,
) -> Graph:
    """Turns a jaxpr into a `Graph` and inlines calls.

    Args:
        closed: The program.
        is_differentiated: Whether it is differentiated already. Only then are calls
            with a derivative rule inlined, and equations that name values become tags
            of these values.
        opens_wrapped: Whether calls of wrapped functions, and of those in
            `jax.checkpoint`, are inlined in any case.

    Returns:
        The flat program.
    """
    ruled = CALLS.keys() | (RULED_CALLS if is_differentiated else {})
    builder = _Builder(
        ruled if opens_wrapped else ruled - _CHECKPOINTS,
        names_are_tags=is_differentiated,
        opens_wrapped=opens_wrapped,
    )
    inputs = [builder.new_value(var.aval) for var in closed.jaxpr.invars]
    outputs = builder.splice(closed, inputs)
    return Graph(
        avals=tuple(builder.avals),
        num_inputs=len(inputs),
        equations=tuple(builder.equations),
        outputs=tuple(outputs),
        tags=builder.tags,
        tokens=builder.tokens,
    )


def stopped_outputs(closed: ClosedJaxpr) -> tuple[bool, ...]:
    """Returns, for each output, whether no gradient reaches it, whatever the arguments.

    `jax.lax.stop_gradient` stops gradients. JAX knows this for an output of operations,
    but not for an output of a function with a derivative rule.
    """
    graph = flatten(closed, is_differentiated=False)
    has_gradient = [jnp.issubdtype(aval.dtype, jnp.inexact) for aval in graph.avals]
    stopped = {value for value, has in enumerate(has_gradient) if not has}
    for eqn in graph.equations:
        if eqn.primitive == "stop_gradient" or stopped.issuperset(eqn.input_values):
            stopped.update(eqn.outputs)
    return tuple(
        isinstance(atom, int) and atom in stopped and has_gradient[atom]
        for atom in graph.outputs
    )


def mark_as_wrapped(results: Sequence[Any]) -> list[Any]:
    """Marks the results of a wrapped function, so that it can be recognized."""
    marked = list(results)
    arrays = (n for n, result in enumerate(results) if is_array(jax.typeof(result)))
    for first in itertools.islice(arrays, 1):
        marked[first] = with_name(results[first], _WRAPPED)
    return marked


def is_array(aval: Any) -> bool:
    """Returns whether a type has a shape and a dtype. A token has neither."""
    return hasattr(aval, "dtype")


def is_wrapped(body: ClosedJaxpr) -> bool:
    """Returns whether a program is that of a wrapped function."""
    return any(
        eqn.primitive.name == "name" and eqn.params["name"] == _WRAPPED
        for eqn in body.jaxpr.eqns
    )


def names_of_user(tags: Iterable[str]) -> tuple[str, ...]:
    """Returns the tags of a value without the mark of a wrapped function."""
    return tuple(tag for tag in tags if tag != _WRAPPED)


_NO_ELEMENTS = jax.core.ShapedArray((0,), bool)


class _Builder:
    """Collects equations while calls are inlined."""

    def __init__(
        self, inlined: Container[str], *, names_are_tags: bool, opens_wrapped: bool
    ) -> None:
        self._inlined = inlined
        self._names_are_tags = names_are_tags
        self._opens_wrapped = opens_wrapped
        self.tags: dict[int, tuple[str, ...]] = {}
        self.tokens: dict[int, Any] = {}
        self.avals: list[jax.core.ShapedArray] = []
        self.equations: list[Equation] = []

    def new_value(self, aval: Any) -> int:
        if not is_array(aval):
            self.tokens[len(self.avals)] = aval
            aval = _NO_ELEMENTS
        self.avals.append(aval)
        return len(self.avals) - 1

    def splice(self, closed: ClosedJaxpr, arguments: Sequence[Atom]) -> list[Atom]:
        jaxpr = closed.jaxpr
        env: dict[Any, Atom] = dict(zip(jaxpr.invars, arguments, strict=True))
        env.update(
            (var, Constant(value))
            for var, value in zip(jaxpr.constvars, closed.consts, strict=True)
        )

        def read(atom: Any) -> Atom:
            if isinstance(atom, jex_core.Literal):
                return Constant(atom.val)
            return env[atom]

        for eqn in jaxpr.eqns:
            body = self._inlined_body(eqn)
            if body is not None:
                results = self.splice(body, [read(atom) for atom in eqn.invars])
                env.update(zip(eqn.outvars, results, strict=True))
                continue
            if eqn.primitive.name == "name" and self._names_are_tags:
                named = env[eqn.outvars[0]] = read(eqn.invars[0])
                if isinstance(named, int):
                    tag = eqn.params["name"]
                    self.tags[named] = (*self.tags.get(named, ()), tag)
                continue
            invars = list(
                dict.fromkeys(
                    atom
                    for atom in eqn.invars
                    if not isinstance(atom, jex_core.Literal)
                )
            )
            outvars = [v for v in eqn.outvars if not isinstance(v, DropVar)]
            env.update((var, self.new_value(var.aval)) for var in outvars)
            self.equations.append(
                Equation(
                    jaxpr=jaxpr.replace(
                        constvars=[],
                        invars=invars,
                        outvars=outvars,
                        eqns=[eqn],
                        effects=eqn.effects,
                    ),
                    inputs=tuple(env[var] for var in invars),
                    outputs=values_of(env[var] for var in outvars),
                )
            )
        return [read(atom) for atom in jaxpr.outvars]

    def _inlined_body(self, eqn: jex_core.JaxprEqn) -> ClosedJaxpr | None:
        """Returns the body to splice in place of a call, or `None` if it is no call."""
        name = name_of(eqn)
        body = params_of(eqn).get((CALLS | RULED_CALLS).get(name, ""))
        if body is None or function_of_jax(eqn) is not None:
            return None
        body = with_constants(body)
        is_opened = self._opens_wrapped and is_wrapped(body)
        return body if name in self._inlined or is_opened else None


def find_numbers(equations: Iterable[Equation]) -> dict[int, Any]:
    """Returns the values that are one number everywhere, because a literal fills them.

    Args:
        equations: The equations of a program, in order.
    """
    numbers: dict[int, Any] = {}
    for eqn in equations:
        if eqn.rule.keeps_values and len(eqn.operand_atoms) == 1:
            number = number_of(eqn.operand_atoms[0], numbers)
            if number is not None and eqn.rule.converts:
                number = np.asarray(number).astype(eqn.params["new_dtype"]).item()
            if number is not None:
                numbers.update(dict.fromkeys(eqn.outputs, number))
    return numbers


def number_of(atom: Atom, numbers: Mapping[int, Any]) -> Any:
    """Returns the number, no boolean, that a value is everywhere, or `None`.

    Args:
        atom: The value.
        numbers: The result of `find_numbers`.
    """
    value = atom.value if isinstance(atom, Constant) else numbers.get(atom)
    if value is None or np.ndim(value):
        return None
    return value if jnp.issubdtype(jnp.result_type(value), np.number) else None


@final
@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation as `jax.checkpoint` describes it to its policies.

    Attributes:
        primitive: The primitive.
        avals: Shapes and dtypes of its operands.
        params: Its parameters.
    """

    primitive: Primitive
    avals: tuple[Any, ...]
    params: Mapping[str, Any]


def operation_of(equation: Equation) -> Operation | None:
    """Returns the operation of an equation; `None` for a call of several operations.

    Only dafjax makes such calls, not JAX.
    """
    eqn = equation.written
    if eqn is None:
        return None
    return Operation(eqn.primitive, tuple(atom.aval for atom in eqn.invars), eqn.params)


def operations_of(equation: Equation | None) -> tuple[Operation, ...]:
    """Returns the operation of an equation, if there is one, as a tuple."""
    operation = None if equation is None else operation_of(equation)
    return () if operation is None else (operation,)


def naming(aval: Any, name: str) -> Operation:
    """Returns the operation of `checkpoint_name` that names a value."""
    return Operation(name_p, (aval,), {"name": name})


@final
class Answer(enum.Enum):
    """The answer of a policy of `jax.checkpoint` about the results of an operation."""

    SAVE = enum.auto()
    RECOMPUTE = enum.auto()
    OFFLOAD = enum.auto()


def read_answer(answer: Any) -> Answer | None:
    """Reads the result of a policy of `jax.checkpoint`; `None` if it is no answer."""
    if isinstance(answer, bool):
        return Answer.SAVE if answer else Answer.RECOMPUTE
    kinds = (
        (SaveableType, Answer.SAVE),
        (RecomputeType, Answer.RECOMPUTE),
        (Offloadable, Answer.OFFLOAD),
    )
    return next((found for kind, found in kinds if isinstance(answer, kind)), None)
