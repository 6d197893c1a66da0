"""The orders of XLA:CPU's two schedulers."""

import collections
from collections.abc import Iterable, Sequence
from typing import Any

from dafjax._memory.kernels import Kernel
from dafjax._memory.program import XlaProgram


def breadth_first(program: XlaProgram, kernels: Sequence[Kernel]) -> list[Kernel]:
    """Returns the kernels in the order of XLA:CPU's default scheduler.

    A kernel runs as soon as its operands are computed, in the order of a queue.
    """
    makers = _makers(kernels)
    # Each of several results takes one more turn of the queue.
    waits: dict[Any, int] = {}
    users: dict[Any, list[Any]] = collections.defaultdict(list)
    for kernel in kernels:
        sources = set()
        for value in kernel.reads:
            maker = makers.get(value)
            has_one = maker is not None and len(maker.op.results) == 1
            sources.add(maker if has_one else value)
        waits[kernel] = len(sources)
        for source in sources:
            users[source].append(kernel)
        if len(kernel.op.results) > 1:
            waits.update((value, 1) for value in kernel.op.results)
            users[kernel].extend(kernel.op.results)
    queue: collections.deque[Any] = collections.deque(program.arguments)
    queue.extend(kernel for kernel in kernels if waits[kernel] == 0)
    order: list[Kernel] = []
    while queue:
        item = queue.popleft()
        if isinstance(item, Kernel):
            order.append(item)
        for user in users[item]:
            waits[user] -= 1
            if waits[user] == 0:
                queue.append(user)
    return order


def depth_first(program: XlaProgram, kernels: Sequence[Kernel]) -> list[Kernel]:
    """Returns the kernels in the order of XLA's memory-optimized scheduler.

    It begins with the operand that has the most readers before it, and among equal ones
    with the largest.
    """
    makers = _makers(kernels)
    sources = {
        kernel: list(dict.fromkeys(makers[v] for v in kernel.reads if v in makers))
        for kernel in kernels
    }
    num_users = collections.Counter(s for found in sources.values() for s in found)
    sizes = {k: sum(program.nbytes[v] for v in k.op.results) for k in kernels}
    limits = len(kernels), sum(sizes.values())
    rank: dict[Kernel, tuple[int, int]] = {}
    for kernel in kernels:
        extra = max(num_users[kernel] - 1, 0) + sum(rank[s][0] for s in sources[kernel])
        total = sizes[kernel] + sum(rank[s][1] for s in sources[kernel])
        rank[kernel] = min(extra, limits[0]), min(total, limits[1])

    def last_first(found: Iterable[Kernel]) -> list[Kernel]:
        # A stack takes the last one first.
        return sorted(found, key=rank.__getitem__, reverse=True)[::-1]

    order: dict[Kernel, None] = {}
    stack = last_first(kernel for kernel in kernels if not num_users[kernel])
    visited: set[Kernel] = set()
    while stack:
        kernel = stack[-1]
        if kernel in visited:
            order.setdefault(stack.pop())
            continue
        visited.add(kernel)
        stack.extend(last_first(s for s in sources[kernel] if s not in visited))
    return list(order)


def _makers(kernels: Sequence[Kernel]) -> dict[int, Kernel]:
    return {value: kernel for kernel in kernels for value in kernel.op.results}
