"""The interface of a store."""

import abc

from dafjax._typing import ArrayTree
from dafjax.codecs import AbstractCodec


class AbstractStore(abc.ABC):
    """A place where packed residuals wait.

    A residual `x` goes there and comes back by way of the codec that the store chooses:

        codec  = store.codec(wanted, site=name)
        handle = store.put(codec.encode(x))
        x'     = codec.decode(store.get(handle), like)

    Stores are frozen, hashable data. A handle is a pytree of arrays, so that it can be
    returned from a traced function, stacked by `scan` and batched by `vmap`.
    """

    @abc.abstractmethod
    def codec(
        self, wanted: AbstractCodec, *, site: str, reads: int = 0
    ) -> AbstractCodec:
        """Returns the codec that a residual is packed with to wait here.

        It is `wanted`, unless packing and storing are one step for this store: then
        what its `encode` returns stands for what is stored.

        Args:
            wanted: The codec that was chosen for the residual.
            site: The residual's name, the same in every process.
            reads: How often one backward pass decodes it; 0 if that is unknown.
        """

    @abc.abstractmethod
    def put(self, packed: ArrayTree) -> ArrayTree:
        """Puts what a codec made of a residual.

        Args:
            packed: A pytree of arrays.

        Returns:
            A handle: a pytree of arrays.
        """

    @abc.abstractmethod
    def get(self, handle: ArrayTree) -> ArrayTree:
        """Returns what was put, any number of times.

        Args:
            handle: What `put` returned.

        Returns:
            A pytree equal to what was put.
        """
