"""Contract: what holds for every codec."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dafjax.codecs import (
    AbstractCodec,
    Affine,
    Bitmask,
    PackedAffine,
    _affine,
    _bitmask,
)
from dafjax.codecs._abstract import rows_of
from tests.helpers import ALL_CODECS, assert_same_bits, example, like


every_codec = pytest.mark.parametrize("codec", ALL_CODECS, ids=repr)

# Around the blocks (64 .. 1024) and the tile (512).
SIZES = (0, 1, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025)


def assert_same_packed(packed: object, expected: object) -> None:
    leaves, structure = jax.tree.flatten(packed)
    expected_leaves, expected_structure = jax.tree.flatten(expected)
    assert structure == expected_structure
    for leaf, expected_leaf in zip(leaves, expected_leaves, strict=True):
        assert_same_bits(leaf, expected_leaf)


@every_codec
@pytest.mark.parametrize("size", [0, 1, 257, 1024])
def test_decode_restores_shape_and_dtype(
    codec: AbstractCodec, size: int, key: jax.Array
) -> None:
    x = example(codec, (size,), key)
    decoded = codec.decode(codec.encode(x), like(x))
    assert decoded.shape == x.shape
    assert decoded.dtype == x.dtype


@every_codec
@pytest.mark.parametrize("shape", [(), (3, 0, 2), (2, 3, 5, 7)])
def test_arrays_of_any_rank_keep_their_shape(
    codec: AbstractCodec, shape: tuple[int, ...], key: jax.Array
) -> None:
    x = example(codec, shape, key)
    assert codec.decode(codec.encode(x), like(x)).shape == shape


@every_codec
def test_an_array_is_packed_as_its_flattened_row(
    codec: AbstractCodec, key: jax.Array
) -> None:
    x = example(codec, (5, 7, 31), key)
    assert_same_packed(codec.encode(x), codec.encode(x.reshape(-1)))


@every_codec
def test_packed_nbytes_is_what_encode_produces(
    codec: AbstractCodec, key: jax.Array
) -> None:
    dtype = example(codec, (1,), key).dtype
    for size in SIZES:
        x = jax.ShapeDtypeStruct((size,), dtype)
        # The next test shows that tracing tells the shapes.
        packed = jax.tree.leaves(jax.eval_shape(codec.encode, x))
        nbytes = sum(p.size * p.dtype.itemsize for p in packed)
        assert codec.packed_nbytes(x) == nbytes, size


@every_codec
def test_encode_gives_the_shapes_it_is_traced_with(
    codec: AbstractCodec, key: jax.Array
) -> None:
    x = example(codec, (3, 400), key)
    traced = jax.eval_shape(codec.encode, x)
    packed = codec.encode(x)
    assert jax.tree.map(like, packed) == jax.tree.map(like, traced)


@every_codec
def test_encoding_twice_gives_the_same_bytes(
    codec: AbstractCodec, key: jax.Array
) -> None:
    x = example(codec, (700,), key)
    assert_same_packed(codec.encode(x, seed=5), codec.encode(x, seed=5))


@every_codec
def test_jit_agrees_with_eager(codec: AbstractCodec, key: jax.Array) -> None:
    x = example(codec, (3, 300), key)
    packed = codec.encode(x)
    assert_same_packed(jax.jit(codec.encode)(x), packed)
    decode = jax.jit(lambda p: codec.decode(p, like(x)))
    assert_same_bits(decode(packed), codec.decode(packed, like(x)))


@every_codec
@pytest.mark.parametrize("axis", [0, 1])
def test_vmap_agrees_with_a_loop(
    codec: AbstractCodec, axis: int, key: jax.Array
) -> None:
    x = example(codec, (4, 4, 300), key)
    rows = [jnp.take(x, i, axis=axis) for i in range(4)]
    packed = jax.vmap(codec.encode, in_axes=axis)(x)
    expected = [codec.encode(row) for row in rows]
    assert_same_packed(packed, jax.tree.map(lambda *p: jnp.stack(p), *expected))
    decode = jax.vmap(lambda p: codec.decode(p, like(rows[0])), out_axes=axis)
    decoded = [codec.decode(p, like(rows[0])) for p in expected]
    assert_same_bits(decode(packed), jnp.stack(decoded, axis=axis))


@every_codec
def test_nested_vmap_agrees_with_a_loop(codec: AbstractCodec, key: jax.Array) -> None:
    x = example(codec, (2, 3, 600), key)
    packed = jax.vmap(jax.vmap(codec.encode))(x)
    expected = [[codec.encode(row) for row in rows] for rows in x]
    stacked = [jax.tree.map(lambda *p: jnp.stack(p), *rows) for rows in expected]
    assert_same_packed(packed, jax.tree.map(lambda *p: jnp.stack(p), *stacked))


@every_codec
def test_scan_agrees_with_a_loop(codec: AbstractCodec, key: jax.Array) -> None:
    x = example(codec, (4, 300), key)
    _, packed = jax.lax.scan(lambda carry, row: (carry, codec.encode(row)), None, x)
    expected = [codec.encode(row) for row in x]
    assert_same_packed(packed, jax.tree.map(lambda *p: jnp.stack(p), *expected))
    row = like(x[0])
    _, decoded = jax.lax.scan(lambda _, p: (None, codec.decode(p, row)), None, packed)
    assert_same_bits(decoded, jnp.stack([codec.decode(p, row) for p in expected]))


@every_codec
def test_dependencies_change_nothing(codec: AbstractCodec, key: jax.Array) -> None:
    x = example(codec, (700,), key)
    packed = codec.encode(x)
    after = (jnp.ones((2, 3)), jnp.zeros((), bool), key)
    decoded = codec.decode(packed, like(x), after=after)
    assert_same_bits(decoded, codec.decode(packed, like(x)))


@every_codec
def test_dependencies_are_operands_of_the_compiled_call(
    codec: AbstractCodec, key: jax.Array
) -> None:
    x = example(codec, (700,), key)
    packed = codec.encode(x)

    def decode(p: object, dependency: jax.Array) -> jax.Array:
        return codec.decode(p, like(x), after=(dependency,))

    compiled = jax.jit(decode).lower(packed, jnp.ones((37, 41))).compile()
    (call,) = [
        line
        for line in compiled.as_text().splitlines()
        if 'custom_call_target="dafjax_unpack' in line
    ]
    assert "f32[37,41]" in call


@every_codec
def test_a_batched_dependency_does_not_batch_the_result(
    codec: AbstractCodec, key: jax.Array
) -> None:
    x = example(codec, (700,), key)
    packed = codec.encode(x)

    def decode(dependency: jax.Array) -> jax.Array:
        return codec.decode(packed, like(x), after=(dependency,))

    decoded = jax.vmap(decode, out_axes=None)(jnp.ones((3, 2)))
    assert_same_bits(decoded, codec.decode(packed, like(x)))


@every_codec
def test_equal_codecs_are_one_dictionary_key(codec: AbstractCodec) -> None:
    twin = eval(repr(codec), {"Affine": Affine, "Bitmask": Bitmask})
    assert twin == codec
    assert hash(twin) == hash(codec)
    assert repr(twin) == repr(codec)


def test_different_codecs_are_different_dictionary_keys() -> None:
    assert len(set(ALL_CODECS)) == len(ALL_CODECS)


@every_codec
def test_a_codec_is_immutable(codec: AbstractCodec) -> None:
    with pytest.raises(AttributeError, match="cannot assign to field"):
        codec.bits = 4


@every_codec
@pytest.mark.parametrize("dtype", ["int8", "complex64"])
def test_an_unsupported_dtype_is_refused_with_a_remedy(
    codec: AbstractCodec, dtype: str
) -> None:
    x = jnp.zeros((4,), dtype)
    with pytest.raises(TypeError, match=rf"packs.*`{dtype}`.*`Save\(\)`"):
        codec.encode(x)
    with pytest.raises(TypeError, match=rf"packs.*`{dtype}`"):
        codec.packed_nbytes(like(x))
    with pytest.raises(TypeError, match=rf"packs.*`{dtype}`"):
        codec.check(like(x))


@every_codec
def test_a_prng_key_is_refused(codec: AbstractCodec, key: jax.Array) -> None:
    with pytest.raises(TypeError, match=r"packs.*`key<fry>`"):
        codec.check(like(key))


def test_float64_is_refused_with_a_remedy() -> None:
    with pytest.raises(TypeError, match=r"`float64`.*`Save\(\)`, or cast it to float"):
        Affine().check(jax.ShapeDtypeStruct((3,), np.dtype("float64")))


@every_codec
def test_packed_of_another_size_is_refused(
    codec: AbstractCodec, key: jax.Array
) -> None:
    x = example(codec, (700,), key)
    other = jax.ShapeDtypeStruct((1400,), x.dtype)
    with pytest.raises(ValueError, match="for size=1400"):
        codec.decode(codec.encode(x), other)


def test_packed_affine_is_a_pytree_of_its_arrays(key: jax.Array) -> None:
    packed = Affine().encode(jax.random.normal(key, (300,)))
    assert isinstance(packed, PackedAffine)
    leaves, structure = jax.tree.flatten(packed)
    assert [leaf.dtype.name for leaf in leaves] == ["uint16", "bfloat16", "bfloat16"]
    assert isinstance(jax.tree.unflatten(structure, leaves), PackedAffine)


@pytest.mark.parametrize("module", [_affine, _bitmask], ids=lambda m: m.__name__)
def test_documented_examples_run(module: object) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


def test_rows_of_many_small_examples_are_found_at_once():
    assert rows_of((4_000_000, 4)) == (32000, 500)
    assert rows_of((4_000_037, 4)) == (16_000_148,)  # a prime number of examples
    assert rows_of((64, 32, 32, 64)) == (64, 65536)
    assert rows_of((7,)) == (7,)
    assert rows_of(()) == (1,)
    assert rows_of((0, 5)) == (0,)
