"""Sizes, counts and other numbers that users give: right, or clearly refused."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dafjax
from dafjax._numbers import as_count, as_real, parse_nbytes, readable, shown
from dafjax.allocation import Site, allocate, allocate_to_variance
from dafjax.codecs import Affine
from dafjax.policies import CompressExpensive
from dafjax.stores import AdaptiveGrowth, FixedGrowth, PagePool


MOST = 2**62
MOST_GROWTH = 2**40
WRONG_TYPES = (True, False, 1.5, math.nan, math.inf, b"1MiB", [1], np.bool_(True),
               np.float32(4), 1j, np.arange(3))  # fmt: skip
# Beyond what Python writes as text, what a float holds, what 64 bits hold.
HUGE = (MOST + 1, 2**63, 2**64, 10**400, 10**5000)


def _set_budget(budget):
    with PagePool() as pool:
        pool.budget = budget
        return pool.budget


def _with_budget(budget):
    with PagePool(budget) as pool:
        return pool.budget


def _with_growth(nbytes):
    with PagePool(growth=FixedGrowth(nbytes)):
        return parse_nbytes("nbytes", nbytes)


def _fit(limit):
    step = jax.grad(dafjax.remat_compress(lambda x: jnp.sum(jnp.sin(jnp.sin(x)))))
    fitted = dafjax.fit_batch(
        step, lambda n: (jnp.ones((n, 8)),), limit, max_batch=1, method="plain"
    )
    return fitted.limit_nbytes


# What takes a size, as the user's error calls it.
SIZES = {
    "PagePool": (_with_budget, "budget", MOST),
    "PagePool.budget": (_set_budget, "budget", MOST),
    "Budget": (lambda n: dafjax.Budget(n).nbytes, "Budget(nbytes=...)", MOST),
    "FixedGrowth": (_with_growth, "FixedGrowth(nbytes=...)", MOST_GROWTH),
    "fit_batch": (_fit, "fit_batch(limit=...)", MOST),
}


@pytest.mark.parametrize(("take", "name", "most"), SIZES.values(), ids=SIZES)
class TestSizes:
    def test_wrong_types(self, take, name, most):
        del most
        for wrong in WRONG_TYPES:
            with pytest.raises(TypeError) as caught:
                take(wrong)
            text = str(caught.value)
            assert text.startswith(f"`{name}` must be an integer or a string, but got")
            assert "64MiB" in text

    def test_too_little(self, take, name, most):
        del most
        for little in (0, -1, -(2**63), -(10**5000), "0B", "0.4 B", np.int8(-3)):
            with pytest.raises(ValueError) as caught:
                take(little)
            assert str(caught.value).startswith(f"`{name}` must be at least 1 byte, bu")

    def test_too_much(self, take, name, most):
        texts = ("99999999999TiB", "9" * 400 + "B", "9" * 5000 + "TiB")
        for much in (most + 1, *HUGE, *texts, np.uint64(2**63)):
            with pytest.raises(ValueError) as caught:
                take(much)
            text = str(caught.value)
            limit = f"{most} bytes ({readable(most)})"
            assert text.startswith(f"`{name}` must be at most {limit}, but got ")
            assert shown(much) in text
            assert "64MiB" in text
            assert len(text) < 500

    def test_what_cannot_be_read(self, take, name, most):
        del most
        for text in ("", "MiB", "64", "64 elephants", "-1MiB", "1e9B", "nanB", "infMiB",
                     "1,5GB", "0x10B", "1MiB\0", "½MiB"):  # fmt: skip
            with pytest.raises(ValueError) as caught:
                take(text)
            assert str(caught.value).startswith(f"`{name}` cannot be read: {text!r}")

    def test_what_is_right(self, take, name, most):
        del name
        sizes = [(1 << 24, 1 << 24), ("16MiB", 1 << 24), ("16.5 kB", 16500),
                 (np.int64(1 << 24), 1 << 24), (np.uint16(60000), 60000),
                 (most, most), (f"{most >> 40}TiB", most)]  # fmt: skip
        for given, want in sizes:
            assert take(given) == want


def test_text_has_as_many_digits_as_it_says():
    # A float rounds both.
    assert parse_nbytes("n", "9007199254740993B") == 9007199254740993
    assert parse_nbytes("n", "1.0000000000000000001GB") == 10**9
    assert parse_nbytes("n", f"{MOST - 1}B") == MOST - 1
    with pytest.raises(ValueError, match="but got '4611686018427387905B'"):
        parse_nbytes("n", f"{MOST + 1}B")


def test_a_budget_of_all_that_can_be_said_is_one():
    with PagePool(MOST) as pool:
        assert pool.budget == MOST
        pool.budget = None
        assert pool.budget is None


def _in_flight(count):
    with PagePool(executions_in_flight=count) as pool:
        return pool._executions_in_flight


def _fit_count(name, count):
    step = jax.grad(dafjax.remat_compress(lambda x: jnp.sum(jnp.sin(jnp.sin(x)))))
    options = {"max_batch": 1, "method": "plain"} | {name: count}
    dafjax.fit_batch(step, lambda n: (jnp.ones((1, 8)),), "1GiB", **options)
    return count


# What takes a count: as the error calls it, too little, too much (None: nothing is).
COUNTS = {
    "executions_in_flight": (_in_flight, "executions_in_flight", 0, 65),
    "multiple_of": (
        lambda n: _fit_count("multiple_of", n), "fit_batch(multiple_of=...)", 0, 2**31,
    ),
    "max_batch": (
        lambda n: _fit_count("max_batch", n), "fit_batch(max_batch=...)", 0, 2**31,
    ),
    "most_compiles": (
        lambda n: dafjax.jit(jnp.sin, most_compiles=n)._most_compiles,
        "jit(most_compiles=...)", 0, None,
    ),
    "max_sources": (
        lambda n: CompressExpensive(max_sources=n).max_sources,
        "CompressExpensive(max_sources=...)", 0, None,
    ),
    "min_nbytes": (
        lambda n: CompressExpensive(min_nbytes=n).min_nbytes,
        "CompressExpensive(min_nbytes=...)", -1, None,
    ),
    "num_elements": (
        lambda n: Site(n, 1.0).num_elements, "Site(num_elements=...)", -1, None,
    ),
    "minimum": (
        lambda n: Site(1, 1.0, minimum=n).minimum, "Site(minimum=...)", 0, 9
    ),
    "max_parts": (
        lambda n: dafjax.remat_compress(jnp.sin, max_parts=n) and n,
        "remat_compress(max_parts=...)", 0, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("take", "name", "little", "much"), COUNTS.values(), ids=COUNTS
)
def test_counts(take, name, little, much):
    for wrong in (*WRONG_TYPES, "1", "many", 2.0):
        with pytest.raises(TypeError) as caught:
            take(wrong)
        assert str(caught.value).startswith(f"`{name}` must be an integer")
    for outside in (little, -(2**63), -(10**5000), np.int64(little - 1)):
        with pytest.raises(ValueError) as caught:
            take(outside)
        assert str(caught.value).startswith(f"`{name}` must be")
        assert shown(outside) in str(caught.value)
    for outside in () if much is None else (much, *HUGE):
        with pytest.raises(ValueError) as caught:
            take(outside)
        assert str(caught.value).startswith(f"`{name}` must be")
        assert shown(outside) in str(caught.value)
    assert take(np.int64(1)) == 1


# What takes a real number: as the error calls it, and numbers outside of its range.
REALS = {
    "AverageBits": (
        lambda x: dafjax.AverageBits(x).bits, "AverageBits(bits=...)", (0, 0.99, 8.01)
    ),
    "BatchNoise": (
        lambda x: dafjax.BatchNoise(x).share,
        "BatchNoise(share=...)", (0, -0.5, 1e13, math.inf),
    ),
    "NoiseCeiling": (
        lambda x: dafjax.NoiseCeiling(x).relative,
        "NoiseCeiling(relative=...)", (0, -0.5, 1e13, math.inf),
    ),
    "AdaptiveGrowth": (
        lambda x: AdaptiveGrowth(x).share, "AdaptiveGrowth(share=...)", (0, -0.1, 1.01),
    ),
    "importance": (
        lambda x: Site(1, x).importance, "Site(importance=...)", (-1, math.inf)
    ),
}  # fmt: skip


@pytest.mark.parametrize(("take", "name", "outside"), REALS.values(), ids=REALS)
def test_reals(take, name, outside):
    for wrong in (True, np.bool_(True), "1", None, 1j, [1.0], np.arange(2.0)):
        with pytest.raises(TypeError) as caught:
            take(wrong)
        assert str(caught.value).startswith(f"`{name}` must be a number")
    for number in (*outside, math.nan, np.float32("nan"), 10**400, -(10**5000)):
        with pytest.raises(ValueError) as caught:
            take(number)
        assert str(caught.value).startswith(f"`{name}` must be")
        assert shown(number) in str(caught.value)
    for number in (1, np.int8(1), np.float32(1), np.float16(1)):
        assert take(number) == 1
        # As Python's own, so that equal targets are one and are written alike.
        assert type(take(number)) in (int, float)


def test_targets_that_numpy_made_are_those_of_python():
    assert repr(dafjax.AverageBits(np.float64(2.5))) == "AverageBits(bits=2.5)"
    assert hash(dafjax.Budget(np.int32(64))) == hash(dafjax.Budget("64B"))


def test_allocation_refuses_what_is_no_number():
    sites = [Site(10, 1.0), Site(10, 2.0)]
    for wrong in (math.nan, "20"):
        with pytest.raises((TypeError, ValueError), match=r"`allocate\(budget=...\)`"):
            allocate(sites, wrong)
        message = r"`allocate_to_variance\(ceiling=...\)`"
        with pytest.raises((TypeError, ValueError), match=message):
            allocate_to_variance(sites, wrong)
    assert allocate(sites, -5) == (1, 1)
    assert allocate(sites, np.int32(1000)) == (8, 8)


def test_bits_of_codes_are_integers():
    for name, choices in (("bits", 2), ("block_size", 256)):
        for wrong in (float(choices), True, math.nan, str(choices), 10**5000, -choices):
            with pytest.raises(
                ValueError, match=rf"`Affine\({name}=...\)` must be one"
            ):
                Affine(**{name: wrong})
        made = getattr(Affine(**{name: np.int16(choices)}), name)
        assert (made, type(made)) == (choices, int)
    for wrong in (10**5000, -1):
        with pytest.raises(ValueError, match=r"`Bits\(linear=...\)` must be one of"):
            dafjax.Bits(wrong)
        with pytest.raises(ValueError, match=r"`remat_compress\(bits=...\)` must be"):
            dafjax.remat_compress(jnp.sin, bits=wrong)


def test_seeds_are_integers():
    for wrong in (1.5, True, None, "1", np.int64(3), jnp.ones(2, jnp.uint32)):
        with pytest.raises(TypeError, match="`seed` must be an int or a uint32 scalar"):
            Affine().encode(jnp.ones(512), seed=wrong)
    with pytest.raises(ValueError, match="an integer of 16610 bits"):
        Affine().encode(jnp.ones(512), seed=10**5000)


def test_the_largest_sizes_hold_a_residual():
    codes = np.zeros(64 * 8 * 100, np.uint8)
    largest = FixedGrowth(MOST_GROWTH)
    for options in ({"budget": MOST}, {"growth": largest}, {"growth": FixedGrowth(1)},
                    {"growth": AdaptiveGrowth(1e-300)},
                    {"budget": "1MiB", "growth": largest}):  # fmt: skip
        with PagePool(**options) as pool:
            handle = pool._pool.put(1, 0, 0, 8, codes, codes[:99])
            assert pool._pool.get(1, 0, handle)[:2] == (8, 8)
            assert pool._pool.violation() is None


def test_what_an_error_shows_is_short():
    assert shown(10**5000) == "an integer of 16610 bits"
    assert shown(np.int64(3)) == "3"
    assert len(shown("x" * 10**6)) < 100
    with pytest.raises(ValueError, match=r"^`n` must be at least 2, but got 1. Ask.$"):
        as_count("n", 1, least=2, remedy="Ask.")
    with pytest.raises(ValueError, match=r"^`n` must be above 0 and at most 1, but"):
        as_real("n", 0.0, lowest=0, highest=1, includes_lowest=False)
