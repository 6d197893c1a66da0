"""What is learned: losses, predictions and metrics of every kind of task."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rich.console

from models import loop, pretraining, run_directory, setup, step
from models.checkpoints import Checkpoints
from models.config import TrainConfig
from models.data.text import docstrings, prompts
from models.data.text.corpus import documents
from models.data.text.splits import SentenceSplit, WindowSplit
from models.data.text.table_to_text import Description
from models.gpt2 import GPT2Config
from models.roberta import RobertaConfig
from models.tasks import choose
from models.tasks.language import LanguageModelling
from models.tasks.masked import MaskedLanguageModelling
from models.tasks.sentences import SentenceTask
from models.tasks.task import ACCURACY, LOSS, Metric
from models.wrapping import no_wrapping
from tests.helpers import slow


pytestmark = pytest.mark.usefixtures("standard_promotion")


PACKAGES = ("optax", "rich")
TINY = {"num_layers": 1, "width": 16, "num_heads": 2}


@pytest.fixture(scope="module")
def tokenizer():
    return docstrings.train_tokenizer(["a tale of two cities"], 300, "gpt2")


def make_language(tokenizer, split, **options):
    return LanguageModelling(
        name="tale",
        config=GPT2Config(**TINY, vocabulary=300, context=32),
        train=split,
        test=split,
        metric=LOSS,
        tokenizer=tokenizer,
        end=0,
        prompts=((5, 6, 7),),
        **options,
    )


def windows(rng, *, count=5, length=12):
    tokens = rng.integers(0, 300, (count, length + 1)).astype(np.int32)
    return WindowSplit(tokens, rng.integers(0, 2, (count, length)).astype(np.float32))


def start(task):
    model = task.make_model(no_wrapping)
    return model, jax.jit(functools.partial(task.init, model))(jax.random.key(0))


@pytest.mark.slow
def test_the_loss_of_text_is_that_of_all_tokens_that_count(tokenizer):
    split = windows(np.random.default_rng(0))
    task = make_language(tokenizer, split)
    model, variables = start(task)
    batch = split.take(np.arange(5))
    tokens, weights = batch
    logits = model.apply(variables, tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    expected = np.sum(losses * weights) / np.sum(weights)
    loss, _ = task.loss(model, variables, jax.random.key(1), batch)
    predictions = jax.tree.map(np.asarray, task.predict(model, variables, batch))
    metrics = task.measure(predictions)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["perplexity"], np.exp(expected), rtol=1e-4)


def test_continuations_are_shown_with_their_prompts(tokenizer):
    task = make_language(tokenizer, windows(np.random.default_rng(0)), num_tokens=4)
    metrics, text = task.samples(*start(task), 0)
    assert metrics == {}
    first, greedy, drawn = text.splitlines()
    assert first == tokenizer.decode([5, 6, 7])
    assert greedy.startswith("  [greedy]")
    assert drawn.startswith("  [top-p 0.9]")


def test_answers_to_facts_are_measured_with_bleu(tokenizer):
    task = make_language(
        tokenizer,
        windows(np.random.default_rng(0)),
        references=(Description("name : x", ("no such text",)),),
    )
    metrics, _ = task.samples(*start(task), 0)
    assert 0 <= metrics["test_bleu"] < 5


def test_a_prompt_counts_nothing_and_its_answer_all(tokenizer):
    descriptions = [Description("tale", ("of two", "cities")), Description("a", ("b",))]
    split = prompts.encode_descriptions(tokenizer, descriptions, 24)
    tokens, weights = split.take(np.arange(3))
    assert (tokens.shape, weights.shape) == ((3, 25), (3, 24))
    counted = [t[1:][w > 0].tolist() for t, w in zip(tokens, weights, strict=True)]
    ends = [tokenizer.token_to_id(prompts.END)] * 3
    assert [row[-1] for row in counted] == ends
    assert [tokenizer.decode(row[:-1]) for row in counted] == [
        " of two",
        " cities",
        " b",
    ]
    asked = [t[: int(np.argmax(w)) + 1] for t, w in zip(tokens, weights, strict=True)]
    assert tokenizer.decode(asked[0].tolist()) == "tale ||"
    with pytest.raises(ValueError, match=r"`length` must be above .*, but got 2"):
        prompts.encode_descriptions(tokenizer, descriptions, 2)


def make_masked(**options):
    split = WindowSplit(np.zeros((1, 1), np.int32), np.zeros((1, 0), np.float32))
    return MaskedLanguageModelling(
        name="masked",
        config=RobertaConfig(**TINY, vocabulary=300, context=256, **options),
        train=split,
        test=split,
        metric=LOSS,
        hidden=4,
    )


def test_of_the_tokens_15_percent_count_and_most_of_them_are_hidden():
    task = make_masked()
    rng = np.random.default_rng(0)
    tokens = rng.integers(5, 300, (400, 100)).astype(np.int32)
    tokens[:, 90:] = task.config.padding
    seen, weights = task._mask(jax.random.key(0), jnp.asarray(tokens))
    seen, counts = np.asarray(seen), np.asarray(weights) > 0
    assert not counts[:, 90:].any()
    assert abs(counts[:, :90].mean() - 0.15) < 0.01
    assert (seen[~counts] == tokens[~counts]).all()
    hidden = (seen[counts] == 4).mean()
    same = (seen[counts] == tokens[counts]).mean()
    assert abs(hidden - 0.8) < 0.02
    assert abs(same - 0.1) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("scan_layers", [False, True])
def test_masked_words_train_all_but_the_head(scan_layers):
    task = make_masked(scan_layers=scan_layers)
    model, variables = start(task)
    state, frozen = step.begin(task, variables, optax.sgd(0.1))
    assert set(frozen["params"]) == {"head"}
    batch = (np.full((2, 16), 7, np.int32), np.ones((2, 15), np.float32))
    loss = step.make_loss(task, model)
    gradients, _ = jax.grad(loss, has_aux=True)(
        state.trained, frozen, jax.random.key(0), *batch
    )
    norms = [float(jnp.linalg.norm(g)) for g in jax.tree.leaves(gradients)]
    # Keys have biases that change nothing.
    assert sum(norm > 1e-6 for norm in norms) >= len(norms) - 2


def make_sentences(num_labels, labels, scores, metric):
    rng = np.random.default_rng(0)
    count = len(labels)
    tokens = rng.integers(5, 100, (count, 6)).astype(np.int32)
    split = SentenceSplit(tokens, np.ones((count, 6), bool), labels)
    return SentenceTask(
        name="few",
        config=RobertaConfig(
            **TINY, vocabulary=100, context=8, num_labels=num_labels, dropout=0.5
        ),
        train=split,
        test=split,
        metric=metric,
        scores=scores,
    )


def test_classes_and_scores_have_their_losses():
    for num_labels, labels, oracle in (
        (
            3,
            np.array([0, 2, 1], np.int32),
            lambda logits, labels: optax.softmax_cross_entropy_with_integer_labels(
                logits, labels
            ),
        ),
        (
            1,
            np.array([0.5, 2, 5], np.float32),
            lambda logits, labels: (logits[:, 0] - labels) ** 2,
        ),
    ):
        task = make_sentences(num_labels, labels, {}, ACCURACY)
        model, variables = start(task)
        batch = task.train.take(np.arange(3))
        apply = jax.jit(functools.partial(model.apply, train=False))
        logits = apply(variables, *batch[:2])
        predict = jax.jit(functools.partial(task.predict, model))
        predictions = predict(variables, batch)
        np.testing.assert_allclose(predictions["loss"], oracle(logits, labels), 1e-5)
        # In training there is dropout, which the key determines.
        loss = jax.jit(functools.partial(task.loss, model))
        losses = [
            float(loss(variables, jax.random.key(n), batch)[0]) for n in (1, 1, 2)
        ]
        assert losses[0] == losses[1] != losses[2]


def test_scores_see_labels_and_predictions():
    def difference(labels, predictions):
        return float(np.sum(labels) - 10 * np.sum(predictions))

    labels = np.array([1.0, 2.0], np.float32)
    task = make_sentences(1, labels, {"difference": difference}, Metric("difference"))
    metrics = task.measure(
        {
            "loss": np.array([1.0, 2.0], np.float32),
            "label": labels,
            "prediction": np.array([0.1, 0.2], np.float32),
        }
    )
    assert metrics == pytest.approx({"loss": 1.5, "difference": 0.0}, abs=1e-6)


def test_a_metric_knows_what_is_better():
    assert ACCURACY.improves(0.2, None)
    assert ACCURACY.improves(0.2, 0.1)
    assert not ACCURACY.improves(0.1, 0.1)
    assert LOSS.improves(0.1, 0.2)
    assert (ACCURACY.show(0.123456), LOSS.show(0.5)) == ("12.35%", "0.5000")


def test_sources_have_no_docstrings():
    found = documents("optax", "sources", most_characters=50_000)
    text = "\n".join(document.text for document in found)
    assert len(text) > 50_000
    assert "def " in text
    assert '"""' not in text
    for document in found:
        compile(document.text, document.path, "exec")


