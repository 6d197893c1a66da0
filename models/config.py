"""What one training run is: every option of the command line, checked."""

import dataclasses
import hashlib
import math
import pathlib
from typing import Annotated, Any, Literal, get_args

import tyro

from models.data import ImageName
from models.methods import Bits, MethodName, StoreName


ModelName = Literal[
    "resnet18",
    "resnet34",
    "resnet50",
    "roberta-base",
    "roberta-large",
    "gpt2-small",
    "gpt2-medium",
    "gpt2-large",
    "gpt2-xl",
]
TextName = Literal[
    "docstrings",
    "masked-docstrings",
    "sources",
    "sst2",
    "mrpc",
    "stsb",
    "e2e",
    "webnlg",
]
DataName = Literal[ImageName, TextName]
OptimizerName = Literal["sgd", "adamw"]
ScheduleName = Literal["cosine", "constant"]
SizeName = Literal["auto", "small", "full"]
DtypeName = Literal["float32", "bfloat16"]

_LEARNING_RATES = {"sgd": 0.2, "adamw": 1e-3}
# Of adapters, with adamw: of published weights (Hu et al. 2021, table 9), and of small
# ones, which have learned for minutes.
_LEARNING_RATES_OF_ADAPTERS = {"full": 5e-4, "small": 5e-3}
_WEIGHT_DECAYS = {"sgd": 5e-4, "adamw": 0.05}

_BITS = (1, 2, 3, 4, 8)

_COMPARED: tuple[MethodName, ...] = (
    "none",
    "checkpoint",
    "checkpoint-best",
    "compress",
)

# Where a run lies and which outputs it makes change nothing in its arithmetic. Weights
# are told apart by what is in them.
_FREE_TO_CHANGE = frozenset(
    {
        "out",
        "data_dir",
        "resume",
        "compare",
        "methods",
        "seeds",
        "weights",
        "patience",
        "pretraining_epochs",
    }
)


@dataclasses.dataclass(frozen=True)
class _Family:
    """What the models of one architecture have in common.

    Attributes:
        data: What they learn from; the first if nothing is said.
        options: What is filled in for options that are not given.
        pretraining: What they learn from before adapters are trained, if there are no
            weights: by the data that follows, which it must differ from.
    """

    data: tuple[DataName, ...]
    options: dict[str, Any]
    pretraining: tuple[DataName, ...] = ()


_FAMILIES = {
    "resnet": _Family(
        get_args(ImageName),
        {"optimizer": "sgd", "batch": 64, "epochs": 6, "width": 64},
    ),
    "roberta": _Family(
        ("docstrings", "masked-docstrings", "sst2", "mrpc", "stsb"),
        {"optimizer": "adamw", "batch": 32, "epochs": 4, "length": 64},
        ("masked-docstrings",),
    ),
    "gpt2": _Family(
        ("docstrings", "sources", "e2e", "webnlg"),
        {"optimizer": "adamw", "batch": 16, "epochs": 3, "length": 128},
        ("sources", "docstrings"),
    ),
}

