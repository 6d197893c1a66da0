"""Programs of a batch of one without its axis, and chunks of the next axis."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dafjax
from dafjax._passes.unit_axes import drop_unit_axes
from dafjax._trace.equation import evaluate, look_up
from dafjax._trace.residuals import Program, differentiate
from tests.helpers import gradient_nbytes, relative_error


WIDTH, LENGTH, HEADS = 8, 24, 2


def norm(x, axis: int | tuple[int, ...] = -1):
    x = x - x.mean(axis, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(axis, keepdims=True) + 1e-5)


def attention(w, x):
    q, k, v = (jnp.reshape(x @ p, (*x.shape[:-1], HEADS, -1)) for p in w[:3])
    logits = jnp.einsum("...thd,...shd->...hts", q, k)
    mask = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(mask, logits, -1e9))
    y = jnp.einsum("...hts,...shd->...thd", weights, v)
    return x + y.reshape(x.shape) @ w[3]


def block(w, x):
    x = attention(w, norm(x))
    return x + jax.nn.gelu(norm(x) @ w[0]) @ w[1]


def classify(w, x):
    """It looks words up, and the logits of labels."""
    tokens = jnp.argmax(x, -1)
    y = block(w, w[2][tokens]) @ w[2].T
    logits = jax.nn.log_softmax(y[..., :-1, :])
    return -jnp.take_along_axis(logits, tokens[..., 1:, None], -1).mean()


def move(w, x):
    y = jnp.concatenate([x, jnp.flip(x, 1)[:, 1:], x @ w[0]], 1)
    y = jnp.pad(jnp.cumsum(y, 1), ((0, 0), (1, 2), (0, 0))).swapaxes(1, 2)
    first, second = jnp.split(jnp.sin(y), 2, 1)
    steps = jax.lax.broadcasted_iota(x.dtype, first.shape, 2)
    return jnp.sum(first * second * steps) + jnp.sum(jnp.sort(y.max(1)))


def scan(w, x):
    layers = jnp.stack([jnp.stack(w), jnp.stack(w[::-1])])
    return jnp.sum(jax.lax.scan(lambda x, w: (block(w, x), x[:, 0]), x, layers)[0])


def normalize_batch(w, x):
    return jnp.sum(jnp.sin(norm(x @ w[0], (0, 1)) @ w[1]))


def switch(w, x):
    y = jax.lax.cond(x.sum() > 0, lambda x: x @ w[0], lambda x: x @ w[1], x)
    return jnp.sum(jax.checkpoint(block)(w, y))


def drop_out(w, x):
    mask = jax.random.bernoulli(jax.random.key(1), 0.5, x.shape)
    return jnp.sum(block(w, jnp.where(mask, x, 0)))


def tensor(w, x):
    """A result keeps its axis."""
    return jnp.sin(x @ w[0])


def differ_a_little(w, x):
    """Equations are alike but for a number, an array, a parameter or an operand."""
    y, z = 2 * (x @ w[0]), 3 * (x @ w[1])
    first = np.full((1, LENGTH, 1), 0.5, x.dtype)
    y, z = y * first, z * (first + np.arange(LENGTH).reshape(first.shape))
    return jnp.sum(
        y * y + y * z + (y.cumsum(1) - jax.lax.cumsum(z, 1, reverse=True)) ** 3
    )


CHANGED = {
    "block": block,
    "differ_a_little": differ_a_little,
    "classify": classify,
    "move": move,
    "normalize_batch": normalize_batch,
    "switch": switch,
    "drop_out": drop_out,
    "tensor": tensor,
}


def convolve(w, x):
    kernel = jnp.stack([w[0], w[1]])
    spec = ("NWC", "WIO", "NWC")
    y = jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=spec)
    return jnp.sum(jnp.sin(norm(y)))


def weigh_scales(w, x):
    """Small values `[1, n]` stand beside larger ones."""
    return jnp.sum(jnp.sin(x[0] @ w[0] * w[1][:1]))


UNCHANGED = {"convolve": convolve, "weigh_scales": weigh_scales}


def program_of(function, w, x) -> Program:
    closed = jax.make_jaxpr(function)(w, x)
    return differentiate(closed, [True] * len(closed.in_avals))


@functools.partial(jax.jit, static_argnums=0)
def run(program: Program, w, x):
    """Returns the results and gradients of a program."""
    env = dict(enumerate(jax.tree.leaves((w, x))))

    def add(equations):
        for eqn in equations:
            results = evaluate(eqn, look_up(eqn.inputs, env))
            env.update(zip(eqn.outputs, results, strict=True))

    add(program.forward)
    results = look_up(program.results, env)
    env.update(zip(program.cotangents, map(jnp.ones_like, results), strict=True))
    add(program.backward)
    return results + look_up(program.gradients, env)


def operands(key, dtype=jnp.float32, batch=1):
    w, x = (
        jax.random.normal(k, s, dtype)
        for k, s in zip(
            jax.random.split(key),
            ((4, WIDTH, WIDTH), (batch, LENGTH, WIDTH)),
            strict=True,
        )
    )
    return list(w / WIDTH**0.5), x


@pytest.mark.parametrize("function", CHANGED.values(), ids=CHANGED)
def test_results_and_gradients_stay_the_same(function, key):
    with jax.enable_x64(True):
        w, x = operands(key, jnp.float64)
        program = program_of(function, w, x)
        changed = drop_unit_axes(program)
        assert changed is not program
        for got, expected in zip(run(changed, w, x), run(program, w, x), strict=True):
            assert got.shape == expected.shape
            np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("function", [block, tensor])
def test_no_equation_needs_the_axis(function, key):
    program = drop_unit_axes(program_of(function, *operands(key)))
    given = {*program.cotangents, *program.results, *program.gradients}
    made = [v for e in (*program.forward, *program.backward) for v in e.outputs]
    shapes = {program.avals[v].shape for v in made if v not in given}
    assert not any(len(shape) > 2 and shape[0] == 1 for shape in shapes)


@pytest.mark.parametrize("function", UNCHANGED.values(), ids=UNCHANGED)
def test_a_program_without_such_an_axis_stays_as_it_is(function, key):
    program = program_of(function, *operands(key))
    assert drop_unit_axes(program) is program


@pytest.mark.parametrize("function", [block, classify, scan])
def test_a_batch_of_two_stays_as_it_is(function, key):
    program = program_of(function, *operands(key, batch=2))
    assert drop_unit_axes(program) is program


def test_equations_keep_their_places_in_the_model(key):
    def loss(w, x):
        with jax.named_scope("layer"):
            return jnp.sum(jnp.sin(x @ w[0]))

    program = drop_unit_axes(program_of(loss, *operands(key)))
    places = {eqn.place for eqn in program.forward if eqn.primitive == "dot_general"}
    assert places == {"layer"}


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        y = nn.MultiHeadDotProductAttention(
            num_heads=HEADS, dropout_rate=0.5, deterministic=False
        )(x, x, mask=mask)
        y = nn.BatchNorm(use_running_average=False)(x + y)
        return jnp.sum(jnp.sin(y))


def test_a_model_of_linen(key):
    _, x = operands(key)
    mask = nn.make_causal_mask(x[..., 0])
    model, rngs = Linen(), {"params": key, "dropout": key}
    variables = model.init(rngs, x, mask)

    def loss(params):
        variables_of_step = {**variables, "params": params}
        result, _ = model.apply(
            variables_of_step, x, mask, rngs=rngs, mutable=["batch_stats"]
        )
        return result

    assert_same_gradients(loss, variables["params"])


def test_a_model_of_nnx(key):
    _, x = operands(key)
    model = nnx.MultiHeadAttention(
        HEADS,
        WIDTH,
        decode=False,
        dropout_rate=0.5,
        deterministic=False,
        rngs=nnx.Rngs(0),
    )
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    mask = nn.make_causal_mask(x[..., 0])

    def loss(params):
        attend = nnx.merge(graph, params, rest, copy=True)
        return jnp.sum(jnp.sin(x + attend(x, mask=mask)))

    assert_same_gradients(loss, params)


def test_a_loop_over_layers(key):
    w, x = operands(key)
    assert_same_gradients(lambda w: scan(w, x), w)


def test_a_vmapped_function(key):
    w, x = operands(key, batch=3)

    def loss(w):
        rows = jax.vmap(lambda x: wrapped(w, x[None]))(x)
        return jnp.sum(rows)

    wrapped = dafjax.remat_compress(
        lambda w, x: jnp.sum(block(w, x)), policy=dafjax.policies.SaveAll()
    )
    exact = jax.jit(jax.grad(lambda w: jnp.sum(block(w, x))))(w)
    for x, y in zip(jax.jit(jax.grad(loss))(w), exact, strict=True):
        assert relative_error(x, y) < 1e-5


def assert_same_gradients(loss, params):
    """With everything saved, gradients are exact but for rounding."""
    wrapped = dafjax.remat_compress(loss, policy=dafjax.policies.SaveAll())
    got = jax.jit(jax.grad(wrapped))
    expected = jax.jit(jax.grad(loss))(params)
    norms = [float(jnp.linalg.norm(x)) for x in jax.tree.leaves(expected)]
    for x, y in zip(
        jax.tree.leaves(got(params)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5 * max(norms))


class TestMemory:
    """Two layers with 8 heads of 512 positions."""

    def loss(self, w, x):
        for _ in range(2):
            y = norm(x)
            q, k, v = (jnp.reshape(y @ p, (*x.shape[:-1], 8, -1)) for p in w[:3])
            y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            x = x + y.reshape(x.shape) @ w[3]
        return jnp.sum(jnp.sin(x))

    def shapes(self, batch):
        w = jax.ShapeDtypeStruct((128, 128), jnp.float32)
        return [w] * 4, jax.ShapeDtypeStruct((batch, 512, 128), jnp.float32)

    def temp(self, batch, **options):
        wrapped = dafjax.remat_compress(self.loss, **options)
        return gradient_nbytes(wrapped, *self.shapes(batch))

    @pytest.mark.parametrize("batch", [1, 4])
    def test_attention_runs_in_chunks(self, batch):
        logits = batch * 8 * 512 * 512 * 4
        assert self.temp(batch, max_parts=1) > 2.9 * logits
        assert self.temp(batch) < 2.2 * logits

    def test_of_one_is_lower_without_its_axis(self):
        without = ("unit_axes",)
        assert self.temp(1) < 0.8 * self.temp(1, without_passes=without)
        # Attention adds an axis of length 1.
        assert self.temp(4) < 0.9 * self.temp(4, without_passes=without)

    def test_gradients_of_chunks_of_heads_are_those_of_the_whole(self, key):
        w, x = jax.tree.map(
            lambda s: jax.random.normal(key, s.shape) / 11, self.shapes(1)
        )

        def gradient(**options):
            wrapped = dafjax.remat_compress(self.loss, seed=0, **options)
            return jax.jit(jax.grad(wrapped))(w, x)

        for got, expected in zip(gradient(), gradient(max_parts=1), strict=True):
            assert relative_error(got, expected) < 1e-5
