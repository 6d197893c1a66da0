"""Which values enter cotangents that meet residuals, and what ignoring it costs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dafjax
from dafjax._plan.analysis import find_steering
from dafjax.codecs import Affine
from dafjax.policies import AbstractPolicy, CompressExpensive
from tests import networks
from tests.helpers import prepared


def steering_primitives(loss, *arguments):
    """Returns the primitives that make what steers."""
    closed = jax.make_jaxpr(loss)(*arguments)
    program = prepared(closed, [True] * len(arguments))
    steering = find_steering(program)
    return {
        eqn.primitive for eqn in program.forward if not steering.isdisjoint(eqn.outputs)
    }


def test_what_only_gradients_of_arguments_read_does_not_steer():
    # d/dw of sum(sin(x) @ w): sin(x) meets the cotangent of a sum.
    def loss(w):
        return jnp.sum(jnp.sin(jnp.ones((8, 8))) @ w)

    assert steering_primitives(loss, jnp.ones((8, 8))) == set()


def test_what_enters_a_cotangent_that_meets_a_residual_steers():
    def loss(w, v):
        return jnp.sum(jnp.sin(jnp.sin(jnp.ones((8, 8)) @ w) @ v))

    # The outer cosine goes on to meet sin(.) in the gradient of v and the inner cosine.
    assert "cos" in steering_primitives(loss, jnp.ones((8, 8)), jnp.ones((8, 8)))


def test_a_sum_steers_and_its_operands_do_not():
    def loss(w, v):
        x = jnp.ones((8, 8)) @ w
        return jnp.sum(jnp.sin(x + x @ v))

    steering = steering_primitives(loss, jnp.ones((8, 8)), jnp.ones((8, 8)))
    assert {"cos", "add"} <= steering
    assert "dot_general" not in steering


def test_steering_reaches_back_through_what_is_recomputed():
    def loss(w, v):
        y = jnp.ones((8, 8)) @ w
        return jnp.sum(jnp.square(jnp.sin(y + 1.0) @ v))

    assert "add" in steering_primitives(loss, jnp.ones((8, 8)), jnp.ones((8, 8)))


@dataclasses.dataclass(frozen=True)
class IgnoresSteering(AbstractPolicy):
    rule: CompressExpensive

    def __call__(self, residual):
        return self.rule(dataclasses.replace(residual, steers=False))


def mean_error(policy, num_seeds=48):
    """Returns the deviation of the mean gradient at 2 bits from the exact one."""
    params, x = networks.conv_example(jax.random.key(0), depth=3)
    loss = networks.conv_loss

    @jax.jit
    def gradient(seed):
        # Bits by use would make the noise small that meets itself.
        bits = dafjax.Bits(2, nonlinear=2)
        wrapped = dafjax.remat_compress(loss, bits=bits, policy=policy, seed=seed)
        return jax.grad(wrapped)(params, x)

    def flat(tree):
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])

    exact = flat(jax.jit(jax.grad(loss))(params, x))
    mean = np.mean([flat(gradient(jnp.uint32(s))) for s in range(num_seeds)], axis=0)
    return np.linalg.norm(mean - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("max_sources", [1, 3])
def test_gradients_are_unbiased_however_long_chains_are(max_sources):
    policy = CompressExpensive(min_nbytes=256, max_sources=max_sources)
    assert mean_error(policy) < 0.08


def test_noise_that_meets_itself_is_a_bias():
    # Blocks of columns would have less noise to meet itself.
    rule = CompressExpensive(codec=Affine(bits=2), min_nbytes=256)
    assert mean_error(IgnoresSteering(rule)) > 0.3
