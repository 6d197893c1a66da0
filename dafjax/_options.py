"""The options of a wrapped function, and which of them exclude each other."""

import dataclasses
from typing import final

from dafjax._bits import BatchNoise, Bits
from dafjax._contexts import Mode
from dafjax._passes.pipeline import NAMES
from dafjax._schedule.steps import Ties
from dafjax.policies import AbstractPolicy, CompressExpensive, SaveAll, SaveSaveable
from dafjax.stores import AbstractStore
from dafjax.stores._arrays import AbstractStaticStore, Adaptive


@final
@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a wrapped function.

    Attributes:
        own_policy: The user's policy, if any.
        bits: The bits of codes.
        store: Where packed residuals are stored.
        ties: Which barriers to insert.
        mode: The residuals that are stored.
        max_parts: Maximum number of chunks, if the user gave one.
        left_out: The passes that the user leaves out.
    """

    own_policy: AbstractPolicy | None
    bits: Bits
    store: AbstractStore
    ties: Ties
    mode: Mode
    max_parts: int | None
    left_out: tuple[str, ...] = ()

    @property
    def policy(self) -> AbstractPolicy:
        """The policy that decides about residuals."""
        if self.mode is Mode.EXACT:
            return SaveAll()
        return CompressExpensive() if self.own_policy is None else self.own_policy

    @property
    def batch_noise(self) -> BatchNoise | None:
        """The target of bits, if it is a share of the batch's noise."""
        target = self.store.target if isinstance(self.store, Adaptive) else None
        return target if isinstance(target, BatchNoise) else None

    @property
    def without_passes(self) -> tuple[str, ...]:
        """The passes that do not run."""
        # Rewrites change the last bits of gradients.
        return NAMES if self.mode is Mode.EXACT else self.left_out


def choose(options: Options, mode: Mode, bits: Bits) -> tuple[Options, bool]:
    """Returns the options that a wrapped function gets from `dafjax.jit`.

    Args:
        options: The user's options.
        mode: The mode that `dafjax.jit` tries. A function that has segments keeps them.
        bits: The bits of codes that it tries.

    Returns:
        The options, and whether the user's options exclude segments. Then the function
        has none.

    Raises:
        NotImplementedError: The store's bits change at run time.
    """
    if mode is Mode.PLAIN:
        return dataclasses.replace(options, mode=mode), False
    # Segments have fixed bits.
    store = options.store
    store = store.store if isinstance(store, Adaptive) else store
    if not isinstance(store, AbstractStaticStore):
        raise NotImplementedError(
            "`dafjax.jit(memory=...)` chooses fixed bits, for `dafjax.stores.Arrays()` "
            f"and `Host()`, but a wrapped function has `store={options.store!r}`. "
            "Leave out the store, or use `jax.jit`."
        )
    if mode is not Mode.EXACT and options.mode.has_segments:
        mode = options.mode
    chosen = dataclasses.replace(options, mode=mode, bits=bits, store=store)
    has_other_segments = mode.has_segments and mode is not options.mode
    is_excluded = conflict(chosen) is not None or (
        has_other_segments and options.policy.is_of_one_program
    )
    if is_excluded:
        chosen = dataclasses.replace(chosen, mode=mode.without_segments)
    if chosen.mode is Mode.CODES:
        chosen = dataclasses.replace(chosen, store=options.store)
    return chosen, is_excluded


def conflict(options: Options) -> Exception | None:
    """Returns the error of options that exclude each other, if some do."""
    if not options.mode.has_segments:
        return None
    if not isinstance(options.store, AbstractStaticStore):
        return NotImplementedError(
            "`remat_compress(rematerialize=True)` is for `dafjax.stores.Arrays()` and "
            f"`Host()`, with fixed `bits`, but got `{options.store!r}`."
        )
    if options.mode is Mode.EXACT and options.own_policy is not None:
        return ValueError(
            '`remat_compress(rematerialize="exact")` saves only values between '
            "segments, so that no policy decides, but got "
            f"`policy={options.own_policy!r}`. Leave out either."
        )
    if isinstance(options.own_policy, SaveSaveable):
        return NotImplementedError(
            "`remat_compress(rematerialize=True)` keeps only the values between "
            "segments, in 8 bits, so that it cannot save exactly what a policy of "
            f"`jax.checkpoint` names, but got `policy={options.own_policy!r}`. Leave "
            "out either."
        )
    return None
