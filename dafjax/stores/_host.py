"""Arrays in host memory as a store."""

import dataclasses
from collections.abc import Sequence
from typing import final

import jax

from dafjax._targets import Target
from dafjax._typing import Array, ArrayTree
from dafjax.codecs import AbstractCodec
from dafjax.stores._abstract import AbstractStore


@final
@dataclasses.dataclass(frozen=True)
class Host(AbstractStore):
    """Keeps packed residuals in the host's memory: offload of few bytes.

    `jax.checkpoint_policies.save_and_offload_only_these_names` moves residuals as they
    are; this moves their codes, at 2 bits 15 times fewer bytes each way. On CPUs, where
    the host's memory is the device's, the same program runs and nothing is gained.

    Example:
        >>> import dafjax, jax, jax.numpy as jnp
        >>> def loss(w, x):
        ...     return jnp.sum(jnp.sin(x @ w))
        >>> w, x = jnp.ones((256, 256)), jnp.ones((256, 256))
        >>> offloaded = dafjax.remat_compress(loss, store=dafjax.stores.Host())
        >>> jax.jit(jax.grad(offloaded))(w, x).shape
        (256, 256)
    """

    def codec(
        self, wanted: AbstractCodec, *, site: str, reads: int = 0
    ) -> AbstractCodec:
        return wanted

    def allocate_for(self, target: Target) -> None:
        raise NotImplementedError(
            f"`remat_compress(bits={target!r})` needs a store whose bits change while "
            f"a program runs, and `{self!r}` has them in the compiled program. Use "
            "`store=dafjax.stores.PagePool()`, or give `bits` as a number."
        )

    def measures(self, codec: AbstractCodec) -> bool:
        del codec
        return False

    def note(
        self, sensitivities: Array, codecs: Sequence[AbstractCodec], after: Array
    ) -> Array:
        raise NotImplementedError(
            f"`{self!r}` does not measure: its bits are part of the compiled program."
        )

    def put(self, packed: ArrayTree) -> ArrayTree:
        return jax.device_put(packed, jax.memory.Space.Host)

    def get(self, handle: ArrayTree) -> ArrayTree:
        return jax.device_put(handle, jax.memory.Space.Device)
