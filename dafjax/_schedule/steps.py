"""The steps of a backward pass: what each restores, computes, and waits for."""

import dataclasses
from collections.abc import Iterator
from typing import final

from dafjax._trace.equation import Equation


@final
@dataclasses.dataclass(frozen=True)
class Unpacking:
    """Unpacks a compressed residual.

    Attributes:
        value: The residual.
        behind: What was recomputed in this step before, and goes through a tie first.
    """

    value: int
    behind: tuple[int, ...] = ()


@final
@dataclasses.dataclass(frozen=True, eq=False)
class InParts:
    """Restores one value in parts of its rows, one part after another.

    Attributes:
        value: The value.
        sources: What has the same rows, and is read of what is kept or at hand.
        restored: How a part of the value is restored from that part of the sources.
    """

    value: int
    sources: tuple[int, ...]
    restored: tuple[Unpacking | Equation, ...]

    @property
    def unpacked(self) -> tuple[int, ...]:
        """The residuals to unpack, in order."""
        return tuple(r.value for r in self.restored if isinstance(r, Unpacking))


@final
@dataclasses.dataclass(frozen=True)
class Step:
    """One equation of the backward pass and what must be at hand for it.

    Attributes:
        equation: The equation; `None` stands for returning the gradients.
        begins: Whether a stretch begins before it.
        cotangents: If so, the values of the backward pass that go through the tie.
        awaited: Those of them that the tie need only wait for.
        given: If so, the saved values and small arguments that go through the tie.
        restored: How what is missing is restored, in order: residuals to unpack,
            equations of the forward pass to run again, and what is restored in parts.
        delayed: The large arguments to read no earlier than the stretch begins.
        joined: What of the equation's operands goes through one tie before it.
    """

    equation: Equation | None
    begins: bool
    cotangents: tuple[int, ...]
    awaited: tuple[int, ...]
    given: tuple[int, ...]
    restored: tuple[Unpacking | Equation | InParts, ...]
    delayed: tuple[int, ...]
    joined: tuple[int, ...]

    @property
    def unpacked(self) -> tuple[int, ...]:
        """The residuals to unpack, in order."""
        return tuple(r.value for r in self.pieces if isinstance(r, Unpacking))

    @property
    def recomputed(self) -> tuple[Equation, ...]:
        """The equations of the forward pass to run again, in order."""
        return tuple(r for r in self.pieces if isinstance(r, Equation))

    @property
    def pieces(self) -> Iterator[Unpacking | Equation]:
        """What is restored, in order, as if nothing were restored in parts."""
        for item in self.restored:
            if isinstance(item, InParts):
                yield from item.restored
            else:
                yield item
