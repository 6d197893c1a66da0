"""The ways in which JAX users compose functions: value, memory, number of traces.

`compositions.py` lists them; what is special to one of them has a test of its own here,
in `test_remat_compress.py` or in `test_bodies.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import dafjax
from dafjax.policies import CompressExpensive
from tests import networks
from tests.compositions import (
    COMPOSITIONS,
    LARGE,
    SMALL,
    example,
    export_allowed,
    loss,
)
from tests.helpers import (
    JAX_VERSION,
    persistent_cache,
    relative_error,
    run_python,
    slow,
    temp_nbytes,
)


EAGER_POLICY = CompressExpensive(min_nbytes=0)


def compressed(f, *, bits=8, **options):
    return dafjax.remat_compress(f, bits=bits, policy=EAGER_POLICY, **options)


def flat(tree):
    """All numbers of a tree; complex ones as pairs."""
    leaves = [np.ravel(np.asarray(leaf)) for leaf in jax.tree.leaves(tree)]
    leaves = [x for x in leaves if x.dtype != jax.dtypes.float0]
    return np.concatenate(
        [x.view(x.real.dtype) if np.iscomplexobj(x) else x for x in leaves]
    )


def assert_close_but_not_equal(got, want, *, least=1e-6, most=0.06):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert least < relative_error(flat(got), flat(want)) < most


@pytest.fixture
def mlp(key):
    return networks.mlp_params(key, (64, 96, 16)), jax.random.normal(key, (32, 64))


def square(key, size=32, dtype=jnp.float32):
    return jax.random.normal(key, (size, size), dtype) / size**0.5


def complex_square(key, size=32):
    real, imaginary = jax.random.normal(key, (2, size, size)) / (2 * size) ** 0.5
    return jax.lax.complex(real, imaginary)


def counted(wrap, traces):
    """Wraps like `wrap`, and adds an entry to a list when the function's body runs."""

    def wrap_and_count(f, **options):
        def body(*args):
            traces.append(f)
            return f(*args)

        return wrap(body, **options)

    return wrap_and_count


def nothing(f, **_):
    return f


def checkpoint(f, *, activation_argnums=(), **options):
    del activation_argnums
    return jax.checkpoint(f, **options)


