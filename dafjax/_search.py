"""Looks for the least noisy program of a step that fits into a limit of memory."""

import bisect
import dataclasses
import itertools
import math
from typing import Any, TypeAlias, final

from dafjax._call import find_examples, name_of_function
from dafjax._contexts import Choice, Mode, choosing
from dafjax._numbers import align, readable
from dafjax._step_memory import (
    StepMemory,
    largest_that_fits,
    measure,
    nothing_is_wrapped,
    predict,
)
from dafjax._trace.paired import NotSeparableError


# At most so many programs are compiled for arguments of the same shapes.
_MOST_COMPILES = 3


# The modes and bits to try: the least noisy first, then the fastest.
_Kind: TypeAlias = tuple[Mode, int | None]
_KINDS: tuple[_Kind, ...] = (
    (Mode.PLAIN, None),
    (Mode.EXACT, None),
    *((mode, bits) for bits in (8, 4, 2) for mode in (Mode.CODES, Mode.RERUN)),
)


@final
@dataclasses.dataclass(frozen=True)
class TriedProgram:
    """A program that was considered.

    Attributes:
        options: The options of wrapped functions, as text.
        predicted_nbytes: Bytes of the whole step that the model predicts; `None` if
            nothing was predicted, because a program before fits.
        compiled: The compiler's figures, if it was compiled.
        others: The wrapped functions whose own options exclude these, with the options
            that they get instead, as text.
        is_skipped: Whether all functions are such: another program is the same.
    """

    options: str
    predicted_nbytes: int | None
    compiled: StepMemory | None
    others: tuple[tuple[str, str], ...] = ()
    is_skipped: bool = False


@final
@dataclasses.dataclass(frozen=True)
class JitReport:
    """What `dafjax.jit` chose for arguments of given shapes. Prints as a table.

    Attributes:
        limit_nbytes: The limit in bytes.
        options: The options of wrapped functions that were chosen, as text.
        memory: The memory of the chosen program.
        tried: All programs, the least noisy first.
        notes: Why programs were left out.
    """

    limit_nbytes: int
    options: str
    memory: StepMemory
    tried: tuple[TriedProgram, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("options", "predicted", "compiled", "")]
        for tried in self.tried:
            compiled = tried.compiled
            total = None if compiled is None else compiled.total_nbytes
            verdict = "" if total is None or total <= self.limit_nbytes else "too large"
            if tried.options == self.options:
                verdict = "chosen"
            if tried.is_skipped:
                verdict = "skipped"
            cells = map(_shown, (tried.predicted_nbytes, total))
            rows.append((tried.options, *cells, verdict))
        table = align(rows, right=range(1, 3))
        notes = (
            f"{tried.options}: `{name}` gets {options}, because of its policy"
            for tried in self.tried
            for name, options in tried.others
        )
        lines = f"limit {readable(self.limit_nbytes)}", table, *notes, *self.notes
        return "\n".join(lines)


def _shown(nbytes: int | None) -> str:
    return "-" if nbytes is None else readable(nbytes)


