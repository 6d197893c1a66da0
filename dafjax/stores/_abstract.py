"""The interface of a store."""

import abc

from dafjax._typing import ArrayTree


class AbstractStore(abc.ABC):
    """A place where packed residuals wait.

    Stores are frozen, hashable data. A handle is a pytree of arrays, so that it can be
    returned from a traced function, stacked by `scan` and batched by `vmap`.
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
