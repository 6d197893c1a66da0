"""Every threshold of `dafjax/config.py` has a reason, and is read."""

import pathlib
import re

import dafjax


_LIBRARY = pathlib.Path(dafjax.__file__).parent
_CONFIG = (_LIBRARY / "config.py").read_text(encoding="utf-8")
_NAMES = re.findall(r"^([A-Z_]+) = ", _CONFIG, re.MULTILINE)


def test_every_threshold_is_read():
    source = "".join(
        path.read_text(encoding="utf-8") for path in _LIBRARY.rglob("*.py")
    )
    assert _NAMES
    assert [n for n in _NAMES if not re.search(rf"config\.{n}\b", source)] == []


def test_every_group_of_thresholds_has_a_reason():
    """A comment stands right above the first of each group."""
    groups = re.split(r"\n\n+", _CONFIG)
    for group in groups:
        if re.search(r"^[A-Z_]+ = ", group, re.MULTILINE):
            assert group.startswith("#"), group


def test_other_modules_have_no_thresholds_in_bytes():
    pattern = re.compile(r"^_?[A-Z_]*NBYTES[A-Z_]* = \d+ (\*|<<) ", re.MULTILINE)
    assert pattern.search("_SMALL_NBYTES = 16 * 1024\n")
    folders = ("_trace", "_passes", "_plan", "_schedule")
    found = [
        path.name
        for folder in folders
        for path in (_LIBRARY / folder).glob("*.py")
        if pattern.search(path.read_text(encoding="utf-8"))
    ]
    assert found == []
