"""Text data sets: files in their real formats, and docstrings of what is installed."""

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from models.data.text import docstrings, glue, table_to_text
from models.data.text.corpus import documents, share
from models.data.text.splits import windows


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


class TestDocstrings:
    PACKAGES = ("optax", "rich")

    @pytest.fixture(scope="class")
    def sentences(self):
        return docstrings.load_sentences(
            length=32, vocabulary=600, packages=self.PACKAGES, most_of_each=200
        )

    def test_classes_are_balanced_and_splits_are_apart(self, sentences):
        for split, count in ((sentences.train, 150), (sentences.test, 50)):
            np.testing.assert_array_equal(np.bincount(split.labels), [count, count])
        decode = sentences.tokenizer.decode_batch
        train, test = (
            set(decode(split.tokens.tolist()))
            for split in (sentences.train, sentences.test)
        )
        assert len(train) > 290
        assert train.isdisjoint(test)

    def test_no_sentence_names_a_package(self, sentences):
        text = " ".join(
            sentences.tokenizer.decode_batch(sentences.train.tokens.tolist())
        )
        assert len(text) > 10_000
        assert not {"optax", "jax", "numpy", "Flax"} & set(text.split())

    def test_examples_are_padded_and_cut_to_their_length(self, sentences):
        tokens, mask, _ = sentences.train.take(np.arange(300))
        assert tokens.shape == mask.shape == (300, 32)
        padding = sentences.tokenizer.token_to_id("<pad>")
        np.testing.assert_array_equal(tokens == padding, ~mask)
        assert not mask.all()
        assert (mask.sum(1) == 32).any()
        assert (tokens[:, 0] == sentences.tokenizer.token_to_id("<s>")).all()

    def test_all_is_the_same_the_next_time(self, sentences):
        documents.cache_clear()
        again = docstrings.load_sentences(
            length=32, vocabulary=600, packages=self.PACKAGES, most_of_each=200
        )
        assert again.name == sentences.name
        assert "optax 0." in again.name
        for a, b in ((again.train, sentences.train), (again.test, sentences.test)):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_array_equal(a.labels, b.labels)

    def test_running_text_can_be_read(self):
        text = docstrings.load_running_text(
            length=64, vocabulary=600, packages=self.PACKAGES
        )
        tokens, weights = text.train.take(np.array([0, 1]))
        assert (tokens.shape, weights.shape) == ((2, 65), (2, 64))
        # The last token of a window is the first of the next.
        assert tokens[0, -1] == tokens[1, 0]
        assert len(text.tokenizer.decode(tokens[0].tolist()).split()) > 5
        assert 0.05 < len(text.test) / len(text.train) < 0.5

    def test_bytes_that_were_never_seen_are_no_problem(self):
        tokenizer = docstrings.train_tokenizer(["abc abc"], 300)
        text = "Ω≠ß \x00 \U0001f600"
        assert tokenizer.decode(tokenizer.encode(text).ids) == text

    def test_a_package_that_is_not_there_is_named(self):
        with pytest.raises(FileNotFoundError, match="`no_such_package` is not inst"):
            documents("no_such_package", most_characters=1)

    def test_shares_are_spread_evenly(self):
        shares = [share(str(number)) for number in range(1000)]
        assert abs(np.mean(shares) - 0.5) < 0.05
        assert min(shares) < 0.01
        assert max(shares) > 0.99


