"""`adaptive_jit`: like `jax.jit`, with the bits of residuals chosen by measurement."""

import dataclasses
import functools
import itertools
import math
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, final

import jax
from jax.core import Tracer

from dafjax._bits import Target
from dafjax._contexts import BitsInForce, putting_in_force
from dafjax._native import LEDGER_NOTE, make_ledger, pool_hash
from dafjax._numbers import as_count
from dafjax._trace.tracing import (
    as_function,
    count_live,
    is_tracing,
    trace,
    trace_context,
)
from dafjax.allocation import (
    BitsBySite,
    Demand,
    Measured,
    better_bits,
    first_bits,
    nbytes,
)
from dafjax.stores._codecs import SiteFacts


def adaptive_jit(
    fun: Callable[..., Any] | None = None, *, most_compiles: int = 8, **jit_options: Any
) -> Any:
    """Compiles a step, and recompiles it when other bits of residuals are worth it.

    Use it like `jax.jit`, on a whole training step. The step calls functions wrapped
    with `remat_compress(bits=dafjax.AverageBits(...))`, or `Budget` or `NoiseCeiling`,
    and with a store whose bits are part of the compiled program:
    `dafjax.stores.Arrays()`, the default, or `Host()`. (A `dafjax.stores.PagePool`
    changes bits by itself, and needs only `jax.jit`.)

    The program measures how much the rounding of each residual disturbs the gradient.
    Before calls 2, 8, 32, 128, ... `adaptive_jit` reads the measurements since the last
    time. It recompiles the step with other bits if these lower the variance of the
    gradient by 10 %. With a noise ceiling, it recompiles if other bits meet a ceiling
    that the present ones do not, or meet it with 10 % fewer bits. The first program has
    the same bits for all residuals, as many as the target allows; for a noise ceiling
    it has the most.

    Functions wrapped with equal targets share one target. Residuals that enter
    gradients through an exponential have 8 bits, as always, and these count in the
    target. If less than 1 bit is left for the others, the call raises a `ValueError`.
    Other nonlinear uses have at least 2 bits, as far as the target allows. As with
    `jax.jit`, arguments of other shapes make another program; each program has bits of
    its own, within the target. If XLA partitions a program, the bytes of a `Budget` are
    for all devices together; in a `jax.shard_map` they are for each device. The step is
    compiled even under `jax.disable_jit`, because bits belong to a compiled program.

    Args:
        fun: The step. It is traced twice before its first compilation.
        most_compiles: Maximum number of programs for arguments of the same shapes; at
            least 1. Later measurements change nothing.
        **jit_options: Options of `jax.jit`.

    Returns:
        An `AdaptiveJit`: a function with the signature of `fun`.

    Raises:
        TypeError: `fun` is not a function, or `most_compiles` is not an integer.
        ValueError: `most_compiles` is less than 1.

    Example:
        >>> import dafjax, jax, jax.numpy as jnp
        >>> def loss(w, x):
        ...     for _ in range(4):
        ...         x = jnp.tanh(x @ w)
        ...     return jnp.mean(x)
        >>> loss = dafjax.remat_compress(loss, bits=dafjax.AverageBits(2))
        >>> step = dafjax.adaptive_jit(jax.grad(loss))
        >>> for _ in range(3):
        ...     gradient = step(jnp.ones((256, 256)), jnp.ones((64, 256)))
        >>> gradient.shape, step.num_compiles <= 8
        ((256, 256), True)
    """
    if fun is None:
        return functools.partial(
            adaptive_jit, most_compiles=most_compiles, **jit_options
        )
    if not callable(fun):
        raise TypeError(
            f"`adaptive_jit(fun)` must be given a function, but got `{fun!r}`."
        )
    most = as_count("adaptive_jit(most_compiles=...)", most_compiles, least=1)
    return AdaptiveJit(fun, most, jit_options)


def measure_variances(fun: Callable[..., Any], *args: Any) -> dict[str, float]:
    """Runs a function once, and measures the variance that each residual adds.

    Args:
        fun: A function that differentiates a function wrapped with a target for bits.
        *args: Its arguments.

    Returns:
        By the name of each residual, the variance of the gradient that its rounding
        causes at the bits that it has without a target.
    """
    step = AdaptiveJit(fun, 1, {})
    jax.block_until_ready(step(*args))
    return step.take_variances()


