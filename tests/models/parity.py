"""What tests of parity share: gradients under the names of files, and tolerances."""

import flax.traverse_util
import numpy as np

from models.weights.families import family_of
from tests.helpers import relative_error


# Of a gradient at most so many elements are in a golden file, evenly spread.
NUM_KEPT = 24


def spread(x):
    """Returns at most `NUM_KEPT` elements of an array, evenly spread."""
    flat = np.ravel(x)
    return flat[:: max(1, flat.size // NUM_KEPT)][:NUM_KEPT]


def gradients_by_tensor(config, gradient):
    """Returns the gradients of parameters, named and laid out as in a file."""
    flat = flax.traverse_util.flatten_dict({"params": gradient}, sep="/")
    return {
        tensor.name: tensor.to_file(np.asarray(flat[tensor.path]))
        for tensor in family_of(config).tensors
        if tensor.path in flat
    }


def check_gradient(name, got, want, *, scale=1.0):
    """Fails unless a gradient is within a thousandth.

    Args:
        name: Of the tensor.
        got: What was computed.
        want: What it must be.
        scale: What is nothing beside it is nothing: some gradients are exactly zero but
            for rounding, as that of a bias before a softmax over what it is added to.
    """
    norm = np.linalg.norm(want)
    if norm < 1e-5 * scale * want.size**0.5:
        assert np.linalg.norm(got) < 1e-4 * scale * want.size**0.5, name
    else:
        assert relative_error(got, want) < 1e-3, name
