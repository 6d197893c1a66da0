"""Tokenizers from files, each made here: batches, masks, and files that are missing."""

import json
import string

import pytest
import tokenizers

from models.tokenizer import Tokenizer, TokenizerError


MERGES = ["t h", "th e", "Ġ the", "Ġ c", "Ġc a", "Ġca t"]
SPECIAL = {"roberta": ["<s>", "<pad>", "</s>"], "gpt2": ["<|endoftext|>"]}


def write_vocabulary(folder, family):
    pieces = [*string.ascii_letters, ".", "Ġ", *(m.replace(" ", "") for m in MERGES)]
    names = [*SPECIAL[family], *pieces]
    vocabulary = {name: number for number, name in enumerate(names)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *MERGES]) + "\n")
    return vocabulary


def numbers(vocabulary, *pieces):
    return [vocabulary[piece] for piece in pieces]


def test_sequences_of_roberta_have_a_beginning_and_an_end(tmp_path):
    vocabulary = write_vocabulary(tmp_path, "roberta")
    tokenizer = Tokenizer(tmp_path, "roberta")
    batch = tokenizer.encode(["the cat", "the"], length=6)
    assert batch.tokens.tolist() == [
        numbers(vocabulary, "<s>", "the", "Ġcat", "</s>", "<pad>", "<pad>"),
        numbers(vocabulary, "<s>", "the", "</s>", "<pad>", "<pad>", "<pad>"),
    ]
    assert batch.mask.tolist() == [[True] * 4 + [False] * 2, [True] * 3 + [False] * 3]
    assert (batch.tokens.dtype, batch.mask.dtype) == ("int32", "bool")
    assert tokenizer.decode(batch.tokens[0]) == "the cat"
    assert tokenizer.padding == 1
    assert tokenizer.num_tokens == len(vocabulary)


def test_two_texts_of_roberta_are_one_sequence(tmp_path):
    vocabulary = write_vocabulary(tmp_path, "roberta")
    tokenizer = Tokenizer(tmp_path, "roberta")
    batch = tokenizer.encode(["the"], ["the cat"], length=7)
    assert batch.tokens.tolist() == [
        numbers(vocabulary, "<s>", "the", "</s>", "</s>", "the", "Ġcat", "</s>")
    ]
    with pytest.raises(ValueError, match="as many texts as `texts`, 1, but has 0"):
        tokenizer.encode(["the"], [], length=7)


def test_what_is_too_long_is_cut_before_its_end(tmp_path):
    vocabulary = write_vocabulary(tmp_path, "roberta")
    tokenizer = Tokenizer(tmp_path, "roberta")
    batch = tokenizer.encode(["the cat the cat"], length=4)
    assert batch.tokens.tolist() == [numbers(vocabulary, "<s>", "the", "Ġcat", "</s>")]
    assert batch.mask.all()
    with pytest.raises(ValueError, match=r"`length` must be above 2.* but got 2"):
        tokenizer.encode(["the"], length=2)


def test_sequences_of_gpt2_are_the_text_alone(tmp_path):
    vocabulary = write_vocabulary(tmp_path, "gpt2")
    tokenizer = Tokenizer(tmp_path, "gpt2")
    batch = tokenizer.encode(["the cat", ""], length=3)
    end = "<|endoftext|>"
    assert batch.tokens.tolist() == [
        numbers(vocabulary, "the", "Ġcat", end),
        numbers(vocabulary, end, end, end),
    ]
    assert batch.mask.tolist() == [[True, True, False], [False] * 3]


@pytest.mark.parametrize("family", ["roberta", "gpt2"])
def test_one_file_does_what_the_two_do(tmp_path, family):
    write_vocabulary(tmp_path, family)
    first = Tokenizer(tmp_path, family)
    whole = tmp_path / "whole"
    whole.mkdir()
    # With padding and truncation of its own, which must not matter.
    first.backend.enable_padding(length=50)
    first.backend.enable_truncation(3)
    first.backend.save(str(whole / "tokenizer.json"))
    second = Tokenizer(whole, family)
    texts = ["the cat the", "cat"]
    for name in ("tokens", "mask"):
        one, other = (
            getattr(tokenizer.encode(texts, length=8), name).tolist()
            for tokenizer in (first, second)
        )
        assert one == other


def test_missing_files_are_an_error_that_says_which_to_put_where(tmp_path):
    message = rf"no tokenizer in `{tmp_path}`. Put `tokenizer.json`, or .*FacebookAI"
    with pytest.raises(TokenizerError, match=message):
        Tokenizer(tmp_path, "roberta")
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(
        TokenizerError, match=r"`vocab.json` and `merges.txt`, of openai"
    ):
        Tokenizer(tmp_path, "gpt2")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": 3}', "\x00"])
def test_a_damaged_file_is_an_error(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match="cannot be read; the reason was"):
        Tokenizer(tmp_path, "roberta")


def test_a_tokenizer_of_another_model_is_an_error(tmp_path):
    write_vocabulary(tmp_path, "gpt2")
    with pytest.raises(TokenizerError, match=r"not of roberta: it lacks .*<s>, <pad>"):
        Tokenizer(tmp_path, "roberta")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="not of gpt2"):
        Tokenizer(tmp_path, "gpt2")


def test_an_unknown_family_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="`family` must be one of roberta, gpt2"):
        Tokenizer(tmp_path, "bert")
