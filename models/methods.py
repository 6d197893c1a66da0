"""The methods of saving memory, as data: their wrappers and compiler options."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import flax.linen as nn
import jax

from models.step import LossFunction, WrapLoss
from models.wrapping import WrapBlock, no_wrapping


Bits = int | Literal["auto"]
StoreName = Literal["arrays", "pool"]
MethodName = Literal["none", "checkpoint", "checkpoint-best", "compress"]

_CHECKPOINT_POLICIES = (
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "everything_saveable",
)

# XLA:CPU of jaxlib <= 0.10 removes the barriers that keep rematerialization apart from
# the forward pass, and then merges the two. Without that pass `jax.checkpoint` saves
# memory; which scheduler does better with it depends on the model, so both are tried.
_KEEP_BARRIERS = {"xla_disable_hlo_passes": "cse_barrier_expander"}
_MEMORY_SCHEDULER = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def same_loss(loss: LossFunction) -> LossFunction:
    """Returns the loss function as it is."""
    return loss


def nothing_to_watch() -> Mapping[str, Any]:
    """Returns no figures."""
    return {}


@dataclasses.dataclass(frozen=True)
class Method:
    """One way to train the same model.

    Attributes:
        name: As on the command line.
        label: As in tables and plots.
        wrap_block: Applied to the class of the model's blocks.
        wrap_loss: Applied to the loss function.
        compiler_options: Options to compile the step with; of several, the one whose
            program needs the least temporary memory is used.
        watch: Returns what a step has left behind: `pool_nbytes`, and `bits` by
            residual; nothing for methods whose bits do not change.
        jit: Compiles the step.
        adapts: Whether `jit` compiles it anew as it runs.
    """

    name: str
    label: str
    wrap_block: WrapBlock = no_wrapping
    wrap_loss: WrapLoss = same_loss
    compiler_options: tuple[Mapping[str, str], ...] = ({},)
    watch: Callable[[], Mapping[str, Any]] = nothing_to_watch
    jit: Callable[..., Any] = jax.jit
    adapts: bool = False


@dataclasses.dataclass(frozen=True)
class MethodOptions:
    """Options of methods; each method uses some of them.

    Attributes:
        bits: Bits per element of compressed residuals.
        policy: What to keep; the valid names depend on the method.
        store: Where compressed residuals wait.
        budget: The most memory that a page pool takes, or what bits are given out
            within; as much as there is, or 2 bits on average, if `None`.
    """

    bits: Bits = 2
    policy: str = "default"
    store: StoreName = "arrays"
    budget: str | None = None


def make_method(name: str, options: MethodOptions) -> Method:
    """Returns the method `name`.

    Args:
        name: One of `MethodName`.
        options: Its options.

    Raises:
        ValueError: If the method has no such name, or no such policy.
    """
    if name not in _MAKERS:
        raise ValueError(
            f"`--method` must be one of {', '.join(get_args(MethodName))}, but got "
            f"{name!r}."
        )
    return _MAKERS[name](options)


def _make_none(options: MethodOptions) -> Method:
    _check_policy("none", options.policy, ())
    return Method("none", "no wrapping")


def _make_checkpoint(options: MethodOptions) -> Method:
    wrap_block = _remat_block(options.policy)
    return Method("checkpoint", "jax.checkpoint", wrap_block=wrap_block)


def _make_checkpoint_best(options: MethodOptions) -> Method:
    return Method(
        "checkpoint-best",
        "jax.checkpoint, best options",
        wrap_block=_remat_block(options.policy),
        compiler_options=(_KEEP_BARRIERS, _KEEP_BARRIERS | _MEMORY_SCHEDULER),
    )


def _make_compress(options: MethodOptions) -> Method:
    _check_policy("compress", options.policy, ("save-all", "nearest"))
    # Imported where it is used: the models themselves know nothing of dafjax.
    import dafjax

    bits: Any = options.bits
    label = f"dafjax, {bits} bits"
    store: Any = dafjax.stores.Arrays()
    watch = nothing_to_watch
    if options.store == "pool":
        store = dafjax.stores.PagePool(options.budget)
        watch = functools.partial(_watch_pool, store)
        label = f"dafjax, {bits} bits, pool"
    jit = jax.jit
    adapts = bits == "auto" and options.store == "arrays"
    if adapts:
        steps: list[Any] = []

        def jit(step: Any, **jit_options: Any) -> Any:
            steps.append(dafjax.jit(step, **jit_options))
            return steps[-1]

        watch = functools.partial(_watch_steps, steps)
    if bits == "auto" and options.budget is not None:
        bits = dafjax.Budget(options.budget)
    elif bits == "auto" and not adapts:
        bits = dafjax.AverageBits(2)
    policies = {"default": None, "save-all": dafjax.policies.SaveAll()}
    if options.policy == "nearest":
        if options.bits == "auto":
            raise ValueError("`--policy nearest` needs a number of `--bits`, not auto.")
        nearest = dafjax.codecs.Affine(bits=bits, rounding="nearest")
        policies["nearest"] = dafjax.policies.CompressExpensive(nearest)

    def wrap_loss(loss: LossFunction) -> LossFunction:
        policy = policies[options.policy]
        return dafjax.remat_compress(loss, bits=bits, policy=policy, store=store)

    return Method(
        "compress", label, wrap_loss=wrap_loss, watch=watch, jit=jit, adapts=adapts
    )


def _watch_steps(steps: Sequence[Any]) -> Mapping[str, Any]:
    return {
        "pool_nbytes": max((step.nbytes for step in steps), default=0),
        "bits": {name: bits for step in steps for name, bits in step.bits.items()},
        "noise_share": max((step.noise_share or 0 for step in steps), default=0),
    }


def _watch_pool(pool: Any) -> Mapping[str, Any]:
    stats = pool.stats()
    return {
        "pool_nbytes": stats.committed_nbytes,
        "bits": {name: site.bits_kept for name, site in stats.sites.items()},
    }


_MAKERS: Mapping[str, Callable[[MethodOptions], Method]] = {
    "none": _make_none,
    "checkpoint": _make_checkpoint,
    "checkpoint-best": _make_checkpoint_best,
    "compress": _make_compress,
}


def _remat_block(policy: str) -> WrapBlock:
    _check_policy("checkpoint", policy, _CHECKPOINT_POLICIES)
    options: dict[str, Any] = {}
    if policy != "default":
        options["policy"] = getattr(jax.checkpoint_policies, policy)

    def wrap_block(block: type[nn.Module]) -> type[nn.Module]:
        return nn.remat(block, **options)

    return wrap_block


def _check_policy(method: str, policy: str, valid: tuple[str, ...]) -> None:
    if policy not in ("default", *valid):
        raise ValueError(
            f"`--policy` of method {method} must be one of "
            f"{', '.join(('default', *valid))}, but got {policy!r}."
        )
