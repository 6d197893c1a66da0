"""The contract of every store."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dafjax
from dafjax.codecs import Affine, Bitmask
from dafjax.stores import Arrays, Host, PagePool
from tests import networks
from tests.helpers import assert_same_bits, like


@pytest.fixture(params=[Arrays, Host, PagePool])
def store(request):
    return request.param()


def test_what_is_put_can_be_got_any_number_of_times(store):
    packed = {"codes": jnp.arange(7, dtype=jnp.uint16), "scale": (jnp.ones(2), None)}
    handle = store.put(packed)
    for _ in range(2):
        got = store.get(handle)
        assert jax.tree.structure(got) == jax.tree.structure(packed)
        jax.tree.map(np.testing.assert_array_equal, got, packed)


def test_a_handle_can_be_stacked_by_scan(store):
    rows = jnp.arange(12, dtype=jnp.uint16).reshape(3, 4)

    @jax.jit
    def there_and_back(rows):
        _, handles = jax.lax.scan(lambda c, row: (c, store.put(row)), None, rows)
        _, got = jax.lax.scan(lambda c, h: (c, store.get(h)), None, handles)
        return got

    np.testing.assert_array_equal(there_and_back(rows), rows)


@pytest.mark.parametrize("codec", [Affine(bits=4), Affine(bits=3), Bitmask()], ids=repr)
def test_the_codec_of_a_store_gives_what_was_wanted(store, codec, key):
    x = jax.random.normal(key, (3, 700))
    x = x > 0 if isinstance(codec, Bitmask) else x
    chosen = store.codec(codec, site="x")
    handle = store.put(chosen.encode(x, seed=5))
    want = codec.decode(codec.encode(x, seed=5), like(x))
    for _ in range(2):
        assert_same_bits(chosen.decode(store.get(handle), like(x)), want)


def test_codecs_of_stores_are_hashable_data(store):
    codecs = [store.codec(Affine(bits=4), site=site) for site in ("a", "a", "b")]
    assert codecs[0] == codecs[1]
    assert hash(codecs[0]) == hash(codecs[1])
    assert (codecs[0] == codecs[2]) == (not isinstance(store, PagePool))


@pytest.mark.parametrize("kind", [Arrays, Host])
def test_stores_are_hashable_data(kind):
    assert hash(kind()) == hash(kind())
    assert kind() == kind()


def test_a_pool_is_its_name():
    one, other = PagePool(name="one"), PagePool(name="other")
    assert len({one, other, one}) == 2


@functools.cache
def gradient_with_arrays():
    p, x = networks.conv_example(jax.random.key(0))
    return p, x, jax.jit(jax.grad(dafjax.remat_compress(networks.conv_loss)))(p, x)


@pytest.mark.parametrize("store", [Host, PagePool], indirect=True)
def test_gradients_do_not_depend_on_the_store(store, stochastic):
    p, x, want = gradient_with_arrays()
    got = jax.jit(jax.grad(dafjax.remat_compress(networks.conv_loss, store=store)))(
        p, x
    )
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_host_s_packed_arrays_are_in_its_memory():
    jaxpr = jax.make_jaxpr(Host().put)(jnp.ones(3))
    assert "<host>" in str(jaxpr.out_avals[0])
