"""Measures the effect of compression on the gradient of a loss."""

import dataclasses
import functools
import inspect
import json
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from dafjax._bits import AnyBits, AverageBits
from dafjax._contexts import AS_PLANNED, putting_in_force, standing_in
from dafjax._jit import measure_variances
from dafjax._numbers import align, as_count, parse_nbytes, readable
from dafjax._plan.plan import place_of, record_plans, site_names
from dafjax._remat_compress import remat_compress


# A gradient whose norm is at most this fraction of the total is zero up to rounding.
_ZERO = 1e-6

# A gradient with more relative noise than this is mostly noise.
_NOISY = 1.2

_MOST_RESIDUALS = 8

_DEFAULT_BITS = inspect.signature(remat_compress).parameters["bits"].default


@final
@dataclasses.dataclass(frozen=True)
class ArrayNoise:
    """The effect of compression on the gradient of one parameter array.

    All figures are relative to the norm of the exact gradient.

    Attributes:
        noise: Norm of the error, root mean square over seeds.
        bias: Norm of the mean error, by an estimate that excludes the noise; 0 if the
            estimate is negative.
        bias_error: Standard error of `bias ** 2`: the estimate is within two standard
            errors of the true value with 95 % confidence.
    """

    noise: float
    bias: float
    bias_error: float


@final
@dataclasses.dataclass(frozen=True)
class Setting:
    """The figures for one setting of bits.

    Attributes:
        bits: The argument `bits` of `remat_compress`.
        arrays: Noise by the path of each parameter array that has a gradient.
        temp_nbytes: Temporary bytes of the compiled gradient.
        seconds: Median time of one gradient.
        ratio: Median of that time over the plain gradient's in the same round.
    """

    bits: str
    arrays: Mapping[str, ArrayNoise]
    temp_nbytes: int
    seconds: float
    ratio: float

    def noise(self, percentile: float) -> float:
        """Returns a percentile of the noise of all arrays."""
        noise = [array.noise for array in self.arrays.values()]
        return float(np.percentile(noise, percentile)) if noise else 0.0

    @property
    def bias(self) -> tuple[float, float]:
        """Root mean square bias over all arrays, and its upper bound at 95 %."""
        squares = [a.bias**2 for a in self.arrays.values()] or [0.0]
        errors = [a.bias_error**2 for a in self.arrays.values()] or [0.0]
        mean, error = np.mean(squares), np.sqrt(np.sum(errors)) / len(errors)
        return float(np.sqrt(mean)), float(np.sqrt(mean + 2 * error))


@final
@dataclasses.dataclass(frozen=True)
class NoisyResidual:
    """One residual, and its share of the noise at 2 bits.

    The noise is the variance of the gradient, with each parameter array divided by its
    squared norm. If some arrays are noisy at the default bits, only these count.

    Attributes:
        name: Its place in the model, and its primitive.
        share: Its share, from 0 to 1.
        source: The user's line that makes it.
    """

    name: str
    share: float
    source: str


