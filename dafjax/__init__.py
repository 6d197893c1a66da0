"""Training with residuals in a few bits: `remat_compress`, like `jax.checkpoint`."""

from dafjax import codecs as codecs, policies as policies, stores as stores
from dafjax._custom_calls import custom_calls as custom_calls
from dafjax._remat_compress import remat_compress as remat_compress
from dafjax.report import (
    SavedResiduals as SavedResiduals,
    print_saved_residuals as print_saved_residuals,
    saved_residuals as saved_residuals,
)
