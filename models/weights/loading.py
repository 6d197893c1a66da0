"""From a file of weights to the variables of a model."""

import fnmatch
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from models.weights.error import WeightsError, listed
from models.weights.families import Config, family_of
from models.weights.safetensors_file import OpenFile, open_file
from models.weights.tensors import Family, Tensor, peft_name


WEIGHTS_FILE = "model.safetensors"
ADAPTERS_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"

_DTYPES = ("F16", "BF16", "F32")

Variables = Mapping[str, Any]
Flat = dict[str, Any]


def load(
    path: pathlib.Path | str,
    config: Config,
    initial: Variables,
    *,
    fresh_head: bool = False,
) -> dict[str, Any]:
    """Loads a model's weights from a safetensors file of Hugging Face.

    Names, shapes and dtypes of all tensors are checked before any is read.

    Args:
        path: The file, or a folder that has it as `model.safetensors`.
        config: The model's configuration.
        initial: Variables of the model, or only their shapes, as
            `jax.eval_shape(model.init, ...)` has them. What the file does not have is
            taken from here: adapters, and a fresh head.
        fresh_head: Whether to leave the file's head, if it has any, and keep that of
            `initial`: for a task other than that of the file.

    Returns:
        Variables like `initial`, of JAX arrays in its dtypes. float16, bfloat16 and
        float32 are converted.

    Raises:
        WeightsError: If the file is missing (the message says which one to put where),
            refused or damaged, or if a tensor is missing, unknown, or has a shape or a
            dtype that the model does not have.

    Example:
        config = roberta.roberta_base(num_labels=3)
        initial = roberta.Roberta(config).init(key, tokens, train=False)
        variables = load("weights/roberta-base", config, initial, fresh_head=True)
    """
    family = family_of(config)
    file = _find(pathlib.Path(path), WEIGHTS_FILE, family.origin)
    variables = flax.traverse_util.flatten_dict(dict(initial), sep="/")

    def is_of_head(name: str) -> bool:
        return _matches(name.removeprefix(family.prefix), family.heads)

    wanted = [t for t in family.tensors if not (fresh_head and is_of_head(t.name))]
    with open_file(file) as opened:
        names = _match_names(opened, family, wanted, fresh_head=fresh_head)
        _check_tensors(opened, wanted, names, variables)
        _check_tied(opened, family, names)
        variables |= _read(opened, wanted, names, variables)
    return flax.traverse_util.unflatten_dict(variables, sep="/")


def load_adapters(
    path: pathlib.Path | str, config: Config, initial: Variables
) -> dict[str, Any]:
    """Loads what `save_adapters` or PEFT has saved: adapters, and a head.

    Args:
        path: The file, or a folder that has it as `adapter_model.safetensors`. If
            `adapter_config.json` lies beside it, its rank and alpha are checked.
        config: The model's configuration, with `lora_rank`.
        initial: Variables of the model; what the file does not have stays.

    Returns:
        Variables like `initial`.

    Raises:
        ValueError: If the model has no adapters.
        WeightsError: As of `load`.
    """
    wanted = trained_tensors(config)
    file = _find(pathlib.Path(path), ADAPTERS_FILE, "the training run that made it")
    _check_adapter_config(file.with_name(ADAPTER_CONFIG_FILE), config)
    variables = flax.traverse_util.flatten_dict(dict(initial), sep="/")
    with open_file(file) as opened:
        names = {tensor.name: tensor.name for tensor in wanted}
        _check_names(opened, wanted, names, extra=set(opened.tensors) - set(names))
        _check_tensors(opened, wanted, names, variables)
        variables |= _read(opened, wanted, names, variables)
    return flax.traverse_util.unflatten_dict(variables, sep="/")


def trained_tensors(config: Config) -> tuple[Tensor, ...]:
    """Returns the tensors of a file of adapters.

    Raises:
        ValueError: If the model has no adapters.
    """
    family = family_of(config)
    if not family.adapters:
        raise ValueError("`config` must have a `lora_rank` above 0 to have adapters.")
    beside = [
        Tensor(peft_name(tensor.name), tensor.path, tensor.layer, tensor.axes)
        for tensor in family.tensors
        if tensor.path.startswith(tuple(f"{path}/" for path in config.trained))
    ]
    return (*family.adapters, *beside)


