"""What one training run is: every option of the command line, checked."""

import dataclasses
import math
import pathlib
from typing import Any, Literal

from models.data import DataName
from models.methods import Bits, MethodName, StoreName


ModelName = Literal["resnet18", "resnet34", "resnet50"]
OptimizerName = Literal["sgd", "adamw"]
ScheduleName = Literal["cosine", "constant"]

_LEARNING_RATES = {"sgd": 0.2, "adamw": 1e-3}
_WEIGHT_DECAYS = {"sgd": 5e-4, "adamw": 0.05}

_BITS = (1, 2, 3, 4, 8)

_COMPARED: tuple[MethodName, ...] = (
    "none",
    "checkpoint",
    "checkpoint-best",
    "compress",
)

# Where a run lies and which outputs it makes change nothing in its arithmetic.
_FREE_TO_CHANGE = frozenset(
    {"out", "data_dir", "resume", "compare", "methods", "seeds"}
)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Options of a training run, or of a comparison of runs.

    Attributes:
        model: Architecture.
        width: Filters of the first stage; 64 is the width of the paper.
        data: Data set. The digits ship with scikit-learn; the others lie in --data-dir.
        data_dir: Where cifar10, cifar100 and image-folder are looked for.
        method: What saves memory. none: nothing is wrapped. checkpoint: jax.checkpoint
            round each block. checkpoint-best: the same with the compiler options that
            suit it best. compress: dafjax.remat_compress round the loss.
        bits: Bits per element that the compressing methods keep: 1, 2, 3, 4 or 8; or
            auto: given out where the gradient suffers most, within --budget or else 2
            on average; with --store pool anew before each step, with arrays a few times
            in a run, which compiles the step anew.
        store: Where codes wait: in arrays of the compiled step, or in a page pool.
        budget: The most memory that the page pool takes, or with --bits auto that codes
            in arrays take, such as 16MiB.
        policy: What the method keeps. For checkpoint: default, or the name of one of
            jax.checkpoint_policies, such as dots_saveable. For compress: default,
            save-all, which keeps everything as it is, or nearest, which rounds codes to
            nearest, with a bias.
        batch: Images in a training step.
        epochs: Passes over the training split.
        optimizer: sgd has Nesterov momentum 0.9.
        learning_rate: After the warm-up of half an epoch; 0.2 for sgd and 0.001 for
            adamw if not given.
        weight_decay: 0.0005 for sgd and 0.05 for adamw if not given.
        schedule: cosine falls to zero at the last step; a constant run may be prolonged
            by --resume with more --epochs.
        seed: Chooses initial weights, order of batches, and the split of the digits.
        out: Directory of the run; runs/NAME-TIME if not given.
        resume: Continue the run in --out after its last finished epoch.
        compare: Train with each of --methods in a fresh process; end with a table and
            plots.
        methods: The methods that --compare trains with; the first is the reference.
        seeds: How many seeds, from --seed on, --compare trains with.
    """

    model: ModelName = "resnet18"
    width: int = 64
    data: DataName = "digits"
    data_dir: pathlib.Path = pathlib.Path("data")
    method: MethodName = "none"
    bits: Bits = 2
    store: StoreName = "arrays"
    budget: str | None = None
    policy: str = "default"
    batch: int = 64
    epochs: int = 6
    optimizer: OptimizerName = "sgd"
    learning_rate: float | None = None
    weight_decay: float | None = None
    schedule: ScheduleName = "cosine"
    seed: int = 0
    out: pathlib.Path | None = None
    resume: bool = False
    compare: bool = False
    methods: tuple[MethodName, ...] = _COMPARED
    seeds: int = 1

    def check(self) -> None:
        """Raises an error that names the option if a value is out of range."""
        for name in ("width", "batch", "epochs", "seeds"):
            _require(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        valid = self.bits in _BITS or self.bits == "auto"
        _require("bits", self.bits, valid, "one of 1, 2, 3, 4, 8, or auto")
        if self.budget is not None and self.store != "pool" and self.bits != "auto":
            raise ValueError("`--budget` needs `--store pool` or `--bits auto`.")
        _require("seed", self.seed, self.seed >= 0, "at least 0")
        rate, decay = self.resolved_learning_rate, self.resolved_weight_decay
        _require("learning-rate", rate, 0 < rate < math.inf, "a finite number above 0")
        _require(
            "weight-decay", decay, 0 <= decay < math.inf, "a finite number from 0 on"
        )
        unique = len(set(self.methods)) == len(self.methods) > 0
        _require("methods", self.methods, unique, "different methods, at least one")
        if self.seeds > 1 and not self.compare:
            raise ValueError("`--seeds` above 1 needs `--compare`.")
        if self.resume and self.out is None:
            raise ValueError(
                "`--resume` needs `--out DIRECTORY`, the directory of the run."
            )

    @property
    def resolved_learning_rate(self) -> float:
        """The learning rate, with the optimizer's default filled in."""
        if self.learning_rate is not None:
            return self.learning_rate
        return _LEARNING_RATES[self.optimizer]

    @property
    def resolved_weight_decay(self) -> float:
        """The weight decay, with the optimizer's default filled in."""
        if self.weight_decay is not None:
            return self.weight_decay
        return _WEIGHT_DECAYS[self.optimizer]

    @property
    def resolved_directory(self) -> pathlib.Path:
        """The directory of the run; `--out` must have been filled in."""
        if self.out is None:
            raise ValueError("`--out` must name the directory of the run.")
        return self.out

    def identity(self) -> dict[str, Any]:
        """Returns the options that determine the arithmetic, ready for JSON.

        Two runs with equal identities compute the same numbers.
        """
        options = dataclasses.asdict(self)
        options["learning_rate"] = self.resolved_learning_rate
        options["weight_decay"] = self.resolved_weight_decay
        if self.schedule == "constant":
            del options["epochs"]
        return {k: v for k, v in options.items() if k not in _FREE_TO_CHANGE}

    def to_arguments(self) -> list[str]:
        """Returns the command line of the single run that this describes."""
        arguments: list[str] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("compare", "methods", "seeds", "resume"):
                continue
            if value is not None:
                arguments += [f"--{field.name.replace('_', '-')}", str(value)]
        return arguments + (["--resume"] if self.resume else [])


def _require(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise ValueError(f"`--{name}` must be {expected}, but got {value}.")
