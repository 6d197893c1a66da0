"""Parity with PyTorch `transformers`, by files that it wrote: no torch is needed."""

import dataclasses
import functools
import pathlib

import jax
import numpy as np
import pytest
import safetensors.numpy

from models import resnet, weights
from models.weights.families import family_of
from tests.models.cases import CASES, abstract_variables, loss_and_logits
from tests.models.parity import check_gradient, gradients_by_tensor, spread


pytestmark = pytest.mark.usefixtures("standard_promotion")


FOLDER = pathlib.Path(__file__).parent / "golden"

every_case = pytest.mark.parametrize("name", CASES)


def layouts(name):
    config = CASES[name].config
    if isinstance(config, resnet.ResNetConfig):
        return [config]
    return [config, dataclasses.replace(config, scan_layers=True)]


@functools.cache
def golden(name):
    with np.load(FOLDER / f"{name}.npz") as file:
        return dict(file)


def load(name, config):
    path = FOLDER / f"{name}.safetensors"
    return weights.load(path, config, abstract_variables(config))


@pytest.mark.parametrize(
    ("name", "config"),
    [(name, config) for name in CASES for config in layouts(name)],
    ids=lambda x: "scan" if getattr(x, "scan_layers", False) else None,
)
def test_logits_loss_and_gradients_are_those_of_transformers(name, config):
    want = golden(name)
    inputs = {k.removeprefix("input/"): v for k, v in want.items() if "input/" in k}
    variables = load(name, config)
    params = variables.pop("params")

    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(params):
        return loss_and_logits(config, {**variables, "params": params}, inputs)

    (value, logits), gradient = jax.jit(loss)(params)
    np.testing.assert_allclose(logits, want["logits"], atol=1e-4)
    np.testing.assert_allclose(value, want["loss"], rtol=1e-4)
    got = gradients_by_tensor(config, gradient)
    names = {k.removeprefix("gradient/") for k in want if "gradient/" in k}
    assert set(got) == names
    for tensor, x in got.items():
        check_gradient(tensor, spread(x), want[f"gradient/{tensor}"])


@every_case
def test_saving_writes_what_was_loaded(name, tmp_path):
    for config in layouts(name):
        variables = load(name, config)
        path = weights.save(tmp_path, config, variables)
        again = weights.load(tmp_path, config, abstract_variables(config))
        jax.tree.map(np.testing.assert_array_equal, variables, again)
        first = safetensors.numpy.load_file(FOLDER / f"{name}.safetensors")
        second = safetensors.numpy.load_file(path)
        assert set(first) - set(second) <= {
            key for key in first if "num_batches_tracked" in key
        }
        for key, x in second.items():
            np.testing.assert_array_equal(x, first[key])


@every_case
def test_every_variable_is_in_the_file_once(name):
    for config in layouts(name):
        paths = jax.tree_util.tree_leaves_with_path(abstract_variables(config))
        tensors = family_of(config).tensors
        places = [(tensor.path, tensor.layer) for tensor in tensors]
        assert len(set(places)) == len(places)
        assert len({tensor.path for tensor in tensors}) == len(paths)
