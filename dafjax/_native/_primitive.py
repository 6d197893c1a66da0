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


def batch_of(rows: Any) -> Dimensions:
    """Returns the names of the batch dimensions of rows `[*batch, n]`."""
    return tuple(f"b{axis}" for axis in range(rows.ndim - 1))


def rows_like(rows: Any, length: int, dtype: Any) -> Any:
    """Returns the type of an array with the batch dimensions of `rows`.

    On meshes with explicit axes the batch dimensions are divided like those of `rows`,
    and the last dimension is not divided.
    """
    *batch, _ = rows.shape
    sharding = rows.sharding
    if not sharding.mesh.empty:
        spec = PartitionSpec(*sharding.spec[:-1], None)
        sharding = NamedSharding(sharding.mesh, spec)
    return rows.update(
        shape=(*batch, length), dtype=dtype, weak_type=False, sharding=sharding
    )


def reshaped(aval: Any, shape: tuple[int, ...]) -> Any:
    """Returns the type of an array of another shape, which no mesh axis divides."""
    sharding = aval.sharding
    if not sharding.mesh.empty:
        spec = PartitionSpec(*[None] * len(shape))
        sharding = NamedSharding(sharding.mesh, spec)
    return aval.update(shape=shape, sharding=sharding)


def is_divided(context: mlir.LoweringRuleContext) -> bool:
    """Returns whether a lowering is for a program that XLA divides among devices."""
    axes = context.module_context.axis_context
    if isinstance(axes, sharding_impls.SPMDAxisContext):
        # Inside a `shard_map` over all axes, every array is divided already.
        return set(axes.manual_axes) != set(axes.mesh.axis_names)
    return getattr(axes, "num_devices", None) != 1


def check_not_exported(context: mlir.LoweringRuleContext) -> None:
    """Raises if a lowering for several devices is for a program that is exported.

    Raises:
        NotImplementedError: The program is exported. XLA calls the division rule, a
            Python function of this process, so other processes could not run the
            program.
    """
    if context.module_context.lowering_parameters.for_export:
        raise NotImplementedError(
            "`jax.export` of a gradient that dafjax compresses, for several devices: "
            "how its custom calls are divided is known to this process alone. Export "
            "what each device runs, with `jax.shard_map` over all axes of the mesh in "
            "the function that is exported; or export it for one device; or pass "
            "`bits=None` to `dafjax.remat_compress`."
        )


def allow_division(primitive: Primitive) -> None:
    """Makes JAX pass the devices of the program to the lowering of a primitive."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def divide(
    function: Callable[..., tuple[Any, ...]], rule: DivisionRule
) -> Callable[..., tuple[Any, ...]]:
    """Returns a function that each device runs on its shards of the operands.

    Args:
        function: The function of one shard.
        rule: Which dimensions may be divided. XLA reshards operands that are divided
            otherwise.
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
    multiple_results: bool,
    attributes: Callable[..., dict[str, Any]] = lambda **_: {},
    division: Callable[..., DivisionRule] | None = None,
    target: str | None = None,
    aliased: bool = False,
    is_call_on_cpu: bool = True,
    is_call_on_cuda: bool = True,
    where_divided: Callable[..., dict[str, Static]] = lambda **params: params,
    resolve: Callable[..., dict[str, Static]] = lambda *_, **params: params,
) -> Primitive:
    """Makes a primitive that lowers to a custom call on CPUs and on CUDA.

    On other platforms, and on CUDA without the CUDA library, it lowers to `jax.numpy`.

    Args:
        name: Name of the primitive.
        abstract_eval: Checks the operands and describes the results.
        reference: The primitive in `jax.numpy`.
        multiple_results: Whether the results are a sequence.
        attributes: Maps the primitive's parameters to the custom call's attributes. By
            default there are none.
        division: Maps the operands' types and the primitive's parameters to the rule
            which dimensions devices may divide. Not used if `aliased`: devices may then
            divide all dimensions.
        target: Name of the custom call's target; by default `name`.
        aliased: Whether the `n` results reuse the buffers of the last `n` operands.
        is_call_on_cpu: Whether it is a custom call on CPUs.
        is_call_on_cuda: Whether it is a custom call on CUDA.
        where_divided: Maps the primitive's parameters to its parameters on CUDA in
            programs whose arrays devices share.
        resolve: Maps the target platform, the operands' types and the primitive's
            parameters to the parameters of the custom call.
    """
    target = name if target is None else target
    primitive = Primitive(name)
    primitive.multiple_results = multiple_results
    primitive.def_abstract_eval(abstract_eval)

    @functools.cache
    def compiled(**params: Static) -> Callable[..., Any]:
        return jax.jit(functools.partial(primitive.bind, **params))

    def run_eagerly(*operands: Array, **params: Static) -> Any:
        # Compile even under `jax.disable_jit`, as JAX does with its own primitives.
        with jax.disable_jit(False):
            return compiled(**params)(*operands)

    def bind(*operands: Array, **params: Static) -> tuple[Any, ...]:
        results = primitive.bind(*operands, **params)
        return tuple(results) if multiple_results else (results,)

    lower_reference = mlir.lower_fun(reference, multiple_results=multiple_results)

    def lower_on_cpu(
        context: mlir.LoweringRuleContext, *operands: Any, **params: Static
    ) -> Sequence[Any]:
        _library.register()
        return lower_to_custom_call("cpu", context, *operands, **params)

    def lower_on_cuda(
        context: mlir.LoweringRuleContext, *operands: Any, **params: Static
    ) -> Sequence[Any]:
        if is_divided(context):
            params = where_divided(**params)
        if not is_call_on_cuda or not _cuda.register():
            return lower_reference(context, *operands, **params)
        return lower_to_custom_call("cuda", context, *operands, **params)

    def lower_to_custom_call(
        platform: str,
        context: mlir.LoweringRuleContext,
        *operands: Any,
        **params: Static,
    ) -> Sequence[Any]:
        num_first = len(operands) - len(context.avals_out)
        if is_divided(context):
            check_not_exported(context)
            if aliased:
                dimensions = independent(context.avals_in)
                rule = DivisionRule(dimensions, dimensions[num_first:])
            else:
                assert division is not None
                rule = division(*context.avals_in, **params)
            divided = divide(functools.partial(bind, **params), rule)
            return mlir.lower_fun(divided)(context, *operands)
        aliases = {num_first + i: i for i in range(len(context.avals_out))}
        # Layouts of operands and results default to row-major.
        lower = jax.ffi.ffi_lowering(
            target, operand_output_aliases=aliases if aliased else None
        )
        resolved = resolve(platform, *context.avals_in, **params)
        return lower(context, *operands, **attributes(**resolved))

    allow_division(primitive)
    primitive.def_impl(run_eagerly)
    mlir.register_lowering(primitive, lower_reference)
    if is_call_on_cpu:
        mlir.register_lowering(primitive, lower_on_cpu, platform="cpu")
    if target in _cuda.HANDLERS:
        mlir.register_lowering(primitive, lower_on_cuda, platform="cuda")
    return primitive


