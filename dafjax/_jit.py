"""`dafjax.jit`: like `jax.jit`, with options that fit into a limit of memory."""

import contextlib
import dataclasses
import functools
import itertools
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, final

import jax

from dafjax._adaptive import AdaptiveBits, BatchLedger, as_planned
from dafjax._call import StaticArguments, positional_parameters, split
from dafjax._contexts import (
    AS_PLANNED,
    BitsInForce,
    Choice,
    choosing,
    current_stand_in,
    measuring_batches,
    putting_in_force,
)
from dafjax._numbers import as_count, parse_nbytes, readable
from dafjax._search import (
    JitReport as JitReport,
    Search,
    TriedProgram as TriedProgram,
)
from dafjax._step_memory import measure
from dafjax._trace.tracing import is_tracing, trace_context


def jit(
    step: Callable[..., Any] | None = None,
    *,
    memory: int | str | None = None,
    most_compiles: int = 8,
    **jit_options: Any,
) -> Any:
    """Compiles a training step so that it fits into a limit of memory.

    Use it like `jax.jit`, on a whole training step that calls functions wrapped by
    `remat_compress`. It chooses their options `bits` and `rematerialize`: of the
    programs that fit, the one with the least noise, and of these the fastest. It tries,
    in this order: plain JAX; `rematerialize="exact"`; 8, 4 and 2 bits, each first
    without and then with `rematerialize=True`. For each of these it also chooses the
    number of microbatches of losses in `dafjax.accumulate(loss)`: the smallest that
    fits. The other options of `remat_compress` stay as they are. A wrapped function
    whose policy excludes `rematerialize` runs without it: with the same bits, or as in
    plain JAX in place of `"exact"`. The report names it.

    The limit covers the memory that the step holds while it runs: arguments, temporary
    arrays, and results that do not reuse donated arguments. Leave room for the rest of
    the process. On several devices it is the memory of each.

    A static model of XLA:CPU predicts which programs fit; the compiler's figure for the
    first program corrects its scale. The compiler's own figure decides. At most three
    programs are compiled for arguments of the same shapes and shardings. If none fits,
    the error names the largest batch that the model predicts to fit. (The batch axis is
    the first one of the arguments after the first, as in `accumulate`; if their lengths
    differ, it names none.)

    Bits adapt to measurements where functions are wrapped with a target, as in
    `remat_compress(bits="auto")`, `AverageBits`, `Budget` or `NoiseCeiling`, and with a
    store whose bits are part of the compiled program: `dafjax.stores.Arrays()`, the
    default, or `Host()`. (A `dafjax.stores.PagePool` changes bits by itself, and needs
    only `jax.jit`.) The program measures how much the rounding of each residual
    disturbs the gradient. Before calls 2, 8, 32, 128, ... the measurements since the
    last time are read; with `"auto"` before calls 8, 16, 32, 64, ... The step is
    recompiled with other bits if these lower the variance of the gradient by 10 %, or
    if a noise ceiling asks for it.

    - With a limit, the chosen bits come first. Other bits may take only as many bytes,
      and the recompiled program must fit. Segments that are computed again have fixed
      bits.
    - Without a limit, options stay as they are, and bits follow the targets. The first
      program has the same bits for all residuals, as many as the target allows; for a
      share of noise it has the most. With `"auto"` only the two or four calls before
      that measure; they also compute exact gradients of halves of the batch. Functions
      wrapped with equal targets share one.
      Residuals that enter gradients through an exponential have 8 bits, as always, and
      these count in the target. If less than 1 bit is left for the others, the call
      raises a `ValueError`. Other nonlinear uses have at least 2 bits, as far as the
      target allows. If XLA partitions a program, the bytes of a `Budget` are for all
      devices together; in a `jax.shard_map` they are for each device.

    As with `jax.jit`, arguments of other shapes make another program, with a choice and
    bits of its own. The step is compiled even under `jax.disable_jit`.

    Args:
        step: The step, differentiation included.
        memory: The limit per device: bytes, or text such as `"512MiB"`, `"2GiB"` or
            `"1.5GB"`. `None`: no limit, and nothing is chosen.
        most_compiles: Maximum number of programs for arguments of the same shapes as
            bits adapt; at least 1. Later measurements change nothing.
        **jit_options: Options of `jax.jit`.

    Returns:
        A `Jit`: a function with the signature of `step`.

    Raises:
        TypeError: `step` is not a function, or `most_compiles` is not an integer.
        ValueError: `memory` is not a number of bytes, or `most_compiles` is less than
            1. When it is called: the step calls no function wrapped by
            `remat_compress`, or no program fits.

    Example:
        >>> import dafjax, jax, jax.numpy as jnp
        >>> @dafjax.remat_compress
        ... def loss(w, x):
        ...     for _ in range(8):
        ...         x = jnp.tanh(x @ w)
        ...     return jnp.mean(x)
        >>> step = dafjax.jit(jax.grad(loss), memory="8MiB")
        >>> step(jnp.ones((256, 256)), jnp.ones((1024, 256))).shape
        (256, 256)
        >>> step.report().memory.total_nbytes <= 8 * 2**20
        True
    """
    if step is None:
        return functools.partial(
            jit, memory=memory, most_compiles=most_compiles, **jit_options
        )
    if not callable(step):
        raise TypeError(f"`jit(step)` must be given a function, but got `{step!r}`.")
    limit = None if memory is None else parse_nbytes("jit(memory=...)", memory)
    most = as_count("jit(most_compiles=...)", most_compiles, least=1)
    return Jit(step, limit, most, jit_options)


