"""Makes convolutions in loop bodies as fast as outside of loops.

XLA:CPU transposes the operands of a convolution to the axis order of its library, but
only outside of loops. Inside, a convolution with another axis order takes 30 times as
long (jaxlib 0.10). Gradients of kernels have another order, because they sum over the
images, not over the features.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax


def convolve_in_loop(
    operands: Sequence[jax.Array], params: Mapping[str, Any]
) -> jax.Array:
    """Returns the same as `conv_general_dilated`.

    Args:
        operands: The images and the kernel.
        params: The parameters of the primitive.
    """
    as_it_is = functools.partial(lax.conv_general_dilated_p.bind, **params)
    in_order = functools.partial(_convolve_in_order, params=params)
    return lax.platform_dependent(*operands, cpu=in_order, default=as_it_is)


def _convolve_in_order(
    images: jax.Array, kernel: jax.Array, *, params: Mapping[str, Any]
) -> jax.Array:
    numbers = params["dimension_numbers"]
    batch, features, *places = numbers.lhs_spec
    features_out, features_in, *taps = numbers.rhs_spec
    images = lax.transpose(images, (batch, *places, features))
    kernel = lax.transpose(kernel, (*taps, features_in, features_out))
    last = images.ndim - 1
    between = tuple(range(1, last))
    in_order = lax.ConvDimensionNumbers(
        lhs_spec=(0, last, *between),
        rhs_spec=(last, last - 1, *range(last - 1)),
        out_spec=(0, last, *between),
    )
    result = lax.conv_general_dilated_p.bind(
        images, kernel, **{**params, "dimension_numbers": in_order}
    )
    batch, features, *places = numbers.out_spec
    order = {axis: n for n, axis in enumerate((batch, *places, features))}
    return lax.transpose(result, tuple(order[axis] for axis in range(last + 1)))