@final
@dataclasses.dataclass(frozen=True)
class Assessment:
    """The effect of compression on a gradient. Prints as two tables.

    Attributes:
        settings: The figures for each setting of bits.
        plain_temp_nbytes: Temporary bytes of the plain gradient.
        residuals: The residuals that add most of the noise, the worst first.
        noisy: Paths of arrays whose gradient is mostly noise (above 1.2) at the default
            bits. Empty if the settings do not include these bits.
        num_examples: Number of examples measured, if not all.
    """

    settings: tuple[Setting, ...]
    plain_temp_nbytes: int
    residuals: tuple[NoisyResidual, ...]
    noisy: tuple[str, ...] = ()
    num_examples: int | None = None

    def to_json(self) -> str:
        """Returns all figures as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    def __str__(self) -> str:
        header = ("bits", "noise: median", "95 %", "worst", "bias", "at most", "temp")
        rows: list[tuple[str, ...]] = [(*header, "of plain", "time")]
        for setting in self.settings:
            bias, most = setting.bias
            rows.append(
                (
                    _with_default_marked(setting.bits),
                    *(f"{setting.noise(p):.3f}" for p in (50, 95, 100)),
                    f"{bias:.3f}",
                    f"{most:.3f}",
                    readable(setting.temp_nbytes),
                    f"{setting.temp_nbytes / max(self.plain_temp_nbytes, 1):.2f}",
                    f"{setting.ratio:.2f}",
                )
            )
        lines = [align(rows, right=range(1, len(rows[0])))]
        if self.residuals:
            found = [(r.name, f"{r.share:.0%}", r.source) for r in self.residuals]
            titles = ("residuals that bring most noise", "share", "source")
            lines += ["", align([titles, *found], right={1})]
        if self.noisy:
            lines += ["", _describe_noisy(self.noisy)]
        if self.num_examples is not None:
            lines += ["", f"Measured on {self.num_examples} examples: see `memory`."]
        return "\n".join(lines)


def assess(
    loss: Callable[..., Any],
    params: Any,
    *batch: Any,
    bits: Sequence[AnyBits] = (8, 4, 2),
    seeds: int = 8,
    rounds: int = 3,
    has_aux: bool = False,
    memory: int | str | None = None,
    **options: Any,
) -> Assessment:
    """Measures noise, bias, memory and time of a compressed gradient.

    Runs the plain and the compressed gradient a few times each, on this device. Spend
    this minute before you train a model. The noise of a parameter array is the norm of
    the error of its gradient over the norm of the exact gradient. A noise of 1 is
    mostly harmless: the noise of a minibatch is larger, and noise averages out over
    steps. A bias does not. The function warns if arrays have more noise than 1.2 at the
    default bits, and names the residuals that add it.

    Args:
        loss: The loss: `loss(params, *batch)`, a scalar. Where it is wrapped by
            `remat_compress` already, or calls wrapped functions, the originals are run,
            and the whole loss is wrapped anew with the options given here.
        params: The parameters, a pytree of arrays.
        *batch: The other arguments.
        bits: The settings to measure, each as `remat_compress` takes `bits`.
        seeds: Number of seeds of the rounding noise, at least 2.
        rounds: How often each gradient is timed.
        has_aux: Whether `loss` returns a pair, as in `jax.grad`.
        memory: Maximum bytes of the plain gradient, for example `"4GiB"`. If it takes
            more, fewer examples are measured: the first ones of each array of `batch`
            that has as many rows as the first array. `None`: no limit.
        **options: Other options of `remat_compress`.

    Returns:
        The figures, which print as tables.

    Raises:
        TypeError: An option has a wrong type.
        ValueError: `seeds` is less than 2, `rounds` is less than 1, or not even one
            example fits.

    Example:
        >>> import dafjax, jax, jax.numpy as jnp
        >>> def loss(w, x):
        ...     for _ in range(6):
        ...         x = jnp.tanh(x @ w)
        ...     return jnp.mean(x**2)
        >>> w = jax.random.normal(jax.random.key(0), (64, 64)) / 8
        >>> x = jax.random.normal(jax.random.key(1), (512, 64))
        >>> found = dafjax.assess(loss, w, x, bits=(8, 2), rounds=1)
        >>> found.settings[0].noise(50) < found.settings[1].noise(50) < 1
        True
    """
    remedy = "One seed does not tell noise from bias."
    seeds = as_count("assess(seeds=...)", seeds, least=2, remedy=remedy)
    rounds = as_count("assess(rounds=...)", rounds, least=1)
    loss = _unwrapped(loss)
    plain, batch, num_examples = _fitting(loss, params, batch, has_aux, memory)
    exact = _leaves(plain(params, *batch))
    compiled = {}
    draws = {}
    for setting in bits:
        run = _compile(loss, params, batch, has_aux, bits=setting, **options)
        compiled[str(setting)] = run
        draws[str(setting)] = [
            _leaves(run(jnp.uint32(s), params, *batch)) for s in range(seeds)
        ]
    times = _time(plain, compiled, (params, *batch), rounds)
    noise = {name: array_noise(exact, draws[name]) for name in compiled}
    of_default = noise.get(str(_DEFAULT_BITS), {})
    noisy = tuple(path for path, array in of_default.items() if array.noise > _NOISY)
    weights = _weights(exact, noisy or tuple(next(iter(noise.values()), {})))
    residuals = _noisiest(loss, weights, params, batch, has_aux, options)
    if noisy:
        worst = [f"{r.name} ({r.source})" for r in residuals[:3] if r.share > 0.1]
        # With a page pool or `rematerialize` the noise of residuals is not separated.
        origin = f" Most noise comes from {', '.join(worst)}." if worst else ""
        warnings.warn(f"`assess`: {_describe_noisy(noisy)}{origin}", stacklevel=2)
    settings = tuple(
        Setting(
            bits=name,
            arrays=noise[name],
            temp_nbytes=_temp_nbytes(run),
            seconds=statistics.median(seconds for seconds, _ in times[name]),
            ratio=statistics.median(ratio for _, ratio in times[name]),
        )
        for name, run in compiled.items()
    )
    return Assessment(
        settings=settings,
        plain_temp_nbytes=_temp_nbytes(plain),
        residuals=residuals,
        noisy=noisy,
        num_examples=num_examples,
    )


def array_noise(
    exact: Mapping[str, np.ndarray], draws: Sequence[Mapping[str, np.ndarray]]
) -> dict[str, ArrayNoise]:
    """Returns the effect of compression on each array of a gradient.

    Leaves out arrays whose exact gradient is zero up to rounding.

    Args:
        exact: The exact gradient, by path.
        draws: Compressed gradients, one for each seed.
    """
    squares = {path: float(np.vdot(g, g).real) for path, g in exact.items()}
    total = sum(squares.values())
    found = {}
    for path, g in exact.items():
        if squares[path] <= _ZERO**2 * total:
            continue
        errors = np.stack([draw[path] - g for draw in draws]).reshape(len(draws), -1)
        products = np.real(errors @ errors.conj().T) / squares[path]
        found[path] = _noise_of(products)
    return found


def _noise_of(products: np.ndarray) -> ArrayNoise:
    """Returns noise and bias from the inner products of the errors of all seeds."""
    count = len(products)

    def squared_bias(chosen: np.ndarray) -> float:
        n = len(chosen)
        return (chosen.sum() - np.trace(chosen)) / max(n * (n - 1), 1)

    bias = squared_bias(products)
    error = 0.0
    if count > 2:
        # Jackknife: recompute the estimate without each of the seeds.
        without = [
            squared_bias(np.delete(np.delete(products, s, 0), s, 1))
            for s in range(count)
        ]
        error = np.sqrt((count - 1) * np.var(without))
    return ArrayNoise(
        noise=float(np.sqrt(np.trace(products) / count)),
        bias=float(np.sqrt(max(bias, 0.0))),
        bias_error=float(error),
    )


def _unwrapped(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a loss that runs the originals of wrapped functions."""

    @functools.wraps(loss)
    def unwrapped(*args: Any) -> Any:
        with standing_in(lambda original: original):
            return loss(*args)

    return unwrapped


