"""Parity with PyTorch `transformers` and with qwix, side by side in one process.

Needs the extra `parity`: `pip install '.[parity]'`, then `make test-parity`. The golden
files of `test_golden.py` keep parity in the default run.
"""

import dataclasses
import functools

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models import gpt2, resnet, roberta, weights
from tests.models.cases import CASES, Case, abstract_variables, loss_and_logits
from tests.models.parity import check_gradient, gradients_by_tensor


pytestmark = [pytest.mark.parity, pytest.mark.usefixtures("standard_promotion")]

FULL = {
    "roberta_base": Case(roberta.roberta_base(dropout=0.0), batch=2, size=48),
    "gpt2_small": Case(gpt2.gpt2_small(scan_layers=True), batch=2, size=48),
    "resnet18": Case(
        resnet.resnet18(num_classes=1000, stem="imagenet"),
        batch=4,
        size=128,
        double=True,
    ),
    "resnet34": Case(
        resnet.resnet34(num_classes=1000, stem="imagenet"),
        batch=4,
        size=128,
        double=True,
    ),
    "resnet50": Case(
        resnet.resnet50(num_classes=1000, stem="imagenet"),
        batch=4,
        size=128,
        double=True,
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in CASES.items()),
        *(
            pytest.param(case, id=name, marks=pytest.mark.slow)
            for name, case in FULL.items()
        ),
    ],
)
def test_logits_loss_and_gradients_are_those_of_transformers(case, tmp_path):
    # Imported where it is used: the default run collects this file without torch.
    from safetensors.torch import save_model

    from tests.models import references

    # Other weights than those of the golden files.
    model = references.make_model(case.config, case.seed + 100)
    inputs = references.make_inputs(
        case.config, batch=case.batch, size=case.size, seed=100
    )
    save_model(model, tmp_path / "model.safetensors")
    want = references.ask(model, case.config, inputs)
    value, logits, gradients = ours(case.config, tmp_path, inputs)
    np.testing.assert_allclose(value, want.loss, rtol=1e-4)
    atol = 1e-4
    if case.double:
        inputs = {name: in_double(x) for name, x in inputs.items()}
        model.zero_grad()
        single, want = want, references.ask(model.double(), case.config, inputs)
        # PyTorch's own error in float32: of a ResNet-50's logits 1.6e-4.
        error = np.abs(single.logits - want.logits).max()
        np.testing.assert_allclose(logits, single.logits, atol=atol + error)
        with jax.enable_x64(True):
            _, logits, gradients = ours(case.config, tmp_path, inputs)
        atol = 1e-9
    np.testing.assert_allclose(logits, want.logits, atol=atol)
    assert set(gradients) == set(want.gradients)
    scale = max(np.abs(x).max() for x in want.gradients.values())
    for name, x in gradients.items():
        check_gradient(name, x, want.gradients[name], scale=scale)


def in_double(x):
    """Returns the array, or its shape, in float64 if it is in float32."""
    if x.dtype != np.float32:
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, np.float64)
    return x.astype(np.float64)


def ours(config, folder, inputs):
    """Returns loss, logits and gradients; in float64 if that is enabled."""
    like = abstract_variables(config)
    if jax.config.jax_enable_x64:
        like = jax.tree.map(in_double, like)
        config = dataclasses.replace(config, dtype=np.float64)
    variables = weights.load(folder, config, like)
    params = variables.pop("params")

    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(params):
        return loss_and_logits(config, {**variables, "params": params}, inputs)

    (value, logits), gradient = jax.jit(loss)(params)
    return value, logits, gradients_by_tensor(config, gradient)


@pytest.mark.parametrize("scan_layers", [False, True], ids=["loop", "scan"])
def test_adapters_are_those_of_qwix(key, scan_layers):
    import qwix

    base = gpt2.GPT2Config(
        2, width=16, num_heads=2, vocabulary=30, context=40, scan_layers=scan_layers
    )
    ours = gpt2.GPT2(dataclasses.replace(base, lora_rank=2, lora_alpha=4.0))
    tokens = jax.random.randint(key, (4, 32), 0, 30)
    provider = qwix.LoraProvider(module_path=".*attention_(in|out)", rank=2, alpha=4.0)
    theirs = qwix.apply_lora_to_model(gpt2.GPT2(base), provider)
    variables = theirs.init(key, tokens)
    flat = flax.traverse_util.flatten_dict(variables["params"])
    is_adapter = {path: "lora" in path[-1] for path in flat}
    # Not where they start: B would be zero.
    adapters = {
        path: jax.random.normal(key, x.shape) / 10
        for path, x in flat.items()
        if is_adapter[path]
    }
    frozen = {path: x for path, x in flat.items() if not is_adapter[path]}
    assert len(adapters) == 4 if scan_layers else 8

    def as_ours(path):
        *block, layer, name = path
        return (*block, f"{layer}_lora", name[-1])

    def loss(logits):
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1], tokens[:, 1:]
        )
        return jnp.mean(losses)

    def loss_of_theirs(adapters):
        params = flax.traverse_util.unflatten_dict(frozen | adapters)
        return loss(theirs.apply({"params": params}, tokens))

    def loss_of_ours(adapters):
        renamed = {as_ours(path): x for path, x in adapters.items()}
        variables = {
            "params": flax.traverse_util.unflatten_dict(frozen),
            "lora": flax.traverse_util.unflatten_dict(renamed),
        }
        return loss(ours.apply(variables, tokens))

    got, want = (
        jax.value_and_grad(f)(adapters) for f in (loss_of_ours, loss_of_theirs)
    )
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    for path, x in got[1].items():
        check_gradient("/".join(path), x, want[1][path])
