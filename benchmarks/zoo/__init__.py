"""Small networks of many kinds. dafjax was tuned for none of them.

Each module has functions that return a `Network`; `NETWORKS` lists them by name.
"""

import importlib.util
from collections.abc import Callable, Mapping

from benchmarks.zoo import convolutional, others, recurrent, transformers
from benchmarks.zoo.network import Network as Network
from benchmarks.zoo.scaled import SCALED as SCALED


_ALL: Mapping[str, Callable[[], Network]] = {
    **convolutional.NETWORKS,
    **transformers.NETWORKS,
    **recurrent.NETWORKS,
    **others.NETWORKS,
}
_NEEDS: Mapping[str, str] = {}
# The package by network, where it is not installed.
MISSING: Mapping[str, str] = {
    name: package
    for name, package in _NEEDS.items()
    if importlib.util.find_spec(package) is None
}
NETWORKS: Mapping[str, Callable[[], Network]] = {
    name: make for name, make in _ALL.items() if name not in MISSING
}
