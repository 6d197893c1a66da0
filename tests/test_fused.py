"""Decoding in the kernels that read the result gives the values of the custom calls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dafjax._native import (
    Format,
    _cuda,
    _reference,
    pack_affine,
    pack_bitmask,
    tie,
    unpack_affine,
    unpack_affine_fused,
    unpack_bitmask,
    unpack_bitmask_fused,
)
from dafjax.codecs import AbstractCodec, Affine
from tests import oracle
from tests.helpers import (
    ALL_CODECS,
    FLOAT_DTYPES,
    assert_same_bits,
    example,
    like,
    mixed_rows,
)


SEED = 7
# Of two rows and a few channels: in tiles, beside them, and less than one.
SHAPES = ((2, 16, 8, 32), (2, 9, 15, 48), (2, 3, 5))

every_shape = pytest.mark.parametrize("shape", SHAPES)
every_codec = pytest.mark.parametrize("codec", ALL_CODECS, ids=repr)


def lower(function, *shapes, platform):
    """Returns the program that a platform's compiler is given."""
    traced = jax.jit(function).trace(*shapes)
    return traced.lower(lowering_platforms=(platform,)).as_text()


@every_shape
@pytest.mark.parametrize("bits", oracle.BITS)
def test_the_decoder_that_xla_fuses_gives_the_bits_of_the_custom_call(shape, bits):
    size = int(np.prod(shape[1:]))
    # Dtypes take turns.
    turn = SHAPES.index(shape) + oracle.BITS.index(bits)
    for columns in (0, shape[-1]):
        turn += 1
        dtype = FLOAT_DTYPES[turn % 3]
        x = mixed_rows(2, size, dtype, seed=size + bits)
        if columns:
            # Rows that are shorter than the rest are in blocks of columns too.
            x[0, :100] = np.inf
        code = {"format": Format(bits, 64, columns)}
        packed = pack_affine(jnp.asarray(x), jnp.uint32(SEED), **code)
        code |= {"size": size, "dtype": x.dtype}
        expected = unpack_affine(*packed, **code).reshape(shape)
        decode = functools.partial(_reference.unpack_affine, **code, shape=shape)
        got = jax.jit(decode)(*packed)
        assert got.shape == shape
        # XLA:CPU, unlike XLA:GPU, flushes subnormals, which halves may be.
        tiny = np.abs(np.asarray(expected).astype(np.float32)) < 2.0**-124
        assert_same_bits(np.where(tiny, 0, got), np.where(tiny, 0, expected))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_ranges_beyond_float32_are_decoded(dtype):
    """The product of a code and the scale alone would be infinite."""
    largest = float(jnp.finfo(dtype).max)
    x = jnp.asarray([[-largest, largest] * 256], dtype)
    code = {"format": Format(8, 256, stochastic=False)}
    packed = pack_affine(x, jnp.uint32(SEED), **code)
    code |= {"size": 512, "dtype": x.dtype}
    got = jax.jit(functools.partial(_reference.unpack_affine, **code, shape=(512,)))(
        *packed
    )
    assert jnp.all(jnp.isfinite(got))
    assert_same_bits(got, unpack_affine(*packed, **code)[0])


@every_codec
@every_shape
def test_a_codec_decodes_alike_either_way(codec: AbstractCodec, shape, key):
    x = example(codec, shape, key)
    packed = codec.encode(x)
    expected = codec.decode(packed, like(x))
    assert_same_bits(codec.decode_fused(packed, like(x)), expected)
    compiled = jax.jit(lambda p, y: codec.decode_fused(p, like(x), after=(y,)))
    assert_same_bits(compiled(packed, x), expected)


@every_codec
def test_batches_are_decoded_alike(codec: AbstractCodec, key):
    rows = jnp.stack([example(codec, (2, 700), k) for k in jax.random.split(key, 3)])
    packed = jax.vmap(codec.encode)(rows)
    decode = functools.partial(codec.decode_fused, like=like(rows[0]))
    expected = jnp.stack(
        [decode(jax.tree.map(lambda x, i=i: x[i], packed)) for i in range(3)]
    )
    assert_same_bits(jax.vmap(decode)(packed), expected)
    # What waits may have an axis of its own, and is not read.
    waiting = jax.vmap(
        lambda y: decode(jax.tree.map(lambda x: x[0], packed), after=(y,))
    )
    assert_same_bits(waiting(rows)[1], expected[0])


def test_what_devices_share_is_decoded_where_it_is():
    x = jax.random.normal(jax.random.key(0), (8, 4, 256))
    codec = Affine(bits=4)
    mesh = Mesh(np.array(jax.devices()[:2]), ("rows",))
    divided = jax.device_put(x, NamedSharding(mesh, PartitionSpec("rows")))
    roundtrip = jax.jit(
        lambda x: jnp.maximum(codec.decode_fused(codec.encode(x), like(x)), 0.0)
    )
    compiled = roundtrip.lower(divided).compile()
    assert "all-" not in compiled.as_text()
    assert_same_bits(compiled(divided), roundtrip(x))


