"""What packing and unpacking cost in instructions, read from the machine code.

A GPU starts one instruction of a warp in each cycle of each of its schedulers, and some
of its units take several cycles for one. So the instructions for an element bound how
many elements a second can be packed, whatever the memory does. The bound is in units of
the memory's bandwidth: below 1 a kernel cannot be as fast as a copy. Nothing runs, and
there need be no GPU. What is not in the bound: waiting for memory, and conflicts.

Counted are the instructions on the shortest way through a kernel that a whole tile of
finite values takes: with loads or stores of four elements, the division of a block,
noise, all conversions, and the words of codes that are stored.

Units are lanes of a multiprocessor. The CUDA C++ Programming Guide has for compute
capability 8 and 9, and Thor's 11 is taken for alike: 128 start in a cycle, 64 in the
integer unit, 16 in the one that converts between integers and floats (the slowest of
what is documented).

Examples:
    make bench-machine-code
    python -m benchmarks.machine_code --library FILE   # cuobjdump is on the PATH
"""

import collections
import dataclasses
import pathlib
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import tyro

from benchmarks.environment import RESULTS, describe_environment, write_result
from benchmarks.gpu_devices import GPUS
from benchmarks.tables import make_console, make_table


Record = dict[str, Any]

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_LIBRARY = (
    _ROOT
    / "build"
    / "cuda-tools"
    / "wheel"
    / "dafjax"
    / "_native"
    / "libdafjax_cuda.so"
)
# Of a thread: four lanes of a tile in its 16 rows.
_ELEMENTS = 64
_BLOCK_SIZE = 256
_LANES = {"all": 128, "integer": 64, "conversion": 16}
_INTEGER = frozenset(
    ("LOP3", "SHF", "IMNMX", "VIMNMX", "ISETP", "FSETP", "FMNMX", "IADD3", "VIADD",
     "SEL", "FSEL", "PRMT", "LEA", "PLOP3", "P2R", "R2P", "IABS", "BMSK", "SGXT", "FLO",
     "FMNMX3", "VIADDMNMX", "HMNMX2", "VHMNMX")
)  # fmt: skip
_CONVERSION = frozenset(("F2I", "I2F", "I2FP", "F2F", "F2FP", "MUFU"))


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line."""

    library: pathlib.Path = _LIBRARY
    """The CUDA library, or another file with machine code."""
    gpus: tuple[str, ...] = tuple(GPUS)
    """Devices of `benchmarks.gpu_devices`."""
    bits: tuple[int, ...] = (1, 2, 4, 8)
    """Bits of a code."""
    least: float = 0.0
    """The command fails if a bound is less than this."""
    out: pathlib.Path = RESULTS / "machine_code.json"
    """The file to write."""


@final
@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a disassembly.

    Attributes:
        address: Its own.
        condition: The predicate that guards it, or "".
        operation: Its name with all suffixes.
        operands: The rest.
    """

    address: int
    condition: str
    operation: str
    operands: str

    @property
    def name(self) -> str:
        """The operation without suffixes."""
        return self.operation.split(".")[0]


Kernel = Sequence[Instruction]
Mark = Callable[[Instruction], bool]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = tyro.cli(
        Options,
        args=arguments,
        description=__doc__,
        prog="python -m benchmarks.machine_code",
    )
    console = make_console()
    environment = describe_environment()
    records = [
        record
        for name in options.gpus
        for record in _records(name, _disassemble(options.library, name), options.bits)
    ]
    console.print(_table(records))
    write_result(
        options.out,
        environment,
        {"elements_of_a_thread": _ELEMENTS, "machine_code": records},
    )
    console.print(f"Written to {options.out}.", markup=False)
    slowest = min(records, key=lambda record: record["bound"])
    if slowest["bound"] < options.least:
        raise SystemExit(
            f"{slowest['operation']} ({slowest['dtype']}) has instructions for "
            f"{slowest['bound']:.2f} of the bandwidth of {slowest['gpu']}, but must "
            f"have them for {options.least}."
        )


