"""Low-rank adapters of frozen layers, and which variables are trained.

Hu et al.: LoRA, https://arxiv.org/abs/2106.09685. Adapters are variables of a
collection of their own, `"lora"`: a model without them has the same `"params"`. What is
differentiated is one tree and what is frozen another:

    trained, frozen = lora.split(variables, config.trained)
    gradient = jax.grad(lambda t: loss(model.apply(lora.merge(t, frozen), x)))(trained)

A frozen weight is then a constant of the differentiated function: it has no gradient,
and the layer keeps no input for one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


Variables = Mapping[str, Any]


class LoRA(nn.Module):
    """`alpha / rank * (x A) B`, which is added to the output of a frozen layer.

    `A` is float32 [in, rank] and `B` float32 [rank, features]. `B` starts at zero, so
    that the model starts as it was (section 4.1).

    Attributes:
        rank: Columns of `A`.
        alpha: Scale, before it is divided by the rank.
        features: Columns of `B`: the outputs of the layer that is adapted.
        dtype: What is computed in.
    """

    rank: int
    alpha: float
    features: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        # x: [..., in]
        def init_a() -> jax.Array:
            init = nn.initializers.he_uniform()
            return init(self.make_rng("params"), (x.shape[-1], self.rank))

        a = self.variable("lora", "a", init_a)
        b = self.variable("lora", "b", jnp.zeros, (self.rank, self.features))
        x, factor_a, factor_b = (y.astype(self.dtype) for y in (x, a.value, b.value))
        return (x @ factor_a) @ factor_b * (self.alpha / self.rank)


def split(
    variables: Variables, trained: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divides a model's variables into those that are trained and the frozen others.

    Args:
        variables: What `model.init` returns, of arrays or of their shapes.
        trained: Paths of subtrees, such as `"lora"` or `"params/head"`; every one of
            them must be there.

    Returns:
        The two trees, of dictionaries; `merge` puts them together again.

    Raises:
        ValueError: If a path leads to no variable.

    Example:
        >>> variables = {"params": {"head": 1, "body": 2}, "lora": 3}
        >>> split(variables, ["lora", "params/head"])
        ({'params': {'head': 1}, 'lora': 3}, {'params': {'body': 2}})
    """
    flat = flax.traverse_util.flatten_dict(variables)
    prefixes = [tuple(path.split("/")) for path in trained]

    def lies_below(path: tuple[str, ...], prefix: tuple[str, ...]) -> bool:
        return path[: len(prefix)] == prefix

    for prefix in prefixes:
        if not any(lies_below(path, prefix) for path in flat):
            raise ValueError(
                f"`trained` has the path {'/'.join(prefix)!r}, but the variables have "
                f"only {', '.join(sorted({'/'.join(path[:2]) for path in flat}))}."
            )
    of_trained = {p for p in flat if any(lies_below(p, prefix) for prefix in prefixes)}
    parts = (
        {p: leaf for p, leaf in flat.items() if (p in of_trained) is wanted}
        for wanted in (True, False)
    )
    first, second = (flax.traverse_util.unflatten_dict(part) for part in parts)
    return first, second


def merge(trained: Variables, frozen: Variables) -> dict[str, Any]:
    """Puts together what `split` divided; where both have a leaf, `trained` wins.

    Example:
        >>> merge({"params": {"head": 1}, "lora": 3}, {"params": {"body": 2}})
        {'params': {'body': 2, 'head': 1}, 'lora': 3}
    """
    flat = flax.traverse_util.flatten_dict(frozen)
    flat |= flax.traverse_util.flatten_dict(trained)
    return flax.traverse_util.unflatten_dict(flat)
