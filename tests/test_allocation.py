"""Bits are given to where they help most, within the budget."""

import itertools

import numpy as np
import pytest

from dafjax.allocation import (
    LADDER,
    Site,
    allocate,
    allocate_to_variance,
    expected_variance,
    num_bits,
)


def random_sites(rng, num):
    sizes = rng.integers(1, 1000, num)
    importances = np.exp(rng.normal(0, 4, num))
    return [Site(int(n), float(c)) for n, c in zip(sizes, importances, strict=True)]


def best(sites, budget):
    """Tries all allocations."""
    return min(
        (
            bits
            for bits in itertools.product(LADDER, repeat=len(sites))
            if num_bits(sites, bits) <= budget
        ),
        key=lambda bits: expected_variance(sites, bits),
    )


@pytest.mark.parametrize("seed", range(30))
def test_close_to_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    sites = random_sites(rng, 6)
    elements = sum(site.num_elements for site in sites)
    budget = int(elements * rng.uniform(1, 8))
    got = allocate(sites, budget)
    assert num_bits(sites, got) <= budget
    # A multiplier and a repair miss the best by less than one step of one site.
    optimum = expected_variance(sites, best(sites, budget))
    smaller = budget - max(4 * site.num_elements for site in sites)
    if smaller >= elements:
        bound = expected_variance(sites, best(sites, smaller))
        assert expected_variance(sites, got) <= bound
    assert expected_variance(sites, got) >= optimum


@pytest.mark.parametrize("seed", range(5))
def test_variance_falls_with_the_budget(seed):
    rng = np.random.default_rng(seed)
    sites = random_sites(rng, 40)
    elements = sum(site.num_elements for site in sites)
    variances = [
        expected_variance(sites, allocate(sites, int(elements * bits)))
        for bits in (1, 1.5, 2, 3, 4, 6, 8)
    ]
    assert variances == sorted(variances, reverse=True)
    uniform = expected_variance(sites, [2] * len(sites))
    assert expected_variance(sites, allocate(sites, 2 * elements)) < uniform / 2


def test_equal_importance_for_an_element_gives_equal_bits():
    sites = [Site(n, 3.0 * n) for n in (10, 200, 3000)]
    for bits in LADDER:
        assert allocate(sites, bits * 3210) == (bits,) * 3


def test_all_that_is_left_over_is_spent_where_it_fits():
    # The step of the first site does not fit; that of the second does.
    sites = [Site(1000, 1e6), Site(10, 1.0)]
    assert allocate(sites, 1010 + 70) == (1, 8)


def test_bounds_hold():
    sites = [Site(100, 0.0, minimum=4), Site(100, 1e9, maximum=2), Site(100, 1.0)]
    bits = allocate(sites, 1400)
    assert bits == (4, 2, 8)


def test_minima_are_given_up_where_the_budget_is_too_small():
    sites = [Site(100, 1.0, minimum=8), Site(100, 1.0, minimum=8)]
    assert allocate(sites, 1200) == (8, 4)
    assert allocate(sites, 900) == (4, 4)
    assert allocate(sites, 0) == (1, 1)


def test_nothing_to_allocate():
    assert allocate([], 100) == ()
    assert allocate([Site(0, 1.0)], 0) == (8,)


@pytest.mark.parametrize("seed", range(10))
def test_a_ceiling_of_variance_is_kept_with_few_bits(seed):
    rng = np.random.default_rng(seed)
    sites = random_sites(rng, 20)
    ceiling = expected_variance(sites, [2] * 20)
    bits = allocate_to_variance(sites, ceiling)
    assert expected_variance(sites, bits) <= ceiling
    assert num_bits(sites, bits) < num_bits(sites, [2] * 20)


def test_a_ceiling_out_of_reach_gives_the_most_bits():
    sites = [Site(10, 1.0), Site(10, 2.0, maximum=4)]
    assert allocate_to_variance(sites, 0.0) == (8, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_elements": -1}, r"num_elements=.*at least 0, but got -1"),
        ({"importance": float("nan")}, r"importance=.*finite.*nan"),
        ({"importance": -1.0}, r"importance=.*at least 0.*-1"),
        ({"minimum": 3}, r"minimum=.*\(1, 2, 4, 8\), but got 3"),
        ({"minimum": 8, "maximum": 4}, r"`minimum` must not be above"),
    ],
)
def test_bad_sites_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Site(**{"num_elements": 1, "importance": 1.0, **options})
