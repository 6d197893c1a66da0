"""GLUE tasks from local folders: SST-2, MRPC and STS-B, with their official metrics.

Wang et al.: GLUE: A Multi-Task Benchmark and Analysis Platform for Natural Language
Understanding (2018). The files are those of gluebenchmark.com (`train.tsv`, `dev.tsv`)
or the Parquet files of the Hugging Face data set `nyu-mll/glue`.
"""

import csv
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
import scipy.stats
import sklearn.metrics


Example = tuple[str | tuple[str, str], int | float]
Score = Callable[[np.ndarray, np.ndarray], float]


def _f1(labels: np.ndarray, predictions: np.ndarray) -> float:
    return float(sklearn.metrics.f1_score(labels, predictions))


def accuracy(labels: np.ndarray, predictions: np.ndarray) -> float:
    """Returns the share of examples whose class was predicted."""
    return float(np.mean(labels == predictions))


def _pearson(labels: np.ndarray, predictions: np.ndarray) -> float:
    result: Any = scipy.stats.pearsonr(labels, predictions)
    return float(result.statistic)


def _spearman(labels: np.ndarray, predictions: np.ndarray) -> float:
    result: Any = scipy.stats.spearmanr(labels, predictions)
    return float(result.statistic)


@final
@dataclasses.dataclass(frozen=True)
class GlueTask:
    """What one task's files look like.

    Attributes:
        folder: Its folder, as the official archive names it.
        tsv_columns: The columns of text, then that of the label, in TSV files.
        parquet_columns: Likewise in Parquet files.
        num_classes: Classes; 1 for scores, which are from 0 to 5.
        metrics: Functions of labels and predictions, by name; the first chooses the
            best checkpoint.
    """

    folder: str
    tsv_columns: tuple[str, ...]
    parquet_columns: tuple[str, ...]
    num_classes: int
    metrics: Mapping[str, Score]


TASKS: Mapping[str, GlueTask] = {
    "sst2": GlueTask(
        "SST-2",
        ("sentence", "label"),
        ("sentence", "label"),
        2,
        {"accuracy": accuracy},
    ),
    "mrpc": GlueTask(
        "MRPC",
        ("#1 String", "#2 String", "Quality"),
        ("sentence1", "sentence2", "label"),
        2,
        {"accuracy": accuracy, "f1": _f1},
    ),
    "stsb": GlueTask(
        "STS-B",
        ("sentence1", "sentence2", "score"),
        ("sentence1", "sentence2", "label"),
        1,
        {"pearson": _pearson, "spearman": _spearman},
    ),
}


def load_glue(
    name: str, directory: pathlib.Path
) -> tuple[list[Example], list[Example]]:
    """Reads the training and the development split of a task.

    The test split of GLUE has no labels.

    Args:
        name: `"sst2"`, `"mrpc"` or `"stsb"`.
        directory: Where the folder of the task lies, named as in the official archive
            or as the task.

    Returns:
        Examples of both splits: a text or a pair of them, and its label.

    Raises:
        FileNotFoundError: A file is missing; the message says what to put where.
        ValueError: There is no such task, or a file is not what it should be; the
            message names it and its line.
    """
    if name not in TASKS:
        raise ValueError(f"`name` must be one of {tuple(TASKS)}, but got {name!r}.")
    task = TASKS[name]
    folders = [directory / task.folder, directory / name]
    for folder in folders:
        for read in (_read_tsv, _read_parquet):
            splits = read(task, folder)
            if splits is not None:
                return splits
    raise FileNotFoundError(
        f"The data set {name} is not there. Put `train.tsv` and `dev.tsv` of {name} "
        f"from gluebenchmark.com, or `train-*.parquet` and `validation-*.parquet` of "
        f"`nyu-mll/glue`, into {' or '.join(f'`{folder}`' for folder in folders)}."
    )


def _read_tsv(
    task: GlueTask, folder: pathlib.Path
) -> tuple[list[Example], list[Example]] | None:
    train, test = folder / "train.tsv", folder / "dev.tsv"
    if not (train.is_file() and test.is_file()):
        return None
    return list(_rows_of_tsv(task, train)), list(_rows_of_tsv(task, test))


def _rows_of_tsv(task: GlueTask, path: pathlib.Path) -> Iterator[Example]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        # Quotes in these files are part of the text.
        reader = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        header = next(reader, [])
        missing = [name for name in task.tsv_columns if name not in header]
        if missing:
            raise ValueError(
                f"`{path}` must have the columns {task.tsv_columns}, but lacks "
                f"{missing}; its first line is {header!r}."
            )
        places = [header.index(name) for name in task.tsv_columns]
        for row in reader:
            if len(row) <= max(places):
                raise ValueError(
                    f"`{path}`, line {reader.line_num}, must have at least "
                    f"{max(places) + 1} columns, but has {len(row)}: {row!r}."
                )
            *texts, label = (row[place] for place in places)
            yield _example(task, texts, label, f"`{path}`, line {reader.line_num}")


def _read_parquet(
    task: GlueTask, folder: pathlib.Path
) -> tuple[list[Example], list[Example]] | None:
    train = sorted(folder.glob("train*.parquet"))
    test = sorted(folder.glob("validation*.parquet"))
    if not (train and test):
        return None
    return list(_rows_of_parquet(task, train)), list(_rows_of_parquet(task, test))


def _rows_of_parquet(
    task: GlueTask, paths: Sequence[pathlib.Path]
) -> Iterator[Example]:
    # A large library, of which most users have no need.
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"`{paths[0]}` is read with pyarrow, which is not installed: "
            "`pip install pyarrow`. Or put TSV files there."
        ) from error
    for path in paths:
        try:
            table = parquet.read_table(path, columns=list(task.parquet_columns))
        except (ArrowException, OSError) as error:
            raise ValueError(f"`{path}` cannot be read: {error}") from error
        if table.num_columns != len(task.parquet_columns):
            raise ValueError(
                f"`{path}` must have the columns {task.parquet_columns}, but has "
                f"{table.column_names}."
            )
        columns = [table.column(name).to_pylist() for name in task.parquet_columns]
        for number, (*texts, label) in enumerate(zip(*columns, strict=True)):
            yield _example(task, texts, label, f"`{path}`, row {number}")


def _example(task: GlueTask, texts: Sequence[Any], label: Any, where: str) -> Example:
    try:
        value = float(label)
    except (TypeError, ValueError):
        value = float("nan")
    if task.num_classes == 1:
        if not 0 <= value <= 5:
            raise ValueError(f"{where}: the score must be from 0 to 5, not {label!r}.")
    elif value not in range(task.num_classes):
        raise ValueError(
            f"{where}: the label must be from 0 to {task.num_classes - 1}, not "
            f"{label!r}."
        )
    first, *rest = map(str, texts)
    return (first, rest[0]) if rest else first, value if task.num_classes == 1 else int(
        value
    )