_TRANSFORMERS = ("roberta", "gpt2")
_ONLY_OF = {
    "width": ("resnet",),
    "examples": ("resnet",),
    "size": _TRANSFORMERS,
    "lora": _TRANSFORMERS,
    "scan_layers": _TRANSFORMERS,
    "length": _TRANSFORMERS,
}


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Options of a training run, or of a comparison of runs.

    Attributes:
        model: Architecture and size.
        width: Filters of a ResNet's first stage; 64 is the width of the paper.
        size: Of a transformer. full: as published. small: four layers of 128 channels,
            which 2 cores can train from nothing. auto: full where there are weights to
            start from, small elsewhere.
        weights: A folder with the model.safetensors and the tokenizer.json that a run
            starts from; of transformers weights/MODEL if that is there. Heads begin
            anew.
        lora: The rank of low-rank adapters, which are trained in place of all else but
            heads; 0: none. Without weights to adapt, all of the model is trained on
            other data first.
        pretraining_epochs: Passes over that other data.
        scan_layers: Whether a transformer's blocks are one scan instead of a loop.
        dtype: What a model computes in; weights, statistics, logits and losses are
            float32.
        data: Data set: digits, fashion-mnist, cifar10, cifar100, image-folder for
            ResNets; docstrings (of which package is a sentence?), masked-docstrings,
            sst2, mrpc, stsb for RoBERTa; docstrings (what comes next?), sources, e2e,
            webnlg for GPT-2. Digits, docstrings and sources come with packages that are
            installed, fashion-mnist with Debian's dataset-fashion-mnist; the others lie
            in --data-dir.
        data_dir: Where data sets are looked for.
        examples: Train on only so many examples, which the seed chooses; all if not
            given.
        length: Tokens of an example.
        method: What saves memory. none: nothing is wrapped. checkpoint: jax.checkpoint
            round each block. checkpoint-best: the same with the compiler options that
            suit it best. compress: dafjax.remat_compress round the loss.
        bits: Bits per element that the compressing methods keep: 1, 2, 3, 4 or 8; or
            auto: given out where the gradient suffers most. With arrays this happens a
            few times in a run, which compiles the step anew: within --budget, or as
            many as keep noise a tenth of the batch's. With --store pool it
            happens before each step, within --budget, or 2 on average.
        store: Where codes wait: in arrays of the compiled step, or in a page pool.
        budget: The most memory that the page pool takes, or with --bits auto that codes
            in arrays take, such as 16MiB.
        policy: What the method keeps. For checkpoint: default, or the name of one of
            jax.checkpoint_policies, such as dots_saveable. For compress: default,
            save-all, which keeps everything as it is, or nearest, which rounds codes to
            nearest, with a bias.
        batch: Examples in a training step; 64 images, 32 sentences, 16 texts if not
            given.
        epochs: Passes over the training split; 6 for ResNets, 4 for RoBERTa, 3 for
            GPT-2 if not given.
        patience: Stop after so many epochs that brought nothing better.
        optimizer: sgd has Nesterov momentum 0.9; of ResNets it is the one if none is
            given, of transformers adamw is.
        learning_rate: After the warm-up of half an epoch; if not given 0.2 for sgd and
            0.001 for adamw, for adapters 0.0005, or 0.005 of small models.
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

    model: Annotated[ModelName, tyro.conf.Positional] = "resnet18"
    width: int | None = None
    size: SizeName = "auto"
    weights: pathlib.Path | None = None
    lora: int = 0
    pretraining_epochs: int = 3
    scan_layers: bool = False
    dtype: DtypeName = "float32"
    data: DataName | None = None
    data_dir: pathlib.Path = pathlib.Path("data")
    examples: int | None = None
    length: int | None = None
    method: MethodName = "none"
    bits: Bits = 2
    store: StoreName = "arrays"
    budget: str | None = None
    policy: str = "default"
    batch: int | None = None
    epochs: int | None = None
    patience: int | None = None
    optimizer: OptimizerName | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    schedule: ScheduleName = "cosine"
    seed: int = 0
    out: pathlib.Path | None = None
    resume: bool = False
    compare: bool = False
    methods: tuple[MethodName, ...] = _COMPARED
    seeds: int = 1

    @property
    def family(self) -> str:
        """The architecture: resnet, roberta or gpt2."""
        return next(name for name in _FAMILIES if self.model.startswith(name))

    def filled(self) -> "TrainConfig":
        """Returns the options, checked, with those that were not given filled in.

        Raises:
            ValueError: An option is out of range, or does not fit the others; the
                message names it.
        """
        family = _FAMILIES[self.family]
        self._check()
        self._check_family(family)
        filling = {"data": family.data[0], **family.options}
        optimizer = self.optimizer or filling["optimizer"]
        filling["learning_rate"] = _LEARNING_RATES[optimizer]
        filling["weight_decay"] = _WEIGHT_DECAYS[optimizer]
        size = self.size
        if self.family in _TRANSFORMERS:
            weights = pathlib.Path("weights") / self.model
            if self.size != "small" and weights.is_dir():
                filling["weights"] = weights
            if size == "auto":
                none = self.weights is None and "weights" not in filling
                size = "small" if none else "full"
            if self.lora and optimizer == "adamw":
                filling["learning_rate"] = _LEARNING_RATES_OF_ADAPTERS[size]
        missing = {k: v for k, v in filling.items() if getattr(self, k) is None}
        return dataclasses.replace(self, size=size, **missing)

    @property
    def pretraining(self) -> "TrainConfig | None":
        """The run that makes the weights that this one starts from, if it needs it."""
        others = _FAMILIES[self.family].pretraining
        if not self.lora or self.weights is not None:
            return None
        return dataclasses.replace(
            self,
            data=next(name for name in others if name != self.data),
            lora=0,
            epochs=self.pretraining_epochs,
            learning_rate=_LEARNING_RATES[self.optimizer],
            patience=None,
            schedule="cosine",
            compare=False,
            seeds=1,
            out=self.resolved_directory / "pretrained",
        )

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
        options = dataclasses.asdict(self.filled())
        if self.schedule == "constant":
            del options["epochs"]
        kept = {k: v for k, v in options.items() if k not in _FREE_TO_CHANGE}
        if self.weights is not None:
            kept["weights_digest"] = _digest(self.weights)
        return kept

    def to_arguments(self) -> list[str]:
        """Returns the command line of the single run that this describes."""
        arguments: list[str] = [self.model]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("model", "compare", "methods", "seeds", "resume"):
                continue
            option = field.name.replace("_", "-")
            if isinstance(value, bool):
                arguments += [f"--{option}"] if value else []
            elif value is not None:
                arguments += [f"--{option}", str(value)]
        return arguments + (["--resume"] if self.resume else [])

    def _check(self) -> None:
        for name in (
            "width",
            "batch",
            "epochs",
            "examples",
            "length",
            "patience",
            "seeds",
            "pretraining_epochs",
        ):
            value = getattr(self, name)
            _require(name, value, value is None or value >= 1, "at least 1")
        valid = self.bits in _BITS or self.bits == "auto"
        _require("bits", self.bits, valid, "one of 1, 2, 3, 4, 8, or auto")
        if self.budget is not None and self.store != "pool" and self.bits != "auto":
            raise ValueError("`--budget` needs `--store pool` or `--bits auto`.")
        for name in ("seed", "lora"):
            value = getattr(self, name)
            _require(name, value, value >= 0, "at least 0")
        rate, decay = self.learning_rate, self.weight_decay
        _require(
            "learning-rate",
            rate,
            rate is None or 0 < rate < math.inf,
            "a finite number above 0",
        )
        _require(
            "weight-decay",
            decay,
            decay is None or 0 <= decay < math.inf,
            "a finite number from 0 on",
        )
        unique = len(set(self.methods)) == len(self.methods) > 0
        _require("methods", self.methods, unique, "different methods, at least one")
        if self.seeds > 1 and not self.compare:
            raise ValueError("`--seeds` above 1 needs `--compare`.")
        if self.resume and self.out is None:
            raise ValueError(
                "`--resume` needs `--out DIRECTORY`, the directory of the run."
            )

    def _check_family(self, family: _Family) -> None:
        """Raises an error if an option is for models of another architecture."""
        expected = f"one of {', '.join(family.data)} with {self.model}"
        valid = self.data is None or self.data in family.data
        _require("data", self.data, valid, expected)
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name, families in _ONLY_OF.items():
            given = getattr(self, name)
            if self.family not in families and given != defaults[name]:
                raise ValueError(
                    f"`--{name.replace('_', '-')}` is for "
                    f"{' and '.join(families)}, but got {given} with {self.model}."
                )


def _digest(folder: pathlib.Path) -> str:
    """Returns a digest of the weights in a folder; of nothing if there are none."""
    path = folder / "model.safetensors"
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise ValueError(
            f"`--{name.replace('_', '-')}` must be {expected}, but got {value}."
        )
