"""Rules that give bits to residuals, compared by the variance that comes of them.

All give bits to the residuals of a trained network within the same budget:

- *uniform*: the same bits for all; what is left over goes to the first residuals;
- *ActNN*: sensitivities from ranges and cotangents, analytic;
- *GACT*: sensitivities measured with one residual at a time in 1 bit;
- *dafjax*: importances that one backward pass tells of;
- *optimum*: an integer program, with variances measured with many gradients: the best
  that the model of variances can give, and no rule for practice.

Two figures are compared: what the model expects from the measured variances of single
residuals, and the variance that gradients with these bits really have.

Examples:
    python -m benchmarks.bit_allocation
    python -m benchmarks.bit_allocation --networks gpt2 --averages 2 --draws 4
"""

import collections
import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import rich.table
import tyro

from benchmarks import reference_allocators
from benchmarks.environment import RESULTS, describe_environment, write_result
from benchmarks.importance import Gradient
from benchmarks.pooled_gradient import PooledGradient, squared_norm
from benchmarks.small_networks import NetworkName, Point, Sizes, make_network
from benchmarks.tables import make_console, make_table
from dafjax.allocation import Site, allocate, distortion
from dafjax.stores import PagePool


Record = dict[str, Any]
Rule = Callable[[int], tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line."""

    networks: tuple[NetworkName, ...] = ("resnet18", "gpt2")
    """What is trained."""
    sizes: Sizes = Sizes()  # noqa: RUF009  (frozen)
    """How large they are."""
    steps: int = 60
    """Steps of training before bits are given out."""
    averages: tuple[float, ...] = (1.25, 1.5, 2.0, 3.0, 4.0)
    """Bits of an element, on average."""
    draws: int = 12
    """Gradients for each allocation."""
    oracle_draws: int = 4
    """Gradients for the variance of each residual alone."""
    learn: int = 16
    """Gradients that importances are learned from."""
    out: pathlib.Path = RESULTS / "bit_allocation.json"
    """The file to write."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = tyro.cli(
        Options,
        args=arguments,
        description=__doc__,
        prog="python -m benchmarks.bit_allocation",
    )
    console = make_console()
    environment = describe_environment()
    records = {}
    for name in options.networks:
        network = make_network(name, options.sizes)
        # Only the last step is kept.
        (point,) = collections.deque(network.train(0, options.steps), maxlen=1)
        with PagePool(name=f"bit_allocation {name}") as pool:
            gradient = PooledGradient(network.loss, pool)
            gradient(*point.arguments)
            records[name] = compare(network.loss, gradient, point, options)
        for figure in ("expected", "measured"):
            console.print(_table(name, records[name], figure, options))
    write_result(
        options.out,
        environment,
        {"options": dataclasses.asdict(options), "networks": records},
    )
    console.print(f"Written to {options.out}.", markup=False)


def compare(
    loss: Callable[..., Any], pooled: PooledGradient, point: Point, options: Options
) -> Record:
    """Compares all rules on one network."""
    exact = Gradient.of(lambda *arguments: loss(*arguments)[0], *point.arguments)
    sites = pooled.sites
    # The same plan, traced twice: only the fingerprints in the names differ.
    assert [s.num_elements for s in sites] == [s.like.size for s in exact.sites]
    sizes = [site.num_elements for site in sites]
    energy = float(squared_norm(point.gradient))
    oracle = [
        exact.measured_variance(site, seeds=options.oracle_draws)
        for site in exact.sites
    ]
    sensitivities = {
        "ActNN": _actnn(exact),
        "GACT": _gact(pooled, point),
        "dafjax": pooled.measured_importances(point.arguments, options.learn),
        "optimum": oracle,
    }
    rules: dict[str, Rule] = {
        "uniform": lambda budget: reference_allocators.uniform(sizes, budget),
        "ActNN": lambda budget: reference_allocators.as_layers_before(
            sensitivities["ActNN"], sizes, budget
        ),
        "GACT": lambda budget: reference_allocators.descend(
            sensitivities["GACT"], sizes, budget
        ),
        "dafjax": lambda budget: _ours(sensitivities["dafjax"], sizes, budget),
        # The importances of the one and the allocation of the other tell what is lost
        # to which.
        "dafjax, variances known": lambda budget: _ours(oracle, sizes, budget),
        "optimum": lambda budget: reference_allocators.optimum(oracle, sizes, budget),
    }
    records = []
    for average in options.averages:
        budget = int(average * sum(sizes))
        for name, rule in rules.items():
            bits = rule(budget)
            taken = sum(n * b for n, b in zip(sizes, bits, strict=True))
            assert taken <= budget, (name, average)
            pooled.set_bits(bits)
            deviation = pooled.deviation(
                point.arguments, point.gradient, draws=options.draws
            )
            records.append(
                {
                    "rule": name,
                    "average_bits": average,
                    "reached_bits": taken / sum(sizes),
                    "bits": bits,
                    "expected": _expected(oracle, bits) / energy,
                    "measured": deviation.squared_error,
                    "measured_standard_error": deviation.standard_error,
                    "squared_bias": deviation.squared_bias,
                }
            )
    return {
        "gradient_energy": energy,
        "loss": point.loss,
        "sites": [
            {
                "name": site.name,
                "num_elements": site.num_elements,
                "use": site.use.name.lower(),
                **{rule: found[i] for rule, found in sensitivities.items()},
            }
            for i, site in enumerate(sites)
        ],
        "allocations": records,
    }


def _expected(costs: Sequence[float], bits: Sequence[int]) -> float:
    return sum(c * distortion(b) for c, b in zip(costs, bits, strict=True))


def _ours(costs: Sequence[float], sizes: Sequence[int], budget: int) -> tuple[int, ...]:
    pairs = zip(sizes, costs, strict=True)
    return allocate([Site(size, cost) for size, cost in pairs], budget)


def _actnn(exact: Gradient) -> list[Any]:
    found = reference_allocators.actnn_sensitivities(exact)
    return [found.get(site.value) for site in exact.sites]


def _gact(pooled: PooledGradient, point: Point) -> list[Any]:
    def draw(bits: Sequence[int]) -> Any:
        pooled.set_bits(bits)
        return jax.block_until_ready(pooled(*point.arguments)[1])

    def squared_distance(a: Any, b: Any) -> float:
        return float(squared_norm(jax.tree.map(jnp.subtract, a, b)))

    return reference_allocators.gact_sensitivities(
        draw, squared_distance, len(pooled.sites)
    )


def _table(
    name: str, record: Record, figure: str, options: Options
) -> rich.table.Table:
    of_rule = collections.defaultdict(list)
    for allocation in record["allocations"]:
        text = f"{allocation[figure]:.3g}"
        if figure == "measured":
            text += f" ±{allocation['measured_standard_error']:.2g}"
        of_rule[allocation["rule"]].append(text)
    return make_table(
        f"{name}: variance of the gradient / its squared norm, {figure}",
        left=("Rule",),
        right=tuple(f"{average:g} bits" for average in options.averages),
        rows=[(rule, *texts) for rule, texts in of_rule.items()],
    )


if __name__ == "__main__":
    main()
