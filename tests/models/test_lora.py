"""Adapters, and the division of variables into trained and frozen ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import lora


VARIABLES = {
    "params": {"head": {"kernel": 1, "bias": 2}, "header": 3, "body": 4},
    "lora": {"a": 5},
}


def test_split_and_merge_are_inverse():
    trained, frozen = lora.split(VARIABLES, ("lora", "params/head"))
    assert trained == {"params": {"head": {"kernel": 1, "bias": 2}}, "lora": {"a": 5}}
    assert frozen == {"params": {"header": 3, "body": 4}}
    assert lora.merge(trained, frozen) == VARIABLES


def test_what_is_trained_may_be_everything():
    assert lora.split(VARIABLES, ("params", "lora")) == (VARIABLES, {})


def test_a_path_that_leads_nowhere_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"path 'params/hat', but .* params/head"):
        lora.split(VARIABLES, ("params/hat",))


def test_an_adapter_is_the_scaled_product_of_its_factors(key):
    x = jax.random.normal(key, (2, 5, 6))
    adapter = lora.LoRA(rank=3, alpha=12.0, features=4)
    variables = adapter.init(key, x)
    assert not jnp.any(adapter.apply(variables, x))
    a, b = (jax.random.normal(key, shape) for shape in ((6, 3), (3, 4)))
    got = adapter.apply({"lora": {"a": a, "b": b}}, x)
    np.testing.assert_allclose(got, x @ (12 / 3 * a @ b), rtol=1e-5, atol=1e-5)


def test_an_adapter_computes_in_its_dtype_and_keeps_its_factors_in_float32(key):
    x = jax.random.normal(key, (5, 6), jnp.bfloat16)
    adapter = lora.LoRA(rank=3, alpha=12.0, features=4, dtype=jnp.bfloat16)
    variables = adapter.init(key, x)
    assert adapter.apply(variables, x).dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype("float32")}
