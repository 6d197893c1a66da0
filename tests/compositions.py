"""The ways in which users compose a wrapped function with JAX, as a table."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
from jax import export

import dafjax
from tests import networks


# Wraps a function of the user: `remat_compress`, `jax.checkpoint`, or nothing.
Wrap: TypeAlias = Callable[..., Callable[..., Any]]

WIDTH = 128


@final
@dataclasses.dataclass(frozen=True)
class Size:
    """How large an example is."""

    depth: int
    rows: int


# For values.
SMALL = Size(depth=2, rows=64)
# For memory: an activation has 1 MiB, the weights of a layer 64 KiB.
LARGE = Size(depth=10, rows=2048)


def example(size: Size, dtype: Any = jnp.float32) -> tuple[Any, jax.Array]:
    """Returns weights of dense layers and `[rows, WIDTH]` inputs."""
    key = jax.random.key(0)
    p = networks.mlp_params(key, (WIDTH,) * (size.depth + 1))
    x = jax.random.normal(jax.random.fold_in(key, size.depth), (size.rows, WIDTH))
    return jax.tree.map(lambda leaf: leaf.astype(dtype), (p, x))


def inputs_alone(size: Size) -> Any:
    return example(size)[1:]


def with_key(size: Size) -> Any:
    return *example(size), jax.random.key(1)


def with_ids(size: Size) -> Any:
    p, x = example(size)
    return p, x[:16], jnp.arange(size.rows) % 16


def of_complex(size: Size) -> Any:
    turn = lambda leaf: jax.lax.complex(leaf, leaf[::-1]) / 2**0.5
    return jax.tree.map(turn, example(size))


@final
@dataclasses.dataclass(frozen=True)
class Composition:
    """One way to compose.

    Attributes:
        program: From what wraps a function, what the user calls in every step. It
            returns a gradient, and what else is asked for.
        temp: At 2 bits, the most temporary bytes over those with nothing wrapped, with
            any jax that is supported (of plain loops 0.11 needs a third less than
            0.10). `None` for what is not compiled as one program.
        plain: What the temporary bytes are compared to, if it is not `program`. On the
            CPU XLA undoes `jax.checkpoint` with jax 0.10, not with 0.11.
        arguments: The program's arguments.
        error: At 8 bits, the least and the most relative error of what it returns.
        traces: How often the Python body of the wrapped function runs in two calls.
        settings: A context to trace and to run it in.
    """

    program: Callable[[Wrap], Callable[..., Any]]
    _: dataclasses.KW_ONLY
    temp: float | None
    plain: Callable[[Wrap], Callable[..., Any]] | None = None
    arguments: Callable[[Size], Any] = example
    error: tuple[float, float] = (1e-5, 0.03)
    traces: int = 1
    settings: Callable[[], contextlib.AbstractContextManager[Any]] = (
        contextlib.nullcontext
    )


def layer(p: Any, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ p["w"] + p["b"])


def norm_layer(p: Any, x: jax.Array) -> jax.Array:
    # Calls of `mean` and `var` share a sum, and are calls with constants.
    y = (x - jnp.mean(x, -1, keepdims=True)) / jnp.sqrt(
        jnp.var(x, -1, keepdims=True) + 1e-5
    )
    return x + jnp.tanh(y @ p["w"] + p["b"])


def run_layers(p: Any, x: jax.Array) -> jax.Array:
    for one in p:
        x = layer(one, x)
    return x


def loss(p: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(run_layers(p, x)))


# Losses that call a loss.


def of_vmap(f: Any) -> Any:
    return lambda p, x: jnp.mean(jax.vmap(f, (None, 0))(p, x.reshape(4, -1, WIDTH)))


def of_micro_batches(f: Any) -> Any:
    def mean(p: Any, x: jax.Array) -> jax.Array:
        batches = x.reshape(4, -1, WIDTH)
        total, _ = jax.lax.scan(
            lambda total, x: (total + f(p, x), None), jnp.float32(0), batches
        )
        return total / len(batches)

    return mean


def of_cond(f: Any) -> Any:
    return lambda p, x: jax.lax.cond(
        jnp.sum(x) < 1e9, f, lambda p, x: 2 * jnp.mean(x @ p[0]["w"]), p, x
    )


def of_while(f: Any) -> Any:
    """Scales by a power of two that a loop of unknown length finds."""

    def scaled(p: Any, x: jax.Array) -> jax.Array:
        largest = jax.lax.stop_gradient(jnp.max(jnp.abs(x)))
        scale, _ = jax.lax.while_loop(
            lambda state: state[1] > 2,
            lambda state: (state[0] / 2, state[1] / 2),
            (jnp.float32(1), largest),
        )
        return f(p, x * scale)

    return scaled


def inside(compose: Any) -> Callable[[Wrap], Any]:
    return lambda wrap: jax.jit(jax.grad(compose(wrap(loss))))


def outside(compose: Any) -> Callable[[Wrap], Any]:
    return lambda wrap: jax.jit(jax.grad(wrap(compose(loss))))


# Blocks in a loop of JAX.


def scan_loss(p: Any, x: jax.Array, block: Any = layer) -> jax.Array:
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *p)
    x, _ = jax.lax.scan(lambda x, p: (block(p, x), None), x, stacked)
    return jnp.mean(jnp.square(x))


def fori_loss(p: Any, x: jax.Array, block: Any = layer) -> jax.Array:
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *p)

    def step(n: jax.Array, x: jax.Array) -> jax.Array:
        return block(jax.tree.map(lambda leaf: leaf[n], stacked), x)

    return jnp.mean(jnp.square(jax.lax.fori_loop(0, len(p), step, x)))


def blocks_loss(p: Any, x: jax.Array, block: Any = layer) -> jax.Array:
    for one in p:
        x = block(one, x)
    return jnp.mean(jnp.square(x))


def of_blocks(loop: Any) -> Callable[[Wrap], Any]:
    return lambda wrap: jax.jit(
        jax.grad(functools.partial(loop, block=wrap(layer, activation_argnums=1)))
    )


def of_loop(loop: Any) -> Callable[[Wrap], Any]:
    return lambda wrap: jax.jit(jax.grad(wrap(loop)))


def nested(wrap: Wrap) -> Any:
    inner = functools.partial(blocks_loss, block=wrap(layer, activation_argnums=1))
    return jax.jit(jax.grad(wrap(inner)))


# The others.


def eager(wrap: Wrap) -> Any:
    return jax.grad(wrap(loss))


def compiled(wrap: Wrap) -> Any:
    return jax.jit(jax.grad(wrap(loss)))


def of_both(wrap: Wrap) -> Any:
    return jax.jit(jax.grad(wrap(loss), argnums=(0, 1)))


def value_too(wrap: Wrap) -> Any:
    return jax.jit(jax.value_and_grad(wrap(loss)))


def has_aux(wrap: Wrap) -> Any:
    def with_aux(p: Any, x: jax.Array) -> Any:
        y = run_layers(p, x)
        return jnp.mean(jnp.square(y)), {"mean": y.mean(0), "rows": len(x)}

    return jax.jit(jax.value_and_grad(wrap(with_aux), has_aux=True))


def per_example(wrap: Wrap) -> Any:
    gradients = jax.vmap(jax.grad(wrap(loss)), (None, 0))
    return jax.jit(lambda p, x: gradients(p, x.reshape(4, -1, WIDTH)))


def per_model(wrap: Wrap) -> Any:
    gradients = jax.vmap(jax.grad(wrap(loss)), (0, None), -1)

    def run(p: Any, x: jax.Array) -> Any:
        return gradients(jax.tree.map(lambda leaf: jnp.stack([leaf, -leaf]), p), x)

    return jax.jit(run)


def per_model_and_example(wrap: Wrap) -> Any:
    gradients = jax.vmap(jax.grad(wrap(loss)), (0, 1))

    def run(p: Any, x: jax.Array) -> Any:
        doubled = jax.tree.map(lambda leaf: jnp.stack([leaf, -leaf]), p)
        return gradients(doubled, x.reshape(-1, 2, WIDTH))

    return jax.jit(run)


def of_some_leaves(wrap: Wrap) -> Any:
    """`vmap` over the biases alone."""
    gradient = jax.grad(wrap(loss))

    def run(p: Any, x: jax.Array) -> Any:
        doubled = [{**one, "b": jnp.stack([one["b"], one["b"] + 1])} for one in p]
        axes = [{"w": None, "b": 0} for _ in p]
        return jax.vmap(gradient, (axes, None))(doubled, x)

    return jax.jit(run)


def vmap_twice(wrap: Wrap) -> Any:
    rows = jax.vmap(jax.grad(wrap(loss)), (None, 0))
    gradients = jax.vmap(rows, (None, 0))
    return jax.jit(lambda p, x: gradients(p, x.reshape(2, 2, -1, WIDTH)))


def accumulate(wrap: Wrap) -> Any:
    gradient = jax.grad(wrap(loss))

    def run(p: Any, x: jax.Array) -> Any:
        def add(total: Any, batch: jax.Array) -> Any:
            return jax.tree.map(jnp.add, total, gradient(p, batch)), None

        zeros = jax.tree.map(jnp.zeros_like, p)
        return jax.lax.scan(add, zeros, x.reshape(2, -1, WIDTH))[0]

    return jax.jit(run)


def donated(wrap: Wrap) -> Any:
    gradient = jax.grad(wrap(loss))

    def run(p: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda w, g: w - g, p, gradient(p, x))

    return jax.jit(run, donate_argnums=0)


def vjp_twice(wrap: Wrap) -> Any:
    def run(p: Any, x: jax.Array) -> Any:
        _, pullback = jax.vjp(wrap(run_layers), p, x)
        return pullback(x)[0], pullback(2 * x)[0]

    return jax.jit(run)


def vjp_twice_eager(wrap: Wrap) -> Any:
    wrapped = wrap(loss)

    def run(p: Any, x: jax.Array) -> Any:
        _, pullback = jax.vjp(wrapped, p, x)
        return pullback(jnp.float32(1)), pullback(jnp.float32(2))

    return run


def jacrev(wrap: Wrap) -> Any:
    def quarters(p: Any, x: jax.Array) -> jax.Array:
        y = run_layers(p, x).reshape(4, -1)
        return jnp.mean(jnp.square(y), axis=1)

    return jax.jit(jax.jacrev(wrap(quarters)))


def closure_over_traced(wrap: Wrap) -> Any:
    return jax.jit(jax.grad(lambda p, x: wrap(lambda x: loss(p, x))(x)))


def closure_over_traced_eager(wrap: Wrap) -> Any:
    return jax.grad(lambda p, x: wrap(lambda x: loss(p, x))(x))


def closure_over_arrays(wrap: Wrap) -> Any:
    p, _ = example(LARGE)
    return jax.jit(jax.grad(wrap(lambda x: loss(p, x))))


def static_arguments(wrap: Wrap) -> Any:
    def powered(p: Any, x: jax.Array, power: int) -> jax.Array:
        return jnp.mean(run_layers(p, x) ** power)

    gradient = jax.grad(wrap(powered, static_argnums=2))
    return jax.jit(lambda p, x: gradient(p, x, 2))


def dropout(wrap: Wrap) -> Any:
    def dropped(p: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        for n, one in enumerate(p):
            y = jnp.tanh(x @ one["w"] + one["b"])
            kept = jax.random.bernoulli(jax.random.fold_in(key, n), 0.75, y.shape)
            x = x + jnp.where(kept, y / 0.75, 0.0)
        return jnp.mean(jnp.square(x))

    return jax.jit(jax.grad(wrap(dropped)))


def integers(wrap: Wrap) -> Any:
    def looked_up(p: Any, table: jax.Array, ids: jax.Array) -> jax.Array:
        return loss(p, table[ids])

    return jax.jit(jax.grad(wrap(looked_up), argnums=(0, 1, 2), allow_int=True))


def complex_numbers(wrap: Wrap) -> Any:
    def squared(p: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.abs(run_layers(p, x)) ** 2)

    return jax.jit(jax.grad(wrap(squared)))


def spectrum(wrap: Wrap) -> Any:
    def powers(p: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.abs(jnp.fft.fft(run_layers(p, x))) ** 2)

    return jax.jit(jax.grad(wrap(powers)))


def half_precision(wrap: Wrap) -> Any:
    wrapped = wrap(lambda p, x: loss(p, x).astype(jnp.float32))
    return jax.jit(jax.grad(wrapped))


def exported(wrap: Wrap) -> Any:
    gradient = jax.jit(jax.grad(wrap(loss)))
    return jax.jit(lambda p, x: export_allowed(gradient)(p, x).call(p, x))


def export_allowed(function: Any) -> Callable[..., export.Exported]:
    """Returns `jax.export` of a function that may contain dafjax's custom calls."""
    names = dafjax.custom_calls()
    allowed = [export.DisabledSafetyCheck.custom_call(name) for name in names]
    return export.export(function, disabled_checks=allowed)


