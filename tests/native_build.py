"""Compiles C++ and simulated CUDA for tests, each source once in a session."""

import contextlib
import fcntl
import os
import pathlib
import subprocess
from collections.abc import Iterator, Sequence

import pytest


ROOT = pathlib.Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests" / "cpp"
SOURCES = ROOT / "xla_ffi"
COMPILER = os.environ.get("CXX", "c++")
# One rounding per operation. Loads of four values at a time ignore types.
FLAGS = (
    "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden",
    "-pthread", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno",
    "-fno-strict-aliasing",
)  # fmt: skip
ADDRESS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
THREAD = ("-fsanitize=thread",)
SANITIZERS = {"none": (), "address": ADDRESS, "thread": THREAD}
POOL = tuple(
    str(path.relative_to(SOURCES)) for path in sorted(SOURCES.glob("pool/*.cc"))
)


def shared_folder(factory: pytest.TempPathFactory, name: str) -> pathlib.Path:
    """Returns a folder that all processes of a session share."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder = base / name
    folder.mkdir(exist_ok=True)
    return folder


@contextlib.contextmanager
def locked(target: pathlib.Path) -> Iterator[bool]:
    """Locks out other processes; yields whether the target is missing."""
    with open(f"{target}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield not target.exists()


def run_compiler(*command: str | os.PathLike[str]) -> None:
    """Runs a command; its messages are the error if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def run(
    program: pathlib.Path, *arguments: str, timeout: float = 3600
) -> subprocess.CompletedProcess[str]:
    """Runs a program of a test."""
    command = [program, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=timeout
    )


class Build:
    """Compiles every source at most once, into a folder."""

    def __init__(
        self,
        folder: pathlib.Path,
        sanitizer: str = "none",
        sources: pathlib.Path = SOURCES,
        flags: Sequence[str] = (),
    ):
        self.folder = folder
        self.flags = SANITIZERS[sanitizer]
        self.more_flags = flags
        self.sources = sources

    def compile(
        self, source: pathlib.Path, *flags: str | os.PathLike[str]
    ) -> pathlib.Path:
        """Returns the object file of a source."""
        target = self.folder / f"{source.parent.name}_{source.stem}.o"
        with locked(target) as is_missing:
            if is_missing:
                run_compiler(
                    COMPILER, *FLAGS, *self.more_flags, f"-I{self.sources}", *flags,
                    "-x", "c++", "-c", source, "-o", target,
                )  # fmt: skip
        return target

    def simulator(self) -> list[pathlib.Path]:
        """Returns the objects of the simulator of CUDA."""
        # The thread sanitizer must not see how the simulator switches stacks.
        unseen = () if self.flags == THREAD else self.flags
        return [
            self.compile(path, *unseen)
            for path in sorted(self.sources.glob("simulator/*.cc"))
        ]

    def program(self, test: str, names: Sequence[str] = ()) -> pathlib.Path:
        """Links a test with the simulator and these sources."""
        objects = self.simulator()
        for name in names:
            if name == "cpu/kernels.cc":
                objects.append(self._kernels_of_the_cpu())
            else:
                objects.append(self.compile(self.sources / name, *self.flags))
        objects.append(self.compile(TESTS / f"{test}.cc", *self.flags))
        target = self.folder / test
        run_compiler(COMPILER, *FLAGS, *self.flags, *objects, "-o", target)
        return target

    def _kernels_of_the_cpu(self) -> pathlib.Path:
        """Returns the package's own object: to compile another takes 14 seconds."""
        name = pathlib.Path("cpu/kernels.cc")
        read = [p for part in ("cpu", "format") for p in SOURCES.glob(f"{part}/**/*.*")]
        changed = max(path.stat().st_mtime for path in read)
        if self.sources == SOURCES:
            for found in ROOT.glob(f"build/*/CMakeFiles/dafjax_cpu.dir/{name}.o"):
                if found.stat().st_mtime > changed:
                    return found
        # No sanitizer: these tests look for faults of GPUs.
        return self.compile(
            self.sources / name, "-DDAFJAX_ONLY_SCALAR", "-Wno-maybe-uninitialized"
        )
