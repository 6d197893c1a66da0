"""Noise of gradients, array by array, over a zoo of networks that nobody tuned for.

The noise of a parameter array is the norm of the compressed gradient less the exact
one, over the norm of the exact one. Arrays whose gradient is zero up to rounding are
left out. The column `mean` has the same of the mean over all seeds, which shrinks with
the square root of their number as long as the gradient has no bias.

Examples:
    python -m benchmarks.gradient_noise
    python -m benchmarks.gradient_noise --networks 'layer_*' --bits 8
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import dafjax
from benchmarks.environment import RESULTS, describe_environment, write_result
from benchmarks.tables import make_console, make_table
from benchmarks.zoo import MISSING, NETWORKS, SCALED, Network, chosen
from dafjax._assess import array_noise


Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line."""

    networks: tuple[str, ...] = ("*",)
    """Patterns of names."""
    bits: tuple[int, ...] = (2, 8)
    """Bits of the codes."""
    seeds: int = 16
    """Seeds of the rounding noise."""
    worst: int = 0
    """So many of the noisiest arrays of each network are printed."""
    out: pathlib.Path = RESULTS / "gradient_noise.json"
    """The file to write."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = tyro.cli(
        Options,
        args=arguments,
        description=__doc__,
        prog="python -m benchmarks.gradient_noise",
    )
    environment = describe_environment()
    console = make_console()
    for name, package in MISSING.items():
        console.print(f"left out: {name}, as {package} is not installed")
    records = []
    for name, network in chosen(options.networks, {**NETWORKS, **SCALED}):
        for bits in options.bits:
            record = {"network": name, **measure(network, bits, options.seeds)}
            records.append(record)
            console.print(_row(record), highlight=False)
            arrays = sorted(
                record["arrays"].items(), key=lambda item: -item[1]["noise"]
            )
            for path, array in arrays[: options.worst]:
                console.print(f"    {path}: {array}", highlight=False)
    columns = ("bits", "median", "95 %", "worst", "mean: median", "95 %")
    console.print(
        make_table(
            "Noise over norm, by parameter array",
            left=("network",),
            right=columns,
            rows=[_row(record).split() for record in records],
        )
    )
    write_result(options.out, environment, {"networks": records})


def measure(network: Network, bits: int, num_seeds: int) -> Record:
    """Returns the noise of a network's gradient at some bits.

    Args:
        network: The network.
        bits: Bits of the codes.
        num_seeds: Seeds of the rounding noise.
    """
    exact = leaves_by_path(
        jax.jit(jax.grad(network.loss))(network.params, *network.batch)
    )

    @jax.jit
    def compressed(seed: jax.Array, params: Any, *batch: jax.Array) -> Any:
        loss = dafjax.remat_compress(network.loss, bits=bits, seed=seed)
        return jax.grad(loss)(params, *batch)

    draws = [
        leaves_by_path(compressed(jnp.uint32(seed), network.params, *network.batch))
        for seed in range(num_seeds)
    ]
    mean = {path: np.mean([draw[path] for draw in draws], 0) for path in exact}
    of_mean = array_noise(exact, [mean])
    arrays = {
        path: {"noise": array.noise, "of_mean": of_mean[path].noise}
        for path, array in array_noise(exact, draws).items()
    }
    return {"bits": bits, "seeds": num_seeds, "arrays": arrays}


def leaves_by_path(gradient: Any) -> dict[str, np.ndarray]:
    """Returns the arrays of a gradient in float64, by path."""
    pairs = jax.tree_util.tree_leaves_with_path(gradient)
    return {jax.tree_util.keystr(path): np.asarray(x, np.float64) for path, x in pairs}


def _row(record: Record) -> str:
    noise = [array["noise"] for array in record["arrays"].values()]
    of_mean = [array["of_mean"] for array in record["arrays"].values()]
    figures = [
        *np.percentile(noise, (50, 95, 100)),
        *np.percentile(of_mean, (50, 95)),
    ]
    cells = [record["network"], str(record["bits"]), *(f"{x:.4f}" for x in figures)]
    return "  ".join(cells)


if __name__ == "__main__":
    main()
