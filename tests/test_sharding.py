"""Programs for several devices: activations stay where they are."""

import contextlib
import functools
import os
import pathlib
import re
import socket
import subprocess
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import config
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P, reshard

import dafjax
from dafjax._native import _primitive, tie
from tests.helpers import relative_error


BATCH, LENGTH, WIDTH = 32, 16, 256
DEPTH = 2
NUM_DEVICES = 2


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    # Small whole numbers: sums are exact in any order, so that all forward passes are
    # equal, and with them the content that the noise is drawn from.
    y = x @ reshard(w, P()) if is_explicit(w) else x @ w
    return jnp.clip(x + jax.nn.relu(y), 0, 3)


def is_explicit(x: jax.Array) -> bool:
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in weights:
        x = layer(x, w)
    return jnp.mean(jnp.square(x))


def example() -> tuple[list[jax.Array], jax.Array]:
    rng = np.random.default_rng(0)
    signs = rng.choice([-1.0, 0.0, 0.0, 1.0], (DEPTH, WIDTH, WIDTH))
    x = rng.integers(0, 4, (BATCH, LENGTH, WIDTH)).astype(np.float32)
    return [jnp.asarray(w, jnp.float32) for w in signs], jnp.asarray(x)


def gathered(text: str) -> list[str]:
    """Returns the shapes of what a compiled program gathers from all devices."""
    return re.findall(r"= \(?(\w+\[[\d,]*\])\S* all-(?:gather|to-all)", text)


def gathers_activations(text: str) -> bool:
    weights = f"f32[{WIDTH},{WIDTH}]"
    return any(shape != weights for shape in gathered(text))


@contextlib.contextmanager
def partitioner(name: str) -> Iterator[None]:
    with config.use_shardy_partitioner(name == "shardy"):
        yield


def place(mesh: Mesh, weights_divided: bool) -> tuple[list[jax.Array], jax.Array]:
    weights, x = example()
    of_weights = NamedSharding(mesh, P("data") if weights_divided else P())
    return jax.device_put((weights, x), (of_weights, NamedSharding(mesh, P("data"))))


def two_devices(axes: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((NUM_DEVICES,), ("data",), axis_types=(axes,))


@pytest.mark.parametrize(
    ("name", "axes", "weights"),
    [
        ("shardy", AxisType.Auto, "whole"),
        ("shardy", AxisType.Auto, "divided"),
        ("shardy", AxisType.Explicit, "divided"),
        ("gspmd", AxisType.Auto, "whole"),
    ],
)
def test_devices_gather_no_activation(name: str, axes: AxisType, weights: str) -> None:
    wrapped = dafjax.remat_compress(loss)
    expected_loss, expected = on_one_device()
    mesh = two_devices(axes)
    with partitioner(name), jax.set_mesh(mesh):
        arguments = place(mesh, weights == "divided")
        step = jax.jit(jax.value_and_grad(wrapped)).lower(*arguments).compile()
        plain = jax.jit(jax.value_and_grad(loss)).lower(*arguments).compile()
        found_loss, found = step(*arguments)
    assert not gathers_activations(step.as_text())
    assert found_loss == expected_loss
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs) < 1e-5
    assert temp_nbytes(step) < temp_nbytes(plain)


def test_gathers_are_seen_where_calls_are_not_divided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_primitive, "is_divided", lambda context: False)
    wrapped = dafjax.remat_compress(loss)
    step = jax.jit(jax.grad(wrapped)).lower(*place(two_devices(), False)).compile()
    assert gathers_activations(step.as_text())