def largest_error(got, want):
    """The relative error of that array which is off most."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    errors = [0.0]
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if x.dtype != jax.dtypes.float0:
            errors.append(relative_error(flat(x), flat(y)))
    return max(errors)


def relative_error_and_traces(composition):
    """Of two calls at 8 bits; then the traces where `jax.checkpoint` wraps."""
    traces, traces_of_checkpoint = [], []
    with composition.settings():
        arguments = composition.arguments(SMALL)
        copy = lambda: jax.tree.map(jnp.copy, arguments)
        want = composition.program(nothing)(*copy())
        program = composition.program(counted(compressed, traces))
        program(*copy())
        got = program(*copy())
        other = composition.program(counted(checkpoint, traces_of_checkpoint))
        trace = getattr(other, "lower", other)
        for _ in range(2):
            trace(*copy())
    return largest_error(got, want), len(traces), len(traces_of_checkpoint)


def temp_ratio(composition):
    """The temporary bytes at 2 bits over those with nothing wrapped."""

    def nbytes(program):
        shapes = jax.eval_shape(lambda: composition.arguments(LARGE))
        return temp_nbytes(program.lower(*shapes))

    plain = composition.plain or composition.program
    with composition.settings():
        needed = nbytes(composition.program(dafjax.remat_compress))
        return needed / nbytes(plain(nothing))


# Their memory is checked with every change.
_OF_EACH_KIND = (
    *("jit", "vmap over examples", "in cond", "in scan", "nested"),
    *("in jax.checkpoint", "bfloat16"),
)


# Others with every change are of the same kind.
_LIKE_OTHERS = (
    *("all arguments", "value_and_grad", "vmap over models", "of fori_loop"),
    *("in fori_loop", "in while", "float16", "float32 in x64"),
    *("closure over a traced value", "vjp twice, eager"),
)


class TestEveryComposition:
    """What `tests/compositions.py` lists."""

    @pytest.mark.parametrize(
        "name",
        [slow(name) if name in _LIKE_OTHERS else name for name in COMPOSITIONS],
    )
    def test_value_and_number_of_traces(self, name):
        composition = COMPOSITIONS[name]
        error, traces, traces_of_checkpoint = relative_error_and_traces(composition)
        least, most = composition.error
        assert least <= error < most
        assert traces == composition.traces <= traces_of_checkpoint

    @pytest.mark.parametrize(
        "name",
        [
            name if name in _OF_EACH_KIND else slow(name)
            for name, c in COMPOSITIONS.items()
            if c.temp is not None
        ],
    )
    def test_memory(self, name):
        composition = COMPOSITIONS[name]
        assert temp_ratio(composition) < composition.temp

    def test_donated_buffers_are_taken(self):
        composition = COMPOSITIONS["donated"]
        p, x = jax.eval_shape(lambda: composition.arguments(LARGE))
        program = composition.program(dafjax.remat_compress)
        memory = program.lower(p, x).compile().memory_analysis()
        nbytes = sum(leaf.size * 4 for leaf in jax.tree.leaves(p))
        assert memory.alias_size_in_bytes == nbytes


class TestTraces:
    """The user's function is traced once per shape, whatever is done to it."""

    @staticmethod
    def counted():
        traces = []

        def loss(p, x):
            traces.append(x.shape)
            return networks.mlp_loss(p, x)

        return compressed(loss), traces

    def test_one_trace_serves_all_transformations(self, mlp):
        f, traces = self.counted()
        p, x = mlp
        f(p, x)
        jax.grad(f)(p, x)

        @jax.make_jaxpr
        def all_others(p, x):
            jax.jit(f)(p, x)
            jax.grad(f, argnums=1)(p, x)
            jax.jit(jax.value_and_grad(f))(p, x)
            jax.vmap(jax.grad(f), (None, 0))(p, x[None])
            jax.grad(lambda p: jax.vmap(f, (None, 0))(p, x[None]).sum())(p)
            jax.lax.scan(lambda c, x: (c, jax.grad(f)(p, x)), 0, x[None])
            jax.grad(jax.checkpoint(f))(p, x)
            jax.jacrev(f, argnums=1)(p, x)

        all_others(p, x)
        assert traces == [x.shape]

    def test_every_static_argument_is_traced_once(self, mlp):
        traces = []

        def loss(p, x, power):
            traces.append(power)
            return jnp.mean(networks.mlp(p, x) ** power)

        f = compressed(loss, static_argnums=2)
        for power in (2, 4, 2, 4):
            jax.grad(f)(*mlp, power)
        assert traces == [2, 4]

    def test_a_function_wrapped_twice_is_traced_once(self, mlp):
        f, traces = self.counted()
        outer = compressed(lambda p, x: 2 * f(p, x))
        for _ in range(2):
            jax.grad(outer)(*mlp)
        assert traces == [mlp[1].shape]


class TestVmap:
    @pytest.mark.parametrize(
        ("in_axes", "out_axes"),
        [
            ((None, 0, None), -1),
            ((2, 1, 0), -1),
            ((-1, None, 0), 1),
        ],
    )
    def test_every_argument_and_the_result(self, in_axes, out_axes, key):
        def argument(n, shape, axis):
            key_of_n = jax.random.fold_in(key, n)
            if axis is None:
                return jax.random.normal(key_of_n, shape)
            return jnp.moveaxis(jax.random.normal(key_of_n, (4, *shape)), 0, axis)

        shapes = (16, 16), (16, 16), ()
        arguments = list(map(argument, range(3), shapes, in_axes))

        def f(a, b, c):
            return jnp.sin(a @ b / 4) * c

        def gradient(f):
            mapped = jax.vmap(f, in_axes, out_axes)
            of_sum = lambda *args: jnp.sum(mapped(*args) ** 2)
            return jax.value_and_grad(of_sum, argnums=(0, 1, 2))(*arguments)

        (value, got), (want_value, want) = gradient(compressed(f)), gradient(f)
        np.testing.assert_allclose(value, want_value, rtol=1e-5)
        assert_close_but_not_equal(got, want)
        result = jax.vmap(compressed(f), in_axes, out_axes)(*arguments)
        want = jax.vmap(f, in_axes, out_axes)(*arguments)
        np.testing.assert_allclose(result, want, rtol=1e-5, atol=1e-6)


