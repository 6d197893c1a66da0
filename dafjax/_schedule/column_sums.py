"""Sums of what is packed, taken where it is packed.

A batch norm sums what a convolution gave, and its squares, over all but the channels.
Where that is packed in blocks of channels, packing gives the sums (on GPUs of what is
in registers then): nothing reads all of it for them.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from dafjax._trace.equation import Equation
from dafjax._trace.residuals import Program
from dafjax.codecs import AbstractCodec


class ColumnSums(NamedTuple):
    """Equations that packing a value makes needless.

    Attributes:
        of_values: Those that sum it over all axes but the last.
        of_squares: Those that sum its squares.
    """

    of_values: tuple[Equation, ...]
    of_squares: tuple[Equation, ...]


def find_column_sums(
    program: Program,
    equations: Sequence[Equation],
    codecs: Mapping[int, AbstractCodec],
) -> dict[int, ColumnSums]:
    """Returns for each value that is packed so which of the equations sum it, if any.

    Args:
        program: What the equations are of.
        equations: Those of the forward pass that run.
        codecs: How values are packed.
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
