"""Plans: what is saved of a program, under which name, and how to see it.

A store distinguishes the residuals of a plan by their names (residual ids).

Some residuals are short-lived: stored only while live memory is far below its peak.

XLA gives a program one piece of memory, as large as the live values at the peak. The
late layers of a convolutional network have small values. Their residuals are packed
after the early layers have run, and read before the cotangents of the early layers are
computed. So these residuals fit into memory that the program has for the early layers.
Anywhere else they would cost their bytes.
"""

import collections
import contextlib
import contextvars
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, final

import jax

from dafjax import config
from dafjax._contexts import AS_PLANNED, putting_in_force
from dafjax._trace.equation import Equation, values_of
from dafjax._trace.graph import live_equations
from dafjax._trace.residuals import Program
from dafjax._trace.tracing import ClosedJaxpr, largest_nbytes, listed_name, trace
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
    def values_taken_away(self) -> float:
        """The bytes that codes take away, over those of the largest value made."""
        saved = sum(
            # What a loop packed had at least four times as many bytes.
            3 * kept.raw_nbytes
            if kept.is_packed
            else kept.raw_nbytes - kept.stored_nbytes
            for kept in self.kept
        )
        equations = (*self.program.forward, *self.program.backward)
        made = (largest_nbytes(eqn.jaxpr) for eqn in equations)
        return saved / max((*made, 1))

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


def place_of(item: Kept) -> str:
    """Returns the place in the model and the primitive that compute a value."""
    return listed_name(item.name, item.primitive)


def site_names(plan: ProgramPlan) -> list[str]:
    """Returns a name for each of `plan.kept`, the same in every process.

    A name consists of the place, which `print_saved_residuals` shows; a number, if the
    place computes several residuals; and some digits of the function's hash, because
    blocks that are wrapped one by one have equal names of places. Blocks that are equal
    in everything, shapes included, share their residual ids.
    """
    seen: collections.Counter[str] = collections.Counter()
    names = []
    for item in plan.kept:
        place = place_of(item)
        seen[place] += 1
        number = f" {seen[place]}" if seen[place] > 1 else ""
        names.append(f"{place}{number} @{plan.function[:8]}")
    return names


@final
class PlanRecorder:
    """Collects the plans of the wrapped functions that are traced meanwhile.

    Each traced forward pass is a call with its own name. A search of the program for
    these names finds the forward passes that are part of it: JAX also traces others.
    """

    # Names are never reused, because JAX may return a trace from its cache.
    _NUMBERS = itertools.count()

    def __init__(self) -> None:
        self.plans: dict[str, ProgramPlan] = {}
        # The derivative rules of these functions, and of bodies inside them.
        self.rules: list[Any] = []

    def calling(
        self, plan: ProgramPlan, function: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Returns a forward pass of a plan as a call with a name of its own."""

        def run(*operands: Any, **keywords: Any) -> Any:
            return function(*operands, **keywords)

        run.__name__ = f"dafjax_forward_{next(self._NUMBERS)}"
        self.plans[run.__name__] = plan
        return jax.jit(run)


@contextlib.contextmanager
def record_plans() -> Iterator[PlanRecorder]:
    """Collects the plans of the wrapped functions that are differentiated meanwhile."""
    recorder = PlanRecorder()
    token = _RECORDER.set(recorder)
    try:
        yield recorder
    finally:
        _RECORDER.reset(token)


def record_gradient(
    fun: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[PlanRecorder, ClosedJaxpr]:
    """Traces a function that is differentiated by all positional arguments.

    Args:
        fun: The function.
        args: Its arguments: arrays, or `jax.ShapeDtypeStruct`s in their place.
        kwargs: Its keyword arguments.

    Returns:
        The recorder, and the traced program.
    """

    def differentiated(args: Any, kwargs: Any) -> Any:
        _, pullback = jax.vjp(lambda args: fun(*args, **kwargs), args)
        return pullback

    leaves, structure = jax.tree.flatten((args, kwargs))
    with record_plans() as recorder, putting_in_force(AS_PLANNED):
        closed, _, _ = trace(
            lambda *leaves: differentiated(*jax.tree.unflatten(structure, leaves)),
            leaves,
        )
    return recorder, closed


_RECORDER: contextvars.ContextVar[PlanRecorder | None] = contextvars.ContextVar(
    "recorder", default=None
)


def current_recorder() -> PlanRecorder | None:
    """Returns the recorder that traced forward passes report to, if there is one."""
    return _RECORDER.get()


def find_brief(plan: ProgramPlan) -> frozenset[int]:
    """Returns the residuals in inexact codes beside which no large value is made.

    Returns none if the results of the function, without returned arguments, together
    exceed the limit: their readers may need much memory before the backward pass
    begins.

    Args:
        plan: The plan of a function whose backward pass follows its forward pass. (The
            body of a loop is no such function.)
    """
    program = plan.program
    kept = {
        item.value: item
        for item in plan.kept
        if item.codec is not None and not item.codec.is_exact
    }
    read_beside = _largest_until_last_read(plan)
    results = values_of(program.results)
    forward = live_equations(
        program.forward, (*results, *(item.value for item in plan.kept))
    )
    expensive = (eqn for eqn in forward if not eqn.rule.is_cheap)
    # Cheap results, and values inside a loop, may never be in memory as a whole.
    largest = max(
        (program.nbytes(v) for eqn in expensive for v in eqn.outputs), default=0
    )
    most = int(largest * config.SHORT_LIVED)
    made = {v for v in results if v >= program.num_arguments}
    if sum(map(program.nbytes, made)) > most:
        return frozenset()
    brief = set()
    beside = taken = 0
    for eqn in reversed(forward):
        for value in kept.keys() & eqn.outputs:
            nbytes = kept[value].stored_nbytes
            is_brief = max(beside, read_beside[value]) <= most
            if is_brief and taken + nbytes <= most:
                brief.add(value)
                taken += nbytes
        beside = max(beside, largest_nbytes(eqn.jaxpr))
    return frozenset(brief)


def _largest_until_last_read(plan: ProgramPlan) -> dict[int, int]:
    """Returns, for each restored value, the bytes of the largest value made by then.

    "By then" is the last use of the restored value. Counts the values that the backward
    pass has computed or restored.
    """
    program = plan.program
    gradients = values_of(program.gradients)
    reads = [*(eqn.input_values for eqn in program.backward), gradients]
    made = [*(largest_nbytes(eqn.jaxpr) for eqn in program.backward), 0]
    restored = _restored_first(plan, reads)
    of_each = (
        max((nbytes, *map(program.nbytes, new)))
        for nbytes, new in zip(made, restored, strict=True)
    )
    largest = list(itertools.accumulate(of_each, max))
    found: dict[int, int] = {}
    # In reverse order, the first read of a value is its last use.
    last_reads = _restored_first(plan, reversed(reads))
    for nbytes, new in zip(reversed(largest), last_reads, strict=True):
        found.update(dict.fromkeys(new, nbytes))
    return found


def _restored_first(
    plan: ProgramPlan, reads: Iterable[Iterable[int]]
) -> Iterator[list[int]]:
    """Yields, for each read, the values that it is the first to unpack or recompute."""
    in_codes = {item.value for item in plan.kept if item.codec is not None}
    known: set[int] = set()
    for wanted in reads:
        new = []
        stack = list(wanted)
        while stack:
            value = stack.pop()
            is_packed = value in in_codes
            if value in known or not (is_packed or value in plan.recomputed):
                continue
            known.add(value)
            new.append(value)
            if not is_packed:
                stack.extend(plan.recomputed[value].input_values)
        yield new
