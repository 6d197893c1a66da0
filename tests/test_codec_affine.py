"""The affine codec: goldens, error bounds, exact cases, values that are not finite."""

import itertools
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dafjax._native import Format, unpack_affine
from dafjax.codecs import Affine, PackedAffine
from tests import oracle
from tests.helpers import (
    AFFINE_CODECS,
    DATA_KINDS,
    FLOAT_DTYPES,
    assert_same_bits,
    hostile_rows,
    like,
)


SIZE = 3000  # the same in most tests, so that little is compiled
ROUNDINGS = ("stochastic", "nearest")
VARIANTS = [
    Affine(bits=bits, block_size=256, rounding=rounding)
    for bits, rounding in itertools.product(oracle.BITS, ROUNDINGS)
]
GOLDENS = [
    line.strip()
    for line in (pathlib.Path(__file__).parent / "golden" / "affine.txt")
    .read_text(encoding="utf-8")
    .splitlines()
    if line.strip() and not line.startswith("#")
]

every_variant = pytest.mark.parametrize("codec", VARIANTS, ids=repr)
every_dtype = pytest.mark.parametrize("dtype", FLOAT_DTYPES)


def parse_value(text: str) -> np.float32:
    """Reads a decimal or hexadecimal number, or the pattern of a float32."""
    if text.startswith("0x") and "p" not in text:
        return np.array([int(text, 16)], np.uint32).view(np.float32)[0]
    return np.float32(float.fromhex(text) if "p" in text else float(text))


def codes_of(packed: PackedAffine, size: int, bits: int) -> np.ndarray:
    return oracle.unpack_planes(np.asarray(packed.codes)[None], size, bits)[0]


def steps_of(packed: PackedAffine, size: int, block_size: int) -> np.ndarray:
    """Returns the scale of every element, in float64."""
    scale = np.abs(np.asarray(packed.scale).astype(np.float64))
    return np.repeat(scale, block_size)[:size]


def largest_error(codec: Affine) -> float:
    """Returns the bound of the error in steps: the fixed point adds its last place."""
    last_place = 2.0 ** (codec.bits - 16)
    return (1.0 if codec.rounding == "stochastic" else 0.5) + 2 * last_place


def half_last_place(x: np.ndarray, dtype: str) -> np.ndarray:
    """Returns the rounding error of decoding to `dtype`, and the flushed subnormals."""
    digits = {"float32": 24, "bfloat16": 8, "float16": 11}[dtype]
    return np.abs(x) * 2.0**-digits + 2.0**-25 * (dtype == "float16") + 2.0**-126


def roundtrip(codec: Affine, x: np.ndarray) -> tuple[PackedAffine, np.ndarray]:
    packed = codec.encode(jnp.asarray(x))
    decoded = codec.decode(packed, jax.ShapeDtypeStruct(x.shape, x.dtype))
    return packed, np.asarray(decoded).astype(np.float64)


@pytest.mark.parametrize("row", GOLDENS)
def test_known_blocks_have_known_codes(row: str) -> None:
    head, values, minimum, scale, codes = (part.strip() for part in row.split("|"))
    dtype, bits, rounding = head.split()
    x = np.array([parse_value(v) for v in values.split()], np.float32)
    codec = Affine(bits=int(bits), block_size=64, rounding=rounding)
    packed = codec.encode(jnp.asarray(x).astype(dtype))
    expected = np.array([parse_value(minimum), parse_value(scale)])
    stored = jnp.concatenate([packed.minimum, packed.scale]).astype(jnp.float32)
    assert_same_bits(stored, expected)
    assert codes_of(packed, x.size, codec.bits).tolist() == [
        int(code) for code in codes.split()
    ]


@every_variant
@every_dtype
def test_errors_stay_below_a_step(
    codec: Affine, dtype: str, rng: np.random.Generator
) -> None:
    for kind in ("normal", "relu", "offset", "subnormal", "huge"):
        if kind == "huge" and dtype == "float16":
            x = rng.uniform(-3e4, 3e4, SIZE).astype(np.float16)
        else:
            x = hostile_rows(rng, kind, 1, SIZE, dtype)[0]
        packed, decoded = roundtrip(codec, x)
        step = steps_of(packed, x.size, codec.block_size)
        exact = x.astype(np.float64)
        slack = half_last_place(decoded, dtype)
        if codec.bits == 1 and kind == "huge" and dtype != "float16":
            # The step that would reach the top of the range is not a float32.
            step = np.maximum(step, 3.4e38)
        # A block narrower than 2^-100 steps is constant.
        allowed = np.where(step > 0, step * largest_error(codec), 2.0**-92)
        assert np.all(np.abs(decoded - exact) <= allowed + slack), kind


