"""Memory and time of a step with residuals in a page pool, against arrays.

With each store it keeps the same residuals with the same bits: gradients are equal, bit
for bit where the backward pass runs whole. Where it runs in parts, a pool adds up other
parts, and gradients are equal but for float rounding. A pool whose program also
measures how important residuals are, as where bits are allocated, keeps the same, too:
what that costs is measured against the pool without. A pool of what lasts leaves in
arrays what waits only while the step needs little memory.

Examples:
    python -m benchmarks.pool_step
    python -m benchmarks.pool_step --networks gpt2 --rounds 15 --clock cpu
    python -m benchmarks.pool_step --rounds 0 --rss 3
"""

import contextlib
import dataclasses
import functools
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, final

import jax
import rich.table
import tyro

import dafjax
from benchmarks import training
from benchmarks.environment import RESULTS, describe_environment, write_result
from benchmarks.harness import Check, Contender, Spread, Timing, compare
from benchmarks.methods import Method
from benchmarks.peak_rss import peak_rss_in_fresh_process
from benchmarks.tables import make_console, make_table
from benchmarks.transformers import Shape
from dafjax._plan.plan import record_plans, site_names
from dafjax.codecs import Affine
from dafjax.stores import AbstractStore, Arrays, PagePool
from models import memory


Network = Literal["resnet18", "gpt2"]
Record = dict[str, Any]
ArrayTree = Any

