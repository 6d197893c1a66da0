"""The order of products, and the stages of a backward pass.

JAX orders independent products as the forward pass reads their operands. For the
product of attention probabilities and values it computes the cotangent of the
probabilities first. This cotangent is as large as the probabilities, and is live while
they are decoded for the cotangent of the values, which is small. In the other order
neither is live during the other's product.

For the convolution in a shortcut that halves the image, JAX computes the cotangent of
the image long before the other cotangent that is added to it. Its operand is half as
large and can stay live instead. Then the gradient of the convolution's kernel can also
be delayed, to the other product that reads the image, and the image is decoded once for
both.

A stage ends where it can be chunked.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import final

from dafjax import config
from dafjax._plan.plan import ProgramPlan
from dafjax._schedule.chunking import Parts, divide, read_in
from dafjax._schedule.steps import Division, Rows, Step
from dafjax._trace.equation import Equation, values_of
from dafjax._trace.graph import readers_of
from dafjax._trace.residuals import Program


def order_products(
    plan: ProgramPlan, *, are_apart: bool = False
) -> tuple[Equation, ...]:
    """Orders the backward pass so that fewer bytes are live during its products.

    Two expensive equations with only cheap ones between them are swapped if both then
    need less memory, for decoded operands and for results. On GPUs there are two more
    moves. A product whose results are larger than the operands that only it still reads
    moves right before the first reader of its results. A product whose operands all
    stay live anyway moves right after a product that decodes the same residuals. (Chunk
    loops write results into the buffers of operands: with these moves a ResNet-18 would
    need an eighth more memory.) All other equations stay in order.

    Args:
        plan: The program and its saved residuals.
        are_apart: Whether the order is for GPUs, as in `Parts`.

    Returns:
        The equations of `plan.program.backward`, each after those whose results it
        reads.
    """
    program = plan.program
    # Values that are decoded, or recomputed from decoded ones. Values computed from
    # arguments alone do not count: transposed weights are read in place.
    coded = {item.value for item in plan.kept if item.codec is not None}
    raw = {item.value for item in plan.kept if item.codec is None}
    for equation in program.forward:
        if not coded.isdisjoint(equation.input_values):
            coded.update(v for v in equation.outputs if v not in raw)

    def restored(eqn: Equation) -> int:
        return sum(program.nbytes(v) for v in coded.intersection(eqn.input_values))

    def made(eqn: Equation) -> int:
        return sum(map(program.nbytes, eqn.outputs))

    def peak(first: Equation, second: Equation) -> int:
        while_second_runs = made(first) + restored(second) + made(second)
        return max(restored(first) + made(first), while_second_runs)

    equations = _delay_expansions(plan)
    place = _next_product(equations, 0)
    while (behind := _next_product(equations, place + 1)) < len(equations):
        stretch = equations[place : behind + 1]
        first, second = stretch[0], stretch[-1]
        moved = _independent_of_first(stretch)
        if moved and peak(second, first) < peak(first, second):
            left = [eqn for eqn in stretch if eqn not in moved]
            equations[place : behind + 1] = [*moved, *left]
            place += len(moved)
        else:
            place = behind
    if not are_apart:
        return tuple(equations)
    order = _Order(program, equations)
    order.delay_results()
    order.join_readers(coded)
    return tuple(order.equations)


def _delay_expansions(plan: ProgramPlan) -> list[Equation]:
    """Returns the backward pass with cheap expansions right before their first reader.

    Such is an outer product, or a broadcast, and what is computed from it element by
    element: it is larger than all that it follows from. Computed earlier, it would be
    live across barriers in place of that.
    """
    program = plan.program
    expanded = _expansions(plan).difference(values_of(program.gradients))
    ordered: list[Equation] = []
    delayed: dict[int, Equation] = {}

    def add(eqn: Equation) -> None:
        # Values are numbered in program order; the last one comes first.
        for value in sorted(eqn.input_values, reverse=True):
            if value in delayed:
                add(delayed[value])
        for value in eqn.outputs:
            delayed.pop(value, None)
        ordered.append(eqn)

    for eqn in program.backward:
        if eqn.outputs and expanded.issuperset(eqn.outputs):
            delayed.update(dict.fromkeys(eqn.outputs, eqn))
        else:
            add(eqn)
    return ordered


def _expansions(plan: ProgramPlan) -> set[int]:
    """Returns the values of the backward pass that follow cheaply from fewer bytes."""
    program = plan.program
    # Bytes that must be live for a value to be computed when it is read. Arguments are
    # live anyway.
    needed = dict.fromkeys(range(program.num_arguments), 0)
    kept = {item.value: program.nbytes(item.value) for item in plan.kept}
    needed.update((v, program.nbytes(v)) for v in program.cotangents)
    needed.update(kept)
    for eqn in (*program.forward, *program.backward):
        nbytes = sum(needed[v] for v in eqn.input_values)
        for value in eqn.outputs:
            size = program.nbytes(value)
            is_free = eqn.rule.is_cheap and not eqn.has_effect
            needed[value] = kept.get(value, min(size, nbytes) if is_free else size)
    made = (v for eqn in program.backward for v in eqn.outputs)
    return {v for v in made if needed[v] < program.nbytes(v)}


@final
class _Order:
    """The equations of a backward pass and their positions.

    Attributes:
        equations: The equations in their order.
    """

    def __init__(self, program: Program, equations: Sequence[Equation]) -> None:
        self.equations = list(equations)
        self._nbytes = program.nbytes
        self._place = {eqn: n for n, eqn in enumerate(equations)}
        self._products = [eqn for eqn in equations if not eqn.rule.is_cheap]
        self._gradients = frozenset(values_of(program.gradients))
        self._made = {v for eqn in equations for v in eqn.outputs} - self._gradients
        self._readers = readers_of(equations)

    def delay_results(self) -> None:
        """Moves products to the first reader of their results, if that frees memory."""
        for eqn in self._products:
            end = self._first_read(eqn)
            is_gradient = not self._gradients.isdisjoint(eqn.outputs)
            if is_gradient or not self._products_before(eqn, end):
                continue
            if sum(map(self._nbytes, eqn.outputs)) > self._waiting(eqn, end):
                self._move(eqn, end)

    def join_readers(self, coded: set[int]) -> None:
        """Moves products after others that decode the same residuals.

        A product moves only if no operand stays live for it.

        Args:
            coded: Values that are decoded, or recomputed from decoded ones.
        """
        for eqn in self._products:
            unpacked = coded.intersection(eqn.input_values)
            between = self._products_before(eqn, self._first_read(eqn))
            alike = [
                other
                for other in between
                if unpacked and unpacked == coded.intersection(other.input_values)
            ]
            # Adjacent products stay in place.
            if alike and alike[0] is not between[0]:
                end = self._place[alike[0]] + 1
                if self._waiting(eqn, end) == 0:
                    self._move(eqn, end)

    def _first_read(self, eqn: Equation) -> int:
        """Returns the position of the first reader of the results, the end if none."""
        readers = (r for v in eqn.outputs for r in self._readers[v])
        return min(map(self._place.__getitem__, readers), default=len(self.equations))

    def _products_before(self, eqn: Equation, end: int) -> list[Equation]:
        """Returns the products between an equation and a position.

        Returns none if the equation must not move.
        """
        if eqn.has_effect:
            return []
        between = self.equations[self._place[eqn] + 1 : end]
        return [other for other in between if not other.rule.is_cheap]

    def _waiting(self, eqn: Equation, end: int) -> int:
        """Returns the bytes of operands that only this equation reads from `end` on."""
        return sum(
            self._nbytes(v)
            for v in self._made.intersection(eqn.input_values)
            if all(r is eqn or self._place[r] < end for r in self._readers[v])
        )

    def _move(self, eqn: Equation, end: int) -> None:
        start = self._place[eqn]
        moved = [*self.equations[start + 1 : end], eqn]
        self.equations[start:end] = moved
        self._place.update((e, n) for n, e in enumerate(moved, start))


def _next_product(equations: Sequence[Equation], start: int) -> int:
    """Returns the index of the first expensive equation, the end if there is none."""
    numbers = range(start, len(equations))
    products = (n for n in numbers if not equations[n].rule.is_cheap)
    return next(products, len(equations))


def _independent_of_first(stretch: Sequence[Equation]) -> list[Equation]:
    """Returns the last equation, with those that compute its operands.

    Returns none if it depends on the first equation, or if an equation has side
    effects.
    """
    first, *others = stretch
    if any(eqn.has_effect for eqn in stretch):
        return []
    needed = set(others[-1].outputs)
    moved = []
    for eqn in reversed(others):
        if not needed.isdisjoint(eqn.outputs):
            moved.append(eqn)
            needed.update(eqn.input_values)
    return moved[::-1] if needed.isdisjoint(first.outputs) else []


def stretches_of(steps: Iterable[Step]) -> list[list[Step]]:
    """Groups steps into stages."""
    stretches: list[list[Step]] = []
    for step in steps:
        if step.begins or not stretches:
            stretches.append([])
        stretches[-1].append(step)
    return stretches


def joined_stages(
    plan: ProgramPlan, steps: Sequence[Step], parts: Parts
) -> dict[int, bool]:
    """Returns the steps that should join the stage before them.

    If a stage sums a weight gradient in chunks, the next product can compute the
    outgoing cotangent in the same chunks and overwrite the cotangent that both read.
    If a stage writes a large cotangent, and the next one reads it, no whole array is
    needed in between. Such are the cotangents of attention probabilities.

    Args:
        plan: The program and its saved residuals.
        steps: The steps of its backward pass.
        parts: How residuals can be decoded in chunks.

    Returns:
        For some steps, whether a stage begins there.
    """
    stretches = stretches_of(steps)
    begins: dict[int, bool] = {}
    joined: list[Step] = []
    of_joined: Division | None = None
    end = 0
    for stretch, later in zip(stretches, _read_later(plan, stretches), strict=True):
        new = _without_restored(stretch, joined)
        division = divide(plan, stretch, later, parts, {})
        of_both = None
        rest: list[Step] = []
        if joined and not (
            _is_cheap(joined[0]) or _is_cheap(stretch[0]) or stretch[0].unpacked
        ):
            of_both = divide(plan, [*joined, *new], later, parts, {})
            if of_both is not None and not _sums_with(of_both, stretch):
                of_both = None
            begins.update({} if of_both is None else {end: False})
        if of_both is None and _reads_large(joined, stretch, plan, parts):
            decoded = _decoded(division) | _decoded(of_joined)
            # What follows the last product may not run in chunks.
            for num in dict.fromkeys((len(stretch), _num_before_cheap(stretch))):
                read = later | read_in(stretch[num:])
                found = divide(plan, [*joined, *new[:num]], read, parts, {})
                if found is not None and _joins(found, decoded):
                    begins.update(dict.fromkeys(range(end, end + num), False))
                    begins[end + num] = True
                    of_both, rest = found, stretch[num:]
                    break
        joined = stretch if of_both is None else (rest or [*joined, *new])
        of_joined = (None if rest else of_both) or division
        end += len(stretch)
    return begins


def _sums_with(division: Division, stretch: Iterable[Step]) -> bool:
    """Returns whether chunks decode residuals, sum, and run the products of a stage."""
    products = {step.equation for step in stretch if not _is_cheap(step)}
    has_sums = any(loop.sums for loop in division.loops)
    return (
        has_sums and bool(_decoded(division)) and products.issubset(division.products)
    )


def _num_before_cheap(stretch: Sequence[Step]) -> int:
    """Returns the number of steps up to the last product."""
    products = (n for n, step in enumerate(stretch, 1) if not _is_cheap(step))
    return max(products, default=len(stretch))


def _joins(division: Division, decoded: set[int]) -> bool:
    """Returns whether chunks of joined stages sum nothing, and decode these residuals.

    Two copies of each sum would exist for longer.
    """
    sums = any(loop.sums for loop in division.loops)
    return not sums and decoded <= _decoded(division)


def _decoded(division: Division | None) -> set[int]:
    """Returns the residuals that chunks decode."""
    return set() if division is None else set(division.unpacked)


def _without_restored(stretch: Iterable[Step], before: Iterable[Step]) -> list[Step]:
    """Returns the steps of a stage without what another one has restored."""
    known = {piece for step in before for piece in step.restored}
    return [
        dataclasses.replace(
            step, restored=tuple(p for p in step.restored if p not in known)
        )
        for step in stretch
    ]


def _reads_large(
    joined: Iterable[Step], stretch: Iterable[Step], plan: ProgramPlan, parts: Parts
) -> bool:
    """Returns whether a stage reads a value of another, about the largest of all.

    It must be larger than the arguments that the stage reads: their copies would be
    live in the whole joined stage.
    """
    if not parts.divides_made:
        return False
    made = {v for step in joined if step.equation for v in step.equation.outputs}
    nbytes = plan.program.nbytes
    largest = max(map(nbytes, made & read_in(stretch)), default=0)
    arguments = read_in(stretch).intersection(range(plan.program.num_arguments))
    new = sum(map(nbytes, arguments - read_in(joined)))
    return largest > new and parts.is_among_largest(largest)


def with_divisions(
    plan: ProgramPlan, steps: Sequence[Step], parts: Parts
) -> tuple[Step, ...]:
    """Returns the steps with a chunk plan on the first step of each stage.

    Args:
        plan: The program and its saved residuals.
        steps: The steps of its backward pass.
        parts: How residuals can be decoded in chunks.
    """
    stretches = stretches_of(steps)
    divisions, _ = _divisions(plan, stretches, parts)
    return _divided(stretches, divisions)


def with_lasting_parts(
    plan: ProgramPlan, steps: Sequence[Step], parts: Parts
) -> tuple[Step, ...] | None:
    """Returns the steps with chunk plans whose results stay chunked.

    Returns `None` if no results stay chunked, or if so many are concatenated that
    chunks and whole arrays together save nothing: see `config.LEAST_CHUNKED_RESULTS`.

    Args:
        plan: The program and its saved residuals.
        steps: The steps of its backward pass.
        parts: How residuals can be decoded in unrolled chunks.
    """
    stretches = stretches_of(steps)
    divisions, joined = _divisions(plan, stretches, parts)
    results, wholes = (
        sum(map(plan.program.nbytes, values))
        for values in (_results_in_parts(divisions), joined)
    )
    if results <= config.LEAST_CHUNKED_RESULTS * wholes:
        return None
    return _divided(stretches, divisions)


def _results_in_parts(divisions: Iterable[Division | None]) -> dict[int, Rows]:
    """Returns the values that stay chunked after their stages, with their chunks."""
    return {
        value: division.rows
        for division in divisions
        if division is not None and division.stays_in_parts
        for loop in division.loops
        for value in loop.results
    }


def _divisions(
    plan: ProgramPlan, stretches: Sequence[Sequence[Step]], parts: Parts
) -> tuple[list[Division | None], list[int]]:
    """Returns the chunk plan of each stage, and the results that are concatenated."""
    divisions: list[Division | None] = []
    joined: list[int] = []
    in_parts: dict[int, Rows] = {}
    for stretch, later in zip(stretches, _read_later(plan, stretches), strict=True):
        division = divide(plan, stretch, later, parts, in_parts)
        divisions.append(division)
        if division is None or not division.stays_in_parts:
            # Chunked values are concatenated where they are read whole.
            joined += sorted(in_parts.keys() & read_in(stretch))
            in_parts = {v: rows for v, rows in in_parts.items() if v not in joined}
        in_parts.update(_results_in_parts([division]))
    joined += sorted(in_parts.keys() & values_of(plan.program.gradients))
    return divisions, joined


def _divided(
    stretches: Sequence[Sequence[Step]], divisions: Iterable[Division | None]
) -> tuple[Step, ...]:
    divided: list[Step] = []
    for (first, *others), division in zip(stretches, divisions, strict=True):
        divided += [dataclasses.replace(first, division=division), *others]
    return tuple(divided)


def _read_later(
    plan: ProgramPlan, stretches: Sequence[Sequence[Step]]
) -> list[set[int]]:
    """Returns for each stage the values that are read after it."""
    read = set(values_of(plan.program.gradients))
    laters = []
    for stretch in reversed(stretches):
        laters.append(set(read))
        read |= read_in(stretch)
    return laters[::-1]


def _is_cheap(step: Step) -> bool:
    return step.equation is None or step.equation.rule.is_cheap
