"""Memory and time of the gradient of a transformer: method x scheduler, loop and scan.

A GPT-2 learns to predict the next token, a RoBERTa to classify sequences, with dropout
and a padding mask; both are measured with their embeddings and heads. Parameters are
neither donated nor updated: gradients are results, so that temp is what the passes need
besides. With `--lora-rank` only the adapters are differentiated, and RoBERTa's head.

Examples:
    python -m benchmarks.transformer_memory
    python -m benchmarks.transformer_memory --scan True --time --rss
    python -m benchmarks.transformer_memory --layers 24 --width 1024 --heads 16
        --batch 2 --length 512 --lora-rank 8 --out benchmarks/results/lora_memory.json
    python -m benchmarks.transformer_memory --model roberta --vocabulary 50265
        --batch 8 --length 128 --lora-rank 8
        --out benchmarks/results/roberta_memory.json
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, final

import jax
import jax.numpy as jnp
import optax
import rich.table
import tyro

from benchmarks.environment import RESULTS, describe_environment, write_result
from benchmarks.harness import Check, Contender, Timing, compare, projection_error
from benchmarks.methods import BASELINE, METHODS, Method, make_method
from benchmarks.peak_rss import peak_rss_in_fresh_process
from benchmarks.tables import (
    make_console,
    make_rss_table,
    make_table,
    make_time_table,
)
from benchmarks.training import SCHEDULERS
from models import lora, losses, memory
from models.gpt2 import GPT2, GPT2Config, next_token_loss
from models.roberta import Roberta, RobertaConfig


_LOSS_TOLERANCE = 1e-4

ArrayTree = Any
Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line."""

    model: Literal["gpt2", "roberta"] = "gpt2"
    """The architecture."""
    layers: int = 12
    """Blocks."""
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
    chunk: int = 0
    """Positions whose logits GPT-2's loss makes at a time; 0: all logits at once."""
    lora_rank: int = 0
    """Rank of the adapters, everything else frozen; 0: all weights are trained."""
    scan: tuple[bool, ...] = (False, True)
    """Whether blocks are a Python loop, or one scan; --time and --rss use the first."""
    bits: int = 2
    """Bits of the compressing methods."""
    methods: tuple[str, ...] = tuple(METHODS)
    """Files of benchmarks/methods; the first is what ratios are to."""
    time: bool = False
    """Also measure the time of a gradient."""
    rounds: int = 5
    """Rounds of --time."""
    rss: bool = False
    """Also measure resident memory, in a fresh process for each method."""
    out: pathlib.Path = RESULTS / "transformer_memory.json"
    """The file to write."""

    def workload(self, name: str, scan: bool) -> "Workload":
        """Returns the gradient of the method `name`."""
        make_config = GPT2Config if self.model == "gpt2" else RobertaConfig
        config = make_config(
            num_layers=self.layers,
            width=self.width,
            num_heads=self.heads,
            vocabulary=self.vocabulary,
            scan_layers=scan,
            lora_rank=self.lora_rank,
        )
        method = make_method(name, bits=self.bits)
        return Workload(method, config, self.batch, self.length, self.chunk)


