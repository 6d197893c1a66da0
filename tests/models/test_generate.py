"""Text from a language model: which tokens are chosen, and from how many."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.generate import generate, nucleus
from models.gpt2 import GPT2, GPT2Config


CONFIG = GPT2Config(2, width=32, num_heads=4, vocabulary=20, context=16)


@jax.jit
def init(key):
    variables = GPT2(CONFIG).init(key, jnp.zeros((1, 4), jnp.int32))
    # The logits of new weights are nearly equal.
    return jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, variables)


@pytest.fixture
def variables(key):
    return init(key)


@pytest.fixture
def prompt(key):
    return jax.random.randint(key, (3, 4), 0, CONFIG.vocabulary)


@pytest.mark.slow
@pytest.mark.parametrize("scan_layers", [False, True], ids=["loop", "scan"])
def test_without_a_key_each_token_is_the_likeliest(key, prompt, scan_layers):
    model = GPT2(dataclasses.replace(CONFIG, scan_layers=scan_layers))
    variables = jax.tree.map(
        lambda x: 8 * x if x.ndim > 1 else x, model.init(key, prompt)
    )
    want = prompt
    for _ in range(8):
        logits = model.apply(variables, want)[:, -1]
        want = jnp.concatenate([want, jnp.argmax(logits, -1)[:, None]], axis=1)
    got = generate(model, variables, prompt, 8)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, want)
    assert len(np.unique(got[:, 4:])) > 1


def test_draws_have_the_frequencies_of_the_model(variables, prompt):
    model = GPT2(CONFIG)
    first = jnp.tile(prompt[:1], (4000, 1))
    logits = jax.jit(model.apply)(variables, prompt[:1])[0, -1]
    for temperature, top_p in ((1.0, 1.0), (2.0, 1.0), (1.0, 0.6)):
        drawn = generate(
            model,
            variables,
            first,
            1,
            key=jax.random.key(1),
            temperature=temperature,
            top_p=top_p,
        )[:, -1]
        counts = np.bincount(drawn, minlength=CONFIG.vocabulary)
        want = np.asarray(jax.nn.softmax(nucleus(logits / temperature, top_p)))
        assert np.all(counts[want == 0] == 0)
        # Four standard errors.
        error = 4 * np.sqrt(want * (1 - want) / 4000) + 1e-9
        assert np.all(np.abs(counts / 4000 - want) <= error)


def test_the_nucleus_is_the_smallest_set_of_its_probability(rng):
    logits = 2 * rng.standard_normal((50, 20)).astype(np.float32)
    for top_p in (0.1, 0.5, 0.9):
        inside = np.asarray(nucleus(logits, top_p)) > -np.inf
        probabilities = np.asarray(jax.nn.softmax(logits))
        mass = np.sum(probabilities * inside, axis=-1)
        least = np.min(np.where(inside, probabilities, 1), axis=-1)
        assert np.all(mass >= top_p - 1e-6)
        # Without its least likely token it would not have it.
        assert np.all(mass - least < top_p + 1e-6)
        assert np.all(np.where(inside, 0, probabilities) <= least[:, None])
    np.testing.assert_array_equal(nucleus(logits, 1.0), logits)
    assert np.all(np.sum(np.asarray(nucleus(logits, 1e-6)) > -np.inf, axis=-1) == 1)


def test_the_same_key_draws_the_same(variables, prompt):
    one, same, other = (
        generate(GPT2(CONFIG), variables, prompt, 12, key=jax.random.key(number))
        for number in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)


def test_after_its_end_a_sequence_has_nothing_but_the_end(variables, prompt):
    free = np.asarray(generate(GPT2(CONFIG), variables, prompt, 12))
    end = int(free[0, 6])
    prompt = prompt.at[1, 0].set(end)
    free = np.asarray(generate(GPT2(CONFIG), variables, prompt, 12))
    got = np.asarray(generate(GPT2(CONFIG), variables, prompt, 12, end=end))
    for want, row in zip(free, got, strict=True):
        places = np.flatnonzero(want[4:] == end)
        stop = 4 + places[0] if len(places) else len(want)
        np.testing.assert_array_equal(row[:stop], want[:stop])
        assert np.all(row[stop:] == end)


def test_prompts_of_several_lengths_are_continued_each_from_its_end(variables, prompt):
    model = GPT2(CONFIG)
    lengths = jnp.array([4, 1, 3])
    end = int(generate(model, variables, prompt[1:2, :1], 3)[0, -1])
    # What stands in a prompt, and behind it, ends nothing.
    prompt = prompt.at[0, 1].set(end).at[1, 1:].set(end)
    got = np.asarray(generate(model, variables, prompt, 8, lengths=lengths, end=end))
    for row, tokens, length in zip(got, prompt, lengths.tolist(), strict=True):
        alone = tokens[None, :length]
        want = generate(model, variables, alone, 12 - length, end=end)
        np.testing.assert_array_equal(row, want[0])


def test_nothing_may_be_added(variables, prompt):
    np.testing.assert_array_equal(generate(GPT2(CONFIG), variables, prompt, 0), prompt)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_tokens": 13}, r"`num_tokens` must be from 0 to 12.*`context` \(16\)"),
        ({"num_tokens": -1}, "`num_tokens` must be from 0 to 12.*but got -1"),
        ({"temperature": 0.0}, "`temperature` must be finite and above 0, but got 0"),
        ({"top_p": 0.0}, "`top_p` must be above 0 and at most 1, but got 0"),
        ({"top_p": 1.5}, "`top_p` must be above 0 and at most 1, but got 1.5"),
        ({"end": 20}, "`end` must be a token, from 0 to 19, but got 20"),
        ({"prompt": jnp.zeros((3, 4))}, r"`prompt` must be integers.*float32 \[3, 4\]"),
        ({"prompt": jnp.zeros(3, jnp.int32)}, r"`prompt` must be.*int32 \[3\]"),
        ({"lengths": jnp.zeros(2, int)}, r"`lengths` must be integers \[3\].*\[2\]"),
        ({"lengths": jnp.array([4, 5, 1])}, "from 1 to 4.*but got .4, 5, 1."),
    ],
)
def test_errors_name_the_argument(variables, prompt, options, message):
    arguments = {"prompt": prompt, "num_tokens": 4} | options
    with pytest.raises(ValueError, match=message):
        generate(GPT2(CONFIG), variables, **arguments)
