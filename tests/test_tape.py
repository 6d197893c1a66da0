"""Tapes: many operations on scalars as one custom call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dafjax._native import _evaluate, evaluate, tape_entry
from tests.helpers import assert_same_bits, random_tape


def in_numpy(given, tape):
    """Runs a tape in float32; subnormals count as zero."""
    values = list(given)
    operations = (np.add, np.multiply, np.divide)
    tiny = np.finfo(np.float32).tiny
    for entry in tape:
        first, second = entry >> 30 & (1 << 30) - 1, entry & (1 << 30) - 1
        with np.errstate(all="ignore"):
            result = operations[entry >> 60](values[first], values[second])
        values.append(np.float32(0) if 0 < abs(result) < tiny else result)
    return np.array(values, np.float32)


@pytest.mark.parametrize("num_entries", [0, 1, 480, 481, 2000])
def test_operations_are_done_one_after_another(rng, num_entries):
    given = rng.lognormal(size=50).astype(np.float32)
    tape = random_tape(rng, 50, num_entries)
    got = evaluate(jnp.asarray(given), tape=tape)
    np.testing.assert_allclose(got, in_numpy(given, tape), rtol=1e-6)


def test_without_the_custom_call_it_is_the_same(rng):
    given = jnp.asarray(rng.lognormal(size=(2, 9)).astype(np.float32))
    tape = random_tape(rng, 9, 40)
    expected = evaluate(given, tape=tape)
    assert_same_bits(_evaluate._reference(given, tape=tape), expected)
    nothing = jnp.zeros((3, 0))
    assert _evaluate._reference(nothing, tape=()).shape == (3, 0)


def test_rows_are_independent(rng):
    given = jnp.asarray(rng.lognormal(size=(3, 2, 9)).astype(np.float32))
    tape = random_tape(rng, 9, 40)
    got = evaluate(given, tape=tape)
    mapped = jax.vmap(lambda x: evaluate(x, tape=tape), in_axes=1, out_axes=1)(given)
    assert_same_bits(mapped, got)
    for row in np.ndindex(3, 2):
        assert_same_bits(evaluate(given[row], tape=tape), got[row])


def test_devices_may_share_rows(rng):
    given = jnp.asarray(rng.lognormal(size=(4, 9)).astype(np.float32))
    tape = random_tape(rng, 9, 40)
    mesh = jax.make_mesh((2,), ("data",))
    shared = jax.device_put(given, NamedSharding(mesh, PartitionSpec("data")))
    got = jax.jit(lambda x: evaluate(x, tape=tape))(shared)
    assert got.sharding.spec[0] == "data"
    assert_same_bits(np.asarray(got), evaluate(given, tape=tape))


def test_it_is_one_call():
    def function(x):
        return evaluate(x, tape=random_tape(np.random.default_rng(0), 4, 3000))

    text = jax.jit(function).lower(jnp.ones(4)).as_text()
    assert text.count("custom_call @dafjax_evaluate(") == 1
    assert len(text.splitlines()) < 10


def test_bad_input_is_an_error():
    with pytest.raises(TypeError, match=r"`given` must be float32, not int32"):
        evaluate(jnp.ones(3, jnp.int32), tape=())
    with pytest.raises(ValueError, match=r"`given` must have rows"):
        evaluate(jnp.float32(1), tape=())
    for entry in (tape_entry("add", 0, 3), tape_entry("add", 3, 0), 3 << 60, -1):
        with pytest.raises(ValueError, match=r"entry 0 of `tape`, .* comes before"):
            evaluate(jnp.ones(3), tape=(entry,))
    with pytest.raises(ValueError, match=r"0 to 2\^30 - 1, not 1073741824"):
        tape_entry("add", 0, 1 << 30)
    with pytest.raises(ValueError, match=r"0 to 2\^30 - 1, not -1"):
        tape_entry("add", -1, 0)


def test_the_call_refuses_what_is_no_tape():
    """Where Python did not look."""

    def call(given, tape, count):
        like = jax.ShapeDtypeStruct((count,), jnp.float32)
        made = jax.ffi.ffi_call("dafjax_evaluate", like)
        return made(given, tape=np.array(tape, np.int64))

    evaluate(jnp.ones(1), tape=())
    with pytest.raises(Exception, match="entry 1 of the tape, 4, is no operation"):
        call(jnp.ones(3), [tape_entry("add", 0, 1), 4], 5)
    with pytest.raises(Exception, match="given must be float32"):
        call(jnp.ones(3, jnp.int32), [], 3)
    with pytest.raises(
        Exception, match=r"dimensions of values \(\[4\]\) must be \[3\]"
    ):
        call(jnp.ones(3), [], 4)
