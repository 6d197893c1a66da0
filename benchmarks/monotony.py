"""Does a figure fall as another grows, within its noise?"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.stats


def falls_as_it_grows(
    budgets: Sequence[int], samples: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """Tells whether a figure falls as the budget grows, within its noise.

    The rule: at no setting is its mean above that of the setting before, by a paired
    t-test of the same points at 5 % for all settings together (Bonferroni: with 20
    settings, 0.26 % each), and at the last it is below that of the first, at 5 %. The
    rank correlation of budget and mean tells little where the figure is all noise, as
    differences of losses are from some number of bits on.

    Args:
        budgets: In rising order.
        samples: For each budget as many figures.

    Returns:
        `rises`, the settings at which it is above the one before; `falls`, whether at
        the last it is below the first; `spearman`, the rank correlation of the means.
    """
    table = np.array(samples)
    share = 0.05 / (len(table) - 1)
    rises = [
        i + 1
        for i, (before, after) in enumerate(itertools.pairwise(table))
        if _is_above(after, before, share)
    ]
    correlation = scipy.stats.spearmanr(budgets, table.mean(axis=1))
    return {
        "rises": rises,
        "falls": _is_above(table[0], table[-1], 0.05),
        "spearman": float(correlation.statistic),
    }


def _is_above(a: np.ndarray, b: np.ndarray, level: float) -> bool:
    """Whether the mean of `a` is above that of `b`, by a paired t-test."""
    difference = a - b
    error = np.std(difference, ddof=1) / len(difference) ** 0.5
    most = scipy.stats.t.isf(level, len(difference) - 1)
    return bool(np.mean(difference) > most * error)
