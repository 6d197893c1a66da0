"""One primitive operation of a traced function."""

import dataclasses
import functools
import math
import pathlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, final

import jax
import jax.core
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax._src.core import DropVar, Var
from jax._src.effects import remat_allowed_effects
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr

from dafjax._native import summing_rows, tie
from dafjax._trace.coming import name_of, params_of
from dafjax._trace.rules import READ_AS_PRIMITIVES, Error, OpRule, rule_of


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """A value known when the function was traced."""

    value: Any


_CALLS = ("jit", "pjit")

# A value is given by its index in `Graph.avals`.
Atom: TypeAlias = int | Constant


def function_of_jax(eqn: jex_core.JaxprEqn) -> str | None:
    """Returns the name of a called function of `READ_AS_PRIMITIVES`; `None` if other.

    A function of the user may have the same name.
    """
    if eqn.primitive.name != "custom_jvp_call":
        return None
    info = with_constants(eqn.params["call_jaxpr"]).jaxpr.debug_info
    folders = pathlib.PurePath(info.func_filename or "").parts[:-1]
    is_of_jax = "_src" in folders and folders[folders.index("_src") - 1] == "jax"
    return (
        info.func_name if is_of_jax and info.func_name in READ_AS_PRIMITIVES else None
    )


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Equation:
    """One primitive operation: `outputs = primitive(*inputs)`.

    Attributes:
        jaxpr: The operation as a program of one equation, with inputs `inputs`.
        inputs: The values and constants that it reads, without literals.
        outputs: The values that it computes.
    """

    jaxpr: jex_core.Jaxpr
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.jaxpr.eqns) == 1

    @functools.cached_property
    def primitive(self) -> str:
        """The primitive's name, for example `"conv_general_dilated"`.

        For an equation from `call_equation`, or a call of `READ_AS_PRIMITIVES`, the
        name of the function. A first power is
        a `"copy"` (jax 0.9 writes the derivative of a square with one).
        """
        name = self.jax_primitive
        if name == "integer_pow" and self.params["y"] == 1:
            return "copy"
        if name == "dot_general" and _num_terms(self.jaxpr.eqns[0]) == 1:
            return "outer_product"
        if name in _CALLS:
            return self.params["name"]
        return function_of_jax(self.jaxpr.eqns[0]) or name

    @property
    def jax_primitive(self) -> str:
        """The primitive's name as JAX has it, also of calls and special cases."""
        return name_of(self.jaxpr.eqns[0])

    @functools.cached_property
    def rule(self) -> OpRule:
        """The row of the primitive in the table of primitives."""
        return rule_of(self.primitive)

    @functools.cached_property
    def error(self) -> Error:
        """The effect of a small error of an operand on the result."""
        if self.divisor is not None and self.rule.error is Error.SMOOTH:
            return Error.CONTINUOUS
        return self.rule.error_of(is_complex=self._is_complex)

    @functools.cached_property
    def is_tame(self) -> bool:
        """Whether it is cheap and keeps a small error of an operand small."""
        return self.rule.is_cheap and self.error <= Error.CONTINUOUS

    @functools.cached_property
    def is_amplifying(self) -> bool:
        """Whether a small error of an operand can cause a huge one of the result."""
        return self.error is Error.AMPLIFIED

    @property
    def _is_complex(self) -> bool:
        avals: Any = [var.aval for var in self.jaxpr.eqns[0].outvars]
        return any(
            jnp.issubdtype(aval.dtype, jnp.complexfloating)
            for aval in avals
            if hasattr(aval, "dtype")
        )

    @property
    def params(self) -> Mapping[str, Any]:
        """The primitive's parameters."""
        return params_of(self.jaxpr.eqns[0])

    @property
    def written(self) -> jex_core.JaxprEqn | None:
        """The equation as JAX wrote it; `None` for a call of several operations.

        A call that `call_equation` makes of one operation stands for that operation.
        """
        (eqn,) = self.jaxpr.eqns
        while eqn.primitive.name in _CALLS:
            eqns = with_constants(eqn.params["jaxpr"]).jaxpr.eqns
            if len(eqns) != 1:
                return None
            (eqn,) = eqns
        return eqn

    @functools.cached_property
    def operand_atoms(self) -> tuple[Atom, ...]:
        """The operands of the primitive, including literals and repetitions."""
        atoms = dict(zip(self.jaxpr.invars, self.inputs, strict=True))
        return tuple(
            Constant(a.val) if isinstance(a, jex_core.Literal) else atoms[a]
            for a in self.jaxpr.eqns[0].invars
        )

    @functools.cached_property
    def key(self) -> Any:
        """A hashable key that is the same for equations that compute the same.

        `None` if there is no such key, or if the equation does more than compute.
        """
        is_pure = not self.has_effect and self.jax_primitive not in _IMPURE
        return self._key(self.inputs) if is_pure else None

    @property
    def form(self) -> Any:
        """A hashable key that is the same for equations that differ in values alone.

        `None` if there is no such key.
        """
        types = tuple(var.aval for var in self.jaxpr.invars)
        key = self._key(range(len(self.inputs)))
        return None if key is None else (key, types)

    def _key(self, inputs: Iterable[Atom]) -> Any:
        (eqn,) = self.jaxpr.eqns
        atoms = dict(zip(self.jaxpr.invars, inputs, strict=True))

        def operand(atom: Any) -> Any:
            if isinstance(atom, jex_core.Literal):
                return _constant_key(atom.val)
            known = atoms[atom]
            return _constant_key(known.value) if isinstance(known, Constant) else known

        operands = tuple(map(operand, eqn.invars))
        types = tuple((var.aval, isinstance(var, DropVar)) for var in eqn.outvars)
        key = (eqn.primitive, tuple(sorted(eqn.params.items())), operands, types)
        try:
            hash(key)
        except TypeError:
            return None
        return key

    @functools.cached_property
    def input_values(self) -> tuple[int, ...]:
        """The inputs that are values, not constants."""
        return values_of(self.inputs)

    @functools.cached_property
    def whole_input_values(self) -> tuple[int, ...]:
        """The inputs that it reads whole: of a lookup, the indices, not the table."""
        inputs = self.inputs[1:] if self.rule.looks_up else self.inputs
        return values_of(inputs)

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
    def is_square(self) -> bool:
        """Whether it squares its operand."""
        if self.primitive == "integer_pow":
            return self.params["y"] == 2
        if self.primitive == "mul":
            first, second = self.operand_atoms
            return isinstance(first, int) and first == second
        return self.primitive == "square"

    @property
    def filling(self) -> Any:
        """The number that it fills an array with; `None` if it does something else."""
        if self.primitive != "broadcast_in_dim" or self.input_values:
            return None
        (atom,) = self.operand_atoms
        if isinstance(atom, Constant) and np.ndim(atom.value) == 0:
            return atom.value
        return None

    @property
    def contracted_size(self) -> int:
        """How many products a `dot_general` sums for one element; 0 for the others."""
        if self.primitive != "dot_general":
            return 0
        return _num_terms(self.jaxpr.eqns[0])

    @property
    def num_products(self) -> int:
        """How many multiplications a product, or an elementwise operation, makes."""
        eqn = self.jaxpr.eqns[0]
        results: Any = [var.aval for var in eqn.outvars]
        size = sum(aval.size for aval in results)
        if self.primitive == "dot_general":
            return size * self.contracted_size
        if self.primitive != "conv_general_dilated":
            return size
        # Padding, and zeros between the elements of a dilated operand, are not
        # multiplied.
        operands = (var.aval for var in eqn.invars)
        return _num_products_of_convolution(self.params, *operands, *results)

    @property
    def selects(self) -> bool:
        """Whether it selects: an operand only decides which of the others to take."""
        return self.primitive in ("select_n", "select_rectified")

    @functools.cached_property
    def makes_channels(self) -> bool:
        """Whether it is a product with weights whose last axis holds features.

        For a convolution, this is the feature axis of the result. For a `dot_general`,
        it is an axis of the second operand, which must not have a batch axis.
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

    @functools.cached_property
    def is_fusible(self) -> bool:
        """Whether it is cheap, so that XLA can fuse it into a kernel with others.

        A call is fusible if everything that it calls is.
        """
        return _is_fusible(self.jaxpr)

    @functools.cached_property
    def has_effect(self) -> bool:
        """Whether it does more than compute its outputs."""
        return bool(self.jaxpr.eqns[0].effects)

    @property
    def may_repeat(self) -> bool:
        """Whether it may run a second time, as `jax.checkpoint` would run it.

        False if it reads or writes something outside the program, as `io_callback`
        does.
        """
        effects = self.jaxpr.eqns[0].effects
        return not remat_allowed_effects.filter_not_in(effects)

    @property
    def name_stack(self) -> str:
        """The names of its scopes and of the transformations applied to it."""
        return str(self.jaxpr.eqns[0].source_info.name_stack)

    @functools.cached_property
    def place(self) -> str:
        """Its place in the model, for example `"ResNet/Block_0/Conv_0"`."""
        return place_of(self.jaxpr.eqns[0])

    @property
    def source(self) -> str:
        """The user's line that it comes from."""
        return source_info_util.summarize(self.jaxpr.eqns[0].source_info)


