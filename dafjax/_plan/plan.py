"""What is kept of one traced function, and how: its plan, with bytes."""

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
    """One value that waits for the backward pass.

    Attributes:
        program: The fingerprint of the program it is made in.
        value: Its number there.
        shape: Its shape.
        dtype: Its dtype.
        codec: How it is packed; `None` if it is kept as it is.
        name: Where in the model it is made.
        primitive: What makes it.
        source: The user's line that it comes from.
        is_packed: Whether it was packed where it was made: in the body of a loop or a
            branch, which has a plan of its own.
        stands_for: Of a normalized copy, the value that the plan decides about.
        sharding: How devices divide it, on meshes with explicit axes.
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
        """Bytes while it waits."""
        if self.codec is None:
            return self.raw_nbytes
        return self.codec.packed_nbytes(self.like)


# At the peak there are some three values as large as the largest, so that this share of
# one is some 4 % of the peak.
_LEAST_SAVED = 1 / 8


@final
@dataclasses.dataclass(frozen=True, eq=False)
class ProgramPlan:
    """All decisions for one traced function.

    Attributes:
        program: The function.
        fingerprint: That of the function before poolings were rewritten.
        function: What tells the function from others, whatever bits codes have.
        kept: What is kept, in the order in which it is made. Everything else that the
            backward pass needs is an argument or recomputed.
        arguments: The arguments that the backward pass reads.
        recomputed: For every value that the backward pass computes again, how.
        slices: The arguments that are slices of what a loop runs over: they are copied
            for each iteration, but no earlier than they are read.
        masks: For each mask that is made of a rectifier's result, that result.
        copies: For each normalized copy, the value that it stands for.
        brief: What the store leaves in arrays of what is kept in codes, for it waits
            only while the function needs little memory.
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
        """Returns a key that sorts values so that each follows what restores it.

        Values are numbered as they are made, but for copies: a copy comes right before
        the value that it stands for.
        """
        return self.copies.get(value, value), value not in self.copies

    @property
    def compresses(self) -> bool:
        """Whether anything is kept in codes."""
        return any(kept.codec is not None for kept in self.kept)

    @property
    def is_worth_it(self) -> bool:
        """Whether codes save much beside the largest product that the program makes.

        Otherwise the barriers that keep residuals in codes can cost more than codes
        save: they fix an order, and a value as large as the largest one may wait in it.
        """
        if any(kept.is_packed for kept in self.kept):
            return True
        program = self.program
        saved = sum(kept.raw_nbytes - kept.stored_nbytes for kept in self.kept)
        largest = max(
            (
                program.nbytes(value)
                for eqn in (*program.forward, *program.backward)
                if not eqn.rule.is_cheap
                for value in eqn.outputs
            ),
            default=0,
        )
        return saved > _LEAST_SAVED * largest

    @property
    def whole_weights(self) -> frozenset[int]:
        """The large arguments that the backward pass reads whole."""
        large = filter(self.program.is_large, self.arguments)
        return frozenset(large) - self.slices

    @property
    def weights_as_read(self) -> frozenset[int]:
        """Those arguments; of one that is only read converted, what it is converted to.

        As weights of float32 in a model that computes in bfloat16. Not those that
        products read turned, as a tied table: XLA:GPU reads them as they lie.
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
