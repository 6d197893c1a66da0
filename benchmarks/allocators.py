"""Places for blobs that come and go: malloc, and best fit in one address space."""

import bisect
import ctypes
import ctypes.util
from typing import Protocol, final


class Allocator(Protocol):
    """Gives and takes back stretches of memory."""

    def allocate(self, nbytes: int) -> int:
        """Returns the address of a stretch, whose pages have been touched."""
        ...

    def free(self, address: int) -> None:
        """Takes a stretch back."""
        ...

    def held_nbytes(self) -> int | None:
        """Returns what it has taken from the system; None if only that can tell."""
        ...


@final
class Malloc:
    """The C library's, as it is set up by default."""

    def __init__(self) -> None:
        library = ctypes.CDLL(ctypes.util.find_library("c"))
        self._malloc = library.malloc
        self._malloc.argtypes = [ctypes.c_size_t]
        self._malloc.restype = ctypes.c_void_p
        self._free = library.free
        self._free.argtypes = [ctypes.c_void_p]

    def allocate(self, nbytes: int) -> int:
        address = self._malloc(nbytes)
        if address is None:
            raise MemoryError(f"malloc({nbytes}) found no memory.")
        ctypes.memset(address, 1, nbytes)
        return address

    def free(self, address: int) -> None:
        self._free(address)

    def held_nbytes(self) -> int | None:
        return None


@final
class BestFit:
    """The smallest hole that is large enough, of a heap that grows at its end.

    Holes are merged with their neighbors. Simulated: no memory is touched.

    Attributes:
        align: Sizes are rounded up to a multiple of it.
    """

    def __init__(self, align: int = 64) -> None:
        self.align = align
        self._end = 0
        # Holes by size and address, and by both of their ends.
        self._by_size: list[tuple[int, int]] = []
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._used: dict[int, int] = {}

    def allocate(self, nbytes: int) -> int:
        size = max(1, -(-nbytes // self.align)) * self.align
        place = bisect.bisect_left(self._by_size, (size, 0))
        if place < len(self._by_size):
            hole, address = self._by_size[place]
            self._remove(address, hole)
            if hole > size:
                self._add(address + size, hole - size)
        else:
            # A hole at the end of the heap grows to what is needed.
            hole = self._ends.get(self._end, 0)
            address = self._end - hole
            if hole:
                self._remove(address, hole)
            self._end = address + size
        self._used[address] = size
        return address

    def free(self, address: int) -> None:
        size = self._used.pop(address)
        before = self._ends.get(address, 0)
        if before:
            self._remove(address - before, before)
            address, size = address - before, size + before
        after = self._starts.get(address + size, 0)
        if after:
            self._remove(address + size, after)
            size += after
        self._add(address, size)

    def held_nbytes(self) -> int | None:
        return self._end

    def _add(self, address: int, size: int) -> None:
        bisect.insort(self._by_size, (size, address))
        self._starts[address] = size
        self._ends[address + size] = size

    def _remove(self, address: int, size: int) -> None:
        del self._by_size[bisect.bisect_left(self._by_size, (size, address))]
        del self._starts[address]
        del self._ends[address + size]