def look_up(atoms: Iterable[Atom], env: Mapping[int, Any]) -> list[Any]:
    """Returns the values of some atoms: constants, or values found in `env`."""
    return [a.value if isinstance(a, Constant) else env[a] for a in atoms]


def evaluate(equation: Equation, operands: Sequence[Any]) -> list[Any]:
    """Runs one equation on arrays or tracers, one for each of `equation.inputs`."""
    (eqn,) = equation.jaxpr.eqns
    jaxpr = equation.jaxpr.replace(eqns=[summing_rows(eqn, operands)])
    results = jax.core.eval_jaxpr(jaxpr, (), *operands)
    return list(tie(*results, only_on_cpus=True)) if _widens(eqn) else results


def evaluate_all(equations: Iterable[Equation], env: dict[int, Any]) -> None:
    """Runs equations in order. Reads values from `env`, and adds their results."""
    for equation in equations:
        results = evaluate(equation, look_up(equation.inputs, env))
        env.update(zip(equation.outputs, results, strict=True))


def _widens(eqn: jex_core.JaxprEqn) -> bool:
    """Returns whether it multiplies matrices in half precision to one in float32.

    XLA:CPU fails to run such a product if it merges a transpose of the result into it.
    A barrier after the product keeps them apart.
    """
    if eqn.primitive.name != "dot_general":
        return False
    avals: Any = [var.aval for var in (*eqn.invars, *eqn.outvars)]
    sizes = [aval.dtype.itemsize for aval in avals]
    return avals[-1].ndim == 2 and sizes == [2, 2, 4]


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


