"""Small networks of many kinds. dafjax was tuned for none of them.

Each module has functions that return a `Network`; `NETWORKS` lists them by name.
"""

import fnmatch
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping

from benchmarks.zoo import (
    convolutional,
    encoders,
    generative,
    language,
    learning,
    libraries,
    others,
    physics,
    recurrent,
    speech,
    transformers,
    vision,
)
from benchmarks.zoo.network import Network as Network, Networks
from benchmarks.zoo.scaled import SCALED as SCALED


_ALL: Networks = {
    **convolutional.NETWORKS,
    **transformers.NETWORKS,
    **recurrent.NETWORKS,
    **others.NETWORKS,
    **generative.NETWORKS,
    **encoders.NETWORKS,
    **language.NETWORKS,
    **learning.NETWORKS,
    **libraries.NETWORKS,
    **physics.NETWORKS,
    **speech.NETWORKS,
    **vision.NETWORKS,
}
# The package by network, where it is not installed.
MISSING: Mapping[str, str] = {
    name: package
    for name, package in libraries.NEEDS.items()
    if importlib.util.find_spec(package) is None
}
NETWORKS: Networks = {name: make for name, make in _ALL.items() if name not in MISSING}


def chosen(
    patterns: Iterable[str],
    networks: Mapping[str, Callable[[], Network]] = NETWORKS,
) -> Iterator[tuple[str, Network]]:
    """Makes the networks whose names match one of the patterns, with their names."""
    for name, make in networks.items():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            yield name, make()