@final
@dataclasses.dataclass(frozen=True)
class Workload:
    """One method's loss and gradient."""

    method: Method
    config: GPT2Config | RobertaConfig
    batch: int
    length: int
    chunk: int = 0

    @property
    def loss(self) -> Callable[..., jax.Array]:
        """The mean loss, wrapped by the method.

        A function of the trained and the frozen variables, and of the batch.
        """
        if isinstance(self.config, RobertaConfig):
            return self.method.wrap_loss(self._classification)
        if self.chunk:
            return self.method.wrap_loss(self._chunked)
        return self.method.wrap_loss(self._next_token)

    def _next_token(
        self, trained: ArrayTree, frozen: ArrayTree, tokens: jax.Array
    ) -> jax.Array:
        model = GPT2(self.config, wrap_block=self.method.wrap_block)
        logits = model.apply(lora.merge(trained, frozen), tokens)
        return jnp.mean(
            optax.softmax_cross_entropy_with_integer_labels(
                logits[:, :-1], tokens[:, 1:]
            )
        )

    def _chunked(
        self, trained: ArrayTree, frozen: ArrayTree, tokens: jax.Array
    ) -> jax.Array:
        model = GPT2(self.config, wrap_block=self.method.wrap_block)
        variables = lora.merge(trained, frozen)
        return next_token_loss(model, variables, tokens, chunk=self.chunk)

    def _classification(
        self,
        trained: ArrayTree,
        frozen: ArrayTree,
        tokens: jax.Array,
        labels: jax.Array,
        key: jax.Array,
    ) -> jax.Array:
        model = Roberta(self.config, wrap_block=self.method.wrap_block)
        logits = model.apply(
            lora.merge(trained, frozen), tokens, train=True, rngs={"dropout": key}
        )
        return losses.sequence_loss(logits, labels)

    def init(self, key: jax.Array) -> tuple[ArrayTree, ArrayTree]:
        """Draws the trained and the frozen variables, equal for all methods."""
        tokens = jnp.zeros((1, 8), jnp.int32)
        if isinstance(self.config, RobertaConfig):
            variables = Roberta(self.config).init(key, tokens, train=False)
        else:
            variables = GPT2(self.config).init(key, tokens)
        return lora.split(variables, self.config.trained)

    def draw_batch(self) -> tuple[jax.Array, ...]:
        """Draws what the loss reads beside variables, equal for all methods."""
        shape = (self.batch, self.length)
        key = jax.random.key(1)
        if not isinstance(self.config, RobertaConfig):
            return (jax.random.randint(key, shape, 0, self.config.vocabulary),)
        tokens = jax.random.randint(key, shape, 3, self.config.vocabulary)
        # From half the length to all of it, as batches of real sequences have it.
        lengths = jnp.linspace(self.length // 2, self.length, self.batch).astype(int)
        is_there = jnp.arange(self.length) < lengths[:, None]
        tokens = jnp.where(is_there, tokens, self.config.padding)
        return tokens, jnp.arange(self.batch) % self.config.num_labels, key

    def draw(self) -> tuple[ArrayTree, ...]:
        """Draws the arguments of the loss, equal for all methods."""
        return *jax.jit(self.init)(jax.random.key(0)), *self.draw_batch()

    def compile(self, *, scheduler: str = "default") -> jax.stages.Compiled:
        """Compiles loss and gradient."""
        arguments = jax.eval_shape(self.draw)
        lowered = jax.jit(jax.value_and_grad(self.loss)).lower(*arguments)
        return lowered.compile(
            compiler_options={**self.method.compiler_options, **SCHEDULERS[scheduler]}
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = tyro.cli(
        Options,
        args=arguments,
        description=__doc__,
        prog="python -m benchmarks.transformer_memory",
    )
    console = make_console()
    environment = describe_environment()
    result: Record = {"options": dataclasses.asdict(options)}
    result["temp"] = [r for scan in options.scan for r in _temp(options, scan)]
    console.print(_temp_table(result["temp"]))
    if options.rss:
        result["rss"] = [_rss(options, name) for name in options.methods]
        console.print(
            make_rss_table("Resident memory that a gradient adds", result["rss"])
        )
    if options.time:
        timings = _time(options)
        result["time"] = {k: dataclasses.asdict(v) for k, v in timings.items()}
        title = f"Time of a gradient, {options.rounds} rounds"
        labels = {name: make_method(name, bits=options.bits).label for name in timings}
        console.print(make_time_table(title, labels, timings))
    write_result(options.out, environment, result)
    console.print(f"Written to {options.out}.", markup=False)


def _temp(options: Options, scan: bool) -> list[Record]:
    """Compiles every gradient; ratios are to the first method, same scheduler."""
    records = []
    for scheduler in SCHEDULERS:
        first = None
        for name in options.methods:
            workload = options.workload(name, scan)
            nbytes = memory.temp_nbytes(workload.compile(scheduler=scheduler))
            first = first or nbytes
            records.append(
                {
                    "blocks": "scan" if scan else "loop",
                    "scheduler": scheduler,
                    "method": name,
                    "label": workload.method.label,
                    "temp_nbytes": nbytes,
                    "ratio": first / nbytes,
                }
            )
    return records


def _rss(options: Options, name: str) -> Record:
    """Measures resident memory of one method in a fresh process."""
    measured = peak_rss_in_fresh_process(_make_step, options, name)
    return {
        "method": name,
        "label": make_method(name, bits=options.bits).label,
        **measured.as_record(),
    }


def _make_step(
    options: Options, name: str
) -> tuple[jax.stages.Compiled, Callable[[], Any]]:
    workload = options.workload(name, options.scan[0])
    compiled = workload.compile()
    return compiled, functools.partial(compiled, *workload.draw())


def _time(options: Options) -> dict[str, Timing]:
    """Times one gradient of each method, after a check of its value."""
    contenders = {}
    arguments = options.workload(BASELINE, options.scan[0]).draw()
    for name in options.methods:
        workload = options.workload(name, options.scan[0])
        compiled = workload.compile()
        contenders[name] = Contender(
            run=functools.partial(compiled, *arguments),
            checks={
                "loss": Check(_LOSS_TOLERANCE, extract=lambda out: out[0]),
                "gradient": Check(
                    workload.method.gradient_tolerance, extract=lambda out: out[1]
                ),
                "projection": Check(
                    workload.method.projection_tolerance,
                    extract=lambda out: out[1],
                    error=projection_error,
                ),
            },
        )
    return compare(contenders, baseline=options.methods[0], rounds=options.rounds)


def _temp_table(records: Sequence[Record]) -> rich.table.Table:
    return make_table(
        "Temporary memory of the compiled gradient",
        left=("Blocks", "Scheduler", "Method"),
        right=("Temp MB", "Plain / this"),
        rows=[
            (
                record["blocks"],
                record["scheduler"],
                record["label"],
                f"{record['temp_nbytes'] / 1e6:.1f}",
                f"{record['ratio']:.2f}x",
            )
            for record in records
        ],
    )


if __name__ == "__main__":
    main()
