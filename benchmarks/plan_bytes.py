"""Bytes that plans keep, against the fewest possible, and the time that planning takes.

The plan of dafjax is made by rules in one pass over the program. How far it is from the
best is told by a minimum cut of the same program with the same codes
(`benchmarks/minimum_cut.py`), a bound that heeds neither noise nor long chains.

Examples:
    python -m benchmarks.plan_bytes
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro

from benchmarks.environment import RESULTS, describe_environment, write_result
from benchmarks.methods import make_method
from benchmarks.minimum_cut import minimum_cut_nbytes
from benchmarks.tables import make_console, make_table
from benchmarks.training import Workload
from dafjax import Bits
from dafjax._passes.pipeline import Context, run_passes
from dafjax._plan.planner import make_plan
from dafjax._trace.residuals import Program, differentiate
from dafjax.codecs import Affine
from dafjax.policies import CompressExpensive
from models.gpt2 import GPT2, GPT2Config


ArrayTree = Any
Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line."""

    layers: tuple[int, ...] = (12, 24)
    """Blocks of the GPT-2s."""
    batch: int = 64
    """Images of the ResNet."""
    bits: int = 2
    """Bits of the codes."""
    out: pathlib.Path = RESULTS / "plan_bytes.json"
    """The file to write."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = tyro.cli(
        Options,
        args=arguments,
        description=__doc__,
        prog="python -m benchmarks.plan_bytes",
    )
    environment = describe_environment()
    programs: dict[str, Callable[[], Program]] = {
        f"ResNet-18, batch {options.batch}": lambda: _resnet(options.batch)
    }
    for layers in options.layers:
        programs[f"GPT-2, {layers} layers"] = lambda layers=layers: _gpt2(layers)
    records = [measure(name, make, options.bits) for name, make in programs.items()]
    console = make_console()
    console.print(_table(records))
    result = {"options": dataclasses.asdict(options), "plans": records}
    write_result(options.out, environment, result)
    console.print(f"Written to {options.out}.", markup=False)


def measure(name: str, make: Callable[[], Program], bits: int) -> Record:
    """Compares the plan of a program with a minimum cut."""
    began = time.perf_counter()
    program = make()
    differentiated = time.perf_counter()
    policy = CompressExpensive()
    plan = make_plan(program, policy=policy, bits=Bits(bits))
    planned = time.perf_counter()
    even = make_plan(program, policy=policy, bits=Bits(bits, nonlinear=bits))
    cut_nbytes = minimum_cut_nbytes(
        program, Affine(bits=bits), min_nbytes=policy.min_nbytes
    )
    nbytes = sum(item.stored_nbytes for item in plan.kept)
    even_nbytes = sum(item.stored_nbytes for item in even.kept)
    return {
        "model": name,
        "equations": len(program.forward) + len(program.backward),
        "trace_seconds": differentiated - began,
        "plan_seconds": planned - differentiated,
        "cut_nbytes": cut_nbytes,
        "even_nbytes": even_nbytes,
        "even_over_cut": even_nbytes / cut_nbytes,
        "nbytes": nbytes,
    }


def _table(records: Sequence[Mapping[str, Any]]) -> Any:
    return make_table(
        "Kept bytes by plan",
        left=("Model",),
        right=(
            *("Equations", "Trace s", "Plan s", "Cut MB", "Plan MB", "Plan / cut"),
            "By use MB",
        ),
        rows=[
            (
                record["model"],
                str(record["equations"]),
                f"{record['trace_seconds']:.2f}",
                f"{record['plan_seconds']:.2f}",
                f"{record['cut_nbytes'] / 1e6:.2f}",
                f"{record['even_nbytes'] / 1e6:.2f}",
                f"{record['even_over_cut']:.3f}",
                f"{record['nbytes'] / 1e6:.2f}",
            )
            for record in records
        ],
    )


def _resnet(batch: int) -> Program:
    workload = Workload(make_method("save_all", bits=2), batch)
    params, *data = workload.abstract_arguments()
    loss = workload.loss
    return _differentiate(lambda *operands: loss(*operands)[0], params, *data)


def _gpt2(layers: int) -> Program:
    model = GPT2(GPT2Config(num_layers=layers, vocabulary=5000))
    tokens = jax.ShapeDtypeStruct((4, 257), jnp.int32)
    inputs = jax.ShapeDtypeStruct((4, 256), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), inputs)

    def loss(params: ArrayTree, tokens: jax.Array) -> jax.Array:
        logits = model.apply(params, tokens[:, :-1])
        return jnp.mean(
            optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        )

    return _differentiate(loss, params, tokens)


def _differentiate(
    loss: Callable[..., jax.Array], params: ArrayTree, *data: ArrayTree
) -> Program:
    leaves, structure = jax.tree.flatten((params, *data))

    def flat(*leaves: jax.Array) -> jax.Array:
        return loss(*jax.tree.unflatten(structure, leaves))

    num_params = len(jax.tree.leaves(params))
    program = differentiate(
        jax.make_jaxpr(flat)(*leaves), [n < num_params for n in range(len(leaves))]
    )
    return run_passes(program, Context(CompressExpensive()))


if __name__ == "__main__":
    main()
