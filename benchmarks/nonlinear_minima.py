"""What a least number of bits is worth where residuals enter gradients nonlinearly.

On a small, trained GPT-2, bits are allocated for an average by importances that the
backward pass measures, with minima for the residuals that enter nonlinearly and for
those that an exponential is taken of (*amplified*). Of the gradient with these bits two
figures count: the error of one step, which averages out over steps, and the bias, which
does not. With 4 heads the probabilities of attention are kept; with 16 they are more
than queries and keys, from which they are recomputed instead, by an exponential.

Examples:
    python -m benchmarks.nonlinear_minima
    python -m benchmarks.nonlinear_minima --averages 2 --draws 8
"""

import collections
import dataclasses
import itertools
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import rich.table
import tyro

from benchmarks.environment import RESULTS, describe_environment, write_result
from benchmarks.pooled_gradient import PooledGradient
from benchmarks.small_networks import NetworkName, Sizes, make_network
from benchmarks.tables import make_console, make_table
from dafjax._bits import Use
from dafjax.allocation import Site, allocate, num_bits
from dafjax.stores import PagePool


Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line."""

    network: NetworkName = "gpt2"
    """What is trained."""
    sizes: Sizes = Sizes(gpt2_width=256, gpt2_length=256, gpt2_batch=2)  # noqa: RUF009
    """How large it is."""
    heads: tuple[int, ...] = (4, 16)
    """Attention heads; each number is a network of its own."""
    steps: int = 150
    """Steps of training before gradients are compared."""
    averages: tuple[float, ...] = (1.5, 2.0, 3.0)
    """Bits of an element, on average."""
    nonlinear: tuple[int, ...] = (1, 2, 4)
    """Minima of residuals that enter nonlinearly."""
    amplified: tuple[int, ...] = (1, 2, 4, 8)
    """Minima of residuals that an exponential is taken of."""
    draws: int = 48
    """Gradients for each choice of bits."""
    learn: int = 16
    """Gradients that importances are learned from."""
    out: pathlib.Path = RESULTS / "nonlinear_minima.json"
    """The file to write."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = tyro.cli(
        Options,
        args=arguments,
        description=__doc__,
        prog="python -m benchmarks.nonlinear_minima",
    )
    console = make_console()
    environment = describe_environment()
    results = []
    for heads in options.heads:
        results.append(measure(heads, options))
        console.print(_table(results[-1]))
        console.print(_sites_table(results[-1]["sites"]))
    write_result(
        options.out,
        environment,
        {"options": dataclasses.asdict(options), "networks": results},
    )
    console.print(f"Written to {options.out}.", markup=False)


def measure(heads: int, options: Options) -> Record:
    """Measures error and bias for all averages and minima."""
    sizes = dataclasses.replace(options.sizes, gpt2_heads=heads)
    network = make_network(options.network, sizes)
    # Only the last step is kept.
    (point,) = collections.deque(network.train(0, options.steps), maxlen=1)
    with PagePool(name=f"nonlinear_minima, {heads} heads") as pool:
        gradient = PooledGradient(network.loss, pool)
        gradient(*point.arguments)
        learned = gradient.measured_importances(point.arguments, options.learn)
        found = list(zip(gradient.sites, learned, strict=True))
        records: list[Record] = []
        measured: dict[tuple[int, ...], Record] = {}
        for average, nonlinear, amplified in itertools.product(
            options.averages, options.nonlinear, options.amplified
        ):
            minima = {Use.LINEAR: 1, Use.AMPLIFIED: amplified}
            minima |= dict.fromkeys((Use.SMOOTH, Use.NONLINEAR), nonlinear)
            sites = [
                Site(site.num_elements, importance, minimum=minima[site.use])
                for site, importance in found
            ]
            elements = sum(site.num_elements for site in sites)
            bits = allocate(sites, int(average * elements))
            if bits not in measured:
                gradient.set_bits(bits)
                measured[bits] = dataclasses.asdict(
                    gradient.deviation(
                        point.arguments, point.gradient, draws=options.draws
                    )
                )
            records.append(
                {
                    "average_bits": average,
                    "nonlinear": nonlinear,
                    "amplified": amplified,
                    "bits": bits,
                    "reached_bits": num_bits(sites, bits) / elements,
                    "minima_fit": all(
                        b >= s.minimum for s, b in zip(sites, bits, strict=True)
                    ),
                    **measured[bits],
                }
            )
    return {
        "heads": heads,
        "loss": point.loss,
        "sites": [
            {
                "name": site.name,
                "num_elements": site.num_elements,
                "use": site.use.name.lower(),
                "importance": importance,
            }
            for site, importance in found
        ],
        "records": records,
    }


def bias(record: Record) -> float:
    """Returns the norm of the bias over that of the gradient; with its noise, 0."""
    return math.sqrt(max(0.0, record["squared_bias"]))


def _table(result: Record) -> rich.table.Table:
    # Minima that lead to the same bits share a row.
    rows: dict[tuple[Any, ...], list[Record]] = collections.defaultdict(list)
    for record in result["records"]:
        rows[record["average_bits"], *record["bits"]].append(record)
    return make_table(
        f"{result['heads']} heads, loss {result['loss']:.2f}: error of the gradient / "
        "its norm",
        left=("Average", "Nonlinear >=", "Amplified >="),
        right=("Reached", "Error", "Bias", "Error of 10 steps", "of 100 steps", "Fit"),
        rows=[
            (
                f"{record['average_bits']:g}",
                _minima(records, "nonlinear"),
                _minima(records, "amplified"),
                f"{record['reached_bits']:.2f}",
                f"{_error_of(record, 1):.3f}",
                f"{bias(record):.3f}",
                f"{_error_of(record, 10):.3f}",
                f"{_error_of(record, 100):.3f}",
                "yes" if record["minima_fit"] else "no",
            )
            for records in rows.values()
            for record in records[:1]
        ],
    )


def _minima(records: Sequence[Record], use: str) -> str:
    return ", ".join(str(n) for n in sorted({record[use] for record in records}))


def _error_of(record: Record, steps: int) -> float:
    """Returns the error of the mean of so many gradients: bias stays."""
    squared_bias = max(0.0, record["squared_bias"])
    noise = max(0.0, record["squared_error"] - squared_bias)
    return math.sqrt(squared_bias + noise / steps)


def _sites_table(sites: Sequence[Record]) -> rich.table.Table:
    return make_table(
        "Residuals",
        left=("Residual", "Use"),
        right=("Elements", "Importance"),
        rows=[
            (
                # Without the fingerprint of the program.
                site["name"].partition(" @")[0],
                site["use"],
                str(site["num_elements"]),
                f"{site['importance']:.3g}",
            )
            for site in sites
        ],
    )


if __name__ == "__main__":
    main()
