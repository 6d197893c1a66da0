"""What dafjax finds of CUDA, for users to ask."""

from dafjax._native import CudaStatus, cuda_status as _cuda_status


def cuda_status() -> CudaStatus:
    """Tells whether dafjax can use an NVIDIA GPU and, if not, what to do.

    Where there is no CUDA library, programs on a GPU run all the same: `jax.numpy`
    makes the same bytes there, and is slower. `python -m dafjax doctor` prints the
    status.

    Returns:
        A `CudaStatus`. Its `problem` is None if nothing is in the way; otherwise
        `remedy` says how to mend it. Nothing is started on a GPU, no backend of JAX is
        initialized, and this never raises.

    Example:
        >>> import dafjax
        >>> status = dafjax.cuda_status()
        >>> (status.problem is None) == (status.remedy is None)
        True
    """
    return _cuda_status()
