"""Training with residuals in a few bits: `remat_compress`, like `jax.checkpoint`."""

from dafjax import codecs as codecs
from dafjax import policies as policies
from dafjax import stores as stores
from dafjax._remat_compress import remat_compress as remat_compress
from dafjax.report import (
    SavedResiduals as SavedResiduals,
)
from dafjax.report import (
    print_saved_residuals as print_saved_residuals,
)
from dafjax.report import (
    saved_residuals as saved_residuals,
)
