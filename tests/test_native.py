"""The primitives: checks, lowering, batching, derivatives; the library's errors."""

import functools
import importlib.util
import pathlib
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from dafjax._native import (
    Format,
    LibraryError,
    LibraryStatus,
    _codes,
    _cuda,
    _library,
    _reference,
    library_status,
    pack_affine,
    pack_affine_salted,
    pack_bitmask,
    pin,
    row_major,
    tie,
    unpack_affine,
    unpack_bitmask,
)
from tests.helpers import assert_same_bits


PACK = {"format": Format(bits=2, block_size=256)}
UNPACK = {**PACK, "dtype": np.dtype("float32")}


def calls_in(text: str, target: str) -> list[str]:
    return [line for line in text.splitlines() if f'target="{target}"' in line]


def test_packing_checks_dtypes() -> None:
    seed = jnp.uint32(0)
    with pytest.raises(TypeError, match="`x` must be float32 or bfloat16 or float16"):
        pack_affine(jnp.zeros(3, jnp.int32), seed, **PACK)
    with pytest.raises(TypeError, match="`seed` must be uint32, not int32"):
        pack_affine(jnp.zeros(3), jnp.int32(0), **PACK)
    with pytest.raises(TypeError, match="`mask` must be bool, not float32"):
        pack_bitmask(jnp.zeros(3))


def test_packing_checks_shapes() -> None:
    with pytest.raises(ValueError, match="`x` must have rows, but it is a scalar"):
        pack_affine(jnp.float32(0), jnp.uint32(0), **PACK)
    with pytest.raises(ValueError, match="`seed` must be a scalar"):
        pack_affine(jnp.zeros(3), jnp.zeros(1, jnp.uint32), **PACK)
    with pytest.raises(ValueError, match="`mask` must have rows"):
        pack_bitmask(jnp.zeros((), bool))


def test_packing_checks_parameters() -> None:
    x, seed = jnp.zeros(3), jnp.uint32(0)
    with pytest.raises(ValueError, match="`bits` must be one of"):
        pack_affine(x, seed, format=Format(5, 256))
    with pytest.raises(ValueError, match="`block_size` must be one of"):
        pack_affine(x, seed, format=Format(2, 100))


def test_unpacking_checks_dtypes() -> None:
    codes, scale, minimum = pack_affine(jnp.zeros(3), jnp.uint32(0), **PACK)
    with pytest.raises(TypeError, match="`codes` must be uint16"):
        unpack_affine(codes.astype(int), scale, minimum, size=3, **UNPACK)
    with pytest.raises(TypeError, match="`scale` must be bfloat16"):
        unpack_affine(codes, codes, minimum, size=3, **UNPACK)
    dtype = np.dtype("int32")
    with pytest.raises(TypeError, match="`dtype` must be float32 or"):
        unpack_affine(codes, scale, minimum, size=3, **{**UNPACK, "dtype": dtype})
    with pytest.raises(TypeError, match="`words` must be uint16"):
        unpack_bitmask(jnp.zeros(32), size=3)


def test_unpacking_checks_shapes() -> None:
    codes, scale, minimum = pack_affine(jnp.zeros(3), jnp.uint32(0), **PACK)
    with pytest.raises(ValueError, match=r"`codes` must have shape \(128,\)"):
        unpack_affine(codes, scale, minimum, size=513, **UNPACK)
    with pytest.raises(ValueError, match=r"`minimum` must have shape \(1,\)"):
        unpack_affine(codes, scale, scale[None], size=3, **UNPACK)
    with pytest.raises(ValueError, match="must have 64 words"):
        unpack_bitmask(jnp.zeros(32, jnp.uint16), size=513)


