"""Small networks of many kinds. dafjax was tuned for none of them.

Each module has functions that return a `Network`; `NETWORKS` lists them by name.
"""

import importlib.util
from collections.abc import Mapping

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
