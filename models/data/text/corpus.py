"""Docstrings and sources of installed packages: real text that is there anyway."""

import ast
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import pathlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Literal, final


TextName = Literal["docstrings", "sources"]


# What `pip install dafjax[models]` brings. Each writes about another subject.
PACKAGES = ("flax", "jax", "matplotlib", "numpy", "optax", "scipy", "sklearn")

_DISTRIBUTIONS = {"sklearn": "scikit-learn"}


@final
@dataclasses.dataclass(frozen=True)
class Document:
    """The docstring of one module, class or function, or the code of one module.

    Attributes:
        package: The package it is of.
        path: Its file, below the package's folder.
        text: The docstring, without indentation; or code, without docstrings and
            comments, as `ast.unparse` writes it.
    """

    package: str
    path: str
    text: str


@functools.cache
def documents(
    package: str, of: TextName = "docstrings", *, most_characters: int
) -> tuple[Document, ...]:
    """Returns docstrings or sources of a package, the same for the same version of it.

    Nothing is imported: sources are parsed. Files come in an order that has nothing to
    do with their names, so that a part of them is a sample of all.

    Args:
        package: The name of an installed package.
        of: Which of them.
        most_characters: Where to stop.

    Raises:
        FileNotFoundError: There are no sources of such a package.
    """
    found: list[Document] = []
    left = most_characters
    for root, path in _sources(package):
        name = path.relative_to(root).as_posix()
        for text in _docstrings(path) if of == "docstrings" else _code(path):
            if left <= 0:
                return tuple(found)
            found.append(Document(package, name, text))
            left -= len(text)
    return tuple(found)


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Returns the installed versions, which a text depends on."""
    return {
        name: importlib.metadata.version(_DISTRIBUTIONS.get(name, name))
        for name in packages
    }


def share(text: str) -> float:
    """Returns a number from 0 to 1 that a text has everywhere, as if at random."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _sources(package: str) -> list[tuple[pathlib.Path, pathlib.Path]]:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            f"`{package}` is not installed as a package of Python sources, and its "
            "docstrings are to be learned from. Install it, for example with "
            "`pip install 'dafjax[models]'`."
        )
    found = [
        (root, path)
        for root in map(pathlib.Path, spec.submodule_search_locations)
        for path in root.rglob("*.py")
        if not {"tests", "testing", "_vendor"} & set(path.parts)
    ]
    return sorted(
        found, key=lambda item: share(item[1].relative_to(item[0]).as_posix())
    )


def _docstrings(path: pathlib.Path) -> Iterator[str]:
    tree = _parse(path)
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, _DOCUMENTED):
            text = ast.get_docstring(node)
            if text:
                yield text


def _code(path: pathlib.Path) -> Iterator[str]:
    tree = _parse(path)
    if tree is None:
        return
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            # What has nothing but a docstring needs something in its place.
            node.body = node.body[1:] or [ast.Pass()]
    yield ast.unparse(tree)


def _parse(path: pathlib.Path) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            # Of escapes in the strings of others.
            warnings.simplefilter("ignore")
            return ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, RecursionError):
        # Templates, and sources for other versions of Python.
        return None


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