@final
class Search:
    """Looks for the least noisy program that fits."""

    def __init__(self, jitted: Any, limit_nbytes: int, args: Any, kwargs: Any) -> None:
        self._name = name_of_function(jitted)
        self._jitted = jitted
        self._limit = limit_nbytes
        self._arguments = args, kwargs
        self._choices: dict[tuple[_Kind, int], Choice] = {}
        self._predicted: dict[Choice, StepMemory] = {}
        self._compiled: dict[Choice, StepMemory] = {}
        # The compiler's figure less the model's for arguments and results; and over the
        # model's for temporary arrays, plain and compressed.
        self._more_fixed = 0
        self._scale: dict[bool, float] = {}
        # Why the batch cannot be split, if it cannot.
        self._whole_only = ""

    def run(self) -> tuple[Choice, JitReport]:
        """Returns the options that were chosen, and why."""
        best: Choice | None = None
        for _ in range(_MOST_COMPILES):
            choice = self._next()
            if choice is None:
                break
            if self._compile(choice).total_nbytes <= self._limit:
                best = choice
        if best is None:
            raise self._too_little()
        numbers = sorted({number for _, number in self._choices})
        choices = (self._choices.get(key) for key in itertools.product(_KINDS, numbers))
        tried = [self._tried(choice) for choice in choices if choice is not None]
        seen = {kind for kind, _ in self._choices}
        tried += (
            TriedProgram(str(Choice(*kind)), None, None)
            for kind in _KINDS
            if kind not in seen
        )
        memory = self._compiled[best]
        notes = (self._whole_only,) if self._whole_only else ()
        report = JitReport(self._limit, str(best), memory, tuple(tried), notes)
        return best, report

    def _tried(self, choice: Choice) -> TriedProgram:
        return TriedProgram(
            str(choice),
            self._prediction(choice),
            self._compiled.get(choice),
            tuple(choice.others.items()),
            choice.is_excluded,
        )

    def _choice(self, kind: _Kind, number: int) -> Choice:
        key = kind, number
        if key not in self._choices:
            self._choices[key] = Choice(*kind, number)
        return self._choices[key]

    def _numbers(self) -> list[int]:
        """Returns the numbers of microbatches that divide all batches."""
        plain = self._choice(_KINDS[0], 1)
        self._predict(plain)
        splits = plain.batches and not self._whole_only
        size = math.gcd(*plain.batches) if splits else 1
        return [n for n in range(1, size + 1) if size % n == 0]

    def _fitting(self, kind: _Kind) -> Choice | None:
        """Returns the program of a kind with the fewest microbatches that fits."""
        choices = [self._choice(kind, number) for number in self._numbers()]

        def fits(choice: Choice) -> bool:
            return self._predict(choice) <= self._limit

        if fits(choices[0]):
            return choices[0]
        if not fits(choices[-1]):
            return None
        return choices[bisect.bisect_left(choices, True, key=fits)]

    def _next(self) -> Choice | None:
        """Returns the next program to compile; `None` if none less noisy may fit."""
        for kind in _KINDS:
            choice = self._fitting(kind)
            if choice is not None:
                # For a compiled program, `_predict` returns the compiler's figure.
                return None if choice in self._compiled else choice
        most = self._numbers()[-1]
        left = [self._choice(kind, most) for kind in _KINDS]
        left = [choice for choice in left if choice not in self._compiled]
        smallest = min(left, key=self._predict, default=None)
        found = [memory.total_nbytes for memory in self._compiled.values()]
        if smallest is None or self._predict(smallest) >= min(found, default=math.inf):
            return None
        return smallest

    def _predict(self, choice: Choice) -> float:
        """Returns the bytes that the whole step is predicted to need.

        Infinity if all functions get other options: another program is the same.
        """
        if choice not in self._predicted and not choice.is_excluded:
            try:
                predicted = self._trace_and_predict(choice, self._arguments)
            except NotSeparableError as error:
                self._whole_only = str(error)
                return math.inf
            if not choice.num_calls and not choice.batches:
                raise nothing_is_wrapped("dafjax.jit", self._name)
            if choice.is_excluded:
                return math.inf
            self._predicted[choice] = predicted
        total = self._total(choice)
        return math.inf if total is None else total

    def _total(self, choice: Choice) -> int | None:
        """Returns the bytes of a program: the compiler's figure, or a prediction."""
        compiled = self._compiled.get(choice)
        return compiled.total_nbytes if compiled else self._prediction(choice)

    def _prediction(self, choice: Choice) -> int | None:
        predicted = self._predicted.get(choice)
        return None if predicted is None else self._scaled(choice, predicted)

    def _scaled(self, choice: Choice, predicted: StepMemory) -> int:
        """Returns the bytes of a program, corrected by figures of the compiler."""
        scale = self._scale.get(choice.mode is Mode.PLAIN, 1.0)
        temp_nbytes = math.ceil(scale * predicted.temp_nbytes)
        return _fixed_nbytes(predicted) + self._more_fixed + temp_nbytes

    def _trace_and_predict(self, choice: Choice, arguments: Any) -> StepMemory:
        args, kwargs = arguments
        with choosing(choice):
            traced = self._jitted.trace(*args, **kwargs)
        return predict(traced, args, kwargs)

    def _compile(self, choice: Choice) -> StepMemory:
        args, kwargs = self._arguments
        with choosing(choice):
            memory = measure(self._jitted.lower(*args, **kwargs))
        predicted = self._predicted[choice]
        self._compiled[choice] = memory
        self._more_fixed = _fixed_nbytes(memory) - _fixed_nbytes(predicted)
        scale = memory.temp_nbytes / max(predicted.temp_nbytes, 1)
        self._scale[choice.mode is Mode.PLAIN] = scale
        return memory

    def _too_little(self) -> ValueError:
        choice, least = min(
            self._compiled.items(), key=lambda item: item[1].total_nbytes
        )
        return ValueError(
            f"`dafjax.jit(memory=...)`: {readable(self._limit)} do not hold "
            f"`{self._name}`. The smallest program found needs "
            f"{readable(least.total_nbytes)}, with {choice}: arguments "
            f"{readable(least.argument_nbytes)}, temporary arrays "
            f"{readable(least.temp_nbytes)}, results {readable(least.output_nbytes)}, "
            f"of which {readable(least.donated_nbytes)} reuse donated arguments. "
            f"{self._others()}Raise the limit; donate arguments (`donate_argnums`); or "
            f"take a smaller batch.{self._smaller(choice)}"
        )

    def _smaller(self, choice: Choice) -> str:
        """Says which smaller batch fits, for an error."""
        batch = self._largest_batch(choice)
        if batch is None:
            return ""
        largest = f"the largest batch that fits is {batch}" if batch else "none fits"
        return f" A static model predicts that {largest}, with {choice}."

    def _largest_batch(self, choice: Choice) -> int | None:
        """Returns the largest batch that is predicted to fit, with equal microbatches.

        `None` if it is not clear which arguments hold examples; 0 if no batch fits.
        """
        args, kwargs = self._arguments
        try:
            batch = find_examples(self._jitted, args, kwargs, None)
        except ValueError:
            return None
        part = batch.size // choice.microbatches
        is_split = choice.microbatches > 1
        unit = math.lcm(batch.num_shards, part if is_split else 1)

        def nbytes_of(count: int) -> int:
            size = count * unit
            smaller = Choice(choice.mode, choice.bits, size // part if is_split else 1)
            predicted = self._trace_and_predict(smaller, batch.resized(size))
            return self._scaled(choice, predicted)

        most = (batch.size - 1) // unit
        try:
            return unit * largest_that_fits(nbytes_of, self._limit, most)
        except (TypeError, ValueError):
            # It was traced with the whole batch, so that these are no examples.
            return None

    def _others(self) -> str:
        """Says why smaller programs were left out, for an error."""
        whole_only = f"{self._whole_only} " if self._whole_only else ""
        names = dict.fromkeys(name for c in self._choices.values() for name in c.others)
        listed = ", ".join(f"`{name}`" for name in names)
        excluded = f"The policies of {listed} exclude `rematerialize`. "
        return whole_only + (excluded if names else "")


def _fixed_nbytes(memory: StepMemory) -> int:
    """Returns the bytes of arguments and results."""
    return memory.total_nbytes - memory.temp_nbytes
