"""The names of dafjax's custom calls, for exporting compiled functions."""

from dafjax._native import registered_custom_calls


def custom_calls() -> tuple[str, ...]:
    """Returns the names of the custom calls that dafjax's programs contain.

    `jax.export` refuses unknown custom calls unless they are allowed by name, because
    a later version of a library may lack them. An exported program runs with the
    version of dafjax that exported it.

    This function also registers the custom calls with XLA, for CPUs and, if dafjax was
    built with it, for CUDA. A process that loads an exported program but wraps no
    function itself must call it first.

    Returns:
        The names, sorted.

    Raises:
        ImportError: The compiled library is missing or does not fit jaxlib.

    Example:
        >>> import dafjax, jax, jax.numpy as jnp
        >>> from jax import export
        >>> f = dafjax.remat_compress(lambda w: jnp.sum(jnp.sin(w @ w) @ w))
        >>> allowed = [
        ...     export.DisabledSafetyCheck.custom_call(name)
        ...     for name in dafjax.custom_calls()
        ... ]
        >>> w = jnp.ones((128, 128))
        >>> exported = export.export(jax.jit(jax.grad(f)), disabled_checks=allowed)(w)
        >>> exported.call(w).shape
        (128, 128)
    """
    return registered_custom_calls()
