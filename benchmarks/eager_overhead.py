"""Time of eager calls, without `jax.jit`: dafjax against `jax.checkpoint`.

Networks are small, so that what is timed is the way to the compiled programs, not the
programs: a call, and a gradient, of a function that is traced already.

Examples:
    python -m benchmarks.eager_overhead
    python -m benchmarks.eager_overhead --rounds 101
"""

import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import tyro

import dafjax
from benchmarks.environment import RESULTS, describe_environment, write_result
from benchmarks.harness import Check, Contender, Timing, compare
from benchmarks.tables import make_console, make_table


_MOST = 1.5
_BASELINE = "jax.checkpoint"

# Of 2 bits, and of programs that XLA fuses differently.
_TOLERANCE = {"call": 1e-4, "gradient": 2.0}

ArrayTree = Any
Loss = Callable[[ArrayTree, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line."""

    width: int = 64
    """Channels."""
    rows: int = 64
    """Rows of the input."""
    layers: tuple[int, ...] = (2, 8)
    """Layers of the networks."""
    rounds: int = 51
    """Interleaved rounds."""
    out: pathlib.Path = RESULTS / "eager_overhead.json"
    """The file to write."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = tyro.cli(
        Options,
        args=arguments,
        description=__doc__,
        prog="python -m benchmarks.eager_overhead",
    )
    console = make_console()
    environment = describe_environment()
    timings = {
        (layers, what): _time(options, layers, what)
        for layers in options.layers
        for what in _TOLERANCE
    }
    console.print(
        make_table(
            f"Eager calls, {options.rounds} rounds",
            left=("Layers", "What", "Method"),
            right=("Milliseconds", "This / jax.checkpoint", f"<= {_MOST}"),
            rows=[
                (
                    str(layers),
                    what,
                    name,
                    f"{1e3 * timing.seconds.median:.2f}",
                    str(timing.ratio),
                    "" if name == _BASELINE else _gate(timing),
                )
                for (layers, what), both in timings.items()
                for name, timing in both.items()
            ],
        )
    )
    records = [
        {
            "layers": layers,
            "what": what,
            "timings": {k: dataclasses.asdict(v) for k, v in both.items()},
            "gate": _gate(both["dafjax"]),
        }
        for (layers, what), both in timings.items()
    ]
    result = {"options": dataclasses.asdict(options), "calls": records}
    write_result(options.out, environment, result)
    console.print(f"Written to {options.out}.", markup=False)


def _time(options: Options, layers: int, what: str) -> dict[str, Timing]:
    keys = jax.random.split(jax.random.key(0), layers + 1)
    shape = (options.width, options.width)
    params = [jax.random.normal(key, shape) / options.width**0.5 for key in keys[1:]]
    x = jax.random.normal(keys[0], (options.rows, options.width))
    # Small arrays are packed too: without packing there is no overhead to measure.
    policy = dafjax.policies.CompressExpensive(min_nbytes=0)
    wrapped = {
        _BASELINE: jax.checkpoint(_loss),
        "dafjax": dafjax.remat_compress(_loss, policy=policy),
    }
    check = {what: Check(_TOLERANCE[what])}
    return compare(
        {
            name: Contender(
                functools.partial(
                    loss if what == "call" else jax.grad(loss), params, x
                ),
                check,
            )
            for name, loss in wrapped.items()
        },
        baseline=_BASELINE,
        rounds=options.rounds,
        clock=time.perf_counter,
    )


def _loss(params: ArrayTree, x: jax.Array) -> jax.Array:
    for w in params:
        x = x + jnp.tanh(x @ w)
    return jnp.mean(x**2)


def _gate(timing: Timing) -> str:
    return "PASS" if timing.ratio.median <= _MOST else "FAIL"


if __name__ == "__main__":
    main()
