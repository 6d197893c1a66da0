"""Strategies of reductions, and the scratch memory that they need."""

# In the order of `Strategy` in xla_ffi/format/reduction.h, which has the sizes, too.
STRATEGIES = ("parallel", "atomic", "hybrid")
_LEAST_PART_ELEMENTS = 8192
_MOST_PARTS = 1024
_STATE_WORDS = 4
_PART_WORDS = 2


def num_parts(row_elements: int) -> int:
    """Returns the number of parts into which a reduction splits a row."""
    return min(max(-(-row_elements // _LEAST_PART_ELEMENTS), 1), _MOST_PARTS)


def scratch_words(row_elements: int) -> int:
    """Returns the number of scratch uint32 that the reduction of a row needs."""
    return _STATE_WORDS + _PART_WORDS * num_parts(row_elements)