def test_on_cuda_what_devices_share_is_decoded_by_custom_calls_and_tied(monkeypatch):
    monkeypatch.setattr(_cuda, "register", lambda: True)
    codec = Affine(bits=4)
    mesh = Mesh(np.array(jax.devices()[:2]), ("rows",))
    rows = NamedSharding(mesh, PartitionSpec("rows"))
    # A size that no other test lowers, so that nothing is cached.
    x = jax.ShapeDtypeStruct((8, 4, 264), jnp.float32, sharding=rows)

    def roundtrip(x):
        x, y = tie(x, jnp.sin(x), only_on_cpus=True)
        return codec.decode_fused(codec.encode(x), like(x)) + y

    text = lower(roundtrip, x, platform="cuda")
    assert text.count("custom_call @CustomSPMDPartitioning(") == 2
    assert "shift_right" not in text
    assert "optimization_barrier" in text


def test_explicit_shardings_of_codes_are_kept():
    mesh = Mesh(np.array(jax.devices()[:2]), ("rows",), axis_types=(AxisType.Explicit,))
    codec = Affine(bits=4)
    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, PartitionSpec("rows", None))
        x = jax.device_put(jnp.ones((8, 512)), rows)
        packed = codec.encode(x)
        decoded = [f(packed, like(x)) for f in (codec.decode, codec.decode_fused)]
    assert jax.typeof(decoded[0]) == jax.typeof(decoded[1])


def test_a_codec_with_no_other_way_says_so():
    class Slow(AbstractCodec):
        is_exact = property(lambda self: True)
        encode = decode = packed_nbytes = check = lambda self, *_, **__: None

    assert not Slow().decodes_fused
    assert all(codec.decodes_fused for codec in ALL_CODECS)


@pytest.mark.parametrize("bits", [1, 4])
def test_derivatives_are_refused(bits):
    codec = Affine(bits=bits)
    x = jnp.linspace(0.0, 1.0, 512)
    with pytest.raises(NotImplementedError, match="second-order"):
        jax.grad(lambda x: jnp.sum(codec.decode_fused(codec.encode(x), like(x))))(x)


def test_invalid_operands_are_refused_as_by_the_custom_call():
    words = jnp.zeros((2, 32), jnp.uint16)
    with pytest.raises(ValueError, match="must have 64 words a row"):
        unpack_bitmask_fused(words, shape=(2, 513), size=513)
    blocks = jnp.zeros((2, 1), jnp.bfloat16)
    code = {"size": 64, "dtype": jnp.float32, "format": Format(5, 64)}
    with pytest.raises(ValueError, match="`bits` must be one of"):
        unpack_affine_fused(words, blocks, blocks, shape=(2, 64), **code)


# Sizes that no other test lowers, so that nothing is cached.
WORDS = jax.ShapeDtypeStruct((3, 64), jnp.uint16)
PARAMETERS = jax.ShapeDtypeStruct((3, 3), jnp.bfloat16)


def decode_both(words, parameters):
    code = {"size": 513, "dtype": jnp.float32, "format": Format(1, 256)}
    shape = (3, 19, 27)
    mask = unpack_bitmask_fused(words, shape=shape, size=513)
    x = unpack_affine_fused(words, parameters, parameters, shape=shape, **code)
    return jnp.where(mask, x, 0.0)


def test_on_cpus_it_is_a_custom_call():
    text = lower(decode_both, WORDS, PARAMETERS, platform="cpu")
    for name in ("affine", "bitmask"):
        assert f"stablehlo.custom_call @dafjax_unpack_{name}(" in text
    assert "shift_right" not in text


@pytest.mark.parametrize("is_built", [True, False])
def test_on_cuda_it_is_what_xla_can_fuse(is_built, monkeypatch):
    monkeypatch.setattr(_cuda, "register", lambda: is_built)
    text = lower(decode_both, WORDS, PARAMETERS, platform="cuda")
    assert "custom_call @dafjax" not in text
    assert "shift_right" in text


@pytest.mark.parametrize(("platform", "num_ties"), [("cpu", 1), ("cuda", 0)])
def test_what_is_fused_need_not_wait_but_on_cpus(platform, num_ties):
    x = jax.ShapeDtypeStruct((37,), jnp.float32)
    text = lower(lambda x, y: tie(x, y, only_on_cpus=True), x, x, platform=platform)
    assert text.count("custom_call @dafjax_tie(") == num_ties
    assert "optimization_barrier" not in text


def test_masks_are_decoded_alike():
    mask = jax.random.bernoulli(jax.random.key(1), shape=(3, 700))
    words = pack_bitmask(mask)
    assert_same_bits(unpack_bitmask(words, size=700), mask)
    decode = functools.partial(_reference.unpack_bitmask, size=700, shape=(3, 7, 100))
    assert_same_bits(jax.jit(decode)(words), mask.reshape(3, 7, 100))
