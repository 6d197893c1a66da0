"""Code for `jax.checkpoint` works with `remat_compress` in its place."""

import dataclasses
import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import checkpoint_policies as stock
from jax.ad_checkpoint import checkpoint_name

import dafjax
from dafjax.policies import CompressDots, CompressExpensive, SaveAll, SaveSaveable
from tests.helpers import relative_error


def loss(w, x):
    """Two plain products, a batched one, and two names."""
    h = checkpoint_name(jnp.sin(x @ w), "hidden")
    scores = jax.nn.softmax(jnp.einsum("bij,bkj->bik", *[h.reshape(4, 64, 128)] * 2))
    y = checkpoint_name(jnp.tanh(scores.reshape(256, 64) @ w[:64]), "last")
    return jnp.mean(y**2)


@pytest.fixture
def operands(key):
    keys = jax.random.split(key)
    shapes = ((128, 128), (256, 128))
    return tuple(
        jax.random.normal(k, s) / 11 for k, s in zip(keys, shapes, strict=True)
    )


def saved(policy, f=loss, *arguments, **options):
    """Returns the primitives of the large values that are saved exactly."""
    arguments = arguments or (jnp.ones((128, 128)), jnp.ones((256, 128)))
    # Without the limit below which small values are saved.
    rest = SaveSaveable(policy, rest=CompressExpensive(min_nbytes=0))
    wrapped = dafjax.remat_compress(f, policy=rest, **options)
    kept = dafjax.saved_residuals(wrapped, *arguments).kept
    return {item.primitive for item in kept if item.codec is None and is_large(item)}


def is_large(item):
    return item.raw_nbytes > 16 * 1024


def saves_all(*_, **__):
    return True


def saves_sines(primitive, *operands, **params):
    return primitive.name == "sin"


def saves_by_shape(primitive, *operands, **params):
    return primitive.name == "dot_general" and operands[0].ndim == 3


@pytest.mark.parametrize(
    ("policy", "primitives"),
    [
        (stock.dots_saveable, {"dot_general"}),
        (stock.save_only_these_names("hidden"), {"sin"}),
        (stock.save_only_these_names("hidden", "last"), {"sin", "tanh"}),
        (stock.save_only_these_names("other"), set()),
        (stock.save_any_names_but_these("last"), {"sin"}),
        (
            stock.save_from_both_policies(
                stock.dots_with_no_batch_dims_saveable,
                stock.save_only_these_names("last"),
            ),
            {"dot_general", "tanh"},
        ),
        (saves_sines, {"sin"}),
        (saves_by_shape, {"dot_general"}),
        (functools.partial(saves_sines), {"sin"}),
    ],
)
def test_a_policy_says_what_is_saved_as_it_is(policy, primitives):
    assert saved(policy) == primitives


@pytest.mark.parametrize(
    ("policy", "num_products"),
    [(stock.dots_saveable, 3), (stock.dots_with_no_batch_dims_saveable, 2)],
)
def test_products_are_told_apart_by_their_parameters(operands, policy, num_products):
    wrapped = dafjax.remat_compress(loss, policy=policy)
    kept = dafjax.saved_residuals(wrapped, *operands).kept
    saved = [item for item in kept if item.codec is None and is_large(item)]
    assert [item.primitive for item in saved] == ["dot_general"] * num_products


@pytest.mark.parametrize("policy", [stock.dots_saveable, saves_all])
def test_of_what_is_saved_the_gradient_is_exact(operands, policy):
    got = jax.jit(jax.grad(dafjax.remat_compress(loss, policy=policy)))(*operands)
    np.testing.assert_allclose(got, jax.grad(loss)(*operands), rtol=1e-4, atol=1e-8)


def test_all_other_values_are_compressed(operands):
    policy = stock.save_only_these_names("hidden")
    wrapped = dafjax.remat_compress(loss, policy=policy, bits=8)
    got = jax.jit(jax.grad(wrapped))(*operands)
    assert 1e-6 < relative_error(got, jax.grad(loss)(*operands)) < 0.02
    plan = dafjax.saved_residuals(wrapped, *operands)
    assert {item.codec is None for item in plan.kept} == {True, False}


def test_the_mark_of_a_wrapped_function_is_no_name(operands):
    def f(w, x):
        return jnp.mean(dafjax.remat_compress(lambda x: jnp.exp(x @ w))(x) ** 2)

    assert saved(stock.save_any_names_but_these(), f, *operands) == set()


