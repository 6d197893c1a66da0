"""The bits of a compiled step's residuals that adapt to measurements."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeAlias, final

from dafjax._bits import BatchNoise, Budget, Target
from dafjax._contexts import BatchMeasurement, BitsInForce
from dafjax._native import LEDGER_NOTE, make_ledger, pool_hash
from dafjax._trace.tracing import ClosedJaxpr, count_live
from dafjax.allocation import (
    BitsBySite,
    Demand,
    Measured,
    added_variance,
    better_bits,
    first_bits,
    nbytes,
)
from dafjax.stores._arrays import SiteFacts


def as_planned(name: str) -> BitsInForce:
    """Returns the planned bits of a program that measures.

    Args:
        name: The name of its ledger.
    """
    return BitsInForce(pool_hash(name), {})


@final
class BatchLedger:
    """What programs that measure the noise of batches report.

    Attributes:
        measurement: The setting with which programs report to it.
        share: The noise of the present bits over the noise of a batch, as expected when
            measurements were last read; `None` before.
    """

    share: float | None = None

    def __init__(self, program: str) -> None:
        name = f"{program}, batches"
        self.measurement = BatchMeasurement(pool_hash(name))
        self._ledger = make_ledger(name, [])

    def take(self) -> float:
        """Returns the sum of the variances since the last time, and resets it."""
        return self._ledger.take()["gradient_energy"]


@final
@dataclasses.dataclass(frozen=True, eq=False)
class AdaptiveBits:
    """The bits of one program, and facts about its residuals.

    Attributes:
        ledger: Accumulator of the measurements of its backward passes.
        of_batches: Another one, of the noise of batches; `None` if no target needs it.
        facts: Facts about each residual (site), by the hash of its name.
        demands: Sizes and limits of each residual, by the same hash.
        targets: The residuals of each target.
        bits: Present bits of each residual, by the same hash.
        in_force: The same bits, as traces read them.
        first: The first bits, as traces read them. Programs that measure the noise of
            batches have them.
    """

    ledger: Any
    of_batches: BatchLedger | None
    facts: Mapping[int, SiteFacts]
    demands: Mapping[int, Demand]
    targets: tuple[tuple[Target, tuple[int, ...]], ...]
    bits: BitsBySite
    in_force: BitsInForce
    first: BitsInForce

    @classmethod
    def of(
        cls,
        name: str,
        closed: ClosedJaxpr,
        planned: BitsInForce,
        of_batches: BatchLedger | None,
        *,
        keeps_bytes: bool,
    ) -> "AdaptiveBits | None":
        """Returns the first bits of a program; `None` if no function has a target.

        Args:
            name: The name of its ledger.
            closed: The program, traced with its planned bits. All residuals whose bits
                adapt are measured in it.
            planned: The result of `as_planned`.
            of_batches: What measures the noise of batches, if a target needs it.
            keeps_bytes: Whether the bytes of the planned bits are the budget, in place
                of the user's targets.
        """
        found = _sites_of(closed)
        if not found:
            return None
        demands = {site: _demand(uses) for site, uses in found.items()}
        facts = {site: uses[0][0] for site, uses in found.items()}
        sites: dict[Target, list[int]] = {}
        for site, fact in facts.items():
            sites.setdefault(fact.target, []).append(site)
        bits: BitsBySite = {}
        targets: list[tuple[Target, tuple[int, ...]]] = []
        for target, of_target in sites.items():
            demanded = {site: demands[site] for site in of_target}
            if keeps_bytes:
                first = {site: facts[site].bits for site in of_target}
                target = Budget(nbytes(demanded, first))
            else:
                first = first_bits(target, demanded)
            bits |= first
            targets.append((target, tuple(of_target)))
        ledger = make_ledger(name, list(facts))
        new = cls(
            ledger, of_batches, facts, demands, tuple(targets), bits, planned, planned
        )
        if not new._differing(found):
            return new
        new = new.replaced(bits)
        return dataclasses.replace(new, first=new.in_force)

    @property
    def nbytes(self) -> int:
        """Bytes of all residuals with allocated bits."""
        return nbytes(self.demands, self.bits)

    @property
    def by_name(self) -> dict[str, int]:
        """Bits of each residual, by its name."""
        return {self.facts[site].name: bits for site, bits in self.bits.items()}

    def replaced(self, bits: BitsBySite) -> "AdaptiveBits":
        """Returns the same residuals with other bits."""
        in_force = BitsInForce(self.in_force.ledger, bits)
        return dataclasses.replace(self, bits=bits, in_force=in_force)

    def check(self, closed: ClosedJaxpr) -> None:
        """Raises a `RuntimeError` unless a trace has these bits."""
        differing = self._differing(_sites_of(closed))
        if differing:
            raise RuntimeError(
                "`dafjax.jit` has traced its function with other bits than before, but "
                f"these residuals do not have them: {', '.join(differing)}. The "
                "function must do the same, and trace what it differentiates, each "
                "time that it is traced: do not keep jaxprs or pullbacks of an earlier "
                "call in it."
            )

    def better(self) -> "AdaptiveBits | None":
        """Returns bits that are worth another program, given the measurements."""
        taken = self.ledger.take()
        of_batch = 0.0 if self.of_batches is None else self.of_batches.take()
        measured = Measured(taken["importances"], taken["gradient_energy"], of_batch)
        changed: BitsBySite = {}
        for target, sites in self.targets:
            demands = {site: self.demands[site] for site in sites}
            now = {site: self.bits[site] for site in sites}
            found = better_bits(target, demands, now, measured) or {}
            changed |= found
            if isinstance(target, BatchNoise) and self.of_batches is not None:
                variance = added_variance(demands, {**now, **found}, measured)
                if variance is not None and measured.batch_variance > 0:
                    share = math.sqrt(variance / measured.batch_variance)
                    self.of_batches.share = share
        return self.replaced({**self.bits, **changed}) if changed else None

    def take_variances(self) -> dict[str, float]:
        """Returns the variance that each residual adds to the gradient, and resets it.

        It is the variance at the bits that residuals have without a target.
        """
        importances = self.ledger.take()["importances"]
        return {
            fact.name: float(importances[site])
            / (2 ** self.demands[site].asked - 1) ** 2
            for site, fact in self.facts.items()
        }

    def _differing(self, found: "_Sites") -> list[str]:
        """Returns names of residuals whose bits in a trace are not these."""
        names = {
            uses[0][0].name
            for site, uses in found.items()
            if any(fact.bits != self.bits.get(site) for fact, _ in uses)
        }
        names.update(
            self.facts[s].name
            for s in self.bits.keys() - found.keys()
            # Other programs measure these.
            if not isinstance(self.facts[s].target, BatchNoise)
        )
        return sorted(names)


# By the hash of a residual's name: each use, and how many copies are live at once.
_Sites: TypeAlias = dict[int, list[tuple[SiteFacts, int]]]


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


_MAKES_CODES = "dafjax_pack_affine"
