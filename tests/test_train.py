"""The training program: its command line, its files, and how it resumes."""

import dataclasses
import functools
import json
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import rich.console

from models import (
    compare,
    data,
    loop,
    methods,
    resnet,
    run_directory,
    setup,
    step,
    train,
    weights,
)
from models.checkpoints import Checkpoints
from models.config import TrainConfig
from models.tasks import images


pytestmark = pytest.mark.usefixtures("standard_promotion")


ROOT = pathlib.Path(__file__).resolve().parent.parent


load_all = data.load


def load_few(name, **options):
    """Loads 48 training and 24 test images, enough for three steps an epoch."""
    dataset = load_all(name, **options)
    train_split, test_split = (
        dataclasses.replace(
            split, images=split.images[:count], labels=split.labels[:count]
        )
        for split, count in ((dataset.train, 48), (dataset.test, 24))
    )
    return dataclasses.replace(dataset, train=train_split, test=test_split)


def make_it_small(patch):
    one_block = functools.partial(resnet.ResNetConfig, stage_sizes=(1,))
    patch.setattr(images, "MODELS", {"resnet18": one_block})
    patch.setattr(data, "load", load_few)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    make_it_small(monkeypatch)


@pytest.fixture
def console():
    return rich.console.Console(quiet=True)


def tiny(out, **options):
    defaults = {"width": 8, "batch": 16, "epochs": 2, "schedule": "constant"}
    return TrainConfig(out=out, **(defaults | options))


def run(config, console):
    return loop.train(setup.set_up(config), console)


def saved_state(config):
    like, _ = setup.initial_state(setup.set_up(config))
    with Checkpoints(config.out) as checkpoints:
        latest = checkpoints.latest()
        return latest, checkpoints.restore(latest, like)


def losses(directory):
    return [
        (record["step"], record["loss"])
        for record in run_directory.RunDirectory(directory).read_metrics()
        if record["kind"] == "step"
    ]


