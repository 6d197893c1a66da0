"""NNX modules: equal to `nnx.remat` but for gradients, and smaller."""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dafjax
import dafjax.nnx
from dafjax.policies import CompressExpensive
from tests.helpers import relative_error, slow, temp_nbytes


# Small arrays are compressed too, so that small tests show what large ones do.
EAGER_POLICY = CompressExpensive(min_nbytes=256)


def compressed(f=None, *, bits=8, **options):
    return dafjax.nnx.remat_compress(f, bits=bits, policy=EAGER_POLICY, **options)


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def values(tree):
    """Returns the arrays of a state, without random keys."""
    return [
        leaf
        for leaf in jax.tree.leaves(tree)
        if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]


def assert_close(got, want):
    """Equal but for the rounding of programs that XLA fuses differently."""
    for a, b in itertools.zip_longest(values(got), values(want)):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7)


def assert_close_but_not_equal(got, want, *, least=1e-6, most=0.05):
    """Two-sided: a gradient that does not depend on codes at all is a failure."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert least < relative_error(flat(got), flat(want)) < most


class Block(nnx.Module):
    """Dense, BatchNorm, ReLU, Dropout, and the input added."""

    def __init__(self, features, rate, rngs):
        self.dense = nnx.Linear(features, features, rngs=rngs)
        self.norm = nnx.BatchNorm(features, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(nnx.relu(self.norm(self.dense(x))))


class Stack(nnx.Module):
    """Blocks in a Python loop."""

    def __init__(self, features=32, depth=2, rate=0.25):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Block(features, rate, rngs) for _ in range(depth)])

    def __call__(self, x, wrap):
        for block in self.blocks:
            x = wrap(Block.__call__)(block, x)
        return x


class Tied(nnx.Module):
    """Two blocks with one dense layer, and one of them called twice."""

    def __init__(self, features=32):
        rngs = nnx.Rngs(0)
        self.first = Block(features, 0.25, rngs)
        self.second = Block(features, 0.25, rngs)
        self.second.dense = self.first.dense

    def __call__(self, x, wrap):
        for block in (self.first, self.second, self.first):
            x = wrap(Block.__call__)(block, x)
        return wrap(lambda a, b, x: b(a(x)))(self.first, self.second, x)


class Scanned(nnx.Module):
    """Blocks in `nnx.scan`."""

    def __init__(self, features=32, depth=3, rate=0.25):
        @nnx.split_rngs(splits=depth)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return Block(features, rate, rngs)

        self.blocks = make(nnx.Rngs(0))

    def __call__(self, x, wrap):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def scan(block, x):
            return wrap(Block.__call__)(block, x)

        return scan(self.blocks, x)


MODELS = [Stack, Tied, Scanned]


def step(model, x, wrap):
    """Loss and gradient of the parameters; updates the model."""
    return nnx.value_and_grad(lambda model: jnp.mean(jnp.square(model(x, wrap))))(model)


def run(make, x, wrap):
    """Loss, gradient, and what became of the model, after two jitted steps."""
    model = make()
    jitted = nnx.jit(functools.partial(step, wrap=wrap))
    jitted(model, x)
    loss, gradient = jitted(model, x)
    return loss, gradient, nnx.state(model)


@pytest.fixture
def x(key):
    return jax.random.normal(key, (64, 32))


class TestAgainstRemat:
    @pytest.mark.parametrize("make", MODELS)
    def test_loss_and_state_are_equal_and_gradients_close(self, make, x):
        loss, gradient, state = run(make, x, compressed)
        want_loss, want_gradient, want_state = run(make, x, nnx.remat)
        assert_close(loss, want_loss)
        assert jax.tree.structure(state) == jax.tree.structure(want_state)
        assert_close(state, want_state)
        assert_close_but_not_equal(gradient, want_gradient)

    def test_statistics_and_counts_have_changed(self, x):
        model = Stack(depth=1)
        before = nnx.state(model, (nnx.BatchStat, nnx.RngCount))
        before = jax.tree.map(jnp.copy, before)
        step(model, x, compressed)
        after = nnx.state(model, (nnx.BatchStat, nnx.RngCount))
        for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
            assert (np.asarray(a) != np.asarray(b)).any()

    def test_a_parameter_stays_the_array_that_it_was(self, x):
        model = Stack(depth=1)
        kernel = model.blocks[0].dense.kernel.get_value()
        model(x, compressed)
        assert model.blocks[0].dense.kernel.get_value() is kernel

    def test_without_bits_everything_is_equal(self, x):
        got = run(Tied, x, functools.partial(compressed, bits=None))
        assert_close(got, run(Tied, x, nnx.remat))

    def test_without_jit(self, x):
        loss, gradient = step(Stack(depth=1), x, compressed)
        want_loss, want_gradient = step(Stack(depth=1), x, nnx.remat)
        assert_close(loss, want_loss)
        assert_close_but_not_equal(gradient, want_gradient)

    def test_another_seed_gives_other_noise(self, x):
        def gradient(seed):
            wrap = functools.partial(compressed, bits=2, seed=seed)
            return step(Stack(depth=1), x, wrap)[1]

        assert relative_error(flat(gradient(1)), flat(gradient(0))) > 1e-3


class TestCalling:
    """The ways in which `nnx.remat` can be called."""

    @pytest.mark.parametrize("decorator", [compressed, compressed(bits=4)])
    def test_as_a_decorator_of_a_method(self, decorator, x):
        class Net(Block):
            __call__ = decorator(Block.__call__)

        gradient = nnx.grad(lambda block: jnp.mean(jnp.square(block(x))))
        got = gradient(Net(32, 0.25, nnx.Rngs(0)))
        want = gradient(Block(32, 0.25, nnx.Rngs(0)))
        error = relative_error(flat(got), flat(want))
        assert 1e-6 < error < 0.4

    def test_name_and_docstring_are_kept(self):
        def block(x):
            """A block."""

        assert compressed(block).__name__ == "block"
        assert compressed(block).__doc__ == "A block."

    def test_static_arguments(self, x):
        def block(block, x, activation):
            return activation(block.dense(x))

        def gradient(wrap):
            wrapped = wrap(block, static_argnums=2)
            loss = lambda block: jnp.sum(jnp.square(wrapped(block, x, nnx.relu)))
            return nnx.grad(loss)(Block(32, 0.0, nnx.Rngs(0)))

        got, want = gradient(compressed), gradient(nnx.remat)
        assert_close_but_not_equal(got.dense, want.dense)

    def test_pytrees_of_modules_and_arrays_and_keywords(self, x):
        def f(pair, *, scale, layer):
            return {"y": layer(pair["layer"](pair["x"])) * scale, "none": None}

        def loss(wrap, layer):
            pair = {"layer": layer, "x": x, "none": None}
            y = wrap(f)(pair, scale=jnp.float32(2), layer=layer)["y"]
            return jnp.sum(jnp.sin(y))

        layer = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
        got = nnx.grad(functools.partial(loss, compressed))(layer)
        want = nnx.grad(functools.partial(loss, lambda f: f))(layer)
        assert_close_but_not_equal(got, want)

    def test_a_variable_made_inside_comes_out(self, x):
        def f(layer, x):
            layer.seen = nnx.Intermediate(jnp.sum(x))
            return layer(x)

        layer = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
        compressed(f)(layer, x)
        np.testing.assert_allclose(layer.seen.get_value(), x.sum(), rtol=1e-5)

    def test_a_function_of_arrays_alone(self, x):
        f = lambda x: jnp.sum(jnp.sin(x @ x.T / 8))
        assert_close_but_not_equal(jax.grad(compressed(f))(x), jax.grad(f)(x))

    def test_a_module_that_is_split(self, x):
        def f(graphdef, state, x):
            return jnp.sum(jnp.square(nnx.merge(graphdef, state)(x)))

        graphdef, state = nnx.split(nnx.Linear(32, 32, rngs=nnx.Rngs(0)))
        got = jax.grad(lambda state: compressed(f)(graphdef, state, x))(state)
        want = jax.grad(lambda state: f(graphdef, state, x))(state)
        assert_close_but_not_equal(got, want)


class TestActivations:
    """Which arguments of a block wait in a few bits."""

    def test_parameters_are_never_quantized(self, x):
        """`dx = dy @ w.T` needs the parameter alone: it is exact."""
        layer = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
        loss = lambda x: jnp.sum(compressed(nnx.Linear.__call__, bits=1)(layer, x))
        want = jax.grad(lambda x: jnp.sum(layer(x)))(x)
        assert_close(jax.grad(loss)(x), want)

    @pytest.mark.parametrize(
        ("options", "exact"),
        [
            ({}, False),
            ({"activation_argnums": 1}, False),
            ({"activation_argnums": (-1,)}, False),
            ({"activation_argnums": ()}, True),
        ],
    )
    def test_an_input_waits_in_codes_unless_left_out(self, options, exact, x):
        """`dw = x.T @ dy` needs the input alone."""

        def gradient(call):
            layer = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
            return nnx.grad(lambda layer: jnp.sum(call(layer, x)))(layer)

        got = gradient(compressed(nnx.Linear.__call__, **options))
        want = gradient(nnx.Linear.__call__)
        if exact:
            assert_close(got, want)
        else:
            assert_close_but_not_equal(got, want)


@pytest.mark.parametrize("make", [Stack, slow(Scanned)])
def test_a_stack_of_blocks_needs_less_memory(make):
    graphdef, state = nnx.split(make(128, depth=6))
    x = jnp.ones((1024, 128))

    def nbytes(wrap):
        def pure(state, x):
            model = nnx.merge(graphdef, state)
            return step(model, x, wrap), nnx.state(model)

        return temp_nbytes(jax.jit(pure).lower(state, x))

    plain = nbytes(lambda f: f)
    ratio = nbytes(functools.partial(compressed, bits=2)) / plain
    assert ratio < 0.25


class TestErrors:
    """Bad input is named, with what is valid and what to do."""

    def test_options_are_checked_before_the_first_call(self):
        with pytest.raises(ValueError, match=r"bits=.*\(1, 2, 3, 4, 8\).*got 5"):
            dafjax.nnx.remat_compress(Block.__call__, bits=5)
        with pytest.raises(TypeError, match=r"activation_argnums=.*ints.*'x'"):
            dafjax.nnx.remat_compress(Block.__call__, activation_argnums="x")

    @pytest.mark.parametrize("name", ["static_argnums", "activation_argnums"])
    def test_a_position_that_the_call_does_not_have(self, name, x):
        wrapped = dafjax.nnx.remat_compress(Block.__call__, **{name: 2})
        with pytest.raises(ValueError, match=rf"{name}=.*argument 2.*2 positional"):
            wrapped(Block(32, 0.0, nnx.Rngs(0)), x)

    def test_a_class_a_module_and_a_method_of_one_module(self):
        block = Block(8, 0.0, nnx.Rngs(0))
        for f, got in [
            (Block, "the class `Block`"),
            (block, r"a module, `Block\(...\)`"),
            (block.__call__, r"the method of one module, `Block\(...\)\.__call__`"),
        ]:
            with pytest.raises(TypeError, match=rf"but got {got}.*Wrap the method"):
                dafjax.nnx.remat_compress(f)


class TestBesideIt:
    """`dafjax.remat_compress` keeps nothing that a function writes to a module."""

    @pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
    def test_it_says_so(self, transform, x):
        def loss(model, x):
            return jnp.mean(model(x) ** 2)

        wrapped = transform(dafjax.remat_compress(loss))
        with pytest.raises(
            ValueError,
            match=r"`loss` writes to.*`args\[0\]\.norm\.mean.*dafjax\.nnx\.remat",
        ):
            wrapped(Block(32, 0.0, nnx.Rngs(0)), x)

    def test_it_says_so_of_a_variable_that_is_made_inside(self, x):
        def loss(model, x):
            model.seen = nnx.Intermediate(jnp.sum(x))
            return jnp.mean(model(x) ** 2)

        with pytest.raises(ValueError, match=r"writes to its argument `args\[0\]"):
            dafjax.remat_compress(loss)(nnx.Linear(32, 32, rngs=nnx.Rngs(0)), x)

    def test_a_module_that_is_only_read(self, x):
        def loss(model, x):
            return jnp.mean(model(x) ** 2)

        model = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
        got = dafjax.remat_compress(loss)(model, x)
        np.testing.assert_allclose(got, loss(model, x), rtol=1e-5)

    def test_a_module_that_is_merged_and_whose_state_is_returned(self, x):
        graphdef, state = nnx.split(Block(32, 0.0, nnx.Rngs(0)))

        def loss(state, x):
            model = nnx.merge(graphdef, state)
            return jnp.mean(model(x) ** 2), nnx.state(model, nnx.BatchStat)

        _, statistics = dafjax.remat_compress(loss)(state, x)
        _, want = loss(state, x)
        for got, expected in zip(values(statistics), values(want), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


class TestPorting:
    """Code for `nnx.remat` works with `dafjax.nnx.remat_compress` in its place."""

    def test_every_parameter_is_taken(self):
        ours = inspect.signature(dafjax.nnx.remat_compress).parameters
        for name, parameter in inspect.signature(nnx.remat).parameters.items():
            assert ours[name].kind == parameter.kind, name

    @pytest.mark.parametrize(
        "options",
        [
            {"prevent_cse": False, "graph": True, "graph_updates": True},
            {"policy": jax.checkpoint_policies.dots_saveable, "graph": False},
        ],
    )
    def test_options_of_scripts_are_taken(self, options, x):
        def gradient(wrap):
            model = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
            # Flax has some of them since 0.12.4.
            taken = inspect.signature(wrap).parameters
            known = {name: options[name] for name in options if name in taken}
            f = wrap(lambda model, x: jnp.sin(model(x)).mean(), **known)
            return nnx.grad(f)(model, x)

        got, want = gradient(dafjax.nnx.remat_compress), gradient(nnx.remat)
        assert relative_error(flat(got), flat(want)) < 0.01

    @pytest.mark.parametrize("name", ["prevent_cse", "graph", "graph_updates"])
    def test_options_that_are_no_bools(self, name):
        with pytest.raises(TypeError, match=f"{name}=.*bool.*no effect"):
            dafjax.nnx.remat_compress(jnp.sin, **{name: "yes"})
