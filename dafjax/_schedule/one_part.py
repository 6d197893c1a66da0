"""Runs the equations of one chunk, in a loop or unrolled."""

import collections
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

from dafjax._native import tie
from dafjax._schedule.steps import Division, Loop, Unpacking
from dafjax._trace.by_rows import evaluate_on_rows
from dafjax._trace.equation import Equation, evaluate, look_up
from dafjax._typing import Array


def run_pieces(
    division: Division,
    pieces: Iterable[Unpacking | Equation],
    part: dict[int, Any],
    env: MutableMapping[int, Any],
    unpack: Callable[[Unpacking], None],
) -> None:
    """Runs decodes and equations, and adds their results to the chunk.

    Args:
        division: The chunk plan.
        pieces: The decodes and equations, in order.
        part: The live values of the chunk: its sources.
        env: The live whole values.
        unpack: Decodes a residual and adds it to the chunk.
    """
    at_hand = collections.ChainMap(part, env)
    for piece in pieces:
        if isinstance(piece, Unpacking):
            unpack(piece)
            continue
        operands = look_up(piece.inputs, at_hand)
        outputs = evaluate_on_rows(
            piece, operands, division.num_rows, division.num_rows_of_part
        )
        part.update(zip(piece.outputs, outputs, strict=True))


def finish_sums(loop: Loop, sums: MutableMapping[int, Any]) -> None:
    """Replaces sums by the gradients that their epilogues compute.

    Args:
        loop: The loop that computes the sums.
        sums: Its complete sums.
    """
    for eqn in loop.finishing:
        if sums.keys().isdisjoint(eqn.input_values):
            continue
        outputs = evaluate(eqn, look_up(eqn.inputs, sums))
        for value in eqn.input_values:
            del sums[value]
        sums.update(zip(eqn.outputs, outputs, strict=True))


def tie_waiting(
    item: Unpacking, part: dict[int, Any], token: Array, *, fused: bool
) -> Array:
    """Puts a barrier between partial results of a chunk and the next decode.

    Args:
        item: The next decode.
        part: The live values of the chunk; the barrier's results replace its operands.
        token: The token that the decode waits for.
        fused: Whether the decode is fused into its consumers.

    Returns:
        The token after the barrier.
    """
    # Skips values that the loop does not compute, and whole values.
    waiting = [v for v in item.behind if v in part]
    if not waiting:
        return token
    *tied, token = tie(*(part[v] for v in waiting), token, only_on_cpus=fused)
    part.update(zip(waiting, tied, strict=True))
    return token
