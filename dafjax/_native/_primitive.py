"""Custom calls as JAX primitives: lowering, first order, sharding.

XLA's partitioner cannot divide a custom call: it gathers every operand. So in programs
for several devices a primitive is lowered to a `custom_partitioning` call, whose rule
says which dimensions may be divided. Each device then runs the custom call on its
shard.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import dispatch, sharding_impls
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from dafjax._native import _cuda, _library
from dafjax._numbers import Array, Static


def first_order(x: Array) -> Array:
    """Returns its argument, and raises an error if it is differentiated.

    Use it inside derivative rules, where a second derivative would be wrong.
    """
    return first_order_p.bind(x)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        "`remat_compress` supports first-order reverse-mode differentiation only, but "
        "a function that it wraps is differentiated twice. Use `bits=None` there. For "
        "a gradient inside a loss, as in a gradient penalty or MAML, wrap the outer "
        "loss and take the inner `jax.grad` of the plain function."
    )


# This is a primitive and not a `jax.custom_jvp`, because JAX 0.11 with `jax_remat3` and
# `jax_custom_vjp3` fails on a `custom_jvp` in the rule of a `custom_vjp`.
first_order_p = Primitive("dafjax_first_order")
first_order_p.def_impl(lambda x: x)
first_order_p.def_abstract_eval(lambda aval: aval)
mlir.register_lowering(first_order_p, lambda _, x: [x])
ad.primitive_jvps[first_order_p] = _refuse
batching.defvectorized(first_order_p)


# A name for each dimension of an array. Dimensions with equal names are divided alike.
Dimensions: TypeAlias = tuple[str, ...]


@final
@dataclasses.dataclass(frozen=True)
class DivisionRule:
    """Which dimensions of a primitive's operands and results are divided alike.

    Attributes:
        operands: The names of the dimensions of each operand.
        results: The names of the dimensions of each result.
        whole: The names of the dimensions that are never divided.
    """

    operands: tuple[Dimensions, ...]
    results: tuple[Dimensions, ...]
    whole: tuple[str, ...] = ()


def independent(arrays: Iterable[Any]) -> tuple[Dimensions, ...]:
    """Names the dimensions of arrays that are divided independently of all others."""
    return tuple(
        tuple(f"d{number}x{axis}" for axis in range(array.ndim))
        for number, array in enumerate(arrays)
    )


def divide_rows(
    rows: Any,
    read: Sequence[str | None],
    made: Sequence[str],
    after: Iterable[Any] = (),
) -> DivisionRule:
    """Divides the batch dimensions of rows `[*batch, n]`, and no other dimension.

    Args:
        rows: The type of the rows.
        read: For each operand the name of its dimension after the batch dimensions; ""
            if it has only these, None if it has no dimensions.
        made: The same for each result.
        after: The types of more operands, which are not read.
    """
    batch = tuple(f"b{axis}" for axis in range(rows.ndim - 1))

    def named(last: str | None) -> Dimensions:
        return () if last is None else (*batch, last) if last else batch

    return DivisionRule(
        (*map(named, read), *independent(after)),
        tuple(map(named, made)),
        whole=tuple(last for last in (*read, *made) if last),
    )


def retyped(
    aval: Any, shape: tuple[int, ...], num_divided: int = 0, **changes: Any
) -> Any:
    """Returns the type of an array of another shape.

    Explicit mesh axes divide its first `num_divided` dimensions like those of `aval`,
    and no other dimension.
    """
    divided = aval.sharding.spec[:num_divided]
    spec = PartitionSpec(*divided, *[None] * (len(shape) - num_divided))
    sharding = aval.sharding.update(spec=spec)
    return aval.update(shape=shape, sharding=sharding, **changes)


def rows_like(rows: Any, length: int, dtype: Any) -> Any:
    """Returns the type of an array with the batch dimensions of `rows`."""
    shape = (*rows.shape[:-1], length)
    return retyped(rows, shape, rows.ndim - 1, dtype=dtype, weak_type=False)


def is_divided(context: mlir.LoweringRuleContext) -> bool:
    """Returns whether a lowering is for a program that XLA divides among devices."""
    axes = context.module_context.axis_context
    if isinstance(axes, sharding_impls.SPMDAxisContext):
        # Inside a `shard_map` over all axes, every array is divided already.
        return set(axes.manual_axes) != set(axes.mesh.axis_names)
    return getattr(axes, "num_devices", None) != 1


def check_not_exported(context: mlir.LoweringRuleContext) -> None:
    """Raises if a program for several devices is exported.

    XLA calls the division rule, a Python function of this process.
    """
    if context.module_context.lowering_parameters.for_export:
        raise NotImplementedError(
            "`jax.export` of a gradient that dafjax compresses, for several devices: "
            "how its custom calls are divided is known to this process alone. Export "
            "what each device runs, with `jax.shard_map` over all axes of the mesh in "
            "the function that is exported; or export it for one device; or pass "
            "`bits=None` to `dafjax.remat_compress`."
        )


def divide(
    function: Callable[..., tuple[Any, ...]], rule: DivisionRule
) -> Callable[..., tuple[Any, ...]]:
    """Returns a function that each device runs on its shards of the operands.

    XLA reshards operands that are divided otherwise than `rule` allows.
    """

    # These functions run inside XLA, where an exception would stop the process.
    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        known = _known(rule, operands, results)
        of_results = _shardings(mesh, rule.results, known)
        return mesh, function, of_results, _shardings(mesh, rule.operands, known)

    def infer(mesh: Any, operands: Any, results: Any) -> Any:
        del results
        return _shardings(mesh, rule.results, _known(rule, operands, ()))

    def sharding_rule(mesh: Any, operands: Any, results: Any) -> SdyShardingRule:
        del mesh, operands, results
        arrays = (*rule.operands, *rule.results)
        # Shardy wants the names in order of appearance.
        names = dict.fromkeys(name for dimensions in arrays for name in dimensions)
        return SdyShardingRule(
            tuple(ArrayMapping(*dimensions) for dimensions in rule.operands),
            tuple(ArrayMapping(*dimensions) for dimensions in rule.results),
            need_replication_factors=tuple(n for n in names if n in rule.whole),
        )

    divided = custom_partitioning(function)
    divided.def_partition(
        partition,
        infer_sharding_from_operands=infer,
        sharding_rule=sharding_rule,
        decode_shardings=True,
    )
    return divided


def _known(
    rule: DivisionRule, operands: Sequence[Any], results: Sequence[Any]
) -> dict[str, Any]:
    """Returns the mesh axes of each dimension that is divided.

    If arrays disagree, the first one counts. No array uses a mesh axis for two of its
    dimensions. XLA reshards arrays that do not match.
    """
    known: dict[str, Any] = {}
    dimensions = (*rule.operands, *rule.results)
    for array, names in zip((*operands, *results), dimensions, strict=False):
        # The sharding is `None` if GSPMD has not decided yet.
        spec = getattr(array.sharding, "spec", ())
        for name, axes in zip(names, spec, strict=False):
            if axes is None or name in rule.whole or name in known:
                continue
            beside = {n for other in dimensions if name in other for n in other}
            taken = set().union(*(_axis_names(known[n]) for n in beside & set(known)))
            if taken.isdisjoint(_axis_names(axes)):
                known[name] = axes
    return known


def _axis_names(axes: Any) -> tuple[str, ...]:
    return tuple(axes) if isinstance(axes, tuple) else (axes,)


def _shardings(
    mesh: Any, arrays: Sequence[Dimensions], known: dict[str, Any]
) -> tuple[NamedSharding, ...]:
    return tuple(
        NamedSharding(mesh, PartitionSpec(*map(known.get, names))) for names in arrays
    )


def make_primitive(
    name: str,
    *,
    abstract_eval: Callable[..., Any],
    reference: Callable[..., Any],
    multiple_results: bool = False,
    call: "CustomCall | None" = None,
) -> Primitive:
    """Makes a primitive that lowers to `call` on its platforms, else to `reference`.

    Args:
        name: Name of the primitive.
        abstract_eval: Checks the operands and returns the types of the results.
        reference: The primitive in `jax.numpy`.
        multiple_results: Whether the results are a sequence.
        call: The custom call, if any.
    """
    primitive = Primitive(name)
    primitive.multiple_results = multiple_results

    @functools.cache
    def compiled(**params: Static) -> Callable[..., Any]:
        return jax.jit(functools.partial(primitive.bind, **params))

    def run_eagerly(*operands: Array, **params: Static) -> Any:
        # Compile even under `jax.disable_jit`, as JAX does with its own primitives.
        with jax.disable_jit(False):
            return compiled(**params)(*operands)

    # `is_divided` needs the devices of the program.
    dispatch.prim_requires_devices_during_lowering.add(primitive)
    primitive.def_abstract_eval(abstract_eval)
    primitive.def_impl(run_eagerly)
    lower_as(primitive, reference)
    if call is not None:
        for platform in call.platforms:
            lower = functools.partial(call.lower, primitive, reference, platform)
            mlir.register_lowering(primitive, lower, platform=platform)
    return primitive


def lower_as(
    primitive: Primitive,
    function: Callable[..., Any],
    *,
    where_divided: Callable[..., Any] | None = None,
    platform: str | None = None,
) -> None:
    """Lowers a primitive to a function in `jax.numpy`.

    `where_divided` is the function for programs whose arrays devices share. Without
    `platform` it is for all platforms that have no lowering of their own.
    """

    def lower(
        context: mlir.LoweringRuleContext, *operands: Any, **params: Static
    ) -> Sequence[Any]:
        chosen = where_divided if where_divided and is_divided(context) else function
        return _lower_fun(primitive, chosen)(context, *operands, **params)

    mlir.register_lowering(primitive, lower, platform=platform)


def _lower_fun(primitive: Primitive, function: Callable[..., Any]) -> Callable:
    return mlir.lower_fun(function, multiple_results=primitive.multiple_results)


@final
@dataclasses.dataclass(frozen=True)
class CustomCall:
    """The custom call that a primitive lowers to.

    Attributes:
        target: Name of its target.
        division: Maps the operands' types and the primitive's parameters to the rule
            which dimensions devices may divide.
        attributes: Maps the primitive's parameters to the attributes. By default there
            are none.
        resolve: Maps the platform, the operands' types and the primitive's parameters
            to the parameters that `attributes` gets.
        aliased: Whether the `n` results reuse the buffers of the last `n` operands.
        platforms: The platforms that have it; "cuda" if dafjax was built with CUDA.
    """

    target: str
    division: Callable[..., DivisionRule]
    attributes: Callable[..., dict[str, Any]] = lambda **_: {}
    resolve: Callable[..., dict[str, Static]] = lambda *_, **params: params
    aliased: bool = False
    platforms: tuple[str, ...] = ("cpu", "cuda")

    def lower(
        self,
        primitive: Primitive,
        reference: Callable[..., Any],
        platform: str,
        context: mlir.LoweringRuleContext,
        *operands: Any,
        **params: Static,
    ) -> Sequence[Any]:
        """Lowers a primitive to this call, or to `reference` without a CUDA library."""
        if platform == "cpu":
            _library.register()
        elif not _cuda.register():
            return _lower_fun(primitive, reference)(context, *operands, **params)
        if is_divided(context):
            check_not_exported(context)
            bind = functools.partial(_bind, primitive, **params)
            divided = divide(bind, self.division(*context.avals_in, **params))
            return mlir.lower_fun(divided)(context, *operands)
        num_first = len(operands) - len(context.avals_out)
        aliases = {num_first + i: i for i in range(len(context.avals_out))}
        # Layouts of operands and results default to row-major. Without any, XLA:CPU
        # gives an operand another layout than the result that reuses its buffer: wrong
        # numbers behind `lu` (`tests/test_linear_algebra.py`).
        lower = jax.ffi.ffi_lowering(
            self.target, operand_output_aliases=aliases if self.aliased else None
        )
        resolved = self.resolve(platform, *context.avals_in, **params)
        return lower(context, *operands, **self.attributes(**resolved))


def _bind(
    primitive: Primitive, *operands: Array, **params: Static
) -> tuple[Array, ...]:
    results = primitive.bind(*operands, **params)
    return tuple(results) if primitive.multiple_results else (results,)


def refuse_derivatives(
    primitive: Primitive, num_data: int, message: str | None = None
) -> None:
    """Makes differentiation through the first `num_data` operands a clear error.

    The others are only dependencies, which contribute no tangent.
    """

    def jvp(
        primals: Sequence[Array], tangents: Sequence[Any], **params: Static
    ) -> tuple[Any, Any]:
        if any(not isinstance(t, ad.Zero) for t in tangents[:num_data]):
            refuse()
        out = primitive.bind(*primals, **params)
        zero = lambda x: ad.Zero(jax.typeof(x).to_tangent_aval())  # noqa: E731
        return out, jax.tree.map(zero, out)

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(message or _NO_DERIVATIVE)

    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = refuse


_NO_DERIVATIVE = (
    "Residuals that dafjax packs do not support forward-mode or second-order "
    "differentiation (`jax.jvp`, `jax.jacfwd`, `jax.hessian`, `jax.grad` of "
    "`jax.grad`): the rounding has no derivative, and ignoring it would give a wrong "
    "result. Pass `bits=None` to `dafjax.remat_compress` to keep the residuals exact "
    "where such derivatives are taken."
)


def batch_rows(primitive: Primitive, num_data: Callable[..., int]) -> None:
    """Batches a primitive of rows `[*batch, n]`, whose results are rows too.

    Args:
        primitive: The primitive.
        num_data: Maps its parameters to the number of leading operands that it reads.
            The others are only dependencies.
    """

    def batch(
        operands: Sequence[Array], axes: Sequence[int | None], **params: Static
    ) -> tuple[Any, Any]:
        operands, axis = aligned(operands, axes, num_data(**params))
        results = primitive.bind(*operands, **params)
        return results, [axis] * len(results) if primitive.multiple_results else axis

    batching.primitive_batchers[primitive] = batch


def batch_seeded(primitive: Primitive) -> None:
    """Batches a primitive of rows and one seed, whose results are rows too."""

    def batch(
        operands: Sequence[Array], axes: Sequence[int | None], **params: Static
    ) -> tuple[Any, Any]:
        x, seed = operands
        x = to_front(x, axes[0], batch_size(operands, axes))
        if axes[1] is None:
            results = primitive.bind(x, seed, **params)
        else:
            # The custom call takes one seed: rows with different seeds go one by one.
            results = lax.map(
                lambda row: primitive.bind(*row, **params),
                (x, jnp.moveaxis(seed, axes[1], 0)),
            )
        return results, [0] * len(results) if primitive.multiple_results else 0

    batching.primitive_batchers[primitive] = batch


def aligned(
    operands: Sequence[Array], axes: Sequence[int | None], num_data: int
) -> tuple[Sequence[Array], int | None]:
    """Moves the batch axes of the first `num_data` operands to the front.

    Returns:
        All operands, and their batch axis: None if none of the first operands has one.
    """
    data, of_data = operands[:num_data], axes[:num_data]
    if all(axis is None for axis in of_data):
        return operands, None
    size = batch_size(data, of_data)
    data = [to_front(x, a, size) for x, a in zip(data, of_data, strict=True)]
    return (*data, *operands[num_data:]), 0


def to_front(x: Array, axis: int | None, size: int) -> Array:
    """Moves a batch axis to the front, or adds one of `size` copies."""
    if axis is None:
        return jnp.broadcast_to(x, (size, *x.shape))
    return jnp.moveaxis(x, axis, 0)


def batch_size(operands: Sequence[Array], axes: Sequence[int | None]) -> int:
    """Returns the size of the mapped axis."""
    sizes = zip(operands, axes, strict=True)
    return next(x.shape[axis] for x, axis in sizes if axis is not None)


def can_pass_through(x: Array) -> bool:
    """Tells whether a custom call takes a value: no PRNG key, token, int2 or int4."""
    dtype = getattr(jax.typeof(x), "dtype", None)
    return dtype is not None and _has_numbers(dtype)


@functools.cache
def _has_numbers(dtype: Any) -> bool:
    if dtype == jax.dtypes.float0 or jnp.issubdtype(dtype, jax.dtypes.extended):
        return False
    has_kind = any(jnp.issubdtype(dtype, kind) for kind in (np.bool_, np.number))
    return has_kind and "int2" not in dtype.name and "int4" not in dtype.name
