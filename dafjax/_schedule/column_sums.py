"""Fuses sums over packed values with the packing.

A batch norm sums a convolution's result and its squares over all axes but the channels.
If that value is packed with per-channel groups, packing also returns these sums (on
GPUs from values in registers), and no other kernel reads the whole value for them.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from dafjax._trace.equation import Equation
from dafjax._trace.residuals import Program
from dafjax.codecs import AbstractCodec


class ColumnSums(NamedTuple):
    """Equations that packing a value replaces.

    Attributes:
        of_values: Equations that sum the value over all axes but the last.
        of_squares: Equations that sum its squares over these axes.
    """

    of_values: tuple[Equation, ...]
    of_squares: tuple[Equation, ...]


def find_column_sums(
    program: Program,
    equations: Sequence[Equation],
    codecs: Mapping[int, AbstractCodec],
) -> dict[int, ColumnSums]:
    """Returns the equations whose sums packing can compute, for each such value.

    Args:
        program: The program of the equations.
        equations: The equations of the forward pass that run.
        codecs: The codec of each value.
    """
    squares = {
        eqn.outputs[0]: eqn.input_values[0] for eqn in equations if eqn.is_square
    }
    sums = [eqn for eqn in equations if _sums_columns(program, eqn)]
    found: dict[int, ColumnSums] = {}
    for value, codec in codecs.items():
        aval = program.avals[value]
        like = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        if aval.dtype != np.float32 or not codec.sums_columns(like):
            continue
        of_values = [eqn for eqn in sums if eqn.input_values == (value,)]
        of_squares = [eqn for eqn in sums if squares.get(eqn.input_values[0]) == value]
        if of_values and of_squares:
            found[value] = ColumnSums(tuple(of_values), tuple(of_squares))
    return found


def _sums_columns(program: Program, eqn: Equation) -> bool:
    if eqn.primitive != "reduce_sum" or len(eqn.input_values) != 1:
        return False
    aval = program.avals[eqn.input_values[0]]
    is_shared = bool(aval.sharding.mesh.explicit_axes)
    axes = tuple(range(len(aval.shape) - 1))
    return bool(axes) and tuple(eqn.params["axes"]) == axes and not is_shared
