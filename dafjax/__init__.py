"""Train with residuals in a few bits: `dafjax.remat_compress`, like `jax.checkpoint`."""

from dafjax import codecs as codecs
from dafjax import policies as policies
from dafjax import stores as stores
from dafjax._remat_compress import remat_compress as remat_compress
