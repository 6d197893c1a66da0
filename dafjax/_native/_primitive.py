"""Shared code of the primitives: dispatch, lowering, batching, derivatives."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from dafjax._native import _cuda_library, _library
from dafjax._native._sharding import (
    DivisionRule,
    allow_division,
    check_not_exported,
    divide,
    independent,
    is_divided,
)
from dafjax._typing import Array, Static


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
        if not is_call_on_cuda or not _cuda_library.register():
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
    if target in _cuda_library.HANDLERS:
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