@pytest.fixture
def few(monkeypatch):
    """Makes models tiny and texts short; trains in this process."""
    monkeypatch.setattr(choose, "_SMALL", TINY)
    for name in ("load_sentences", "load_running_text"):
        load = functools.partial(
            getattr(docstrings, name), packages=PACKAGES, vocabulary=300
        )
        if name == "load_sentences":
            load = functools.partial(load, most_of_each=30)
        monkeypatch.setattr(docstrings, name, load)
    monkeypatch.setattr(docstrings, "_MOST_CHARACTERS", 12_000)
    monkeypatch.setattr(pretraining, "train_in_fresh_process", train)
    documents.cache_clear()
    yield
    documents.cache_clear()


def train(config):
    resume = (config.out / "config.json").exists()
    setup_ = setup.set_up(TrainConfig(**{**vars(config), "resume": resume}))
    return loop.train(setup_, rich.console.Console(quiet=True))


def lora(out, model, **options):
    console = rich.console.Console(quiet=True)
    config = TrainConfig(
        model, lora=2, batch=8, length=16, out=out, pretraining_epochs=1, **options
    )
    return pretraining.with_weights(config.filled(), console)


@pytest.mark.parametrize("model", [slow("roberta-base"), slow("gpt2-medium")])
def test_adapters_are_trained_on_weights_that_were_trained_first(
    few, tmp_path, model, monkeypatch
):
    config = lora(tmp_path, model, epochs=1, method="compress", schedule="constant")
    first = run_directory.RunDirectory(tmp_path / "pretrained").read_result()
    other = {"roberta-base": "masked-docstrings", "gpt2-medium": "sources"}[model]
    assert first["identity"]["data"] == other
    assert first["identity"]["lora"] == 0
    # Weights are there now: the next run goes on from them.
    asked: list[TrainConfig] = []
    monkeypatch.setattr(pretraining, "train_in_fresh_process", asked.append)
    assert lora(tmp_path, model, epochs=1, method="compress").weights == config.weights
    assert [(run.resume, run.data) for run in asked] == [(True, other)]
    result = train(config)
    assert result["num_trained"] < 0.5 * result["num_params"]
    assert result["residual_nbytes"] > 0
    names = {path.name for path in (tmp_path / "weights").iterdir()}
    assert {"adapter_model.safetensors", "tokenizer.json"} <= names
    assert (tmp_path / "samples.txt").exists() == (model == "gpt2-medium")

    # One epoch more is what two at once are, though only adapters were saved.
    config = lora(tmp_path, model, epochs=2, method="compress", schedule="constant")
    resumed = train(config)
    at_once = train(
        TrainConfig(**{**vars(config), "out": tmp_path / "at_once", "resume": False})
    )
    assert resumed["test_loss"] == at_once["test_loss"]
    assert resumed["test_loss"] != result["test_loss"]


