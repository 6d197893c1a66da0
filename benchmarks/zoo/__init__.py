"""Small networks of many kinds. dafjax was tuned for none of them.

Each module has functions that return a `Network`; `NETWORKS` lists them by name.
"""

from collections.abc import Callable, Mapping

from benchmarks.zoo import convolutional, others, recurrent, transformers
from benchmarks.zoo.network import Network as Network
from benchmarks.zoo.scaled import SCALED as SCALED


NETWORKS: Mapping[str, Callable[[], Network]] = {
    **convolutional.NETWORKS,
    **transformers.NETWORKS,
    **recurrent.NETWORKS,
    **others.NETWORKS,
}
