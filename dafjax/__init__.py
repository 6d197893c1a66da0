"""Trains with residuals in a few bits: `remat_compress`, like `jax.checkpoint`."""

from dafjax import (
    allocation as allocation,
    codecs as codecs,
    policies as policies,
    reductions as reductions,
    stores as stores,
)
from dafjax._accumulate import accumulate as accumulate
from dafjax._assess import (
    ArrayNoise as ArrayNoise,
    Assessment as Assessment,
    NoisyResidual as NoisyResidual,
    Setting as Setting,
    assess as assess,
)
from dafjax._bits import (
    AverageBits as AverageBits,
    BatchNoise as BatchNoise,
    Bits as Bits,
    Budget as Budget,
    NoiseCeiling as NoiseCeiling,
)
from dafjax._estimate import (
    Estimate as Estimate,
    FittedBatch as FittedBatch,
    StepMemory as StepMemory,
    estimate as estimate,
    fit_batch as fit_batch,
)
from dafjax._jit import (
    Jit as Jit,
    JitReport as JitReport,
    TriedProgram as TriedProgram,
    jit as jit,
)
from dafjax._native import (
    CudaStatus as CudaStatus,
    cuda_status as cuda_status,
    custom_calls as custom_calls,
)
from dafjax._remat_compress import remat_compress as remat_compress
from dafjax.report import (
    Plan as Plan,
    explain as explain,
    print_saved_residuals as print_saved_residuals,
    saved_residuals as saved_residuals,
)
