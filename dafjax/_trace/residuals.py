"""A function's forward and backward programs, with a joint numbering of values.

Also the text of programs, equations and values.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from dafjax import config
from dafjax._trace.equation import Atom, Constant, Equation, renumber, values_of
from dafjax._trace.graph import flatten, is_array, live_equations
from dafjax._trace.tracing import ClosedJaxpr, as_function, nbytes_of


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Recipe:
    """A better way to recompute a value, for a plan that stores another value.

    Attributes:
        equation: It recomputes the value.
        needs: The value of `equation.inputs` that the plan must store: a mask, say.
        needs_codes: Whether it must be decoded, or recomputed.
    """

    equation: Equation
    needs: int
    needs_codes: bool = False


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A function and its transpose, before anything is decided about residuals.

    A residual is a value that `backward` reads and that is an argument or computed by
    `forward`. All equations of `backward` depend on a cotangent. Equations of the
    transpose that do not are moved to the end of `forward`, where their results can be
    saved or recomputed, too.

    Attributes:
        avals: Shape and dtype of every value.
        num_arguments: The arguments are the values `0 .. num_arguments - 1`.
        forward: The equations that do not depend on a cotangent.
        results: The values and constants that the function returns.
        cotangents: The values that stand for the cotangents of differentiable results.
        backward: The equations that `gradients` needs and that depend on a cotangent.
        gradients: The cotangents of the perturbed arguments.
        perturbed: For every argument, whether it is differentiated.
        differentiable: For every result, whether it has a cotangent.
        tags: The names that the user gave to values of `forward`.
        function: The function, before it was differentiated.
        fingerprint: A hash of the program before any pass, in sixteen digits.
        recipes: Better ways to recompute some values, by value.
        decided: What a pass has decided about values that it added, by value.
        from_codes: Values that get no codes of their own, because their noise would not
            cancel. They are recomputed from codes if other values would be.
        amplified: Values whose noise later equations amplify.
    """

    avals: tuple[jax.core.ShapedArray, ...]
    num_arguments: int
    forward: tuple[Equation, ...]
    results: tuple[Atom, ...]
    cotangents: tuple[int, ...]
    backward: tuple[Equation, ...]
    gradients: tuple[Atom, ...]
    perturbed: tuple[bool, ...]
    differentiable: tuple[bool, ...]
    tags: Mapping[int, tuple[str, ...]]
    function: ClosedJaxpr
    fingerprint: str = ""
    recipes: Mapping[int, Recipe] = dataclasses.field(default_factory=dict)
    decided: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    from_codes: frozenset[int] = frozenset()
    amplified: frozenset[int] = frozenset()

    def with_backward(
        self, equations: Sequence[Equation], avals: Sequence[jax.core.ShapedArray]
    ) -> "Program":
        """Returns the program with other equations in its backward pass.

        Equations whose results nothing reads are dropped, and those that depend on no
        cotangent become part of `forward`.

        Args:
            equations: They compute `gradients`.
            avals: Shape and dtype of every value, new ones included.
        """
        forward, backward = list(self.forward), []
        depends = set(self.cotangents)
        for eqn in live_equations(equations, self.gradients):
            if depends.isdisjoint(eqn.input_values):
                forward.append(eqn)
            else:
                backward.append(eqn)
                depends.update(eqn.outputs)
        return dataclasses.replace(
            self,
            avals=tuple(avals),
            forward=tuple(forward),
            backward=tuple(backward),
        )

    def nbytes(self, value: int) -> int:
        """Returns the bytes of a value; 0 for dtypes without a size, such as keys."""
        return self._nbytes[value]

    @functools.cached_property
    def _nbytes(self) -> tuple[int, ...]:
        return tuple(map(nbytes_of, self.avals))

    @functools.cached_property
    def producers(self) -> Mapping[int, Equation]:
        """The equation of the forward pass that computes each value."""
        return {value: eqn for eqn in self.forward for value in eqn.outputs}

    def is_large(self, value: int) -> bool:
        """Returns whether a value is so large that its lifetime matters."""
        return self.nbytes(value) > config.SMALL_NBYTES

    def residuals(self) -> tuple[int, ...]:
        """Returns the forward pass's values that the backward pass reads, in order."""
        made = {value for eqn in self.backward for value in eqn.outputs}
        made.update(self.cotangents)
        read = {value for eqn in self.backward for value in eqn.input_values}
        read.update(values_of(self.gradients))
        return tuple(sorted(read - made))


def fingerprint_of_function(closed: ClosedJaxpr, perturbed: Sequence[bool]) -> str:
    """Returns a hash of a function that is not differentiated yet, in sixteen digits.

    If loops and branches of the function store codes, its `Program` has the shapes of
    the codes, so its fingerprint changes with their bits. This hash does not.
    """
    graph = flatten(closed, is_differentiated=False)
    return _digest(
        graph.avals, graph.equations, f"{tuple(perturbed)} {values_of(graph.outputs)}"
    )


