"""Reductions of rows in one pass: least and greatest value, sum of squares.

On CPUs and NVIDIA GPUs they are custom calls, elsewhere `jax.numpy`. Long rows are
split into parts of at least 8192 elements. The strategy says how the results of the
parts are combined:

- `"parallel"`: each part stores its result, and a second step combines them. The result
  does not depend on which part finishes first.
- `"atomic"`: each part updates the row's result atomically. The last bits of a sum may
  differ from call to call.
- `"hybrid"`: threads that share memory combine their results, and the last thread group
  to finish completes the row. Sums are always combined in the same order.
- `"auto"`: the fastest strategy on the device for this number and length of rows, among
  those whose results are the same in every call. The times are measured when the first
  program with such a reduction is compiled, in about 0.3 s. They are stored in a file
  for later processes, until the driver, the power mode or dafjax changes.
  `python -m dafjax tune` prints them, and measures again with `--redo`. Rows of one
  part (up to 8192 elements) need no second step. Programs that are compiled for a GPU
  which this machine does not have use `"hybrid"`.

Subnormal values count as zero, and zeros are +0.
"""

from dafjax import _native
from dafjax._numbers import Array


def minmax(x: Array, *, strategy: str = "auto") -> tuple[Array, Array]:
    """Finds the least and the greatest value of each row in one pass.

    Args:
        x: float32, bfloat16 or float16 `[*batch, n]`. To reduce a whole array, pass
            `x.reshape(-1)`.
        strategy: `"parallel"`, `"atomic"`, `"hybrid"` or `"auto"`. All give the same
            results.

    Returns:
        `(minimum, maximum)`: arrays `[*batch]` of the dtype of `x`. Both are NaN if the
        row has a NaN; an empty row gives +Inf and -Inf.

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
        x: float32, bfloat16 or float16 `[*batch, n]`. To reduce a whole array, pass
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