@final
class AdaptiveJit:
    """The function that `adaptive_jit` returns, with facts about its residuals."""

    def __init__(
        self,
        fun: Callable[..., Any],
        most_compiles: int,
        jit_options: Mapping[str, Any],
    ) -> None:
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._most_compiles = most_compiles
        self._jit_options = dict(jit_options)
        # Numbered in order of creation, so that a program cached on disk has the same
        # name in another process.
        self._name = f"adaptive {next(_NUMBERS)}"
        # Keyed by structure, shapes, dtypes and static arguments.
        self._programs: dict[Any, _Program] = {}
        self._num_compiles = 1
        self._num_calls = 0
        # A small result of the last call before measurements are read.
        self._last: jax.Array | None = None
        self._lock = threading.RLock()
        self._jitted = self._make_jitted()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step."""
        self._refuse_transformations()
        with self._lock:
            self._num_calls += 1
            if _is_reading(self._num_calls):
                self._adapt()
            jitted = self._jitted
        with jax.disable_jit(False):
            results = jitted(*args, **kwargs)
        if _is_reading(self._num_calls + 1):
            arrays = [x for x in jax.tree.leaves(results) if isinstance(x, jax.Array)]
            self._last = min(arrays, key=lambda array: array.size, default=None)
        return results

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Binds the step to an instance, where it is a method of a class."""
        return self if instance is None else types.MethodType(self, instance)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Traces and lowers the step with its present bits, like `jax.jit`'s `lower`.

        A program compiled from it keeps these bits.
        """
        return self._jitted.lower(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Traces the step with its present bits, like `jax.jit`'s `trace`."""
        return self._jitted.trace(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Returns shapes and dtypes of the results, like `jax.jit`'s `eval_shape`."""
        return self._jitted.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Drops compiled programs, like `jax.jit`'s `clear_cache`, but keeps bits."""
        self._jitted.clear_cache()

    @property
    def bits(self) -> dict[str, int]:
        """Bits of each residual's codes, by its name; empty before the first call.

        Names are as in `dafjax.print_saved_residuals`, with some digits that tell
        functions apart. The residuals for all shapes of arguments are included.
        """
        return {
            program.facts[site].name: bits
            for program in self._programs.values()
            for site, bits in program.bits.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all residuals with allocated bits, in the largest program."""
        sizes = (nbytes(p.demands, p.bits) for p in self._programs.values())
        return max(sizes, default=0)

    def take_variances(self) -> dict[str, float]:
        """Returns the variance that each residual adds to the gradient, and resets it.

        The variances are measured since the last call, and keyed by residual name. They
        are those at the bits that residuals have without a target.
        """
        found: dict[str, float] = {}
        for program in self._programs.values():
            importances = program.ledger.take()["importances"]
            for site, fact in program.facts.items():
                steps = 2 ** program.demands[site].asked - 1
                found[fact.name] = float(importances[site]) / steps**2
        return found

    @property
    def num_compiles(self) -> int:
        """Number of programs so far for arguments of the same shapes."""
        return self._num_compiles

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A step of `dafjax.adaptive_jit` cannot be copied or pickled: it owns what "
            "the running program has measured, and compiled programs. Pass the step "
            "itself; in another process, wrap its function with `adaptive_jit` again."
        )

    def __repr__(self) -> str:
        return f"<adaptive_jit of {self._fun!r}, {self._num_compiles} compiled>"

    def _make_jitted(self) -> Any:
        # A new function each time, so that JAX finds no earlier trace.
        @functools.wraps(self._fun)
        def step(*args: Any, **kwargs: Any) -> Any:
            return self._trace(args, kwargs)

        return jax.jit(step, **self._jit_options)

    def _trace(self, args: Any, kwargs: Any) -> Any:
        """Runs the step on traced arguments, with its present bits."""
        leaves, structure = jax.tree.flatten((args, kwargs))
        places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tracer)]
        traced = [leaves[n] for n in places]
        key = (
            structure,
            tuple(
                jax.typeof(leaf) if isinstance(leaf, Tracer) else leaf
                for leaf in leaves
            ),
            trace_context(),
        )

        def flat(*traced: Any) -> Any:
            filled = list(leaves)
            for n, leaf in zip(places, traced, strict=True):
                filled[n] = leaf
            args, kwargs = jax.tree.unflatten(structure, filled)
            return self._fun(*args, **kwargs)

        def trace_with(ledger: int, bits: BitsBySite) -> Any:
            with putting_in_force(BitsInForce(ledger, bits)):
                return trace(flat, traced)

        with self._lock:
            program = self._programs.get(key)
            if program is None:
                name = f"{self._name}, program {len(self._programs)}"
                found = trace_with(pool_hash(name), {})
                sites = _sites_of(found[0])
                if not sites:
                    return _evaluate(found, traced)
                program = _Program.of(name, sites)
                self._programs[key] = program
                if not program.differing(sites):
                    return _evaluate(found, traced)
            found = trace_with(pool_hash(program.name), program.bits)
            program.check(_sites_of(found[0]))
        return _evaluate(found, traced)

    def _adapt(self) -> None:
        """Reads measurements, and starts a new program if other bits are worth it."""
        last, self._last = self._last, None
        # A result donated since then is deleted, so there is nothing to wait for.
        if last is not None and not last.is_deleted():
            last.block_until_ready()
        better = {key: p.better() for key, p in self._programs.items()}
        changed = {key: bits for key, bits in better.items() if bits is not None}
        if not changed or self._num_compiles >= self._most_compiles:
            return
        for key, bits in changed.items():
            self._programs[key] = dataclasses.replace(self._programs[key], bits=bits)
        self._num_compiles += 1
        self._jitted = self._make_jitted()

    def _refuse_transformations(self) -> None:
        if is_tracing():
            raise ValueError(
                f"`{getattr(self._fun, '__name__', self._fun)!s}` was made by "
                "`dafjax.adaptive_jit` and is called inside of `jax.jit`, `jax.grad` "
                "or another transformation, where its bits could not change. Put "
                "`adaptive_jit` round the whole step, differentiation included; for "
                "shapes use its method `eval_shape`."
            )


@final
@dataclasses.dataclass(frozen=True, eq=False)
class _Program:
    """Facts about a step for arguments of given shapes.

    Attributes:
        name: Name of its ledger.
        ledger: Accumulator of the measurements of its backward passes.
        facts: Facts about each residual (site), by the hash of its name.
        demands: Sizes and limits of each residual, by the same hash.
        bits: Present bits of each residual, by the same hash.
    """

    name: str
    ledger: Any
    facts: dict[int, SiteFacts]
    demands: dict[int, Demand]
    bits: BitsBySite

    @classmethod
    def of(cls, name: str, found: "_Sites") -> "_Program":
        """Returns the facts about a program that has been traced once."""
        demands = {site: _demand(uses) for site, uses in found.items()}
        facts = {site: uses[0][0] for site, uses in found.items()}
        bits: BitsBySite = {}
        for target, sites in _by_target(facts).items():
            bits |= first_bits(target, {site: demands[site] for site in sites})
        return cls(name, make_ledger(name, list(facts)), facts, demands, bits)

    def differing(self, found: "_Sites") -> list[str]:
        """Returns names of residuals whose bits in a trace are not the program's."""
        names = {
            uses[0][0].name
            for site, uses in found.items()
            if any(fact.bits != self.bits.get(site) for fact, _ in uses)
        }
        names.update(self.facts[s].name for s in self.bits.keys() - found.keys())
        return sorted(names)

    def check(self, found: "_Sites") -> None:
        """Raises a `RuntimeError` unless a trace has the bits of the program."""
        differing = self.differing(found)
        if differing:
            raise RuntimeError(
                "`dafjax.adaptive_jit` has traced its function with other bits than "
                f"before, but these residuals do not have them: "
                f"{', '.join(differing)}. The function must do the same, and trace "
                "what it differentiates, each time that it is traced: do not keep "
                "jaxprs or pullbacks of an earlier call in it."
            )

    def better(self) -> BitsBySite | None:
        """Returns bits that are worth another program, given the measurements."""
        taken = self.ledger.take()
        measured = Measured(taken["importances"], taken["gradient_energy"])
        changed: BitsBySite = {}
        for target, sites in _by_target(self.facts).items():
            demands = {site: self.demands[site] for site in sites}
            now = {site: self.bits[site] for site in sites}
            changed |= better_bits(target, demands, now, measured) or {}
        return {**self.bits, **changed} if changed else None


# By the hash of a residual's name: each use, and how many copies are live at once.
_Sites = dict[int, list[tuple[SiteFacts, int]]]


def _sites_of(closed: Any) -> _Sites:
    """Returns the residuals of a traced program whose bits are allocated."""
    found: _Sites = {}
    for eqn, times in count_live(closed, LEDGER_NOTE, _MAKES_CODES):
        # Under `vmap`, each example has copies of its own.
        examples = math.prod(eqn.invars[0].aval.shape[:-1])
        params = eqn.params
        for site, fact in zip(params["sites"], params["facts"], strict=True):
            found.setdefault(site, []).append((fact, times * examples))
    return found


def _demand(uses: list[tuple[SiteFacts, int]]) -> Demand:
    return Demand(
        num_elements=sum(fact.num_elements * count for fact, count in uses),
        parameters_nbytes=sum(fact.parameters_nbytes * count for fact, count in uses),
        asked=max(fact.asked for fact, _ in uses),
        maximum=max(fact.maximum for fact, _ in uses),
    )


def _by_target(facts: Mapping[int, SiteFacts]) -> dict[Target, list[int]]:
    sites: dict[Target, list[int]] = {}
    for site, fact in facts.items():
        sites.setdefault(fact.target, []).append(site)
    return sites


def _evaluate(found: Any, arguments: list[Any]) -> Any:
    closed, consts, structure = found
    return jax.tree.unflatten(structure, as_function(closed)(*consts, *arguments))


def _is_reading(call: int) -> bool:
    """Returns whether measurements are read before a call: 2, 8, 32, 128, ...

    The interval grows fourfold each time: importances change ever more slowly during
    training, and a mean over more of them is more accurate.
    """
    return call >= 2 and call.bit_count() == 1 and call.bit_length() % 2 == 0


_MAKES_CODES = "dafjax_pack_affine"
_NUMBERS = itertools.count()
