"""Reductions of rows in one pass: least and greatest value, sum of squares.

On CPUs and on NVIDIA GPUs they are custom calls, elsewhere `jax.numpy`. A strategy says
how parts of a row are put together:

- `"parallel"`: parts leave what they have found, and a second step combines it. The
  result does not depend on which part is done first.
- `"atomic"`: whoever has a part changes the row's result atomically. The last bits of a
  sum may differ from call to call.
- `"hybrid"`: threads that share memory combine what they have, and the last of their
  groups to be done finishes the row. Sums are always combined in the same order.
- `"auto"`: what is fastest on the device for so many rows of that length, of those
  whose results are the same from call to call. How long they take is measured when the
  first program with such a reduction is compiled, in some 0.3 s, and kept in a file for
  later processes, until the driver, the power mode or dafjax changes. `python -m dafjax
  tune` shows it, and with `--redo` measures anew. Rows of one part (8192 elements) need
  no second step, and programs that are compiled for a GPU that is not there take
  `"hybrid"`.

Subnormal values count as zero, and zeros are +0.
"""

from dafjax import _native
from dafjax._typing import Array


def minmax(x: Array, *, strategy: str = "auto") -> tuple[Array, Array]:
    """Finds the least and the greatest value of each row in one pass.

    Args:
        x: float32, bfloat16 or float16 `[*batch, n]`. For those of a whole array, pass
            `x.reshape(-1)`.
        strategy: `"parallel"`, `"atomic"`, `"hybrid"` or `"auto"`. The results are the
            same.

    Returns:
        `(minimum, maximum)`: arrays `[*batch]` of the dtype of `x`. Both are NaN where
        a row has a NaN; those of an empty row are +Inf and -Inf.

    Raises:
        TypeError: `x` has another dtype.
        ValueError: `x` is a scalar, or there is no such strategy.
        NotImplementedError: The result is differentiated.

    Example:
        >>> import jax.numpy as jnp
        >>> from dafjax import reductions
        >>> low, high = reductions.minmax(jnp.asarray([[3.0, -1.0], [2.0, 5.0]]))
        >>> print(low, high)
        [-1.  2.] [3. 5.]
    """
    minimum, maximum = _native.minmax(x, strategy=strategy)
    return minimum.astype(x.dtype), maximum.astype(x.dtype)


def sum_of_squares(x: Array, *, strategy: str = "auto") -> Array:
    """Adds up the squares of each row.

    Args:
        x: float32, bfloat16 or float16 `[*batch, n]`. For that of a whole array, pass
            `x.reshape(-1)`.
        strategy: `"parallel"`, `"atomic"`, `"hybrid"` or `"auto"`. With `"atomic"` the
            last bits may differ from call to call.

    Returns:
        float32 `[*batch]`.

    Raises:
        TypeError: `x` has another dtype.
        ValueError: `x` is a scalar, or there is no such strategy.
        NotImplementedError: The result is differentiated.

    Example:
        >>> import jax.numpy as jnp
        >>> from dafjax import reductions
        >>> print(reductions.sum_of_squares(jnp.asarray([3.0, 4.0])))
        25.0
    """
    return _native.sum_of_squares(x, strategy=strategy)
