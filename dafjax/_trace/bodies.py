"""Loops and branches whose bodies compress their own residuals.

JAX differentiates a `scan` as a whole. The forward loop returns the residuals of all
its iterations, stacked; to compress them after the loop is too late. So the body gets a
derivative rule that compresses before JAX differentiates the loop, and the loop stacks
codes. The same holds for the branches of a `cond`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
from jax import lax

from dafjax._trace.coming import with_name
from dafjax._trace.equation import (
    Atom,
    Constant,
    Equation,
    bodies,
    call_instead,
    evaluate,
    look_up,
    scan_arity,
)
from dafjax._trace.graph import Graph, flatten, names_of_user
from dafjax._trace.residuals import trace_like
from dafjax._trace.tracing import ClosedJaxpr, as_function, has_primitive


_WITH_BODIES = ("scan", "cond")


@final
@dataclasses.dataclass(frozen=True)
class Body:
    """The body of a loop, or a branch.

    Attributes:
        closed: The body's program.
        activations: The arguments that nothing keeps alive for the backward pass.
        slices: The arguments that are slices of live values.
        times: How often it runs.
        perturbed: For every argument, whether it depends on a differentiated argument
            in any iteration.
    """

    closed: ClosedJaxpr
    activations: tuple[int, ...]
    slices: tuple[int, ...]
    times: int
    perturbed: tuple[bool, ...]


# Returns a body as a function with a derivative rule.
WrapBody: TypeAlias = Callable[[Body], Callable[..., Sequence[Any]]]


def has_bodies(closed: ClosedJaxpr) -> bool:
    """Returns whether a program has loops or branches to differentiate."""
    return has_primitive(closed, _WITH_BODIES)


def reads_packed(equation: Equation) -> tuple[int, ...]:
    """Returns the operands of a backward equation that its body has packed.

    These are the stacked operands of a loop, or all operands of a branch. The operands
    that are the same for all iterations of a loop are not included.
    """
    atoms = equation.operand_atoms
    if equation.primitive == "scan":
        num_consts, _ = scan_arity(equation.params)
        atoms = atoms[num_consts:]
    elif equation.primitive != "cond":
        return ()
    return tuple(atom for atom in atoms if isinstance(atom, int))


def alive_values(graph: Graph, activations: Sequence[int]) -> set[int]:
    """Returns the live arguments, and the values that follow cheaply from them."""
    alive = set(range(graph.num_inputs)).difference(activations)
    for equation in graph.equations:
        if equation.rule.is_cheap and alive.issuperset(equation.input_values):
            alive.update(equation.outputs)
    return alive


def with_wrapped_bodies(
    closed: ClosedJaxpr,
    activations: tuple[int, ...],
    perturbed: Sequence[bool],
    wrap: WrapBody,
) -> Callable[..., list[Any]]:
    """Returns the program as a function whose loops and branches are wrapped.

    Args:
        closed: The program, not differentiated yet.
        activations: Its arguments that nothing keeps alive for the backward pass.
        perturbed: For every argument, whether it is differentiated.
        wrap: Wraps a body.

    Returns:
        A function of the program's arguments.
    """
    graph = flatten(closed, is_differentiated=False)
    alive = alive_values(graph, activations)
    moving = perturbed_values_of(graph, perturbed)

    def function(*arguments: Any) -> list[Any]:
        env: dict[int, Any] = dict(enumerate(arguments))

        for equation in graph.equations:
            if equation.primitive in _WITH_BODIES:
                run = _scan if equation.primitive == "scan" else _cond
                atoms = equation.operand_atoms
                lives = [isinstance(a, Constant) or a in alive for a in atoms]
                moves = [a in moving for a in atoms]
                with jax.named_scope(equation.name_stack or "loop"):
                    outputs = call_instead(
                        equation, run(equation, lives, moves, wrap), look_up(atoms, env)
                    )
                outputs = _named(outputs, _names_of_results(equation))
            else:
                outputs = evaluate(equation, look_up(equation.inputs, env))
            env.update(zip(equation.outputs, outputs, strict=True))
        return look_up(graph.outputs, env)

    return function


def perturbed_values_of(graph: Graph, perturbed: Sequence[bool]) -> set[Atom]:
    """Returns the values that depend on arguments that are differentiated.

    JAX asks for the derivative of a body with some of its arguments perturbed, then
    with more, then with the first set again, and it uses the residuals of one
    derivative in another. So the rule of a body treats every argument as perturbed that
    is ever perturbed.
    """
    moving: set[Atom] = {n for n, moves in enumerate(perturbed) if moves}
    for eqn in graph.equations:
        moves = [atom in moving for atom in eqn.operand_atoms]
        if not any(moves) or eqn.primitive == "stop_gradient":
            continue
        outputs = [True] * len(eqn.jaxpr.eqns[0].outvars)
        if eqn.primitive == "scan":
            outputs = _perturbed_by_scan(eqn, moves)[1]
        elif eqn.primitive == "cond":
            found = [_perturbed_outputs(b, moves[1:]) for b in bodies(eqn)]
            outputs = [any(of_branches) for of_branches in zip(*found, strict=True)]
        found_here = call_instead(eqn, lambda *_, found=outputs: found, ())
        pairs = zip(eqn.outputs, found_here, strict=True)
        moving.update(v for v, moves in pairs if moves and _is_inexact(graph.avals[v]))
    return moving


def perturbed_values(closed: ClosedJaxpr, perturbed: Sequence[bool]) -> set[Atom]:
    """Returns the values that depend on arguments that are differentiated.

    Args:
        closed: A program, not differentiated yet.
        perturbed: For every argument, whether it is differentiated.

    Returns:
        The values, numbered as in `flatten`.
    """
    return perturbed_values_of(flatten(closed, is_differentiated=False), perturbed)


def _perturbed_outputs(body: ClosedJaxpr, perturbed: Sequence[bool]) -> list[bool]:
    graph = flatten(body, is_differentiated=False)
    moving = perturbed_values_of(graph, perturbed)
    return [atom in moving for atom in graph.outputs]


def _perturbed_by_scan(
    equation: Equation, perturbed: Sequence[bool]
) -> tuple[list[bool], list[bool]]:
    """Returns which arguments and results of a loop's body are ever perturbed."""
    num_consts, num_carry = scan_arity(equation.params)
    first_x = num_consts + num_carry
    (body,) = bodies(equation)
    moves = list(perturbed)
    while True:
        outputs = _perturbed_outputs(body, moves)
        carried = [
            before or after
            for before, after in zip(moves[num_consts:first_x], outputs, strict=False)
        ]
        if carried == moves[num_consts:first_x]:
            return moves, [*carried, *outputs[num_carry:]]
        moves[num_consts:first_x] = carried