def test_names_in_loops_and_branches_hold_for_what_comes_out(operands):
    def f(w, x):
        def body(x, _):
            return checkpoint_name(jnp.sin(x @ w), "hidden"), None

        x, _ = jax.lax.scan(body, x, length=2)
        x = jax.lax.cond(x[0, 0] > 0, lambda x: body(x, None)[0], lambda x: x, x)
        return jnp.mean(x**2)

    # The operand of each iteration, and the result of the branch.
    names = stock.save_only_these_names("hidden")
    assert saved(names, f, *operands) == {"argument", "cond"}
    assert saved(stock.save_only_these_names("other"), f, *operands) == set()
    assert "dot_general" in saved(stock.dots_saveable, f, *operands)


def test_of_a_softmax_the_denominators_are_saved(operands):
    def saves_sums(primitive, *operands, **params):
        return primitive.name == "reduce_sum"

    def kept(policy):
        wrapped = dafjax.remat_compress(loss, policy=policy)
        return {
            item.primitive for item in dafjax.saved_residuals(wrapped, *operands).kept
        }

    # Otherwise the backward pass sums the codes of the exponentials.
    assert "exp" in kept(saves_sums)
    assert "reduce_sum" in kept(saves_sums)
    assert "reduce_sum" not in kept(None)


def test_what_a_sine_reads_is_saved_under_its_name_and_not_its_phase(operands):
    def f(w, x):
        return jnp.sum(jnp.sin(checkpoint_name(x @ w, "hidden")))

    names = stock.save_only_these_names("hidden")
    assert saved(names, f, *operands) == {"dot_general"}


def test_an_exponential_that_dafjax_rewrites_is_asked_about(operands):
    def saves_exponentials(primitive, *operands, **params):
        return primitive.name == "exp"

    def f(w, x):
        return jnp.sum(jnp.exp(-((x @ w) ** 2)))

    assert saved(saves_exponentials, f, *operands) == {"bounded_exp"}


def test_a_pooling_whose_operand_is_saved_notes_no_places(operands):
    def f(w, x):
        h = (x @ w).reshape(16, 16, 128)
        pooled = jax.lax.reduce_window(
            h, -jnp.inf, jax.lax.max, (1, 2, 2), (1, 2, 2), "VALID"
        )
        return jnp.sum(pooled**2)

    wrapped = dafjax.remat_compress(f, policy=saves_all)
    assert {item.codec for item in dafjax.saved_residuals(wrapped, *operands).kept} == {
        None
    }


def test_arguments_of_a_block_are_no_results_of_operations(operands):
    wrapped = dafjax.remat_compress(
        lambda w, x: jnp.sum(jnp.sin(x @ w)),
        policy=stock.save_only_these_names("hidden"),
        activation_argnums=1,
    )
    kept = dafjax.saved_residuals(wrapped, *operands).kept
    assert {item.primitive for item in kept if item.codec is not None} == {
        "argument",
        "phase",
    }


def test_a_named_argument_is_saved(operands):
    wrapped = dafjax.remat_compress(
        lambda w, x: jnp.sum(jnp.sin(checkpoint_name(x, "x") @ w)),
        policy=stock.save_only_these_names("x"),
        activation_argnums=1,
    )
    kept = dafjax.saved_residuals(wrapped, *operands).kept
    assert [item.codec for item in kept if item.primitive == "argument"] == [None]


class TestStandIns:
    """Two stock policies stand for policies of dafjax."""

    def test_what_saves_nothing_leaves_all_to_the_default(self, operands):
        def kept(policy):
            wrapped = dafjax.remat_compress(loss, policy=policy)
            return dafjax.saved_residuals(wrapped, *operands).kept

        assert kept(stock.nothing_saveable) == kept(None)

    def test_what_saves_everything_is_plain_and_differentiable_twice(self, operands):
        w, x = operands
        f = dafjax.remat_compress(loss, policy=stock.everything_saveable)
        np.testing.assert_array_equal(jax.grad(f)(w, x), jax.grad(loss)(w, x))
        v = jnp.ones_like(w)
        again = jax.grad(lambda w: jnp.vdot(jax.grad(f)(w, x), v))(w)
        assert np.isfinite(again).all()


