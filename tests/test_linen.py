"""The lifted transform: equal to `nn.remat` but for gradients, and smaller."""

import functools
import inspect
from collections.abc import Callable

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dafjax
import dafjax.linen
from dafjax.policies import CompressExpensive
from tests.helpers import relative_error, run_python, slow, temp_nbytes


# Small arrays are compressed too, so that small tests show what large ones do.
EAGER_POLICY = CompressExpensive(min_nbytes=256)


def compressed(target, *, bits=8, **options):
    return dafjax.linen.remat_compress(
        target, bits=bits, policy=EAGER_POLICY, **options
    )


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def assert_same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def assert_close(got, want):
    """Equal but for the rounding of programs that XLA fuses differently."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5), got, want)


def assert_close_but_not_equal(got, want, *, least=1e-6, most=0.05):
    """Two-sided: a gradient that does not depend on codes at all is a failure."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert least < relative_error(flat(got), flat(want)) < most


class Block(nn.Module):
    """Dense, BatchNorm, ReLU, Dropout, and the input added."""

    rate: float = 0.25

    @nn.compact
    def __call__(self, x, train=True):
        y = nn.Dense(x.shape[-1])(x)
        y = nn.BatchNorm(use_running_average=not train)(y)
        return x + nn.Dropout(self.rate, deterministic=not train)(nn.relu(y))


class Stack(nn.Module):
    """Blocks in a Python loop."""

    wrap: Callable[[type], type]
    depth: int = 2
    rate: float = 0.25

    @nn.compact
    def __call__(self, x):
        for _ in range(self.depth):
            x = self.wrap(Block)(self.rate)(x)
        return x


class Scanned(nn.Module):
    """Blocks in `nn.scan`."""

    wrap: Callable[[type], type]
    depth: int = 3
    rate: float = 0.25

    @nn.compact
    def __call__(self, x):
        def body(block, x, _):
            return block(x), None

        scan = nn.scan(
            body,
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.depth,
        )
        x, _ = scan(self.wrap(Block)(self.rate), x, None)
        return x


class Shared(nn.Module):
    """One block called twice, and a layer of it called by another module."""

    wrap: Callable[[type], type]

    @nn.compact
    def __call__(self, x):
        block = self.wrap(Block)(name="block")
        layer = nn.Dense(x.shape[-1], name="layer")
        return self.wrap(Caller)(layer, name="caller")(block(block(x)))


class Caller(nn.Module):
    """Calls a layer that belongs to another module."""

    layer: nn.Module

    @nn.compact
    def __call__(self, x):
        return nn.tanh(self.layer(self.layer(x)))


MODELS = [Stack, Scanned, Shared]


def step(model, variables, x):
    """Loss, updated batch statistics and gradient of the parameters."""

    def loss(params):
        y, updates = model.apply(
            {**variables, "params": params},
            x,
            mutable=["batch_stats"],
            rngs={"dropout": jax.random.key(7)},
        )
        return jnp.mean(jnp.square(y)), updates

    return jax.value_and_grad(loss, has_aux=True)(variables["params"])


def init(model, x):
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    return jax.jit(model.init)(keys, x)


@pytest.fixture
def x(key):
    return jax.random.normal(key, (64, 32))


class TestAgainstRemat:
    @pytest.mark.parametrize("model", MODELS)
    def test_all_is_equal_but_gradients_that_are_close(self, model, x):
        """Parameters and their names, the loss, and batch statistics."""
        variables = init(model(nn.remat), x)
        assert_same(init(model(compressed), x), variables)
        run = jax.jit(step, static_argnums=0)
        (loss, updates), gradient = run(model(compressed), variables, x)
        (want_loss, want_updates), want_gradient = run(model(nn.remat), variables, x)
        assert_close(loss, want_loss)
        assert_close(updates, want_updates)
        assert_close_but_not_equal(gradient, want_gradient)

    def test_without_bits_everything_is_equal(self, x):
        off = functools.partial(compressed, bits=None)
        variables = init(Shared(nn.remat), x)
        run = jax.jit(step, static_argnums=0)
        got, want = run(Shared(off), variables, x), run(Shared(nn.remat), variables, x)
        assert_close(got, want)

    def test_without_jit(self, x):
        variables = init(Stack(nn.remat, depth=1), x)
        got = step(Stack(compressed, depth=1), variables, x)
        want = step(Stack(nn.remat, depth=1), variables, x)
        assert_close(got[0], want[0])
        assert_close_but_not_equal(got[1], want[1])

    def test_another_seed_gives_other_noise(self, x):
        variables = init(Stack(nn.remat, depth=1), x)

        @jax.jit
        def gradient(seed):
            wrap = functools.partial(compressed, bits=2, seed=seed)
            return step(Stack(wrap, depth=1), variables, x)[1]

        assert relative_error(flat(gradient(1)), flat(gradient(0))) > 1e-3


