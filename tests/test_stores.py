"""The contract of every store."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dafjax
from dafjax.stores import Arrays, Host
from tests import networks


ALL_STORES = (Arrays(), Host())


@pytest.mark.parametrize("store", ALL_STORES, ids=repr)
def test_what_is_put_can_be_got_any_number_of_times(store):
    packed = {"codes": jnp.arange(7, dtype=jnp.uint16), "scale": (jnp.ones(2), None)}
    handle = store.put(packed)
    for _ in range(2):
        got = store.get(handle)
        assert jax.tree.structure(got) == jax.tree.structure(packed)
        jax.tree.map(np.testing.assert_array_equal, got, packed)


@pytest.mark.parametrize("store", ALL_STORES, ids=repr)
def test_a_handle_can_be_stacked_by_scan(store):
    rows = jnp.arange(12, dtype=jnp.uint16).reshape(3, 4)

    @jax.jit
    def there_and_back(rows):
        _, handles = jax.lax.scan(lambda c, row: (c, store.put(row)), None, rows)
        _, got = jax.lax.scan(lambda c, h: (c, store.get(h)), None, handles)
        return got

    np.testing.assert_array_equal(there_and_back(rows), rows)


@pytest.mark.parametrize("store", ALL_STORES, ids=repr)
def test_stores_are_hashable_data(store):
    assert hash(store) == hash(type(store)())
    assert store == type(store)()


@pytest.mark.parametrize("store", ALL_STORES, ids=repr)
def test_gradients_do_not_depend_on_the_store(store, key):
    p, x = networks.conv_example(key, depth=2)
    want = jax.grad(dafjax.remat_compress(networks.conv_loss))(p, x)
    got = jax.jit(jax.grad(dafjax.remat_compress(networks.conv_loss, store=store)))(
        p, x
    )
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_host_s_packed_arrays_are_in_its_memory():
    jaxpr = jax.make_jaxpr(Host().put)(jnp.ones(3))
    assert "<host>" in str(jaxpr.out_avals[0])
