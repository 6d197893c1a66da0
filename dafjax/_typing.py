"""Type aliases of the library."""

from collections.abc import Hashable
from typing import Any, TypeAlias

import jax


Array: TypeAlias = jax.Array
# Any pytree of arrays.
ArrayTree: TypeAlias = Any
# `jax.Device`, which type checkers treat as a variable.
Device: TypeAlias = Any
# Shape and dtype of the array that decoding restores.
Like: TypeAlias = jax.ShapeDtypeStruct
# A static parameter of a primitive.
Static: TypeAlias = Hashable
