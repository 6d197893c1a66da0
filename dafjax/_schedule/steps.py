"""The steps of a backward pass, and the barriers that keep their order.

A step says what it restores, computes and waits for. Tests remove the barriers one by
one (`Ties`).

Gradients of weights are delayed until the weights have had their last use. An optimizer
that updates weights in place writes to a weight as soon as its gradient is computed. If
the backward pass reads the weight after that, for the cotangent of the weight's other
operand, XLA:CPU copies the weight at the start of the program, and the copy is live all
the time. (ResNet-18: 19 MB.)
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax

from dafjax._numbers import Array
from dafjax._trace.equation import Equation
from dafjax._trace.graph import is_array
from dafjax._trace.residuals import Program


@final
@dataclasses.dataclass(frozen=True)
class Rows:
    """The chunks into which rows are split: indices of an axis, mostly of the first.

    Attributes:
        num_parts: Number of chunks, all of the same size.
        is_interleaved: Whether a chunk takes every `num_parts`-th row, so that each
            device that shares the rows has some rows of every chunk. Otherwise a chunk
            takes consecutive rows.
    """

    num_parts: int
    is_interleaved: bool

    def divide(self, x: Array, axis: int = 0) -> Array:
        """Returns an array with its rows split; the chunks get their own axis.

        Args:
            x: The array.
            axis: The axis of its rows.
        """
        shape = list(x.shape)
        shape[axis] //= self.num_parts
        shape.insert(axis + self.is_interleaved, self.num_parts)
        return lax.reshape(x, shape)

    def part(self, divided: Array, number: Any, axis: int = 0) -> Array:
        """Returns a chunk of an array that `divide` returned."""
        place = axis + self.is_interleaved
        return lax.dynamic_index_in_dim(divided, number, place, keepdims=False)

    def put(self, divided: Array, part: Array, number: Any, axis: int = 0) -> Array:
        """Returns an array of `divide` with one chunk replaced."""
        place = axis + self.is_interleaved
        return lax.dynamic_update_index_in_dim(divided, part, number, place)

    def split(self, x: Array, axis: int = 0) -> tuple[Array, ...]:
        """Returns the chunks of an array."""
        if self.num_parts == 1:
            return (x,)
        divided = self.divide(x, axis)
        place = axis + self.is_interleaved
        return tuple(
            lax.index_in_dim(divided, number, place, keepdims=False)
            for number in range(self.num_parts)
        )

    def join(self, parts: Sequence[Array]) -> Array:
        """Returns the array that has these chunks of the first axis."""
        if self.num_parts == 1:
            return parts[0]
        place = int(self.is_interleaved)
        divided = [lax.expand_dims(part, (place,)) for part in parts]
        num_rows, *rest = parts[0].shape
        shape = (num_rows * self.num_parts, *rest)
        return lax.reshape(lax.concatenate(divided, place), shape)


@final
@dataclasses.dataclass(frozen=True)
class Ties:
    """Which barriers are inserted: all of them, except in tests that show their effect.

    Attributes:
        forward: Barriers that take a value and its packed form, before the value's
            later uses. Without them packing is delayed until the backward pass.
        cotangent: The dependency of decoding on the backward pass. Without it residuals
            are decoded as soon as they are packed.
        outgoing: Barriers that take the results of a backward stage, at the start of
            the next one. Without them small reductions are delayed, and their operands
            stay live.
        partial: Barriers between partial results, recomputed from one residual, and the
            decode of the next residual; on GPUs only if a custom call decodes it.
            Without them all residuals are decoded at once.
        operands: Barriers that take cotangents and the restored operands of the same
            equation, on CPUs. Without them copies of the cotangents stay live until the
            operands are restored.
        arguments: The dependency on the backward pass of large arguments and of zeros
            that lookup gradients are added to, and the dependency on the forward pass
            of keys. Without it rearranged copies of all weights, zeros for the
            gradients of tables and the random bits of all layers are live from the
            start.
        results: Barriers that take small results and the value packed last. Without
            them a loss is delayed until after the backward pass, and the logits stay
            live.
        layouts: Layout constraints on large delayed arguments, on their gradients, and
            on cotangents that products read. Without them XLA:GPU rearranges arguments
            before the dependency, the optimizer's state for them, and cotangents for
            each product.
        in_place: Whether results of products are barrier inputs only. Otherwise XLA:CPU
            does not compute in place in their buffers.
    """

    forward: bool = True
    cotangent: bool = True
    outgoing: bool = True
    partial: bool = True
    operands: bool = True
    arguments: bool = True
    results: bool = True
    layouts: bool = True
    in_place: bool = True


def not_before(token: jax.Array, value: jax.Array) -> jax.Array:
    """Returns an array that XLA cannot read or copy before the token is computed.

    Unlike a barrier it adds no copy if XLA rearranges the array anyway.

    Args:
        token: A scalar that is 0, which XLA does not know.
        value: Any array. For keys, their data wait.
    """
    aval = jax.typeof(value)
    if is_array(aval) and jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        data = not_before(token, jax.random.key_data(value))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    if not can_be_tied(value):
        return value
    return jax.lax.select(token == 0, value, jnp.zeros_like(value))


def fill_not_before(token: jax.Array, equation: Equation) -> list[jax.Array]:
    """Runs an equation that fills an array with a number, after the token.

    Args:
        token: A scalar that is 0, which XLA does not know.
        equation: The equation; its `filling` is not None.
    """
    (eqn,) = equation.jaxpr.eqns
    aval: Any = eqn.outvars[0].aval
    late = jnp.asarray(equation.filling, aval.dtype) + token.astype(aval.dtype)
    return [eqn.primitive.bind(late, **eqn.params)]


def can_be_tied(value: Any) -> bool:
    """Returns whether a value is an array of numbers: neither of keys nor a token."""
    aval = jax.typeof(value)
    return is_array(aval) and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)


@final
@dataclasses.dataclass(frozen=True)
class Unpacking:
    """Decodes a compressed residual.

    Attributes:
        value: The residual.
        behind: Earlier partial results: values recomputed in the same step that pass
            through a barrier before the decode.
    """

    value: int
    behind: tuple[int, ...] = ()

    @property
    def outputs(self) -> tuple[int, ...]:
        """The residual, as an equation has outputs."""
        return (self.value,)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    """A chunk loop that runs a stage or a part of it.

    Attributes:
        before: Decodes and equations that run before the loop, on whole arrays.
        by_rows: Decodes and equations that run on each chunk, in order.
        sources: Values that exist before the loop and are read in chunks.
        sums: Equations that run on each chunk after `by_rows`, and whose results are
            added over the chunks.
        finishing: Gradient epilogues, which turn a sum into a gradient as soon as the
            sum is complete.
        results: Values computed in chunks that later steps read.
        replaced: For each result the value whose buffer it overwrites, or `None`.
    """

    before: tuple[Unpacking | Equation, ...]
    by_rows: tuple[Unpacking | Equation, ...]
    sources: tuple[int, ...]
    sums: tuple[Equation, ...]
    finishing: tuple[Equation, ...]
    results: tuple[int, ...]
    replaced: tuple[int | None, ...]

    @property
    def made(self) -> tuple[int, ...]:
        """The values decoded or computed in chunks, in order."""
        return tuple(v for piece in self.by_rows for v in piece.outputs)

    @property
    def unpacked(self) -> tuple[int, ...]:
        """The residuals decoded in chunks, in order."""
        return tuple(p.value for p in self.by_rows if isinstance(p, Unpacking))


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Division:
    """The chunk plan of a stage.

    Attributes:
        num_rows: Length of the divided axis, the same for all chunked values.
        rows: How this axis is split into chunks.
        axes: Where it lies in each value that is chunked or read in chunks.
        loops: The chunk loops, in order.
        rest: Decodes and equations that run after the loops, on whole arrays.
        is_apart: Whether the chunks are unrolled in the program and their results stay
            separate arrays. Otherwise they run in a loop (`chunks.py`).
    """

    num_rows: int
    rows: Rows
    axes: Mapping[int, int]
    loops: tuple[Loop, ...]
    rest: tuple[Unpacking | Equation, ...]
    is_apart: bool

    @property
    def num_parts(self) -> int:
        """The number of chunks."""
        return self.rows.num_parts

    @property
    def stays_in_parts(self) -> bool:
        """Whether results remain chunked after the stage."""
        return self.is_apart and self.num_parts > 1

    @property
    def num_rows_of_part(self) -> int:
        """The number of rows per chunk."""
        return self.num_rows // self.num_parts

    @property
    def unpacked(self) -> tuple[int, ...]:
        """The residuals decoded in chunks, each listed once."""
        return tuple(dict.fromkeys(v for loop in self.loops for v in loop.unpacked))

    @property
    def products(self) -> list[Equation]:
        """The expensive equations that run in chunks, each listed once per loop."""
        runs = (p for loop in self.loops for p in (*loop.by_rows, *loop.sums))
        return [p for p in runs if isinstance(p, Equation) and not p.rule.is_cheap]

    @property
    def unpacked_in_all(self) -> tuple[int, ...]:
        """All decoded residuals, each listed once per decode."""
        whole = (self.rest, *(loop.before for loop in self.loops))
        return (
            *(v for loop in self.loops for v in loop.unpacked),
            *(p.value for ps in whole for p in ps if isinstance(p, Unpacking)),
        )


@final
@dataclasses.dataclass(frozen=True)
class Step:
    """One equation of the backward pass, with what must be ready before it.

    Attributes:
        equation: The equation; `None` stands for returning the gradients.
        begins: Whether a stage begins at this step.
        cotangents: If so, the backward-pass values that its barrier takes.
        awaited: Those `cotangents` that are barrier inputs only.
        given: If a stage begins, the saved inputs: uncompressed saved values and small
            arguments that pass through its barrier.
        settled: If a stage begins, late outputs: gradients of weights that have had
            their last use.
        restored: Decodes of residuals and recomputed forward equations, in order.
        delayed: Large arguments that are read no earlier than the stage begins.
        joined: Operands of the equation that pass through one barrier before it.
        finishes: Whether the equation is a gradient epilogue.
        division: If a stage begins, its chunk plan, or `None` if it is not chunked.
    """

    equation: Equation | None
    begins: bool
    cotangents: tuple[int, ...]
    awaited: tuple[int, ...]
    given: tuple[int, ...]
    restored: tuple[Unpacking | Equation, ...]
    delayed: tuple[int, ...]
    joined: tuple[int, ...]
    finishes: bool = False
    settled: tuple[int, ...] = ()
    division: Division | None = None

    @property
    def unpacked(self) -> tuple[int, ...]:
        """The residuals to decode, in order."""
        return tuple(r.value for r in self.restored if isinstance(r, Unpacking))

    @functools.cached_property
    def recomputed(self) -> tuple[Equation, ...]:
        """The forward equations to recompute, in order."""
        return tuple(r for r in self.restored if isinstance(r, Equation))


def written(pieces: Iterable[Unpacking | Equation | None]) -> set[int]:
    """Returns the operands of equations that XLA runs in kernels of their own.

    These must be in memory. XLA can compute all other operands inside the consumers.
    """
    return {
        value
        for piece in pieces
        if isinstance(piece, Equation) and not piece.is_fusible
        for value in piece.input_values
    }


def behind_last_reads(program: Program, steps: Sequence[Step]) -> tuple[Step, ...]:
    """Returns the steps, with gradients as late outputs after the weights' last use.

    Args:
        program: The program.
        steps: The steps of its backward pass.
    """
    moving = [number for number, moves in enumerate(program.perturbed) if moves]
    of_weights = {
        weight: gradient
        for weight, gradient in zip(moving, program.gradients, strict=True)
        if isinstance(gradient, int) and program.is_large(weight)
    }
    last_read: dict[int, int] = {}
    made: dict[int, int] = {}
    for now, step in enumerate(steps):
        if step.equation is None:
            continue
        for eqn in (*step.recomputed, step.equation):
            last_read.update(dict.fromkeys(eqn.input_values, now))
        made.update(dict.fromkeys(step.equation.outputs, now))
    begins = [now for now, step in enumerate(steps) if step.begins]
    settled: dict[int, tuple[int, ...]] = {}
    for weight, gradient in of_weights.items():
        read = last_read.get(weight, -1)
        behind = next((now for now in begins if now > read), None)
        if behind is not None and made.get(gradient, behind) < read:
            settled[behind] = (*settled.get(behind, ()), gradient)
    return tuple(
        dataclasses.replace(step, settled=settled.get(now, ()))
        for now, step in enumerate(steps)
    )
