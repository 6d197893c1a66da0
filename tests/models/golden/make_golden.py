"""Writes the golden files: tiny random models as PyTorch `transformers` computes them.

Needs torch (`pip install '.[parity]'`). Of each case there are the weights, saved by
safetensors under the names of `transformers`, and an `.npz` file with inputs, logits,
loss and gradients. The default tests read them without torch.

    python -m tests.models.golden.make_golden
"""

import pathlib

import numpy as np
import safetensors.numpy

from tests.models.cases import CASES, Case
from tests.models.parity import spread
from tests.models.references import ask, make_inputs, make_model


FOLDER = pathlib.Path(__file__).parent


def write(name: str, case: Case) -> None:
    model = make_model(case.config, case.seed)
    inputs = make_inputs(case.config, batch=case.batch, size=case.size, seed=case.seed)
    tensors = {
        key: tensor.numpy().copy()
        for key, tensor in model.state_dict().items()
        if key not in case.left_out
    }
    safetensors.numpy.save_file(tensors, FOLDER / f"{name}.safetensors")
    answers = ask(model, case.config, inputs)
    np.savez_compressed(
        FOLDER / f"{name}.npz",
        **{f"input/{key}": x for key, x in answers.inputs.items()},
        **{f"gradient/{key}": spread(x) for key, x in answers.gradients.items()},
        logits=answers.logits,
        loss=answers.loss,
    )


if __name__ == "__main__":
    for name, case in CASES.items():
        write(name, case)
