"""Random data and weights of networks."""

import jax


def normal(seed: int, *shape: int) -> jax.Array:
    """Draws numbers of mean 0 and variance 1."""
    return jax.random.normal(jax.random.key(seed), shape)


def weights(seed: int, *shape: int) -> jax.Array:
    """Draws a matrix that keeps the variance of its input, `[..., in, out]`."""
    return normal(seed, *shape) / shape[-2] ** 0.5


def classes(seed: int, num_classes: int, *shape: int) -> jax.Array:
    """Draws labels."""
    return jax.random.randint(jax.random.key(seed), shape, 0, num_classes)
