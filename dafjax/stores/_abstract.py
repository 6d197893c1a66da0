"""The interface of a store."""

import abc
from collections.abc import Sequence

from dafjax._targets import Target
from dafjax._typing import Array, ArrayTree, Like
from dafjax.codecs import AbstractCodec, Affine


class AbstractStore(abc.ABC):
    """A place where packed residuals wait.

    A residual `x` goes there and comes back by way of the codec that the store chooses:

        codec  = store.codec(wanted, site=name)
        handle = store.put(codec.encode(x))
        x'     = codec.decode(store.get(handle), like)

    Stores are frozen, hashable data. A handle is a pytree of arrays, so that it can be
    returned from a traced function, stacked by `scan` and batched by `vmap`.
    """

    @property
    def keeps_bits(self) -> bool:
        """Whether codes have the bits that were planned, and none are taken away."""
        return False

    @property
    def takes_brief(self) -> bool:
        """Whether it takes what waits only while little memory is needed.

        If not, such residuals are arrays of the program, which the store never sees.
        """
        return True

    @abc.abstractmethod
    def codec(
        self, wanted: AbstractCodec, *, site: str, reads: int = 0, num_parts: int = 1
    ) -> AbstractCodec:
        """Returns the codec that a residual is packed with to wait here.

        It is `wanted`, unless packing and storing are one step for this store: then
        what its `encode` returns stands for what is stored.

        Args:
            wanted: The codec that was chosen for the residual.
            site: The residual's name, the same in every process.
            reads: How often one backward pass decodes all of it; 0 if that is unknown.
            num_parts: In how many parts of its rows it may be decoded, where the codec
                `packs_parts`.
        """

    @abc.abstractmethod
    def allocate_for(self, target: Target) -> "AbstractStore":
        """Returns a store that allocates bits for a target from now on.

        Raises:
            ValueError: There is another target already.
        """

    @abc.abstractmethod
    def measured_code(self, codec: AbstractCodec) -> Affine | None:
        """Returns the code of a residual if its importance is to be measured.

        Args:
            codec: What `codec` returned for it.
        """

    @abc.abstractmethod
    def squared_range(self, codec: AbstractCodec, packed: ArrayTree) -> Array | None:
        """Returns the mean of the squared ranges of a residual's blocks.

        Args:
            codec: What `codec` returned for it; one with a `measured_code`.
            packed: What `get` returned.

        Returns:
            A float32 scalar; None if the store knows it by itself.
        """

    @abc.abstractmethod
    def note(
        self,
        sensitivities: Array,
        codecs: Sequence[AbstractCodec],
        likes: Sequence[Like],
        after: Array,
    ) -> Array:
        """Takes what the backward pass measured of residuals.

        Args:
            sensitivities: float32 `[n + 1]`: for each residual the variance of the
                gradient at 1 bit, if the squared ranges of blocks are 1 on average
                where `squared_range` is None; then the squared norm of the gradient.
            codecs: What `codec` returned for the residuals with a `measured_code`.
            likes: Shape and dtype of each.
            after: An array that is computed first.

        Returns:
            A scalar; the note is taken only if something depends on it.
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