def _digest(avals: Iterable[Any], equations: Iterable[Equation], rest: str) -> str:
    lines = [str(aval) for aval in avals]
    for eqn in equations:
        lines.append(f"{eqn.primitive} {eqn.input_values} {eqn.outputs} {eqn.place}")
        lines.extend(f"{k}={v}" for k, v in eqn.params.items() if _is_plain(v))
    return hashlib.sha256("\n".join([*lines, rest]).encode()).hexdigest()[:16]


def _is_plain(param: Any) -> bool:
    """Returns whether a parameter prints the same in every process."""
    if isinstance(param, tuple):
        return all(map(_is_plain, param))
    return param is None or isinstance(param, (bool, int, float, str))


def is_differentiable(aval: Any) -> bool:
    """Returns whether values of a type have cotangents; tokens have none."""
    return is_array(aval) and jnp.issubdtype(aval.dtype, jnp.inexact)


def is_perturbed(argument: Any) -> bool:
    """Returns whether the forward rule of a `custom_vjp` must serve an argument."""
    if isinstance(argument, CustomVJPPrimal):
        return argument.perturbed and is_differentiable(jax.typeof(argument.value))
    # Some transformations of JAX pass the bare value without that information.
    return is_differentiable(jax.typeof(argument))


def primal_of(argument: Any) -> Any:
    """Returns the value of an argument of the forward rule of a `custom_vjp`."""
    return argument.value if isinstance(argument, CustomVJPPrimal) else argument


def instantiate(cotangent: Any) -> Any:
    """Returns a cotangent as an array, also if it is zero."""
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    aval: Any = cotangent.aval
    return jnp.zeros(aval.shape, aval.dtype)


def differentiate(closed: ClosedJaxpr, perturbed: Sequence[bool]) -> Program:
    """Splits a traced function into its forward and its backward program.

    Args:
        closed: The function.
        perturbed: For every argument, whether it is differentiated. Other arguments
            cause no residuals.

    Returns:
        The two programs.
    """
    differentiable = tuple(map(is_differentiable, closed.out_avals))
    traced, transposed = _trace(closed, perturbed, differentiable)
    num_results = len(differentiable)
    num_cotangents = sum(differentiable)

    first, second = flatten(traced), flatten(transposed)
    avals = list(first.avals)
    forward = first.equations
    # Numbers of the values of the second program in the joint numbering.
    residuals = first.outputs[num_results:]
    numbers: dict[int, Atom] = dict(enumerate(residuals))
    cotangents = []
    for value in range(len(residuals), len(residuals) + num_cotangents):
        numbers[value] = len(avals)
        cotangents.append(len(avals))
        avals.append(second.avals[value])

    made = _Made(forward)
    equations: list[Equation] = []
    for eqn in live_equations(second.equations, second.outputs):
        inputs = renumber(eqn.inputs, numbers)
        # An inner `jax.checkpoint` would recompute some values that exist already.
        existing = made.find(dataclasses.replace(eqn, inputs=inputs))
        if existing is not None:
            numbers.update(zip(eqn.outputs, existing, strict=True))
            continue
        outputs = []
        for value in eqn.outputs:
            numbers[value] = len(avals)
            outputs.append(len(avals))
            avals.append(second.avals[value])
        equations.append(
            Equation(jaxpr=eqn.jaxpr, inputs=inputs, outputs=tuple(outputs))
        )
    program = Program(
        avals=(),
        num_arguments=first.num_inputs,
        forward=first.equations,
        results=first.outputs[:num_results],
        cotangents=tuple(cotangents),
        backward=(),
        gradients=renumber(second.outputs, numbers),
        perturbed=tuple(perturbed),
        differentiable=differentiable,
        tags=first.tags,
        function=closed,
    )
    program = program.with_backward(equations, avals)
    fingerprint = _digest(
        program.avals,
        (*program.forward, *program.backward),
        f"{program.perturbed} {values_of(program.results)} {program.tags}",
    )
    return dataclasses.replace(program, fingerprint=fingerprint)


class _Made:
    """Finds the results of an equation if an equal equation has computed them."""

    def __init__(self, equations: Sequence[Equation]) -> None:
        self._by_key: dict[Any, tuple[int, ...]] = {}
        # For each value, the first of those that equal it.
        self._first: dict[int, Atom] = {}
        for eqn in equations:
            key = self._key(eqn)
            if key is not None:
                first = self._by_key.setdefault(key, eqn.outputs)
                self._first.update(zip(eqn.outputs, first, strict=True))

    def find(self, eqn: Equation) -> tuple[int, ...] | None:
        """Returns the results, or `None` if no equal equation has computed them."""
        key = self._key(eqn)
        return None if key is None else self._by_key.get(key)

    def _key(self, eqn: Equation) -> Any:
        inputs = tuple(
            self._first.get(atom, atom) if isinstance(atom, int) else atom
            for atom in eqn.inputs
        )
        return dataclasses.replace(eqn, inputs=inputs).key


