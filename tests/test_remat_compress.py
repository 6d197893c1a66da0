"""Gradients, composition with JAX's transformations, and errors."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dafjax
from dafjax.codecs import Affine
from dafjax.policies import CompressExpensive, SaveAll
from tests import networks
from tests.helpers import relative_error


# Small arrays are compressed too, so that small tests show what large ones do.
EAGER_POLICY = CompressExpensive(min_nbytes=0)


def compressed(f, *, bits=8, **options):
    return dafjax.remat_compress(f, bits=bits, policy=EAGER_POLICY, **options)


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def assert_close_but_not_equal(got, want, *, most=0.03, least=1e-6):
    """Two-sided: a gradient that does not depend on codes at all is a failure."""
    error = relative_error(flat(got), flat(want))
    assert least < error < most


@pytest.fixture
def mlp(key):
    return networks.mlp_params(key), jax.random.normal(key, (32, 64))


@pytest.fixture(scope="module")
def conv():
    """Parameters and an input; the exact loss and gradient."""
    p, x = networks.conv_example(jax.random.key(0))
    return (p, x), jax.jit(jax.value_and_grad(networks.conv_loss))(p, x)


@pytest.mark.parametrize(
    ("bits", "least", "most", "transform"),
    [
        (8, 1e-3, 0.03, jax.jit),
        (4, 0.02, 0.4, jax.jit),
        (2, 0.1, 1.5, jax.jit),
        (2, 0.1, 1.5, lambda f: f),
        (1, 0.3, 6.0, jax.jit),
    ],
)
def test_the_gradient_of_a_convolutional_net_is_close(
    bits, least, most, transform, conv
):
    (p, x), (_, exact) = conv
    got = transform(jax.grad(compressed(networks.conv_loss, bits=bits)))(p, x)
    assert_close_but_not_equal(got, exact, least=least, most=most)


def test_results_are_never_quantized(conv):
    (p, x), (want, _) = conv
    wrapped = compressed(networks.conv_loss, bits=1)
    value, _ = jax.jit(jax.value_and_grad(wrapped))(p, x)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(wrapped)(p, x), want, rtol=1e-5)


def test_a_result_that_is_also_a_residual_is_exact(mlp):
    (layer, *_), x = mlp

    def f(w):
        y = x @ w
        return jnp.sum(jnp.sin(y)), y

    (_, y), _ = jax.jit(jax.value_and_grad(compressed(f, bits=1), has_aux=True))(
        layer["w"]
    )
    np.testing.assert_array_equal(y, jax.jit(lambda w: x @ w)(layer["w"]))


def test_no_bits_is_the_function_itself(conv):
    (p, x), want = conv
    wrapped = dafjax.remat_compress(networks.conv_loss, bits=None)
    got = jax.jit(jax.value_and_grad(wrapped))(p, x)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_saving_everything_gives_the_exact_gradient(conv):
    (p, x), want = conv
    wrapped = dafjax.remat_compress(networks.conv_loss, policy=SaveAll())
    got = jax.jit(jax.value_and_grad(wrapped))(p, x)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_step_can_be_repeated_exactly(mlp):
    gradient = jax.jit(jax.grad(compressed(networks.mlp_loss, bits=2)))
    first, second = gradient(*mlp), gradient(*mlp)
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_another_seed_gives_other_noise(mlp):
    def gradient(seed):
        wrapped = compressed(networks.mlp_loss, bits=2, seed=seed)
        return jax.grad(wrapped)(*mlp)

    assert relative_error(flat(gradient(1)), flat(gradient(0))) > 1e-3


def test_a_seed_may_be_traced(mlp):
    @jax.jit
    def gradient(seed, p, x):
        return jax.grad(compressed(networks.mlp_loss, bits=2, seed=seed))(p, x)

    want = jax.grad(compressed(networks.mlp_loss, bits=2, seed=5))(*mlp)
    assert relative_error(flat(gradient(5, *mlp)), flat(want)) < 1e-6


def test_the_gradient_is_unbiased_where_residuals_enter_linearly(key):
    """Mean over seeds against the exact gradient, in standard errors."""
    first, second = jax.random.normal(key, (2, 32, 32)) / 6
    x = jax.random.normal(jax.random.fold_in(key, 2), (64, 32))

    def f(first, second, seed):
        # The residual `x @ first` enters the gradient of `second` linearly.
        product = compressed(lambda a, b: (x @ a) @ b, bits=2, seed=seed)
        return jnp.sum(product(first, second))

    gradient = jax.grad(f, argnums=1)
    draws = 1024
    seeds = jnp.arange(draws, dtype=jnp.uint32)
    sample = np.asarray(
        jax.jit(lambda s: jax.lax.map(lambda n: gradient(first, second, n), s))(seeds)
    ).reshape(draws, -1)
    exact = np.ravel(jax.grad(lambda b: jnp.sum((x @ first) @ b))(second))
    spread = sample.std(0, ddof=1)
    assert spread.min() > 0
    z = (sample.mean(0) - exact) / (spread / np.sqrt(draws))
    assert np.abs(z).max() < 5.5
    assert 0.7 < z.std() < 1.3


def test_a_rectifier_adds_no_bias(key):
    """Mean over seeds; recomputing `max(y, 0)` from noisy `y` would fail."""
    first, second = jax.random.normal(key, (2, 32, 32)) / 6
    x = jax.random.normal(jax.random.fold_in(key, 2), (64, 32))

    def layers(first, second):
        return jnp.sum(jax.nn.relu(x @ first) @ second)

    def gradient(seed):
        # Differentiated with respect to both, so that there is a mask.
        wrapped = compressed(layers, bits=2, seed=seed)
        return jax.grad(wrapped, argnums=(0, 1))(first, second)[1]

    seeds = jnp.arange(1024, dtype=jnp.uint32)
    sample = np.asarray(jax.jit(lambda s: jax.lax.map(gradient, s))(seeds))
    sample = sample.reshape(1024, -1)
    exact = np.ravel(jnp.broadcast_to(jax.nn.relu(x @ first).sum(0)[:, None], (32, 32)))
    z = (sample.mean(0) - exact) / (sample.std(0, ddof=1) / np.sqrt(1024))
    assert np.abs(z).max() < 5.5


@pytest.mark.parametrize(
    "mask",
    [lambda h: h > 0, lambda h: jnp.greater(0.0, h), lambda h: jnp.less(0.0, h)],
    ids=["h > 0", "0 > h", "0 < h"],
)
def test_a_rectifier_is_not_mistaken_for_its_opposite(mask, key):
    x, w = jax.random.normal(key, (2, 64, 64)) / 4

    def f(w):
        h = x @ w
        return jnp.sum(jnp.sin((jnp.maximum(h, 0.0) + jnp.where(mask(h), h, 0.0)) @ w))

    assert_close_but_not_equal(jax.grad(compressed(f))(w), jax.grad(f)(w))


@pytest.mark.parametrize(("bits", "most"), [(8, 0.05), (4, 0.5), (2, 3.0)])
def test_a_softmax_of_large_logits_does_not_explode(bits, most, key):
    q, k, v = jax.random.normal(key, (3, 128, 64))

    def f(q):
        return jnp.sum(jnp.sin(jax.nn.softmax(q @ k.T) @ v))

    got = jax.grad(compressed(f, bits=bits))(q)
    assert_close_but_not_equal(got, jax.grad(f)(q), most=most)


def test_max_pooling_finds_the_place_of_the_maximum_exactly(key):
    x, w = jax.random.normal(key, (2, 64, 64)) / 8

    def f(w):
        h = (x @ w).reshape(8, 8, 8, 8)
        pooled = jax.lax.reduce_window(
            h, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
        )
        return jnp.sum(pooled)

    got = jax.grad(compressed(f, bits=1))(w)
    np.testing.assert_allclose(got, jax.grad(f)(w), rtol=1e-5, atol=1e-5)


class TestCalling:
    """The ways in which `jax.checkpoint` can be called."""

    def test_bare_as_a_decorator(self, mlp):
        @dafjax.remat_compress
        def loss(p, x):
            return networks.mlp_loss(p, x)

        assert jax.grad(loss)(*mlp)[0]["w"].shape == (64, 256)

    def test_with_options_as_a_decorator(self, mlp):
        @dafjax.remat_compress(bits=4)
        def loss(p, x):
            return networks.mlp_loss(p, x)

        assert jax.grad(loss)(*mlp)[0]["w"].shape == (64, 256)

    def test_through_partial(self, mlp):
        @functools.partial(dafjax.remat_compress, bits=4, static_argnums=(2,))
        def loss(p, x, scale):
            return networks.mlp_loss(p, x) * float(scale)

        assert jax.grad(loss)(*mlp, 2)[0]["w"].shape == (64, 256)

    def test_name_and_signature_are_kept(self):
        def loss(p, x, *, scale=1.0):
            """A loss."""

        wrapped = dafjax.remat_compress(loss)
        assert wrapped.__name__ == "loss"
        assert wrapped.__doc__ == "A loss."
        assert inspect.signature(wrapped) == inspect.signature(loss)

    def test_keyword_arguments_and_defaults(self, mlp):
        def loss(p, x, scale=2.0, *, shift=0.0):
            return networks.mlp_loss(p, x) * scale + shift

        wrapped = compressed(loss)
        p, x = mlp
        np.testing.assert_allclose(
            wrapped(p, x=x, shift=1.0), loss(p, x, shift=1.0), rtol=1e-6
        )
        got = jax.grad(wrapped)(p, x=x, scale=3.0)
        assert_close_but_not_equal(got, jax.grad(loss)(p, x, scale=3.0))

    @pytest.mark.parametrize(
        ("options", "call"),
        [
            ({"static_argnums": 2}, lambda f, p, x: f(p, x, "tanh")),
            ({"static_argnums": (-1,)}, lambda f, p, x: f(p, x, "tanh")),
            ({"static_argnames": "kind"}, lambda f, p, x: f(p, x, kind="tanh")),
            ({"static_argnames": ("kind",)}, lambda f, p, x: f(p, x, "tanh")),
        ],
    )
    def test_static_arguments_by_number_and_by_name(self, mlp, options, call):
        def loss(p, x, kind):
            assert kind == "tanh"
            return networks.mlp_loss(p, x)

        p, x = mlp
        got = jax.grad(lambda p: call(compressed(loss, **options), p, x))(p)
        assert_close_but_not_equal(got, jax.grad(networks.mlp_loss)(p, x))

    def test_another_static_argument_is_another_trace(self):
        wrapped = compressed(lambda x, n: x**n, static_argnums=1)
        assert jax.grad(wrapped)(3.0, 2) == 6.0
        assert jax.grad(wrapped)(3.0, 3) == 27.0

    def test_pytrees_in_and_out(self, mlp):
        def f(tree):
            return {"sum": (tree["a"] @ tree["b"][0]).sum(), "same": tree["b"]}

        tree = {"a": jnp.ones((8, 8)), "b": (jnp.ones((8, 8)), None)}
        got = compressed(f)(tree)
        assert jax.tree.structure(got) == jax.tree.structure(f(tree))

    def test_has_aux(self, mlp):
        def loss(p, x):
            y = networks.mlp(p, x)
            return jnp.mean(y**2), {"y": y, "count": jnp.int32(3)}

        (_, aux), got = jax.value_and_grad(compressed(loss), has_aux=True)(*mlp)
        assert aux["count"] == 3
        assert_close_but_not_equal(got, jax.grad(networks.mlp_loss)(*mlp))

    def test_a_function_is_traced_once_for_each_shape(self, mlp):
        traces = []

        def loss(p, x):
            traces.append(x.shape)
            return networks.mlp_loss(p, x)

        wrapped = compressed(loss)
        p, x = mlp
        for _ in range(3):
            jax.grad(wrapped)(p, x)
        jax.grad(wrapped)(p, x[:8])
        assert traces == [x.shape, x[:8].shape]


class TestClosures:
    """What a function closes over is differentiated as well."""

    def test_over_a_value_that_is_differentiated(self, mlp):
        p, x = mlp

        def loss(p):
            return compressed(lambda x: networks.mlp_loss(p, x))(x)

        for transform in (lambda f: f, jax.jit):
            got = transform(jax.grad(loss))(p)
            assert_close_but_not_equal(got, jax.grad(networks.mlp_loss)(p, x))

    def test_over_concrete_arrays(self, mlp):
        p, x = mlp
        got = jax.grad(compressed(lambda x: networks.mlp_loss(p, x)))(x)
        want = jax.grad(networks.mlp_loss, argnums=1)(p, x)
        assert_close_but_not_equal(got, want)

    def test_over_a_traced_value_twice_with_different_values(self):
        def f(w):
            return compressed(lambda x: jnp.sin(x @ w).sum())

        x = jnp.ones((8, 8))
        g = jax.jit(lambda w: jax.grad(f(w))(x))
        first, second = g(jnp.ones((8, 8))), g(2 * jnp.ones((8, 8)))
        assert not np.allclose(first, second)


class TestComposition:
    """Beside what `compositions.py` lists."""

    def test_tokens_are_no_residuals(self, key):
        w, x = jax.random.normal(key, (2, 64, 64))

        def f(w, x, *, token):
            hidden = jnp.tanh(x @ w)
            if token:
                jax.lax.after_all(jax.lax.create_token(hidden))
            return jnp.sum(jnp.tanh(hidden @ w))

        got, expected = (
            jax.grad(compressed(functools.partial(f, token=token)))(w, x)
            for token in (True, False)
        )
        np.testing.assert_array_equal(got, expected)

    def test_frozen_weights_cause_no_residual(self, key):
        w, frozen = jax.random.normal(key, (2, 64, 64))

        def f(w, frozen, x):
            return jnp.sum((x @ frozen) @ w)

        wrapped = compressed(f)
        x = jnp.ones((32, 64))
        of_w = dafjax.saved_residuals(lambda w: wrapped(w, frozen, x), w)
        of_both = dafjax.saved_residuals(lambda w, g: wrapped(w, g, x), w, frozen)
        scales = ["extent_scale", "extent_scale"]
        assert [item.primitive for item in of_w.kept] == [*scales, "dot_general"]
        assert len(of_both.kept) == 3
        # With the weight frozen the layer above needs nothing of this one.
        of_frozen = dafjax.saved_residuals(lambda g: wrapped(w, g, x), frozen)
        assert len(of_frozen.kept) == 0

    def test_vmap_gives_what_a_loop_gives(self, key):
        # Small integers: sums do not depend on the order, so that contents, and with
        # them the noise, are the same.
        w, x = (
            jax.random.randint(jax.random.fold_in(key, n), (4, 32, 32), -3, 4)
            for n in range(2)
        )
        w, x = w[0].astype(jnp.float32), x.astype(jnp.float32)
        gradient = jax.grad(compressed(lambda w, x: jnp.sum(jnp.sin(x @ w)), bits=2))
        batched = jax.vmap(gradient, (None, 0))(w, x)
        for n in range(4):
            assert relative_error(batched[n], gradient(w, x[n])) < 1e-5

    def test_a_vjp_called_twice_gives_the_same(self, mlp):
        _, pullback = jax.vjp(compressed(networks.mlp_loss, bits=2), *mlp)
        first, second = pullback(jnp.float32(1)), pullback(jnp.float32(1))
        jax.tree.map(np.testing.assert_array_equal, first, second)

    def test_integer_arguments_and_results(self):
        def f(table, ids):
            x = table[ids]
            return jnp.sum(jnp.sin(x @ x.T)), ids + 1

        table, ids = jnp.ones((16, 8)), jnp.array([1, 2, 2])
        (_, ids_out), got = jax.value_and_grad(compressed(f), has_aux=True)(table, ids)
        np.testing.assert_array_equal(ids_out, ids + 1)
        assert got.shape == table.shape
        _, pullback = jax.vjp(
            lambda table, ids: compressed(f)(table, ids)[0], table, ids
        )
        assert pullback(jnp.float32(1))[1].dtype == jax.dtypes.float0

    def test_an_effect_takes_place_once(self, mlp, capsys):
        def loss(p, x):
            jax.debug.print("seen {}", x.shape[0])
            return networks.mlp_loss(p, x)

        jax.block_until_ready(jax.jit(jax.grad(compressed(loss)))(*mlp))
        jax.effects_barrier()
        assert capsys.readouterr().out == "seen 32\n"

    def test_an_empty_array(self):
        f = lambda x: jnp.sum(jnp.sin(x @ x.T))
        assert jax.grad(compressed(f))(jnp.zeros((0, 4))).shape == (0, 4)


class TestTracing:
    """What a trace depends on beside shapes."""

    def test_the_size_of_a_named_axis(self):
        wrapped = compressed(lambda x: jnp.sum(x) / jax.lax.psum(1, "i"))
        for size in (2, 4):
            got = jax.vmap(wrapped, axis_name="i")(jnp.ones((size, 3)))
            np.testing.assert_allclose(got, np.full(size, 3 / size))

    def test_the_matmul_precision(self):
        wrapped = compressed(lambda x: x @ x)
        x = jnp.ones((4, 4))
        wrapped(x)
        with jax.default_matmul_precision("highest"):
            assert "HIGHEST" in str(jax.make_jaxpr(lambda x: wrapped(x))(x))

    def test_of_nested_wraps_the_outermost_decides(self, conv):
        (p, x), (_, want) = conv
        inner = functools.partial(
            networks.conv_loss,
            wrap_block=functools.partial(compressed, bits=1),
        )
        got = jax.jit(jax.grad(compressed(inner, bits=8)))(p, x)
        assert_close_but_not_equal(got, want)


class TestErrors:
    """Bad input is named, with what is valid and what to do."""

    @pytest.mark.parametrize("bits", [0, 5, 16, -1])
    def test_bits_outside_the_set(self, bits):
        with pytest.raises(
            ValueError, match=rf"bits=.*None or one of \(1, 2, 3, 4, 8\).*got {bits}"
        ):
            dafjax.remat_compress(jnp.sin, bits=bits)

    @pytest.mark.parametrize("bits", [2.0, True, jnp.int32])
    def test_bits_that_are_no_integer(self, bits):
        with pytest.raises(TypeError, match=r"bits=.*None, one of .*safe.*Bits"):
            dafjax.remat_compress(jnp.sin, bits=bits)

    def test_bits_of_a_name_that_there_is_not(self):
        with pytest.raises(ValueError, match=r"bits=.*'safe', 'balanced', 'tight'"):
            dafjax.remat_compress(jnp.sin, bits="2")

    @pytest.mark.parametrize("policy", ["dots", True, Affine()])
    def test_a_policy_that_is_none(self, policy):
        with pytest.raises(TypeError, match=r"policy=.*dafjax\.policies"):
            dafjax.remat_compress(jnp.sin, policy=policy)

    def test_a_store_that_is_none(self):
        with pytest.raises(TypeError, match=r"store=.*`'pool'`.*dafjax\.stores"):
            dafjax.remat_compress(jnp.sin, store="pool")

    @pytest.mark.parametrize("seed", [1.5, "1", jnp.arange(2)])
    def test_a_seed_that_is_no_integer(self, seed):
        with pytest.raises(TypeError, match=r"seed=.*jax\.random\.bits"):
            dafjax.remat_compress(jnp.sin, seed=seed)

    def test_something_else_than_a_function(self):
        with pytest.raises(TypeError, match=r"must be given a function.*3\.0"):
            dafjax.remat_compress(3.0)

    def test_an_argument_that_is_no_array(self):
        wrapped = dafjax.remat_compress(lambda x, kind: x)
        with pytest.raises(TypeError, match=r"`args\[1\]\['a'\]` is `'relu'`.*static"):
            wrapped(1.0, {"a": "relu"})
        with pytest.raises(TypeError, match=r"`kwargs\['kind'\]` is `'relu'`"):
            wrapped(1.0, kind="relu")

    def test_a_container_that_the_function_changes_is_its_own(self):
        def total(batch):
            x = batch.pop("x")
            batch["y"] = [*batch["y"], x]
            return sum(batch["y"])

        batch = {"x": 1.0, "y": [2.0]}
        assert dafjax.remat_compress(total)(batch) == 3
        assert batch == {"x": 1.0, "y": [2.0]}

    def test_a_static_argument_that_is_not_hashable(self):
        wrapped = dafjax.remat_compress(lambda x, n: x, static_argnums=1)
        with pytest.raises(ValueError, match=r"static argument `1`.*hashable.*\[1\]"):
            wrapped(1.0, [1])

    @pytest.mark.parametrize("name", ["static_argnums", "activation_argnums"])
    def test_argument_numbers_that_are_none(self, name):
        with pytest.raises(TypeError, match=rf"{name}=.*ints.*'x'"):
            dafjax.remat_compress(jnp.sin, **{name: "x"})

    @pytest.mark.parametrize("name", ["static_argnums", "activation_argnums"])
    def test_an_argument_number_out_of_range(self, name):
        wrapped = dafjax.remat_compress(lambda x: x, **{name: 3})
        with pytest.raises(ValueError, match=rf"{name}.*3.*1 positional"):
            wrapped(1.0)

    def test_second_order_differentiation(self, key):
        w = jax.random.normal(key, (16, 16))
        wrapped = compressed(lambda w: jnp.sum(jnp.sin(w @ w)))
        with pytest.raises(NotImplementedError, match=r"bits=None.*wrap the outer"):
            jax.hessian(wrapped)(w)

    def test_a_gradient_inside_a_loss_that_is_wrapped(self, mlp):
        """What the error about second-order differentiation advises."""
        p, x = mlp

        def penalty(p, x):
            gradient = jax.grad(networks.mlp_loss, argnums=1)(p, x)
            return jnp.sum((jnp.linalg.norm(gradient, axis=-1) - 1) ** 2)

        got, want = (jax.grad(f)(p, x) for f in (compressed(penalty), penalty))
        assert_close_but_not_equal(got, want)

    def test_second_order_differentiation_with_a_custom_rule(self, key):
        """Silently without the rule's own derivative, if it were not refused."""

        @jax.custom_jvp
        def straight_through(a):
            return jnp.round(a)

        straight_through.defjvp(lambda p, t: (jnp.round(p[0]), t[0]))
        w = jax.random.normal(key, (16, 16))

        def f(a, x):
            return jnp.sum(straight_through(a) * jnp.tanh(x @ w))

        def penalty(a):
            return jnp.sum(jax.grad(compressed(f), argnums=1)(a, w) ** 2)

        with pytest.raises(NotImplementedError, match="bits=None"):
            jax.grad(penalty)(1.7)

    def test_forward_mode_differentiation(self, key):
        w = jax.random.normal(key, (16, 16))

        @compressed
        def loss(w):
            return jnp.sum(jnp.sin(w @ w))

        advice = (
            r"forward-mode[^`]*`loss` is wrapped in `dafjax\.remat_compress`.*jacrev"
        )
        with pytest.raises(TypeError, match=advice):
            jax.jvp(loss, (w,), (w,))
        with pytest.raises(TypeError, match=advice):
            jax.jacfwd(loss)(w)
        # Compiled, it is JAX's own.
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jit(jax.jacfwd(loss))(w)

    @pytest.mark.parametrize(
        ("call", "argument"),
        [
            (lambda f: f(1.0, {"on": True}, True), "train"),
            (lambda f: f(1.0, batch={"on": True}, train=True), "train"),
            (lambda f: f(1.0, {"on": True}), r"batch\['on'\]"),
            (lambda f: f(1.0, {"on": True}, num=jnp.int32(3)), "num"),
            (lambda f: dafjax.remat_compress(lambda t: f(1.0, {}, t))(True), "train"),
        ],
        ids=["position", "name", "leaf", "integer", "nested"],
    )
    def test_a_traced_argument_that_python_needs(self, call, argument):
        def loss(p, batch, train=None, *, kind, num=1):
            assert kind == "sum"
            if isinstance(num, int):
                return p if (batch["on"] if train is None else train) else 2 * p
            return p * len(range(num))

        wrapped = dafjax.remat_compress(loss, static_argnames="kind")
        wrapped = functools.partial(wrapped, kind="sum")
        place = rf"loss at {re.escape(__file__)}:\d+ for remat_compress"
        with pytest.raises(
            jax.errors.JAXTypeError, match=rf"{place}.* argument {argument}\."
        ) as caught:
            call(wrapped)
        assert str(caught.value).count("`static_argnums`") == 1

    def test_a_traced_argument_of_another_function(self):
        """No advice about arguments of `remat_compress`, which are not to blame."""

        @jax.jit
        def step(p, train):
            return dafjax.remat_compress(lambda p: p if train else 2 * p)(p)

        with pytest.raises(jax.errors.ConcretizationTypeError, match="step") as caught:
            step(1.0, True)
        assert "static_argnums" not in str(caught.value)
