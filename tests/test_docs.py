"""The code of the pages for developers runs, and prints what the pages say."""

import contextlib
import io
import linecache
import pathlib
import re

import jax
import pytest

from dafjax._trace import rules


_DOCS = pathlib.Path(__file__).parents[1] / "docs"
_BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)


def outputs(page: pathlib.Path) -> list[tuple[str, str]]:
    """Runs a page; returns what each block prints, and what the page says it does."""
    namespace = {"__name__": page.stem}
    found = []
    for number, (code, expected) in enumerate(_BLOCK.findall(page.read_text("utf-8"))):
        name = f"{page.stem}-{number}"
        linecache.cache[name] = len(code), None, code.splitlines(True), name
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, name, "exec"), namespace)
        text = re.sub(r" ?" + re.escape(name) + r":[\d:]+", "", printed.getvalue())
        found.append((re.sub(r" +$", "", text, flags=re.M), expected))
    return found


@pytest.mark.skipif(
    not jax.__version__.startswith("0.10."), reason="listings are those of jax 0.10"
)
@pytest.mark.parametrize("name", ["design", "add-a-primitive", "add-a-codec"])
def test_a_page_prints_what_it_says(name, monkeypatch):
    monkeypatch.setattr(rules, "OPS", dict(rules.OPS))
    # JAX remembers the line that first called `jax.nn.relu`, say.
    jax.clear_caches()
    for printed, expected in outputs(_DOCS / f"{name}.md"):
        assert printed == expected


def test_a_page_that_says_something_else_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text('```python\nprint("a")\n```\n\n```text\nb\n```\n')
    assert outputs(page) == [("a\n", "b\n")]
