"""Where a sine or a cosine is recomputed from codes, they are codes of a phase."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import dafjax
from dafjax._passes.nonlinear import phase
from dafjax._plan.plan import record_plans
from dafjax.policies import CompressDots
from tests.helpers import relative_error


KEY = jax.random.key(0)
W = jax.random.normal(jax.random.fold_in(KEY, 1), (64, 64)) / 8
X = jax.random.normal(jax.random.fold_in(KEY, 2), (256, 64))


def plan_of(function, *arguments):
    with record_plans() as recorder:
        jax.jit(jax.grad(function)).lower(*arguments)
    (plan,) = {plan.fingerprint: plan for plan in recorder.plans.values()}.values()
    return plan


def num_phases(plan):
    return sum(eqn.primitive == "phase" for eqn in plan.program.forward)


@pytest.mark.parametrize("size", [1, 100, 1e4, 4e5])
def test_a_phase_has_the_sine_of_its_argument(size):
    """But for an error of less than what float32 leaves of the argument itself."""
    x = jax.random.uniform(KEY, (4096,), minval=-size, maxval=size)
    found = np.float64(phase(x))
    assert np.all(np.abs(found) <= np.pi + size * 1e-7)
    exact = np.float64(x)
    allowed = 1e-6 + np.abs(exact) * 2e-8
    assert np.all(np.abs(np.sin(found) - np.sin(exact)) <= allowed)
    assert np.all(np.abs(np.cos(found) - np.cos(exact)) <= allowed)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_phase_of_few_digits_is_made_with_more(dtype):
    x = jax.random.uniform(KEY, (4096,), minval=-500, maxval=500).astype(dtype)
    found = phase(x)
    assert found.dtype == x.dtype
    error = np.sin(np.float64(found)) - np.sin(np.float64(x))
    assert np.all(np.abs(error) <= 4 * float(jnp.finfo(dtype).eps))


def test_sine_and_cosine_share_a_phase():
    def loss(w):
        y = X @ w
        return jnp.mean((jnp.sin(y) @ w) * jnp.cos(y))

    plan = plan_of(dafjax.remat_compress(loss), W)
    assert num_phases(plan) == 1
    assert [kept.primitive for kept in plan.kept].count("phase") == 1
    assert all(kept.primitive != "dot_general" or kept.codec for kept in plan.kept)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_forward_pass_reads_no_phase(dtype):
    def loss(w):
        return jnp.sum(jnp.sin(100 * (X.astype(dtype) @ w)) @ w)

    w = W.astype(dtype)
    got, _ = jax.value_and_grad(dafjax.remat_compress(loss))(w)
    np.testing.assert_array_equal(got, loss(w))


def test_what_follows_from_arguments_needs_no_phase():
    """As the positions of a transformer do."""

    def loss(w, x):
        return jnp.sum((jnp.sin(x) * (X @ w)) @ w)

    assert num_phases(plan_of(dafjax.remat_compress(loss), W, X)) == 0


@pytest.mark.parametrize("policy", [CompressDots(), dafjax.policies.SaveAll()])
def test_other_policies_decide_for_themselves(policy):
    def loss(w):
        return jnp.sum(jnp.sin(X @ w) @ w)

    plan = plan_of(dafjax.remat_compress(loss, policy=policy), W)
    assert num_phases(plan) == 0


def test_a_phase_has_the_names_of_its_argument():
    def loss(w):
        with jax.named_scope("layer"):
            y = checkpoint_name(X @ w, "argument")
        with jax.named_scope("activation"):
            y = jnp.sin(y)
        return jnp.sum(y @ w)

    def bits(**named):
        plan = plan_of(dafjax.remat_compress(loss, bits=dafjax.Bits(2, **named)), W)
        (kept,) = (kept for kept in plan.kept if kept.primitive == "phase")
        return kept.codec.bits

    assert bits() == 4
    assert bits(names={"argument": 8}) == 8
    assert bits(names={"layer": 8}) == 8
    assert bits(names={"activation": 8}) == 4


def encoded(w, x):
    """A network of positions encoded in frequencies up to 64."""
    positions = x[:, :8] @ w["in"]
    frequencies = jnp.exp2(jnp.arange(0.0, 8.0, 2.0))
    y = jnp.sin((positions[..., jnp.newaxis] * frequencies).reshape(len(x), -1))
    return jnp.mean(jax.nn.relu(y @ w["hidden"]) ** 2)


def of_sines(w, x):
    """A network whose layers are sines of many periods."""
    y = jnp.sin(30 * x[:, :8] @ w["in"] @ w["wide"])
    return jnp.mean(jnp.sin(30 * y @ w["hidden"]) @ w["hidden"][:, :1])


def encoded_in_loop(w, x):
    def step(y, w):
        return jnp.sin(20 * y @ w), None

    y, _ = jax.lax.scan(step, x[:, :32], jnp.stack([w["hidden"]] * 3))
    return jnp.mean(y**2)


def draws(loss, num_draws=64, **options):
    """Returns gradients by weights at 2 bits with noise of their own; and the exact."""
    keys = jax.random.split(KEY, 4)
    w = {
        "in": jax.random.normal(keys[0], (8, 8)) / 2,
        "wide": jax.random.normal(keys[1], (8, 32)) / 3,
        "hidden": jax.random.normal(keys[2], (32, 32)) / 5,
    }
    x = jax.random.normal(keys[3], (1024, 64))

    @jax.jit
    def draw(seed):
        return flat(jax.grad(dafjax.remat_compress(loss, seed=seed, **options))(w, x))

    def flat(gradients):
        return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(gradients)])

    noisy = np.stack([draw(np.uint32(seed)) for seed in range(num_draws)])
    return noisy, np.asarray(flat(jax.jit(jax.grad(loss))(w, x)))


def bias(loss, **options):
    """Returns the error of the mean gradient, over that of a mean without bias."""
    noisy, exact = draws(loss, **options)
    mean = noisy.mean(0)
    noise = np.sqrt(np.mean([relative_error(g, mean) ** 2 for g in noisy]))
    return relative_error(mean, exact) / (noise / np.sqrt(len(noisy)))


@pytest.mark.parametrize("loss", [encoded, of_sines, encoded_in_loop])
def test_gradients_through_sines_of_many_periods_are_unbiased(loss):
    assert bias(loss) < 1.3


@pytest.mark.parametrize("loss", [encoded, encoded_in_loop])
def test_without_phases_they_are_not(loss, stochastic):
    assert bias(loss, without_passes=["sine_phase"]) > 3
