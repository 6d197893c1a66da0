"""Dithered rounding: the decoder subtracts the noise that the encoder has added."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dafjax._native import Format, _reference, pack_affine, unpack_affine
from dafjax.codecs import Affine
from dafjax.codecs._affine import sample_rounding_noise
from dafjax.stores import PagePool
from tests import oracle
from tests.helpers import (
    FLOAT_DTYPES,
    assert_same_bits,
    hostile_rows,
    like,
    mixed_rows,
)


SEED = 11
SIZE = 1500


@functools.partial(jax.jit, static_argnames=("size", "format"))
def round_trip(x, seed, *, size, format):
    """What kernels make of rows, and what jax.numpy makes of them: codes and values."""
    seeds = jnp.full(x.shape[:-1], seed)
    results = []
    for native in (False, True):
        pack = pack_affine if native else _reference.pack_affine
        packed = pack(x, seed, format=format)
        parameters = {"size": size, "dtype": x.dtype, "format": format}
        if native:
            y = unpack_affine(*packed, seeds=seeds, **parameters)
        else:
            y = _reference.unpack_affine(*packed, seeds, **parameters)
        results.append((packed, y))
    return results


@pytest.mark.parametrize("bits", oracle.BITS)
def test_kernels_and_jax_numpy_give_the_same_bits(bits):
    layouts = [
        (1500, 0, 64),
        (2600, 0, 256),
        (1537, 0, 1024),
        (1500, 75, 64),
        (70 * 96, 96, 64),
        (40 * 32, 32, 256),
    ]
    # Layouts and dtypes take turns: all meet rows and columns.
    some = layouts[oracle.BITS.index(bits) % 2 :: 2]
    for turn, (size, columns, block_size) in enumerate(some):
        x = mixed_rows(8, size, FLOAT_DTYPES[(turn + bits) % 3], seed=bits)
        format = Format(bits, block_size, columns, dithered=True)
        (codes, values), (expected_codes, expected) = round_trip(
            x, jnp.uint32(7), size=size, format=format
        )
        for got, wanted in zip(codes, expected_codes, strict=True):
            assert_same_bits(got, wanted)
        assert_same_bits(values, expected)


@pytest.mark.parametrize("bits", oracle.BITS)
def test_codes_and_values_are_those_of_the_formula(bits):
    """In NumPy, from `xla_ffi/README.md`, for rows of finite values."""
    x = mixed_rows(1, 2048, "float32", seed=3)[:, :2048]
    x = np.where(np.isfinite(x), x, 0).astype(np.float32)
    x = np.clip(x, -1e30, 1e30)
    codec = Affine(bits=bits, block_size=256, rounding="dithered")
    packed = codec.encode(jnp.asarray(x), seed=SEED)
    words, scale, minimum = (
        np.asarray(part).view(np.uint16).reshape(1, -1)
        for part in (packed.codes, packed.scale, packed.minimum)
    )
    codes = oracle.unpack_planes(words, 2048, bits)[0].astype(np.int64)
    stored = (scale[0].astype(np.uint32) << 16) | minimum[0]
    f = 16 - bits
    with np.errstate(over="ignore"):
        key = stored[0::2] + stored[1::2] * oracle.GOLDEN_RATIO
        tile = np.arange(4, dtype=np.uint32)
        stream = oracle.mix(np.array([SEED], np.uint32) + oracle.GOLDEN_RATIO)
        key = oracle.mix(oracle.mix(stream ^ tile) + key)
        k = np.arange(16, dtype=np.uint32)
        draw = oracle.mix(key[:, None] + k * oracle.GOLDEN_RATIO)
    first = np.stack([draw & 0xFFFF, draw >> 16], -1).reshape(4, 1, 32).astype(object)
    noise = first * np.array([0x9F27**j for j in range(16)], object)[:, None] % 2**16
    noise = noise.reshape(-1).astype(np.int64) >> (16 - f)
    of_block = (
        np.repeat(scale[0].view(oracle.bfloat16).astype(np.float64), 256),
        np.repeat(minimum[0].view(oracle.bfloat16).astype(np.float64), 256),
    )
    step, low = of_block
    inverse = np.float32(2.0**f) / step.astype(np.float32)
    difference = x[0] - low.astype(np.float32)
    q = np.trunc(np.clip(difference * inverse, 0, 65535)).astype(np.int64)
    np.testing.assert_array_equal(codes, np.minimum(q + noise, 65535) >> f)
    t = codes * 2**f + 2**f // 2 - noise
    value = (low + t * (step * 2.0**-f)).astype(np.float32)
    assert_same_bits(codec.decode(packed, like(x))[0], value)


@pytest.mark.parametrize("bits", oracle.BITS)
@pytest.mark.parametrize("blocks", ["rows", "columns"])
def test_the_error_is_spread_evenly_over_a_step(bits, blocks, rng):
    """Whatever the value: no bias, a twelfth of a squared step, at most half of one."""
    shape = (16, 128, 64)
    x = rng.standard_normal(shape).astype(np.float32)
    codec = Affine(bits=bits, rounding="dithered", blocks=blocks)

    @jax.jit
    def errors(seed):
        packed = codec.encode(x, seed=seed)
        scale = packed.scale.astype(jnp.float32)
        if blocks == "rows":
            step = jnp.repeat(scale, 256, axis=1).reshape(shape)
        else:
            step = scale.reshape(16, 1, 64)
        return (codec.decode(packed, like(x)) - x) / step

    e = np.stack([errors(jnp.uint32(seed)) for seed in range(24)])
    assert np.abs(e).max() < 0.5 + 2.0 ** (bits - 14)
    assert abs(e.mean()) < 4 * (1 / 12 / e.size) ** 0.5
    assert abs((e**2).mean() * 12 - 1) < 0.01
    # A value's own errors, and those of large and small values.
    assert abs((e.mean(0) ** 2).mean() * 12 * 24 - 1) < 0.05
    for part in (x < -1, np.abs(x) < 0.1, x > 1):
        assert abs((e[:, part] ** 2).mean() * 12 - 1) < 0.05
    # Rows, and what is next to each other, have noise of their own.
    flat = e.reshape(24, 16, -1)
    for one, other in [
        (flat[:, 0], flat[:, 1]),
        (flat[0], flat[1]),
        (flat[..., :-1], flat[..., 1:]),
        (flat[..., :-512], flat[..., 512:]),
    ]:
        correlation = 12 * np.mean(one * other)
        assert abs(correlation) < 5 / one.size**0.5


def test_the_prediction_of_noise_knows_of_it(rng):
    x = rng.standard_normal((64, 512)).astype(np.float32)
    assert sample_rounding_noise(Affine(rounding="dithered"), x) == pytest.approx(
        1 / 12
    )
    assert sample_rounding_noise(Affine(), x) > 0.14


@pytest.mark.parametrize(
    ("bits", "dtype"),
    [*((bits, "float32") for bits in oracle.BITS), (2, "bfloat16"), (4, "float16")],
)
def test_what_is_not_finite_is_kept_and_what_is_finite_stays_so(dtype, bits, rng):
    codec = Affine(bits=bits, rounding="dithered")
    x = hostile_rows(rng, "not finite", 1, SIZE, dtype)[0]
    y = np.asarray(codec.decode(codec.encode(x), like(x)))
    np.testing.assert_array_equal(np.isfinite(y), np.isfinite(x))
    if bits >= 3:
        special = ~np.isfinite(x)
        np.testing.assert_array_equal(
            y[special].astype(np.float32), x[special].astype(np.float32)
        )
    largest = float(jnp.finfo(dtype).max)
    huge = np.asarray(
        jnp.asarray(rng.choice([-largest, 0, largest], SIZE)).astype(dtype)
    )
    assert np.isfinite(np.asarray(codec.decode(codec.encode(huge), like(huge)))).all()


def test_blocks_of_one_value_are_exact():
    codec = Affine(rounding="dithered")
    x = jnp.full((4, 512), 0.375)
    assert_same_bits(codec.decode(codec.encode(x), like(x)), x)


@pytest.mark.parametrize("blocks", ["rows", "columns"])
def test_seeds_of_mapped_arrays_are_their_own(blocks, rng):
    x = jnp.asarray(rng.standard_normal((3, 2, 64, 40)), jnp.float32)
    seeds = jnp.arange(3, dtype=jnp.uint32)
    codec = Affine(bits=2, rounding="dithered", blocks=blocks)
    packed = jax.vmap(lambda x, seed: codec.encode(x, seed=seed))(x, seeds)
    decoded = jax.vmap(lambda p: codec.decode(p, like(x[0])))(packed)
    fused = jax.vmap(lambda p: codec.decode_fused(p, like(x[0])))(packed)
    for n in range(3):
        alone = codec.encode(x[n], seed=n)
        assert_same_bits(packed.codes[n], alone.codes)
        assert_same_bits(decoded[n], codec.decode(alone, like(x[n])))
        assert_same_bits(fused[n], decoded[n])


def test_the_decoder_that_xla_fuses_gives_the_same_bits():
    codes = zip(FLOAT_DTYPES, (1, 2, 8), strict=True)
    for (dtype, bits), columns in itertools.product(codes, (0, 36)):
        x = jnp.asarray(mixed_rows(2, 70 * 36, dtype, seed=bits))
        code = {"format": Format(bits, 64, columns, dithered=True)}
        packed = pack_affine(x, jnp.uint32(SEED), **code)
        seeds = jnp.full(x.shape[:1], SEED, jnp.uint32)
        code |= {"size": x.shape[-1], "dtype": x.dtype}
        expected = unpack_affine(*packed, seeds=seeds, **code).reshape(-1, 70, 36)
        decode = functools.partial(
            _reference.unpack_affine, **code, shape=expected.shape
        )
        got = jax.jit(decode)(*packed, seeds)
        # XLA:CPU, unlike XLA:GPU, flushes subnormals, which halves may be.
        tiny = np.abs(np.asarray(expected).astype(np.float32)) < 2.0**-124
        assert_same_bits(np.where(tiny, 0, got), np.where(tiny, 0, expected))


def test_page_pools_round_stochastically(request):
    with PagePool(name=request.node.name) as pool:
        codec = pool.codec(Affine(rounding="dithered"), site="a")
    assert codec.affine == Affine(rounding="stochastic")


def test_errors_name_what_is_missing():
    format = Format(2, 64, stochastic=False, dithered=True)
    with pytest.raises(ValueError, match="`dithered` is for stochastic rounding"):
        pack_affine(jnp.ones(512), jnp.uint32(0), format=format)
    packed = Affine(rounding="dithered").encode(jnp.ones((2, 512)))
    with pytest.raises(ValueError, match="`seeds` must have shape"):
        unpack_affine(
            packed.codes, packed.scale, packed.minimum, seeds=jnp.zeros(3, jnp.uint32),
            size=512, dtype=jnp.float32, format=Format(2, 256, dithered=True),
        )  # fmt: skip


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_a_codec_with_another_rounding_decodes_alike(rounding, rng):
    x = jnp.asarray(rng.standard_normal((2, 512), np.float32))
    codec = Affine(rounding="dithered")
    for of in (codec, Affine()):
        packed = of.encode(x)
        got = Affine(rounding=rounding).decode(packed, like(x))
        assert_same_bits(got, of.decode(packed, like(x)))
        assert_same_bits(codec.decode(packed, like(x)), got)
