"""The bitmask codec: exactness, layout, goldens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dafjax._native import _reference
from dafjax.codecs import Bitmask
from tests import oracle
from tests.helpers import assert_same_bits, like


def test_booleans_survive_exactly(key: jax.Array) -> None:
    mask = jax.random.bernoulli(key, 0.3, (3, 1000))
    assert_same_bits(Bitmask().decode(Bitmask().encode(mask), like(mask)), mask)


@pytest.mark.parametrize("element", [0, 1, 31, 32, 33, 479, 480, 511, 512, 1024, 1299])
def test_each_element_has_its_bit(element: int) -> None:
    # Element e of a tile is bit e // 32 of word e % 32: README, section 1.
    mask = jnp.zeros(1300, bool).at[element].set(True)
    words = np.zeros(3 * 32, np.uint16)
    tile, place = divmod(element, 512)
    words[tile * 32 + place % 32] = 1 << (place // 32)
    assert_same_bits(Bitmask().encode(mask), words)


@pytest.mark.parametrize("size", [1, 31, 33, 511, 513, 1023])
def test_padding_bits_are_zero(size: int) -> None:
    words = np.asarray(Bitmask().encode(jnp.ones(size, bool)))
    assert int(np.bitwise_count(words).sum()) == size


def test_bitmask_equals_the_oracle_at_many_sizes(rng: np.random.Generator) -> None:
    mask = rng.random((1026, 1536)) < 0.5
    sizes = np.arange(1026)
    mask &= np.arange(1536) < sizes[:, None]
    (plane,) = oracle.pack_planes(mask.astype(np.uint32), bits=1)
    for size in sizes[::93]:
        words = Bitmask().encode(jnp.asarray(mask[size, :size]))
        assert_same_bits(words, plane[size, : -(-size // 512)].reshape(-1))


@pytest.mark.parametrize("size", [0, 1, 513, 1300])
def test_the_reference_equals_the_custom_call(size: int, key: jax.Array) -> None:
    mask = jax.random.bernoulli(key, 0.5, (2, size))
    words = jax.vmap(Bitmask().encode)(mask)
    assert_same_bits(jax.jit(_reference.pack_bitmask)(mask), words)
    unpack = jax.jit(lambda w: _reference.unpack_bitmask(w, size=size))
    assert_same_bits(unpack(words), mask)


def test_the_seed_is_not_used(key: jax.Array) -> None:
    mask = jax.random.bernoulli(key, 0.5, (600,))
    assert_same_bits(Bitmask().encode(mask, seed=1), Bitmask().encode(mask, seed=2))


def test_masks_do_not_hide_derivatives(key: jax.Array) -> None:
    x = jax.random.normal(key, (100,))

    def cubed_where_positive(x: jax.Array) -> jax.Array:
        words = Bitmask().encode(x > 0)
        mask = Bitmask().decode(words, jax.ShapeDtypeStruct((100,), bool), after=(x,))
        return jnp.sum(jnp.where(mask, x**3, 0.0))

    hessian = jax.hessian(cubed_where_positive)(x)
    np.testing.assert_allclose(hessian, jnp.diag(6 * jnp.maximum(x, 0)), rtol=1e-6)