def _fitting(
    loss: Callable[..., Any],
    params: Any,
    batch: tuple[Any, ...],
    has_aux: bool,
    memory: int | str | None,
) -> tuple[Any, tuple[Any, ...], int | None]:
    """Returns the compiled plain gradient, its batch and the number of examples.

    The number is `None` if these are all examples.
    """
    limit = None if memory is None else parse_nbytes("assess(memory=...)", memory)
    rows = next((x.shape[0] for x in jax.tree.leaves(batch) if jnp.ndim(x)), None)
    count = rows
    while True:
        part = batch if count == rows else _first_rows(batch, rows, count)
        gradient = jax.jit(_gradient(loss, has_aux))
        plain = gradient.lower(params, *part).compile()
        needed = _temp_nbytes(plain)
        if limit is None or needed <= limit:
            return plain, part, None if count == rows else count
        if count is None or count == 1:
            raise ValueError(
                f"`assess(memory=...)`: the plain gradient of one example takes "
                f"{readable(needed)}, more than {readable(limit)}."
            )
        count = max(1, count // 2)


def _temp_nbytes(compiled: Any) -> int:
    return compiled.memory_analysis().temp_size_in_bytes


def _first_rows(batch: Any, rows: int | None, count: int | None) -> Any:
    return jax.tree.map(
        lambda x: x[:count] if jnp.ndim(x) and x.shape[0] == rows else x, batch
    )


def _compile(
    loss: Callable[..., Any],
    params: Any,
    batch: tuple[Any, ...],
    has_aux: bool,
    **options: Any,
) -> Any:
    def gradient(seed: jax.Array, params: Any, *batch: Any) -> Any:
        wrapped = remat_compress(loss, seed=seed, **options)
        return _gradient(wrapped, has_aux)(params, *batch)

    return jax.jit(gradient).lower(jnp.uint32(0), params, *batch).compile()


def _gradient(loss: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """Returns the gradient by the first argument, without auxiliary results."""
    gradient = jax.grad(loss, has_aux=has_aux)
    return (lambda *args: gradient(*args)[0]) if has_aux else gradient


def _with_default_marked(bits: str) -> str:
    return f"{bits} (default)" if bits == str(_DEFAULT_BITS) else bits


def _describe_noisy(noisy: Sequence[str]) -> str:
    shown = ", ".join(noisy[:3]) + (", ..." if len(noisy) > 3 else "")
    return (
        "At the default bits the gradients of these parameter arrays are mostly noise "
        f"({len(noisy)}): {shown}. Give the residuals that bring the noise more bits, "
        "by name as `dafjax.Bits(2, names={...: 8})` or all as `bits=4`."
    )


def _weights(exact: Mapping[str, np.ndarray], counted: Sequence[str]) -> list[float]:
    """Returns a weight for each array: 1 over its norm if it counts, else 0."""
    norms = {path: float(np.linalg.norm(g.ravel())) for path, g in exact.items()}
    return [1 / norms[path] if path in counted else 0.0 for path in exact]


def _noisiest(
    loss: Callable[..., Any],
    weights: Sequence[float],
    params: Any,
    batch: tuple[Any, ...],
    has_aux: bool,
    options: Mapping[str, Any],
) -> tuple[NoisyResidual, ...]:
    """Returns the residuals that add most of the noise at the default bits.

    Args:
        loss: The loss, as for `assess`.
        weights: Factors for the gradients of the parameter arrays.
        params: The parameters.
        batch: The other arguments of the loss.
        has_aux: Whether `loss` returns a pair.
        options: Options of `remat_compress`.
    """
    if options.get("rematerialize") or options.get("store") is not None:
        return ()

    def weighted(params: Any, *batch: Any) -> Any:
        leaves, structure = jax.tree.flatten(params)
        exact = map(jax.lax.stop_gradient, leaves)
        # Keeps the value of each parameter, and multiplies its gradient by the weight.
        leaves = [
            e + (x - e) * jnp.asarray(weight, x.dtype)
            for x, e, weight in zip(leaves, exact, weights, strict=True)
        ]
        return loss(jax.tree.unflatten(structure, leaves), *batch)

    # A target that every network meets. The bits that it measures with do not matter.
    wrapped = remat_compress(weighted, bits=AverageBits(8), **options)
    gradient = _gradient(wrapped, has_aux)
    with record_plans() as recorder, putting_in_force(AS_PLANNED):
        jax.make_jaxpr(gradient)(params, *batch)
    items = {
        name: item
        for plan in recorder.plans.values()
        for name, item in zip(site_names(plan), plan.kept, strict=True)
    }
    variances = measure_variances(gradient, params, *batch)
    total = sum(variances.values()) or 1.0
    ranked = sorted(variances, key=lambda name: -variances[name])
    return tuple(
        NoisyResidual(
            name=place_of(items[name]) if name in items else name,
            share=variances[name] / total,
            source=items[name].source if name in items else "",
        )
        for name in ranked[:_MOST_RESIDUALS]
    )


def _leaves(gradient: Any) -> dict[str, np.ndarray]:
    pairs = jax.tree_util.tree_leaves_with_path(gradient)
    return {jax.tree_util.keystr(path) or "params": np.asarray(x) for path, x in pairs}


def _time(
    plain: Any, compiled: Mapping[str, Any], arguments: tuple[Any, ...], rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Returns the seconds of each round, and their ratios to the plain gradient's."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in compiled}
    for _ in range(rounds):
        reference = _seconds(plain, *arguments)
        for name, run in compiled.items():
            seconds = _seconds(run, jnp.uint32(0), *arguments)
            found[name].append((seconds, seconds / reference))
    return found


def _seconds(run: Any, *arguments: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run(*arguments))
    return time.perf_counter() - start
