"""The fewest bytes from which the backward pass can be computed: a minimum cut.

Every path from an operation that is expensive to run again to something that the
backward pass reads has to be cut by a value that is kept. The cheapest set of such
values is a minimum cut of the graph in which every value is an edge that costs its
bytes in codes. (For bytes as they are, the partitioner of PyTorch's AOTAutograd does
that; in Checkmate, Jain et al., MLSys 2020, it is an integer program.)

It is a bound, not a plan to use: it knows nothing of noise. It recomputes statistics of
norms from codes, keeps one code where two products would meet the same noise, and lets
a chain of any length unpack any number of values at once.
"""

import numpy as np
import scipy.sparse
import scipy.sparse.csgraph

from dafjax._trace.graph import live_equations
from dafjax._trace.residuals import Program
from dafjax.codecs import Affine, Bitmask


# Capacities are 32-bit integers, in units of so many bytes.
_UNIT = 8
_INFINITE = 2**30


def minimum_cut_nbytes(program: Program, codec: Affine, *, min_nbytes: int) -> int:
    """Returns the bytes of a minimum cut.

    Args:
        program: The function and its transpose.
        codec: How floating-point values would be kept.
        min_nbytes: Values of no more bytes would be kept as they are.
    """
    num_values = len(program.avals)
    source, sink = 2 * num_values, 2 * num_values + 1
    residuals = program.residuals()
    # A value that is kept cuts the edge from its first node to its second.
    capacities: dict[tuple[int, int], int] = {}
    known = set(range(program.num_arguments))
    for eqn in live_equations(program.forward, residuals):
        if eqn.rule.is_cheap and known.issuperset(eqn.input_values):
            known.update(eqn.outputs)
            continue
        for value in eqn.outputs:
            capacities[2 * value, 2 * value + 1] = _capacity(
                program, value, codec, min_nbytes
            )
            if eqn.is_tame:
                for operand in set(eqn.input_values) - known:
                    capacities[2 * operand + 1, 2 * value] = _INFINITE
            else:
                capacities[source, 2 * value] = _INFINITE
    for value in residuals:
        if value not in known:
            capacities[2 * value + 1, sink] = _INFINITE
    tails, heads = zip(*capacities, strict=True)
    graph = scipy.sparse.csr_matrix(
        (np.array(list(capacities.values()), np.int32), (tails, heads)),
        shape=(2 * num_values + 2, 2 * num_values + 2),
    )
    flow = scipy.sparse.csgraph.maximum_flow(graph, source, sink)
    return int(flow.flow_value) * _UNIT


def _capacity(program: Program, value: int, codec: Affine, min_nbytes: int) -> int:
    aval = program.avals[value]
    nbytes = program.nbytes(value)
    if aval.dtype == bool:
        nbytes = Bitmask().packed_nbytes(aval)
    elif nbytes > min_nbytes and aval.dtype in ("float32", "bfloat16", "float16"):
        nbytes = codec.packed_nbytes(aval)
    return max(nbytes // _UNIT, 1)
