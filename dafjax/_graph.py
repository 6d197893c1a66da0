"""A traced function as one flat list of equations, whatever calls it contains.

This file and `_residuals.py` are the only ones that look inside a jaxpr.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, final

import jax
import jax.core
import jax.extend.core as jex_core
from jax._src import config
from jax._src.core import DropVar, jaxprs_in_params
from jax.ad_checkpoint import checkpoint_name
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr as ClosedJaxpr


# Calls whose body is spliced into the caller.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    # What it would recompute is recomputed, or kept, as the plan says.
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
}

# Calls that carry a derivative rule. They are spliced in only after differentiation:
# the rules have been applied then, and differentiating once more is refused.
_RULED_CALLS = {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}

# Wrapped functions inside of a wrapped function are spliced in at once: the outermost
# decides. This name on a result tells them from other functions with a rule.
_WRAPPED = "dafjax_wrapped"


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """A value known when the function was traced."""

    value: Any


# A value is the number of its place in `Graph.avals`.
Atom: TypeAlias = int | Constant


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Equation:
    """One primitive operation: `outputs = primitive(*inputs)`.

    Attributes:
        jaxpr: What it computes, a program of its own; its inputs are `inputs`.
        inputs: What it reads. Literals are part of the equation.
        outputs: The values it makes.
    """

    jaxpr: jex_core.Jaxpr
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.jaxpr.eqns) == 1

    @property
    def primitive(self) -> str:
        """The primitive's name, for example `"conv_general_dilated"`.

        For what `call_equation` has made, the name of the function.
        """
        name = self.jaxpr.eqns[0].primitive.name
        return self.params["name"] if name in ("jit", "pjit") else name

    @property
    def params(self) -> Mapping[str, Any]:
        """The primitive's parameters."""
        return self.jaxpr.eqns[0].params

    @property
    def operand_atoms(self) -> tuple[Atom, ...]:
        """What the primitive reads, literals and repetitions included."""
        atoms = dict(zip(self.jaxpr.invars, self.inputs, strict=True))
        return tuple(
            Constant(a.val) if isinstance(a, jex_core.Literal) else atoms[a]
            for a in self.jaxpr.eqns[0].invars
        )

    @property
    def key(self) -> Any:
        """What equations that compute the same have in common, hashable.

        `None` where that cannot be told, and of those that do more than compute.
        """
        (eqn,) = self.jaxpr.eqns
        atoms = dict(zip(self.jaxpr.invars, self.inputs, strict=True))

        def operand(atom: Any) -> Any:
            if not isinstance(atom, jex_core.Literal):
                return atoms[atom]
            aval: Any = atom.aval
            # 0.0 and -0.0 are equal, but not in print. Arrays are not printed in full.
            return aval, id(atom.val) if aval.shape else repr(atom.val)

        operands = tuple(map(operand, eqn.invars))
        types = tuple(var.aval for var in eqn.outvars)
        key = (eqn.primitive, tuple(sorted(eqn.params.items())), operands, types)
        try:
            hash(key)
        except TypeError:
            return None
        return None if eqn.effects else key

    @property
    def input_values(self) -> tuple[int, ...]:
        """The inputs that are values, not constants."""
        return values_of(self.inputs)

    @property
    def operand_sizes(self) -> tuple[int, ...]:
        """The number of elements of every operand, literals included."""
        return tuple(
            getattr(atom.aval, "size", 1) for atom in self.jaxpr.eqns[0].invars
        )

    @property
    def divisor(self) -> int | None:
        """The value that it divides by, if it does."""
        if self.primitive == "div":
            atom = self.operand_atoms[1]
        elif self.primitive == "integer_pow" and self.params["y"] < 0:
            atom = self.operand_atoms[0]
        else:
            return None
        return atom if isinstance(atom, int) else None

    @property
    def contracted_size(self) -> int:
        """How many products a `dot_general` sums for one element; 0 for the others."""
        if self.primitive != "dot_general":
            return 0
        (contracted, _), _ = self.params["dimension_numbers"]
        aval: Any = self.jaxpr.eqns[0].invars[0].aval
        return math.prod(aval.shape[axis] for axis in contracted)

    @property
    def makes_channels(self) -> bool:
        """Whether the last axis of a product is one of features, made by weights.

        Of a convolution the axis of its features; of a `dot_general` one that its
        second operand alone has, where that has no axis of examples.
        """
        if self.primitive == "conv_general_dilated":
            (aval,) = self.jaxpr.outvars
            features = self.params["dimension_numbers"].out_spec[1]
            return features == len(getattr(aval.aval, "shape", ())) - 1
        if self.primitive != "dot_general":
            return False
        (_, contracted), (_, batch) = self.params["dimension_numbers"]
        aval: Any = self.jaxpr.eqns[0].invars[1].aval
        return not batch and aval.ndim > len(contracted)

    @property
    def has_effect(self) -> bool:
        """Whether it does more than compute its outputs."""
        return bool(self.jaxpr.eqns[0].effects)

    @property
    def name_stack(self) -> str:
        """The names of the scopes it stands in, and of transformations."""
        return str(self.jaxpr.eqns[0].source_info.name_stack)

    @property
    def place(self) -> str:
        """Where in the model it stands, for example `"ResNet/Block_0/Conv_0"`."""
        return _place_of(self.jaxpr.eqns[0])

    @property
    def source(self) -> str:
        """The user's line that it comes from."""
        return source_info_util.summarize(self.jaxpr.eqns[0].source_info)


