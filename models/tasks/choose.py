"""From the options of a run to what is learned in it."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import tokenizers

from models import data, gpt2, roberta
from models.config import TrainConfig
from models.data.text import docstrings, glue, prompts, table_to_text
from models.data.text.splits import begin_with
from models.tasks.images import classify_images
from models.tasks.language import LanguageModelling
from models.tasks.masked import MaskedLanguageModelling
from models.tasks.sentences import Score, SentenceTask
from models.tasks.task import ACCURACY, LOSS, Metric, Task
from models.tokenizer import Tokenizer


_SIZES = {
    "roberta-base": roberta.roberta_base,
    "roberta-large": roberta.roberta_large,
    "gpt2-small": gpt2.gpt2_small,
    "gpt2-medium": gpt2.gpt2_medium,
    "gpt2-large": gpt2.gpt2_large,
    "gpt2-xl": gpt2.gpt2_xl,
}
_SMALL: Mapping[str, Any] = {"num_layers": 4, "width": 128, "num_heads": 4}
_PROMPT = 16  # tokens of running text that are continued
_NUM_PROMPTS = 3


def choose_task(config: TrainConfig) -> Task:
    """Loads the data and says what is learned from it by which model.

    Args:
        config: The options, filled in.

    Raises:
        ValueError: An option or a file does not fit the others.
        FileNotFoundError: A file is missing; the message says what to put where.
    """
    if config.family == "resnet":
        dataset = data.load(config.data, directory=config.data_dir, seed=config.seed)
        if config.examples is not None:
            dataset = dataset.with_few(config.examples, seed=config.seed)
        dtype = jnp.dtype(config.dtype)
        return classify_images(config.model, dataset, width=config.width, dtype=dtype)
    tokenizer = _tokenizer(config)
    if config.family == "gpt2":
        return _language(config, tokenizer)
    if config.data == "masked-docstrings":
        return _masked(config, tokenizer)
    return _sentences(config, tokenizer)


def _tokenizer(config: TrainConfig) -> tokenizers.Tokenizer | None:
    """Returns that of the weights; `None` if there are no weights."""
    if config.weights is None:
        return None
    return Tokenizer(config.weights, config.family).backend


def _shape(config: TrainConfig, tokenizer: tokenizers.Tokenizer, **more: Any) -> Any:
    """Returns the model's configuration."""
    small = {}
    if config.size == "small":
        small = {**_SMALL, "context": config.length, "vocabulary": _count(tokenizer)}
    shape = _SIZES[config.model](
        **small,
        scan_layers=config.scan_layers,
        lora_rank=config.lora,
        dtype=jnp.dtype(config.dtype),
        **more,
    )
    if _count(tokenizer) > shape.vocabulary:
        raise ValueError(
            f"The tokenizer in `{config.weights}` has {_count(tokenizer)} tokens, but "
            f"{config.model} of size {config.size} has {shape.vocabulary}. The "
            "tokenizer and the weights must be of one model."
        )
    return shape


def _count(tokenizer: tokenizers.Tokenizer) -> int:
    return tokenizer.get_vocab_size()


def _sentences(
    config: TrainConfig, tokenizer: tokenizers.Tokenizer | None
) -> SentenceTask:
    scores: Mapping[str, Score] = {"accuracy": glue.accuracy}
    if config.data == "docstrings":
        found = docstrings.load_sentences(length=config.length, tokenizer=tokenizer)
        name, tokenizer = found.name, found.tokenizer
        train, test, num_labels = found.train, found.test, len(found.classes)
    else:
        task = glue.TASKS[config.data]
        splits = glue.load_glue(config.data, config.data_dir)
        if tokenizer is None:
            tokenizer = docstrings.train_tokenizer(
                [part for text, _ in splits[0] for part in _parts(text)], 4096
            )
        train, test = (
            docstrings.encode_sentences(tokenizer, examples, config.length)
            for examples in splits
        )
        name, num_labels, scores = config.data, task.num_classes, task.metrics
    first = next(iter(scores))
    return SentenceTask(
        name=name,
        config=_shape(config, tokenizer, num_labels=num_labels),
        train=train,
        test=test,
        metric=ACCURACY if first == "accuracy" else Metric(first),
        tokenizer=tokenizer,
        scores=scores,
    )


def _parts(text: str | tuple[str, str]) -> tuple[str, ...]:
    return (text,) if isinstance(text, str) else text


def _masked(
    config: TrainConfig, tokenizer: tokenizers.Tokenizer | None
) -> MaskedLanguageModelling:
    text = docstrings.load_running_text(
        length=config.length - 2, tokenizer=tokenizer, family="roberta"
    )
    # What heads read is the first token, as in sentences.
    first, hidden = map(text.tokenizer.token_to_id, ("<s>", "<mask>"))
    return MaskedLanguageModelling(
        name=text.name,
        config=_shape(config, text.tokenizer),
        train=begin_with(first, text.train),
        test=begin_with(first, text.test),
        metric=LOSS,
        tokenizer=text.tokenizer,
        hidden=hidden,
    )


def _language(
    config: TrainConfig, tokenizer: tokenizers.Tokenizer | None
) -> LanguageModelling:
    references: tuple[table_to_text.Description, ...] = ()
    if config.data in ("e2e", "webnlg"):
        load = {"e2e": table_to_text.load_e2e, "webnlg": table_to_text.load_webnlg}
        splits = load[config.data](config.data_dir)
        if tokenizer is None:
            texts = [text for d in splits["train"] for text in (d.facts, *d.references)]
            tokenizer = docstrings.train_tokenizer(texts, 4096, family="gpt2")
        name = config.data
        train, test = (
            prompts.encode_descriptions(tokenizer, splits[split], config.length)
            for split in ("train", "dev")
        )
        references = tuple(splits["test"])
        asked = tuple(prompts.encode_facts(tokenizer, d.facts) for d in references)
    else:
        text = docstrings.load_running_text(
            length=config.length,
            tokenizer=tokenizer,
            family="gpt2",
            of="sources" if config.data == "sources" else "docstrings",
        )
        name, tokenizer = text.name, text.tokenizer
        train, test = text.train, text.test
        rows = test.tokens[:: max(1, len(test) // _NUM_PROMPTS), :_PROMPT]
        asked = tuple(map(tuple, rows[:_NUM_PROMPTS].tolist()))
    return LanguageModelling(
        name=name,
        config=_shape(config, tokenizer),
        train=train,
        test=test,
        metric=LOSS,
        tokenizer=tokenizer,
        end=tokenizer.token_to_id(prompts.END),
        prompts=asked,
        references=references,
        num_tokens=min(40, config.length // 2),
    )
