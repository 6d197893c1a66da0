"""How many bits a residual gets: by use, by name, by preset."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import dafjax
from dafjax import Bits
from dafjax._plan.plan import place_of
from dafjax.codecs import Affine
from dafjax.policies import CompressExpensive
from tests.helpers import relative_error


WIDTH = 256


def bits_of(f, *args, **options):
    """Returns the bits of what is kept in affine codes, in order."""
    # With a policy of its own, a small function is compressed at any rate.
    options = {"policy": CompressExpensive(), **options}
    plan = dafjax.saved_residuals(dafjax.remat_compress(f, **options), *args)
    return [k.codec.bits for k in plan.kept if isinstance(k.codec, Affine)]


@pytest.fixture
def weights(key):
    return 0.1 * jax.random.normal(key, (WIDTH, WIDTH))


@pytest.fixture
def x(key):
    return jax.random.normal(key, (WIDTH, WIDTH))


# In each, one product is read again in the backward pass.
LINEAR = {
    "relu": jax.nn.relu,
    "scale": lambda y: 3 * y - 1,
    "mask": lambda y: jnp.where(jnp.arange(WIDTH) % 2 == 0, y, 0),
    "norm": lambda y: (y - y.mean(-1, keepdims=True)) / y.std(-1, keepdims=True),
    "other": lambda y: y * jnp.sin(jnp.arange(WIDTH, dtype=jnp.float32)),
}
NONLINEAR = {
    "gelu": jax.nn.gelu,
    # Its derivative is an exponential, but of a negated square.
    "exact gelu": lambda y: jax.nn.gelu(y, approximate=False),
    "erf": jax.lax.erf,
    "bell": lambda y: jnp.exp(-(y**2)),
    "bell of a product": lambda y: jnp.exp(-(y * y)),
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "square": lambda y: y**2,
    "cube": lambda y: y * y * y,
    "sin": jnp.sin,
    "clip": lambda y: jnp.clip(y, -1, 1),
}


def before_a_product(activation, weights, x):
    return jnp.sum(activation(x @ weights) @ weights)


@pytest.mark.parametrize("name", LINEAR)
def test_linear_uses_have_the_base_bits(name, weights, x):
    def f(w, x):
        return before_a_product(LINEAR[name], w, x)

    assert bits_of(f, weights, x) == [2]


def first_power(y):
    return jax.lax.integer_pow_p.bind(y, y=1)


@pytest.mark.parametrize("factor", [lambda y: y, first_power])
def test_a_first_power_is_the_value_itself(factor, weights, x):
    """As jax 0.9 writes the derivative of a square."""

    @jax.custom_vjp
    def half_square(y):
        return y**2 / 2

    half_square.defvjp(lambda y: (half_square(y), y), lambda y, g: (g * factor(y),))
    assert bits_of(lambda w, x: jnp.sum(half_square(x @ w)), weights, x) == [2]


@pytest.mark.parametrize(
    ("name", "bits", "more"),
    [
        *((name, 2, 4) for name in NONLINEAR),
        *(("tanh", 1, 2), ("gelu", 4, 8), ("bell", 8, 8)),
    ],
)
def test_nonlinear_uses_have_twice_the_bits(name, bits, more, weights, x):
    def f(w, x):
        return before_a_product(NONLINEAR[name], w, x)

    assert bits_of(f, weights, x, bits=bits) == [more]


@pytest.mark.parametrize("name", ["tanh", "square", "sin"])
def test_a_rectifier_before_changes_nothing(name, weights, x):
    def f(w, x):
        return before_a_product(lambda y: NONLINEAR[name](jax.nn.relu(y)), w, x)

    assert bits_of(f, weights, x) == [4]


@pytest.mark.parametrize(
    "exponent", [lambda y: y, lambda y: -y, lambda y: y**2, lambda y: -(y**3)]
)
def test_an_exponential_without_a_bound_is_kept_in_codes(exponent, weights, x):
    """Beside what its exponent is made of, which the gradient reads, too."""

    def f(w, x):
        y = x @ w
        return jnp.sum((y * jnp.exp(exponent(y))) @ w)

    plan = dafjax.saved_residuals(dafjax.remat_compress(f), weights, x)
    assert any("exp" in str(kept.primitive) for kept in plan.kept)


def test_an_exponential_of_what_is_made_of_nothing_is_left_alone(weights, x):
    def f(w, x):
        decay = jnp.exp(-jax.lax.iota(jnp.float32, WIDTH))
        return jnp.sum(jax.nn.relu(x @ w) * decay @ w)

    assert bits_of(f, weights, x) == [2]


def test_the_square_of_a_complex_number_has_no_bound(weights, x):
    def f(w, x):
        y = jax.lax.complex(x @ w, x)
        return jnp.sum(jnp.abs(jnp.exp(-(y * y)) * y))

    plan = dafjax.saved_residuals(dafjax.remat_compress(f), weights, x)
    assert all(kept.primitive != "bounded_exp" for kept in plan.kept)
    assert any("exp" in str(kept.primitive) for kept in plan.kept)


def test_a_cotangent_that_meets_a_code_twice_is_not_linear_in_it(weights, x):
    def f(w, u):
        y = x @ w
        return jnp.mean((u * y) * y)

    assert bits_of(f, weights, x[0]) == [4]


def test_parts_of_a_value_have_noise_of_their_own(weights, x):
    def f(w, u):
        y, z = jnp.split(x @ w, 2, axis=-1)
        return jnp.mean((u * y) * z)

    assert bits_of(f, weights, x[0, : WIDTH // 2]) == [2]


def test_a_product_of_values_with_noise_of_their_own_is_linear(weights, x):
    def f(w, x):
        return jnp.sum(((x @ w) * (x @ w.T)) @ w)

    assert bits_of(f, weights, x) == [2, 2]


def test_more_bits_make_the_bias_of_a_nonlinear_use_small(weights, x):
    """The sampling error of the mean of 24 seeds is 0.1 of the gradient."""

    def f(w):
        return jnp.mean(jnp.square(jnp.tanh(x @ w) @ weights - jnp.flip(x)))

    exact = jax.grad(f)(weights)

    def deviation(bits):
        @jax.jit
        def gradient(seed):
            options = {"policy": CompressExpensive(), "bits": bits, "seed": seed}
            return jax.grad(dafjax.remat_compress(f, **options))(weights)

        seeds = jnp.arange(24, dtype=jnp.uint32)
        mean = np.mean([gradient(seed) for seed in seeds], axis=0, dtype=np.float64)
        return relative_error(mean, exact)

    assert deviation(Bits(2, nonlinear=2)) > 0.3
    assert deviation(Bits(2)) < 0.2


@pytest.mark.parametrize(
    ("preset", "bits"), [("safe", [4, 8]), ("balanced", [2, 4]), ("tight", [2, 2])]
)
def test_presets(preset, bits, weights, x):
    def f(w, x):
        return jnp.sum(jnp.tanh((x @ w) @ w) @ w)

    assert bits_of(f, weights, x, bits=preset) == bits


class TestNames:
    """Bits by the name of a value, or of its place in the model."""

    @staticmethod
    def f(w, x):
        with jax.named_scope("encoder"), jax.named_scope("attention1"):
            x = checkpoint_name(x @ w, "scores")
        with jax.named_scope("mlp"):
            x = jnp.tanh(x @ w)
        return jnp.sum(x @ w)

    @pytest.mark.parametrize(
        ("bits", "expected"),
        [
            ({"scores": 8}, [8, 4]),
            ({"attention*": 8}, [8, 4]),
            ({"encoder/*": 8}, [8, 4]),
            ({"mlp": 1}, [2, 1]),
            ({"*": 3}, [3, 3]),
            ({"mlp": 8, "*": 1}, [1, 8]),
            (Bits(4, names={"mlp": 1}), [4, 1]),
        ],
    )
    def test_what_a_pattern_matches_has_its_bits(self, bits, expected, weights, x):
        assert bits_of(self.f, weights, x, bits=bits) == expected

    def test_names_are_found_in_loops(self, weights, x):
        def f(w, x):
            def step(x, _):
                return jnp.tanh(checkpoint_name(x @ w, "state")), None

            x, _ = jax.lax.scan(step, x, length=3)
            return jnp.sum(x)

        with warnings.catch_warnings(action="error"):
            assert 8 in bits_of(f, weights, x, bits={"state": 8})

    def test_a_pattern_that_matches_nothing_warns(self, weights, x):
        wrapped = dafjax.remat_compress(self.f, bits={"attn*": 4, "mlp": 2})
        with pytest.warns(UserWarning, match=r"matches 'attn\*'.*'encoder'") as found:
            jax.grad(wrapped)(weights, x)
        assert len(found) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"linear": 5}, ValueError, r"linear=.*\(1, 2, 3, 4, 8\).*got 5"),
        ({"linear": "2"}, TypeError, r"linear=.*got `'2'` of type `str`"),
        ({"nonlinear": 6}, ValueError, r"nonlinear=.*got 6"),
        ({"names": {"a": 5}}, ValueError, r"names\['a'\].*got 5"),
        ({"names": {1: 4}}, TypeError, r"names=.*strings.*`1`"),
        ({"names": ["a"]}, TypeError, r"names=.*`'a'`.*attention"),
    ],
)
def test_bad_bits_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        Bits(**arguments)


def test_bits_are_hashable_data():
    assert hash(Bits(names={"a": 4})) == hash(Bits(2, 4, (("a", 4),)))
    assert Bits(names={"a": 4}) == Bits(2, 4, (("a", 4),))


def test_names_in_listings_are_names_for_bits():
    """A user copies them from `print_saved_residuals` or `assess`."""

    def loss(w, x):
        with jax.named_scope("block"):
            x = jnp.tanh(x @ w)
        return jnp.mean((jnp.exp(x @ w) @ w) ** 2)

    w, x = jnp.ones((64, 64)), jnp.ones((512, 64))
    plan = dafjax.saved_residuals(dafjax.remat_compress(loss), w, x)
    listed = [place_of(item) for item in plan.kept if item.codec is not None]
    assert set(listed) == {"block/dot_general", "exp", "dot_general"}
    for name in listed:
        wrapped = dafjax.remat_compress(loss, bits={name: 3})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            plan = dafjax.saved_residuals(wrapped, w, x)
        for item in plan.kept:
            if item.codec is not None:
                assert (item.codec.bits == 3) == (place_of(item) == name)
