"""The same models by PyTorch `transformers`, and what they compute; needs torch."""

import dataclasses
from typing import Any

import numpy as np
import torch
import transformers

from models.gpt2 import GPT2Config
from models.resnet import ResNetConfig
from models.roberta import RobertaConfig


Config = GPT2Config | ResNetConfig | RobertaConfig


@dataclasses.dataclass(frozen=True)
class Answers:
    """What a model computes in training mode, without dropout.

    Attributes:
        inputs: By the name of the argument.
        logits: Of the inputs.
        loss: Their mean loss.
        gradients: Of the loss, by the name of the tensor.
    """

    inputs: dict[str, np.ndarray]
    logits: np.ndarray
    loss: np.ndarray
    gradients: dict[str, np.ndarray]


def make_model(config: Config, seed: int) -> torch.nn.Module:
    """Returns a model whose every tensor is random, norms and biases too."""
    torch.manual_seed(seed)
    model = _MAKERS[type(config)](config).train()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not tensor.is_floating_point():
                continue
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 1.5)
            elif tensor.ndim == 1:
                # Some scales near zero too, as trained ones are.
                offset = 1.0 if name.endswith("weight") else 0.0
                tensor.normal_(offset, 0.2)
            elif tensor.ndim == 4:
                tensor.normal_(0, (2 / tensor[0].numel()) ** 0.5)
            else:
                tensor.normal_(0, 0.05 if max(tensor.shape) > 100 else 0.3)
    return model


def make_inputs(config: Config, *, batch: int, size: int, seed: int) -> dict[str, Any]:
    """Returns inputs and labels; `size` is a length or the side of an image."""
    rng = np.random.default_rng(seed)
    if isinstance(config, ResNetConfig):
        images = rng.normal(size=(batch, size, size, 3)).astype(np.float32)
        labels = rng.integers(config.num_classes, size=batch).astype(np.int32)
        return {"images": images, "labels": labels}
    tokens = rng.integers(3, config.vocabulary, size=(batch, size)).astype(np.int32)
    if isinstance(config, GPT2Config):
        return {"tokens": tokens}
    mask = np.arange(size) < rng.integers(size // 2, size + 1, size=(batch, 1))
    labels = rng.integers(max(config.num_labels, 2), size=batch)
    kind = np.float32 if config.num_labels == 1 else np.int32
    return {
        "tokens": np.where(mask, tokens, config.padding).astype(np.int32),
        "mask": mask,
        "labels": labels.astype(kind),
    }


def ask(model: torch.nn.Module, config: Config, inputs: dict[str, Any]) -> Answers:
    """Returns what the model answers, its gradients included."""
    given = {name: torch.from_numpy(x) for name, x in inputs.items()}
    labels = given.get("labels")
    if labels is not None and not labels.is_floating_point():
        labels = labels.long()
    match config:
        case ResNetConfig():
            out = model(given["images"].permute(0, 3, 1, 2).contiguous(), labels=labels)
        case GPT2Config():
            tokens = given["tokens"].long()
            out = model(tokens, labels=tokens)
        case _:
            tokens = given["tokens"].long()
            out = model(tokens, attention_mask=given["mask"].long(), labels=labels)
    out.loss.backward()
    gradients = {
        name: parameter.grad.numpy()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    logits = out.logits.detach().numpy()
    return Answers(inputs, logits, out.loss.detach().numpy(), gradients)


def _roberta(config: RobertaConfig) -> torch.nn.Module:
    return transformers.RobertaForSequenceClassification(
        transformers.RobertaConfig(
            vocab_size=config.vocabulary,
            hidden_size=config.width,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            intermediate_size=4 * config.width,
            max_position_embeddings=config.num_positions,
            type_vocab_size=1,
            layer_norm_eps=1e-5,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=config.num_labels,
            pad_token_id=config.padding,
        )
    )


def _gpt2(config: GPT2Config) -> torch.nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=config.vocabulary,
            n_positions=config.context,
            n_embd=config.width,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def _resnet(config: ResNetConfig) -> torch.nn.Module:
    expansion = 1 if config.block == "basic" else 4
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            embedding_size=config.num_filters,
            hidden_sizes=[
                config.num_filters * expansion * 2**stage
                for stage in range(len(config.stage_sizes))
            ],
            depths=list(config.stage_sizes),
            layer_type=config.block,
            num_labels=config.num_classes,
        )
    )


_MAKERS = {RobertaConfig: _roberta, GPT2Config: _gpt2, ResNetConfig: _resnet}