def measure_variances(fun: Callable[..., Any], *args: Any) -> dict[str, float]:
    """Runs a function once, and measures the variance that each residual adds.

    Args:
        fun: A function that differentiates a function wrapped with a target for bits.
        *args: Its arguments.

    Returns:
        By the name of each residual, the variance of the gradient that its rounding
        causes at the bits that it has without a target.
    """
    step = Jit(fun, None, 1, {})
    jax.block_until_ready(step(*args))
    return step.take_variances()


@final
@dataclasses.dataclass(eq=False)
class _Program:
    """A step for arguments of given shapes and shardings.

    Attributes:
        planned: Its planned bits.
        choice: The options of wrapped functions, if there is a limit.
        report: The choice and its reasons, if there is a limit.
        adaptive: The bits that adapt, if some do.
        num_calls: How often it was called.
        num_compiles: How many programs with other bits there were.
        last: A small result of the last call before measurements are read.
    """

    planned: BitsInForce
    choice: Choice | None = None
    report: JitReport | None = None
    adaptive: AdaptiveBits | None = None
    num_calls: int = 0
    num_compiles: int = 1
    last: jax.Array | None = None

    @contextlib.contextmanager
    def in_force(self, *, is_call: bool = False) -> Iterator[None]:
        """Gives its options and bits to functions within a `with` block.

        Args:
            is_call: Whether the step is called. Some calls measure the noise of their
                batches; they have the first bits, so that this is one program.
        """
        adaptive, of_batches, measurement = self.adaptive, self.of_batches, None
        bits = self.planned if adaptive is None else adaptive.in_force
        measures = is_call and self._measures_batch()
        if adaptive is not None and of_batches is not None and measures:
            bits, measurement = adaptive.first, of_batches.measurement
        with (
            choosing(self.choice),
            putting_in_force(bits),
            measuring_batches(measurement),
        ):
            yield

    @property
    def of_batches(self) -> BatchLedger | None:
        """What measures the noise of batches, if a target needs it."""
        return None if self.adaptive is None else self.adaptive.of_batches

    def is_reading(self, call: int) -> bool:
        """Returns whether measurements are read before a call."""
        return is_reading(call, of_batches=self.of_batches is not None)

    def _measures_batch(self) -> bool:
        """Returns whether this call measures: two before each reading, later four."""
        most = _MEASURING_CALLS
        few = most if self.num_calls > most**2 else most // 2
        ahead = range(self.num_calls + 1, self.num_calls + 1 + few)
        return any(map(self.is_reading, ahead))

    def wait(self) -> None:
        """Waits for the measurements of the last call."""
        last, self.last = self.last, None
        # A result donated since then is deleted, so there is nothing to wait for.
        if last is not None and not last.is_deleted():
            last.block_until_ready()