class TestLoopsAndBranches:
    def test_a_loop_of_unknown_length_is_refused_as_without_dafjax(self, key):
        w = square(key)

        def f(w, n):
            return jnp.sum(jax.lax.fori_loop(0, n, lambda _, h: jnp.tanh(h @ w), w))

        for g in (f, compressed(f)):
            with pytest.raises(ValueError, match=r"Reverse-mode .* dynamic start/stop"):
                jax.jit(jax.grad(g))(w, 4)


class TestVjp:
    def test_one_that_is_never_called(self, mlp):
        value, pullback = jax.vjp(compressed(networks.mlp_loss), *mlp)
        del pullback
        np.testing.assert_allclose(value, networks.mlp_loss(*mlp), rtol=1e-5)

    def test_it_may_be_called_after_others(self, mlp):
        """Each keeps what it needs itself."""
        p, x = mlp
        f = compressed(networks.mlp_loss)
        pullbacks = [jax.vjp(f, p, scale * x)[1] for scale in (1.0, 2.0)]
        got = [pullback(jnp.float32(1))[0] for pullback in pullbacks]
        for scale, gradient in zip((1.0, 2.0), got, strict=True):
            want, _ = jax.grad(f, (0, 1))(p, scale * x)
            jax.tree.map(np.testing.assert_array_equal, gradient, want)

    @pytest.mark.parametrize("wrap", [compressed, dafjax.remat_compress])
    def test_an_eager_pullback_holds_codes(self, wrap):
        """No program to ask for memory: these bytes wait between its two halves."""

        def held_nbytes(f):
            p, x = example(LARGE)
            _, pullback = jax.vjp(f, p, x)
            theirs = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((p, x))}
            return sum(
                leaf.nbytes
                for leaf in jax.tree.leaves(pullback)
                if leaf.unsafe_buffer_pointer() not in theirs
            )

        most = 0.3 if wrap is compressed else 0.15
        assert held_nbytes(wrap(loss)) < most * held_nbytes(loss)


class TestArguments:
    """Arguments without a gradient, and those that codes do not take."""

    @pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.bool_])
    def test_integers_have_cotangents_of_float0(self, dtype, key):
        table, ids = square(key, 16), (jnp.arange(64) % 2).astype(dtype)

        def f(table, ids):
            rows = table[ids.astype(jnp.int32)]
            return jnp.sum(jnp.sin(rows @ rows.T))

        def gradient(f):
            return jax.grad(f, argnums=(0, 1), allow_int=True)(table, ids)

        (got, of_ids), (want, _) = gradient(compressed(f)), gradient(f)
        assert of_ids.dtype == jax.dtypes.float0
        assert of_ids.shape == ids.shape
        assert_close_but_not_equal(got, want)

    @pytest.mark.parametrize(
        "make",
        [
            jax.random.key,
            jax.random.PRNGKey,
            functools.partial(jax.random.key, impl="rbg"),
        ],
        ids=["typed", "raw", "rbg"],
    )
    def test_random_keys(self, make, key):
        w = square(key)

        def f(w, key):
            kept = jax.random.bernoulli(key, 0.5, w.shape)
            return jnp.sum(jnp.where(kept, jnp.sin(w @ w), 0.0))

        for transform in (lambda f: f, jax.jit):
            got = transform(jax.grad(compressed(f)))(w, make(3))
            assert_close_but_not_equal(got, jax.grad(f)(w, make(3)))

    def test_a_batch_of_random_keys(self, key):
        w, keys = square(key), jax.random.split(key, 3)

        def f(w, key):
            kept = jax.random.bernoulli(key, 0.5, w.shape)
            return jnp.sum(jnp.where(kept, jnp.sin(w @ w), 0.0))

        got, want = (
            jax.vmap(jax.grad(g), (None, 0))(w, keys) for g in (compressed(f), f)
        )
        assert_close_but_not_equal(got, want)

    def test_a_holomorphic_gradient(self, key):
        w = complex_square(key)
        f = lambda w: jnp.sum(jnp.sin(w @ w))
        got, want = (jax.grad(g, holomorphic=True)(w) for g in (compressed(f), f))
        assert_close_but_not_equal(got, want)

    def test_of_a_mixed_function_all_is_compressed(self, key):
        w = square(key)

        def f(w):
            spectrum = jnp.fft.fft(jnp.tanh(w @ w))
            return jnp.sum(jnp.abs(spectrum) ** 2) / w.size

        kept = dafjax.saved_residuals(compressed(f), w).kept
        assert not any(jnp.issubdtype(k.dtype, jnp.complexfloating) for k in kept)
        assert any(k.codec is not None for k in kept)
        assert_close_but_not_equal(jax.grad(compressed(f))(w), jax.grad(f)(w))


