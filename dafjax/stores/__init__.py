"""Places where packed residuals wait for the backward pass."""

from dafjax.stores._abstract import AbstractStore as AbstractStore
from dafjax.stores._arrays import Arrays as Arrays
from dafjax.stores._host import Host as Host
