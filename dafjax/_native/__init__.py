"""Custom calls as JAX primitives: packing, unpacking, and barriers."""

from dafjax._native._barriers import (
    hold as hold,
    pin as pin,
    pin_late as pin_late,
    row_major as row_major,
    tie as tie,
    tie_tree as tie_tree,
)
from dafjax._native._codes import (
    pack_affine as pack_affine,
    pack_affine_and_sum as pack_affine_and_sum,
    pack_affine_salted as pack_affine_salted,
    pack_bitmask as pack_bitmask,
    pack_bitmask_fused as pack_bitmask_fused,
    unpack_affine as unpack_affine,
    unpack_affine_fused as unpack_affine_fused,
    unpack_bitmask as unpack_bitmask,
    unpack_bitmask_fused as unpack_bitmask_fused,
)
from dafjax._native._cuda import (
    CudaDevice as CudaDevice,
    CudaStatus as CudaStatus,
    cuda_status as cuda_status,
    custom_calls as custom_calls,
    installed_plugins as installed_plugins,
    power_mode as power_mode,
    processor as processor,
)
from dafjax._native._format import Format as Format
from dafjax._native._library import (
    LibraryError as LibraryError,
    LibraryStatus as LibraryStatus,
    library_status as library_status,
)
from dafjax._native._pool import (
    LEDGER_NOTE as LEDGER_NOTE,
    PoolExhausted as PoolExhausted,
    StaleHandle as StaleHandle,
    ledger_note as ledger_note,
    make_ledger as make_ledger,
    make_pool as make_pool,
    pool_get as pool_get,
    pool_hash as pool_hash,
    pool_note as pool_note,
    pool_put as pool_put,
)
from dafjax._native._primitive import first_order as first_order
from dafjax._native._reduce import (
    REDUCTIONS as REDUCTIONS,
    STRATEGIES as STRATEGIES,
    ReductionCase as ReductionCase,
    Tuning as Tuning,
    fastest as fastest,
    minmax as minmax,
    sum_of_squares as sum_of_squares,
    time_reductions as time_reductions,
    tune_device as tune_device,
)
from dafjax._native._sums import (
    sum_groups as sum_groups,
    sum_rows_p as sum_rows_p,
    sum_together as sum_together,
    summing_rows as summing_rows,
    sums_of_groups as sums_of_groups,
)
