"""Files of weights: missing, incomplete, of another model, damaged or hostile."""

import dataclasses
import functools
import json
import pathlib
import pickle
import struct

import flax.traverse_util
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from models import gpt2, lora, resnet, roberta, weights
from models.weights import WeightsError
from tests.models.cases import CASES, abstract_variables


GOLDEN = pathlib.Path(__file__).parent / "golden"


def tensors_of(name):
    return safetensors.numpy.load_file(GOLDEN / f"{name}.safetensors")


def load(tmp_path, name, tensors, *, config=None, fresh_head=False):
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    config = config or CASES[name].config
    return weights.load(
        tmp_path, config, abstract_variables(config), fresh_head=fresh_head
    )


def assert_same(x, y):
    jax.tree.map(np.testing.assert_array_equal, x, y)


def test_a_missing_file_is_an_error_that_says_what_to_put_where(tmp_path):
    config = CASES["roberta"].config
    with pytest.raises(
        WeightsError, match=r"Put `model.safetensors` of FacebookAI/rob"
    ):
        weights.load(tmp_path, config, abstract_variables(config))
    # A folder may be named like a file.
    for folder in ("x", "x-v1.0"):
        path = tmp_path / folder
        with pytest.raises(WeightsError, match=f"no file `{path}/model.safetensors`"):
            weights.load(path, config, abstract_variables(config))


def test_a_pickle_is_refused_whatever_its_name(tmp_path):
    config = CASES["gpt2"].config
    like = abstract_variables(config)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(WeightsError, match=r"The pickle that is there .* is refused"):
        weights.load(tmp_path, config, like)
    with pytest.raises(WeightsError, match="is a pickle, which runs code"):
        weights.load(tmp_path / "pytorch_model.bin", config, like)
    for content in (pickle.dumps({"a": 1}), b"PK\x03\x04" + bytes(100)):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(WeightsError, match="is a pickle, which runs code"):
            weights.load(tmp_path, config, like)


def test_a_model_in_several_files_is_not_read(tmp_path):
    config = CASES["gpt2"].config
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(WeightsError, match="Files in several parts are not read"):
        weights.load(tmp_path, config, abstract_variables(config))


@pytest.mark.parametrize("name", ["roberta", "gpt2", "resnet_basic"])
def test_a_missing_tensor_is_an_error_that_names_it(tmp_path, name):
    for missing in list(tensors_of(name))[::7]:
        if "num_batches_tracked" in missing:
            continue
        tensors = tensors_of(name)
        del tensors[missing]
        with pytest.raises(WeightsError, match=f"lacks 1 of its tensors: {missing}"):
            load(tmp_path, name, tensors)


def test_an_extra_tensor_is_an_error_that_names_it(tmp_path):
    tensors = tensors_of("gpt2") | {"transformer.h.2.ln_1.weight": np.ones(16, "f")}
    with pytest.raises(
        WeightsError, match=r"no place for: transformer.h.2.ln_1.weight"
    ):
        load(tmp_path, "gpt2", tensors)


def test_a_name_with_and_without_prefix_is_an_error(tmp_path):
    tensors = tensors_of("gpt2")
    tensors["ln_f.bias"] = tensors["transformer.ln_f.bias"].copy()
    with pytest.raises(WeightsError, match=r"no place for: .*ln_f.bias"):
        load(tmp_path, "gpt2", tensors)


def test_many_problems_are_counted(tmp_path):
    tensors = {k: x for k, x in tensors_of("gpt2").items() if "h.1" not in k}
    with pytest.raises(WeightsError, match=r"lacks 12 of its tensors: .* and 7 more"):
        load(tmp_path, "gpt2", tensors)


def test_a_wrong_shape_is_an_error_before_anything_is_read(tmp_path, monkeypatch):
    tensors = tensors_of("roberta")
    name = "roberta.encoder.layer.1.intermediate.dense.weight"
    tensors[name] = np.ascontiguousarray(tensors[name].T)
    monkeypatch.setattr(weights.loading, "_read", None)
    message = rf"{name} must have the shape \[64, 16\], but has \[16, 64\]"
    with pytest.raises(WeightsError, match=message):
        load(tmp_path, "roberta", tensors)


