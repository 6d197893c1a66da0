"""Divides the primitives among devices without moving data.

XLA's partitioner cannot divide a custom call: it gathers every operand. So in programs
for several devices a primitive is lowered to a `custom_partitioning` call, whose rule
says which dimensions may be divided. Each device then runs the custom call on its
shard.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, final

from jax._src import dispatch, sharding_impls
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec


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