def call_equation(
    function: Callable[..., Any],
    avals: Sequence[jax.core.ShapedArray],
    inputs: tuple[Atom, ...],
    outputs: tuple[int, ...],
    source: Equation,
) -> Equation:
    """Returns an equation that calls a function, at the place of another equation.

    Args:
        function: The function, of arrays. Its name serves as the name of a primitive.
        avals: Shape and dtype of its arguments.
        inputs: The arguments.
        outputs: The values that it computes.
        source: The new equation gets the place of this one in the model and in the
            user's code.
    """
    jaxpr = jax.make_jaxpr(jax.jit(function))(*avals).jaxpr
    return in_place_of(Equation(jaxpr=jaxpr, inputs=inputs, outputs=outputs), source)


def with_literals_of(equation: Equation, other: Equation) -> Equation:
    """Returns the equation with the literals of another one of the same primitive."""
    (eqn,), (of_other,) = equation.jaxpr.eqns, other.jaxpr.eqns
    invars = [
        second if isinstance(second, jex_core.Literal) else first
        for first, second in zip(eqn.invars, of_other.invars, strict=True)
    ]
    jaxpr = equation.jaxpr.replace(eqns=[eqn.replace(invars=invars)])
    return dataclasses.replace(equation, jaxpr=jaxpr)


def in_place_of(equation: Equation, source: Equation) -> Equation:
    """Returns the equation with the place of `source` in the user's code."""
    (eqn,) = equation.jaxpr.eqns
    source_info = source.jaxpr.eqns[0].source_info
    jaxpr = equation.jaxpr.replace(eqns=[eqn.replace(source_info=source_info)])
    return dataclasses.replace(equation, jaxpr=jaxpr)


def in_dtype(
    equation: Equation, values: Collection[int], dtype: Any, **params: Any
) -> Equation:
    """Returns the equation with some of its inputs or outputs in another dtype.

    Args:
        equation: The equation.
        values: These inputs or outputs.
        dtype: Their new dtype.
        **params: Parameters of the primitive that change with the dtype.
    """
    jaxpr = equation.jaxpr
    (eqn,) = jaxpr.eqns
    numbers = (*equation.inputs, *equation.outputs)
    others: dict[Any, Any] = {
        var: Var(var.aval.update(dtype=np.dtype(dtype)))
        for var, number in zip((*jaxpr.invars, *jaxpr.outvars), numbers, strict=True)
        if isinstance(number, int) and number in values
    }

    def renewed(variables: Iterable[Any]) -> list[Any]:
        is_literal = (isinstance(v, jex_core.Literal) for v in variables)
        pairs = zip(variables, is_literal, strict=True)
        return [v if literal else others.get(v, v) for v, literal in pairs]

    renewed_eqn = eqn.replace(
        invars=renewed(eqn.invars),
        outvars=renewed(eqn.outvars),
        params={**eqn.params, **params},
    )
    renewed_jaxpr = jaxpr.replace(
        invars=renewed(jaxpr.invars),
        outvars=renewed(jaxpr.outvars),
        eqns=[renewed_eqn],
    )
    return dataclasses.replace(equation, jaxpr=renewed_jaxpr)