@pytest.mark.parametrize("bits", oracle.BITS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_distortion_of_uniform_values_is_what_theory_says(
    bits: int, rounding: str, rng: np.random.Generator
) -> None:
    # The mean square error is step^2 / 12 to nearest; at random it is the mean of
    # step^2 p (1 - p) over uniform p, step^2 / 6.
    codec = Affine(bits=bits, rounding=rounding)
    x = rng.uniform(0, 1, 200_000).astype(np.float32)
    packed, decoded = roundtrip(codec, x)
    error = (decoded - x) / steps_of(packed, x.size, codec.block_size)
    expected = 1 / 6 if rounding == "stochastic" else 1 / 12
    assert 0.97 * expected < np.mean(error**2) < 1.03 * expected


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("bits", oracle.BITS)
def test_encoding_a_decoded_code_gives_the_code_back(bits: int, rounding: str) -> None:
    codec = Affine(bits=bits, block_size=256, rounding=rounding)
    levels = np.arange(2**bits)
    for scale, offset in itertools.product((2.0**-90, 1.0, 2.0**100), (-3, 0, 100)):
        grid = ((levels + offset) * scale).astype(np.float32)
        packed, decoded = roundtrip(codec, grid)
        assert codes_of(packed, grid.size, bits).tolist() == levels.tolist()
        assert np.unique(decoded).size == grid.size
        np.testing.assert_array_equal(decoded, grid)


@every_variant
@every_dtype
def test_the_least_value_of_a_block_is_exact_if_bfloat16_holds_it(
    codec: Affine, dtype: str, rng: np.random.Generator
) -> None:
    x = hostile_rows(rng, "normal", 1, 256, "bfloat16")[0].astype(np.float32)
    x = np.asarray(jnp.asarray(x).astype(dtype))
    _, decoded = roundtrip(codec, x)
    least = np.argmin(x)
    assert decoded[least] == float(x[least])


@every_variant
@every_dtype
def test_zeros_after_relu_stay_exactly_zero(
    codec: Affine, dtype: str, rng: np.random.Generator
) -> None:
    x = hostile_rows(rng, "relu", 1, SIZE, dtype)[0]
    _, decoded = roundtrip(codec, x)
    assert np.all(decoded[x == 0] == 0)


@every_variant
@every_dtype
def test_values_that_are_not_finite_survive_or_become_nan(
    codec: Affine, dtype: str, rng: np.random.Generator
) -> None:
    x = hostile_rows(rng, "not finite", 1, SIZE, dtype)[0]
    _, decoded = roundtrip(codec, x)
    exact = x.astype(np.float64)
    if codec.bits < 3:
        exact = np.where(np.isfinite(exact), exact, np.nan)
    not_finite = ~np.isfinite(exact)
    assert not_finite.any()
    np.testing.assert_array_equal(decoded[not_finite], exact[not_finite])
    assert np.isfinite(decoded[~not_finite]).all()


@every_variant
@every_dtype
def test_finite_neighbors_of_infinity_lose_one_bit(
    codec: Affine, dtype: str, rng: np.random.Generator
) -> None:
    x = hostile_rows(rng, "normal", 1, 256, dtype)[0]
    x[77] = np.inf
    packed, decoded = roundtrip(codec, x)
    finite = np.isfinite(x)
    exact = x.astype(np.float64)
    step = steps_of(packed, 256, 256)[finite]
    if codec.bits == 1:  # No bit is left: finite values decode to the minimum.
        step = np.full_like(step, 2.04 * np.ptp(exact[finite]))
    error = np.abs(decoded[finite] - exact[finite])
    slack = half_last_place(decoded[finite], dtype)
    assert np.all(error <= step * largest_error(codec) + slack)


@every_variant
def test_a_flagged_block_leaves_the_others_alone(
    codec: Affine, rng: np.random.Generator
) -> None:
    # Other tiles: the noise of a tile depends on all of it.
    x = hostile_rows(rng, "normal", 1, SIZE, "float32")[0]
    _, clean = roundtrip(codec, x)
    x[600] = np.nan
    _, decoded = roundtrip(codec, x)
    others = np.r_[0:512, 1024:SIZE]
    np.testing.assert_array_equal(decoded[others], clean[others])


@every_variant
@every_dtype
def test_finite_values_never_decode_to_infinity(
    codec: Affine, dtype: str, rng: np.random.Generator
) -> None:
    for kind in DATA_KINDS:
        x = hostile_rows(rng, kind, 1, SIZE, dtype)[0]
        _, decoded = roundtrip(codec, x)
        assert np.isfinite(decoded[np.isfinite(x)]).all(), kind


@every_variant
@every_dtype
def test_the_whole_range_of_a_dtype_decodes_to_finite_values(
    codec: Affine, dtype: str, rng: np.random.Generator
) -> None:
    # The range is wider than the largest value: differences and products overflow.
    largest = float(jnp.finfo(dtype).max)
    x = rng.uniform(-1, 1, SIZE) * largest
    x[::10] = largest
    x[5::10] = -largest
    x = x.astype(np.float32)
    _, decoded = roundtrip(codec, np.asarray(jnp.asarray(x).astype(dtype)))
    assert np.isfinite(decoded).all()


@every_variant
def test_float16_near_its_largest_value_keeps_its_bound(codec: Affine) -> None:
    for lowest in (65504.0, 60000.0, 0.0, -65504.0):
        x = np.linspace(lowest, 65504, 256).astype(np.float16)
        packed, decoded = roundtrip(codec, x)
        exact = x.astype(np.float64)
        step = steps_of(packed, 256, 256)
        # The step is rounded down, so that the top is below 65504 by up to 2^-7 of it.
        missing = np.maximum(0, exact - np.max(decoded))
        error = np.abs(decoded - exact)
        slack = half_last_place(decoded, "float16") + 224 * (lowest < 0)
        assert np.isfinite(decoded).all()
        assert np.all(missing <= 65504 * 2.0**-6)
        assert np.all(error <= np.maximum(step * largest_error(codec), missing) + slack)


@pytest.mark.parametrize(("fewer", "size"), [(1, 1300), (2, 512), (4, 1)])
def test_fewer_bits_are_a_prefix_of_eight(
    fewer: int, size: int, rng: np.random.Generator
) -> None:
    packed = Affine(bits=8).encode(jnp.asarray(rng.standard_normal(size), jnp.float32))
    codes = codes_of(packed, size, 8)
    tiles = -(-size // 512)
    blocks = -(-size // 256)
    prefix = unpack_affine(
        packed.codes[: tiles * 32 * fewer],
        jnp.ones(blocks, jnp.bfloat16),
        jnp.zeros(blocks, jnp.bfloat16),
        size=size,
        dtype=np.dtype("float32"),
        format=Format(fewer, 256),
    )
    np.testing.assert_array_equal(prefix, codes >> (8 - fewer))


@every_variant
def test_padding_bits_are_zero(codec: Affine) -> None:
    # Rows of ones above a zero: rounding would set bits if padding were encoded.
    for size in (1, 65, 1030):
        x = np.ones(size, np.float32)
        x[0] = 0
        packed = codec.encode(jnp.asarray(x))
        codes = codes_of(packed, -(-size // 512) * 512, codec.bits)
        assert not codes[size:].any(), size


@every_dtype
def test_every_value_of_a_sixteen_bit_dtype_survives_alone(dtype: str) -> None:
    # Blocks of one value: decoding is within the two roundings of the minimum.
    if dtype == "float32":
        x = np.arange(2**16, dtype=np.uint32) << np.uint32(16)
        x = (x + np.uint32(0x1234)).view(np.float32)
    else:
        numpy_dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
        x = np.arange(2**16, dtype=np.uint16).view(numpy_dtype)
    # Rows of a single element each.
    encode = jax.vmap(Affine(bits=8, block_size=64).encode)
    decode = jax.vmap(
        lambda p: Affine(bits=8, block_size=64).decode(
            p, jax.ShapeDtypeStruct((1,), jnp.dtype(dtype))
        )
    )
    decoded = np.asarray(decode(encode(jnp.asarray(x)[:, None])))[:, 0]
    with np.errstate(invalid="ignore"):  # signaling NaN
        exact, decoded = x.astype(np.float64), decoded.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(decoded), np.isnan(exact))
    infinite = np.isinf(exact)
    np.testing.assert_array_equal(decoded[infinite], exact[infinite])
    finite = np.isfinite(exact)
    if dtype == "bfloat16":
        flushed = np.where(np.abs(exact) < 2.0**-126, 0, exact)
        np.testing.assert_array_equal(decoded[finite], flushed[finite])
    else:
        exact, decoded = exact[finite], decoded[finite]
        # One step is the gap between bfloat16 values over 255, rounded up twice.
        bound = np.abs(exact) * 2.0**-14 + half_last_place(exact, dtype) + 2.0**-92
        near_limit = np.abs(exact) > float(jnp.finfo(dtype).max) * (1 - 2.0**-7)
        assert np.all((np.abs(decoded - exact) <= bound) | near_limit)
        assert np.all(np.abs(decoded - exact) <= np.abs(exact) * 2.0**-7 + 2.0**-92)


@pytest.mark.parametrize("codec", AFFINE_CODECS, ids=repr)
def test_bits_per_element_are_as_documented(codec: Affine) -> None:
    size = 2**20
    nbytes = codec.packed_nbytes(jax.ShapeDtypeStruct((size,), np.dtype("float32")))
    assert nbytes * 8 / size == codec.bits + 32 / codec.block_size


def test_more_bits_give_less_error(rng: np.random.Generator) -> None:
    x = rng.standard_normal(10_000).astype(np.float32)
    errors = [
        np.linalg.norm(roundtrip(Affine(bits=bits), x)[1] - x) for bits in oracle.BITS
    ]
    assert all(more > 1.6 * less for more, less in itertools.pairwise(errors))


def test_nearest_rounding_ignores_the_seed(key: jax.Array) -> None:
    x = jax.random.normal(key, (700,))
    codec = Affine(rounding="nearest")
    assert_same_bits(codec.encode(x, seed=1).codes, codec.encode(x, seed=2).codes)


def test_another_seed_gives_other_codes(key: jax.Array) -> None:
    x = jax.random.normal(key, (700,))
    codes = [codes_of(Affine().encode(x, seed=seed), 700, 2) for seed in (1, 2)]
    assert np.mean(codes[0] != codes[1]) > 0.1


def test_an_integer_and_an_array_are_the_same_seed(key: jax.Array) -> None:
    x = jax.random.normal(key, (700,))
    traced = jax.jit(lambda x, seed: Affine().encode(x, seed=seed))
    codes = traced(x, jnp.uint32(2**32 - 1)).codes
    assert_same_bits(Affine().encode(x, seed=2**32 - 1).codes, codes)


def test_vmapped_seeds_agree_with_a_loop(key: jax.Array) -> None:
    x = jax.random.normal(key, (3, 700))
    seeds = jnp.arange(3, dtype=jnp.uint32)
    packed = jax.vmap(lambda x, seed: Affine().encode(x, seed=seed))(x, seeds)
    shared = jax.vmap(lambda seed: Affine().encode(x[0], seed=seed))(seeds)
    for i in range(3):
        assert_same_bits(packed.codes[i], Affine().encode(x[i], seed=i).codes)
        assert_same_bits(shared.codes[i], Affine().encode(x[0], seed=i).codes)


@pytest.mark.parametrize("bits", [0, 5, 16, -1, 2.5, True, None])
def test_other_bits_are_refused(bits: object) -> None:
    with pytest.raises(ValueError, match=r"`Affine\(bits=...\)` must be one of \(1, 2"):
        Affine(bits=bits)


@pytest.mark.parametrize("block_size", [32, 100, 2048])
def test_other_block_sizes_are_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match=rf"block_size=...\)`.*but got {block_size}"):
        Affine(block_size=block_size)


def test_other_roundings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rounding=...\)`.*'dithered', 'nearest'"):
        Affine(rounding="up")


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match=f"`seed` must be from 0.*but got {seed}"):
        Affine().encode(jnp.ones(3), seed=seed)


@pytest.mark.parametrize("seed", [jnp.int32(1), jnp.zeros(2, jnp.uint32)])
def test_a_seed_of_another_type_is_refused(seed: jax.Array) -> None:
    with pytest.raises(TypeError, match="`seed` must be an int or a uint32 scalar"):
        Affine().encode(jnp.ones(3), seed=seed)


def test_forward_mode_is_refused_with_a_remedy() -> None:
    codec, x = Affine(), jnp.arange(3.0)

    def roundtrip_sum(x: jax.Array) -> jax.Array:
        return jnp.sum(codec.decode(codec.encode(x), like(x)))

    with pytest.raises(
        NotImplementedError, match=r"forward-mode or second-order.*bits="
    ):
        jax.jvp(roundtrip_sum, (x,), (x,))
    with pytest.raises(
        NotImplementedError, match=r"forward-mode or second-order.*bits="
    ):
        jax.grad(roundtrip_sum)(x)


def test_second_order_differentiation_is_refused_eagerly() -> None:
    codec = Affine()

    @jax.custom_vjp
    def square(x: jax.Array) -> jax.Array:
        return x * x

    def forward(x: jax.Array) -> tuple[jax.Array, PackedAffine]:
        return square(x), codec.encode(x)

    def backward(packed: PackedAffine, cotangent: jax.Array) -> tuple[jax.Array]:
        x = codec.decode(packed, like(cotangent), after=(cotangent,))
        return (2.0 * x * cotangent,)

    square.defvjp(forward, backward)
    x = jnp.arange(3.0)
    assert jax.grad(lambda x: jnp.sum(square(x)))(x).shape == x.shape
    with pytest.raises(NotImplementedError, match="second-order differentiation"):
        jax.jacrev(jax.grad(lambda x: jnp.sum(square(x))))(x)
