"""Plans as values: saved, compared, followed."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dafjax
from dafjax.codecs import Affine
from tests import networks


@pytest.fixture
def example(key):
    params = networks.mlp_params(key, (64, *(256,) * 5, 64))
    return params, jax.random.normal(key, (1024, 64))


def looped(params, x):
    stacked = jax.tree.map(lambda w: jnp.stack([w, w]), params[1])

    def step(x, p):
        return jax.lax.cond(jnp.sum(x) > 0, jnp.tanh, jnp.sin, x @ p["w"]), None

    x, _ = jax.lax.scan(step, x @ params[0]["w"], stacked)
    return jnp.mean(x**2)


def pooled(params, x):
    """Two poolings; the first is of what has to be kept whole, for it is sorted."""
    for n in (0, 1):
        x = jax.nn.relu(x @ params[n]["w"])
        x = jax.lax.sort(x) if n == 0 else x
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 1), (2, 1), "VALID")
    return jnp.mean(x**2)


LOSSES = [networks.mlp_loss, looped, pooled]
every_loss = pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)


def plan_of(loss, example, **options):
    return dafjax.saved_residuals(dafjax.remat_compress(loss, **options), *example)


@every_loss
def test_a_plan_survives_a_file(loss, example, tmp_path):
    plan = plan_of(loss, example)
    plan.save(tmp_path / "plan.json")
    loaded = dafjax.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert hash(loaded) == hash(plan)
    assert str(loaded) == str(plan)
    assert loaded != plan_of(loss, example, bits=4)


@every_loss
def test_what_follows_a_plan_keeps_the_same(loss, example):
    plan = plan_of(loss, example, bits=4)
    # The plan decides, not what the options would choose.
    followed = plan_of(loss, example, policy=plan, bits=1)
    assert followed == plan


@every_loss
def test_what_follows_a_plan_computes_the_same(loss, example, tmp_path):
    plan = plan_of(loss, example)
    plan.save(tmp_path / "plan.json")
    policy = dafjax.Plan.load(tmp_path / "plan.json")
    free = dafjax.remat_compress(loss)
    follower = dafjax.remat_compress(loss, policy=policy, bits=8)
    # A plan is of certain arguments: here all are differentiated.
    want, got = (jax.grad(f, argnums=(0, 1))(*example) for f in (free, follower))
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_plan_can_be_changed_by_hand(example, tmp_path):
    plan = plan_of(networks.mlp_loss, example)
    plan.save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    place = next(n for n, row in enumerate(content["kept"]) if row["codec"])
    content["kept"][place]["codec"]["bits"] = 8
    (tmp_path / "plan.json").write_text(json.dumps(content))
    changed = dafjax.Plan.load(tmp_path / "plan.json")
    followed = plan_of(networks.mlp_loss, example, policy=changed)
    assert followed.kept[place].codec == Affine(bits=8, rounding="dithered")
    assert followed.stored_nbytes > plan.stored_nbytes


def test_a_plan_of_another_function_is_refused(example):
    params, x = example
    plan = plan_of(networks.mlp_loss, example)
    wrapped = dafjax.remat_compress(networks.mlp_loss, policy=plan)
    with pytest.raises(ValueError, match=r"plan of 1 functions.*other shapes"):
        jax.grad(wrapped)(params, x[:512])


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "[]", '{"format": 2}', '{"format": 1, "kept": [{}]}'),
        '{"format": 1, "kept": [], "spare": 3, "programs": []}',
    ],
)
def test_a_file_that_is_no_plan_is_refused(text, tmp_path):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ValueError, match=r"plan\.json` is not a plan"):
        dafjax.Plan.load(tmp_path / "plan.json")


def test_random_keys_survive_a_file(tmp_path):
    @dafjax.remat_compress
    def loss(w, seed):
        key = jax.random.key(jnp.sum(seed))
        return jnp.sum((w @ w) * jax.random.normal(key, w.shape) @ w)

    plan = dafjax.saved_residuals(
        lambda w: loss(w, jnp.arange(3)), jnp.ones((256, 256))
    )
    plan.save(tmp_path / "plan.json")
    loaded = dafjax.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert str(loaded) == str(plan)


def test_equal_functions_with_other_options_cannot_be_told_apart():
    def block(w, x):
        return jnp.tanh(x @ w)

    coarse, fine = (dafjax.remat_compress(block, bits=bits) for bits in (2, 8))
    w = jnp.ones((256, 256))
    with pytest.raises(NotImplementedError, match=r"other options|different options"):
        dafjax.saved_residuals(lambda w: jnp.sum(coarse(w, fine(w, w))), w)
