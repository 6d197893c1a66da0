"""Energy, clocks and temperatures of Jetsons, from what `tegrastats` prints."""

import json
import os
import time

import pytest

from benchmarks import transformer_memory
from benchmarks.tegrastats import (
    NoTegrastatsError,
    Sample,
    Tegrastats,
    parse,
    run_tegrastats,
)


ORIN_NANO = (
    "11-22-2026 10:00:00 RAM 3162/7620MB (lfb 4x4MB) SWAP 0/3810MB (cached 0MB) "
    "CPU [0%@729,12%@1510,off,off,3%@883,0%@883] EMC_FREQ 3%@2133 GR3D_FREQ 99%@[611] "
    "NVDEC off NVJPG off VIC off APE 200 cpu@45.5C soc2@44.8C gpu@44.906C tj@45.5C "
    "VDD_IN 4585mW/4600mW VDD_CPU_GPU_CV 481mW/481mW VDD_SOC 1444mW/1444mW"
)
AGX_ORIN = (
    "RAM 9000/62780MB (lfb 2x4MB) CPU [1%@729,off] EMC_FREQ 0%@3199 "
    "GR3D_FREQ 0%@[1300,1301] tboard@33C tdiode@-2.5C "
    "VDD_GPU_SOC 3000mW/3000mW VDD_CPU_CV 400mW/400mW VIN_SYS_5V0 2900mW/2900mW"
)


def test_a_line_of_a_board_with_one_rail_for_all():
    sample = parse(ORIN_NANO, 7.0)
    assert sample is not None
    assert (sample.time, sample.watts, sample.ram_megabytes) == (7.0, 4.585, 3162)
    assert sample.megahertz == {"cpu": 1510, "gpu": 611, "emc": 2133}
    assert sample.celsius == {"cpu": 45.5, "soc2": 44.8, "gpu": 44.906, "tj": 45.5}


def test_rails_are_added_up_where_none_is_of_the_whole_board():
    sample = parse(AGX_ORIN, 0.0)
    assert sample is not None
    assert sample.watts == pytest.approx(6.3)
    assert sample.megahertz["gpu"] == 1301
    assert sample.celsius == {"tboard": 33.0, "tdiode": -2.5}


def test_a_line_without_power_is_no_sample():
    assert parse("RAM 1/2MB CPU [off]", 0.0) is None


def test_energy_is_power_over_time():
    samples = [
        Sample(t, w, {}, {}, 0) for t, w in ((1.0, 10.0), (2.0, 20.0), (3.0, 5.0))
    ]
    stats = Tegrastats(samples)
    # Power until a sample is that of the sample; after the last it goes on.
    assert stats.joules(0.5, 1.0) == pytest.approx(5)
    assert stats.joules(0.0, 3.0) == pytest.approx(35)
    assert stats.joules(1.5, 2.5) == pytest.approx(12.5)
    assert stats.joules(2.5, 5.0) == pytest.approx(12.5)
    assert stats.joules(2.0, 2.0) == 0
    with pytest.raises(NoTegrastatsError, match="told of no power yet"):
        Tegrastats().joules(0.0, 1.0)


@pytest.fixture
def board(tmp_path, monkeypatch):
    """A `tegrastats` that prints a line every 10 ms."""
    script = tmp_path / "tegrastats"
    script.write_text(f"#!/bin/sh\nwhile :; do echo '{ORIN_NANO}'; sleep 0.01; done\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def test_the_program_runs_as_long_as_it_is_needed(board):
    with run_tegrastats() as stats:
        start = time.perf_counter()
        while stats.record()["num_samples"] < 3:
            time.sleep(0.01)
        end = time.perf_counter()
    assert stats.joules(start, end) == pytest.approx(4.585 * (end - start))
    before = stats.record()["num_samples"]
    time.sleep(0.05)
    record = stats.record()
    assert record["num_samples"] == before
    assert record["watts"] == {"least": 4.585, "median": 4.585, "greatest": 4.585}
    assert record["megahertz"]["gpu"]["greatest"] == 611


def test_where_there_is_none_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        pytest.raises(NoTegrastatsError, match=r"`--jetson` needs `tegrastats`"),
        run_tegrastats(),
    ):
        pass


def test_a_benchmark_tells_the_energy_of_a_step(board, tmp_path, capsys):
    out = tmp_path / "out.json"
    transformer_memory.main(
        ["--layers", "1", "--width", "32", "--heads", "2", "--vocabulary", "50",
         "--batch", "2", "--length", "16", "--methods", "save_all", "--no-temp",
         "--time", "--rounds", "2", "--jetson", "--out", str(out)]
    )  # fmt: skip
    record = json.loads(out.read_text())
    timing = record["time"]["save_all"]
    watts = timing["joules"]["median"] / timing["seconds"]["median"]
    assert watts == pytest.approx(4.585, rel=0.2)
    assert record["jetson"]["celsius"]["tj"]["greatest"] == 45.5
    assert "Joules" in capsys.readouterr().out
