"""Takes the noise out of gradients of scales that a later norm divides out.

A batch norm multiplies each channel by a trained scale and adds a trained bias. Let a
ReLU, a depthwise convolution and another batch norm follow. If scale and bias of a
channel grow by a factor, the second norm divides by this factor. So the exact gradient
has almost no component along (scale, bias). The rounding noise has such a component. In
a MobileNet at 2 bits it is eight times the gradient of the scale.

Let `p` be the numbers of one channel. A value is homogeneous of degree `d` in `p` if
multiplying `p` by `s` multiplies the value by `s**d`. This pass changes derivatives,
not values:

- The derivative of `p` loses its component along `p`. This component is carried by a
  shift, one more number for each channel, which is always 0. Its derivative is
  `<p, dp> / <p, p>`.
- An operation that is not homogeneous reads a value `v` of degree `d` with its whole
  derivative: that of `v`, plus `d v` times the derivative of the shift. The sigmoid of
  a SiLU is one; `v` times its result counts as homogeneous. (Without this, at 8 bits an
  EfficientNet has a noise of 0.061 in the scale of one norm; with it, 0.022.)
- A norm adds a small number `c` to a variance of degree 2. The sum counts as
  homogeneous, and its derivative loses `2 c` times the derivative of the shift.

In exact arithmetic the gradient stays the same, for every program. But the component
along `p` now comes from small arrays only, such as the variance, and these are exact.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from dafjax._passes.homogeneous import Cone, find_cones
from dafjax._trace.equation import Atom, look_up
from dafjax._trace.graph import Graph, flatten
from dafjax._trace.residuals import Program, differentiate, trace_like
from dafjax._trace.tracing import ClosedJaxpr


def hold_scales(program: Program) -> Program:
    """Returns the program with less noise in such gradients."""
    closed, perturbed = program.function, program.perturbed
    graph = flatten(closed, is_differentiated=False)
    cones = find_cones(graph, perturbed)
    if not cones:
        return program
    held = differentiate(_with_held_scales(closed, graph, cones), perturbed)
    return dataclasses.replace(
        held, function=program.function, fingerprint=program.fingerprint
    )


def _with_held_scales(
    closed: ClosedJaxpr, graph: Graph, cones: Sequence[Cone]
) -> ClosedJaxpr:
    """Returns the function with the derivatives that the module describes."""

    def run(*arguments: Any) -> list[Any]:
        env: dict[int, Any] = dict(enumerate(arguments))
        zeros = []
        for cone in cones:
            hold = _holding([degree.degree for degree in cone.arguments.values()])
            *held, zero = hold(*look_up(tuple(cone.arguments), env))
            env.update(zip(cone.arguments, held, strict=True))
            zeros.append(zero)

        def read(place: int, atoms: Iterable[Atom]) -> list[Any]:
            operands = env
            for cone, zero in zip(cones, zeros, strict=True):
                for value, degree in cone.ends.get(place, {}).items():
                    spread = _spread(zero, env[value], degree.axis)
                    # Another cone may have given its part back already.
                    whole = _give_back(degree.degree, operands[value], spread)
                    operands = {**operands, value: whole}
            return look_up(tuple(atoms), operands)

        for place, eqn in enumerate(graph.equations):
            operands = read(place, eqn.inputs)
            results = jax.core.eval_jaxpr(eqn.jaxpr, (), *operands)
            for cone, zero in zip(cones, zeros, strict=True):
                if place in cone.shifts:
                    number, degree = cone.shifts[place]
                    (result,) = results
                    spread = _spread(zero, result, degree.axis)
                    results = [result - number * degree.degree * spread]
            env.update(zip(eqn.outputs, results, strict=True))
        return read(len(graph.equations), graph.outputs)

    return trace_like(run, *closed.in_avals)


def _spread(channels: jax.Array, like: jax.Array, axis: int) -> jax.Array:
    """Returns numbers of channels as an array of the shape and dtype of another."""
    channels = channels.astype(like.dtype)
    return jax.lax.broadcast_in_dim(channels, like.shape, (axis,))


def _holding(degrees: Sequence[float]) -> Callable[..., Sequence[jax.Array]]:
    """Returns a function that takes the part along arguments out of their derivative.

    The arguments have one number for each of `n` channels. It returns them, and `n`
    zeros, whose derivative is that part.

    Args:
        degrees: The degree of each argument.
    """

    @jax.custom_jvp
    def hold(*arguments: jax.Array) -> tuple[jax.Array, ...]:
        return *arguments, jnp.zeros(arguments[0].size, _wide(arguments[0]))

    @hold.defjvp
    def push(
        arguments: Sequence[jax.Array], tangents: Sequence[jax.Array]
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        wide = _wide(arguments[0])
        pairs = zip(degrees, arguments, strict=True)
        along = jnp.stack([degree * jnp.ravel(x).astype(wide) for degree, x in pairs])
        moves = jnp.stack([jnp.ravel(tangent).astype(wide) for tangent in tangents])
        square = jnp.sum(along * along, 0)
        # Where all numbers are 0, there is no part along them.
        shift = jnp.sum(along * moves, 0) / jnp.where(square == 0, 1.0, square)
        held = [
            tangent - jnp.reshape(part, tangent.shape).astype(tangent.dtype)
            for tangent, part in zip(tangents, along * shift, strict=True)
        ]
        return hold(*arguments), (*held, shift)

    return hold


def _wide(x: jax.Array) -> Any:
    return jnp.float64 if jnp.finfo(x.dtype).bits == 64 else jnp.float32


def _give_back(degree: float, value: jax.Array, zeros: jax.Array) -> jax.Array:
    """Returns a value whose derivative has the part along the arguments, too."""

    @jax.custom_jvp
    def give_back(value: jax.Array, zeros: jax.Array) -> jax.Array:
        del zeros
        return value

    @give_back.defjvp
    def push(
        operands: Sequence[jax.Array], tangents: Sequence[jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        (value, _), (of_value, of_zeros) = operands, tangents
        return value, of_value + degree * value * of_zeros

    return give_back(value, zeros)