@pytest.mark.parametrize("dtype", ["int32", "float64", "uint8"])
def test_a_wrong_dtype_is_an_error(tmp_path, dtype):
    tensors = tensors_of("gpt2")
    tensors["transformer.wpe.weight"] = tensors["transformer.wpe.weight"].astype(dtype)
    with pytest.raises(WeightsError, match=r"wpe.weight must be one of F16, BF16, F32"):
        load(tmp_path, "gpt2", tensors)


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
@pytest.mark.parametrize("scan_layers", [False, True])
def test_halves_become_float32(tmp_path, dtype, scan_layers):
    config = dataclasses.replace(CASES["gpt2"].config, scan_layers=scan_layers)
    halves = {k: x.astype(dtype) for k, x in tensors_of("gpt2").items()}
    back = {k: x.astype("float32") for k, x in halves.items()}
    got = load(tmp_path, "gpt2", halves, config=config)
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype("float32")}
    assert_same(got, load(tmp_path, "gpt2", back, config=config))


def header(entries, size):
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + bytes(size)


def entry(shape, start, stop, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


HOSTILE = {
    "nothing": b"",
    "no header": bytes(4),
    "a header longer than the file": struct.pack("<Q", 1000) + b"{}",
    "a header of many exabytes": struct.pack("<Q", 2**63) + b"{}" + bytes(100),
    "no JSON": struct.pack("<Q", 5) + b"{bad}",
    "no UTF-8": struct.pack("<Q", 5) + b"\xff\xfe\xfd{}",
    "deep JSON": struct.pack("<Q", 2**16) + b"[" * 2**16,
    "overlapping tensors": header({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, 12),
    "a gap": header({"a": entry([2], 0, 8), "b": entry([2], 12, 20)}, 20),
    "offsets beyond the end": header({"a": entry([2], 0, 8)}, 4),
    "offsets that go backwards": header({"a": entry([2], 8, 0)}, 8),
    "negative offsets": header({"a": entry([2], -8, 0)}, 8),
    "a negative shape": header({"a": entry([-2], 0, 8)}, 8),
    "a shape whose size overflows": header({"a": entry([2**40, 2**40], 0, 8)}, 8),
    "a shape of another size": header({"a": entry([3], 0, 8)}, 8),
    "an unknown dtype": header({"a": entry([2], 0, 8, "F33")}, 8),
    "more bytes than tensors": header({"a": entry([2], 0, 8)}, 9),
    "an entry that is no tensor": header({"a": 3}, 0),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_an_error_that_names_it(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    config = CASES["gpt2"].config
    with pytest.raises(
        WeightsError, match=r"model.safetensors` is not a whole safeten"
    ):
        weights.load(path, config, abstract_variables(config))


def test_a_file_that_is_cut_anywhere_is_an_error(tmp_path):
    content = (GOLDEN / "gpt2.safetensors").read_bytes()
    path = tmp_path / "model.safetensors"
    config = CASES["gpt2"].config
    for size in [*range(0, len(content), 997), len(content) - 1]:
        path.write_bytes(content[:size])
        with pytest.raises(WeightsError, match=r"not a whole safetensors file.*bytes"):
            weights.load(path, config, abstract_variables(config))


def test_a_file_without_the_prefix_is_the_same(tmp_path):
    want = load(tmp_path, "gpt2", tensors_of("gpt2"))
    bare = {k.removeprefix("transformer."): x for k, x in tensors_of("gpt2").items()}
    # The causal masks that OpenAI's files have.
    bare["h.0.attn.bias"] = np.ones((1, 1, 14, 14), np.uint8)
    assert_same(load(tmp_path, "gpt2", bare), want)


def test_tied_embeddings_may_be_in_the_file_and_must_be_equal(tmp_path):
    tensors = tensors_of("gpt2")
    want = load(tmp_path, "gpt2", tensors)
    tied = tensors["transformer.wte.weight"].copy()
    assert_same(load(tmp_path, "gpt2", tensors | {"lm_head.weight": tied}), want)
    alone = {k: x for k, x in tensors.items() if "wte" not in k}
    assert_same(load(tmp_path, "gpt2", alone | {"lm_head.weight": tied}), want)
    tied[3, 4] += 1
    with pytest.raises(
        WeightsError, match=r"lm_head.weight must equal transformer.wte"
    ):
        load(tmp_path, "gpt2", tensors | {"lm_head.weight": tied})


def test_a_head_of_another_task_is_left_and_a_fresh_one_kept(tmp_path, key):
    config = dataclasses.replace(CASES["roberta"].config, num_labels=7)
    tensors = {k: x for k, x in tensors_of("roberta").items() if "classifier" not in k}
    tensors |= {
        "lm_head.bias": np.zeros(30, "f"),
        "roberta.pooler.dense.bias": np.zeros(16, "f"),
        "roberta.embeddings.position_ids": np.arange(16)[None],
    }
    with pytest.raises(WeightsError, match=r"lacks 4 .*`fresh_head=True` leaves"):
        load(tmp_path, "roberta", tensors, config=config)
    model = roberta.Roberta(config)
    init = functools.partial(model.init, train=False)
    initial = jax.jit(init)(key, jnp.zeros((1, 8), int))
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    got = weights.load(tmp_path, config, initial, fresh_head=True)
    assert_same(got["params"]["head"], initial["params"]["head"])
    assert jax.tree.structure(got) == jax.tree.structure(dict(initial))
    name = "roberta.embeddings.word_embeddings.weight"
    np.testing.assert_array_equal(got["params"]["tokens"]["embedding"], tensors[name])


def test_a_fresh_head_of_a_resnet(tmp_path):
    config = dataclasses.replace(CASES["resnet_basic"].config, num_classes=9)
    got = load(
        tmp_path,
        "resnet_basic",
        tensors_of("resnet_basic"),
        config=config,
        fresh_head=True,
    )
    assert isinstance(got["params"]["head"]["kernel"], jax.ShapeDtypeStruct)
    assert isinstance(got["batch_stats"]["stem_norm"]["mean"], jax.Array)


def with_adapters(name, key, *, scan_layers=False, rank=2):
    config = dataclasses.replace(
        CASES[name].config, lora_rank=rank, scan_layers=scan_layers
    )
    like = abstract_variables(config)
    flat = flax.traverse_util.flatten_dict(like)
    drawn = {path: jax.random.normal(key, x.shape) for path, x in flat.items()}
    return config, flax.traverse_util.unflatten_dict(drawn)


@pytest.mark.parametrize("name", ["roberta", "gpt2"])
def test_adapters_are_saved_alone_and_fit_both_layouts(name, key, tmp_path):
    config, variables = with_adapters(name, key)
    trained, frozen = lora.split(variables, config.trained)
    path = weights.save_adapters(tmp_path, config, trained)
    # The head of two layers is that of the classifier.
    assert len(safetensors.numpy.load_file(path)) == {"roberta": 12, "gpt2": 8}[name]
    zeros = jax.tree.map(jnp.zeros_like, trained)
    got = weights.load_adapters(tmp_path, config, lora.merge(zeros, frozen))
    assert_same(got, variables)
    stacked = dataclasses.replace(config, scan_layers=True)
    got = weights.load_adapters(tmp_path, stacked, abstract_variables(stacked))
    for number, block in enumerate(("block1", "block2")):
        assert_same(
            jax.tree.map(lambda x, n=number: x[n], got["lora"]["blocks"]),
            variables["lora"][block],
        )


def test_adapters_are_named_and_laid_out_as_by_peft(key, tmp_path):
    config, variables = with_adapters("gpt2", key)
    path = weights.save_adapters(tmp_path, config, variables)
    tensors = safetensors.numpy.load_file(path)
    name = "base_model.model.transformer.h.1.attn.c_attn.lora_{}.weight"
    pair = variables["lora"]["block2"]["attention_in_lora"]
    np.testing.assert_array_equal(tensors[name.format("A")], pair["a"].T)
    np.testing.assert_array_equal(tensors[name.format("B")], pair["b"].T)
    config, variables = with_adapters("roberta", key)
    path = weights.save_adapters(tmp_path, config, variables)
    tensors = safetensors.numpy.load_file(path)
    name = "base_model.model.roberta.encoder.layer.0.attention.self.value.lora_A.weight"
    pair = variables["lora"]["block1"]["value_lora"]
    np.testing.assert_array_equal(tensors[name], pair["a"].T)
    head = variables["params"]["head"]["hidden"]["kernel"]
    name = "base_model.model.classifier.dense.weight"
    np.testing.assert_array_equal(tensors[name], head.T)


def test_adapters_of_another_rank_or_scale_are_an_error(key, tmp_path):
    config, variables = with_adapters("gpt2", key)
    weights.save_adapters(tmp_path, config, variables)
    other = dataclasses.replace(config, lora_alpha=1.0)
    with pytest.raises(WeightsError, match=r"rank 2 with alpha 32.0, but .* alpha 1.0"):
        weights.load_adapters(tmp_path, other, variables)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(
        WeightsError, match="must be JSON with the entries r and lora_a"
    ):
        weights.load_adapters(tmp_path, config, variables)
    (tmp_path / "adapter_config.json").unlink()
    other, like = with_adapters("gpt2", key, rank=3)
    with pytest.raises(
        WeightsError, match=r"lora_A.weight must have the shape \[3, 16"
    ):
        weights.load_adapters(tmp_path, other, like)


def test_what_cannot_be_saved_or_loaded_is_an_error(key, tmp_path):
    config, variables = with_adapters("gpt2", key)
    del variables["params"]["block2"]["norm1"]["bias"]
    with pytest.raises(ValueError, match=r"lacks params/block2/norm1/bias"):
        weights.save(tmp_path, config, variables)
    plain = dataclasses.replace(config, lora_rank=0)
    with pytest.raises(ValueError, match="`lora_rank` above 0 to have adapters"):
        weights.save_adapters(tmp_path, plain, variables)
    for other in (plain, CASES["resnet_basic"].config):
        with pytest.raises(ValueError, match="`lora_rank` above 0 to have adapters"):
            weights.load_adapters(tmp_path, other, variables)
    with pytest.raises(TypeError, match=r"`config` must be .* but got `dict`"):
        weights.load(tmp_path, {}, variables)
    stacked = dataclasses.replace(config, scan_layers=True)
    with pytest.raises(ValueError, match=r"must be that of `config.scan_layers`"):
        weights.load(GOLDEN / "gpt2.safetensors", stacked, variables)


def test_saving_replaces_a_file_at_once(key, tmp_path):
    config, variables = with_adapters("gpt2", key)
    weights.save(tmp_path / "new", config, variables)
    weights.save(tmp_path / "new", config, variables)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize(
    "config",
    [
        roberta.roberta_base(),
        roberta.roberta_large(scan_layers=True, lora_rank=8),
        gpt2.gpt2_small(),
        gpt2.gpt2_xl(scan_layers=True),
        resnet.resnet18(stem="imagenet"),
        resnet.resnet34(),
        resnet.resnet50(stem="imagenet"),
    ],
    ids=lambda config: f"{type(config).__name__}",
)
def test_every_variable_of_a_full_size_model_has_its_tensors(config):
    like = flax.traverse_util.flatten_dict(abstract_variables(config), sep="/")
    family = weights.families.family_of(config)
    sizes = {
        tensor.name: np.prod(tensor.shape_in_file(like[tensor.path].shape))
        for tensor in (*family.tensors, *family.adapters)
    }
    assert sum(sizes.values()) == sum(x.size for x in like.values())