def test_frozen_weights_are_those_that_were_loaded(few, tmp_path):
    config = lora(tmp_path, "roberta-base", epochs=1)
    run = setup.set_up(config)
    state, frozen = setup.initial_state(run)
    assert set(state.trained) == {"lora", "params"}
    assert set(state.trained["params"]) == {"head"}
    drawn = start(run.task)[1]["params"]["tokens"]
    loaded = frozen["params"]["tokens"]
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(loaded["embedding"], drawn["embedding"])


def test_other_weights_are_another_run(few, tmp_path):
    config = lora(tmp_path, "roberta-base", epochs=1)
    identity = config.identity()
    file = config.weights / "model.safetensors"
    file.write_bytes(file.read_bytes() + b" ")
    changed = config.identity()
    assert {k for k in identity if identity[k] != changed[k]} == {"weights_digest"}


GLUE = {
    "sst2": ("SST-2", "sentence\tlabel\n" + "bad film\t0\ngood film\t1\n" * 4),
    "stsb": (
        "STS-B",
        "sentence1\tsentence2\tscore\n" + "A jet.\tA plane.\t4.5\nA.\tB.\t0.5\n" * 4,
    ),
}
FACTS = "mr,ref\n" + '"name[A Pub], food[Fish]",A Pub serves fish.\nname[B],B is.\n' * 4


