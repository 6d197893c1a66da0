"""Losses of reinforcement learning and of learning to learn."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.zoo.draws import classes, normal
from benchmarks.zoo.network import Network, Networks, applied, initial
from benchmarks.zoo.parts import cross_entropy


class ActorCritic(nn.Module):
    """Convolutions over frames, to logits of actions and a value."""

    @nn.compact
    def __call__(self, frames: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = nn.relu(nn.Conv(32, (8, 8), 4)(frames.astype(jnp.float32) / 255))
        x = nn.relu(nn.Conv(64, (4, 4), 2)(x))
        x = nn.relu(nn.Conv(64, (3, 3))(x))
        x = nn.relu(nn.Dense(256)(x.reshape(len(x), -1)))
        return nn.Dense(6)(x), nn.Dense(1)(x)[:, 0]


def _ppo() -> Network:
    """The clipped objective (Schulman et al., 2017), of 16 steps in 16 games."""
    module = ActorCritic()
    frames = classes(2, 256, 16, 16, 48, 48, 4).astype(jnp.uint8)
    actions, rewards = classes(3, 6, 256), normal(4, 16, 16)
    params = initial(module, frames[0])
    old_logits, old_values = applied(module, params, frames.reshape(256, 48, 48, 4))
    old_logits += 0.3 * normal(5, *old_logits.shape)

    def advantages_of(values: jax.Array, rewards: jax.Array) -> jax.Array:
        """Sums errors of values backward in time, `[time, games]`."""
        following = jnp.concatenate([values[1:], values[-1:]])
        errors = rewards + 0.99 * following - values

        def step(later: jax.Array, error: jax.Array) -> tuple[jax.Array, jax.Array]:
            total = error + 0.99 * 0.95 * later
            return total, total

        _, out = lax.scan(step, jnp.zeros_like(errors[0]), errors, reverse=True)
        return out

    def loss(
        params: Any, frames: Any, actions: Any, rewards: Any, logits: Any, values: Any
    ) -> jax.Array:
        advantages = advantages_of(values.reshape(rewards.shape), rewards).ravel()
        targets = advantages + values
        advantages = (advantages - jnp.mean(advantages)) / (jnp.std(advantages) + 1e-8)
        frames = frames.reshape(-1, *frames.shape[2:])
        new_logits, new_values = applied(module, params, frames)
        log_probs = nn.log_softmax(new_logits)
        change = log_probs - nn.log_softmax(logits)
        ratio = jnp.exp(jnp.take_along_axis(change, actions[:, None], -1)[:, 0])
        clipped = jnp.clip(ratio, 0.8, 1.2)
        gain = jnp.minimum(ratio * advantages, clipped * advantages)
        entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, -1)
        errors = (new_values - targets) ** 2
        return jnp.mean(-gain + 0.5 * errors - 0.01 * entropy)

    return Network(loss, params, (frames, actions, rewards, old_logits, old_values))


class FewShot(nn.Module):
    """Convolutions with group norms, for tasks of five classes."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = nn.relu(nn.GroupNorm(4)(nn.Conv(32, (3, 3))(x)))
            x = nn.max_pool(x, (2, 2), (2, 2))
        return nn.Dense(5)(x.reshape(len(x), -1))


def _maml() -> Network:
    """Gradients of a step of gradient descent (Finn et al., 2017), for four tasks."""
    module = FewShot()
    images, labels = normal(2, 4, 2, 10, 20, 20, 3), classes(3, 5, 4, 2, 10)

    def task_loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(applied(module, params, images), labels)

    def adapted_loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        gradient = jax.grad(task_loss)(params, images[0], labels[0])
        adapted = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
        return task_loss(adapted, images[1], labels[1])

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        return jnp.mean(jax.vmap(adapted_loss, (None, 0, 0))(params, images, labels))

    return Network(loss, initial(module, images[0, 0]), (images, labels))


class Quality(nn.Module):
    """An estimate of the return of a state and an action."""

    @nn.compact
    def __call__(self, state: jax.Array, action: jax.Array) -> jax.Array:
        x = jnp.concatenate([state, action], -1)
        for _ in range(3):
            x = nn.relu(nn.LayerNorm()(nn.Dense(256)(x)))
        return nn.Dense(1)(x)[:, 0]


class Actor(nn.Module):
    """A normal distribution over actions, squashed."""

    @nn.compact
    def __call__(self, state: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = state
        for _ in range(2):
            x = nn.relu(nn.Dense(256)(x))
        mean, log_std = jnp.split(nn.Dense(12)(x), 2, -1)
        log_std = jnp.clip(log_std, -5, 2)
        noise = jax.random.normal(key, mean.shape)
        action = jnp.tanh(mean + jnp.exp(log_std) * noise)
        log_prob = -0.5 * noise**2 - log_std - jnp.log(1 - action**2 + 1e-6)
        return action, jnp.sum(log_prob, -1)


def _sac() -> Network:
    """The losses of both parts of a soft actor-critic (Haarnoja et al., 2018)."""
    actor, critic = Actor(), Quality()
    state, action, reward = normal(2, 1024, 24), normal(3, 1024, 6), normal(4, 1024)
    following, key = normal(5, 1024, 24), jax.random.key(6)
    params = {
        "actor": initial(actor, state, key),
        # Two of them, stacked.
        "critics": jax.vmap(
            lambda key: critic.init(key, state, jnp.tanh(action))["params"]
        )(jax.random.split(key)),
    }
    targets = jax.tree.map(lambda x: 0.9 * x, params["critics"])

    def least(critics: Any, state: jax.Array, action: jax.Array) -> jax.Array:
        quality = jax.vmap(lambda p: applied(critic, p, state, action))(critics)
        return jnp.min(quality, 0)

    def loss(
        params: Any,
        targets: Any,
        state: Any,
        action: Any,
        reward: Any,
        following: Any,
        key: Any,
    ) -> jax.Array:
        next_key, key = jax.random.split(key)
        next_action, log_prob = applied(actor, params["actor"], following, next_key)
        value = least(targets, following, next_action) - 0.2 * log_prob
        target = lax.stop_gradient(reward + 0.99 * value)
        quality = jax.vmap(lambda p: applied(critic, p, state, jnp.tanh(action)))(
            params["critics"]
        )
        own_action, log_prob = applied(actor, params["actor"], state, key)
        frozen = lax.stop_gradient(params["critics"])
        gain = least(frozen, state, own_action) - 0.2 * log_prob
        return jnp.mean((quality - target) ** 2) - jnp.mean(gain)

    return Network(loss, params, (targets, state, action, reward, following, key))


NETWORKS: Networks = {
    "ppo": _ppo,
    "sac": _sac,
    "maml": _maml,
}
