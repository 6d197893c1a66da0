"""Importance of residuals as dafjax finds it, against the variance it stands for.

The variance is measured as GACT does (Liu et al. 2022): one residual at a time has 1
bit, all others are exact, and the gradient is computed anew, several times.

Example:
    python -m benchmarks.importance
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, final

import jax
import jax.numpy as jnp
import rich.table
import scipy.stats
import tyro

from benchmarks.environment import RESULTS, describe_environment, write_result
from benchmarks.methods import make_method
from benchmarks.tables import make_console, make_table
from benchmarks.training import Workload
from benchmarks.transformers import Shape
from dafjax import Bits
from dafjax._passes.pipeline import Context, run_passes
from dafjax._plan.plan import Kept, ProgramPlan
from dafjax._plan.planner import make_plan
from dafjax._sensitivity.importance import Sensitivities
from dafjax._sensitivity.moments import moments_of_rows, sample_rows
from dafjax._trace.equation import Constant, evaluate
from dafjax._trace.residuals import differentiate
from dafjax._trace.tracing import trace
from dafjax.codecs import Affine
from dafjax.codecs._affine import sample_rounding_noise
from dafjax.policies import CompressExpensive


Record = dict[str, Any]
ArrayTree = Any


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line."""

    models: tuple[Literal["resnet18", "gpt2"], ...] = ("resnet18", "gpt2")
    """What is differentiated."""
    resnet_width: int = 16
    """Filters of the first stage."""
    resnet_batch: int = 32
    """Images."""
    gpt2_layers: int = 4
    """Blocks."""
    gpt2_width: int = 128
    """Channels of the residual stream."""
    gpt2_length: int = 128
    """Tokens of each of four sequences."""
    seeds: int = 3
    """Gradients for each residual."""
    out: pathlib.Path = RESULTS / "importance.json"
    """The file to write."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = tyro.cli(
        Options,
        args=arguments,
        description=__doc__,
        prog="python -m benchmarks.importance",
    )
    console = make_console()
    environment = describe_environment()
    result: Record = {"options": dataclasses.asdict(options), "models": {}}
    for name in options.models:
        record = _compare(Gradient.of(*_MODELS[name](options)), options.seeds)
        result["models"][name] = record
        console.print(_table(name, record))
    write_result(options.out, environment, result)
    console.print(f"Written to {options.out}.", markup=False)


@final
@dataclasses.dataclass(frozen=True)
class Gradient:
    """A gradient as a function of what is kept for it.

    Attributes:
        plan: What is kept.
        arguments: The arguments of the loss.
    """

    plan: ProgramPlan
    arguments: Sequence[jax.Array]

    @classmethod
    def of(
        cls, loss: Callable[..., jax.Array], trained: ArrayTree, *rest: ArrayTree
    ) -> "Gradient":
        """Plans the gradient of a loss by its first argument."""
        leaves, structure = jax.tree.flatten((trained, *rest))
        closed, consts, _ = trace(lambda *x: loss(*structure.unflatten(x)), leaves)
        count = len(jax.tree.leaves(trained))
        perturbed = [
            len(consts) <= number < len(consts) + count
            for number in range(len(closed.in_avals))
        ]
        policy = CompressExpensive()
        program = run_passes(differentiate(closed, perturbed), Context(policy))
        plan = make_plan(program, policy=policy, bits=Bits())
        return cls(plan, [*consts, *leaves])

    @property
    def sites(self) -> list[Kept]:
        """What is kept in codes that are not exact."""
        return [kept for kept in self.plan.kept if isinstance(kept.codec, Affine)]

    @functools.cached_property
    def kept(self) -> dict[int, jax.Array]:
        """What is kept, exact."""
        program = self.plan.program

        @jax.jit
        def run(arguments: Sequence[jax.Array]) -> dict[int, jax.Array]:
            env = dict(enumerate(arguments))
            for eqn in program.forward:
                env.update(zip(eqn.outputs, _run(eqn, env), strict=True))
            return {kept.value: env[kept.value] for kept in self.plan.kept}

        return run(self.arguments)

    def values(self, kept: Mapping[int, jax.Array]) -> dict[int, jax.Array]:
        """Returns all values of the backward pass; can be traced."""
        program = self.plan.program
        env = {**dict(enumerate(self.arguments)), **kept}
        for value in sorted(self.plan.recomputed):
            self._restore(value, env)
        for value in program.cotangents:
            aval = program.avals[value]
            env[value] = jnp.ones(aval.shape, aval.dtype)
        for eqn in program.backward:
            env.update(zip(eqn.outputs, _run(eqn, env), strict=True))
        return env

    def _restore(self, value: int, env: dict[int, jax.Array]) -> None:
        if value in env:
            return
        eqn = self.plan.recomputed[value]
        for operand in eqn.input_values:
            self._restore(operand, env)
        for made, result in zip(eqn.outputs, _run(eqn, env), strict=True):
            env.setdefault(made, result)

    @functools.cached_property
    def gradients(self) -> Callable[[Mapping[int, jax.Array]], list[jax.Array]]:
        """The gradients, from what is kept; compiled once."""
        wanted = [v for v in self.plan.program.gradients if isinstance(v, int)]

        @jax.jit
        def run(kept: Mapping[int, jax.Array]) -> list[jax.Array]:
            env = self.values(kept)
            return [env[value] for value in wanted]

        return run

    def measured_variance(self, site: Kept, *, seeds: int) -> float:
        """Returns the variance of the gradient if one site has 1 bit."""
        assert isinstance(site.codec, Affine)
        codec = dataclasses.replace(site.codec, bits=1)
        exact, total = self.gradients(self.kept), 0.0
        for seed in range(seeds):
            packed = codec.encode(self.kept[site.value], seed=seed)
            rounded = codec.decode(packed, site.like)
            got = self.gradients({**self.kept, site.value: rounded})
            total += sum(
                float(jnp.sum((a - b) ** 2)) for a, b in zip(got, exact, strict=True)
            )
        return total / seeds

    def estimated_variances(self) -> dict[int, float]:
        """Returns the same for all sites, from one backward pass."""
        noise = {
            site.value: sample_rounding_noise(site.codec, self.kept[site.value])
            for site in self.sites
            if isinstance(site.codec, Affine)
        }

        sensitivities = Sensitivities(self.plan, noise)

        @jax.jit
        def run(kept: Mapping[int, jax.Array]) -> jax.Array:
            env = self.values(kept)
            samples = [[sample_rows(env[value])] for value in sensitivities.measured]
            of_noise = jnp.stack([*noise.values()])
            return sensitivities(moments_of_rows(samples), of_noise)

        return {
            site.value: float(found) * self._squared_range(site)
            for site, found in zip(self.sites, run(self.kept), strict=True)
        }

    def _squared_range(self, site: Kept) -> float:
        assert isinstance(site.codec, Affine)
        packed = dataclasses.replace(site.codec, bits=1).encode(self.kept[site.value])
        return float(jnp.mean(packed.scale.astype(jnp.float32) ** 2))


def _run(eqn: Any, env: Mapping[int, jax.Array]) -> list[Any]:
    operands = [a.value if isinstance(a, Constant) else env[a] for a in eqn.inputs]
    return evaluate(eqn, operands)


def _resnet18(options: Options) -> tuple[Any, ...]:
    method = make_method("save_all", bits=2)
    workload = Workload(method, options.resnet_batch, options.resnet_width)
    loss = workload.loss
    return lambda params, *rest: loss(params, *rest)[0], *workload.arguments()


def _gpt2(options: Options) -> tuple[Any, ...]:
    workload = Shape(
        layers=options.gpt2_layers,
        width=options.gpt2_width,
        heads=4,
        vocabulary=500,
        length=options.gpt2_length,
    ).workload("save_all", batch=4, scan=False)
    return workload.loss, *workload.draw()


_MODELS = {"resnet18": _resnet18, "gpt2": _gpt2}


def _compare(gradient: Gradient, seeds: int) -> Record:
    estimated = gradient.estimated_variances()
    sites = [
        {
            "name": site.name,
            "primitive": site.primitive,
            "shape": site.shape,
            "measured": gradient.measured_variance(site, seeds=seeds),
            "estimated": estimated[site.value],
        }
        for site in gradient.sites
    ]
    correlation = scipy.stats.spearmanr(
        [site["measured"] for site in sites], [site["estimated"] for site in sites]
    )
    return {"rank_correlation": float(correlation.statistic), "sites": sites}


def _table(name: str, record: Record) -> rich.table.Table:
    return make_table(
        f"{name}: rank correlation {record['rank_correlation']:.3f}",
        left=("Residual", "Made by"),
        right=("Measured", "Estimated"),
        rows=[
            (
                site["name"],
                site["primitive"],
                f"{site['measured']:.3g}",
                f"{site['estimated']:.3g}",
            )
            for site in record["sites"]
        ],
    )


if __name__ == "__main__":
    main()