def x64() -> contextlib.AbstractContextManager[Any]:
    return jax.enable_x64(True)


COMPOSITIONS = {
    "jit": Composition(compiled, temp=0.39),
    "eager": Composition(eager, temp=None),
    "all arguments": Composition(of_both, temp=0.35),
    "value_and_grad": Composition(value_too, temp=0.39),
    "has_aux": Composition(has_aux, temp=0.44),
    "vmap over examples": Composition(per_example, temp=0.3),
    "vmap over models": Composition(per_model, temp=0.37),
    "vmap over both": Composition(per_model_and_example, temp=0.4),
    "vmap over some leaves": Composition(of_some_leaves, temp=0.35),
    "vmap of vmap": Composition(vmap_twice, temp=0.3),
    "in vmap": Composition(inside(of_vmap), temp=0.37),
    "of vmap": Composition(outside(of_vmap), temp=0.37),
    "in micro-batches": Composition(inside(of_micro_batches), temp=0.18),
    "of micro-batches": Composition(outside(of_micro_batches), temp=0.17),
    "accumulated gradients": Composition(accumulate, temp=0.43),
    "in cond": Composition(inside(of_cond), temp=0.34),
    "of cond": Composition(outside(of_cond), temp=0.34),
    "in while": Composition(inside(of_while), temp=0.42),
    "of while": Composition(outside(of_while), temp=0.37),
    "in jit": Composition(inside(jax.jit), temp=0.39),
    "of jit": Composition(outside(jax.jit), temp=0.39),
    "in jax.checkpoint": Composition(inside(jax.checkpoint), temp=0.39),
    "of jax.checkpoint": Composition(outside(jax.checkpoint), temp=0.39),
    "blocks": Composition(of_blocks(blocks_loss), temp=0.28),
    "in scan": Composition(of_blocks(scan_loss), temp=0.32),
    "of scan": Composition(of_loop(scan_loss), temp=0.32),
    "in fori_loop": Composition(of_blocks(fori_loss), temp=0.32),
    "of fori_loop": Composition(of_loop(fori_loss), temp=0.32),
    "nested": Composition(nested, temp=0.39, traces=2),
    "of blocks in jax.checkpoint": Composition(
        of_loop(functools.partial(blocks_loss, block=jax.checkpoint(layer))),
        temp=0.38,
        plain=of_loop(blocks_loss),
    ),
    "of norms in jax.checkpoint": Composition(
        of_loop(functools.partial(blocks_loss, block=jax.checkpoint(norm_layer))),
        # On jax 0.9, where the plain loss needs less, 0.26.
        temp=0.28 if jax.__version_info__ < (0, 10) else 0.21,
        plain=of_loop(functools.partial(blocks_loss, block=norm_layer)),
    ),
    "donated": Composition(donated, temp=0.4),
    "vjp twice": Composition(vjp_twice, temp=0.59),
    "vjp twice, eager": Composition(vjp_twice_eager, temp=None),
    "jacrev": Composition(jacrev, temp=0.58),
    "closure over a traced value": Composition(closure_over_traced, temp=0.39),
    # A new function in every call.
    "closure over a traced value, eager": Composition(
        closure_over_traced_eager, temp=None, traces=2
    ),
    "closure over arrays": Composition(
        closure_over_arrays, temp=0.58, arguments=inputs_alone
    ),
    "static arguments": Composition(static_arguments, temp=0.39),
    "random keys": Composition(dropout, temp=0.26, arguments=with_key),
    "float0": Composition(integers, temp=0.37, arguments=with_ids),
    # The small arrays near poles of a complex tanh have large codes.
    "complex": Composition(
        complex_numbers, temp=0.6, arguments=of_complex, error=(1e-5, 2)
    ),
    "float64": Composition(
        compiled,
        temp=0.4,
        arguments=functools.partial(example, dtype=jnp.float64),
        settings=x64,
    ),
    "complex in part": Composition(spectrum, temp=0.32),
    "float32 in x64": Composition(compiled, temp=0.39, settings=x64),
    "bfloat16": Composition(
        half_precision,
        temp=0.42,
        arguments=functools.partial(example, dtype=jnp.bfloat16),
    ),
    "float16": Composition(
        half_precision,
        temp=0.4,
        arguments=functools.partial(example, dtype=jnp.float16),
    ),
    "jax.export": Composition(exported, temp=0.39),
}