@pytest.mark.parametrize("num_devices", [2, 1])
def test_chunks_of_matrices_gather_no_activation(
    num_devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their packed rows are several examples, so that chunks cannot be interleaved.

    Where dafjax thinks that there is one device, two are seen to gather them.
    """
    monkeypatch.setattr(jax, "device_count", lambda: num_devices)

    def layers(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = jax.nn.relu(x @ w)
        return jnp.mean(jnp.square(x))

    mesh = two_devices()
    weights = [jax.device_put(jnp.ones((256, 256)), NamedSharding(mesh, P()))] * 2
    x = jax.device_put(jnp.ones((8192, 256)), NamedSharding(mesh, P("data")))
    step = jax.jit(jax.grad(dafjax.remat_compress(layers))).lower(weights, x).compile()
    assert ("all-gather(" in step.as_text()) == (num_devices == 1)


@functools.cache
def on_one_device() -> tuple[jax.Array, list[jax.Array]]:
    """Returns the wrapped loss and its gradient."""
    return jax.jit(jax.value_and_grad(dafjax.remat_compress(loss)))(*example())


def temp_nbytes(compiled: jax.stages.Compiled) -> int:
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("axes", list(AxisType)[:2])
def test_loops_gather_no_activation(axes: AxisType) -> None:
    def looped(weights: jax.Array, x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)
        return jnp.mean(jnp.square(x))

    wrapped = dafjax.remat_compress(looped)
    weights, x = example()
    expected = jax.grad(wrapped)(jnp.stack(weights), x)
    mesh = two_devices(axes)
    with jax.set_mesh(mesh):
        arguments = jax.device_put(
            (jnp.stack(weights), x),
            (NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))),
        )
        step = jax.jit(jax.grad(wrapped)).lower(*arguments).compile()
        found = step(*arguments)
    assert not gathers_activations(step.as_text())
    assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("inside", [False, True])
def test_shard_map_gathers_no_activation(inside: bool) -> None:
    wrapped = dafjax.remat_compress(loss)
    _, expected = on_one_device()

    def total(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        return jax.lax.pmean(wrapped(weights, x), "data")

    mesh = two_devices()
    specs = {"mesh": mesh, "in_specs": (P(), P("data")), "out_specs": P()}
    if inside:
        gradient = jax.shard_map(jax.grad(total), **specs)
    else:
        gradient = jax.grad(jax.shard_map(total, **specs))
    arguments = place(mesh, False)
    step = jax.jit(gradient).lower(*arguments).compile()
    assert not gathered(step.as_text())
    # Each device scales channels by its own examples: the noise is another.
    exact = jax.jit(jax.grad(loss))(*example())
    for ours, theirs, e in zip(step(*arguments), expected, exact, strict=True):
        assert relative_error(ours, e) < 1.3 * relative_error(theirs, e)


def test_weights_gathered_by_hand_are_never_kept() -> None:
    def gathering(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        whole = [jax.lax.all_gather(w, "data", tiled=True) for w in weights]
        return jax.lax.pmean(loss(whole, x), "data")

    divided = jax.shard_map(
        dafjax.remat_compress(gathering),
        mesh=two_devices(),
        in_specs=(P("data"), P("data")),
        out_specs=P(),
    )
    kept = dafjax.saved_residuals(divided, *example()).kept
    assert kept
    # Scales of channels have one axis.
    assert all(item.shape[0] != WIDTH for item in kept if len(item.shape) > 1)


@pytest.mark.parametrize("name", ["shardy", "gspmd"])
def test_results_may_be_divided_otherwise_than_operands(name: str) -> None:
    mesh = two_devices()
    along_first, along_last = (
        NamedSharding(mesh, spec) for spec in (P("data"), P(None, "data"))
    )

    def f(w: jax.Array, x: jax.Array) -> jax.Array:
        for n in range(3):
            x = jnp.sin(x @ w)
            sharding = along_last if n % 2 == 0 else along_first
            x = jax.lax.with_sharding_constraint(x, sharding)
        return x

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, pullback = jax.vjp(dafjax.remat_compress(f, bits=8), w, x)
        return y, pullback(jnp.ones_like(y))[0]

    w, x = jnp.eye(WIDTH), jnp.ones((2 * WIDTH, WIDTH))
    placed = jax.device_put(x, along_first)
    with partitioner(name):
        whole = NamedSharding(mesh, P())
        divided = jax.jit(step, out_shardings=(along_last, whole))
        y, gradient = divided(jax.device_put(w, whole), placed)
        tied = jax.jit(
            lambda x: tie(x)[0], in_shardings=along_first, out_shardings=along_last
        )(placed)
    np.testing.assert_array_equal(tied, x)
    want_y, want = step(w, x)
    np.testing.assert_allclose(y, want_y, rtol=1e-5)
    assert relative_error(gradient, want) < 0.05


def test_arrays_divided_in_two_dimensions_keep_their_types() -> None:
    """Tensor parallelism: parts of an example are gathered to be packed."""

    def divided(a: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(x @ a)
        return jnp.mean(
            jnp.einsum("bth,hd->btd", hidden, b, out_sharding=P(None, None, None)) ** 2
        )

    mesh = two_devices(AxisType.Explicit)
    weights, x = example()
    with jax.set_mesh(mesh):
        a, b = (
            jax.device_put(w, NamedSharding(mesh, spec))
            for w, spec in zip(
                weights, (P(None, "data"), P("data", None)), strict=False
            )
        )
        x = jax.device_put(x, NamedSharding(mesh, P()))
        found = jax.jit(jax.grad(dafjax.remat_compress(divided, bits=8)))(a, b, x)
        exact = jax.jit(jax.grad(divided))(a, b, x)
    assert jax.typeof(found).sharding.spec == P(None, "data")
    assert relative_error(found, exact) < 0.02


@pytest.mark.parametrize("shape", [(6, 100), (2, 3, 512)])
def test_rows_of_any_size_are_packed_on_explicit_meshes(shape: tuple[int, ...]) -> None:
    mesh = two_devices(AxisType.Explicit)
    x = jax.random.normal(jax.random.key(0), shape)
    codec = dafjax.codecs.Affine(bits=8)
    with jax.set_mesh(mesh):
        spec = P("data", *[None] * (len(shape) - 1))
        x = jax.device_put(x, NamedSharding(mesh, spec))
        like = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.typeof(x).sharding)
        back = jax.jit(lambda x: codec.decode(codec.encode(x), like))(x)
    assert jax.typeof(back).sharding.spec == spec
    assert relative_error(back, x) < 0.02


_PROCESS = """
import sys
import jax
jax.distributed.initialize("127.0.0.1:{port}", 2, {number}, initialization_timeout=60)
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import dafjax
from tests.test_sharding import example, gathers_activations, loss, two_devices

assert len(jax.devices()) == 2 and len(jax.local_devices()) == 1
mesh = two_devices()
weights, x = example()


def placed(x, spec):
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(x.shape, sharding, np.asarray(x).__getitem__)


weights, x = [placed(w, P()) for w in weights], placed(x, P("data"))
step = jax.jit(jax.grad(dafjax.remat_compress(loss))).lower(weights, x).compile()
assert "all-reduce" in step.as_text()
assert not gathers_activations(step.as_text())
found = [np.asarray(g.addressable_data(0)) for g in step(weights, x)]
np.savez(sys.argv[1], *found)
"""


def test_two_processes_compute_the_gradient_of_one(tmp_path: pathlib.Path) -> None:
    _, expected = on_one_device()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    files = [tmp_path / f"{number}.npz" for number in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _PROCESS.format(port=port, number=n), str(file)],
            env=_environment(num_devices=1),
            stderr=subprocess.PIPE,
            text=True,
        )
        for n, file in enumerate(files)
    ]
    errors = [process.communicate(timeout=180)[1] for process in processes]
    for process, error in zip(processes, errors, strict=True):
        assert process.returncode == 0, error
    for file in files:
        with np.load(file) as found:
            for ours, theirs in zip(found.values(), expected, strict=True):
                assert relative_error(ours, theirs) < 1e-5


_AS_MANY_DEVICES_AS_EXAMPLES = """
import itertools
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import dafjax
from tests.test_sharding import gathered

assert len(jax.devices()) == 4


def loss(w, x):
    return jnp.sum(jnp.sin(jnp.sin(x @ w) @ w))


shapes = [(4, 64, 64), (4, 128, 64), (12, 50, 64)]
for axes, shape in itertools.product([AxisType.Auto, AxisType.Explicit], shapes):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axes,))
    with jax.set_mesh(mesh):
        x = jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, P("data")))
        w = jax.device_put(np.ones((64, 64), np.float32), NamedSharding(mesh, P()))
        step = jax.jit(jax.grad(dafjax.remat_compress(loss))).lower(w, x).compile()
    assert not gathered(step.as_text()), (axes, shape)
"""


def test_a_device_may_have_a_single_example() -> None:
    """No block has values of two examples, which two devices may have."""
    subprocess.run(
        [sys.executable, "-c", _AS_MANY_DEVICES_AS_EXAMPLES],
        env=_environment(num_devices=4),
        check=True,
        timeout=180,
    )


def _environment(num_devices: int) -> dict[str, str]:
    return {
        **os.environ,
        # The last of two equal options counts.
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} "
        f"--xla_force_host_platform_device_count={num_devices}",
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    }