_ARRAYS, _POOL, _LASTING = "arrays", "pool", "pool, lasting only"
_MEASURING = "pool, measuring"
_POOLS: dict[str, Callable[..., PagePool]] = {
    _POOL: lambda name: PagePool(name=name),
    _LASTING: lambda name: PagePool(name=name, lasting_only=True),
    _MEASURING: lambda name: PagePool(name=name),
}
STORES: dict[str, Callable[..., AbstractStore]] = {
    _ARRAYS: lambda name: Arrays(),
    _POOL: _POOLS[_POOL],
    _LASTING: _POOLS[_LASTING],
    # Frees what the backward pass is done with.
    "pool, backward once": lambda name: PagePool(name=name, backward_once=True),
}
# Of the relative error to what the step with arrays gives. On a GPU products of float32
# are rounded to TF32, parts of them otherwise: 0.024 was seen. Codes with other noise
# are off by 0.2 and more.
_TOLERANCE = 1e-5
_TOLERANCE_ON_GPUS = 0.1
_CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line."""

    networks: tuple[Network, ...] = ("resnet18", "gpt2")
    """The training step of a ResNet-18, the gradient of a GPT-2."""
    images: tuple[int, ...] = (64, 256)
    """Images in a step of the ResNet-18; the first is timed."""
    sequences: int = 4
    """Sequences of the GPT-2."""
    length: int = 256
    """Tokens of a sequence."""
    layers: int = 12
    """Blocks of the GPT-2."""
    width: int = 64
    """Filters of the first stage of the ResNet-18; the GPT-2 has 12 times as many
    channels."""
    bits: int = 2
    """Bits of a code, in the pool as in arrays."""
    rounds: int = 9
    """Interleaved rounds; 0: no step is timed."""
    rss: int = 0
    """Processes that measure resident memory with each store; the median is shown."""
    clock: Literal["wall", "cpu"] = "wall"
    """cpu counts the processor time of this process, for a machine that is busy: it
    does not see waiting, be it for others or for threads."""
    out: pathlib.Path = RESULTS / "pool_step.json"
    """The file to write."""


@final
@dataclasses.dataclass(frozen=True)
class Step:
    """A step of one size, for both stores.

    Attributes:
        network: What is trained.
        size: What is in a step, as in tables.
        make: Compiles the step for a store; also returns a function that runs it.
    """

    network: Network
    size: str
    make: Callable[[AbstractStore], tuple[jax.stages.Compiled, Callable[[], ArrayTree]]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = tyro.cli(
        Options,
        args=arguments,
        description=__doc__,
        prog="python -m benchmarks.pool_step",
    )
    console = make_console()
    environment = describe_environment()
    records = []
    for network in options.networks:
        for i, step in enumerate(steps_of(network, options)):
            records.append(measure(step, options.rounds if i == 0 else 0, options))
    console.print(_memory_table(records))
    console.print(_time_table(records))
    console.print(_resident_table(records))
    write_result(
        options.out,
        environment,
        {"options": dataclasses.asdict(options), "steps": records},
    )
    console.print(f"Written to {options.out}.", markup=False)


def steps_of(network: Network, options: Options) -> list[Step]:
    """Returns the steps of a network that are measured."""
    if network == "resnet18":
        return [
            Step(
                network,
                f"{batch} images",
                functools.partial(_resnet_step, batch=batch, options=options),
            )
            for batch in options.images
        ]
    size = f"{options.sequences} x {options.length} tokens"
    return [Step(network, size, functools.partial(_gpt2_step, options=options))]


def measure(step: Step, rounds: int, options: Options) -> Record:
    """Measures memory, and in `rounds` rounds the time, of a step with each store."""
    with contextlib.ExitStack() as stack:
        # A name for each: what is compiled finds its pool by name.
        pools = {
            name: stack.enter_context(make(f"{step.network} {step.size}, {name}"))
            for name, make in _POOLS.items()
        }
        compiled, run = {}, {}
        for name, store in ((_ARRAYS, Arrays()), *pools.items()):
            if name != _MEASURING:
                compiled[name], run[name] = step.make(store)
        timings: dict[str, Timing] = {}
        if rounds > 0:
            measuring = pools[_MEASURING]
            compiled[_MEASURING], run[_MEASURING] = _make_measuring(step, measuring)
            contenders = {
                name: Contender(
                    run=take_step, checks={"equal": Check(_tolerance(name))}
                )
                for name, take_step in run.items()
            }
            timings = compare(
                contenders,
                baseline=_ARRAYS,
                rounds=rounds,
                clock=_CLOCKS[options.clock],
            )
            assert measuring.stats().expected_variance > 0
        else:
            for take_step in run.values():
                jax.block_until_ready(take_step())
        stats = {name: pools[name].stats() for name in (_POOL, _LASTING)}
    temp = {name: memory.temp_nbytes(program) for name, program in compiled.items()}
    return {
        "network": step.network,
        "size": step.size,
        "temp_nbytes": temp,
        "pool_peak_nbytes": {name: s.peak_nbytes for name, s in stats.items()},
        "pool_committed_nbytes": {
            name: s.peak_committed_nbytes for name, s in stats.items()
        },
        "memory_ratio": {
            name: (temp[name] + s.peak_committed_nbytes) / temp[_ARRAYS]
            for name, s in stats.items()
        },
        "time": {name: dataclasses.asdict(t) for name, t in timings.items()},
        "measuring_over_pool": _ratio_of_rounds(timings, _MEASURING, _POOL),
        "resident_added": {
            name: [_resident_added(step, name, options) for _ in range(options.rss)]
            for name in STORES
        },
    }


def _tolerance(name: str) -> float:
    if name == _ARRAYS:
        return 0.0
    return _TOLERANCE_ON_GPUS if jax.default_backend() == "gpu" else _TOLERANCE


def _make_measuring(
    step: Step, pool: PagePool
) -> tuple[jax.stages.Compiled, Callable[[], ArrayTree]]:
    """Compiles a step that measures importances; bits stay those of the codecs."""
    pool.target = dafjax.AverageBits(2)
    with record_plans() as recorder:
        made = step.make(pool)
    for plan in recorder.plans.values():
        for kept, site in zip(plan.kept, site_names(plan), strict=True):
            if isinstance(kept.codec, Affine):
                pool.set_bits(site, kept.codec.bits)
    return made


def _ratio_of_rounds(timings: dict[str, Timing], name: str, to: str) -> Record | None:
    """Returns the ratio of two contenders' times, computed within each round."""
    if not timings:
        return None
    pairs = zip(timings[name].samples, timings[to].samples, strict=True)
    return dataclasses.asdict(Spread.of([a / b for a, b in pairs]))


