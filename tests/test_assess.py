"""`dafjax.assess` tells noise from bias, and names the residuals that bring noise."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dafjax
from dafjax._assess import array_noise


W = {"first": jnp.eye(64), "second": jnp.ones((64, 64)) / 8, "unused": jnp.ones(64)}
X = jax.random.normal(jax.random.key(0), (512, 64))


def loss(w, x):
    return jnp.mean(jax.nn.gelu(x @ w["first"]) @ w["second"]) + 0 * w["unused"].sum()


@pytest.fixture(scope="module")
def found():
    return dafjax.assess(loss, W, X, bits=(8, 2), rounds=1, seeds=4)


def test_fewer_bits_have_more_noise_and_less_memory(found):
    most, least = found.settings
    assert 0 < most.noise(50) < least.noise(50)
    assert least.temp_nbytes <= most.temp_nbytes
    assert set(most.arrays) == {"['first']", "['second']"}


def test_a_wrapped_loss_is_compared_with_the_original(found):
    wrapped = dafjax.remat_compress(loss)
    again = dafjax.assess(wrapped, W, X, bits=(8, 2), rounds=1, seeds=4)
    assert again.plain_temp_nbytes == found.plain_temp_nbytes
    for one, other in zip(again.settings, found.settings, strict=True):
        assert one.arrays == other.arrays
        assert one.temp_nbytes == other.temp_nbytes
    assert again.residuals == found.residuals


def test_a_network_whose_residuals_need_more_than_the_default_bits():
    """Queries and keys of long sequences have 8 bits: an average of 2 is too few."""

    def attention_loss(w, x):
        scores = (x @ w["first"]) @ (x @ w["second"]).T / 8
        return jnp.mean(jax.nn.softmax(scores)[:, ::2] ** 2)

    found = dafjax.assess(attention_loss, W, X, bits=(2,), rounds=1, seeds=2)
    assert sum(r.share for r in found.residuals) == pytest.approx(1)


def test_residuals_have_shares_and_source_lines(found):
    assert sum(r.share for r in found.residuals) == pytest.approx(1)
    assert any("test_assess.py" in r.source for r in found.residuals)


def test_it_prints_and_is_json(found):
    assert "noise: median" in str(found)
    assert "2 (default)" in str(found)
    assert found.noisy == ()
    assert json.loads(found.to_json())["settings"][0]["bits"] == "8"


def test_noisy_arrays_and_their_residuals_are_named():
    """A later norm divides the gain out: its gradient is nearly zero."""

    def noisy_loss(w, x):
        y = x @ jax.lax.stop_gradient(w["first"]) * jnp.exp(w["gain"])
        y = y * jax.lax.rsqrt(jnp.mean(y * y, 0) + 1e-3)
        nearly_nothing = jnp.mean(jax.nn.relu(y) @ w["second"])
        return jnp.mean((x @ w["first"] @ w["second"]) ** 2) + nearly_nothing

    params = {**W, "gain": jnp.zeros(64)}
    with pytest.warns(UserWarning, match="`assess`: At the default bits") as caught:
        found = dafjax.assess(noisy_loss, params, X, bits=(2,), rounds=1, seeds=4)
    assert found.noisy == ("['gain']",)
    assert "['gain']" in str(found)
    assert found.residuals[0].share > 0.9
    assert found.residuals[0].name in str(caught[0].message)
    assert "test_assess.py" in found.residuals[0].source


def test_bias_is_told_from_noise():
    draw = np.random.default_rng(0)
    exact = {"a": np.ones(10_000), "b": np.full(10_000, 1e-9)}
    noise = draw.normal(size=(16, 10_000))
    unbiased = [{"a": exact["a"] + n, "b": exact["b"]} for n in noise]
    biased = [{"a": exact["a"] * 1.2 + n, "b": exact["b"]} for n in noise]
    found, shifted = array_noise(exact, unbiased), array_noise(exact, biased)
    assert set(found) == {"a"}
    assert found["a"].noise == pytest.approx(1, rel=0.05)
    assert found["a"].bias ** 2 < 3 * found["a"].bias_error
    assert shifted["a"].bias == pytest.approx(0.2, rel=0.1)


def test_a_part_of_the_batch_where_memory_is_short():
    plain = jax.jit(jax.grad(loss)).lower(W, X).compile().memory_analysis()
    limit = plain.temp_size_in_bytes // 2
    found = dafjax.assess(loss, W, X, bits=(2,), rounds=1, seeds=2, memory=limit)
    assert found.num_examples in (64, 128, 256)
    assert found.plain_temp_nbytes <= limit
    assert str(found.num_examples) in str(found)
    with pytest.raises(ValueError, match="of one example takes"):
        dafjax.assess(loss, W, X, memory=1)


def test_auxiliary_results_and_options():
    found = dafjax.assess(
        lambda w, x: (loss(w, x), x),
        W,
        X,
        bits=("tight",),
        rounds=1,
        seeds=2,
        has_aux=True,
        max_parts=1,
    )
    assert found.settings[0].noise(100) > 0


def test_one_seed_is_too_few():
    with pytest.raises(ValueError, match="at least 2"):
        dafjax.assess(loss, W, X, seeds=1)
