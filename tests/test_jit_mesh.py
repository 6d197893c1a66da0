"""`dafjax.jit` on meshes: the memory of one device is what counts."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import dafjax
from dafjax._step_memory import measure, predict
from tests.helpers import run_python


DEPTH, WIDTH, BATCH = 6, 128, 1024
# Two devices: see conftest.py.
AXES = ("data",)


def loss(weights, x):
    for w in weights:
        x = x + jnp.tanh(x @ w)
    return jnp.mean(x**2)


def sgd(wrap):
    def step(weights, x):
        gradient = jax.grad(wrap(loss))(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient)

    return step


def example():
    keys = jax.random.split(jax.random.key(0), DEPTH + 1)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) / 11 for key in keys[1:]]
    return weights, jax.random.normal(keys[0], (BATCH, WIDTH))


def place(of_weights, of_x, axes=AxisType.Auto, shape=(2,), names=AXES):
    mesh = jax.make_mesh(shape, names, axis_types=(axes,) * len(shape))
    shardings = NamedSharding(mesh, of_weights), NamedSharding(mesh, of_x)
    return jax.device_put(example(), shardings)


PLACES = {
    "data": (P(), P("data")),
    "weights": (P("data"), P("data")),
    "columns": (P(None, "data"), P()),
}


@pytest.fixture(params=PLACES)
def arguments(request):
    return place(*PLACES[request.param])


def plain_memory(arguments, **options):
    return measure(jax.jit(sgd(lambda fun: fun), **options).lower(*arguments))


def test_with_room_on_each_device_it_is_plain(arguments):
    limit = plain_memory(arguments).total_nbytes
    # One device would need more.
    assert plain_memory(example()).total_nbytes > 1.2 * limit
    step = dafjax.jit(sgd(dafjax.remat_compress), memory=limit)
    got, want = step(*arguments), jax.jit(sgd(lambda fun: fun))(*arguments)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, got, want))
    assert step.report().options == "plain"
    assert step.report().memory.total_nbytes == limit


def test_with_less_room_it_fits_on_each_device(arguments):
    plain = plain_memory(arguments).total_nbytes
    chosen = []
    for share in (0.85, 0.6):
        step = dafjax.jit(sgd(dafjax.remat_compress), memory=int(share * plain))
        step.lower(*arguments)
        report = step.report()
        assert report.memory.total_nbytes <= share * plain
        compiled = [tried for tried in report.tried if tried.compiled]
        assert 1 <= len(compiled) <= 3
        chosen.append(report.options)
    assert chosen[0] == 'rematerialize="exact"'
    assert "plain" not in chosen


def test_the_model_predicts_the_memory_of_a_device(arguments):
    jitted = jax.jit(sgd(lambda fun: fun), donate_argnums=0)
    traced = jitted.trace(*arguments)
    predicted, compiled = predict(traced, arguments, {}), measure(traced.lower())
    assert predicted.argument_nbytes == compiled.argument_nbytes
    # Whole activations are gathered where weights are divided along columns.
    assert 0.6 < predicted.temp_nbytes / compiled.temp_nbytes < 1.3
    assert predicted.donated_nbytes == predicted.output_nbytes
    # The compiler adds a table of pointers to the results.
    assert compiled.output_nbytes - predicted.output_nbytes < 512


def test_shardings_may_be_options():
    placed = place(*PLACES["data"])
    options = {"in_shardings": jax.tree.map(lambda x: x.sharding, placed)}
    limit = plain_memory(placed).total_nbytes
    step = dafjax.jit(sgd(dafjax.remat_compress), memory=limit, **options)
    step.lower(*example())
    assert step.report().options == "plain"


def test_explicit_axes():
    arguments = place(*PLACES["data"], axes=AxisType.Explicit)
    limit = plain_memory(arguments).total_nbytes
    for share, chosen in ((1, "plain"), (0.85, 'rematerialize="exact"')):
        step = dafjax.jit(sgd(dafjax.remat_compress), memory=int(share * limit))
        step.lower(*arguments)
        assert step.report().options == chosen


def test_in_a_shard_map_shapes_are_of_one_device():
    weights, x = place(*PLACES["data"])
    mesh = x.sharding.mesh

    def step(wrap):
        def local(weights, x):
            return jax.lax.pmean(jax.grad(wrap(loss))(weights, x), "data")

        specs = P(), P("data")
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())

    traced = jax.jit(step(lambda fun: fun)).trace(weights, x)
    compiled = measure(traced.lower())
    predicted = predict(traced, (weights, x), {})
    assert predicted.temp_nbytes == pytest.approx(compiled.temp_nbytes, rel=0.3)
    limit = int(0.85 * compiled.total_nbytes)
    jitted = dafjax.jit(step(dafjax.remat_compress), memory=limit)
    jitted.lower(weights, x)
    assert jitted.report().memory.total_nbytes <= limit


def test_other_shardings_are_another_choice():
    sharded = place(*PLACES["data"])
    limit = plain_memory(sharded).total_nbytes
    step = dafjax.jit(sgd(dafjax.remat_compress), memory=limit)
    step(*sharded)
    assert step.report().options == "plain"
    step(*place(P(), P()))
    assert step.report().options != "plain"
    step(*sharded)
    assert step.report().options == "plain"


def test_the_largest_batch_is_a_multiple_of_its_shards():
    weights, x = place(*PLACES["data"])
    limit = int(0.4 * plain_memory((weights, x)).total_nbytes)
    step = dafjax.jit(sgd(dafjax.remat_compress), memory=limit)
    with pytest.raises(ValueError, match="largest batch that fits") as error:
        step.lower(weights, x)
    (batch,) = map(int, re.findall(r"that fits is (\d+)", str(error.value)))
    assert batch % 2 == 0
    smaller = jax.device_put(x[:batch], x.sharding)
    dafjax.jit(sgd(dafjax.remat_compress), memory=int(1.03 * limit)).lower(
        weights, smaller
    )


def test_microbatches_on_a_mesh():
    weights, x = place(*PLACES["data"])
    limit = int(0.6 * plain_memory((weights, x)).total_nbytes)
    step = dafjax.jit(sgd(dafjax.accumulate), memory=limit)
    got, want = step(weights, x), sgd(lambda fun: fun)(weights, x)
    assert step.report().options.startswith("plain, microbatches=")
    for a, b in zip(got, want, strict=True):
        assert jnp.allclose(a, b, atol=1e-6)


FOUR_DEVICES = """
    import jax
    from jax.sharding import PartitionSpec as P
    import dafjax
    from tests.test_jit_mesh import place, plain_memory, sgd
    arguments = place(
        P(None, "model"), P("data"), shape=(2, 2), names=("data", "model")
    )
    limit = plain_memory(arguments).total_nbytes
    for share in (1, 0.8):
        step = dafjax.jit(sgd(dafjax.remat_compress), memory=int(share * limit))
        step(*arguments)
        print(step.report().options, step.report().memory.total_nbytes <= share * limit)
"""


def test_batch_and_weights_divided_along_two_axes():
    flags = "--xla_force_host_platform_device_count=4"
    lines = run_python(FOUR_DEVICES, XLA_FLAGS=flags).splitlines()
    assert lines == ["plain True", 'rematerialize="exact" True']
