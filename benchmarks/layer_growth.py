"""What one more layer of a GPT-2 adds to the compiled gradient, against the plan.

The plan says how many bytes a layer keeps; the program must need just these. Of LoRA
adapters alone: where all weights are trained, XLA lets codes wait in the memory that
the gradients of a loop's weights will take, and a layer adds a sixth of its plan.

Example:
    python -m benchmarks.layer_growth
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import rich.table
import tyro

import dafjax
from benchmarks.environment import RESULTS, describe_environment, write_result
from benchmarks.tables import make_console, make_table
from benchmarks.transformers import Shape, Workload
from models import memory


Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line."""

    layers: tuple[int, int] = (12, 24)
    """Fewer and more blocks; what a layer adds is the difference over their number."""
    width: int = 768
    """Channels of the residual stream."""
    heads: int = 12
    """Attention heads."""
    vocabulary: int = 5000
    """Tokens."""
    batch: int = 4
    """Sequences."""
    length: int = 256
    """Tokens of a sequence."""
    lora_rank: int = 8
    """Rank of the adapters, everything else frozen; 0: all weights are trained."""
    bits: tuple[int, ...] = (8, 4, 2)
    """Base bits."""
    scan: tuple[bool, ...] = (False, True)
    """Whether blocks are a Python loop, or one scan."""
    out: pathlib.Path = RESULTS / "layer_growth.json"
    """The file to write."""

    def workload(
        self, name: str, num_layers: int, *, bits: int, scan: bool
    ) -> Workload:
        """Returns the gradient of a method for so many layers."""
        return Shape(
            layers=num_layers,
            width=self.width,
            heads=self.heads,
            vocabulary=self.vocabulary,
            length=self.length,
            lora_rank=self.lora_rank,
            bits=bits,
        ).workload(name, batch=self.batch, scan=scan)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = tyro.cli(
        Options,
        args=arguments,
        description=__doc__,
        prog="python -m benchmarks.layer_growth",
    )
    console = make_console()
    environment = describe_environment()
    growth = [
        _growth(options, bits, scan) for scan in options.scan for bits in options.bits
    ]
    console.print(_table(growth))
    result = {"options": dataclasses.asdict(options), "growth": growth}
    write_result(options.out, environment, result)
    console.print(f"Written to {options.out}.", markup=False)


def _growth(options: Options, bits: int, scan: bool) -> Record:
    """Compiles two depths, plain and compressed, and compares with their plans."""
    compiled, plain, planned = [], [], []
    for num_layers in options.layers:
        workload = options.workload("compress", num_layers, bits=bits, scan=scan)
        compiled.append(memory.temp_nbytes(workload.compile()))
        planned.append(_planned_nbytes(workload))
        workload = options.workload("save_all", num_layers, bits=bits, scan=scan)
        plain.append(memory.temp_nbytes(workload.compile()))
    few, many = options.layers
    added, predicted, without = (
        (nbytes[1] - nbytes[0]) / (many - few) for nbytes in (compiled, planned, plain)
    )
    return {
        "blocks": "scan" if scan else "loop",
        "bits": bits,
        "added_nbytes": added,
        "planned_nbytes": predicted,
        "plain_nbytes": without,
        "added_over_planned": added / predicted,
    }


def _planned_nbytes(workload: Workload) -> int:
    """Returns the bytes that the plan keeps; runs nothing."""
    variables = jax.eval_shape(workload.init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((workload.batch, workload.length), "int32")
    trained, frozen = variables
    plan = dafjax.saved_residuals(
        lambda trained: workload.loss(trained, frozen, tokens), trained
    )
    return plan.stored_nbytes


def _table(records: Sequence[Record]) -> rich.table.Table:
    return make_table(
        "What a layer adds to the compiled gradient",
        left=("Blocks", "Bits"),
        right=("Added MB", "Planned MB", "Added / planned", "Plain MB"),
        rows=[
            (
                record["blocks"],
                str(record["bits"]),
                f"{record['added_nbytes'] / 1e6:.3f}",
                f"{record['planned_nbytes'] / 1e6:.3f}",
                f"{record['added_over_planned']:.3f}",
                f"{record['plain_nbytes'] / 1e6:.1f}",
            )
            for record in records
        ],
    )


if __name__ == "__main__":
    main()