class TestOffloading:
    """There is no offload of raw values: they are saved, and a warning says so."""

    OFFLOADS = (
        stock.offload_dot_with_no_batch_dims("device", "pinned_host"),
        stock.save_and_offload_only_these_names(
            names_which_can_be_saved=["last"],
            names_which_can_be_offloaded=["hidden"],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    )

    @pytest.mark.parametrize(
        ("policy", "primitives"),
        zip(OFFLOADS, ({"dot_general"}, {"sin", "tanh"}), strict=True),
    )
    def test_values_are_saved_with_a_warning(self, policy, primitives):
        with pytest.warns(UserWarning, match=r"policy=.*pinned_host.*stores\.Host\(\)"):
            assert saved(policy) == primitives

    def test_a_policy_that_offloads_nothing_does_not_warn(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert (
                saved(self.OFFLOADS[1], lambda w, x: jnp.sum(jnp.exp(x @ w))) == set()
            )


@dataclasses.dataclass
class Unhashable:
    """Equal by content, and so not hashable."""

    names: tuple[str, ...] = ()

    def __call__(self, *_, **__):
        return False


class TestErrors:
    @pytest.mark.parametrize(
        ("policy", "message"),
        [
            (CompressDots, r"policy=.*policy of `jax\.checkpoint`.*CompressDots"),
            ("dots", r"policy=.*`'dots'` of type `str`.*checkpoint_policies"),
            (Unhashable(), r"must be hashable.*Unhashable.*frozen"),
        ],
    )
    def test_what_is_no_policy(self, policy, message):
        with pytest.raises(TypeError, match=message):
            dafjax.remat_compress(jnp.sin, policy=policy)

    def test_an_answer_that_is_none(self, operands):
        f = dafjax.remat_compress(loss, policy=lambda *_, **__: "yes")
        with pytest.raises(TypeError, match=r"must return a bool.*returned `'yes'`"):
            jax.grad(f)(*operands)

    @pytest.mark.parametrize(
        ("saveable", "rest", "message"),
        [
            (stock.save_only_these_names, SaveAll(), r"makes a policy.*Call it"),
            (CompressDots, SaveAll(), r"\(saveable\).*the class.*CompressDots"),
            (saves_all, 4, r"\(rest=\.\.\.\).*got `4`"),
        ],
    )
    def test_options_of_the_policy(self, saveable, rest, message):
        with pytest.raises(TypeError, match=message):
            SaveSaveable(saveable, rest)

    def test_a_second_forward_pass_can_save_nothing_exactly(self):
        with pytest.raises(NotImplementedError, match=r"rematerialize=True.*policy=.*"):
            dafjax.remat_compress(loss, policy=stock.dots_saveable, rematerialize=True)
        dafjax.remat_compress(loss, policy=stock.nothing_saveable, rematerialize=True)

    @pytest.mark.parametrize("value", [None, 1, "yes", (True, 1), object()])
    def test_prevent_cse_that_is_no_bool(self, value):
        with pytest.raises(TypeError, match=r"prevent_cse=.*bool.*no effect"):
            dafjax.remat_compress(loss, prevent_cse=value)

    def test_concrete(self):
        with pytest.raises(NotImplementedError, match=r"concrete=True.*static_argnums"):
            dafjax.remat_compress(loss, concrete=True)
        with pytest.raises(TypeError, match=r"concrete=.*bool.*got `1`"):
            dafjax.remat_compress(loss, concrete=1)


class TestSignature:
    """A new keyword of `jax.checkpoint` shows here."""

    def test_every_parameter_is_taken_as_jax_takes_it(self):
        ours = inspect.signature(dafjax.remat_compress).parameters
        for name, parameter in inspect.signature(jax.checkpoint).parameters.items():
            assert ours[name].kind == parameter.kind, name

    @pytest.mark.parametrize(
        "options",
        [
            {"prevent_cse": False},
            {"prevent_cse": (True, False)},
            {"prevent_cse": [False, True], "concrete": False},
            {"policy": stock.dots_with_no_batch_dims_saveable, "prevent_cse": True},
            {"policy": None, "static_argnums": (1,), "prevent_cse": False},
            {"static_argnames": {"n"}},
        ],
    )
    def test_options_of_scripts_are_taken(self, options):
        @functools.partial(dafjax.remat_compress, **options)
        def f(x, n):
            return jnp.sum(jnp.sin(x)) * n

        x = jnp.ones(3)
        np.testing.assert_allclose(jax.grad(f)(x, 2), 2 * np.cos(x), rtol=1e-6)


def test_a_script_is_ported_by_replacing_one_name(operands):
    """Once as it was, once with the name replaced: positions, keywords, a decorator."""

    def script(checkpoint):
        block = checkpoint(lambda w, x: jnp.tanh(x @ w))
        scaled = checkpoint(
            lambda w, x, scale: jnp.sin(x @ w) * scale,
            static_argnums=(2,),
            policy=stock.dots_saveable,
            prevent_cse=False,
        )

        @functools.partial(checkpoint, policy=stock.save_only_these_names("h"))
        def last(w, x):
            return checkpoint_name(jnp.sin(x @ w), "h")

        def loss(w, x):
            return jnp.mean(last(w, scaled(w, block(w, x), 2)) ** 2)

        return jax.jit(jax.value_and_grad(loss))(*operands)

    loss, gradient = script(dafjax.remat_compress)
    want_loss, want_gradient = script(jax.checkpoint)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    assert relative_error(gradient, want_gradient) < 0.5