class TestPrecision:
    def test_turning_float64_on_and_off_is_another_trace(self):
        traces = []

        def f(x):
            traces.append(x.dtype)
            return jnp.sum(jnp.sin(x @ x))

        wrapped = compressed(f)
        x = np.eye(8)
        assert jax.grad(wrapped)(x).dtype == jnp.float32
        with jax.enable_x64(True):
            assert jax.grad(wrapped)(x).dtype == jnp.float64
        assert jax.grad(wrapped)(x).dtype == jnp.float32
        assert traces == [jnp.float32, jnp.float64]


def two_devices():
    return jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))


def on_two_devices(f):
    """Compiles `f(p, x)` for two devices that share out the rows of `x`."""
    mesh = two_devices()
    specs = PartitionSpec(), PartitionSpec("data")
    return jax.jit(f, in_shardings=tuple(NamedSharding(mesh, spec) for spec in specs))


class TestExport:
    """Programs that leave the process."""

    @staticmethod
    def example(key):
        params = networks.mlp_params(key)
        x = jax.random.normal(key, (32, 64))
        return jax.jit(jax.grad(compressed(networks.mlp_loss, bits=2))), (params, x)

    def test_without_permission_the_error_names_the_custom_calls(self, key):
        gradient, arguments = self.example(key)
        message = r"(?s)custom calls whose targets have no compatibility.*dafjax_"
        with pytest.raises(ValueError, match=message):
            export.export(gradient)(*arguments)

    def test_the_function_itself_needs_no_permission(self, key):
        _, arguments = self.example(key)
        f = jax.jit(compressed(networks.mlp_loss))
        exported = export.export(f)(*arguments)
        np.testing.assert_allclose(
            exported.call(*arguments), networks.mlp_loss(*arguments), rtol=1e-5
        )

    def test_on_several_devices_the_error_says_what_to_do(self, mlp):
        gradient = on_two_devices(jax.grad(compressed(networks.mlp_loss)))
        with pytest.raises(NotImplementedError, match=r"`jax\.export`.*shard_map"):
            export_allowed(gradient)(*mlp)
        assert export_allowed(on_two_devices(networks.mlp_loss))(*mlp).nr_devices == 2

    def test_what_each_device_runs_is_exported(self, mlp):
        wrapped = compressed(networks.mlp_loss)
        divided = jax.shard_map(
            lambda p, x: jax.lax.pmean(wrapped(p, x), "data"),
            mesh=two_devices(),
            in_specs=(PartitionSpec(), PartitionSpec("data")),
            out_specs=PartitionSpec(),
        )
        gradient = on_two_devices(jax.grad(divided))
        exported = export_allowed(gradient)(*mlp)
        assert exported.nr_devices == 2
        loaded = export.deserialize(exported.serialize())
        got, want = on_two_devices(loaded.call)(*mlp), gradient(*mlp)
        jax.tree.map(np.testing.assert_array_equal, got, want)

    def test_another_process_loads_a_serialized_gradient(self, key, tmp_path):
        gradient, arguments = self.example(key)
        exported = export_allowed(gradient)(*arguments)
        (tmp_path / "gradient").write_bytes(exported.serialize())
        leaves = jax.tree.leaves((*arguments, gradient(*arguments)))
        np.savez(tmp_path / "leaves.npz", *leaves)
        run_python(
            """
            import pathlib, sys
            import jax, numpy as np
            from jax import export
            import dafjax

            folder = pathlib.Path(sys.argv[1])
            dafjax.custom_calls()
            exported = export.deserialize((folder / "gradient").read_bytes())
            leaves = list(np.load(folder / "leaves.npz").values())
            count = len(exported.in_avals)
            args, kwargs = jax.tree.unflatten(exported.in_tree, leaves[:count])
            got = jax.tree.leaves(exported.call(*args, **kwargs))
            for x, y in zip(got, leaves[count:], strict=True):
                np.testing.assert_array_equal(x, y)
            """,
            tmp_path,
        )


