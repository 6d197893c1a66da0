"""How much resident memory a compiled step adds, in a process of its own."""

import ctypes
import dataclasses
import gc
import multiprocessing
import pathlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, final

import jax

from models import memory


_STEPS = 3

# `M_MMAP_THRESHOLD` of `mallopt`, and its default.
_MMAP_THRESHOLD, _NBYTES = -3, 128 * 1024


@final
@dataclasses.dataclass(frozen=True)
class PeakRss:
    """Resident bytes of a step, beside what its compiled program says.

    Attributes:
        before: Between steps.
        peak: The most during one.
        temp: The program's temporary memory.
        results: The results that do not take the place of donated arguments.
    """

    before: int
    peak: int
    temp: int
    results: int

    @property
    def added(self) -> int:
        """Bytes that a step adds to those between steps."""
        return self.peak - self.before

    @property
    def planned(self) -> int:
        """Bytes that it adds according to the compiled program."""
        return self.temp + self.results

    def as_record(self) -> dict[str, int]:
        """Returns all figures, for a result file."""
        return {
            **dataclasses.asdict(self),
            "added": self.added,
            "planned": self.planned,
        }


def peak_rss_in_fresh_process(
    make_step: Callable[..., tuple[jax.stages.Compiled, Callable[[], Any]]],
    *arguments: Any,
) -> PeakRss:
    """Measures a step where nothing else has run.

    Args:
        make_step: Returns the compiled program and a function that runs it once. It and
            its arguments go to another process.
        *arguments: Its arguments.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(peak_rss, make_step, *arguments).result()


def peak_rss(
    make_step: Callable[..., tuple[jax.stages.Compiled, Callable[[], Any]]],
    *arguments: Any,
) -> PeakRss:
    """Measures a step in this process, the median of three after the first.

    Raises:
        OSError: The system does not tell the resident memory.
    """
    if memory.resident_nbytes() is None:
        raise OSError(
            "Resident memory is read from /proc/self/status, which is absent."
        )
    # By default glibc keeps freed blocks of up to 32 MiB, and hands them out again.
    ctypes.CDLL("libc.so.6").mallopt(_MMAP_THRESHOLD, _NBYTES)
    compiled, take_step = make_step(*arguments)
    jax.block_until_ready(take_step())
    steps = []
    for _ in range(_STEPS):
        # The allocator keeps free blocks, which may be too small for the next step.
        _forget_peak()
        before = memory.resident_nbytes()
        jax.block_until_ready(take_step())
        steps.append((before, memory.peak_resident_nbytes()))
    before, peak = sorted(steps, key=lambda step: step[1] - step[0])[_STEPS // 2]
    analysis = compiled.memory_analysis()
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return PeakRss(before, peak, analysis.temp_size_in_bytes, results)


def _forget_peak() -> None:
    """Frees memory of the compiler and resets VmHWM, which has the compiler's peak."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")
