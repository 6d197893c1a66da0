"""Strategies of reductions, and the scratch memory that they need."""

# In the order of `Strategy` in xla_ffi/format/reduction.h, where the sizes are too.
STRATEGIES = ("parallel", "atomic", "hybrid")
_LEAST_PART_ELEMENTS = 8192
_MOST_PARTS = 1024
_STATE_WORDS = 4
_PART_WORDS = 2


def num_parts(row_elements: int) -> int:
    """Returns into how many parts a row is cut."""
    return min(max(-(-row_elements // _LEAST_PART_ELEMENTS), 1), _MOST_PARTS)


def scratch_words(row_elements: int) -> int:
    """Returns how many uint32 a reduction of a row needs besides."""
    return _STATE_WORDS + _PART_WORDS * num_parts(row_elements)
