"""The interface of a store."""

import abc
from collections.abc import Sequence

from dafjax._bits import Target
from dafjax._numbers import Array, ArrayTree, Like
from dafjax.codecs import AbstractCodec, Affine


class AbstractStore(abc.ABC):
    """Keeps packed residuals until the backward pass reads them.

    The store chooses the codec that packs and unpacks a residual `x`:

        codec  = store.codec(wanted, site=name)
        handle = store.put(codec.encode(x))
        x'     = codec.decode(store.get(handle), like)

    Stores are frozen, hashable data. A handle is a pytree of arrays, so a traced
    function can return it, `scan` can stack it and `vmap` can batch it.
    """

    @property
    def keeps_bits(self) -> bool:
        """Whether every code keeps the bits that the plan gives it."""
        return False

    @property
    def takes_brief(self) -> bool:
        """Whether the store takes short-lived residuals.

        A short-lived residual is stored only while the program needs little memory. If
        the store does not take them, they stay ordinary arrays of the program.
        """
        return True

    @abc.abstractmethod
    def codec(
        self, wanted: AbstractCodec, *, site: str, reads: int = 0, num_parts: int = 1
    ) -> AbstractCodec:
        """Returns the codec that packs a residual for this store.

        The codec is `wanted`, unless this store packs and stores in one step. Then
        `encode` stores the residual and returns a handle.

        Args:
            wanted: The codec that was chosen for the residual.
            site: The residual id, the same in every process.
            reads: How often one backward pass decodes the whole residual; 0 if unknown.
            num_parts: Number of batch chunks into which decoding may be split, if the
                codec `packs_parts`.
        """

    @abc.abstractmethod
    def allocate_for(self, target: Target) -> "AbstractStore":
        """Returns a store that allocates bits for a target from now on.

        Raises:
            ValueError: The store already has another target.
        """

    @property
    def measures_by_element(self) -> bool:
        """Whether sensitivities count elements in units of their array's mean square.

        Otherwise they are variances of the whole gradient.
        """
        return False

    def measured_code(self, codec: AbstractCodec) -> Affine | None:
        """Returns a residual's affine code if its sensitivity must be measured.

        Args:
            codec: The codec that `codec` returned for the residual.
        """
        del codec
        return None

    def squared_range(self, codec: AbstractCodec, packed: ArrayTree) -> Array | None:
        """Returns the mean squared range of a residual's quantization groups.

        Args:
            codec: The codec that `codec` returned; it must have a `measured_code`.
            packed: The packed residual that `get` returned.

        Returns:
            A float32 scalar; None if the store measures the ranges itself.
        """
        del codec, packed
        return None

    @abc.abstractmethod
    def note(
        self,
        sensitivities: Array,
        codecs: Sequence[AbstractCodec],
        likes: Sequence[Like],
        after: Array,
    ) -> Array:
        """Records the sensitivities that the backward pass measured.

        Args:
            sensitivities: float32 `[n + 1]`. The first `n` are the gradient variance
                that each residual contributes at 1 bit. If `squared_range` is None,
                they are for a mean squared group range of 1. The last element is the
                squared norm of the gradient.
            codecs: The codecs of the `n` residuals that have a `measured_code`.
            likes: Shape and dtype of each residual.
            after: An array that is computed first.

        Returns:
            A scalar. The record is made only if something depends on this scalar.
        """

    def put(self, packed: ArrayTree) -> ArrayTree:
        """Stores a packed residual, and returns a handle: by default itself."""
        return packed

    def get(self, handle: ArrayTree) -> ArrayTree:
        """Loads the packed residual that `put` stored; may be called repeatedly."""
        return handle
