"""Residual ids: a store distinguishes the residuals of a plan by these names."""

import collections

from dafjax._plan.plan import Kept, ProgramPlan


def place_of(item: Kept) -> str:
    """Returns the place in the model and the primitive that compute a value."""
    return "/".join(part for part in (item.name, item.primitive) if part)


def site_names(plan: ProgramPlan) -> list[str]:
    """Returns a name for each of `plan.kept`, the same in every process.

    A name consists of the place, which `print_saved_residuals` shows; a number, if the
    place computes several residuals; and some digits of the function's hash, because
    blocks that are wrapped one by one have equal names of places. Blocks that are equal
    in everything, shapes included, share their residual ids.
    """
    seen: collections.Counter[str] = collections.Counter()
    names = []
    for item in plan.kept:
        place = place_of(item)
        seen[place] += 1
        number = f" {seen[place]}" if seen[place] > 1 else ""
        names.append(f"{place}{number} @{plan.function[:8]}")
    return names
