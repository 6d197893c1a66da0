"""What parity with PyTorch is tested on, and the loss of each model."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from models import gpt2, losses, resnet, roberta


Config = gpt2.GPT2Config | resnet.ResNetConfig | roberta.RobertaConfig


@dataclasses.dataclass(frozen=True)
class Case:
    """One model and a batch.

    Attributes:
        config: The model, without dropout.
        batch: Examples.
        size: Tokens of a sequence, or side of an image.
        seed: Of weights and inputs.
        double: Whether logits and gradients are compared in float64. Gradients of a
            deep ResNet in float32 are off by 3e-3 in PyTorch too: inputs of ReLUs are
            nearly zero.
        left_out: Tensors that are equal to others, which safetensors stores once.
    """

    config: Config
    batch: int = 3
    size: int = 10
    seed: int = 0
    double: bool = False
    left_out: tuple[str, ...] = ()


_ROBERTA = roberta.RobertaConfig(
    num_layers=2,
    width=16,
    num_heads=2,
    num_labels=3,
    vocabulary=30,
    context=14,
    dropout=0.0,
)
_GPT2 = gpt2.GPT2Config(num_layers=2, width=16, num_heads=2, vocabulary=30, context=14)
_RESNET = resnet.ResNetConfig(
    stage_sizes=(2, 1), num_classes=5, num_filters=4, stem="imagenet"
)

CASES = {
    "roberta": Case(_ROBERTA),
    "roberta_regression": Case(dataclasses.replace(_ROBERTA, num_labels=1), seed=1),
    "gpt2": Case(_GPT2, left_out=("lm_head.weight",)),
    "resnet_basic": Case(_RESNET, size=33),
    "resnet_bottleneck": Case(
        dataclasses.replace(_RESNET, block="bottleneck", num_filters=3), size=33
    ),
}


def abstract_variables(config: Config) -> dict:
    """Returns shapes and dtypes of a model's variables."""
    key = jax.random.key(0)
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    match config:
        case roberta.RobertaConfig():
            model = roberta.Roberta(config)
            return jax.eval_shape(
                lambda k, t: model.init(k, t, train=False), key, tokens
            )
        case gpt2.GPT2Config():
            return jax.eval_shape(gpt2.GPT2(config).init, key, tokens)
    model = resnet.ResNet(config)
    images = jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.float32)
    return jax.eval_shape(lambda k, x: model.init(k, x, train=True), key, images)


def loss_and_logits(config: Config, variables: dict, inputs: dict):
    """Returns what `references.ask` does; logits are the auxiliary output."""
    match config:
        case roberta.RobertaConfig():
            logits = roberta.Roberta(config).apply(
                variables, inputs["tokens"], inputs["mask"], train=True
            )
            return losses.sequence_loss(logits, inputs["labels"]), logits
        case gpt2.GPT2Config():
            model = gpt2.GPT2(config)
            loss = gpt2.next_token_loss(model, variables, inputs["tokens"], chunk=8)
            return loss, model.apply(variables, inputs["tokens"])
    logits, _ = resnet.ResNet(config).apply(
        variables, inputs["images"], train=True, mutable=["batch_stats"]
    )
    each = optax.softmax_cross_entropy_with_integer_labels(logits, inputs["labels"])
    return jnp.mean(each), logits