class TestCalling:
    """The ways in which `nn.remat` can be called."""

    def test_as_a_decorator_of_a_method(self, x):
        def net(wrap):
            class Net(nn.Module):
                @wrap
                @nn.compact
                def __call__(self, x):
                    return nn.Dense(8)(nn.tanh(nn.Dense(32)(x)))

            return Net()

        assert_agree(net(compressed), net(nn.remat), x)

    @pytest.mark.parametrize("static_argnums", [2, (2,)])
    def test_static_arguments_count_self(self, static_argnums, x):
        def net(wrap):
            class Net(nn.Module):
                @nn.compact
                def __call__(self, x):
                    block = wrap(Block, static_argnums=static_argnums)
                    return block()(block()(x, False), False)

            return Net()

        assert_agree(net(compressed), net(nn.remat), x)

    def test_a_partial_of_a_class(self, x):
        def net(wrap):
            return wrap(functools.partial(Block, name="named"))()

        got, want = (init(net(wrap), x) for wrap in (compressed, nn.remat))
        assert_same(got, want)

    def test_methods_of_other_names(self, x):
        class Coder(nn.Module):
            def setup(self):
                self.layers = [nn.Dense(32), nn.Dense(32)]

            def __call__(self, x):
                return self.decode(self.encode(x))

            def encode(self, x):
                return nn.tanh(self.layers[0](x))

            def decode(self, x):
                return nn.tanh(self.layers[1](x))

        got = compressed(Coder, methods=["encode", "decode"])()
        want = nn.remat(Coder, methods=["encode", "decode"])()
        assert_agree(got, want, x)

    def test_pytrees_and_keyword_arguments(self, x):
        class Net(nn.Module):
            @nn.compact
            def __call__(self, pair, *, mask):
                y = nn.tanh(nn.Dense(32)(pair["x"])) * mask
                return {"y": nn.Dense(32)(y) + pair["bias"][0], "mask": mask}

        got, want = compressed(Net)(), nn.remat(Net)()
        pair = {"x": x, "bias": (jnp.ones(32), None)}
        mask = jnp.ones((64, 32))
        variables = want.init(jax.random.key(0), pair, mask=mask)

        def loss(module, variables):
            return jnp.sum(jnp.sin(module.apply(variables, pair, mask=mask)["y"]))

        assert_close_but_not_equal(
            jax.grad(functools.partial(loss, got))(variables),
            jax.grad(functools.partial(loss, want))(variables),
        )

    def test_sown_intermediates_come_out(self, x):
        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                x = nn.tanh(nn.Dense(32)(x))
                self.sow("intermediates", "hidden", x)
                return x

        variables = init(compressed(Net)(), x)
        _, got = compressed(Net)().apply(variables, x, mutable="intermediates")
        _, want = Net().apply(variables, x, mutable="intermediates")
        assert_close(got, want)


def assert_agree(module, reference, x):
    """Same variables; same result; a gradient that is close, but not the same."""
    variables = init(reference, x)
    assert_same(init(module, x), variables)

    def loss(module, params):
        y = module.apply({**variables, "params": params}, x)
        return jnp.sum(jnp.square(y))

    run = jax.jit(jax.value_and_grad(loss, argnums=1), static_argnums=0)
    got, got_gradient = run(module, variables["params"])
    want, want_gradient = run(reference, variables["params"])
    assert_close(got, want)
    assert_close_but_not_equal(got_gradient, want_gradient)


class TestActivations:
    """Which arguments of a block wait in a few bits."""

    @staticmethod
    def stored_fraction(x, **options):
        model = compressed(Block, bits=2, **options)()
        variables = init(model, x)

        def loss(params, x):
            out = model.apply(
                {**variables, "params": params},
                x,
                mutable=["batch_stats"],
                rngs={"dropout": jax.random.key(7)},
            )
            return jnp.sum(out[0])

        saved = dafjax.saved_residuals(loss, variables["params"], x)
        return saved.stored_nbytes / saved.raw_nbytes

    def test_the_input_of_a_block_is_compressed(self, key):
        x = jax.random.normal(key, (256, 64))
        assert self.stored_fraction(x) < 0.15

    def test_parameters_are_never_quantized(self, key):
        """`dx = dy @ w.T` needs the parameter alone: it is exact."""
        x = jax.random.normal(key, (64, 128))
        module = compressed(nn.Dense, bits=1)(128, name="dense")
        variables = init(module, x)

        def gradient(module):
            loss = lambda x: jnp.sum(module.apply(variables, x))
            return jax.jit(jax.grad(loss))(x)

        assert_close(gradient(module), gradient(nn.Dense(128)))

    def test_an_input_that_is_left_out_is_exact(self, key):
        """`dw = x.T @ dy` needs the input alone."""
        x = jax.random.normal(key, (64, 128))
        variables = init(nn.Dense(128), x)

        def gradient(module):
            loss = lambda v: jnp.sum(module.apply(v, x))
            return jax.jit(jax.grad(loss))(variables)

        want = gradient(nn.Dense(128))
        left_out = compressed(nn.Dense, activation_argnums=())(128)
        assert_close(gradient(left_out), want)
        for options in ({}, {"activation_argnums": 1}):
            got = gradient(compressed(nn.Dense, **options)(128))
            assert_close_but_not_equal(got, want)


