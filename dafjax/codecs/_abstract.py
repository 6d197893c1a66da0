"""The interface of a codec: arrays to packed arrays and back."""

import abc

import jax
import jax.numpy as jnp

from dafjax._typing import Array, ArrayTree, Like


class AbstractCodec(abc.ABC):
    """A pair of functions between an array and its packed form.

    A codec is a hashable value. What `encode` returns, its *packed*, is a pytree of
    arrays whose shapes depend on the shape and dtype of the array alone.
    """

    @property
    @abc.abstractmethod
    def is_exact(self) -> bool:
        """Whether `decode` gives back every bit."""

    @abc.abstractmethod
    def encode(self, x: Array, *, seed: int | Array = 0) -> ArrayTree:
        """Packs an array of any shape.

        Args:
            x: The array, of a dtype that `check` accepts.
            seed: Integer from 0 to 2^32 - 1, or a uint32 scalar. It selects the
                rounding noise, if the codec draws any.

        Returns:
            A pytree of arrays of `packed_nbytes` bytes in all.

        Raises:
            TypeError: The dtype of `x` or `seed` is not supported.
            ValueError: `seed` is out of range or not a scalar.
        """

    def sums_columns(self, like: Like) -> bool:
        """Returns whether `encode_and_sum` reads such an array once, on GPUs.

        Args:
            like: Shape and dtype of the array.
        """
        del like
        return False

    def encode_and_sum(
        self, x: Array, *, seed: int | Array = 0
    ) -> tuple[ArrayTree, Array, Array]:
        """Packs an array, and sums over all its axes but the last.

        Args:
            x: The array, float32 of at least one dimension.
            seed: As `encode` takes it.

        Returns:
            What `encode` returns; the sum; and that of the squares.

        Raises:
            TypeError: As `encode` raises it.
            ValueError: So too.
        """
        axes = tuple(range(x.ndim - 1))
        return self.encode(x, seed=seed), jnp.sum(x, axes), jnp.sum(x * x, axes)

    @abc.abstractmethod
    def decode(
        self, packed: ArrayTree, like: Like, *, after: tuple[Array, ...] = ()
    ) -> Array:
        """Unpacks what `encode` returned.

        Args:
            packed: The result of `encode`.
            like: Shape and dtype of the array that was packed.
            after: Arrays that are computed before the packed arrays are unpacked. They
                are not read; they keep XLA from unpacking earlier.

        Returns:
            An array of `like.shape` and `like.dtype`.

        Raises:
            TypeError: `like.dtype` is not supported.
            ValueError: The shapes of `packed` do not belong to `like`.
        """

    def decode_fused(
        self, packed: ArrayTree, like: Like, *, after: tuple[Array, ...] = ()
    ) -> Array:
        """Unpacks what no product reads, as `decode` does.

        On a GPU, XLA can then unpack in the kernels that read the array, so that it is
        never written to memory. A codec that knows no such way does what `decode` does.

        Args:
            packed: The result of `encode`.
            like: Shape and dtype of the array that was packed.
            after: As `decode` takes them.

        Returns:
            The array that `decode` returns.

        Raises:
            TypeError: `like.dtype` is not supported.
            ValueError: The shapes of `packed` do not belong to `like`.
        """
        return self.decode(packed, like, after=after)

    @property
    def decodes_fused(self) -> bool:
        """Whether `decode_fused` is another way than `decode`."""
        return type(self).decode_fused is not AbstractCodec.decode_fused

    def packs_rows(self, like: Like) -> bool:
        """Returns whether each row of such an array is packed by itself.

        A row is an index of the first dimension. Then each array of a packed has the
        rows too, and any of them decode to those rows of the array. A codec for which
        that holds says so, so that the backward pass may unpack an array in parts.

        Args:
            like: Shape and dtype of the array.
        """
        del like
        return False

    def packs_parts(self, like: Like, count: int) -> bool:
        """Returns whether parts of such an array can be unpacked, each by itself.

        A part is rows that follow each other. Then the first dimension of each array of
        a packed can be divided likewise, and a part of them all decodes to a part of
        the array.

        Args:
            like: Shape and dtype of the array.
            count: Into how many equal parts its rows are divided.
        """
        if not like.shape:
            return False
        there, rest = divmod(like.shape[0], count)
        part = jax.ShapeDtypeStruct((there, *like.shape[1:]), like.dtype)
        return rest == 0 and self.packs_rows(like) and self.packs_rows(part)

    @abc.abstractmethod
    def packed_nbytes(self, like: Like) -> int:
        """Returns the bytes that an array of this shape and dtype takes when packed.

        Raises:
            TypeError: `like.dtype` is not supported.
        """

    @abc.abstractmethod
    def check(self, like: Like) -> None:
        """Raises if arrays of this shape and dtype cannot be packed.

        Raises:
            TypeError: `like.dtype` is not supported.
        """
