"""Custom calls as JAX primitives: packing, unpacking, and barriers."""

from dafjax._native._affine import (
    pack_affine as pack_affine,
    unpack_affine as unpack_affine,
)
from dafjax._native._affine_sums import pack_affine_and_sum as pack_affine_and_sum
from dafjax._native._bitmask import (
    pack_bitmask as pack_bitmask,
    unpack_bitmask as unpack_bitmask,
)
from dafjax._native._cuda_library import (
    registered_custom_calls as registered_custom_calls,
)
from dafjax._native._cuda_status import (
    CudaDevice as CudaDevice,
    CudaStatus as CudaStatus,
    cuda_status as cuda_status,
    installed_plugins as installed_plugins,
)
from dafjax._native._device_facts import (
    power_mode as power_mode,
    processor as processor,
)
from dafjax._native._first_order import first_order as first_order
from dafjax._native._fused import (
    pack_bitmask_fused as pack_bitmask_fused,
    unpack_affine_fused as unpack_affine_fused,
    unpack_bitmask_fused as unpack_bitmask_fused,
)
from dafjax._native._ledger import (
    LEDGER_NOTE as LEDGER_NOTE,
    ledger_note as ledger_note,
    make_ledger as make_ledger,
)
from dafjax._native._library import (
    LibraryError as LibraryError,
    LibraryStatus as LibraryStatus,
    library_status as library_status,
)
from dafjax._native._pin import pin as pin
from dafjax._native._pin_late import pin_late as pin_late
from dafjax._native._pool import (
    PoolExhausted as PoolExhausted,
    StaleHandle as StaleHandle,
    make_pool as make_pool,
    pool_hash as pool_hash,
)
from dafjax._native._pool_calls import (
    pool_get as pool_get,
    pool_note as pool_note,
    pool_put as pool_put,
)
from dafjax._native._reduce import (
    minmax as minmax,
    sum_of_squares as sum_of_squares,
)
from dafjax._native._reduction_profile import fastest as fastest
from dafjax._native._reduction_shapes import STRATEGIES as STRATEGIES
from dafjax._native._reduction_timing import (
    REDUCTIONS as REDUCTIONS,
    ReductionCase as ReductionCase,
    time_reductions as time_reductions,
)
from dafjax._native._row_major import row_major as row_major
from dafjax._native._sum_rows import (
    are_grouped as are_grouped,
    sum_groups as sum_groups,
    sum_rows_p as sum_rows_p,
    sum_together as sum_together,
)
from dafjax._native._tie import hold as hold, tie as tie, tie_tree as tie_tree
from dafjax._native._tuning import Tuning as Tuning, tune_device as tune_device