def test_windows_shorter_than_the_text():
    split = windows(np.arange(10), 3)
    np.testing.assert_array_equal(
        split.tokens, [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    )
    with pytest.raises(ValueError, match="less than the number of tokens, 10, but got"):
        windows(np.arange(10), 10)


class TestGlue:
    SST2 = 'sentence\tlabel\nan "ugly film \t0\nbrave \t1\n'
    MRPC = (
        "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
        '1\t70\t71\tHe said "no.\tHe said no.\n0\t72\t73\tA .\tB .\n'
    )
    STSB = (
        "index\tgenre\tsentence1\tsentence2\tscore\n"
        "0\tnews\tA plane.\tA jet.\t4.750\n1\tnews\tA man.\tA dog.\t0.000\n"
    )

    @pytest.mark.parametrize(
        ("name", "folder", "text", "first"),
        [
            ("sst2", "SST-2", SST2, ('an "ugly film ', 0)),
            ("mrpc", "MRPC", MRPC, (('He said "no.', "He said no."), 1)),
            ("stsb", "STS-B", STSB, (("A plane.", "A jet."), 4.75)),
        ],
    )
    def test_official_files(self, tmp_path, name, folder, text, first):
        for file in ("train.tsv", "dev.tsv"):
            write(tmp_path / folder / file, text)
        train, test = glue.load_glue(name, tmp_path)
        assert train == test
        assert train[0] == first
        assert len(train) == 2

    def test_parquet_files_in_parts(self, tmp_path):
        folder = tmp_path / "stsb"
        folder.mkdir()
        table = pyarrow.table(
            {"sentence1": ["A."], "sentence2": ["B."], "label": [2.5], "idx": [0]}
        )
        names = ("train-00000-of-00002", "train-00001-of-00002")
        for file in (*names, "validation-00000-of-00001"):
            parquet.write_table(table, folder / f"{file}.parquet")
        train, test = glue.load_glue("stsb", tmp_path)
        assert train == [(("A.", "B."), 2.5)] * 2
        assert test == [(("A.", "B."), 2.5)]

    def test_missing_files_are_named(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"`train.tsv`.*`\S*SST-2` or"):
            glue.load_glue("sst2", tmp_path)
        with pytest.raises(
            ValueError, match=r"must be one of .*'mrpc'.*but got 'cola'"
        ):
            glue.load_glue("cola", tmp_path)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("text\tlabel\na\t1\n", r"must have the columns .* lacks \['sentence'\]"),
            ("sentence\tlabel\na\n", "line 2, must have at least 2 columns, but has 1"),
            (
                "sentence\tlabel\na\t2\n",
                "line 2: the label must be from 0 to 1, not '2",
            ),
            (
                "sentence\tlabel\na\tx\n",
                "line 2: the label must be from 0 to 1, not 'x",
            ),
            ("", "lacks"),
        ],
    )
    def test_damaged_files(self, tmp_path, text, message):
        for file in ("train.tsv", "dev.tsv"):
            write(tmp_path / "SST-2" / file, text)
        with pytest.raises(ValueError, match=message):
            glue.load_glue("sst2", tmp_path)

    def test_damaged_parquet_files(self, tmp_path):
        for file in ("train-0.parquet", "validation-0.parquet"):
            write(tmp_path / "sst2" / file, "PAR1 and no more")
        with pytest.raises(ValueError, match=r"train-0.parquet` cannot be read"):
            glue.load_glue("sst2", tmp_path)

    def test_metrics_are_the_official_ones(self):
        labels, predictions = np.array([1, 1, 0, 0]), np.array([1, 0, 1, 0])
        mrpc = glue.TASKS["mrpc"].metrics
        assert mrpc["accuracy"](labels, predictions) == 0.5
        assert mrpc["f1"](labels, predictions) == 0.5
        scores = glue.TASKS["stsb"].metrics
        cubes = np.arange(5.0) ** 3
        assert scores["spearman"](np.arange(5.0), cubes) == pytest.approx(1)
        assert 0.8 < scores["pearson"](np.arange(5.0), cubes) < 0.99


class TestTableToText:
    def test_e2e(self, tmp_path):
        rows = 'mr,ref\n"name[A Pub], food[Fish, chips]",One.\n'
        rows += '"name[B], food[X]",Two.\n"name[A Pub], food[Fish, chips]",Three.\n'
        for file in ("trainset", "devset", "testset_w_refs"):
            write(tmp_path / "e2e" / f"{file}.csv", rows)
        splits = table_to_text.load_e2e(tmp_path)
        assert splits.keys() == {"train", "dev", "test"}
        first, second = splits["test"]
        assert first.facts == "name : A Pub | food : Fish, chips"
        assert first.references == ("One.", "Three.")
        assert second.references == ("Two.",)

    def test_webnlg(self, tmp_path):
        entry = (
            '<entry eid="Id1"><modifiedtripleset>'
            "<mtriple>Aarhus | leader | Jacob</mtriple></modifiedtripleset>"
            '<lex comment="good">Jacob leads\n Aarhus.</lex>'
            '<lex comment="bad">no</lex></entry>'
        )
        for split in ("train", "dev", "test"):
            text = f"<benchmark><entries>{entry}</entries></benchmark>"
            write(tmp_path / "webnlg" / split / "1triples" / "City.xml", text)
        (found,) = table_to_text.load_webnlg(tmp_path)["dev"]
        assert found.facts == "Aarhus : leader : Jacob"
        assert found.references == ("Jacob leads Aarhus.",)

    def test_missing_and_damaged_files_are_named(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"trainset\.csv.*from github"):
            table_to_text.load_e2e(tmp_path)
        with pytest.raises(FileNotFoundError, match="webnlg/train"):
            table_to_text.load_webnlg(tmp_path)
        for file in ("trainset", "devset", "testset_w_refs"):
            write(tmp_path / "e2e" / f"{file}.csv", "mr,ref\nno facts,One.\n")
        with pytest.raises(ValueError, match=r"line 2: facts must be `key\[value\]"):
            table_to_text.load_e2e(tmp_path)
        for split in ("train", "dev", "test"):
            write(tmp_path / "webnlg" / split / "a.xml", "<benchmark>")
        with pytest.raises(ValueError, match=r"a\.xml` is no XML"):
            table_to_text.load_webnlg(tmp_path)

    def test_bleu_takes_the_best_of_all_references(self):
        texts = ["the cat sat on the mat", "there is a house on the hill"]
        both = ("there is a house on the hill", "a house stands on a hill")
        descriptions = [
            table_to_text.Description("", (texts[0],)),
            table_to_text.Description("", both[::-1]),
        ]
        assert table_to_text.bleu(texts, descriptions) == pytest.approx(100)
        assert table_to_text.bleu(texts[::-1], descriptions) < 20
