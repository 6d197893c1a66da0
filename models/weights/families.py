"""The tensors of each model's files, named as Hugging Face names them."""

from collections.abc import Iterator

from models.gpt2 import GPT2Config
from models.resnet import ResNetConfig
from models.roberta import RobertaConfig
from models.weights.tensors import CONVOLUTION, Family, Tensor, dense, layer_norm


Config = GPT2Config | ResNetConfig | RobertaConfig


def family_of(config: Config) -> Family:
    """Returns what files of a model hold.

    Raises:
        TypeError: If there are no files for such a model.
    """
    match config:
        case RobertaConfig():
            return _roberta(config)
        case GPT2Config():
            return _gpt2(config)
        case ResNetConfig():
            return _resnet(config)
    raise TypeError(
        "`config` must be a `RobertaConfig`, `GPT2Config` or `ResNetConfig`, but got "
        f"`{type(config).__name__}`."
    )


def _blocks(
    config: GPT2Config | RobertaConfig,
) -> Iterator[tuple[int, str, int | None]]:
    """Yields number in the file, path, and row of each block."""
    for index in range(config.num_layers):
        if config.scan_layers:
            yield index, "blocks", index
        else:
            yield index, f"block{index + 1}", None


def _roberta(config: RobertaConfig) -> Family:
    """Of `RobertaForSequenceClassification`."""
    embeddings = "roberta.embeddings"
    tensors = [
        Tensor(f"{embeddings}.{name}_embeddings.weight", f"params/{path}/embedding")
        for name, path in (
            ("word", "tokens"),
            ("position", "positions"),
            ("token_type", "token_types"),
        )
    ]
    tensors += layer_norm(f"{embeddings}.LayerNorm", "norm")
    adapted = []
    for index, block, row in _blocks(config):
        name = f"roberta.encoder.layer.{index}"
        for part in ("query", "key", "value"):
            tensors += dense(f"{name}.attention.self.{part}", f"{block}/{part}", row)
            adapted += tensors[-2:-1] if part != "key" else []
        out = f"{name}.attention.output"
        tensors += dense(f"{out}.dense", f"{block}/attention_out", row)
        tensors += layer_norm(f"{out}.LayerNorm", f"{block}/norm1", row)
        tensors += dense(f"{name}.intermediate.dense", f"{block}/mlp_in", row)
        tensors += dense(f"{name}.output.dense", f"{block}/mlp_out", row)
        tensors += layer_norm(f"{name}.output.LayerNorm", f"{block}/norm2", row)
    tensors += dense("classifier.dense", "head/hidden")
    tensors += dense("classifier.out_proj", "head/out")
    return Family(
        origin="FacebookAI/roberta-base or FacebookAI/roberta-large on Hugging Face",
        prefix="roberta.",
        tensors=tuple(tensors),
        adapted=tuple(adapted) if config.lora_rank else (),
        heads=("classifier.*", "lm_head.*", "pooler.*", "qa_outputs.*"),
        ignored=("embeddings.position_ids",),
        adapter_options={
            "task_type": "SEQ_CLS",
            "target_modules": ["query", "value"],
            "modules_to_save": ["classifier"],
            "fan_in_fan_out": False,
        },
    )


def _gpt2(config: GPT2Config) -> Family:
    """Of `GPT2LMHeadModel`, whose layers store kernels as Flax does, [in, out]."""
    tensors = [
        Tensor("transformer.wte.weight", "params/tokens/embedding"),
        Tensor("transformer.wpe.weight", "params/positions"),
    ]
    adapted = []
    for index, block, row in _blocks(config):
        name = f"transformer.h.{index}"
        tensors += layer_norm(f"{name}.ln_1", f"{block}/norm1", row)
        tensors += layer_norm(f"{name}.ln_2", f"{block}/norm2", row)
        for part, path in (
            ("mlp.c_fc", "mlp_in"),
            ("mlp.c_proj", "mlp_out"),
            ("attn.c_attn", "attention_in"),
            ("attn.c_proj", "attention_out"),
        ):
            tensors += dense(f"{name}.{part}", f"{block}/{path}", row, axes=None)
            adapted += tensors[-2:-1] if part.startswith("attn") else []
    tensors += layer_norm("transformer.ln_f", "norm")
    return Family(
        origin="openai-community/gpt2, -medium, -large or -xl on Hugging Face",
        prefix="transformer.",
        tensors=tuple(tensors),
        adapted=tuple(adapted) if config.lora_rank else (),
        # The causal mask.
        ignored=("h.*.attn.bias", "h.*.attn.masked_bias"),
        tied={"lm_head.weight": "transformer.wte.weight"},
        adapter_options={
            "task_type": "CAUSAL_LM",
            # Without its parent `c_proj` would be that of the MLP too.
            "target_modules": ["c_attn", "attn.c_proj"],
            "modules_to_save": None,
            "fan_in_fan_out": True,
        },
    )


def _resnet(config: ResNetConfig) -> Family:
    """Of `ResNetForImageClassification`."""
    tensors = list(_conv_norm("resnet.embedder.embedder", "", "stem", "stem_norm"))
    num_convs = 2 if config.block == "basic" else 3
    channels = config.num_filters  # of what a block reads
    for stage, num_blocks in enumerate(config.stage_sizes):
        filters = config.num_filters * 2**stage
        features = filters if config.block == "basic" else 4 * filters
        for index in range(num_blocks):
            name = f"resnet.encoder.stages.{stage}.layers.{index}"
            path = f"stage{stage + 1}_block{index + 1}/"
            if channels != features or (stage > 0 and index == 0):
                shortcut = f"{name}.shortcut"
                tensors += _conv_norm(shortcut, path, "shortcut", "shortcut_norm")
            for n in range(num_convs):
                conv, norm = f"conv{n + 1}", f"norm{n + 1}"
                tensors += _conv_norm(f"{name}.layer.{n}", path, conv, norm)
            channels = features
    tensors += dense("classifier.1", "head")
    return Family(
        origin="microsoft/resnet-18, resnet-34 or resnet-50 on Hugging Face",
        prefix="resnet.",
        tensors=tuple(tensors),
        heads=("classifier.*",),
        # How many steps the running statistics are of.
        ignored=("*.num_batches_tracked",),
    )


def _conv_norm(name: str, path: str, conv: str, norm: str) -> Iterator[Tensor]:
    kernel = f"params/{path}{conv}/kernel"
    yield Tensor(f"{name}.convolution.weight", kernel, axes=CONVOLUTION)
    yield from layer_norm(f"{name}.normalization", f"{path}{norm}")
    for of_file, of_model in (("running_mean", "mean"), ("running_var", "var")):
        variable = f"batch_stats/{path}{norm}/{of_model}"
        yield Tensor(f"{name}.normalization.{of_file}", variable)
