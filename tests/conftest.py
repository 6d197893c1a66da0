"""Two CPU devices, strict dtype promotion, and a key for every test."""

import os
import zlib


# Before JAX is imported: the number of devices is fixed when its backend starts.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import pytest


jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def key(request: pytest.FixtureRequest) -> jax.Array:
    """A PRNG key that depends on the test's name alone."""
    return jax.random.key(_number(request))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A NumPy generator that depends on the test's name alone."""
    return np.random.default_rng(_number(request))


def _number(request: pytest.FixtureRequest) -> int:
    return zlib.crc32(request.node.name.encode())
