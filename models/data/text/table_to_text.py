"""Text to be written from facts: E2E NLG and WebNLG, from local folders.

Novikova et al.: The E2E Dataset (2017), `trainset.csv`, `devset.csv` and
`testset_w_refs.csv`. Gardent et al.: The WebNLG Challenge (2017, 2020), folders
`train`, `dev` and `test` of XML files. Generated text is measured with BLEU (Papineni
et al. 2002), by the library sacrebleu.
"""

import csv
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import final
from xml.etree import ElementTree


SPLITS = ("train", "dev", "test")


@final
@dataclasses.dataclass(frozen=True)
class Description:
    """Facts, and what people wrote about them.

    Attributes:
        facts: As text, for example `"name : The Vaults | area : riverside"`.
        references: At least one text.
    """

    facts: str
    references: tuple[str, ...]


def load_e2e(directory: pathlib.Path) -> dict[str, list[Description]]:
    """Reads E2E NLG from `directory/e2e`.

    Returns:
        Its splits. Facts that are repeated have all their references together.

    Raises:
        FileNotFoundError: A file is missing; the message says what to put where.
        ValueError: A file is not what it should be; the message names it.
    """
    folder = directory / "e2e"
    names = dict(zip(SPLITS, ("trainset", "devset", "testset_w_refs"), strict=True))
    files = {split: folder / f"{name}.csv" for split, name in names.items()}
    _require("E2E NLG", files, "from github.com/tuetschek/e2e-dataset")
    return {split: _grouped(_rows_of_e2e(path)) for split, path in files.items()}


def load_webnlg(directory: pathlib.Path) -> dict[str, list[Description]]:
    """Reads WebNLG from `directory/webnlg`, all XML files of its three folders.

    Returns:
        Its splits.

    Raises:
        FileNotFoundError: A folder is missing; the message says what to put where.
        ValueError: A file is not what it should be; the message names it.
    """
    folders = {split: directory / "webnlg" / split for split in SPLITS}
    _require("WebNLG", folders, "(`en/train` and so on) of its release in XML")
    return {
        split: [
            found
            for path in sorted(folder.rglob("*.xml"))
            for found in _entries_of_webnlg(path)
        ]
        for split, folder in folders.items()
    }


def bleu(texts: Sequence[str], descriptions: Sequence[Description]) -> float:
    """Returns the BLEU of texts against all their references, from 0 to 100.

    Args:
        texts: One for each description.
        descriptions: With their references.
    """
    import sacrebleu

    most = max(len(d.references) for d in descriptions)
    # One list for each number of a reference; those that have fewer repeat the first.
    references = [
        [
            d.references[n] if n < len(d.references) else d.references[0]
            for d in descriptions
        ]
        for n in range(most)
    ]
    return float(sacrebleu.corpus_bleu(list(texts), references).score)


def _require(name: str, paths: Mapping[str, pathlib.Path], source: str) -> None:
    missing = [f"`{path}`" for path in paths.values() if not path.exists()]
    if missing:
        raise FileNotFoundError(
            f"{name} is not there: put what {', '.join(missing)} should be, {source}."
        )


def _rows_of_e2e(path: pathlib.Path) -> Iterator[tuple[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        if not {"mr", "ref"} <= set(reader.fieldnames or ()):
            raise ValueError(
                f"`{path}` must have the columns mr and ref, but has "
                f"{reader.fieldnames}."
            )
        for row in reader:
            # name[The Vaults], area[riverside]
            pairs = (part.split("[", 1) for part in row["mr"].split("], "))
            try:
                facts = [f"{key} : {value.rstrip(']')}" for key, value in pairs]
            except ValueError:
                raise ValueError(
                    f"`{path}`, line {reader.line_num}: facts must be `key[value], "
                    f"...`, but are {row['mr']!r}."
                ) from None
            yield " | ".join(facts), row["ref"]


def _entries_of_webnlg(path: pathlib.Path) -> Iterator[Description]:
    try:
        entries = ElementTree.parse(path).getroot().iter("entry")
    except ElementTree.ParseError as error:
        raise ValueError(f"`{path}` is no XML: {error}.") from error
    for entry in entries:
        triples = [t.text or "" for t in entry.iterfind("modifiedtripleset/mtriple")]
        texts = tuple(
            " ".join(lex.text.split())
            for lex in entry.iterfind("lex")
            if lex.text and lex.get("comment") != "bad"
        )
        if not triples:
            raise ValueError(f"`{path}`: entry {entry.get('eid')} has no triples.")
        if texts:
            facts = " | ".join(" : ".join(t.strip().split(" | ")) for t in triples)
            yield Description(facts, texts)


def _grouped(rows: Iterator[tuple[str, str]]) -> list[Description]:
    references: dict[str, list[str]] = {}
    for facts, text in rows:
        references.setdefault(facts, []).append(text)
    return [Description(facts, tuple(texts)) for facts, texts in references.items()]