def test_the_persistent_compilation_cache_is_hit(tmp_path):
    """By the same gradient in another process, which gives the same bits.

    It is traced there, once, and needs as much memory as where it was compiled.
    """
    program = """
        import sys
        import jax, jax.numpy as jnp, numpy as np
        from jax import monitoring
        import dafjax

        events = []
        monitoring.register_event_listener(lambda name, **_: events.append(name))
        traces = []

        def f(w):
            traces.append(w)
            return jnp.sum(jnp.sin(w @ w) @ w)

        gradient = jax.jit(jax.grad(dafjax.remat_compress(f)))
        w = np.random.default_rng(0).standard_normal((128, 128), np.float32) / 12
        compiled = gradient.lower(w).compile()
        events = [e for e in events if e == "/jax/compilation_cache/cache_hits"]
        temp_nbytes = compiled.memory_analysis().temp_size_in_bytes
        found = np.asarray(compiled(w)).tobytes().hex()
        print(len(events), len(traces), temp_nbytes, found)
    """
    environment = persistent_cache(tmp_path)
    first, second = (run_python(program, **environment).split() for _ in range(2))
    assert first[0] == "0"
    assert int(second[0]) >= 1
    assert first[1] == second[1] == "1"
    assert first[2:] == second[2:]


def test_with_the_coming_remat_and_custom_vjp_of_jax():
    """`jax_remat3` and `jax_custom_vjp3`, where the version has them."""
    program = """
        from tests.compositions import COMPOSITIONS
        from tests.test_composition import relative_error_and_traces, temp_ratio

        for name in ("jit", "in vmap", "in jax.checkpoint", "of jax.checkpoint"):
            composition = COMPOSITIONS[name]
            try:
                error, traces, _ = relative_error_and_traces(composition)
                print(f"{name}: {error} {traces} {temp_ratio(composition)}")
            except NotImplementedError:
                print(f"{name}:")
    """
    printed = run_python(program, JAX_REMAT3="1", JAX_CUSTOM_VJP3="1")
    lines = dict(line.split(":") for line in printed.splitlines())
    found = {name: tuple(map(float, line.split())) for name, line in lines.items()}
    # What JAX does not support with these settings, whatever is wrapped: 0.9 does not
    # know the new remat.
    unsupported = {(0, 9): {"in jax.checkpoint"}}
    failed = {name for name, figures in found.items() if not figures}
    assert failed == unsupported.get(JAX_VERSION, set())
    for name in found.keys() - failed:
        error, traces, temp = found[name]
        composition = COMPOSITIONS[name]
        assert traces == composition.traces
        assert 0 < error < composition.error[1]
        assert temp < composition.temp