def _place_of(eqn: jex_core.JaxprEqn) -> str:
    """Returns `"a/b"` where the scopes are `"transpose(jvp(a))/b"`."""
    name_stack = str(eqn.source_info.name_stack)
    while (plain := re.sub(r"\b\w+\(([^()]*)\)", r"\1", name_stack)) != name_stack:
        name_stack = plain
    return "/".join(part for part in name_stack.split("/") if part)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """A flat, closed program.

    Invariant: equations stand in an order in which they can be evaluated, and values
    are numbered in the order in which they are made; the inputs come first.

    Attributes:
        avals: Shape and dtype of every value.
        num_inputs: How many of the values are inputs.
        equations: The operations.
        outputs: What the program returns.
        tags: The names that `jax.ad_checkpoint.checkpoint_name` gave to values, where
            its equations are left out.
    """

    avals: tuple[jax.core.ShapedArray, ...]
    num_inputs: int
    equations: tuple[Equation, ...]
    outputs: tuple[Atom, ...]
    tags: Mapping[int, tuple[str, ...]]


def live_equations(
    equations: Sequence[Equation], wanted: Iterable[Atom]
) -> tuple[Equation, ...]:
    """Returns those of the equations that `wanted` depends on, in order.

    An equation with an effect, such as printing, is always among them.
    """
    needed = set(values_of(wanted))
    live = []
    for eqn in reversed(equations):
        if eqn.has_effect or needed.intersection(eqn.outputs):
            live.append(eqn)
            needed.update(eqn.input_values)
    return tuple(reversed(live))


def values_of(atoms: Iterable[Atom]) -> tuple[int, ...]:
    """Returns the atoms that are values, not constants."""
    return tuple(atom for atom in atoms if isinstance(atom, int))


def renumber(atoms: Sequence[Atom], numbers: Mapping[int, Atom]) -> tuple[Atom, ...]:
    """Replaces every value by what `numbers` gives for it."""
    return tuple(numbers[atom] if isinstance(atom, int) else atom for atom in atoms)


def trace(
    fun: Callable[..., Any], leaves: Sequence[Any]
) -> tuple[ClosedJaxpr, tuple[Any, ...], Any]:
    """Traces a function of flat arguments; what it closes over becomes arguments.

    Args:
        fun: The function. It may return any pytree of arrays.
        leaves: Its arguments, or what stands for their shapes and dtypes.

    Returns:
        The traced function of the values closed over, then the arguments; the values
        closed over; the structure of the result.
    """
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*leaves)
    jaxpr = closed.jaxpr
    hoisted = jaxpr.replace(
        constvars=[],
        invars=[*jaxpr.constvars, *jaxpr.invars],
        debug_info=jaxpr.debug_info._replace(arg_names=None, result_paths=None),
    )
    return (
        ClosedJaxpr(hoisted, ()),
        tuple(closed.consts),
        jax.tree.structure(shapes),
    )


def as_function(closed: ClosedJaxpr) -> Callable[..., list[Any]]:
    """Returns the function that was traced, of flat arguments, with a flat result."""
    return jex_core.jaxpr_as_fun(closed)


def trace_context() -> Any:
    """Returns what a trace depends on beside its arguments, hashable.

    Settings such as `jax_enable_x64` and the default matmul precision, and the axes
    that `vmap` and `shard_map` have named.
    """
    return config.trace_context()


def count_calls(closed: ClosedJaxpr) -> collections.Counter[str]:
    """Counts how often a program calls each function that `jax.jit` wraps, by name.

    A call in the body of a `scan` counts once for each iteration. Of a function that
    has been split (JAX moves what is the same in every iteration out of a loop), the
    largest part counts.
    """
    calls: dict[str, collections.Counter[int]] = {}

    def visit(jaxpr: jex_core.Jaxpr, times: int) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("jit", "pjit"):
                num_equations = len(eqn.params["jaxpr"].eqns)
                of_name = calls.setdefault(eqn.params["name"], collections.Counter())
                of_name[num_equations] += times
            length = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            for body in jaxprs_in_params(eqn.params):
                visit(body, times * length)

    visit(closed.jaxpr, 1)
    return collections.Counter({name: n[max(n)] for name, n in calls.items()})


def evaluate(equation: Equation, operands: Sequence[Any]) -> list[Any]:
    """Runs one equation on arrays or tracers, one for each of `equation.inputs`."""
    return jax.core.eval_jaxpr(equation.jaxpr, (), *operands)


