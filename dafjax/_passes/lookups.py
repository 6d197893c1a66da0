"""Moves lookups before the conversion of their table.

A model that computes in bfloat16 converts its whole float32 embedding table and then
looks some rows up. The rows are not saved, because they are cheap to recompute. But
each recomputation would convert the whole table again. (GPT-2, of 5000 words: four
times, 92 MB.)
"""

import dataclasses

import jax.numpy as jnp

from dafjax._trace.equation import Equation, conversion, in_dtype
from dafjax._trace.residuals import Program


def look_up_first(program: Program) -> Program:
    """Returns a program whose lookups come before the conversion of their table."""
    avals = list(program.avals)
    tables: dict[int, int] = {}
    forward: list[Equation] = []
    for eqn in program.forward:
        if eqn.rule.converts and _is_floating(program, eqn):
            tables[eqn.outputs[0]] = eqn.input_values[0]
        table = eqn.inputs[0] if eqn.rule.looks_up else None
        if not isinstance(table, int) or table not in tables:
            forward.append(eqn)
            continue
        source = tables[table]
        dtype = avals[source].dtype
        (result,) = eqn.outputs
        found = len(avals)
        avals.append(avals[result].update(dtype=dtype))
        inputs = (source, *eqn.inputs[1:])
        lookup = dataclasses.replace(eqn, inputs=inputs, outputs=(found,))
        forward.append(in_dtype(lookup, (source, found), dtype))
        forward.append(
            conversion(avals[found], avals[result].dtype, found, result, eqn)
        )
    return dataclasses.replace(program, avals=tuple(avals), forward=tuple(forward))


def _is_floating(program: Program, eqn: Equation) -> bool:
    values = (*eqn.input_values, *eqn.outputs)
    dtypes = [program.avals[v].dtype for v in values]
    return len(values) == 2 and all(jnp.issubdtype(d, jnp.floating) for d in dtypes)
