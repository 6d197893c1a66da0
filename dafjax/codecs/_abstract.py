"""The interface of a codec: arrays to packed arrays and back."""

import abc

import jax
import jax.numpy as jnp

from dafjax._typing import Array, ArrayTree, Like


class AbstractCodec(abc.ABC):
    """A pair of functions: `encode` packs an array, `decode` unpacks it.

    A codec is a hashable value. `encode` returns the *packed* array, a pytree of arrays
    whose shapes depend only on the shape and dtype of the array.
    """

    @property
    @abc.abstractmethod
    def is_exact(self) -> bool:
        """Whether `decode` restores every bit."""

    @abc.abstractmethod
    def encode(self, x: Array, *, seed: int | Array = 0) -> ArrayTree:
        """Packs an array of any shape.

        Args:
            x: The array, of a dtype that `check` accepts.
            seed: Integer from 0 to 2^32 - 1, or a uint32 scalar. It selects the
                rounding noise, if the codec uses noise.

        Returns:
            A pytree of arrays of `packed_nbytes` bytes in all.

        Raises:
            TypeError: The dtype of `x` or `seed` is not supported.
            ValueError: `seed` is out of range or not a scalar.
        """

    def sums_columns(self, like: Like) -> bool:
        """Returns whether `encode_and_sum` reads the array only once on GPUs.

        Args:
            like: Shape and dtype of the array.
        """
        del like
        return False

    def encode_and_sum(
        self, x: Array, *, seed: int | Array = 0
    ) -> tuple[ArrayTree, Array, Array]:
        """Packs an array, and sums it over all axes but the last.

        Args:
            x: The array, float32 with at least one dimension.
            seed: As in `encode`.

        Returns:
            The packed array, as `encode` returns it; the sum; the sum of the squares.

        Raises:
            TypeError: As `encode` raises it.
            ValueError: As `encode` raises it.
        """
        axes = tuple(range(x.ndim - 1))
        return self.encode(x, seed=seed), jnp.sum(x, axes), jnp.sum(x * x, axes)

    @abc.abstractmethod
    def decode(
        self, packed: ArrayTree, like: Like, *, after: tuple[Array, ...] = ()
    ) -> Array:
        """Unpacks the result of `encode`.

        Args:
            packed: The result of `encode`.
            like: Shape and dtype of the array that was packed.
            after: Arrays that are computed before unpacking. They are not read; they
                keep XLA from unpacking earlier.

        Returns:
            An array of `like.shape` and `like.dtype`.

        Raises:
            TypeError: `like.dtype` is not supported.
            ValueError: The shapes of `packed` do not fit `like`.
        """

    def decode_fused(
        self, packed: ArrayTree, like: Like, *, after: tuple[Array, ...] = ()
    ) -> Array:
        """Unpacks as `decode` does, for arrays that no matrix product reads.

        On a GPU, XLA can then fuse unpacking into the kernels that read the array, and
        never writes the array to memory. By default it calls `decode`.

        Args:
            packed: The result of `encode`.
            like: Shape and dtype of the array that was packed.
            after: As in `decode`.

        Returns:
            The array that `decode` returns.

        Raises:
            TypeError: `like.dtype` is not supported.
            ValueError: The shapes of `packed` do not fit `like`.
        """
        return self.decode(packed, like, after=after)

    @property
    def decodes_fused(self) -> bool:
        """Whether the codec has its own `decode_fused`."""
        return type(self).decode_fused is not AbstractCodec.decode_fused

    def packs_rows(self, like: Like) -> bool:
        """Returns whether each row of the array is packed separately.

        A row is an index of the first dimension, the batch axis. If so, the first
        dimension of each packed array is the batch axis too, and any subset of its rows
        decodes to the same rows of the array. The backward pass may then unpack the
        array in chunks.

        Args:
            like: Shape and dtype of the array.
        """
        del like
        return False

    def packs_parts(self, like: Like, count: int) -> bool:
        """Returns whether each chunk of the array can be unpacked separately.

        A chunk is a range of rows. If so, the first dimension of each packed array
        splits into the same number of chunks, and the chunk of all packed arrays
        decodes to the chunk of the array.

        Args:
            like: Shape and dtype of the array.
            count: Number of equal chunks.
        """
        if not like.shape:
            return False
        there, rest = divmod(like.shape[0], count)
        part = jax.ShapeDtypeStruct((there, *like.shape[1:]), like.dtype)
        return rest == 0 and self.packs_rows(like) and self.packs_rows(part)

    @abc.abstractmethod
    def packed_nbytes(self, like: Like) -> int:
        """Returns the packed size in bytes of an array of this shape and dtype.

        Raises:
            TypeError: `like.dtype` is not supported.
        """

    @abc.abstractmethod
    def check(self, like: Like) -> None:
        """Raises if arrays of this shape and dtype cannot be packed.

        Raises:
            TypeError: `like.dtype` is not supported.
        """
