"""Power, clocks and temperatures of a Jetson, as `tegrastats` reports them."""

import bisect
import contextlib
import dataclasses
import re
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from dafjax._native import power_mode


# Rails that stand for the whole board, by their names on Orin NX and Nano, and on Thor.
# Where there is none (AGX Orin), the rails that are reported are added up.
_WHOLE_BOARD = ("VDD_IN", "VIN")
_INTERVAL_MS = 100


class NoTegrastatsError(RuntimeError):
    """The machine has no `tegrastats`, or it says nothing."""


@final
@dataclasses.dataclass(frozen=True)
class Sample:
    """One line of `tegrastats`.

    Attributes:
        time: When it was read, in seconds of the harness's clock.
        watts: What the board draws.
        celsius: Temperatures, by sensor.
        megahertz: Clocks: the fastest core of the `cpu`, `gpu`, and `emc`, the memory.
        ram_megabytes: Memory in use, of CPU and GPU.
    """

    time: float
    watts: float
    celsius: Mapping[str, float]
    megahertz: Mapping[str, int]
    ram_megabytes: int


def parse(line: str, at: float) -> Sample | None:
    """Reads a line of `tegrastats`; None if it tells of no power."""
    rails = {
        name: int(milliwatts)
        for name, milliwatts in re.findall(r"(V\w+) (\d+)mW(?:/\d+mW)?", line)
    }
    if not rails:
        return None
    whole = [rails[name] for name in _WHOLE_BOARD if name in rails]
    clocks = {
        "cpu": [int(hertz) for hertz in re.findall(r"\d+%@(\d+)[,\]]", line)],
        "gpu": _clocks(r"GR3D_FREQ \d+%@\[?([\d,]+)", line),
        "emc": _clocks(r"EMC_FREQ \d+%@\[?([\d,]+)", line),
    }
    ram = re.search(r"RAM (\d+)/\d+MB", line)
    return Sample(
        time=at,
        watts=(whole[0] if whole else sum(rails.values())) / 1000,
        celsius={
            name: float(degrees)
            for name, degrees in re.findall(r"(\w+)@(-?[\d.]+)C\b", line)
        },
        megahertz={name: max(found) for name, found in clocks.items() if found},
        ram_megabytes=int(ram.group(1)) if ram else 0,
    )


def _clocks(pattern: str, line: str) -> list[int]:
    found = re.search(pattern, line)
    return [int(hertz) for hertz in found.group(1).split(",") if hertz] if found else []


@final
class Tegrastats:
    """Samples of a Jetson while it works; `joules` of a time are a harness's meter."""

    def __init__(self, samples: Sequence[Sample] = ()) -> None:
        """Begins with samples that are there already."""
        self._samples = list(samples)

    def add(self, sample: Sample) -> None:
        """Adds a sample that is later than all others."""
        self._samples.append(sample)

    def joules(self, start: float, end: float) -> float:
        """Returns the energy between two times of the clock.

        Power between two samples is that of the later one, which `tegrastats` averages.

        Raises:
            NoTegrastatsError: There is no sample.
        """
        if not self._samples:
            raise NoTegrastatsError(
                "`tegrastats` has told of no power yet. Measure for a second or more, "
                "and check that `tegrastats` prints rails (`VDD_IN ...mW`)."
            )
        times = [sample.time for sample in self._samples]
        total = 0.0
        while start < end:
            following = min(bisect.bisect_right(times, start), len(times) - 1)
            until = min(end, times[following]) if times[following] > start else end
            total += self._samples[following].watts * (until - start)
            start = until
        return total

    def record(self) -> dict[str, Any]:
        """Returns mode, clocks, temperatures and power, ready for JSON."""
        names = {name for sample in self._samples for name in sample.megahertz}
        sensors = {name for sample in self._samples for name in sample.celsius}
        return {
            "power_mode": power_mode(),
            "num_samples": len(self._samples),
            "watts": _range([sample.watts for sample in self._samples]),
            "ram_megabytes": _range([s.ram_megabytes for s in self._samples]),
            "megahertz": {
                name: _range(
                    [s.megahertz[name] for s in self._samples if name in s.megahertz]
                )
                for name in sorted(names)
            },
            "celsius": {
                name: _range(
                    [s.celsius[name] for s in self._samples if name in s.celsius]
                )
                for name in sorted(sensors)
            },
        }


def _range(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {
        "least": min(values),
        "median": statistics.median(values),
        "greatest": max(values),
    }


@contextlib.contextmanager
def run_tegrastats() -> Iterator[Tegrastats]:
    """Runs `tegrastats` in the background, sampling every 0.1 s.

    Raises:
        NoTegrastatsError: It is not installed.
    """
    command = shutil.which("tegrastats")
    if command is None:
        raise NoTegrastatsError(
            "`--jetson` needs `tegrastats`, which is on every Jetson (JetPack), but it "
            "is not on the PATH. On other machines leave `--jetson` out."
        )
    stats = Tegrastats()
    process = subprocess.Popen(
        [command, "--interval", str(_INTERVAL_MS)], stdout=subprocess.PIPE, text=True
    )

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            sample = parse(line, time.perf_counter())
            if sample is not None:
                stats.add(sample)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield stats
    finally:
        process.terminate()
        reader.join()
        # Closes what was read, and waits.
        process.communicate()