def _disassemble(library: pathlib.Path, gpu: str) -> Mapping[str, Kernel]:
    tools = {name: shutil.which(name) for name in ("cuobjdump", "c++filt")}
    missing = [name for name, path in tools.items() if path is None]
    if missing:
        raise SystemExit(f"Put on the PATH: {', '.join(missing)}.")
    if not library.exists():
        raise SystemExit(f"There is no {library}; `make bench-machine-code` builds it.")
    major, minor = GPUS[gpu].compute_capability
    listing = subprocess.run(
        ["cuobjdump", "-sass", "-arch", f"sm_{major}{minor}", str(library)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    readable = subprocess.run(
        ["c++filt"], input=listing, capture_output=True, text=True, check=True
    ).stdout
    return parse(readable)


def parse(listing: str) -> Mapping[str, Kernel]:
    """Returns the instructions of all kernels in what cuobjdump prints, by name."""
    line = re.compile(
        r"/\*([0-9a-f]+)\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z0-9_.]+)\s*([^;]*);"
    )
    kernels: dict[str, list[Instruction]] = {}
    kernel: list[Instruction] = []
    for text in listing.splitlines():
        if "Function :" in text:
            kernel = kernels.setdefault(text.split("Function :")[1].strip(), [])
        elif match := line.match(text.strip()):
            address, condition, operation, operands = match.groups()
            kernel.append(
                Instruction(
                    int(address, 16), condition or "", operation, operands.strip()
                )
            )
    return kernels


def shortest_way(kernel: Kernel, marks: Sequence[Mark]) -> list[Instruction] | None:
    """Returns the fewest instructions from the beginning to an exit.

    Args:
        kernel: The instructions.
        marks: What the way has to come by, in this order.

    Returns:
        The instructions in order; None if there is no such way.
    """
    places = {instruction.address: i for i, instruction in enumerate(kernel)}
    start = (0, 0)
    before: dict[tuple[int, int], tuple[int, int] | None] = {start: None}
    queue: collections.deque[tuple[int, int]] = collections.deque([start])
    while queue:
        here = queue.popleft()
        place, passed = here
        if passed < len(marks) and marks[passed](kernel[place]):
            passed += 1
        ends, following = _following(kernel, place, places)
        if ends and passed == len(marks):
            way: list[Instruction] = []
            step: tuple[int, int] | None = here
            while step is not None:
                way.append(kernel[step[0]])
                step = before[step]
            return way[::-1]
        for place in following:
            if (place, passed) not in before:
                before[place, passed] = here
                queue.append((place, passed))
    return None


def _following(
    kernel: Kernel, place: int, places: Mapping[int, int]
) -> tuple[bool, Sequence[int]]:
    """Returns whether the kernel may end at an instruction, and what may come next."""
    instruction = kernel[place]
    after = [place + 1] if place + 1 < len(kernel) else []
    if instruction.name == "EXIT":
        return True, after if instruction.condition else []
    if instruction.name == "RET":
        return False, []
    if instruction.name != "BRA":
        return False, after
    first, *_ = instruction.operands.split(",")
    target = re.findall(r"0x([0-9a-f]+)", instruction.operands)[-1]
    depends = instruction.condition or re.match(r"!?U?P\d", first)
    return False, [places[int(target, 16)], *(after if depends else [])]


def count(way: Sequence[Instruction]) -> Mapping[str, float]:
    """Returns how many instructions for an element each unit has."""
    names = [instruction.name for instruction in way]
    return {
        "all": len(names) / _ELEMENTS,
        "integer": sum(name in _INTEGER for name in names) / _ELEMENTS,
        "conversion": sum(name in _CONVERSION for name in names) / _ELEMENTS,
    }


def _conversions(way: Sequence[Instruction]) -> int:
    return sum(instruction.name in _CONVERSION for instruction in way)


def _way_of_a_whole_tile(
    kernel: Kernel, marks: Sequence[Mark], num_stores: int
) -> list[Instruction]:
    """Returns the shortest way by the most conversions.

    Args:
        kernel: The instructions.
        marks: What the way comes by before the last conversion.
        num_stores: How many words of codes it stores, some of them behind that.
    """
    ways = [
        way
        for last in _last_conversions(kernel)
        for earlier in range(num_stores + 1)
        if (
            way := shortest_way(
                kernel,
                [
                    *marks,
                    *[_stores_codes] * earlier,
                    last.__eq__,
                    *[_stores_codes] * (num_stores - earlier),
                ],
            )
        )
        is not None
    ]
    return max(ways, key=lambda way: (_conversions(way), -len(way)))


def _last_conversions(kernel: Kernel) -> Iterator[Instruction]:
    """Yields the conversions after which a branch comes before another one."""
    last = None
    for instruction in kernel:
        if instruction.name in _CONVERSION:
            last = instruction
        elif instruction.name in ("BRA", "EXIT") and last is not None:
            yield last
            last = None


def _records(
    gpu: str, kernels: Mapping[str, Kernel], bits: Sequence[int]
) -> Iterator[Record]:
    for operation, dtype, nbytes, pattern, marks, num_stores in _operations(bits):
        (kernel,) = (code for name, code in kernels.items() if re.search(pattern, name))
        instructions = count(_way_of_a_whole_tile(kernel, marks, num_stores))
        yield {
            "gpu": gpu,
            "operation": operation,
            "dtype": dtype,
            "bytes_of_an_element": nbytes,
            "instructions": dict(instructions),
            "bound": bound(gpu, instructions, nbytes),
        }


def _operations(
    bits: Sequence[int],
) -> Iterator[tuple[str, str, float, str, Sequence[Mark], int]]:
    """Yields names, dtypes, bytes moved, patterns of kernels, marks, stores."""
    for dtype, nbytes, width, values in (
        ("float32", 4, "128", "TileValues"),
        ("bfloat16", 2, "64", "TilePairs"),
    ):
        for b in bits:
            moved = nbytes + b / 8 + 4 / _BLOCK_SIZE
            for layout, columns in (("rows", "false"), ("columns", "true")):
                # Of column blocks one warp divides for all.
                divides = [_is("MUFU.RCP")] if layout == "rows" else []
                noise = _has("0x846ca68b", "-0x7b935975")
                yield (
                    f"pack {layout} {b}",
                    dtype,
                    moved,
                    rf"Pack{layout.title()}Kernel<{b}, dafjax::{values}, "
                    "dafjax::CodesInArrays<",
                    [_is(f"LDG.E.{width}"), *divides, noise],
                    b,
                )
                yield (
                    f"unpack {layout} {b}",
                    dtype,
                    moved,
                    rf" dafjax::UnpackKernel<{b}, {columns}>",
                    [_is(f"STG.E.{width}")],
                    0,
                )


def _stores_codes(instruction: Instruction) -> bool:
    return instruction.operation in ("STG.E", "STG.E.64")


def _is(operation: str) -> Mark:
    return lambda instruction: instruction.operation.startswith(operation)


def _has(*operands: str) -> Mark:
    return lambda instruction: any(o in instruction.operands for o in operands)


def bound(gpu: str, instructions: Mapping[str, float], nbytes: float) -> float:
    """Returns what instructions leave of the memory's bandwidth.

    Args:
        gpu: The name of a device.
        instructions: How many for an element each unit has.
        nbytes: Bytes that are read and written for an element.
    """
    device = GPUS[gpu]
    cycles = max(instructions[unit] / lanes for unit, lanes in _LANES.items())
    elements = device.multiprocessors * device.clock_ghz * 1e9 / cycles
    return elements * nbytes / device.bandwidth


def _table(records: Sequence[Record]) -> Any:
    kinds: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        operation, _ = record["operation"].rsplit(" ", 1)
        kinds.setdefault((record["gpu"], operation, record["dtype"]), []).append(record)
    return make_table(
        "Instructions for an element, and what they leave of the bandwidth",
        left=("GPU", "Operation", "Dtype"),
        right=("All", "Integer", "Conversion", "Bound"),
        rows=[
            (
                *kind,
                *(_range(r["instructions"][unit] for r in of_kind) for unit in _LANES),
                _range((r["bound"] for r in of_kind), digits=2),
            )
            for kind, of_kind in kinds.items()
        ],
    )


def _range(values: Iterable[float], digits: int = 1) -> str:
    """Returns the least and the greatest, over all bits."""
    texts = [f"{value:.{digits}f}" for value in sorted(values)]
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} - {texts[-1]}"


if __name__ == "__main__":
    main()
