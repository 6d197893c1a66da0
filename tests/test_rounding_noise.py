"""What is sampled of an array tells the variance of its rounding to 1 bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dafjax.codecs import Affine
from dafjax.codecs._affine import sample_rounding_noise


pytestmark = pytest.mark.usefixtures("standard_promotion")


def noise_of(x, **code):
    return float(sample_rounding_noise(Affine(**code), jnp.asarray(x)))


@pytest.mark.parametrize("blocks", ["rows", "columns"])
@pytest.mark.parametrize(
    ("shape", "power"),
    [
        ((256, 128), 1),
        ((256, 128), 8),
        ((8, 40, 40, 16), 8),
        ((1 << 15,), 1),
        ((100, 3000), 8),
        ((7, 5, 480), 1),
    ],
)
def test_it_is_the_measured_variance_over_the_squared_range(shape, blocks, power):
    rng = np.random.default_rng(0)
    # Channels differ, and with a power most elements lie near the lower end.
    x = rng.uniform(0, 1, shape) ** power + 3 * rng.standard_normal(shape[-1])
    x = jnp.asarray(x, jnp.float32)
    codec = Affine(bits=1, blocks=blocks)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    errors = [codec.decode(codec.encode(x, seed=s), like) - x for s in range(4)]
    variance = float(np.mean(np.square(errors)))
    scale = np.asarray(codec.encode(x).scale, np.float32)
    # Blocks of several channels are full ones, but for the last of a row.
    squared_range = np.mean(scale[scale > 0] ** 2)
    assert noise_of(x, blocks=blocks) == pytest.approx(
        variance / squared_range, rel=0.2
    )


def test_what_lies_at_the_ends_of_its_block_is_not_rounded():
    rng = np.random.default_rng(0)
    evenly = rng.uniform(-1, 3, (256, 128)).astype(np.float32)
    at_ends = np.where(evenly > 1, 7.0, -2.0)
    in_the_middle = np.where(rng.uniform(size=evenly.shape) > 0.9, at_ends, 2.5)
    assert noise_of(evenly) == pytest.approx(1 / 6, rel=0.05)
    assert noise_of(at_ends) == 0
    assert noise_of(in_the_middle) == pytest.approx(0.9 / 4, rel=0.05)


@pytest.mark.parametrize("shape", [(), (0, 8), (8, 0), (3, 1, 1), (64, 64)])
@pytest.mark.parametrize("blocks", ["rows", "columns"])
def test_constant_and_empty_arrays_have_none(shape, blocks):
    assert noise_of(np.full(shape, 3.0, np.float32), blocks=blocks) == 0


def test_what_is_not_finite_is_not_hidden():
    x = np.ones((64, 64), np.float32)
    x[0] = np.nan
    assert np.isnan(noise_of(x))


@pytest.mark.parametrize(
    ("shape", "spec", "jit"),
    [
        ((256, 128), ("data",), jax.jit),
        ((9000, 96), ("data",), jax.jit),
        ((8, 96, 256), (None, None, "data"), jax.jit),
        ((3, 96, 256), (None, "data"), jax.jit),
        ((1 << 16,), ("data",), lambda f: f),
    ],
)
def test_it_is_the_same_where_types_say_how_devices_share_the_array(shape, spec, jit):
    mesh = Mesh(jax.devices()[:2], ("data",), axis_types=(AxisType.Explicit,))
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    shared = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
    codec = Affine(bits=2, block_size=64)
    found = jit(lambda x: sample_rounding_noise(codec, x))(shared)
    expected = sample_rounding_noise(codec, jnp.asarray(x))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
