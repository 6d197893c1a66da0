"""Profiles of devices: what is measured, chosen, kept and measured anew."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dafjax import __main__, reductions
from dafjax._native import _cuda, _reduce
from dafjax._native._reduce import (
    GRID,
    REDUCTIONS,
    Profile,
    ReductionCase,
    fastest,
    measure,
    time_reductions,
)


LONG = 1 << 15  # elements of a row of several parts


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A folder of profiles of its own, and nothing known from before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _reduce._profile_of.cache_clear()
    yield tmp_path / "dafjax"
    _reduce._profile_of.cache_clear()


def _timer(favorite, calls=None):
    """Says that `favorite(rows, elements)` is the fastest strategy, in one round."""

    def timer(cases, num_rounds):
        if calls is not None:
            calls.append(len(cases))
        times = [
            1e-6
            if case.strategy == favorite(case.num_rows, case.row_elements)
            else 2e-6
            for case in cases
        ]
        slow = [10 * time for time in times]
        return np.array([times] + (num_rounds - 1) * [slow], np.float32)

    return timer


def _strategies(function, x):
    """The numbers of strategies in the program that is lowered for the CPU."""
    text = jax.jit(function).lower(x).as_text()
    return [int(part.split(" :")[0]) for part in text.split("strategy = ")[1:]]


def test_the_fastest_strategy_of_the_nearest_size_is_chosen():
    profile = measure(_timer(lambda rows, n: "hybrid" if n > 1 << 17 else "atomic"))
    assert profile.choose("minmax", 1, 1 << 15) == "atomic"
    assert profile.choose("minmax", 1, 1 << 30) == "hybrid"
    assert profile.choose("minmax", 3, 1 << 19) == "hybrid"


def test_sums_whose_bits_vary_are_not_chosen():
    profile = measure(_timer(lambda *_: "atomic"))
    assert profile.choose("minmax", 1, LONG) == "atomic"
    assert profile.choose("sum_of_squares", 1, LONG) == "parallel"


@pytest.mark.parametrize("row_elements", [0, 5, 8192])
def test_rows_of_one_part_need_no_second_step(row_elements):
    profile = measure(_timer(lambda *_: "hybrid"))
    assert profile.choose("minmax", 1, row_elements) == "parallel"


def test_what_is_hardly_faster_is_not_chosen():
    assert fastest({"parallel": 1.02, "atomic": 1.0, "hybrid": 1.5}) == "parallel"
    assert fastest({"parallel": 1.05, "atomic": 1.0, "hybrid": 1.5}) == "atomic"


def test_a_profile_is_measured_once_and_kept(cache, monkeypatch):
    calls = []
    timer = _timer(lambda *_: "hybrid", calls)
    monkeypatch.setattr(_reduce, "time_reductions", lambda _, *rest: timer(*rest))
    device = jax.devices()[0]
    first = _reduce.tune_device(device)
    again = _reduce.tune_device(device)
    assert (first.measured, again.measured, len(calls)) == (True, False, 1)
    assert first.profile == again.profile
    assert [file.name for file in cache.iterdir()] == [first.path.name]
    assert _reduce.tune_device(device, redo=True).measured


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"device": {}}'])
def test_a_file_that_is_no_profile_of_the_device_is_replaced(cache, monkeypatch, text):
    timer = _timer(lambda *_: "atomic")
    monkeypatch.setattr(_reduce, "time_reductions", lambda _, *rest: timer(*rest))
    device = jax.devices()[0]
    path = _reduce.tune_device(device).path
    path.write_text(text)
    assert _reduce.tune_device(device).measured
    assert json.loads(path.read_text())["device"] == _cuda.describe(device)


def test_another_power_mode_has_a_profile_of_its_own(cache, monkeypatch, tmp_path):
    timer = _timer(lambda *_: "atomic")
    monkeypatch.setattr(_reduce, "time_reductions", lambda _, *rest: timer(*rest))
    mode = tmp_path / "status"
    monkeypatch.setattr(_cuda, "_POWER_MODE", mode)
    paths = set()
    for text in ("pmode:0000", "pmode:0002"):
        mode.write_text(text)
        paths.add(_reduce.tune_device(jax.devices()[0]).path)
    assert len(paths) == 2


def test_a_folder_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    timer = _timer(lambda *_: "atomic")
    monkeypatch.setattr(_reduce, "time_reductions", lambda _, *rest: timer(*rest))
    with pytest.warns(UserWarning, match=r"cannot be kept in .*XDG_CACHE_HOME"):
        tuning = _reduce.tune_device(jax.devices()[0])
    assert tuning.measured


def test_programs_have_what_is_chosen(cache, monkeypatch):
    timer = _timer(lambda rows, _: "hybrid" if rows > 4 else "atomic")
    monkeypatch.setattr(_reduce, "time_reductions", lambda _, *rest: timer(*rest))

    def both(x):
        return reductions.minmax(x), reductions.minmax(x[0])

    assert _strategies(both, jnp.ones((16, LONG))) == [2, 1]
    assert _strategies(reductions.minmax, jnp.ones(LONG, jnp.bfloat16)) == [1]
    assert _strategies(
        lambda x: reductions.minmax(x, strategy="parallel"), jnp.ones(LONG)
    ) == [0]


def test_a_device_is_measured_while_a_program_is_lowered(cache):
    mesh = jax.make_mesh((2,), ("rows",))
    x = np.asarray(jax.random.normal(jax.random.key(0), (4, LONG)))

    @jax.jit
    def function(x):
        low, high = reductions.minmax(x)
        return low, high, reductions.sum_of_squares(x)

    with jax.set_mesh(mesh), jax.transfer_guard("disallow"):
        sharded = jax.shard_map(
            function, in_specs=PartitionSpec("rows"), out_specs=PartitionSpec("rows")
        )
        low, high, _ = jax.jit(sharded)(
            jax.device_put(x, jax.NamedSharding(mesh, PartitionSpec("rows")))
        )
    np.testing.assert_array_equal(low, x.min(axis=1))
    np.testing.assert_array_equal(high, x.max(axis=1))
    (file,) = cache.iterdir()
    record = json.loads(file.read_text())
    assert len(record["times"]) == len(REDUCTIONS) * len(GRID)
    assert all(
        0 < second < 1 for row in record["times"] for second in row["seconds"].values()
    )


def test_no_device_no_profile(cache):
    assert _reduce.profile_for("cuda") is None
    resolve = _reduce._resolve("minmax")
    x = jax.ShapeDtypeStruct((LONG,), jnp.float32)
    assert resolve("cuda", x, strategy="auto") == {"strategy": "hybrid"}


def test_times_grow_with_what_is_read():
    cases = [ReductionCase("minmax", "parallel", 1, 1 << k, 4) for k in (14, 22)]
    seconds = time_reductions(jax.devices()[0], cases, 5)
    assert seconds.shape == (5, 2)
    # 256 times as much is read.
    assert np.median(seconds[:, 1]) > 10 * np.median(seconds[:, 0])


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            ReductionCase("minmax", "parallel", 0, 5, 1),
            r"at least one row.* number 0 is 0 0 0 5 1",
        ),
        (ReductionCase("minmax", "parallel", 1, 5, 1 << 30), "at least one row"),
        (ReductionCase("minmax", "parallel", 1 << 30, 1 << 30, 1), "at least one row"),
    ],
)
def test_what_cannot_be_timed_is_refused(case, message, monkeypatch):
    monkeypatch.setattr("dafjax._native._reduce.scratch_words", lambda _: 0)
    monkeypatch.setattr(np, "linspace", lambda *_, **__: np.ones(8, np.float32))
    with pytest.raises(Exception, match=message):
        time_reductions(jax.devices()[0], [case], 1)


def test_the_command_prints_times_and_choices(cache, monkeypatch, capsys):
    for arguments in (["tune"], ["tune"], ["tune", "--redo"]):
        monkeypatch.setattr(sys, "argv", ["dafjax", *arguments])
        assert __main__.main() == 0
    text = capsys.readouterr().out
    assert text.count("measured now") == 2
    assert text.count("measured before") == 1
    for word in ("minmax", "sum_of_squares", "parallel", "atomic", "hybrid", "auto"):
        assert word in text


def test_profiles_survive_their_files(tmp_path):
    profile = measure(_timer(lambda *_: "hybrid"))
    path = tmp_path / "new" / "profile.json"
    _reduce.save(path, {"kind": "x"}, profile)
    assert _reduce.load(path, {"kind": "x"}) == profile
    assert _reduce.load(path, {"kind": "y"}) is None
    assert isinstance(profile, Profile)