def _trace(
    closed: ClosedJaxpr,
    perturbed: Sequence[bool],
    differentiable: Sequence[bool],
) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """Traces arguments -> results, residuals and residuals, cotangents -> gradients."""
    function = as_function(closed)
    pullbacks: list[Callable[[Sequence[Any]], Any]] = []

    def forward(*arguments: Any) -> tuple[list[Any], list[Any]]:
        results, pullback = vjp_of_perturbed(
            function, arguments, perturbed, differentiable
        )
        leaves, structure = jax.tree.flatten(pullback)
        pullbacks.append(lambda leaves: jax.tree.unflatten(structure, leaves))
        return results, leaves

    def backward(leaves: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        return pullbacks[-1](leaves)(list(cotangents))

    traced = trace_like(forward, *closed.in_avals)
    transposed = jax.make_jaxpr(backward)(
        traced.out_avals[len(differentiable) :],
        _cotangents_of(_where(closed.out_avals, differentiable)),
    )
    return traced, transposed


def vjp_of_perturbed(
    function: Callable[..., list[Any]],
    arguments: Sequence[Any],
    perturbed: Sequence[bool],
    differentiable: Sequence[bool],
) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Returns all results, and the pullback of the differentiable ones.

    The pullback is a pytree whose leaves are the residuals.
    """

    def of_perturbed(*chosen: Any) -> tuple[list[Any], list[Any]]:
        remaining = iter(chosen)
        results = function(
            *(
                next(remaining) if moves else value
                for value, moves in zip(arguments, perturbed, strict=True)
            )
        )
        return _where(results, differentiable), results

    _, pullback, results = jax.vjp(
        of_perturbed, *_where(arguments, perturbed), has_aux=True
    )
    return results, pullback


def trace_like(function: Callable[..., Any], *avals: Any) -> ClosedJaxpr:
    """Traces a function of arguments of the given types."""
    return jax.make_jaxpr(function)(*avals)


def trace_pullback(equation: Equation) -> ClosedJaxpr:
    """Returns the backward pass of an equation as a program.

    It takes the inputs of the equation and a cotangent for each of its outputs, and
    returns the cotangents of the inputs that have some.
    """
    avals = [var.aval for var in equation.jaxpr.invars]
    outputs = [var.aval for var in equation.jaxpr.outvars]
    moves, wanted = (list(map(is_differentiable, x)) for x in (avals, outputs))

    def run(*arguments: Any) -> list[Any]:
        return jax.core.eval_jaxpr(equation.jaxpr, (), *arguments)

    def pull(*operands: Any) -> list[Any]:
        arguments, cotangents = operands[: len(avals)], operands[len(avals) :]
        _, pullback = vjp_of_perturbed(run, arguments, moves, wanted)
        return list(pullback(_where(cotangents, wanted)))

    return trace_like(pull, *avals, *outputs)


def _where(items: Sequence[Any], chosen: Sequence[bool]) -> list[Any]:
    return [item for item, take in zip(items, chosen, strict=True) if take]


def _cotangents_of(avals: Sequence[Any]) -> list[Any]:
    return [aval.to_ct_aval() for aval in avals]


def program_lines(program: Program) -> Iterator[str]:
    """Yields a program as text, a line for each equation."""
    arguments = (value_text(program, v) for v in range(program.num_arguments))
    yield f"arguments {', '.join(arguments)}"
    yield "forward"
    yield from (f"  {equation_text(program, eqn)}" for eqn in program.forward)
    yield f"  results {atoms_text(program.results)}"
    cotangents = (value_text(program, v) for v in program.cotangents)
    yield f"backward of {', '.join(cotangents)}"
    yield from (f"  {equation_text(program, eqn)}" for eqn in program.backward)
    yield f"  gradients {atoms_text(program.gradients)}"
    for recipe in program.recipes.values():
        where = "in codes" if recipe.needs_codes else "saved"
        equation = equation_text(program, recipe.equation)
        yield f"recipe {equation}, if %{recipe.needs} is {where}"


def equation_text(program: Program, eqn: Equation) -> str:
    """Returns an equation with its place in the model and the user's line."""
    results = ", ".join(value_text(program, v) for v in eqn.outputs)
    place = " ".join(filter(None, (eqn.place, eqn.source)))
    text = f"{results} = {eqn.primitive} {atoms_text(eqn.operand_atoms)}"
    return f"{text}  # {place}".rstrip(" #")


def value_text(program: Program, value: int) -> str:
    """Returns a value with its shape and dtype."""
    return f"%{value} {program.avals[value].str_short()}"


def atoms_text(atoms: Iterable[Atom | None]) -> str:
    """Returns values as `%7`, numbers as they are, and `-` for `None`."""
    return " ".join(map(_atom, atoms))


def _atom(atom: Atom | None) -> str:
    if not isinstance(atom, Constant):
        return "-" if atom is None else f"%{atom}"
    return str(atom.value) if np.ndim(atom.value) == 0 else "constant"
