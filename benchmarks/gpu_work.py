"""What a program that XLA:GPU compiled does in a run: its kernels, and bytes they move.

Where there is no GPU to time it on, these two tell most of what a step would take: work
between products is bound by the bytes that it moves, and each kernel takes some
microseconds by itself. They are read off the compiled program, loops as often as they
run. What a kernel reads and writes is counted once, whether a cache has it or not.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Final, final


# Bytes of an element.
_ITEMSIZE: Final = {
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2"), 1),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 8),
    "c128": 16,
    "token": 0,
}

# Instructions that are no kernel.
_NAMES: Final = frozenset(
    ["parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all"]
)

# Custom calls whose results are their operands.
_TIES: Final = frozenset(["dafjax_tie"])

_COMPUTATION: Final = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION: Final = re.compile(r"\s+(ROOT )?%([\w.\-]+) = (.*)$")
_ARRAY: Final = re.compile(r"([a-z]\w*)\[([\d,]*)\]")


@final
@dataclasses.dataclass(frozen=True)
class Work:
    """What a program does.

    Attributes:
        kernels: Kernels and copies that run.
        moved_nbytes: Bytes that they read and write.
    """

    kernels: int
    moved_nbytes: int


def work_of(text: str) -> Work:
    """Returns what a program does.

    Args:
        text: The compiled program, `jax.stages.Compiled.as_text()`.

    Raises:
        ValueError: It is no program, or has a loop of which XLA does not know how often
            it runs, a condition, or a dtype whose size is not known here.

    Example:
        >>> work_of('''
        ... ENTRY %main (x: f32[64]) -> f32[64] {
        ...   %x = f32[64]{0} parameter(0)
        ...   ROOT %copy.1 = f32[64]{0} copy(%x)
        ... }''')
        Work(kernels=1, moved_nbytes=512)
    """
    computations, entry = _parse(text)
    kernels, moved = 0, 0
    for computation, instruction, times in _runs(computations, entry, 1):
        kernels += times
        moved += times * _moved_nbytes(computations, computation, instruction)
    return Work(kernels, moved)


@final
@dataclasses.dataclass(frozen=True)
class _Instruction:
    """One line of a computation.

    Attributes:
        name: What it is called.
        shape: The type of its result.
        opcode: What it does.
        operands: The names of what it reads.
        inside: What stands in the parentheses.
        attributes: What stands behind them.
        is_root: Whether it is the result.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    inside: str
    attributes: str
    is_root: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the result."""
        return _nbytes(self.shape)

    def called(self, role: str) -> str:
        """Returns the name of a computation that it runs, `role` says what as."""
        match = re.search(rf"\b{role}=%([\w.\-]+)", self.attributes)
        if match is None:
            raise ValueError(f"`{self.name}` has no `{role}`.")
        return match[1]


_Computation = dict[str, _Instruction]


def _parse(text: str) -> tuple[dict[str, _Computation], str]:
    """Returns the computations by name, and the name of that which runs first."""
    computations: dict[str, _Computation] = {}
    current: _Computation = {}
    entry = ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            current = computations.setdefault(match[2], {})
            entry = match[2] if match[1] else entry
        elif match := _INSTRUCTION.match(line):
            instruction = _instruction(match[2], match[3], is_root=bool(match[1]))
            current[instruction.name] = instruction
    if not entry:
        raise ValueError(f"There is no `ENTRY` in `{text[:80]}`: no compiled program.")
    return computations, entry


def _instruction(name: str, rest: str, *, is_root: bool) -> _Instruction:
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode, rest = rest.split("(", maxsplit=1)
    end = _closing("(" + rest) - 1
    inside = rest[:end]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    return _Instruction(name, shape, opcode, operands, inside, rest[end + 1 :], is_root)


def _closing(text: str) -> int:
    """Returns the place of the parenthesis that closes the first one."""
    depth = 0
    for place, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return place
    raise ValueError(f"No parenthesis closes the first one of `{text[:80]}`.")


def _nbytes(shape: str) -> int:
    total = 0
    for dtype, dimensions in _ARRAY.findall(shape):
        if dtype not in _ITEMSIZE:
            raise ValueError(f"The size of `{dtype}` in `{shape}` is not known here.")
        sizes = map(int, filter(None, dimensions.split(",")))
        total += _ITEMSIZE[dtype] * math.prod(sizes)
    return total


def _runs(
    computations: Mapping[str, _Computation], name: str, times: int
) -> Iterator[tuple[_Computation, _Instruction, int]]:
    """Yields what runs, with its computation, and how often."""
    computation = computations[name]
    for instruction in computation.values():
        opcode = instruction.opcode
        if opcode == "while":
            body = instruction.called("body")
            yield from _runs(computations, body, times * _trip_count(instruction))
        elif opcode == "call":
            yield from _runs(computations, instruction.called("to_apply"), times)
        elif opcode == "conditional":
            raise ValueError(f"`{instruction.name}`: conditions are not counted.")
        elif _is_kernel(instruction):
            yield computation, instruction, times


def _is_kernel(instruction: _Instruction) -> bool:
    opcode = instruction.opcode
    if opcode in _NAMES or opcode.endswith("-done"):
        return False
    return _target(instruction) not in _TIES


def _trip_count(loop: _Instruction) -> int:
    match = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if match is None:
        raise ValueError(f"How often the loop `{loop.name}` runs is not known.")
    return int(match[1])


def _target(instruction: _Instruction) -> str | None:
    match = re.search(r'custom_call_target="([^"]+)"', instruction.attributes)
    return match[1] if match else None


def _moved_nbytes(
    computations: Mapping[str, _Computation],
    computation: _Computation,
    instruction: _Instruction,
) -> int:
    opcode = instruction.opcode
    if opcode == "fusion":
        return _moved_by_fusion(computations[instruction.called("calls")])
    if opcode in ("dynamic-slice", "slice"):
        return 2 * instruction.nbytes
    if opcode == "dynamic-update-slice":
        return 2 * computation[instruction.operands[1]].nbytes
    read = sum(computation[name].nbytes for name in instruction.operands)
    target = _target(instruction)
    # What libraries give besides is their scratch memory.
    scratch = r"u8\[\d+\](\{0\})?" if target and target.startswith("__cu") else r"$^"
    return read + _nbytes(re.sub(scratch, "", instruction.shape))


def _moved_by_fusion(fused: _Computation) -> int:
    readers: collections.defaultdict[str, list[_Instruction]] = collections.defaultdict(
        list
    )
    for instruction in fused.values():
        for operand in dict.fromkeys(instruction.operands):
            readers[operand].append(instruction)
    parameters = (i for i in fused.values() if i.opcode == "parameter")
    read = sum(min(i.nbytes, _read_nbytes(fused, readers, i)) for i in parameters)
    root = next(i for i in fused.values() if i.is_root)
    return read + _written_nbytes(fused, root)


def _read_nbytes(
    fused: _Computation,
    readers: Mapping[str, list[_Instruction]],
    value: _Instruction,
) -> int:
    """Returns how much of a value is read: not all, if only slices of it are."""
    total = 0
    for reader in readers[value.name]:
        is_first = reader.operands[0] == value.name
        if reader.opcode == "bitcast":
            total += _read_nbytes(fused, readers, reader)
        elif reader.opcode in ("slice", "dynamic-slice") and is_first:
            total += reader.nbytes
        elif reader.opcode == "dynamic-update-slice" and is_first:
            continue
        else:
            return value.nbytes
    return total


def _written_nbytes(fused: _Computation, value: _Instruction) -> int:
    """Returns how much of a result is written: not all, if a slice of it is put in."""
    if value.opcode == "tuple":
        return sum(_written_nbytes(fused, fused[name]) for name in value.operands)
    if value.opcode == "bitcast":
        return _written_nbytes(fused, fused[value.operands[0]])
    if value.opcode == "dynamic-update-slice":
        return fused[value.operands[1]].nbytes
    return value.nbytes
