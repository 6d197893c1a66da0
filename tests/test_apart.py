"""Unrolled chunks: the backward pass of GPUs, whose chunks stay separate arrays.

It runs the equations of a chunk loop, so a CPU can run it too.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dafjax
from dafjax import _rules, config
from dafjax._bits import Bits
from dafjax._plan.planner import make_plan
from dafjax._schedule import chunking, interpreter, stages
from dafjax._schedule.chunks import Chunks
from dafjax._schedule.schedule import schedule_backward
from dafjax._schedule.steps import Rows, Unpacking
from dafjax._schedule.values import Values, codecs_in, parts_apart
from dafjax.codecs import Affine
from dafjax.policies import CompressExpensive, CompressNames
from dafjax.stores import Arrays, _page_pool
from tests import networks
from tests.helpers import prepared, relative_error, scheduled


@pytest.fixture
def with_plugin(monkeypatch):
    """Pretends that JAX's CUDA plugin is installed."""
    monkeypatch.setattr(_rules, "installed_plugins", lambda: ("plugin",))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Allows small chunks, because the arrays of these tests are small."""
    monkeypatch.setattr(config, "LEAST_NBYTES_OF_CHUNK", 1)
    monkeypatch.setattr(config, "LEAST_NBYTES_UNROLLED", 1)
    monkeypatch.setattr(config, "LEAST_SHARE_OF_LARGEST", 0)


@pytest.fixture
def as_on_gpu(with_plugin, monkeypatch):
    """Lowers every program as for a GPU. Returns the number of chunks of each stage."""
    counts = []
    run = Chunks.run

    def counting(chunks):
        if chunks.item.mode == "unroll":
            counts.append(chunks.item.division.num_parts)
        return run(chunks)

    monkeypatch.setattr(Chunks, "run", counting)
    monkeypatch.setattr(
        jax.lax,
        "platform_dependent",
        lambda *operands, cpu=None, cuda=None, default: (cuda or cpu or default)(
            *operands
        ),
    )
    return counts


@pytest.fixture
def joined(monkeypatch):
    """Returns the shape of a chunk for each array that is joined."""
    shapes = []
    join = Rows.join

    def joining(rows, parts):
        shapes.append(parts[0].shape)
        return join(rows, parts)

    monkeypatch.setattr(Rows, "join", joining)
    return shapes


def example(key, depth=2):
    params = networks.conv_params(key, depth, 32)
    return params, jax.random.normal(key, (32, 8, 8, 32))


def mlp_example(key, num_examples=512):
    params = networks.mlp_params(key, (64, 96, 16))
    return params, jax.random.normal(key, (num_examples, 64))


def explicit_mlp_loss(params, x):
    """The loss of the MLP on a mesh with explicit axes; each device has all weights."""
    whole = jax.sharding.PartitionSpec()
    return networks.mlp_loss(jax.tree.map(lambda w: jax.reshard(w, whole), params), x)


def gradient(loss, *arguments, max_parts=2, **options):
    wrapped = dafjax.remat_compress(loss, max_parts=max_parts, **options)
    return jax.jit(jax.grad(wrapped))(*arguments)


def without_chunks(monkeypatch, loss, *arguments, **options):
    """Returns the gradient without chunks, and not lowered for a GPU."""
    with monkeypatch.context() as patch:
        patch.setattr(_rules, "installed_plugins", tuple)
        patch.setattr(stages, "divide", lambda *arguments: None)
        return gradient(loss, *arguments, **options)


def assert_close(got, expected, tolerance=1e-5):
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        assert a.dtype == b.dtype
        assert relative_error(a, b) < tolerance


class TestGradients:
    """They equal the gradients without chunks, up to the order of sums."""

    def test_of_convolutions_and_norms(self, key, as_on_gpu, joined, monkeypatch):
        params, x = example(key)
        got = gradient(networks.conv_loss, params, x)
        assert set(as_on_gpu) == {2}
        # The cotangent stays chunked to the end.
        assert joined == []
        assert_close(got, without_chunks(monkeypatch, networks.conv_loss, params, x))

    def test_the_reductions_of_a_norm_are_batched(self, key, as_on_gpu):
        """One reduction serves both sums of both chunks."""
        wrapped = jax.grad(dafjax.remat_compress(networks.conv_loss, max_parts=2))
        traced = str(jax.make_jaxpr(jax.jit(wrapped))(*example(key)))
        assert set(as_on_gpu) == {2}
        together = traced.count(" reduce[")
        assert together >= 3
        assert traced.count("dafjax_sum_groups[") == 4 * together

    def test_of_products(self, key, as_on_gpu, monkeypatch):
        params = networks.mlp_params(key, (64, 512, 512, 16))
        x = jax.random.normal(jax.random.fold_in(key, 1), (4096, 64))
        got = gradient(networks.mlp_loss, params, x)
        assert 2 in as_on_gpu
        assert_close(got, without_chunks(monkeypatch, networks.mlp_loss, params, x))

    @pytest.fixture
    def mixed(self, key):
        """A loss with layers that read their whole cotangent."""
        weights = jax.random.normal(key, (3, 512, 512)) / 20
        mixing = jax.random.normal(key, (64, 64)) / 8

        @jax.custom_vjp
        def mix(mixing, x):
            return mixing.T @ x

        # Each row of the result depends on the whole cotangent.
        mix.defvjp(
            lambda mixing, x: (mix(mixing, x), mixing),
            lambda mixing, g: (jnp.zeros_like(mixing), mixing @ g),
        )

        def loss(weights, mixing, x):
            for w in weights:
                x = mix(mixing, jnp.tanh(x @ w))
            return jnp.mean(x**2)

        return loss, weights, mixing, jnp.ones((64, 512))

    def test_a_stage_whose_results_would_be_joined_has_one_chunk(
        self, mixed, as_on_gpu, joined
    ):
        gradient(*mixed)
        assert set(as_on_gpu) == {1}
        assert joined == []

    def test_chunked_values_can_be_read_whole(
        self, mixed, as_on_gpu, joined, monkeypatch
    ):
        monkeypatch.setattr(config, "LEAST_CHUNKED_RESULTS", 0)
        got = gradient(*mixed)
        assert 2 in as_on_gpu
        assert joined
        assert_close(got, without_chunks(monkeypatch, *mixed))

    def test_values_of_one_chunk_can_be_read_whole(self, key, as_on_gpu, monkeypatch):
        """By a stage that does not read them along the batch axis."""
        shapes = [(64, 512), (64, 64), (64, 64)]
        weights = [jax.random.normal(key, shape) / 8 for shape in shapes]
        x = jax.random.normal(key, (512, 64))

        def loss(weights, x):
            gate = jnp.tanh(x @ weights[0]).sum(0)
            y = jnp.tanh(x @ weights[1]) * gate[:, None]
            return jnp.mean(jnp.tanh(y @ weights[2]) ** 2)

        got = gradient(loss, weights, x, max_parts=1)
        assert set(as_on_gpu) == {1}
        assert_close(got, without_chunks(monkeypatch, loss, weights, x))

    def test_a_batch_that_gpus_may_share_has_one_chunk(
        self, key, as_on_gpu, monkeypatch
    ):
        """Each chunk would need an all-reduce of its gradients of weights."""
        monkeypatch.setattr(chunking, "_gpus_may_share", lambda: True)
        gradient(networks.conv_loss, *example(key, 2))
        assert set(as_on_gpu) == {1}

    def test_in_one_chunk(self, key, as_on_gpu, monkeypatch):
        params, x = example(key)
        got = gradient(networks.conv_loss, params, x, max_parts=1)
        assert set(as_on_gpu) == {1}
        assert_close(got, without_chunks(monkeypatch, networks.conv_loss, params, x))

    def test_of_bfloat16_are_as_close_to_the_exact_ones(
        self, key, as_on_gpu, monkeypatch
    ):
        params, x = example(key)
        short = jax.tree.map(lambda x: x.astype("bfloat16"), (params, x))
        got = gradient(networks.conv_loss, *short)
        assert set(as_on_gpu) == {2}
        whole = without_chunks(monkeypatch, networks.conv_loss, *short)
        exact = jax.jit(jax.grad(networks.conv_loss))(params, x)
        for a, b, c in zip(*map(jax.tree.leaves, (got, whole, exact)), strict=True):
            assert a.dtype == b.dtype == jnp.bfloat16
            assert relative_error(a, c) <= 1.05 * relative_error(b, c)

    @pytest.mark.parametrize(
        "options",
        [
            {"policy": CompressNames(("y",))},
            {"rematerialize": True},
        ],
        ids=repr,
    )
    def test_of_other_plans(self, options, key, as_on_gpu, monkeypatch):
        w = jax.random.normal(key, (32, 32)) / 6
        x = jax.random.normal(key, (16, 64, 32))

        loss = networks.named_loss
        got = gradient(loss, w, x, **options)
        assert as_on_gpu
        assert_close(got, without_chunks(monkeypatch, loss, w, x, **options))

    def test_of_the_body_of_a_loop_and_with_keys(self, key, as_on_gpu, monkeypatch):
        weights = jax.random.normal(key, (3, 32, 32)) / 6
        x = jax.random.normal(key, (64, 64, 32))

        def loss(weights, x, key):
            def body(x, w):
                y = jax.nn.gelu(x @ w)
                kept = jax.random.bernoulli(key, 0.9, y.shape)
                return x + jnp.where(kept, y, 0.0), None

            return jnp.mean(jax.lax.scan(body, x, weights)[0] ** 2)

        dropout = jax.random.key(7)
        got = gradient(loss, weights, x, dropout)
        assert as_on_gpu
        assert_close(got, without_chunks(monkeypatch, loss, weights, x, dropout))

    def test_with_integers(self, key, as_on_gpu, monkeypatch):
        """Their cotangents have the dtype float0."""
        table = jax.random.normal(key, (16, 32))
        tokens = jax.random.randint(key, (64, 32), 0, 16)

        def loss(table, tokens):
            return jnp.mean(jnp.tanh(table[tokens] @ table.T) ** 2), tokens

        def gradients(tokens, table):
            wrapped = dafjax.remat_compress(loss)
            return jax.vjp(wrapped, table, tokens)[1](
                (jnp.ones(()), np.zeros(tokens.shape, jax.dtypes.float0))
            )

        got, none = gradients(tokens, table)
        assert as_on_gpu
        assert none.dtype == jax.dtypes.float0
        monkeypatch.setattr(_rules, "installed_plugins", tuple)
        assert_close(got, gradients(tokens, table)[0])

    def test_vmapped(self, key, as_on_gpu, monkeypatch):
        params = networks.conv_params(key, 2, 32)
        xs = jax.random.normal(key, (2, 16, 8, 8, 32))

        def gradients():
            wrapped = dafjax.remat_compress(networks.conv_loss)
            return jax.jit(jax.vmap(jax.grad(wrapped), (None, 0)))(params, xs)

        got = gradients()
        assert as_on_gpu
        monkeypatch.setattr(_rules, "installed_plugins", tuple)
        assert_close(got, gradients())

    # Noise is seeded by the forward pass, so both must sum in the same order. XLA does
    # that, but not on jax 0.9.2.
    def test_shared_by_devices(self, key, as_on_gpu):
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((2,), ("data",), axis_types=auto)
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        params, x = example(key, 2)
        policy = CompressExpensive(Affine(bits=2))
        shared = jax.device_put(x, rows)
        got = gradient(networks.conv_loss, params, shared, policy=policy)
        assert set(as_on_gpu) == {2}
        expected = gradient(networks.conv_loss, params, x, policy=policy)
        assert_close(got, expected, 1e-4)

    def test_cotangents_and_residuals_are_not_overwritten(self, key, as_on_gpu):
        params, x = example(key, 2)

        def blocks(x):
            for p in params:
                x = networks.conv_block(p, x)
            return x

        _, pullback = jax.vjp(dafjax.remat_compress(blocks), x)
        cotangent = jax.random.normal(jax.random.fold_in(key, 1), x.shape)
        before = np.array(cotangent)
        (first,), (second,) = pullback(cotangent), pullback(cotangent)
        assert as_on_gpu
        np.testing.assert_array_equal(cotangent, before)
        np.testing.assert_array_equal(first, second)


class TestWhereItRuns:
    def test_elsewhere_gradients_are_what_they_are_without_a_plugin(
        self, key, monkeypatch
    ):
        params, x = example(key)
        without = gradient(networks.conv_loss, params, x)
        monkeypatch.setattr(_rules, "installed_plugins", lambda: ("plugin",))
        got = gradient(networks.conv_loss, params, x)
        jax.tree.map(np.testing.assert_array_equal, got, without)

    def test_the_program_for_a_gpu_has_no_chunk_loop(self, key, with_plugin):
        params, x = example(key)
        wrapped = dafjax.remat_compress(networks.conv_loss)
        traced = jax.jit(jax.grad(wrapped)).trace(params, x)
        on_gpu = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "stablehlo.while" not in on_gpu
        on_cpu = traced.lower()
        assert "stablehlo.while" in on_cpu.as_text()
        # The branch is chosen when the program is lowered.
        assert "conditional" not in on_cpu.compile().as_text()

    @pytest.mark.parametrize(
        ("num_images", "max_parts", "num_parts"),
        [(40, None, 4), (32, 2, 2)],
    )
    def test_residuals_of_a_page_pool_are_read_in_at_most_four_chunks(
        self, num_images, max_parts, num_parts, key, as_on_gpu, monkeypatch
    ):
        """The pool stores eight chunks, which four or two can read, but not five."""
        monkeypatch.setattr(_page_pool, "_NUM_ELEMENTS_OF_PAGE", 1)
        # Without a pool, arrays that GPUs may share have one chunk.
        monkeypatch.setattr(chunking, "_gpus_may_share", lambda: True)
        params, _ = example(key)
        x = jax.random.normal(key, (num_images, 8, 8, 32))
        with dafjax.stores.PagePool() as pool:
            # Sums of two programs differ in their last bits, so noise would differ.
            options = {
                "store": pool,
                "max_parts": max_parts,
                "policy": CompressExpensive(Affine(rounding="nearest")),
            }
            got = gradient(networks.conv_loss, params, x, **options)
            # A pool's execution must be over before the next one begins.
            jax.block_until_ready(got)
            assert set(as_on_gpu) == {num_parts}
            expected = without_chunks(
                monkeypatch, networks.conv_loss, params, x, **options
            )
            assert_close(got, expected)

    def test_residuals_that_a_page_pool_stores_whole_are_read_whole(
        self, key, as_on_gpu
    ):
        """These residuals are smaller than a page."""
        with dafjax.stores.PagePool() as pool:
            got = gradient(networks.conv_loss, *example(key), store=pool)
            jax.block_until_ready(got)
        assert set(as_on_gpu) == {1}

    def test_on_explicit_meshes_no_chunk_is_unrolled(self, key, as_on_gpu):
        mesh = jax.make_mesh((2,), ("data",))
        rows = jax.sharding.PartitionSpec("data")
        params = networks.mlp_params(key)
        x = jax.random.normal(key, (512, 64))
        with jax.set_mesh(mesh):
            gradient(explicit_mlp_loss, params, jax.reshard(x, rows))
        assert as_on_gpu == []
        gradient(networks.mlp_loss, params, x)
        assert as_on_gpu


class TestMeasuredBits:
    """`dafjax.jit` samples the values of backward passes."""

    @staticmethod
    def step(loss=networks.conv_loss):
        wrapped = dafjax.remat_compress(loss, bits=dafjax.AverageBits(2))
        return dafjax.jit(jax.grad(wrapped))

    @staticmethod
    def importances(step, *arguments):
        jax.block_until_ready(step(*arguments))
        (program,) = step._programs.values()
        taken = program.adaptive.ledger.take()
        facts = program.adaptive.facts
        by_name = sorted(facts, key=lambda site: facts[site].name)
        importances = [taken["importances"][site] for site in by_name]
        return np.array([*importances, taken["gradient_energy"]])

    @pytest.mark.parametrize(
        ("most", "samples", "num_batches", "tolerance"),
        [
            (1, 1 << 30, 1, 1e-5),
            (2, 1 << 30, 1, 1e-5),
            (2, config.SAMPLED_ELEMENTS, 16, 0.02),
        ],
    )
    def test_importances_are_those_in_loops(
        self, key, as_on_gpu, monkeypatch, most, samples, num_batches, tolerance
    ):
        """From all elements, and from samples.

        Other chunks draw other samples: importances of a batch differ by 2 % (standard
        deviation).
        """
        monkeypatch.setattr(config, "CHUNKS_UNROLLED", most)
        monkeypatch.setattr(config, "SAMPLED_ELEMENTS", samples)
        params, x = example(key)
        xs = jax.random.normal(jax.random.fold_in(key, 1), (num_batches, *x.shape))
        # The chunks are not alike.
        xs = jnp.where(jnp.arange(32)[:, None, None, None] < 16, xs, xs / 8)

        def means():
            step = self.step()
            return np.mean([self.importances(step, params, x) for x in xs], axis=0)

        got = means()
        assert set(as_on_gpu) == {most}
        with monkeypatch.context() as patch:
            patch.setattr(_rules, "installed_plugins", tuple)
            expected = means()
        assert (got > 0).all()
        np.testing.assert_allclose(got, expected, rtol=tolerance)

    def test_gradients_are_those_without_chunks(self, key, as_on_gpu, monkeypatch):
        params, x = example(key)
        got = self.step()(params, x)
        assert as_on_gpu
        with monkeypatch.context() as patch:
            patch.setattr(_rules, "installed_plugins", tuple)
            patch.setattr(stages, "divide", lambda *arguments: None)
            expected = self.step()(params, x)
        assert_close(got, expected)

    def test_residuals_count_once_where_there_is_a_plugin(self, key, monkeypatch):
        arguments = mlp_example(key)
        steps = [self.step(networks.mlp_loss) for _ in range(2)]
        steps[0](*arguments)
        monkeypatch.setattr(_rules, "installed_plugins", lambda: ("plugin",))
        steps[1](*arguments)
        assert steps[1].nbytes == steps[0].nbytes
        assert list(steps[1].bits.values()) == list(steps[0].bits.values())

    def test_importances_survive_a_gradient_without_elements(self, key):
        params, x = mlp_example(key)

        def loss(both, x):
            return networks.mlp_loss(both[1], x) + jnp.sum(both[0])

        got = self.importances(self.step(loss), (jnp.zeros((0, 5)), params), x)
        expected = self.importances(self.step(networks.mlp_loss), params, x)
        np.testing.assert_allclose(got, expected, rtol=0.1)

    def test_residuals_of_a_branch_for_one_platform_count(self, key):
        params, x = mlp_example(key)
        wrapped = dafjax.remat_compress(networks.mlp_loss, bits=dafjax.AverageBits(2))

        def on_platforms(params, x):
            return jax.lax.platform_dependent(
                params, x, cpu=jax.grad(wrapped), default=jax.grad(networks.mlp_loss)
            )

        expected = self.step(networks.mlp_loss)
        step = dafjax.jit(on_platforms)
        expected(params, x)
        step(params, x)
        assert step.nbytes == expected.nbytes > 0

    # The larger batch is sampled.
    @pytest.mark.parametrize("num_examples", [96, 2048])
    def test_on_a_mesh_with_explicit_axes(self, num_examples, key):
        rows = jax.sharding.PartitionSpec("data")
        params, x = mlp_example(key, num_examples)
        expected = self.importances(self.step(networks.mlp_loss), params, x)
        with jax.set_mesh(jax.make_mesh((2,), ("data",))):
            x = jax.reshard(x, rows)
            got = self.importances(self.step(explicit_mlp_loss), params, x)
        # Each device notes the importances.
        np.testing.assert_allclose(got, 2 * expected, rtol=0.1)

    def test_of_examples_on_a_mesh_with_explicit_axes(self, key):
        params, x = mlp_example(key)
        x = x.reshape(8, 64, 64)
        wrapped = dafjax.remat_compress(networks.mlp_loss, bits=dafjax.AverageBits(2))

        def mean_gradient(params, x):
            gradients = jax.vmap(jax.grad(wrapped), (None, 0))(params, x)
            return jax.tree.map(lambda g: jnp.mean(g, axis=0), gradients)

        expected = self.importances(dafjax.jit(mean_gradient), params, x)
        with jax.set_mesh(jax.make_mesh((2,), ("data",))):
            x = jax.reshard(x, jax.sharding.PartitionSpec("data"))
            got = self.importances(dafjax.jit(mean_gradient), params, x)
        np.testing.assert_allclose(got, 2 * expected, rtol=0.1)


def plan_of_convolutions(key):
    leaves, structure = jax.tree.flatten(example(key))

    def loss(*leaves):
        return networks.conv_loss(*jax.tree.unflatten(structure, leaves))

    program = prepared(jax.make_jaxpr(loss)(*leaves), [True] * len(leaves))
    return make_plan(program, policy=CompressExpensive(), bits=Bits())


def divisions_apart(plan, most=2):
    codecs = codecs_in(Arrays(), plan)
    found = schedule_backward(plan, parts_apart(plan, codecs, most))
    return [step.division for step in found if step.division is not None]


class TestDivisions:
    @pytest.mark.parametrize("most", [1, 2, 8])
    def test_there_are_at_most_four_chunks(self, most, key):
        found = divisions_apart(plan_of_convolutions(key), most)
        assert {d.num_parts for d in found} == {min(most, 4)}
        assert all(d.is_apart for d in found)

    def test_small_chunks_are_not_worth_their_kernels(self, key, monkeypatch):
        monkeypatch.setattr(config, "LEAST_NBYTES_UNROLLED", 1 << 20)
        found = divisions_apart(plan_of_convolutions(key))
        assert {d.num_parts for d in found} == {1}

    def test_results_are_computed_once_and_read_by_later_loops(self, key):
        read = 0
        for d in divisions_apart(plan_of_convolutions(key)):
            there = set()
            for loop in d.loops:
                assert there.isdisjoint(loop.made)
                read += len(there.intersection(loop.sources))
                there.update(loop.results)
        assert read

    def test_a_loop_that_reads_sums_decodes_again(self, key):
        again = [
            set(a.unpacked) & set(b.unpacked)
            for d in divisions_apart(plan_of_convolutions(key))
            for a, b in zip(d.loops, d.loops[1:], strict=False)
        ]
        assert any(again)

    def test_stages_that_read_chunks_have_the_same_chunks(self, key):
        """Even a stage that unpacks nothing large."""
        apart = divisions_apart(plan_of_convolutions(key))
        bare = [
            d
            for d in apart
            if not any(
                isinstance(p, Unpacking) for loop in d.loops for p in loop.by_rows
            )
        ]
        assert bare
        assert {d.rows for d in apart} == {bare[0].rows}

    def test_chunks_of_loops_are_not_unrolled(self, key):
        found = [s.division for s in scheduled(plan_of_convolutions(key))]
        assert not any(d.is_apart for d in found if d is not None)


def test_residuals_that_calls_unpack_have_more_chunks(key):
    plan = plan_of_convolutions(key)
    assert chunking.usual_parts_apart(codecs_in(Arrays(), plan).values()) == 1
    with dafjax.stores.PagePool() as pool:
        assert chunking.usual_parts_apart(codecs_in(pool, plan).values()) == 4


@pytest.mark.parametrize(
    ("num_rows", "num_parts", "for_both"), [(256, 8, 8), (200, 5, 4), (500, 5, 2)]
)
def test_chunks_stored_for_cpus_can_be_read_as_chunks_of_gpus(
    num_rows, num_parts, for_both
):
    """Each of the two devices has rows of each chunk."""
    like = jax.ShapeDtypeStruct((num_rows, 64), jnp.float32)
    assert chunking.most_parts(like, 8) == num_parts
    assert chunking.most_parts(like, 8, serves_gpus=True) == for_both


def test_the_last_barrier_passes_through_a_gradient_with_elements():
    gradients = [jnp.zeros((0, 5)), jnp.ones(3), jnp.ones(7)]
    behind = interpreter._one_behind(gradients, jnp.copy, key=jnp.size)
    changed = [a is not b for a, b in zip(behind, gradients, strict=True)]
    assert changed == [False, True, False]
    np.testing.assert_array_equal(behind[1], gradients[1])
    assert interpreter._one_behind(gradients[:1], jnp.copy)[0] is gradients[0]


class TestRows:
    @pytest.mark.parametrize("is_interleaved", [True, False])
    @pytest.mark.parametrize("num_parts", [1, 2, 4])
    def test_join_inverts_split(self, num_parts, is_interleaved):
        x = jnp.arange(24.0).reshape(8, 3)
        rows = Rows(num_parts, is_interleaved)
        split = rows.split(x)
        assert [part.shape for part in split] == [(8 // num_parts, 3)] * num_parts
        np.testing.assert_array_equal(rows.join(split), x)
        step = num_parts if is_interleaved else 1
        np.testing.assert_array_equal(split[0], x[::step][: 8 // num_parts])

    @pytest.mark.parametrize("is_interleaved", [True, False])
    def test_a_loop_has_the_same_chunks(self, is_interleaved):
        x = jnp.arange(24.0).reshape(8, 3)
        rows = Rows(4, is_interleaved)
        divided = rows.divide(x)
        for number, part in enumerate(rows.split(x)):
            np.testing.assert_array_equal(rows.part(divided, number), part)
            divided = rows.put(divided, -part, number)
        np.testing.assert_array_equal(divided.reshape(x.shape), -x)


class TestValues:
    def test_a_chunked_value_is_joined_once(self, joined):
        values = Values()
        rows = Rows(2, is_interleaved=False)
        values.put_parts({3: (jnp.zeros(2), jnp.ones(2))}, rows)
        assert [x.shape for x in values.parts(3, rows, {})] == [(2,), (2,)]
        assert joined == []
        np.testing.assert_array_equal(values[3], [0, 0, 1, 1])
        np.testing.assert_array_equal(values[3], [0, 0, 1, 1])
        assert joined == [(2,)]
        with pytest.raises(KeyError):
            values[4]

    def test_a_late_value_is_read_late(self):
        values = Values()
        values[3] = jnp.zeros(4)
        late = {3: jnp.arange(4.0)}
        first, second = values.parts(3, Rows(2, is_interleaved=False), late)
        np.testing.assert_array_equal(first, [0, 1])
        np.testing.assert_array_equal(second, [2, 3])

    def test_other_chunks_are_split_from_the_joined_value(self):
        values = Values()
        values.put_parts({3: (jnp.zeros(2), jnp.ones(2))}, Rows(2, False))
        even, odd = values.parts(3, Rows(2, is_interleaved=True), values)
        np.testing.assert_array_equal(even, [0, 1])
        np.testing.assert_array_equal(odd, [0, 1])

    def test_chunks_are_replaced_one_by_one(self):
        values = Values()
        values.put_parts({3: (jnp.zeros(2), jnp.ones(2))}, Rows(2, False))
        values[3] = tuple(x + 5 for x in values.raw(3))
        np.testing.assert_array_equal(values[3], [5, 5, 6, 6])
        assert not isinstance(values.raw(3), tuple)