def _resident_added(step: Step, store: str, options: Options) -> int:
    """Measures the resident memory that a step adds, in a fresh process."""
    measured = peak_rss_in_fresh_process(
        _make_step, step.network, step.size, store, options
    )
    return measured.added


def _make_step(
    network: Network, size: str, name: str, options: Options
) -> tuple[jax.stages.Compiled, Callable[[], ArrayTree]]:
    store = STORES[name]("measured")
    (make,) = [s.make for s in steps_of(network, options) if s.size == size]
    compiled, take_step = make(store)

    def take_step_with_pool() -> ArrayTree:
        # A pool must live as long as the program that uses it.
        assert store is not None
        return take_step()

    return compiled, take_step_with_pool


def _method(store: AbstractStore, options: Options) -> Method:
    return Method(
        f"{type(store).__name__}, {options.bits} bits",
        wrap_loss=functools.partial(
            dafjax.remat_compress, bits=options.bits, store=store
        ),
    )


def _resnet_step(
    store: AbstractStore, *, batch: int, options: Options
) -> tuple[jax.stages.Compiled, Callable[[], ArrayTree]]:
    workload = training.Workload(_method(store, options), batch, options.width)
    compiled = workload.compile()
    return compiled, workload.stepper(compiled)


def _gpt2_step(
    store: AbstractStore, *, options: Options
) -> tuple[jax.stages.Compiled, Callable[[], ArrayTree]]:
    shape = Shape(
        layers=options.layers, width=12 * options.width, length=options.length
    )
    workload = dataclasses.replace(
        shape.workload("compress", batch=options.sequences, scan=False),
        method=_method(store, options),
    )
    compiled = workload.compile()
    arguments = workload.draw()
    return compiled, lambda: compiled(*arguments)


def _memory_table(records: Sequence[Record]) -> rich.table.Table:
    return make_table(
        "Memory of a step",
        left=("Network", "Size", "Store"),
        right=("Temp MB", "Pool MB", "Temp + pool / arrays"),
        rows=[
            (record["network"], record["size"], name, *_memory_of(record, name))
            for record in records
            for name in (_ARRAYS, _POOL, _LASTING)
        ],
    )


def _memory_of(record: Record, name: str) -> tuple[str, str, str]:
    temp = _megabytes(record["temp_nbytes"][name])
    if name == _ARRAYS:
        return temp, "", "1"
    committed = _megabytes(record["pool_committed_nbytes"][name])
    return temp, committed, f"{record['memory_ratio'][name]:.3f}"


def _time_table(records: Sequence[Record]) -> rich.table.Table:
    return make_table(
        "Time of a step",
        left=("Network", "Size"),
        right=(
            "Arrays: seconds",
            "Pool: s",
            "Pool / arrays",
            "Lasting only / arrays",
            "Measuring / pool",
        ),
        rows=[
            (
                record["network"],
                record["size"],
                _spread(record["time"][_ARRAYS]["seconds"]),
                _spread(record["time"][_POOL]["seconds"]),
                _spread(record["time"][_POOL]["ratio"]),
                _spread(record["time"][_LASTING]["ratio"]),
                _spread(record["measuring_over_pool"]),
            )
            for record in records
            if record["time"]
        ],
    )


def _resident_table(records: Sequence[Record]) -> rich.table.Table:
    return make_table(
        "Resident memory that steps add, MB",
        left=("Network", "Size"),
        right=tuple(STORES),
        rows=[
            (
                record["network"],
                record["size"],
                *(
                    _megabytes(statistics.median(record["resident_added"][name]))
                    for name in STORES
                ),
            )
            for record in records
            if any(record["resident_added"].values())
        ],
    )


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f}"


def _spread(spread: Record) -> str:
    return f"{spread['median']:.3f} ±{spread['mad']:.3f}"


if __name__ == "__main__":
    main()
