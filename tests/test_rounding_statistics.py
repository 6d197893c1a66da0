"""Stochastic rounding is unbiased, and its noise looks independent.

Seeds are fixed: these tests give the same figures on every run. `LIMIT` is the size of
a normal deviate that a right implementation passes with probability 1e-6 in a test of
ten thousand deviates (Bonferroni).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from dafjax._native import Format, pack_affine
from dafjax._native._format import noise_words
from tests import oracle


NUM_SEEDS = 2048
SIZE = 1024
BLOCK = 256
LIMIT = scipy.stats.norm.isf(1e-6 / 2 / 10_000)
MINIMAL_P = 1e-6

every_width = pytest.mark.parametrize("bits", oracle.BITS)
every_layout = pytest.mark.parametrize(
    ("bits", "columns"), [*((bits, 0) for bits in oracle.BITS), (1, 32), (3, 32)]
)


@functools.cache
def sample(
    bits: int, planted_bias: float = 0.0, columns: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns codes `[seeds, elements]` and their expected values, exactly known.

    A planted bias, in steps, is added to what is encoded and not to what is expected.
    """
    # The first two elements of a block fix its range, 0 to `levels`: a step is 1.
    levels = 2**bits - 1
    x = np.random.default_rng(bits).uniform(0, levels - 0.05, SIZE).astype(np.float32)
    if columns == 0:
        x[0::BLOCK], x[1::BLOCK] = 0, levels
    else:
        # Each block is 32 rows of one column.
        x[:columns], x[columns : 2 * columns] = 0, levels
    # All blocks have the same range, so that row blocks tell where elements lie.
    ranged = x.copy()
    ranged[0::BLOCK], ranged[1::BLOCK] = 0, levels
    q, f, _, _ = oracle.fixed_point(ranged[None], np.array([SIZE]), bits, BLOCK)
    expected = q[0] / 2.0 ** f[0, 0]
    inner = (ranged > 0) & (ranged < levels) & (x > 0) & (x < levels)
    x = np.where(inner, x + np.float32(planted_bias), x)

    seeds = jnp.arange(NUM_SEEDS, dtype=jnp.uint32)
    pack = functools.partial(pack_affine, format=Format(bits, BLOCK, columns))
    words = jax.jit(jax.vmap(pack, in_axes=(None, 0)))(jnp.asarray(x), seeds)[0]
    codes = oracle.unpack_planes(np.asarray(words), SIZE, bits)
    return codes[:, inner], expected[inner]


def deviates(codes: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Returns the standardized mean error of each element."""
    p = expected - np.floor(expected)
    # The normal approximation needs a dozen events on either side.
    usable = (p > 0.01) & (p < 0.99)
    p, expected = p[usable], expected[usable]
    error = codes[:, usable].mean(axis=0) - expected
    return error / np.sqrt(p * (1 - p) / len(codes))


def pooled_deviate(codes: np.ndarray, expected: np.ndarray) -> float:
    """Returns the standardized mean error over all elements: finds a common bias."""
    p = expected - np.floor(expected)
    spread = np.sqrt(np.sum(p * (1 - p)) * len(codes))
    return float(np.sum(codes - expected) / spread)


@every_layout
def test_the_mean_of_every_code_is_its_value(bits: int, columns: int) -> None:
    z = deviates(*sample(bits, columns=columns))
    assert z.size > 900
    assert np.max(np.abs(z)) < LIMIT


@every_layout
def test_the_deviates_of_the_means_are_normal(bits: int, columns: int) -> None:
    z = deviates(*sample(bits, columns=columns))
    p_value = scipy.stats.chi2.sf(np.sum(z**2), z.size)
    assert MINIMAL_P < p_value < 1 - MINIMAL_P


@every_layout
def test_there_is_no_common_bias(bits: int, columns: int) -> None:
    codes, expected = sample(bits, columns=columns)
    assert codes.size > 10**6
    assert abs(pooled_deviate(codes, expected)) < 5


@pytest.mark.parametrize("bits", [1, 8])
def test_a_bias_of_one_percent_of_a_step_would_be_found(bits: int) -> None:
    codes, expected = sample(bits, planted_bias=0.01)
    assert pooled_deviate(codes, expected) > 20


@every_width
def test_codes_are_the_two_neighbors(bits: int) -> None:
    codes, expected = sample(bits)
    assert np.all((codes == np.floor(expected)) | (codes == np.ceil(expected)))


@every_width
def test_the_variance_is_that_of_two_values(bits: int) -> None:
    codes, expected = sample(bits)
    p = expected - np.floor(expected)
    measured = np.mean((codes - expected) ** 2)
    assert 0.99 < measured / np.mean(p * (1 - p)) < 1.01


@functools.cache
def noise(seed: int, tiles: int = 4096) -> np.ndarray:
    """Returns the words `[tiles, 512]` of tiles that all have the same content."""
    words = jax.jit(noise_words)(jnp.uint32(seed), jnp.zeros(tiles, jnp.uint32))
    return np.asarray(words).reshape(tiles, 512)


def correlation_deviate(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the correlation of two series of words, in standard errors."""
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1] * np.sqrt(a.size))


