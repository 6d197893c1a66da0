"""The plan of one traced function: which values are stored, how, in how many bytes."""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any, final

import jax

from dafjax._trace.equation import Equation
from dafjax._trace.residuals import Program
from dafjax.codecs import AbstractCodec


@final
@dataclasses.dataclass(frozen=True)
class Kept:
    """One value that is saved for the backward pass.

    Attributes:
        program: The hash of the program that computes it.
        value: Its number there.
        shape: Its shape.
        dtype: Its dtype.
        codec: How it is packed; `None` if it is saved as it is.
        name: The place in the model that computes it.
        primitive: The primitive that computes it.
        source: The user's line that it comes from.
        is_packed: Whether it is already packed where it is computed: in the body of a
            loop or a branch, which has a plan of its own.
        stands_for: For a normalized copy, the value that the plan decides about.
        sharding: How it is divided among devices, on meshes with explicit axes.
    """

    program: str
    value: int
    shape: tuple[int, ...]
    dtype: Any
    codec: AbstractCodec | None
    name: str
    primitive: str
    source: str = dataclasses.field(compare=False)
    is_packed: bool = False
    stands_for: int | None = None
    sharding: Any = dataclasses.field(default=None, compare=False)

    @property
    def like(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype to restore."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)

    @property
    def raw_nbytes(self) -> int:
        """Bytes as an ordinary array."""
        return self.like.size * getattr(self.dtype, "itemsize", 0)

    @property
    def stored_nbytes(self) -> int:
        """Bytes while it is stored."""
        if self.codec is None:
            return self.raw_nbytes
        return self.codec.packed_nbytes(self.like)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class ProgramPlan:
    """All decisions for one traced function.

    Attributes:
        program: The function.
        fingerprint: The hash of the function before poolings were rewritten.
        function: Identifies the function, independently of the bits of codes.
        kept: The saved values, in the order of their computation. Everything else that
            the backward pass needs is an argument or recomputed.
        arguments: The arguments that the backward pass reads.
        recomputed: For every value that the backward pass recomputes, its equation.
        slices: The arguments that are slices of arrays that a loop runs over. They are
            copied for each iteration, but no earlier than they are read.
        masks: For each ReLU mask that is computed from the ReLU's result, that result.
        copies: For each normalized copy, the value that it stands for.
        brief: The short-lived values in codes. The store leaves them in arrays, because
            they are stored only while the function needs little memory.
    """

    program: Program
    fingerprint: str
    function: str
    kept: tuple[Kept, ...]
    arguments: tuple[int, ...]
    recomputed: Mapping[int, Equation]
    slices: frozenset[int] = frozenset()
    masks: Mapping[int, int] = dataclasses.field(default_factory=dict)
    copies: Mapping[int, int] = dataclasses.field(default_factory=dict)
    brief: frozenset[int] = frozenset()

    def order(self, value: int) -> tuple[int, bool]:
        """Returns a sort key; in its order, each value follows those that restore it.

        Values are numbered in the order of computation, except for copies: a copy comes
        right before the value that it stands for.
        """
        return self.copies.get(value, value), value not in self.copies

    @property
    def compresses(self) -> bool:
        """Whether any value is stored in codes."""
        return any(kept.codec is not None for kept in self.kept)

    @property
    def whole_weights(self) -> frozenset[int]:
        """The large arguments that the backward pass reads whole."""
        large = filter(self.program.is_large, self.arguments)
        return frozenset(large) - self.slices

    @property
    def weights_as_read(self) -> frozenset[int]:
        """The `whole_weights`, each replaced by its conversions if only these are read.

        An example are float32 weights in a model that computes in bfloat16. Leaves out
        weights that products read transposed only, such as a tied embedding table:
        XLA:GPU reads these in their stored layout.
        """
        readers: dict[int, list[Equation]] = collections.defaultdict(list)
        for eqn in {*self.program.backward, *self.recomputed.values()}:
            for value in dict.fromkeys(eqn.whole_input_values):
                readers[value].append(eqn)
        found: set[int] = set()
        for weight in self.whole_weights:
            if all(eqn.rule.converts for eqn in readers[weight]):
                found.update(v for eqn in readers[weight] for v in eqn.outputs)
            else:
                found.add(weight)

        def is_only_turned(value: int) -> bool:
            return all(
                eqn.primitive == "transpose"
                and all(e.rule.is_product for e in readers[eqn.outputs[0]])
                for eqn in readers[value]
            )

        return frozenset(v for v in found if not is_only_turned(v))
