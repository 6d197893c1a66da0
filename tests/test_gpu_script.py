"""`benchmarks/gpu.sh`, tried out on the CPU, and what it makes of its parts."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import venv

import jax
import jax.numpy as jnp
import pytest

from benchmarks.on_gpu import report, same_bytes, steps
from dafjax._native import _cuda


ROOT = pathlib.Path(__file__).resolve().parents[1]


def _run(*arguments, root=ROOT, python=sys.executable, **environment):
    return subprocess.run(
        ["bash", root / "benchmarks" / "gpu.sh", *arguments],
        env={**os.environ, "PYTHON": str(python), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_the_script_runs_dry(tmp_path):
    out = tmp_path / "gpu.json"
    done = _run("--dry", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text())
    assert record["same_bytes"]["different"] == []
    assert record["same_bytes"]["num_cases"] > 10
    operations = {row["operation"] for row in record["throughput"]["throughput"]}
    assert {"pack affine2", "unpack affine2 columns", "pack bitmask"} <= operations
    assert {row["reduction"] for row in record["reductions"]["reductions"]} == {
        "minmax", "sum_of_squares",
    }  # fmt: skip
    methods = [row["method"] for row in record["steps"]["steps"]]
    assert methods == ["save_all", "compress"]
    losses = [row["losses"][0] for row in record["steps"]["steps"]]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert "cub" not in record
    assert "not measured" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_it_builds_what_is_not_installed(tmp_path):
    """From a checkout, for the GPU that is there, with a Python that has all else."""
    root, environment, commands = (tmp_path / n for n in ("checkout", "venv", "bin"))
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True)
    for name in tracked.splitlines():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, root / name)
    # An editable install is found by a file that is not read there.
    venv.create(environment)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    commands.mkdir()
    (commands / "nvidia-smi").write_text("#!/bin/sh\necho 9.0\n")
    (commands / "nvidia-smi").chmod(0o755)
    done = _run(
        "--dry", "--out", str(tmp_path / "gpu.json"),
        root=root, python=environment / "bin" / "python",
        PATH=f"{commands}:{os.environ['PATH']}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "== building dafjax" in done.stdout
    assert re.search(r"libdafjax_cuda.so\s+for 90-real\n", done.stdout)


def test_what_was_measured_before_is_left_if_nothing_is(tmp_path):
    out = tmp_path / "gpu.json"
    out.write_text("before")
    with pytest.raises(report.NothingMeasuredError, match="same_bytes"):
        report.main([str(tmp_path), "--out", str(out)])
    assert out.read_text() == "before"


def test_on_a_gpu_there_must_be_custom_calls_to_compare(tmp_path, monkeypatch):
    class Device:
        platform = device_kind = "gpu"

    monkeypatch.setattr(jax, "devices", lambda *_: [Device()])
    monkeypatch.setattr(_cuda, "register", lambda: False)
    with pytest.raises(same_bytes.NoCustomCallsError, match=r"without CUDA.*doctor"):
        same_bytes.main(["--out", str(tmp_path / "out.json")])


def test_an_unknown_argument_is_named():
    done = _run("--wet")
    assert done.returncode == 2
    assert "unknown argument --wet" in done.stderr


def test_other_bytes_are_found(tmp_path, monkeypatch):
    def wrong():
        operands = (jnp.ones(3),)
        yield same_bytes.Case("right", jnp.sin, jnp.cos, jnp.sin, operands)
        yield same_bytes.Case("wrong", jnp.sin, jnp.sin, jnp.cos, operands)

    monkeypatch.setattr(same_bytes, "cases", wrong)
    out = tmp_path / "out.json"
    with pytest.raises(
        same_bytes.DifferentBytesError, match="1 of 3 cases differ: wrong"
    ):
        same_bytes.main(["--out", str(out)])
    assert json.loads(out.read_text())["different"] == ["wrong"]


def test_notes_that_do_not_arrive_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(same_bytes, "cases", lambda: iter(()))
    monkeypatch.setattr(same_bytes, "ledger_note", lambda x, **_: x[0, 0])
    with pytest.raises(same_bytes.DifferentBytesError, match="notes of importances"):
        same_bytes.main(["--out", str(tmp_path / "out.json")])


def test_a_peak_is_what_the_device_tells(monkeypatch):
    class Device:
        def memory_stats(self):
            return {"peak_bytes_in_use": 12345}

    options = steps.Options(
        gpt2_layers=1, gpt2_width=32, gpt2_heads=2, gpt2_batch=2, gpt2_length=16
    )
    step = steps.make_step(options, "gpt2", "save_all")
    monkeypatch.setattr(steps, "make_step", lambda *_: step)
    monkeypatch.setattr(jax, "devices", lambda *_: [Device()])
    record = steps.measure_peak(options, "gpt2", "save_all")
    assert record["peak_nbytes"] == 12345
    assert len(record["losses"]) == 5


def _steps(networks, ratios):
    rows = [
        {"network": network, "method": "compress", "ratio": {"median": ratio}}
        for network, ratio in ratios.items()
    ]
    return {"options": {"networks": networks}, "steps": rows}


@pytest.mark.parametrize(
    ("name", "part", "expected"),
    [
        ("same_bytes", {"num_cases": 5, "different": ["a"]}, ("4 of 5 cases", "no")),
        ("sanitizer", {"tools": {"memcheck": "clean"}}, ("memcheck: clean", "yes")),
        ("sanitizer", {"tools": {"memcheck": "3 errors"}}, ("memcheck: 3 errors", "")),
        (
            "steps",
            _steps(["n"], {"n": 1.2}),
            ("time of plain: n 1.200 (<= 1.1)", "no"),
        ),
        (
            "steps",
            _steps(["n", "m"], {"n": 1.05, "m": 1.0}),
            ("time of plain: n 1.050, m 1.000 (<= 1.1)", "yes"),
        ),
        (
            "steps",
            _steps(["n", "m"], {"n": 1.05}),
            ("time of plain: n 1.050 (<= 1.1)", "in part"),
        ),
        (
            "throughput",
            {
                "throughput": [
                    {"operation": "pack affine1", "fraction_of_copy": {"median": 0.9}}
                ]
            },
            ("pack affine1 is the slowest, at 0.90 of a copy (>= 0.75)", "in part"),
        ),
        (
            "cub",
            {"cub": [{"gigabytes_per_second": 5.0}, {"gigabytes_per_second": 900.0}]},
            ("minimum and maximum at 5 to 900 GB/s", ""),
        ),
        ("cub", None, ("not measured", "")),
    ],
)
def test_the_report_says_what_holds(name, part, expected):
    assert report.summary(name, part) == expected
