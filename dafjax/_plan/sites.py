"""Names of the residuals of a plan, by which a store tells them apart."""

import collections

from dafjax._plan.plan import Kept, ProgramPlan


def place_of(item: Kept) -> str:
    """Returns where in the model a value is made, and by what."""
    return "/".join(part for part in (item.name, item.primitive) if part)


def site_names(plan: ProgramPlan) -> list[str]:
    """Returns a name for each of `plan.kept`, the same in every process.

    It is the place, which `print_saved_residuals` shows; a number if that place makes
    several; and some digits of what tells the function from others, because places in
    blocks that are wrapped one by one have equal names. Blocks that are equal in all,
    shapes included, share their sites.
    """
    seen: collections.Counter[str] = collections.Counter()
    names = []
    for item in plan.kept:
        place = place_of(item)
        seen[place] += 1
        number = f" {seen[place]}" if seen[place] > 1 else ""
        names.append(f"{place}{number} @{plan.function[:8]}")
    return names
