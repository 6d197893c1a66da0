"""The methods of saving memory, as data: what each wraps, and how it is compiled."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import flax.linen as nn
import jax

from models.step import LossFunction, WrapLoss
from models.wrapping import WrapBlock, no_wrapping


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
    """

    name: str
    label: str
    wrap_block: WrapBlock = no_wrapping
    wrap_loss: WrapLoss = same_loss
    compiler_options: tuple[Mapping[str, str], ...] = ({},)


def make_method(name: str, *, bits: int, policy: str) -> Method:
    """Returns the method `name`.

    Args:
        name: One of `MethodName`.
        bits: Bits per element of what the compressing methods keep.
        policy: What to keep; the valid names depend on the method.

    Raises:
        ValueError: If the method has no such name, or no such policy.
    """
    if name not in _MAKERS:
        raise ValueError(
            f"`--method` must be one of {', '.join(get_args(MethodName))}, but got "
            f"{name!r}."
        )
    return _MAKERS[name](bits, policy)


def _make_none(bits: int, policy: str) -> Method:
    _check_policy("none", policy, ())
    return Method("none", "no wrapping")


def _make_checkpoint(bits: int, policy: str) -> Method:
    return Method("checkpoint", "jax.checkpoint", wrap_block=_remat_block(policy))


def _make_checkpoint_best(bits: int, policy: str) -> Method:
    return Method(
        "checkpoint-best",
        "jax.checkpoint, best options",
        wrap_block=_remat_block(policy),
        compiler_options=(_KEEP_BARRIERS, _KEEP_BARRIERS | _MEMORY_SCHEDULER),
    )


def _make_compress(bits: int, policy: str) -> Method:
    _check_policy("compress", policy, ("save-all", "nearest"))
    # Imported where it is used: the models themselves know nothing of dafjax.
    import dafjax

    nearest = dafjax.codecs.Affine(bits=bits, rounding="nearest")
    policies = {
        "default": None,
        "save-all": dafjax.policies.SaveAll(),
        "nearest": dafjax.policies.CompressExpensive(nearest),
    }

    def wrap_loss(loss: LossFunction) -> LossFunction:
        return dafjax.remat_compress(loss, bits=bits, policy=policies[policy])

    return Method("compress", f"dafjax, {bits} bits", wrap_loss=wrap_loss)


_MAKERS: Mapping[str, Callable[[int, str], Method]] = {
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
