"""What `saved_residuals` lists and prints."""

import jax
import jax.numpy as jnp
import pytest

import dafjax
from dafjax.policies import CompressExpensive
from tests import networks


@pytest.fixture
def wrapped():
    return dafjax.remat_compress(
        networks.conv_loss, policy=CompressExpensive(min_nbytes=256)
    )


def test_what_is_listed_is_what_the_forward_pass_returns(key, wrapped):
    """Bytes of the plan against bytes of the arrays that wait."""
    p, x = networks.conv_example(key)
    listed = dafjax.saved_residuals(lambda p: wrapped(p, x), p)
    _, pullback = jax.vjp(lambda p: wrapped(p, x), p)
    arguments = {id(leaf) for leaf in jax.tree.leaves((p, x))}
    waiting = [a for a in jax.tree.leaves(pullback) if id(a) not in arguments]
    # Besides: the arguments as the backward pass takes them.
    kernels = sum(a.nbytes for a in waiting if a.dtype == jnp.float32 and a.size > 256)
    assert listed.stored_nbytes <= sum(a.nbytes for a in waiting)
    assert sum(a.nbytes for a in waiting) - kernels <= listed.stored_nbytes * 1.05


def test_totals_are_sums_of_the_lines(key, wrapped):
    listed = dafjax.saved_residuals(wrapped, *networks.conv_example(key))
    assert set(listed.counts) == {1}
    assert listed.stored_nbytes == sum(item.stored_nbytes for item in listed.kept)
    assert listed.raw_nbytes == sum(item.raw_nbytes for item in listed.kept)
    assert listed.raw_nbytes > 8 * listed.stored_nbytes


def test_where_nothing_is_large_enough_all_that_jax_keeps_is_listed(key):
    p, x = networks.conv_example(key, batch=1, channels=4)
    wrapped = dafjax.remat_compress(networks.conv_loss)
    listed = dafjax.saved_residuals(lambda p: wrapped(p, x), p)
    assert all(item.codec is None for item in listed.kept)
    _, pullback = jax.vjp(lambda p: networks.conv_loss(p, x), p)
    arguments = {id(leaf) for leaf in jax.tree.leaves((p, x))}
    waiting = [a for a in jax.tree.leaves(pullback) if id(a) not in arguments]
    # JAX also keeps arrays of zeros, which XLA then folds away.
    assert 0.7 < listed.stored_nbytes / sum(a.nbytes for a in waiting) <= 1


def test_shapes_can_stand_for_arrays(wrapped, key):
    arguments = networks.conv_example(key)
    shapes = jax.eval_shape(lambda: arguments)
    assert str(dafjax.saved_residuals(wrapped, *shapes)) == str(
        dafjax.saved_residuals(wrapped, *arguments)
    )


def test_blocks_wrapped_one_by_one_are_all_listed(key):
    p, x = networks.conv_example(key, depth=3, batch=16)

    def loss(p, x):
        return networks.conv_loss(p, x, wrap_block=dafjax.remat_compress)

    listed = dafjax.saved_residuals(loss, p, x)
    convolutions = [k for k in listed.kept if k.primitive == "conv_general_dilated"]
    assert len(convolutions) == 3


def test_what_is_kept_in_a_scan_counts_once_for_each_iteration(key):
    p, x = networks.conv_example(key, depth=3, batch=16)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *p)
    block = dafjax.remat_compress(networks.conv_block)

    def loss(p, x):
        return jax.lax.scan(lambda x, p: (block(p, x), None), x, p)[0].sum()

    listed = dafjax.saved_residuals(loss, stacked, x)
    assert set(listed.counts) == {3}
    assert " x 3" in str(listed)
    once = dafjax.saved_residuals(block, p[0], x)
    assert listed.stored_nbytes == 3 * once.stored_nbytes


def test_the_printed_table_has_place_decision_bytes_and_source(key, capsys):
    def model(w, x):
        with jax.named_scope("head"):
            return jnp.sum(jnp.tanh(x @ w))

    w = jnp.ones((256, 256))
    wrapped = dafjax.remat_compress(model, policy=CompressExpensive())
    dafjax.print_saved_residuals(wrapped, w, w)
    header, line, total = capsys.readouterr().out.splitlines()
    assert header.split() == ["name", "value", "decision", "raw", "stored", "source"]
    for part in (
        "head/dot_general",
        "float32[256,256]",
        "compress 4 bits, rows",
        "256.0 KiB",
        "33.5 KiB",
        "test_report.py",
    ):
        assert part in line
    assert "1 residuals" in total
    assert "7.6x smaller" in total


def test_a_function_that_wraps_nothing_is_named():
    with pytest.raises(ValueError, match=r"`<lambda>` calls no function wrapped"):
        dafjax.saved_residuals(lambda x: x * 2, 1.0)
