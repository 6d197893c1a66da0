"""Sums of terms with a common factor: which are products, and that they are right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AxisType

import dafjax
from dafjax._passes.algebra import factor_sums
from dafjax._trace.equation import evaluate, look_up
from dafjax._trace.graph import flatten
from dafjax._trace.residuals import Program
from tests.helpers import prepared


X = jax.ShapeDtypeStruct((6, 5, 4), jnp.float32)
V = jax.ShapeDtypeStruct((4,), jnp.float32)
W = jax.ShapeDtypeStruct((1, 1, 4), jnp.float32)
M = jax.ShapeDtypeStruct((6, 5, 1), jnp.float32)


def factored(function, *avals):
    """Returns how many sums of an array like X a function makes, and what it does."""
    closed = jax.make_jaxpr(function)(*avals)
    graph = flatten(closed)
    # All of it is a backward pass, of cotangents.
    program = factor_sums(
        Program(
            avals=graph.avals,
            num_arguments=0,
            forward=(),
            results=(),
            cotangents=tuple(range(graph.num_inputs)),
            backward=graph.equations,
            gradients=graph.outputs,
            perturbed=(),
            differentiable=(True,) * graph.num_inputs,
            tags={},
            function=closed,
        )
    )
    equations, types = (*program.forward, *program.backward), program.avals
    sums = [
        eqn
        for eqn in equations
        if eqn.primitive == "reduce_sum" and types[eqn.input_values[0]].shape == X.shape
    ]

    def run(*arguments):
        env = dict(enumerate(arguments))
        for eqn in equations:
            results = evaluate(eqn, look_up(eqn.inputs, env))
            env.update(zip(eqn.outputs, results, strict=True))
        return look_up(graph.outputs, env)

    return len(sums), run


def rows(x):
    return jnp.sum(x, (0, 1))


CASES = {
    "a factor for each channel": (lambda x, w: (rows(x), rows(x * w)), (X, W), 1),
    "a factor in front": (lambda x, w: (rows(x), rows(w * x)), (X, W), 1),
    "a factor that was repeated": (lambda x, v: (rows(x), rows(x * v)), (X, V), 1),
    "a number": (lambda x: (rows(x), rows(3.5 * x)), (X,), 1),
    "a number of an argument": (
        lambda x, a: (rows(x), rows(x * a)),
        (X, jax.ShapeDtypeStruct((), jnp.float32)),
        1,
    ),
    "the opposite": (lambda x: (rows(x), rows(-x)), (X,), 1),
    "several": (lambda x, w, v: (rows(x), rows(-(-(w * x) * v) * 2)), (X, W, V), 1),
    "along the last axis": (
        lambda x, m: (jnp.sum(x, 2), jnp.sum(x * m, 2)),
        (X, M),
        1,
    ),
    "over all": (lambda x: (jnp.sum(x), jnp.sum(x * 0.5)), (X,), 1),
    "of what is there with a factor": (
        lambda x, w: (rows(x), rows(x * w), rows(x * w * 2)),
        (X, W),
        1,
    ),
    "the same sum twice": (lambda x: (rows(x), rows(x)), (X,), 2),
    "a sum that comes later": (lambda x, w: (rows(x * w), rows(x)), (X, W), 2),
    "a factor that varies": (lambda x, m: (rows(x), rows(x * m)), (X, M), 2),
    "a square": (lambda x: (rows(x), rows(x * x)), (X,), 2),
    "other axes": (lambda x, w: (jnp.sum(x, 0), rows(x * w)), (X, W), 2),
    "a sum that is not there": (lambda x, w: rows(x * w), (X, W), 1),
}


@pytest.mark.parametrize("case", CASES)
def test_sums_of_terms_with_a_common_factor_are_products(case, rng):
    function, avals, count = CASES[case]
    arguments = [rng.standard_normal(aval.shape, np.float32) for aval in avals]
    found, run = factored(function, *avals)
    assert found == count
    expected = jax.tree.leaves(function(*map(jnp.asarray, arguments)))
    for result, wanted in zip(run(*arguments), expected, strict=True):
        assert result.dtype == wanted.dtype
        np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-5)


def test_integers_stay(rng):
    del rng
    x = jax.ShapeDtypeStruct(X.shape, jnp.int32)
    assert factored(lambda x: (rows(x), rows(x * 3)), x)[0] == 2


def test_what_devices_share_by_type_stays():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct(
            X.shape, X.dtype, sharding=jax.sharding.NamedSharding(mesh, jax.P("data"))
        )
        assert factored(lambda x: (rows(x), rows(-x)), x)[0] == 2


def test_a_batch_norm_sums_twice_in_its_backward_pass():
    """Without the factor it sums three times, as XLA does."""
    norm = nn.BatchNorm(use_running_average=False, use_bias=True)
    variables = jax.eval_shape(norm.init, jax.random.key(0), X)

    def apply(params, stats, x):
        y, _ = norm.apply(
            {"params": params, "batch_stats": stats}, x, mutable=["batch_stats"]
        )
        return [y]

    leaves, structure = jax.tree.flatten(
        (variables["params"], variables["batch_stats"], X)
    )
    closed = jax.make_jaxpr(lambda *a: apply(*jax.tree.unflatten(structure, a)))(
        *leaves
    )
    program = prepared(closed, [True] * len(leaves))
    sums = [
        eqn
        for eqn in program.backward
        if eqn.primitive == "reduce_sum"
        and program.avals[eqn.input_values[0]].shape == X.shape
    ]
    assert len(sums) == 2
    made = {value for eqn in program.backward for value in eqn.outputs}
    made.update(program.cotangents)
    assert all(made.intersection(eqn.input_values) for eqn in program.backward)


def test_gradients_of_a_batch_norm_are_those_of_jax(rng):
    norm = nn.BatchNorm(use_running_average=False)
    x = jnp.asarray(rng.standard_normal((64, 32, 48), np.float32) + 3)
    variables = norm.init(jax.random.key(0), x)
    weights = jnp.asarray(rng.standard_normal(x.shape, np.float32))

    def loss(params, x):
        y, _ = norm.apply(
            {"params": params, "batch_stats": variables["batch_stats"]},
            x,
            mutable=["batch_stats"],
        )
        return jnp.sum(weights * y)

    expected = jax.grad(loss, (0, 1))(variables["params"], x)
    found = jax.grad(dafjax.remat_compress(loss, bits=None), (0, 1))(
        variables["params"], x
    )
    for value, wanted in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-4)