def scan_arity(params: Mapping[str, Any]) -> tuple[int, int]:
    """Returns how many operands of a `scan` are constant and how many are carried.

    Constant operands are the same for all iterations. The other operands are stacked.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # Since jax 0.11.
    num_consts, num_carry, _ = (len(group) for group in params["ft_in"].unpack())
    return num_consts, num_carry


def bodies(equation: Equation) -> tuple[ClosedJaxpr, ...]:
    """Returns the body of a `scan`, or the branches of a `cond`."""
    params = equation.params
    found = params["branches"] if "branches" in params else (params["jaxpr"],)
    return tuple(map(with_constants, found))


def values_of(atoms: Iterable[Atom]) -> tuple[int, ...]:
    """Returns the atoms that are values, not constants."""
    return tuple(atom for atom in atoms if isinstance(atom, int))


def renumber(atoms: Sequence[Atom], numbers: Mapping[int, Atom]) -> tuple[Atom, ...]:
    """Replaces every value by its entry in `numbers`."""
    return tuple(numbers[atom] if isinstance(atom, int) else atom for atom in atoms)


# Each of these draws new numbers in every call, but JAX lists no effect for it.
_IMPURE = frozenset(["rng_uniform"])


def _constant_key(value: Any) -> Any:
    """Returns a key that is the same for equal constants; an array equals itself."""
    if np.ndim(value):
        return id(value)
    # 0.0 and -0.0 are equal, but their `repr` differs.
    return jnp.result_type(value), repr(value)


def place_of(eqn: jex_core.JaxprEqn) -> str:
    """Returns `"a/b"` where the scopes are `"transpose(jvp(a))/b"`."""
    return _without_transformations(str(eqn.source_info.name_stack))


@functools.lru_cache(maxsize=4096)
def _without_transformations(name_stack: str) -> str:
    while (plain := re.sub(r"\b\w+\(([^()]*)\)", r"\1", name_stack)) != name_stack:
        name_stack = plain
    return "/".join(part for part in name_stack.split("/") if part)


def with_constants(body: Any) -> ClosedJaxpr:
    """Returns a body with its constants; since jax 0.11 it may carry them itself."""
    if isinstance(body, ClosedJaxpr):
        return body
    return ClosedJaxpr(body, getattr(body, "consts", ()))


def _num_terms(product: jex_core.JaxprEqn) -> int:
    """Returns how many terms a `dot_general` sums for one element of the result."""
    (contracted, _), _ = product.params["dimension_numbers"]
    aval: Any = product.invars[0].aval
    return math.prod(aval.shape[axis] for axis in contracted)


def _is_fusible(jaxpr: jex_core.Jaxpr) -> bool:
    return all(
        _is_fusible(with_constants(eqn.params["jaxpr"]).jaxpr)
        if eqn.primitive.name in _CALLS
        else rule_of(eqn.primitive.name).is_cheap
        for eqn in jaxpr.eqns
    )


def _num_products_of_convolution(
    params: Mapping[str, Any], images: Any, kernel: Any, result: Any
) -> int:
    dimensions = params["dimension_numbers"]
    batch, features, *places = (result.shape[d] for d in dimensions.out_spec)
    _, features_in, *taps = (kernel.shape[d] for d in dimensions.rhs_spec)
    _, _, *lengths = (images.shape[d] for d in dimensions.lhs_spec)
    pairs = 1
    for axis, (length, num_taps, num_places) in enumerate(
        zip(lengths, taps, places, strict=True)
    ):
        first = np.arange(num_places) * params["window_strides"][axis]
        tap = np.arange(num_taps) * params["rhs_dilation"][axis]
        at = first[:, np.newaxis] + tap - params["padding"][axis][0]
        spread = params["lhs_dilation"][axis]
        inside = (at >= 0) & (at <= (length - 1) * spread) & (at % spread == 0)
        pairs *= int(np.count_nonzero(inside))
    return batch * features * features_in * pairs