def refuse_derivatives(primitive: Primitive, num_data: int) -> None:
    """Makes differentiation through the first `num_data` operands a clear error.

    The primitive does not read the other operands. They are only dependencies and
    contribute no tangent.
    """

    def jvp(
        primals: Sequence[Array], tangents: Sequence[Any], **params: Static
    ) -> tuple[Any, Any]:
        if any(not isinstance(t, ad.Zero) for t in tangents[:num_data]):
            raise_no_derivative()
        out = primitive.bind(*primals, **params)
        no_tangents = jax.tree.map(lambda x: ad.Zero(_tangent_type(x)), out)
        return out, no_tangents

    def transpose(*_: Any, **__: Any) -> NoReturn:
        raise_no_derivative()

    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose


def _tangent_type(x: Array) -> Any:
    return jax.typeof(x).to_tangent_aval()


def raise_no_derivative() -> NoReturn:
    """Raises the error for a derivative of an encoder or a decoder."""
    raise NotImplementedError(
        "Residuals that dafjax packs do not support forward-mode or second-order "
        "differentiation (`jax.jvp`, `jax.jacfwd`, `jax.hessian`, `jax.grad` of "
        "`jax.grad`): the rounding has no derivative, and ignoring it would give a "
        "wrong result. Pass `bits=None` to `dafjax.remat_compress` to keep the "
        "residuals exact where such derivatives are taken."
    )


def to_front(x: Array, axis: int | None, size: int) -> Array:
    """Moves a batch axis to the front, or adds one of `size` copies."""
    if axis is None:
        return jnp.broadcast_to(x, (size, *x.shape))
    return jnp.moveaxis(x, axis, 0)


def batch_size(operands: Sequence[Array], axes: Sequence[int | None]) -> int:
    """Returns the size of the mapped axis."""
    return next(
        x.shape[axis]
        for x, axis in zip(operands, axes, strict=True)
        if axis is not None
    )


def can_pass_through(x: Array) -> bool:
    """Tells whether a custom call takes a value: no PRNG key, token, int2 or int4."""
    dtype = getattr(jax.typeof(x), "dtype", None)
    if dtype is None:
        return False
    if jnp.issubdtype(dtype, jax.dtypes.extended) or dtype == jax.dtypes.float0:
        return False
    kinds = (np.bool_, np.number)
    has_kind = any(jnp.issubdtype(dtype, kind) for kind in kinds)
    return has_kind and "int2" not in dtype.name and "int4" not in dtype.name
