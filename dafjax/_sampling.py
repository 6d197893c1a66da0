"""Which elements of an array stand for all."""

import functools
import math


@functools.lru_cache(maxsize=1024)
def sampling_strides(shape: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Returns how far apart at most so many samples are, dimension by dimension.

    Odd numbers, in step with no power of two: behind strided convolutions cotangents
    are on a lattice, of which 8 samples in a row see every place. Along each dimension,
    not along the flattened array, where XLA would divide for the place of every
    element; and along all of them alike: examples, places and channels all differ.

    Args:
        shape: Of the array.
        most: The most samples, at least 1.
    """
    strides = [1] * len(shape)

    def num_samples(dimension: int) -> int:
        return -(-shape[dimension] // strides[dimension])

    dimensions = range(len(shape))
    while math.prod(map(num_samples, dimensions)) > most:
        strides[max(dimensions, key=num_samples)] += 2
    return tuple(strides)
