"""Resident memory that steps with one store add, in a process of their own.

Reads what to measure from its input and prints one JSON object. `benchmarks.pool_step
--rss` runs it.
"""

import json
import sys

from benchmarks import peak_rss, pool_step


_STEPS = 3


def main() -> None:
    """Measures what the input says."""
    task = json.loads(sys.stdin.read())
    options = pool_step.Options(
        **{
            k: tuple(v) if isinstance(v, list) else v
            for k, v in task["options"].items()
        }
    )
    step = next(
        step
        for step in pool_step.steps_of(task["network"], options)
        if step.size == task["size"]
    )
    # A pool must live as long as the program that uses it.
    store = pool_step.STORES[task["store"]]("measured")
    _, take_step = step.make(store)
    print(json.dumps(peak_rss.measure_steps(take_step, _STEPS)))


if __name__ == "__main__":
    main()