def write_files(folder, name):
    if name == "e2e":
        files = {
            f"e2e/{x}.csv": FACTS for x in ("trainset", "devset", "testset_w_refs")
        }
    else:
        of_task, rows = GLUE[name]
        files = {f"{of_task}/{x}.tsv": rows for x in ("train", "dev")}
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


@pytest.mark.parametrize(
    ("name", "model", "metrics"),
    [
        slow("sst2", "roberta-base", {"test_accuracy"}),
        slow("stsb", "roberta-base", {"test_pearson", "test_spearman"}),
        ("e2e", "gpt2-small", {"test_perplexity", "test_bleu"}),
    ],
)
def test_files_in_real_formats_are_learned_from(few, tmp_path, name, model, metrics):
    write_files(tmp_path, name)
    options = {"batch": 4, "length": 40, "epochs": 1, "method": "compress"}
    config = TrainConfig(
        model, data=name, data_dir=tmp_path, out=tmp_path / "run", **options
    )
    result = train(config)
    found = {key for key in result if key.startswith("test_")}
    assert found == metrics | {"test_loss"}
    assert np.isfinite(result["test_loss"])


@pytest.mark.slow
def test_weights_of_a_run_are_what_another_starts_from(few, tmp_path):
    write_files(tmp_path, "sst2")
    options = {"data": "sst2", "data_dir": tmp_path, "batch": 4, "length": 16}
    first = TrainConfig("roberta-base", epochs=1, out=tmp_path / "first", **options)
    train(first)
    second = TrainConfig(
        "roberta-base",
        size="small",
        weights=tmp_path / "first" / "weights",
        out=tmp_path / "second",
        **options,
    )
    state, _ = setup.initial_state(setup.set_up(second))
    before, _ = setup.initial_state(setup.set_up(first))
    with Checkpoints(first.out) as checkpoints:
        trained = checkpoints.restore(1, before).trained["params"]
    for name in ("block1", "head"):
        same = jax.tree.map(
            lambda a, b: bool(jnp.array_equal(a, b)),
            state.trained["params"][name],
            trained[name],
        )
        # The head begins anew.
        assert all(jax.tree.leaves(same)) == (name == "block1")
    # A small model's weights are none of the full size's.
    full = TrainConfig(**{**vars(second), "size": "full"})
    with pytest.raises(ValueError, match="is not of this model"):
        setup.initial_state(setup.set_up(full))