def call_equation(
    function: Callable[..., Any],
    avals: Sequence[jax.core.ShapedArray],
    inputs: tuple[Atom, ...],
    outputs: tuple[int, ...],
    in_place_of: Equation,
) -> Equation:
    """Returns an equation that calls a function, in the place of another equation.

    Args:
        function: The function, of arrays. Its name stands for that of a primitive.
        avals: Shape and dtype of its arguments.
        inputs: The arguments.
        outputs: The values that it makes.
        in_place_of: The equation whose place in the model, and in the user's code, the
            new one takes.
    """
    jaxpr = jax.make_jaxpr(jax.jit(function))(*avals).jaxpr
    (call,) = jaxpr.eqns
    source_info = in_place_of.jaxpr.eqns[0].source_info
    return Equation(
        jaxpr=jaxpr.replace(eqns=[call.replace(source_info=source_info)]),
        inputs=inputs,
        outputs=outputs,
    )


def mark_as_wrapped(results: Sequence[Any]) -> list[Any]:
    """Returns the results of a wrapped function, which can be recognized by them."""
    marked = [checkpoint_name(result, _WRAPPED) for result in results[:1]]
    return [*marked, *results[1:]]


def _is_marked(body: ClosedJaxpr) -> bool:
    return any(
        eqn.primitive.name == "name" and eqn.params["name"] == _WRAPPED
        for eqn in body.jaxpr.eqns
    )


def scan_arity(equation: Equation) -> tuple[int, int]:
    """Returns how many operands of a `scan` are the same for all iterations.

    And how many are carried from one to the next. The rest are stacked.
    """
    params = equation.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # Since jax 0.11.
    num_consts, num_carry, _ = (len(group) for group in params["ft_in"].unpack())
    return num_consts, num_carry


def bodies(equation: Equation) -> tuple[ClosedJaxpr, ...]:
    """Returns the body of a `scan`, or the branches of a `cond`."""
    params = equation.params
    found = params["branches"] if "branches" in params else (params["jaxpr"],)
    return tuple(map(_closed, found))


def _closed(body: Any) -> ClosedJaxpr:
    """Returns a body with its constants; since jax 0.11 it may carry them itself."""
    if isinstance(body, ClosedJaxpr):
        return body
    return ClosedJaxpr(body, getattr(body, "consts", ()))


def call_instead(
    equation: Equation, function: Callable[..., Sequence[Any]], operands: Sequence[Any]
) -> list[Any]:
    """Runs a function in place of an equation's primitive.

    Args:
        equation: The equation.
        function: Takes one argument for each of `equation.operand_atoms`, and returns
            all results of the primitive.
        operands: The values of `equation.operand_atoms`.

    Returns:
        The values of `equation.outputs`.
    """
    (eqn,) = equation.jaxpr.eqns
    results = function(*operands)
    return [
        result
        for result, var in zip(results, eqn.outvars, strict=True)
        if not isinstance(var, DropVar)
    ]


def names_in(closed: ClosedJaxpr) -> frozenset[str]:
    """Returns the names of values and scopes of a program, at whatever depth."""
    names: set[str] = set()

    def visit(jaxpr: jex_core.Jaxpr) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "name":
                names.add(eqn.params["name"])
            names.update(names_of_place(_place_of(eqn)))
            for body in jaxprs_in_params(eqn.params):
                visit(body)

    visit(closed.jaxpr)
    return frozenset(names)


def names_of_place(place: str) -> tuple[str, ...]:
    """Returns a place in the model and the parts of it."""
    return (place, *place.split("/")) if place else ()


def has_primitive(closed: ClosedJaxpr, names: Container[str]) -> bool:
    """Returns whether a program runs one of some primitives, at whatever depth."""

    def found(jaxpr: jex_core.Jaxpr) -> bool:
        return any(
            eqn.primitive.name in names or any(map(found, jaxprs_in_params(eqn.params)))
            for eqn in jaxpr.eqns
        )

    return found(closed.jaxpr)


def flatten(closed: ClosedJaxpr, *, is_differentiated: bool = True) -> Graph:
    """Turns a jaxpr into a `Graph`; calls in it are inlined.

    Calls with a derivative rule only if the program `is_differentiated` already, or if
    the rule is that of a wrapped function. Then names of values become tags, too: what
    is named is the value itself.
    """
    builder = _Builder(
        {*_CALLS, *_RULED_CALLS} if is_differentiated else _CALLS,
        names_are_tags=is_differentiated,
    )
    inputs = [builder.new_value(var.aval) for var in closed.jaxpr.invars]
    outputs = builder.splice(closed, inputs)
    return Graph(
        avals=tuple(builder.avals),
        num_inputs=len(inputs),
        equations=tuple(builder.equations),
        outputs=tuple(outputs),
        tags=builder.tags,
    )


class _Builder:
    """Collects equations while calls are inlined."""

    def __init__(self, inlined: Container[str], *, names_are_tags: bool) -> None:
        self._inlined = inlined
        self._names_are_tags = names_are_tags
        self.tags: dict[int, tuple[str, ...]] = {}
        self.avals: list[jax.core.ShapedArray] = []
        self.equations: list[Equation] = []

    def new_value(self, aval: Any) -> int:
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
        name = eqn.primitive.name
        body = eqn.params.get((_CALLS | _RULED_CALLS).get(name, ""))
        if body is not None:
            body = _closed(body)
        if body is None or name in self._inlined or _is_marked(body):
            return body
        return None