@final
class Jit:
    """The function that `dafjax.jit` returns."""

    def __init__(
        self,
        step: Callable[..., Any],
        limit_nbytes: int | None,
        most_compiles: int,
        options: Mapping[str, Any],
    ) -> None:
        functools.update_wrapper(self, step)
        self._step = step
        self._limit = limit_nbytes
        self._most_compiles = most_compiles
        self._jitted: Any = jax.jit(step, **options)
        self._parameters = positional_parameters(step)
        self._static = _static_arguments(**options)
        # Numbered in order of creation, so that a program cached on disk has the same
        # name in another process.
        self._name = f"adaptive {next(_NUMBERS)}"
        # Keyed by structure, shapes, dtypes, shardings and static arguments.
        self._programs: dict[Any, _Program] = {}
        self._last: _Program | None = None
        self._lock = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step."""
        self._refuse_transformations()
        with self._lock:
            program = self._program(args, kwargs)
            program.num_calls += 1
            if program.is_reading(program.num_calls):
                self._adapt(program, args, kwargs)
        with program.in_force(is_call=True), jax.disable_jit(False):
            results = self._jitted(*args, **kwargs)
        if program.adaptive is not None and program.is_reading(program.num_calls + 1):
            arrays = [x for x in jax.tree.leaves(results) if isinstance(x, jax.Array)]
            program.last = min(arrays, key=lambda array: array.size, default=None)
        return results

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Binds the step to an instance, where it is a method of a class."""
        return self if instance is None else types.MethodType(self, instance)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Traces and lowers the present program, like `jax.jit`'s `lower`."""
        return self.trace(*args, **kwargs).lower()

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Traces the present program for these arguments, like `jax.jit`'s `trace`.

        A program compiled from it keeps its options and bits.
        """
        if current_stand_in() is not None:
            return self._jitted.trace(*args, **kwargs)
        self._refuse_transformations()
        with self._lock:
            program = self._program(args, kwargs)
        with program.in_force():
            return self._jitted.trace(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Returns shapes and dtypes of the results, like `jax.jit`'s `eval_shape`."""
        with putting_in_force(AS_PLANNED):
            return self._jitted.eval_shape(*args, **kwargs)

    def report(self) -> JitReport:
        """Returns the choice for the shapes of the last call, and its reasons.

        Raises:
            RuntimeError: The step was not called before, or it has no limit.
        """
        if self._last is None or self._last.report is None:
            raise RuntimeError(
                "`report()` of a step of `dafjax.jit(memory=...)` says what was chosen "
                "for its arguments: give a limit, and call the step first, or its "
                "method `lower`."
            )
        return self._last.report

    @property
    def bits(self) -> dict[str, int]:
        """Bits of each residual that adapt, by its name; empty before the first call.

        Names are as in `dafjax.print_saved_residuals`, with some digits that tell
        functions apart. The residuals for all shapes of arguments are included.
        """
        return {name: bits for a in self._adaptive for name, bits in a.by_name.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all residuals whose bits adapt, in the largest program."""
        return max((adaptive.nbytes for adaptive in self._adaptive), default=0)

    @property
    def noise_share(self) -> float | None:
        """The noise of rounding over that of a batch, as standard deviations.

        It is what present bits are expected to add, as measurements told when they were
        last read; `None` before, or if no function has the target `BatchNoise`.
        """
        program = self._last
        ledger = None if program is None else program.of_batches
        return None if ledger is None else ledger.share

    @property
    def num_compiles(self) -> int:
        """Largest number of programs so far for arguments of the same shapes."""
        return max((p.num_compiles for p in self._programs.values()), default=1)

    def take_variances(self) -> dict[str, float]:
        """Returns the variance that each residual adds to the gradient, and resets it.

        The variances are measured since the last call, and keyed by residual name. They
        are those at the bits that residuals have without a target.
        """
        found: dict[str, float] = {}
        for adaptive in self._adaptive:
            found |= adaptive.take_variances()
        return found

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A step of `dafjax.jit` cannot be copied or pickled: it owns compiled "
            "programs, and what they have measured. Pass the step itself; in another "
            "process, wrap its function with `dafjax.jit` again."
        )

    def __repr__(self) -> str:
        limit = "" if self._limit is None else f", memory={readable(self._limit)!r}"
        return f"<dafjax.jit of {self._step!r}{limit}>"

    @property
    def _adaptive(self) -> list[AdaptiveBits]:
        programs = self._programs.values()
        return [p.adaptive for p in programs if p.adaptive is not None]

    def _program(self, args: Any, kwargs: Any) -> _Program:
        """Returns the program for some arguments; chooses it if they are new."""
        call = split(self._parameters, self._static, args, kwargs)
        leaves, structure = jax.tree.flatten((call.args, call.kwargs))
        key = structure, tuple(map(_kind_of, leaves)), call.static, trace_context()
        if key not in self._programs:
            self._programs[key] = self._new_program(args, kwargs)
        self._last = self._programs[key]
        return self._last

    def _new_program(self, args: Any, kwargs: Any) -> _Program:
        name = f"{self._name}, program {len(self._programs)}"
        program = _Program(as_planned(name))
        if self._limit is not None:
            search = Search(self._jitted, self._limit, args, kwargs)
            with putting_in_force(program.planned):
                program.choice, program.report = search.run()
        with program.in_force():
            closed = self._jitted.trace(*args, **kwargs).jaxpr
        of_batches = None
        if program.planned.needs_batches:
            of_batches = BatchLedger(name)
            with (
                putting_in_force(program.planned),
                measuring_batches(of_batches.measurement),
            ):
                closed = self._jitted.trace(*args, **kwargs).jaxpr
        is_limited = self._limit is not None
        program.adaptive = AdaptiveBits.of(
            name, closed, program.planned, of_batches, keeps_bytes=is_limited
        )
        self._check(program, args, kwargs)
        return program

    def _adapt(self, program: _Program, args: Any, kwargs: Any) -> None:
        """Reads measurements, and takes other bits if they are worth it, and fit."""
        if program.adaptive is None:
            return
        program.wait()
        better = program.adaptive.better()
        if better is None or program.num_compiles >= self._most_compiles:
            return
        other = dataclasses.replace(program, adaptive=better)
        self._check(other, args, kwargs)
        program.num_compiles += 1
        if program.report is not None:
            with other.in_force():
                memory = measure(self._jitted.lower(*args, **kwargs))
            if memory.total_nbytes > program.report.limit_nbytes:
                return
            program.report = dataclasses.replace(program.report, memory=memory)
        program.adaptive = better

    def _check(self, program: _Program, args: Any, kwargs: Any) -> None:
        """Raises an error unless the program has its bits where it is traced."""
        if program.adaptive is not None:
            with program.in_force():
                program.adaptive.check(self._jitted.trace(*args, **kwargs).jaxpr)

    def _refuse_transformations(self) -> None:
        if is_tracing():
            name = getattr(self._step, "__name__", self._step)
            raise ValueError(
                f"`{name!s}` was made by `dafjax.jit` and is called inside of "
                "`jax.jit`, `jax.grad` or another transformation, whose memory it "
                "cannot know, and where its bits could not change. Put `dafjax.jit` "
                "round the whole step, differentiation included; for shapes use its "
                "method `eval_shape`."
            )


def _static_arguments(
    static_argnums: int | Iterable[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    **_: Any,
) -> StaticArguments:
    """Returns the static arguments among options of `jax.jit`, which checks them."""
    numbers = () if static_argnums is None else static_argnums
    names = () if static_argnames is None else static_argnames
    return StaticArguments(
        tuple(numbers) if isinstance(numbers, Iterable) else (numbers,),
        (names,) if isinstance(names, str) else tuple(names),
    )


def _kind_of(leaf: Any) -> Any:
    """Returns the type of an argument, and its sharding if it is on many devices."""
    try:
        kind = jax.typeof(leaf)
    except TypeError:
        return leaf
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or len(sharding.device_set) == 1:
        return kind
    return kind, sharding


def is_reading(call: int, *, of_batches: bool = False) -> bool:
    """Returns whether measurements are read before a call: 2, 8, 32, 128, ...

    The interval grows fourfold each time: importances change ever more slowly during
    training, and a mean over more of them is more accurate.

    Args:
        call: The number of the call.
        of_batches: Whether the noise of batches is measured, too. Its share changes
            faster: before calls 8, 16, 32, 64, ...
    """
    if call < 2 or call.bit_count() > 1:
        return False
    return call >= 8 if of_batches else call.bit_length() % 2 == 0


# Calls that measure the noise of a batch before measurements are read, at most. Guess.
_MEASURING_CALLS = 4

_NUMBERS = itertools.count()