def assert_identical(first, second):
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One finished run of two epochs, made once; tests copy it."""
    out = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        make_it_small(patch)
        run(tiny(out), rich.console.Console(quiet=True))
    return out


def test_a_run_writes_options_metrics_and_result(finished):
    records = run_directory.RunDirectory(finished).read_metrics()
    result = run_directory.RunDirectory(finished).read_result()
    config = json.loads((finished / "config.json").read_text())
    assert config["width"] == 8
    assert [r["kind"] for r in records] == (["step"] * 3 + ["epoch"]) * 2
    assert [r["step"] for r in records if r["kind"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert result["final_loss"] == records[-1]["loss"]
    assert result["test_accuracy"] == records[-1]["test_accuracy"]
    assert result["temp_nbytes"] > 1e5
    assert result["residual_nbytes"] > 1e6
    assert result["peak_resident_nbytes"] > 1e8


def test_one_epoch_and_a_resumed_one_are_two_epochs_bit_for_bit(
    finished, tmp_path, console
):
    out = tmp_path / "run"
    run(tiny(out, epochs=1), console)
    run(tiny(out, epochs=2, resume=True), console)
    num_epochs, resumed = saved_state(tiny(out))
    num_epochs_at_once, at_once = saved_state(tiny(finished))
    assert num_epochs == num_epochs_at_once == 2
    assert_identical(resumed, at_once)
    assert losses(out) == losses(finished)


def test_an_interrupt_loses_no_finished_epoch(finished, tmp_path, monkeypatch, console):
    out = tmp_path / "run"
    calls = 0

    def interrupted(*arguments, **options):
        nonlocal calls
        for batch in loop_batches(*arguments, **options):
            calls += 1
            if calls == 5:  # in the middle of the second epoch
                raise KeyboardInterrupt
            yield batch

    loop_batches = loop.training_batches
    with monkeypatch.context() as patch:
        patch.setattr(loop, "training_batches", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(tiny(out), console)
    assert saved_state(tiny(out))[0] == 1
    run(tiny(out, resume=True), console)
    assert_identical(saved_state(tiny(out)), saved_state(tiny(finished)))
    assert losses(out) == losses(finished)


def test_an_interrupt_while_saving_keeps_the_checkpoint_before(
    finished, tmp_path, monkeypatch, console
):
    out = tmp_path / "run"
    save = Checkpoints.save

    def interrupted(self, num_epochs, *arguments):
        if num_epochs == 2:
            raise KeyboardInterrupt
        save(self, num_epochs, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(tiny(out), console)
    # What a killed process leaves behind: an unfinished folder, and half a line.
    shutil.copytree(
        out / "checkpoints" / "1", out / "checkpoints" / "2.orbax-checkpoint-tmp"
    )
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "st')
    run(tiny(out, resume=True), console)
    assert_identical(saved_state(tiny(out)), saved_state(tiny(finished)))
    assert losses(out) == losses(finished)


def test_a_run_without_a_finished_epoch_resumes_from_the_start(
    finished, tmp_path, console
):
    out = tmp_path / "run"
    out.mkdir()
    shutil.copy(finished / "config.json", out)
    (out / "metrics.jsonl").write_text((finished / "metrics.jsonl").read_text()[:150])
    run(tiny(out, resume=True), console)
    assert losses(out) == losses(finished)


def test_resuming_with_other_options_is_an_error_that_names_them(
    finished, tmp_path, console
):
    out = shutil.copytree(finished, tmp_path / "run")
    with pytest.raises(ValueError, match=r"`--seed` is 1, but the run in .* has 0"):
        run(tiny(out, seed=1, resume=True), console)
    assert json.loads((out / "config.json").read_text())["seed"] == 0


def test_resuming_beyond_the_epochs_of_a_cosine_schedule_is_an_error(tmp_path, console):
    out = tmp_path / "run"
    run(tiny(out, epochs=1, schedule="cosine"), console)
    with pytest.raises(ValueError, match=r"`--epochs` is 2, but the run in .* has 1"):
        run(tiny(out, epochs=2, schedule="cosine", resume=True), console)


def test_resuming_to_fewer_epochs_is_an_error(finished, tmp_path, console):
    out = shutil.copytree(finished, tmp_path / "run")
    with pytest.raises(ValueError, match=r"`--epochs` is 1, .* has finished 2"):
        run(tiny(out, epochs=1, resume=True), console)


def test_resuming_where_there_is_no_run_is_an_error(tmp_path, console):
    with pytest.raises(FileNotFoundError, match="`--resume` found no run in"):
        run(tiny(tmp_path / "absent", resume=True), console)


def test_a_new_run_does_not_overwrite_another(finished, console):
    with pytest.raises(ValueError, match=r"already holds a run. Pass `--resume`"):
        run(tiny(finished), console)


def test_a_damaged_checkpoint_is_an_error_that_names_its_folder(
    finished, tmp_path, console
):
    out = shutil.copytree(finished, tmp_path / "run")
    folder = out / "checkpoints" / "2"
    for path in (folder / "state").rglob("*"):
        if path.is_file() and "ocdbt" not in path.name and path.stat().st_size > 200:
            path.write_bytes(b"damaged")
    with pytest.raises(ValueError, match=f"{re.escape(str(folder))}` cannot be read"):
        run(tiny(out, epochs=3, resume=True), console)


def test_bits_in_a_pool_are_given_out_anew_within_the_budget(tmp_path, console):
    options = {"method": "compress", "store": "pool", "bits": "auto"}
    result = run(tiny(tmp_path / "run", budget="1MiB", **options), console)
    records = run_directory.RunDirectory(tmp_path / "run").read_metrics()
    steps = [record for record in records if record["kind"] == "step"]
    assert max(record["pool_nbytes"] for record in steps) <= 2**20
    assert result["pool_nbytes"] <= 2**20
    # Those of the plan at first, then what importances tell.
    assert set(steps[0]["bits"].values()) == {2.0}
    assert set(steps[-1]["bits"].values()) != {2.0}
    assert (tmp_path / "run" / "bits.png").stat().st_size > 10_000


@pytest.mark.slow
def test_bits_in_arrays_are_given_out_anew_within_the_budget(tmp_path, console):
    options = {"method": "compress", "store": "arrays", "bits": "auto"}
    result = run(tiny(tmp_path / "run", budget="160KiB", **options), console)
    records = run_directory.RunDirectory(tmp_path / "run").read_metrics()
    steps = [record for record in records if record["kind"] == "step"]
    assert 100 * 1024 < result["pool_nbytes"] <= 160 * 1024
    first, last = (set(steps[n]["bits"].values()) for n in (0, -1))
    assert len(first) < len(last)
    assert result["residual_nbytes"] > 0


def scores(monkeypatch, values):
    """Makes epochs end with these accuracies."""
    left = list(values)
    evaluate = loop._evaluate

    def scored(*arguments):
        return {**evaluate(*arguments), "test_accuracy": left.pop(0)}

    monkeypatch.setattr(loop, "_evaluate", scored)


def test_the_best_checkpoint_is_kept_and_its_weights_are_saved(
    tmp_path, monkeypatch, console
):
    # What is undefined is the worst.
    scores(monkeypatch, [float("nan"), 0.7, 0.3, float("nan"), 0.6])
    config = tiny(tmp_path, epochs=5)
    result = run(config, console)
    assert (result["best_epoch"], result["best_test_accuracy"]) == (2, 0.7)
    assert result["test_accuracy"] == 0.6
    kept = {int(path.name) for path in (tmp_path / "checkpoints").iterdir()}
    assert kept == {2, 4, 5}
    like, frozen = setup.initial_state(setup.set_up(config))
    with Checkpoints(tmp_path) as checkpoints:
        best, last = (checkpoints.restore(n, like) for n in (2, 5))
    saved = weights.load(
        tmp_path / "weights",
        setup.set_up(config).task.config,
        step.all_variables(like, frozen),
    )
    assert_identical(saved, step.all_variables(best, frozen))
    with pytest.raises(AssertionError):
        assert_identical(saved, step.all_variables(last, frozen))


def test_a_run_stops_when_it_gets_no_better(tmp_path, monkeypatch, console):
    values = [0.1, 0.3, 0.2, 0.3, 0.9]
    scores(monkeypatch, values)
    result = run(tiny(tmp_path, epochs=9, patience=2), console)
    records = run_directory.RunDirectory(tmp_path).read_metrics()
    assert max(record["epoch"] for record in records) == 4
    assert result["best_epoch"] in (2, 4)  # equally good
    # It is done when it is resumed, and goes on with more patience.
    run(tiny(tmp_path, epochs=9, patience=2, resume=True), console)
    scores(monkeypatch, values[4:])
    result = run(tiny(tmp_path, epochs=5, patience=3, resume=True), console)
    assert result["best_epoch"] == 5


def test_padding_counts_nothing_in_an_evaluation(tmp_path):
    # 24 test images: one and a half batches, or one.
    metrics = []
    for batch in (16, 24):
        run = setup.set_up(tiny(tmp_path, batch=batch))
        state, frozen = setup.initial_state(run)
        evaluation = setup.compile_evaluation(run)
        metrics.append(loop._evaluate(run, evaluation, state, frozen))
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-5)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, console):
    with pytest.raises(FloatingPointError, match="smaller `--learning-rate`"):
        run(tiny(tmp_path / "run", learning_rate=1e30), console)


def test_a_batch_beyond_the_data_is_an_error(tmp_path, console):
    with pytest.raises(ValueError, match="`--batch` must be at most 48"):
        run(tiny(tmp_path / "run", batch=49), console)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bits", "9"], "`--bits` must be one of 1, 2, 3, 4, 8, or auto, but got 9."),
        (["--batch", "0"], "`--batch` must be at least 1, but got 0."),
        (["--epochs", "0"], "`--epochs` must be at least 1, but got 0."),
        (["--width", "-1"], "`--width` must be at least 1, but got -1."),
        (["--seed", "-1"], "`--seed` must be at least 0, but got -1."),
        (["--learning-rate", "0"], "`--learning-rate` must be a finite number above 0"),
        (["--weight-decay", "nan"], "`--weight-decay` must be a finite number from 0"),
        (["--seeds", "2"], "`--seeds` above 1 needs `--compare`."),
        (["--methods", "none", "none"], "`--methods` must be different methods"),
        (["--resume"], "`--resume` needs `--out DIRECTORY`"),
        (["--policy", "dots"], "`--policy` of method none must be one of default"),
        (
            ["--method", "checkpoint", "--policy", "dots"],
            "must be one of default, nothing_saveable, dots_saveable",
        ),
        (["--budget", "1MiB"], "`--budget` needs `--store pool` or `--bits auto`."),
        (
            ["--method", "compress", "--store", "pool", "--budget", "much"],
            "cannot be read: 'much'",
        ),
        (["--data", "cifar10"], "unpack it in `data`, or pass `--data-dir`"),
        (["--data", "sst2"], "`--data` must be one of digits, fashion-mnist"),
        (["gpt2-small", "--width", "8"], "`--width` is for resnet, but got 8 with"),
        (["--lora", "8"], "`--lora` is for roberta and gpt2, but got 8 with resnet18"),
        (["--patience", "0"], "`--patience` must be at least 1, but got 0."),
        (
            ["roberta-base", "--data", "sst2"],
            "Put `train.tsv` and `dev.tsv` of sst2",
        ),
        (
            ["gpt2-small", "--weights", "nowhere"],
            "There is no tokenizer in `nowhere`",
        ),
    ],
)
def test_a_bad_option_is_an_error_that_names_it(arguments, message, capsys):
    assert train.main(arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_an_unknown_method_is_an_error_that_lists_the_methods(capsys):
    with pytest.raises(SystemExit):
        train.main(["--method", "magic"])
    message = capsys.readouterr().err
    assert all(name in message for name in ("--method", "magic", "checkpoint-best"))


def test_an_unknown_method_name_is_an_error():
    with pytest.raises(ValueError, match=r"`--method` must be one of none, .* 'magic'"):
        methods.make_method("magic", methods.MethodOptions())


def test_help_lists_every_option(capsys):
    with pytest.raises(SystemExit) as stopped:
        train.main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "resnet18" in text
    for option in TrainConfig.__dataclass_fields__:
        if option != "model":
            assert f"--{option.replace('_', '-')}" in text


def test_the_command_line_of_a_config_gives_the_config_back(tmp_path, monkeypatch):
    config = TrainConfig(
        width=8, method="compress", seed=3, optimizer="adamw", out=tmp_path, resume=True
    ).filled()
    parsed = []
    monkeypatch.setattr(train, "_train", lambda config, console: parsed.append(config))
    assert train.main(config.to_arguments()) == 0
    assert parsed == [config]


def test_a_comparison_ends_with_a_table_metrics_and_plots(tmp_path, monkeypatch):
    # In this process, and on few digits; the program itself uses fresh processes.
    monkeypatch.setattr(
        compare,
        "train_in_fresh_process",
        lambda config: run(config, rich.console.Console(quiet=True)),
    )
    console = rich.console.Console(record=True, width=150, quiet=False)
    config = tiny(
        tmp_path / "run", epochs=1, compare=True, methods=("none", "checkpoint")
    )
    results = compare.run(config, console)
    text = console.export_text()
    assert [r["method"] for r in results] == ["none", "checkpoint"]
    for words in ("no wrapping", "jax.checkpoint", "residuals", "accuracy"):
        assert words in text
    # They start from the same weights and batches.
    (_, first), *_ = losses(tmp_path / "run" / "none")
    (_, second), *_ = losses(tmp_path / "run" / "checkpoint")
    np.testing.assert_allclose(first, second, rtol=1e-5)
    records = run_directory.RunDirectory(tmp_path / "run").read_metrics()
    assert {r["method"] for r in records} == {"none", "checkpoint"}
    for name in ("loss.png", "memory.png"):
        assert (tmp_path / "run" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_resumed_comparison_keeps_finished_runs_of_the_same_options(
    tmp_path, finished, console
):
    out = tmp_path / "run"
    shutil.copytree(finished, out / "none")
    shutil.copy(finished / "config.json", out)
    config = tiny(out, compare=True, methods=("none",), resume=True)
    [result] = compare.run(config, console)
    saved = run_directory.RunDirectory(finished).read_result()
    assert result["test_accuracy"] == saved["test_accuracy"]
    # With other options the run is asked to resume, and refuses.
    other = tiny(out, compare=True, methods=("none",), resume=True, learning_rate=0.1)
    with pytest.raises(ValueError, match="method none ended with status 2"):
        compare.run(other, console)


@pytest.mark.slow
def test_the_residual_bytes_of_the_methods_are_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "MODELS", {"resnet18": resnet.resnet18})
    nbytes = {
        method: setup.residual_nbytes(setup.set_up(tiny(tmp_path, method=method)))
        for method in ("none", "checkpoint", "compress")
    }
    assert nbytes["checkpoint"] < nbytes["none"] / 4
    assert nbytes["compress"] < nbytes["none"] / 20


@pytest.mark.slow
def test_a_failing_run_ends_the_comparison_with_its_status(tmp_path, console):
    config = tiny(tmp_path / "run", data="cifar10", data_dir=tmp_path, compare=True)
    with pytest.raises(ValueError, match="method none ended with status 2"):
        compare.run(config, console)


def test_ctrl_c_ends_the_program_with_the_way_to_resume(tmp_path, monkeypatch, capsys):
    def interrupt(*unused):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "train", interrupt)
    assert train.main(["--batch", "16", "--out", str(tmp_path / "run")]) == 130
    assert "--resume continues after them" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_sigint_ends_a_process_after_its_last_finished_epoch(tmp_path):
    out = tmp_path / "run"
    arguments = tiny(out, epochs=1000).to_arguments()
    # A shell that runs the tests in the background has them ignore the signal.
    program = (
        "import pytest, runpy, signal;"
        "from tests.test_train import make_it_small;"
        "make_it_small(pytest.MonkeyPatch());"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"
        "runpy.run_module('models.train', run_name='__main__', alter_sys=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        while process.poll() is None and not (out / "checkpoints" / "1").exists():
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "Interrupted." in output
    num_epochs, _ = saved_state(tiny(out))
    assert num_epochs >= 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (0.2, "auto")),
        ({"model": "gpt2-small"}, (1e-3, "small")),
        ({"model": "gpt2-small", "lora": 8}, (5e-3, "small")),
        ({"model": "roberta-base", "lora": 8, "size": "full"}, (5e-4, "full")),
        ({"model": "roberta-base", "lora": 8, "learning_rate": 0.1}, (0.1, "small")),
        ({"model": "roberta-base", "lora": 8, "optimizer": "sgd"}, (0.2, "small")),
    ],
)
def test_learning_rates_suit_what_is_trained(options, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = TrainConfig(**options).filled()
    assert (config.learning_rate, config.size) == expected


def test_adapters_of_weights_that_are_there_learn_slowly(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights" / "gpt2-medium").mkdir(parents=True)
    config = TrainConfig("gpt2-medium", lora=8).filled()
    assert (config.learning_rate, config.size) == (5e-4, "full")
    assert config.pretraining is None