@pytest.mark.parametrize("model", [slow(Stack), Scanned])
def test_a_stack_of_blocks_needs_less_memory(model):
    x = jnp.ones((1024, 128))

    def nbytes(wrap):
        module = model(wrap, depth=12)
        variables = jax.eval_shape(functools.partial(init, module), x)
        program = jax.jit(functools.partial(step, module)).lower(variables, x)
        return temp_nbytes(program)

    plain = nbytes(lambda block: block)
    ratio = nbytes(functools.partial(compressed, bits=2)) / plain
    assert ratio < 0.25


class TestErrors:
    """Bad input is named, with what is valid and what to do."""

    def test_options_are_checked_before_the_first_call(self):
        with pytest.raises(ValueError, match=r"bits=.*\(1, 2, 3, 4, 8\).*got 5"):
            dafjax.linen.remat_compress(Block, bits=5)
        with pytest.raises(TypeError, match=r"activation_argnums=.*ints.*'x'"):
            dafjax.linen.remat_compress(Block, activation_argnums="x")

    @pytest.mark.parametrize("name", ["static_argnums", "activation_argnums"])
    @pytest.mark.parametrize("numbers", [0, (1, 0), -1])
    def test_self_has_no_position_to_name(self, name, numbers):
        with pytest.raises(ValueError, match=rf"{name}=.*from 1 on.*`self`"):
            dafjax.linen.remat_compress(Block, **{name: numbers})

    @pytest.mark.parametrize("name", ["static_argnums", "activation_argnums"])
    def test_a_position_that_the_call_does_not_have(self, name, x):
        module = dafjax.linen.remat_compress(Block, **{name: 2})()
        with pytest.raises(ValueError, match=rf"{name}=.*argument 2.*2 positional"):
            init(module, x)

    @pytest.mark.parametrize("methods", ["encode", {"encode": {}}, [1]])
    def test_methods_that_are_no_list_of_names(self, methods):
        with pytest.raises(TypeError, match=r"methods=.*list of names.*got"):
            dafjax.linen.remat_compress(Block, methods=methods)

    def test_a_module_instead_of_its_class(self):
        with pytest.raises(flax.errors.TransformTargetError):
            dafjax.linen.remat_compress(Block())

    def test_something_that_cannot_be_called(self):
        with pytest.raises(TypeError, match=r"must be given a function.*3\.0"):
            dafjax.linen.remat_compress(3.0)


@pytest.mark.parametrize("module", ["linen", "nnx"])
def test_without_flax_the_error_says_what_to_install(module):
    program = (
        "import sys; sys.modules['flax'] = None\n"
        "import dafjax\n"
        f"try: import dafjax.{module}\n"
        "except ImportError as error: assert 'pip install flax' in str(error)\n"
        "else: raise AssertionError('imported')"
    )
    run_python(program)


def test_importing_dafjax_does_not_import_flax():
    program = "import dafjax, sys; assert 'flax' not in sys.modules"
    run_python(program)


class TestPorting:
    """Code for `nn.remat` works with `dafjax.linen.remat_compress` in its place."""

    def test_every_parameter_is_taken_as_flax_takes_it(self):
        ours = inspect.signature(dafjax.linen.remat_compress).parameters
        flax_s = inspect.signature(nn.remat).parameters
        assert list(ours)[: len(flax_s)] == list(flax_s)
        for name, parameter in flax_s.items():
            assert ours[name].kind == parameter.kind
            if parameter.default is not inspect.Parameter.empty:
                assert ours[name].default == parameter.default

    @pytest.mark.parametrize(
        "arguments",
        [
            ((True, True, False, False, (2,), jax.checkpoint_policies.dots_saveable)),
            ((True, ["dropout", "params"], False, True, 2, None, ["__call__"])),
        ],
    )
    def test_arguments_by_position(self, arguments, x):
        def loss(wrap):
            block = wrap(Block, *arguments)(0.0)
            variables = block.init(jax.random.key(0), x, False)
            f = lambda v: jnp.mean(block.apply(v, x, False) ** 2)
            return jax.grad(f)(variables)["params"]

        got, want = loss(dafjax.linen.remat_compress), loss(nn.remat)
        assert relative_error(flat(got), flat(want)) < 0.05

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"concrete": True}, NotImplementedError, "concrete=True.*static_argnums"),
            ({"prevent_cse": 1}, TypeError, "prevent_cse=.*bool"),
            ({"policy": "dots"}, TypeError, "policy=.*'dots'"),
        ],
    )
    def test_bad_options(self, options, error, message):
        with pytest.raises(error, match=message):
            dafjax.linen.remat_compress(Block, **options)