@pytest.mark.parametrize("seed", [0, 1])
def test_noise_bytes_are_uniform(seed: int) -> None:
    # The upper bytes: the lower ones of a lane's rows depend on each other.
    counts = np.bincount(noise(seed).ravel() >> 8, minlength=256)
    p_value = scipy.stats.chisquare(counts).pvalue
    assert MINIMAL_P < p_value < 1 - MINIMAL_P


def test_noise_words_are_uniform_at_every_place() -> None:
    # The top four bits of each of the 512 places, over tiles.
    top = noise(2) >> 12
    counts = np.stack([np.bincount(place, minlength=16) for place in top.T])
    statistic = np.sum((counts - 256.0) ** 2 / 256.0)
    p_value = scipy.stats.chi2.sf(statistic, 512 * 15)
    assert MINIMAL_P < p_value < 1 - MINIMAL_P


@pytest.mark.parametrize("lag", [1, 2, 16, 31, 32, 33, 64, 128, 256])
def test_noise_inside_a_tile_is_uncorrelated(lag: int) -> None:
    words = noise(3).astype(np.float64)
    assert abs(correlation_deviate(words[:, :-lag], words[:, lag:])) < 5


@pytest.mark.parametrize("lag", [1, 2, 32, 64, 512, 1024])
def test_noise_of_the_flat_array_is_uncorrelated(lag: int) -> None:
    words = noise(4).ravel().astype(np.float64)
    assert abs(correlation_deviate(words[:-lag], words[lag:])) < 5


@pytest.mark.parametrize(
    ("seed", "other"), [(0, 1), (7, 8), (0, 2**31), (1, 2**32 - 1)]
)
def test_noise_of_other_seeds_is_uncorrelated(seed: int, other: int) -> None:
    deviate = correlation_deviate(
        noise(seed).astype(np.float64), noise(other).astype(np.float64)
    )
    assert abs(deviate) < 5


def test_noise_of_other_tiles_is_uncorrelated() -> None:
    words = noise(5).astype(np.float64)
    assert abs(correlation_deviate(words[:-1], words[1:])) < 5


def test_noise_follows_the_content() -> None:
    checksums = jnp.arange(4096, dtype=jnp.uint32)
    # Every tile is tile 0, with a content of its own.
    words = jax.vmap(noise_words, in_axes=(None, 0))(jnp.uint32(6), checksums[:, None])
    words = np.asarray(words).reshape(4096, 512).astype(np.float64)
    assert abs(correlation_deviate(words[:-1], words[1:])) < 5


def test_all_pairs_in_a_lane_fill_the_square() -> None:
    # Not a sample: every first word. Independent words would give 256 in every cell.
    word = np.arange(2**16)
    for rows in range(1, 16):
        other = word * pow(0x9F27, rows, 2**16) % 2**16
        counts = np.bincount((word >> 12) * 16 + (other >> 12), minlength=256)
        assert np.max(np.abs(counts - 256)) <= 4
        assert abs(np.corrcoef(word, other)[0, 1]) < 0.001


@pytest.mark.parametrize("lag", [1, 2, 32, 64])
def test_pairs_of_words_fill_the_square(lag: int) -> None:
    top = noise(7) >> 12
    counts = np.bincount((top[:, :-lag] * 16 + top[:, lag:]).ravel(), minlength=256)
    p_value = scipy.stats.chisquare(counts).pvalue
    assert MINIMAL_P < p_value < 1 - MINIMAL_P
