"""What is done on one part of the rows, be it in a loop or apart."""

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
    """Adds what is made of a part to it.

    Args:
        division: What the part is one of.
        pieces: What is unpacked and computed, in order.
        part: What is there of the part: its sources.
        env: What is there as a whole.
        unpack: Adds what is unpacked to the part.
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
    """Puts gradients in the place of sums that nothing else reads.

    Args:
        loop: What the sums are of.
        sums: Those of them that are there as a whole.
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
    """Ties what was made of a part before the next residual is unpacked for it.

    Args:
        item: What is unpacked next.
        part: What is there of the part; it is replaced by what is tied.
        token: What unpacking waits for.
        fused: Whether kernels unpack that read it.

    Returns:
        The token, tied.
    """
    # Not what the loop leaves out, and what is there as a whole.
    waiting = [v for v in item.behind if v in part]
    if not waiting:
        return token
    *tied, token = tie(*(part[v] for v in waiting), token, only_on_cpus=fused)
    part.update(zip(waiting, tied, strict=True))
    return token