def _find(path: pathlib.Path, name: str, origin: str) -> pathlib.Path:
    is_file = path.is_file() or path.suffix == pathlib.Path(name).suffix
    file = path if is_file else path / name
    if file.exists():
        return file
    remarks = ""
    if file.with_name(f"{name}.index.json").exists():
        remarks = " Files in several parts are not read: save the model in one."
    elif list(file.parent.glob("*.bin")) or list(file.parent.glob("*.pt")):
        remarks = (
            " The pickle that is there runs code when it is loaded; it is refused."
        )
    raise WeightsError(
        f"There is no file `{file}`. Put `{name}` of {origin} into "
        f"`{file.parent}`.{remarks}"
    )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _match_names(
    file: OpenFile, family: Family, wanted: Sequence[Tensor], *, fresh_head: bool
) -> dict[str, str]:
    """Returns the names in the file by those of the family, which have the prefix."""
    short = {t.name.removeprefix(family.prefix): t.name for t in wanted}
    left_out = family.ignored + (family.heads if fresh_head else ())
    names: dict[str, str] = {}
    extra = set()
    for name in file.tensors:
        bare = name.removeprefix(family.prefix)
        if bare in short and short[bare] not in names:
            names[short[bare]] = name
        elif not _matches(bare, left_out) and name not in family.tied:
            extra.add(name)
    for name, other in family.tied.items():
        if name in file.tensors:
            # Of tied tensors some programs store one, whichever is first by name.
            names.setdefault(other, name)
    hint = ""
    if family.heads and not fresh_head:
        hint = (
            " If the file is of another task, `fresh_head=True` leaves its head and "
            "begins with a new one."
        )
    _check_names(file, wanted, names, extra, hint)
    return names


def _check_names(
    file: OpenFile,
    wanted: Sequence[Tensor],
    names: Mapping[str, str],
    extra: Iterable[str],
    hint: str = "",
) -> None:
    missing = [t.name for t in wanted if names.get(t.name) not in file.tensors]
    problems = []
    if missing:
        problems.append(f"lacks {len(missing)} of its tensors: {listed(missing)}")
    if unknown := sorted(extra):
        problems.append(
            f"has {len(unknown)} that the model has no place for: {listed(unknown)}"
        )
    if problems:
        raise WeightsError(
            f"`{file.path}` is not of this model: it {' and '.join(problems)}.{hint}"
        )


def _check_tensors(
    file: OpenFile,
    wanted: Sequence[Tensor],
    names: Mapping[str, str],
    variables: Flat,
) -> None:
    """Checks shape and dtype of every tensor; reads none."""
    problems = []
    for tensor in wanted:
        if tensor.path not in variables:
            raise ValueError(
                f"`initial` must have all variables of the model, but lacks "
                f"{tensor.path}. Its layout must be that of `config.scan_layers`."
            )
        name = names[tensor.name]
        header = file.tensors[name]
        shape = tensor.shape_in_file(variables[tensor.path].shape)
        if header.shape != shape:
            problems.append(
                f"{name} must have the shape {list(shape)}, but has "
                f"{list(header.shape)}"
            )
        if header.dtype not in _DTYPES:
            problems.append(
                f"{name} must be one of {', '.join(_DTYPES)}, but is {header.dtype}"
            )
    if problems:
        raise WeightsError(f"`{file.path}` is not of this model: {listed(problems)}.")


def _check_tied(file: OpenFile, family: Family, names: Mapping[str, str]) -> None:
    for name, other in family.tied.items():
        if name not in file.tensors or names[other] == name:
            continue
        if not np.array_equal(file.read(name), file.read(names[other])):
            raise WeightsError(
                f"`{file.path}` is not of this model: {name} must equal "
                f"{names[other]}, which the model uses for both, but differs."
            )


def _read(
    file: OpenFile,
    wanted: Sequence[Tensor],
    names: Mapping[str, str],
    variables: Flat,
) -> dict[str, jax.Array]:
    """Reads the tensors; rows of one variable follow each other in `wanted`."""
    rows: dict[str, list[Tensor]] = {}
    for tensor in wanted:
        rows.setdefault(tensor.path, []).append(tensor)
    read = {}
    for path, tensors in rows.items():
        like = variables[path]
        variable = np.empty(like.shape, like.dtype)
        for tensor in tensors:
            row = ... if tensor.layer is None else tensor.layer
            variable[row] = tensor.to_model(file.read(names[tensor.name]))
        read[path] = jnp.asarray(variable)
    return read


def _check_adapter_config(path: pathlib.Path, config: Any) -> None:
    if not path.exists():
        return
    try:
        found = json.loads(path.read_text())
        rank, alpha = found["r"], found["lora_alpha"]
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(
            f"`{path}` must be JSON with the entries r and lora_alpha, but is not: "
            f"{error!r}."
        ) from error
    if (rank, alpha) != (config.lora_rank, config.lora_alpha):
        raise WeightsError(
            f"`{path}` is of adapters of rank {rank} with alpha {alpha}, but the "
            f"model's have rank {config.lora_rank} with alpha {config.lora_alpha}."
        )
