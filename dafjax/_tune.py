"""Prints measured times of reductions and the choices: `python -m dafjax tune`."""

import jax

from dafjax._native import STRATEGIES, Tuning, fastest, tune_device
from dafjax._table import align


Row = tuple[str, ...]


def tune(*, redo: bool = False) -> int:
    """Prints the profiles of this machine's devices; returns 0.

    Args:
        redo: Whether to measure even if stored profiles exist.
    """
    for platform in ("cpu", "cuda"):
        try:
            device = jax.local_devices(backend=platform)[0]
        except RuntimeError:
            continue
        print(_describe(tune_device(device, redo=redo)))
    return 0


def _describe(tuning: Tuning) -> str:
    facts = ", ".join(f"{k} {v}" for k, v in tuning.device.items() if v)
    header: Row = ("reduction", "rows", "elements", *STRATEGIES, "auto")
    rows: list[Row] = [header]
    for (reduction, num_rows, row_elements), seconds in tuning.profile.times.items():
        times = [
            f"{seconds[name] * 1e6:.1f} us" if name in seconds else ""
            for name in STRATEGIES
        ]
        shape = (str(num_rows), str(row_elements))
        rows.append((reduction, *shape, *times, fastest(seconds)))
    source = "measured now" if tuning.measured else "measured before"
    table = align(rows, right=range(1, 6))
    return f"{facts}\n{source}, kept in {tuning.path}\n\n{table}\n"
