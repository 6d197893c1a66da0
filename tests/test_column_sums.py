"""Sums over all but the channels, taken where an array is packed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import dafjax
from dafjax._native import Format, pack_affine_and_sum
from dafjax.codecs import Affine
from tests.helpers import assert_same_bits


COLUMNS = Affine(bits=2, blocks="columns")
CODE = {"format": Format(2, 256, columns=4)}


@pytest.mark.parametrize(
    "codec", [COLUMNS, Affine(bits=2), Affine(4, blocks="columns")]
)
@pytest.mark.parametrize("shape", [(8, 12, 12, 48), (640, 7), (3, 5)])
def test_packing_gives_the_sums(codec, shape, rng):
    x = jnp.asarray(rng.standard_normal(shape, np.float32))
    packed, total, of_squares = codec.encode_and_sum(x, seed=7)
    jax.tree.map(assert_same_bits, packed, codec.encode(x, seed=7))
    axes = tuple(range(len(shape) - 1))
    exact = np.asarray(x, np.float64)
    np.testing.assert_allclose(total, exact.sum(axes), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(of_squares, (exact**2).sum(axes), rtol=1e-5)


def test_only_float32_in_columns_is_summed_so():
    like = jax.ShapeDtypeStruct((8, 12, 12, 48), jnp.float32)
    assert COLUMNS.sums_columns(like)
    assert not Affine(bits=2).sums_columns(like)
    assert not COLUMNS.sums_columns(like.update(dtype=jnp.bfloat16))
    assert not COLUMNS.sums_columns(like.update(shape=(48,)))


@pytest.mark.parametrize("axes", [(0, None), (1, 0), (None, 0)])
def test_a_batch_of_arrays_is_packed_and_summed_one_by_one(axes, rng):
    pack = functools.partial(pack_affine_and_sum, **CODE)
    x = jnp.asarray(rng.standard_normal((3, 2, 1024), np.float32))
    x = x[0] if axes[0] is None else jnp.moveaxis(x, 0, axes[0])
    seeds = jnp.arange(3, dtype=jnp.uint32)
    seed = jnp.uint32(5) if axes[1] is None else seeds
    results = jax.vmap(pack, in_axes=axes)(x, seed)
    for number in range(3):
        one = x if axes[0] is None else jnp.take(x, number, axis=axes[0])
        expected = pack(one, seed if axes[1] is None else seeds[number])
        for found, wanted in zip(results[:3], expected[:3], strict=True):
            assert_same_bits(found[number], wanted)
        for found, wanted in zip(results[3:], expected[3:], strict=True):
            np.testing.assert_allclose(found[number], wanted, rtol=1e-5, atol=1e-4)


def test_what_cannot_be_summed_is_refused():
    x = jnp.ones((2, 512))
    with pytest.raises(ValueError, match="`columns` must be at least 1, not 0"):
        pack_affine_and_sum(x, jnp.uint32(0), format=Format(2, 256))
    with pytest.raises(TypeError, match="`x` must be float32, not bfloat16"):
        pack_affine_and_sum(x.astype(jnp.bfloat16), jnp.uint32(0), **CODE)
    with pytest.raises(NotImplementedError, match="bits=None"):
        jax.jvp(
            lambda x: pack_affine_and_sum(x, jnp.uint32(0), **CODE),
            (x,),
            (x,),
        )


class Layer(nn.Module):
    """A convolution, a norm and a rectifier, as in a ResNet."""

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.Conv(32, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
        return x


def norms_example():
    module = Layer()
    x = jax.random.normal(jax.random.key(1), (8, 16, 16, 32))
    variables = jax.jit(module.init)(jax.random.key(0), x)

    def loss(params, x):
        y, updates = module.apply(
            {**variables, "params": params}, x, mutable=["batch_stats"]
        )
        return jnp.mean(y**2), updates

    return loss, variables["params"], x


def test_norms_of_convolutions_read_the_sums_of_what_is_packed():
    loss, params, x = norms_example()
    wrapped = dafjax.remat_compress(loss, bits=2)
    traced = str(jax.make_jaxpr(jax.grad(wrapped, has_aux=True))(params, x))
    assert traced.count("dafjax_pack_affine_and_sum[") == 2
    assert traced.count("dafjax_pack_affine[") == 0


def test_statistics_and_gradients_are_those_of_the_plain_norms():
    loss, params, x = norms_example()
    wrapped = dafjax.remat_compress(loss, bits=8)
    expected, of_plain = jax.jit(jax.grad(loss, has_aux=True))(params, x)
    found, updates = jax.jit(jax.grad(wrapped, has_aux=True))(params, x)
    for value, wanted in zip(
        jax.tree.leaves(updates), jax.tree.leaves(of_plain), strict=True
    ):
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)
    for value, wanted in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(value, wanted, atol=0.03 * jnp.abs(wanted).max())


def test_without_a_norm_packing_sums_nothing():
    w = jnp.ones((3, 3, 32, 32))

    def loss(w, x):
        for _ in range(2):
            x = jnp.tanh(
                jax.lax.conv_general_dilated(
                    x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
            )
        return jnp.sum(x)

    gradient = jax.grad(dafjax.remat_compress(loss, bits=2))
    traced = str(jax.make_jaxpr(gradient)(w, jnp.ones((8, 16, 16, 32))))
    assert "dafjax_pack_affine[" in traced
    assert "and_sum" not in traced