@pytest.mark.parametrize(
    ("batch", "size"),
    [((), 0), ((), 700), ((0,), 700), ((2, 3), 0), ((2, 3), 700), ((2, 0, 3), 1)],
)
def test_batches_are_rows_packed_alone(
    batch: tuple[int, ...], size: int, key: jax.Array
) -> None:
    x = jax.random.normal(key, (*batch, size))
    packed = pack_affine(x, jnp.uint32(3), **PACK)
    assert packed[0].shape == (*batch, -(-size // 512) * 64)
    assert packed[1].shape == packed[2].shape == (*batch, -(-size // 256))
    for place in np.ndindex(batch):
        alone = pack_affine(x[place], jnp.uint32(3), **PACK)
        for part, row in zip(packed, alone, strict=True):
            assert_same_bits(part[place], row)
    assert unpack_affine(*packed, size=size, **UNPACK).shape == x.shape


@pytest.mark.parametrize("dithered", [False, True])
def test_a_salt_is_added_to_the_seed(*, dithered: bool, key: jax.Array) -> None:
    x, seed, salt = jax.random.normal(key, (3, 700)), jnp.uint32(2**32 - 2), 7
    format = Format(2, 256, dithered=dithered)
    packed = pack_affine_salted(x, seed, format=format, salt=salt)
    wanted = [*pack_affine(x, jnp.uint32(5), format=format)]
    if dithered:
        wanted.append(jnp.full(3, 5, jnp.uint32))
    reference = _codes._pack_salted(x, seed, format=format, salt=salt)
    pack = functools.partial(pack_affine_salted, format=format, salt=salt)
    batched = jax.vmap(pack, in_axes=(0, None))(x[:, None], seed)
    for got in (packed, reference, [part[:, 0] for part in batched]):
        for part, expected in zip(got, wanted, strict=True):
            assert_same_bits(part, expected)


def test_a_salt_fits_into_a_seed() -> None:
    for salt in (-1, 2**32):
        with pytest.raises(ValueError, match="`salt` must fit"):
            pack_affine_salted(jnp.ones(3), jnp.uint32(0), **PACK, salt=salt)


def test_operands_batched_along_different_axes_are_aligned(key: jax.Array) -> None:
    x = jax.random.normal(key, (3, 700))
    codes, scale, minimum = pack_affine(x, jnp.uint32(0), **PACK)
    expected = unpack_affine(codes, scale, minimum, size=700, **UNPACK)
    unpack = functools.partial(unpack_affine, size=700, **UNPACK)
    decoded = jax.vmap(unpack, in_axes=(0, 1, 0))(codes, scale.T, minimum)
    assert_same_bits(decoded, expected)
    shared = jax.vmap(unpack, in_axes=(None, None, 0))(codes[0], scale[0], minimum)
    assert_same_bits(shared[0], expected[0])


def test_batches_split_over_devices_give_the_same_bytes(key: jax.Array) -> None:
    x = jax.random.normal(key, (4, 700))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("rows",))
    rows = jax.sharding.PartitionSpec("rows")
    pack = functools.partial(pack_affine, **PACK)
    shards = jax.jit(
        jax.shard_map(
            lambda x: pack(x, jnp.uint32(0)), mesh=mesh, in_specs=rows, out_specs=rows
        )
    )
    for part, expected in zip(shards(x), pack(x, jnp.uint32(0)), strict=True):
        assert_same_bits(part, expected)


def test_the_cpu_gets_custom_calls_without_side_effects() -> None:
    x = jax.ShapeDtypeStruct((700,), jnp.float32)

    def roundtrip(x: jax.Array) -> jax.Array:
        packed = pack_affine(x, jnp.uint32(0), **PACK)
        (x,) = tie(unpack_affine(*packed, x, size=700, **UNPACK))
        mask = unpack_bitmask(pack_bitmask(x > 0), x, size=700)
        return jnp.where(mask, x, 0.0)

    lowered = jax.jit(roundtrip).trace(x).lower(lowering_platforms=("cpu",))
    text = lowered.as_text()
    for name in ("pack_affine", "unpack_affine", "pack_bitmask", "unpack_bitmask"):
        assert f"stablehlo.custom_call @dafjax_{name}(" in text
    assert "stablehlo.custom_call @dafjax_tie(" in text
    assert "has_side_effect = true" not in text


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_other_platforms_get_the_reference_without_a_library(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise AssertionError("Only a CPU needs the library.")

    monkeypatch.setattr(_library, "register", fail)
    monkeypatch.setattr(_cuda, "register", lambda: False)
    x = jax.ShapeDtypeStruct((700,), jnp.float32)

    def roundtrip(x: jax.Array) -> jax.Array:
        packed = tie(*pack_affine(x, jnp.uint32(0), **PACK))
        return unpack_affine(*packed, x, size=700, **UNPACK)

    lowered = jax.jit(roundtrip).trace(x).lower(lowering_platforms=(platform,))
    text = lowered.as_text()
    assert "custom_call @dafjax" not in text
    assert "optimization_barrier" in text


def test_an_unused_pack_is_removed() -> None:
    def square(x: jax.Array) -> jax.Array:
        pack_affine(x, jnp.uint32(0), **PACK)
        return x * x

    compiled = jax.jit(square).lower(jnp.ones(700)).compile()
    assert "dafjax_pack" not in compiled.as_text()


@pytest.mark.parametrize("promotion", ["raise", "allow"])
@pytest.mark.parametrize("x64", [True, False])
def test_the_reference_does_not_depend_on_the_users_configuration(
    promotion: str, x64: bool, key: jax.Array
) -> None:
    x = jax.random.normal(key, (2, 700))
    expected = pack_affine(x, jnp.uint32(5), **PACK)
    seed = np.uint32(5)
    with jax.numpy_rank_promotion(promotion), jax.enable_x64(x64):
        packed = jax.jit(functools.partial(_reference.pack_affine, **PACK))(x, seed)
        unpack = functools.partial(_reference.unpack_affine, size=700, **UNPACK)
        decoded = jax.jit(unpack)(*packed)
    for part, wanted in zip(packed, expected, strict=True):
        assert_same_bits(part, wanted)
    assert_same_bits(decoded, unpack_affine(*expected, size=700, **UNPACK))


@pytest.mark.parametrize(
    "dtype",
    ["float32", "bfloat16", "float16", "int32", "uint8", "bool", "complex64", "int4"],
)
def test_a_tie_returns_its_arguments(dtype: str) -> None:
    x = (jnp.arange(6) % 2).reshape(2, 3).astype(dtype)
    scalar = jnp.ones((), dtype)
    tied = jax.jit(tie)(x, scalar)
    for got, wanted in zip(tied, (x, scalar), strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)


def test_a_tie_of_nothing_is_nothing() -> None:
    assert tie() == ()


def test_a_tie_takes_empty_arrays() -> None:
    empty, full = jax.jit(tie)(jnp.zeros((0, 3)), jnp.ones(2))
    assert empty.shape == (0, 3)
    assert_same_bits(full, jnp.ones(2))


def test_prng_keys_pass_around_a_tie(key: jax.Array) -> None:
    x, same_key, y = jax.jit(tie)(jnp.ones(3), key, jnp.zeros(2))
    assert same_key.dtype == key.dtype
    assert_same_bits(jax.random.key_data(same_key), jax.random.key_data(key))
    assert (x.shape, y.shape) == ((3,), (2,))
    assert tie(key) == (key,)


def test_a_tie_takes_over_the_buffers_of_its_operands() -> None:
    def tied_products(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(z + 1.0 for z in tie(x @ x, y @ y))

    operands = (jnp.ones((64, 64)), jnp.ones((96, 96)))
    compiled = jax.jit(tied_products).lower(*operands).compile()
    (call,) = calls_in(compiled.as_text(), "dafjax_tie")
    assert "output_to_operand_aliasing={{0}: (0, {}), {1}: (1, {})}" in call
    assert " copy(" not in compiled.as_text()


@pytest.mark.parametrize("axes", [(0, 2, 1), (2, 1, 0), (1, 2, 0)])
def test_a_tie_keeps_values_in_any_layout(
    axes: tuple[int, ...], key: jax.Array
) -> None:
    def moved(x: jax.Array, *, ties: bool) -> jax.Array:
        y = jnp.einsum("bij,bkj->bik", x, x).transpose(axes)
        y, token = tie(y, x[0, 0, 0]) if ties else (y, x[0, 0, 0])
        z = jnp.exp(y.transpose(axes) / 99) + token
        return jnp.einsum("kbi,kbj->bij", tie(z)[0] if ties else z, z)

    x = jax.random.normal(key, (8, 8, 16))
    run = jax.jit(moved, static_argnames="ties")
    np.testing.assert_allclose(run(x, ties=True), run(x, ties=False), rtol=1e-5)


def test_results_of_a_tie_depend_on_all_operands() -> None:
    # Nothing but the tie needs the sine.
    def first(x: jax.Array) -> jax.Array:
        return tie(x, jnp.sin(x))[0]

    compiled = jax.jit(first).lower(jnp.ones(4096)).compile()
    assert "sine" in compiled.as_text()


def test_what_is_only_waited_for_does_not_come_out_of_a_call(key: jax.Array) -> None:
    """So that XLA computes in its place."""

    def tied(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        same_key, product, y = tie(key, x @ x, y, num_awaited=2)
        return jax.random.key_data(same_key), product + 1.0, y

    x, y = jnp.ones((64, 64)), jnp.arange(3.0)
    compiled = jax.jit(tied).lower(x, y).compile()
    (call,) = calls_in(compiled.as_text(), "dafjax_tie")
    assert "output_to_operand_aliasing={{}: (1, {})}" in call
    _, product, held = compiled(x, y)
    assert_same_bits(product, x @ x + 1.0)
    assert_same_bits(held, y)


def test_results_of_a_tie_depend_on_what_is_only_waited_for() -> None:
    def second(x: jax.Array) -> jax.Array:
        return tie(jnp.sin(x), x, num_awaited=1)[1]

    compiled = jax.jit(second).lower(jnp.ones(4096)).compile()
    assert "sine" in compiled.as_text()


def test_the_derivative_of_a_tie_is_that_of_the_identity(key: jax.Array) -> None:
    x, y = jax.random.normal(key, (2, 5))

    def function(x: jax.Array, y: jax.Array) -> jax.Array:
        x, mask, y = tie(x, x > 0, y)
        return jnp.sum(jnp.where(mask, x**3, y * x))

    def untied(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(x > 0, x**3, y * x))

    assert_same_bits(jax.grad(function)(x, y), jax.grad(untied)(x, y))
    assert_same_bits(jax.hessian(function)(x, y), jax.hessian(untied)(x, y))
    check_grads(function, (x, y), order=1, modes=("fwd", "rev"))


def test_a_tie_is_transposed_to_the_identity() -> None:
    def double(x: jax.Array) -> jax.Array:
        return tie(2.0 * x, jnp.ones(2))[0]

    (transposed,) = jax.linear_transpose(double, jnp.ones(3))(jnp.ones(3))
    assert_same_bits(transposed, jnp.full(3, 2.0))


def test_a_tie_maps_over_a_batch() -> None:
    x, y = jnp.arange(6.0).reshape(2, 3), jnp.arange(4.0)
    a, b, c = jax.vmap(tie, in_axes=(1, None, 0))(x, y, x.T)
    assert_same_bits(a, x.T)
    assert_same_bits(b, jnp.stack([y] * 3))
    assert_same_bits(c, x.T)
    waiting = functools.partial(tie, num_awaited=1)
    a, b = jax.vmap(waiting, in_axes=(1, None))(x, y)
    assert_same_bits(a, x.T)
    assert_same_bits(b, jnp.stack([y] * 3))


def test_only_dependencies_may_have_tangents(key: jax.Array) -> None:
    x = jax.random.normal(key, (700,))
    packed = pack_affine(x, jnp.uint32(0), **PACK)

    def scaled(cotangent: jax.Array) -> jax.Array:
        return cotangent * unpack_affine(*packed, cotangent, size=700, **UNPACK)

    value, tangent = jax.jvp(scaled, (x,), (x,))
    assert_same_bits(tangent, value)


def test_a_tangent_of_packed_values_is_refused() -> None:
    codes, scale, minimum = pack_affine(jnp.ones(3), jnp.uint32(0), **PACK)

    def decode(minimum: jax.Array) -> jax.Array:
        return unpack_affine(codes, scale, minimum, size=3, **UNPACK)

    with pytest.raises(NotImplementedError, match=r"forward-mode.*`bits=None`"):
        jax.jvp(decode, (minimum,), (minimum,))


def test_the_library_is_built_and_fits() -> None:
    status = library_status()
    assert status.error is None
    assert status.path is not None
    assert status.built_ffi_api <= status.jaxlib_ffi_api
    assert status.instruction_sets[-1] == "scalar"
    assert status.instruction_set == status.instruction_sets[0]


def test_a_missing_library_is_an_error_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LibraryError, match=r"is missing.*Rebuild it.*pip install"):
        _library.load()
    status = library_status()
    assert status.path is None
    assert "is missing" in status.error


def test_a_library_that_does_not_load_is_an_error_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(name: str) -> types.ModuleType:
        raise ImportError("undefined symbol: foo")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(
        LibraryError, match=r"does not load: undefined symbol: foo.*Reb"
    ):
        _library.load()
    status = library_status()
    assert status.path is not None
    assert "undefined symbol" in status.error


def test_lowering_for_the_cpu_raises_if_the_library_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    _library.register.cache_clear()
    with pytest.raises(LibraryError, match="is missing"):
        # A shape that no other test has compiled.
        pack_bitmask(jnp.zeros((3, 12_345), bool))


@pytest.mark.parametrize(("built", "runtime"), [((0, 4), (0, 3)), ((1, 0), (0, 9))])
def test_a_library_newer_than_jaxlib_is_refused(
    built: tuple[int, int], runtime: tuple[int, int]
) -> None:
    with pytest.raises(LibraryError, match=r"built against XLA's FFI API .*Rebuild it"):
        _library.check_api_version(built, runtime)


@pytest.mark.parametrize(("built", "runtime"), [((0, 3), (0, 3)), ((0, 3), (1, 0))])
def test_a_library_as_old_as_jaxlib_is_accepted(
    built: tuple[int, int], runtime: tuple[int, int]
) -> None:
    _library.check_api_version(built, runtime)


@pytest.mark.parametrize("text", ["", "#define XLA_FFI_API_MAJOR 0\n"])
def test_a_header_without_a_version_is_an_error(
    text: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    with pytest.raises(LibraryError, match=r"cannot be read.*Reinstall jaxlib"):
        _library.jaxlib_ffi_api()
    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text(text, encoding="utf-8")
    with pytest.raises(LibraryError, match="does not state XLA's FFI API version"):
        _library.jaxlib_ffi_api()


def test_the_status_is_a_value() -> None:
    assert isinstance(library_status(), LibraryStatus)
    assert library_status() == library_status()


Identity = Callable[[jax.Array], jax.Array]
orders = pytest.mark.parametrize("order", [pin, row_major])


@orders
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool", "int4"])
def test_an_array_whose_order_is_asked_for_stays_as_it_is(
    order: Identity, dtype: str
) -> None:
    x = (jnp.arange(6) % 2).reshape(2, 3).astype(dtype)
    mapped = jax.vmap(order, in_axes=1, out_axes=1)
    for got in (order(x), jax.jit(order)(x), mapped(x)):
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got, x)


@orders
def test_a_key_has_no_order(order: Identity, key: jax.Array) -> None:
    assert order(key) is key


@orders
def test_derivatives_of_what_has_an_order_are_those_of_the_identity(
    order: Identity,
) -> None:
    x = jnp.arange(6.0)
    gradient = jax.grad(lambda x: jnp.sum(order(x) ** 2))(x)
    np.testing.assert_array_equal(gradient, 2.0 * x)
    np.testing.assert_array_equal(jax.jvp(order, (x,), (2.0 * x,))[1], 2.0 * x)


@pytest.mark.parametrize(("platform", "calls"), [("cuda", 1), ("cpu", 0), ("tpu", 0)])
def test_an_order_is_asked_for_on_cuda_alone(platform: str, calls: int) -> None:
    x = jax.ShapeDtypeStruct((4, 3), jnp.float32)
    lowered = jax.jit(row_major).trace(x).lower(lowering_platforms=(platform,))
    assert lowered.as_text().count("custom_call @LayoutConstraint(") == calls


@pytest.mark.parametrize(("platform", "calls"), [("cuda", 1), ("cpu", 0), ("tpu", 0)])
def test_to_pin_is_a_call_on_cuda_alone(
    platform: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_cuda, "register", lambda: True)
    x = jax.ShapeDtypeStruct((4, 3), jnp.float32)
    lowered = jax.jit(pin).trace(x).lower(lowering_platforms=(platform,))
    assert lowered.as_text().count("custom_call @dafjax_tie(") == calls