def _is_inexact(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))


def _scan(
    equation: Equation, lives: Sequence[bool], moves: Sequence[bool], wrap: WrapBody
) -> Callable[..., list[Any]]:
    params = equation.params
    num_consts, num_carry = scan_arity(equation.params)
    first_x = num_consts + num_carry
    (body,) = bodies(equation)
    names = _names_of_outputs(body)
    # An iteration reads values that the previous iteration named.
    unnamed: tuple[str, ...] = ()
    names_of_arguments = [unnamed] * num_consts + names[:num_carry]
    function = wrap(
        Body(
            _with_named_arguments(body, names_of_arguments),
            activations=tuple(
                number
                for number, lives_on in enumerate(lives)
                if num_consts <= number < first_x
                or (number >= first_x and not lives_on)
            ),
            slices=tuple(
                n for n, lives_on in enumerate(lives) if n >= first_x and lives_on
            ),
            times=params["length"],
            perturbed=tuple(_perturbed_by_scan(equation, moves)[0]),
        )
    )

    def run(*operands: Any) -> list[Any]:
        consts = operands[:num_consts]

        def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            results = list(function(*consts, *carry, *x))
            return results[:num_carry], results[num_carry:]

        carry, ys = lax.scan(
            step,
            list(operands[num_consts:first_x]),
            list(operands[first_x:]),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *ys]

    return run


def _cond(
    equation: Equation, lives: Sequence[bool], moves: Sequence[bool], wrap: WrapBody
) -> Callable[..., list[Any]]:
    # The first operand is the number of the branch.
    activations = tuple(n for n, lives_on in enumerate(lives[1:]) if not lives_on)
    branches = [
        wrap(Body(branch, activations, (), 1, tuple(moves[1:])))
        for branch in bodies(equation)
    ]

    def run(index: Any, *operands: Any) -> list[Any]:
        return list(lax.switch(index, branches, *operands))

    return run


def _names_of_outputs(closed: ClosedJaxpr) -> list[tuple[str, ...]]:
    """Returns the names that a program, or a body in it, gives to each of its outputs.

    `jax.ad_checkpoint.checkpoint_name` names a value where it is computed. The value
    can be a residual elsewhere: in the next iteration, or after the loop.
    """
    graph = flatten(closed)
    names = dict(graph.tags)
    for equation in graph.equations:
        if equation.primitive in _WITH_BODIES:
            inside = _names_of_results(equation)
            for value, found in zip(equation.outputs, inside, strict=True):
                names[value] = (*names.get(value, ()), *found)
    return [
        () if isinstance(atom, Constant) else names_of_user(names.get(atom, ()))
        for atom in graph.outputs
    ]


def _names_of_results(equation: Equation) -> list[tuple[str, ...]]:
    """Returns the names that its body, or one of its branches, gives to each result."""
    of_bodies = map(_names_of_outputs, bodies(equation))

    def joined(*operands: Any) -> list[tuple[str, ...]]:
        del operands
        return [
            tuple(dict.fromkeys(itertools.chain(*names)))
            for names in zip(*of_bodies, strict=True)
        ]

    return call_instead(equation, joined, ())


def _named(values: Sequence[Any], names: Sequence[tuple[str, ...]]) -> list[Any]:
    return [
        functools.reduce(with_name, names_of_value, value)
        for value, names_of_value in zip(values, names, strict=True)
    ]


def _with_named_arguments(
    body: ClosedJaxpr, names: Sequence[tuple[str, ...]]
) -> ClosedJaxpr:
    """Returns a body whose first arguments have names."""
    if not any(names):
        return body
    function = as_function(body)

    def named(*arguments: Any) -> list[Any]:
        first, rest = arguments[: len(names)], arguments[len(names) :]
        return function(*_named(first, names), *rest)

    return trace_like(named, *body.in_avals)
