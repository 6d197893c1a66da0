"""From the variables of a model to a file of weights."""

import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import flax.traverse_util
import numpy as np

from models.weights.families import Config, family_of
from models.weights.loading import (
    ADAPTER_CONFIG_FILE,
    ADAPTERS_FILE,
    WEIGHTS_FILE,
    trained_tensors,
)
from models.weights.safetensors_file import write_file
from models.weights.tensors import Tensor


Variables = Mapping[str, Any]


def save(
    folder: pathlib.Path | str, config: Config, variables: Variables
) -> pathlib.Path:
    """Saves a model's weights as Hugging Face's class of that model names them.

    Args:
        folder: Is made if needed; the file in it is `model.safetensors`.
        config: The model's configuration.
        variables: Its variables. Adapters are not among what is saved: they are neither
            merged into the weights nor stored beside them.

    Returns:
        The path of the file.

    Raises:
        ValueError: If a variable of the model is missing.
    """
    path = pathlib.Path(folder) / WEIGHTS_FILE
    write_file(path, _collect(family_of(config).tensors, variables))
    return path


def save_adapters(
    folder: pathlib.Path | str, config: Config, variables: Variables
) -> pathlib.Path:
    """Saves what is trained with LoRA, and nothing frozen, in the format of PEFT.

    The tensors of an adapter beside the weight `x.weight` are
    `base_model.model.x.lora_A.weight`, float32 [rank, in], and
    `base_model.model.x.lora_B.weight` [out, rank]; that of a variable of a head is
    named `base_model.model.classifier...`. Rank and alpha are in `adapter_config.json`.

    Args:
        folder: Is made if needed; the file in it is `adapter_model.safetensors`.
        config: The model's configuration, with `lora_rank`.
        variables: Its variables, of which frozen ones may be missing.

    Returns:
        The path of the file.

    Raises:
        ValueError: If the model has no adapters, or a trained variable is missing.
    """
    path = pathlib.Path(folder) / ADAPTERS_FILE
    write_file(path, _collect(trained_tensors(config), variables))
    family = family_of(config)
    description = {
        "peft_type": "LORA",
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "bias": "none",
        **family.adapter_options,
    }
    temporary = path.with_name(f".{ADAPTER_CONFIG_FILE}.new")
    temporary.write_text(json.dumps(description, indent=2) + "\n")
    os.replace(temporary, path.with_name(ADAPTER_CONFIG_FILE))
    return path


def _collect(tensors: Iterable[Tensor], variables: Variables) -> dict[str, np.ndarray]:
    flat = flax.traverse_util.flatten_dict(dict(variables), sep="/")
    tensors = list(tensors)
    missing = sorted({t.path for t in tensors} - set(flat))
    if missing:
        raise ValueError(
            f"`variables` must have all that is saved, but lacks {', '.join(missing)}."
        )
    host = {path: np.asarray(flat[path]) for path in {t.path for t in tensors}}
    return {t.name: t.to_file(host[t.path]) for t in tensors}
