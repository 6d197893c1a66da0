"""A static model of the temporary memory that XLA:CPU needs for a program.

It reads a jaxpr and compiles nothing. It follows those steps of XLA's compiler that
memory depends on:

1. It inlines calls, merges equal operations and drops unused ones (`_Program`).
2. It fuses cheap operations into the kernels that read their results (`_Fusion`).
3. It orders the kernels (`_breadth_first`, `_depth_first`).
4. It finds the first and last use of every buffer, computes in place, and reuses the
   buffers of results before these exist (`_Buffers`).

The largest sum of live buffers is the answer. `python -m benchmarks.memory_model`
compares it with the compiler's.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import jax.extend.core as jex_core
import numpy as np
from jax.extend.core import ClosedJaxpr

from dafjax._trace.equation import scan_arity, with_constants
from dafjax._trace.graph import CALLS, RULED_CALLS
from dafjax._trace.rules import rule_of


# Buffers begin at multiples of so many bytes.
_ALIGNMENT = 64

# A value that is known when the program is traced. It takes no temporary memory.
_CONSTANT = -1

_INLINED = {**CALLS, **RULED_CALLS, "shard_map": "jaxpr", "custom_vmap_call": "call"}

# The first result is the first operand; so are the others, if there are any.
_IDENTITIES = frozenset(
    """
    dafjax_first_order dafjax_pin dafjax_pin_late dafjax_row_major name
    optimization_barrier random_unwrap random_wrap reduce_precision
    sharding_constraint stop_gradient
    """.split()
)
_RESHAPES = frozenset(["expand_dims", "reshape", "squeeze"])
# Each element of the result is an element of an operand, or a constant.
_MOVES = frozenset(
    """
    bitcast_convert_type broadcast_in_dim dynamic_slice dynamic_update_slice gather
    iota pad rev slice transpose
    """.split()
)
# XLA computes these only once, even if several kernels read them.
_COMPUTED_ONCE = frozenset(
    """
    acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma div erf erf_inv
    erfc exp exp2 expm1 lgamma log log1p logistic pad pow rem rsqrt sin sinh sqrt
    tan tanh
    """.split()
)
_DRAWS = frozenset(["random_bits", "threefry2x32"])
_LOOPS = frozenset(["scan", "while"])
_SUMS_OF_DAFJAX = frozenset(["dafjax_sum_groups", "dafjax_sum_rows"])


def predict_temp_nbytes(closed: ClosedJaxpr, *, memory_optimized: bool = False) -> int:
    """Returns about as many bytes as XLA:CPU needs for temporary arrays.

    Args:
        closed: The program. Its arguments and results do not count.
        memory_optimized: Whether XLA runs with its memory-optimized scheduler. Its
            default scheduler on CPUs runs each operation as early as possible.
    """
    return _peak(closed, (0, 0), memory_optimized=memory_optimized)


def _peak(
    closed: ClosedJaxpr, carry: tuple[int, int], *, memory_optimized: bool
) -> int:
    """Returns the bytes at the peak of a program, or of the body of a loop.

    Args:
        closed: The program.
        carry: For the body of a loop, the number of arguments before the carried ones,
            and the number of these; `(0, 0)` for a program.
        memory_optimized: Whether XLA runs its memory-optimized scheduler.
    """
    program = _Program(memory_optimized=memory_optimized)
    program.read(closed)
    kernels = _Fusion(program).kernels()
    order = _depth_first if memory_optimized else _breadth_first
    return _Buffers(program, carry).peak(order(program, kernels))


@final
@dataclasses.dataclass(eq=False)
class _Op:
    """An operation. Values are given by number.

    Attributes:
        name: The primitive.
        operands: The values that it reads.
        results: The values that it makes.
        params: The parameters of the primitive.
        inner_nbytes: Bytes that it needs while it runs.
        carried: Of a loop, the operands whose buffers hold the first results.
    """

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    params: Mapping[str, Any]
    inner_nbytes: int = 0
    carried: tuple[int, ...] = ()

    @functools.cached_property
    def is_elementwise(self) -> bool:
        return rule_of(self.name).is_elementwise

    @functools.cached_property
    def is_reduction(self) -> bool:
        """Whether it sums over axes, or the like: in a kernel of a library."""
        return self.name in ("argmax", "argmin") or (
            self.name.startswith("reduce_") and not self.name.startswith("reduce_w")
        )

    @property
    def is_fusible(self) -> bool:
        """Whether it can compute its operands in the same kernel."""
        return self.is_elementwise or self.name in _MOVES | _RESHAPES

    @property
    def is_product(self) -> bool:
        return self.name == "dot_general"

    def aliased(self, position: int) -> int | None:
        """Returns the operand whose buffer a result takes over, if there is one."""
        if self.name == "dafjax_hold":
            return self.operands[self.params["num_awaited"] + position]
        if self.name in _LOOPS and position < len(self.carried):
            return self.carried[position]
        if self.name == "dynamic_update_slice" or self.name.startswith("scatter"):
            return self.operands[0]
        return None


@final
class _Program:
    """The operations of a program, with calls inlined and equal operations merged.

    Attributes:
        avals: Shape and dtype of every value.
        nbytes: Bytes of every value.
        ops: The operations, in order.
        arguments: The values that the program is called with.
        outputs: The values that it returns.
        users: The operations that read each value; set by `read`.
        makers: The operation that makes each value; set by `read`.
    """

    def __init__(self, *, memory_optimized: bool) -> None:
        self._inner = functools.partial(_peak, memory_optimized=memory_optimized)
        self._known: dict[Any, tuple[int, ...]] = {}
        self._zeros: set[int] = set()
        self.avals: list[Any] = []
        self.nbytes: list[int] = []
        self.ops: list[_Op] = []
        self.arguments: list[int] = []
        self.outputs: list[int] = []
        self.users: dict[int, list[_Op]] = collections.defaultdict(list)
        self.makers: dict[int, _Op] = {}

    def read(self, closed: ClosedJaxpr) -> None:
        """Adds the operations of a program that its results depend on."""
        self.arguments = [self._new_value(var.aval) for var in closed.jaxpr.invars]
        self.outputs = self._splice(closed, self.arguments)
        needed = set(self.outputs)
        live = []
        for op in reversed(self.ops):
            if needed.intersection(op.results):
                live.append(op)
                needed.update(op.operands)
        for op in reversed(live):
            self.makers.update((value, op) for value in op.results)
            for value in dict.fromkeys(op.operands):
                self.users[value].append(op)
        self.ops = list(self._without_turned_products(reversed(live)))

    def _without_turned_products(self, ops: Iterable[_Op]) -> Iterator[_Op]:
        """Leaves out transposes of products: a product writes its result transposed."""
        for op in ops:
            if op.name == "transpose" and op.operands[0] not in self.outputs:
                product = self.makers.get(op.operands[0])
                if product and product.is_product and self._is_read_once(op.operands):
                    product.results = op.results
                    self.makers[op.results[0]] = product
                    continue
            yield op

    def _is_read_once(self, values: Sequence[int]) -> bool:
        return len(self.users[values[0]]) == 1

    def _new_value(self, aval: Any) -> int:
        itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 0)
        self.avals.append(aval)
        self.nbytes.append(math.prod(getattr(aval, "shape", ())) * itemsize)
        return len(self.avals) - 1

    def shape(self, value: int) -> tuple[int, ...]:
        """Returns the shape of a value; `()` for a constant."""
        return () if value == _CONSTANT else getattr(self.avals[value], "shape", ())

    def _add(
        self,
        name: str,
        operands: tuple[int, ...],
        avals: Sequence[Any],
        params: Mapping[str, Any],
        **more: Any,
    ) -> tuple[int, ...]:
        key = (name, operands, tuple(sorted(params.items())), tuple(avals))
        try:
            known = self._known.get(key)
        except TypeError:
            key = known = None
        if known is not None:
            return known
        results = tuple(map(self._new_value, avals))
        self.ops.append(_Op(name, operands, results, params, **more))
        if key is not None:
            self._known[key] = results
        return results

    def _splice(self, closed: ClosedJaxpr, arguments: Sequence[int]) -> list[int]:
        """Adds the operations of a program, and returns its results."""
        jaxpr = closed.jaxpr
        values: dict[Any, int] = dict(zip(jaxpr.invars, arguments, strict=True))

        def find(atom: Any) -> int:
            if isinstance(atom, jex_core.Literal):
                return _CONSTANT
            return values.get(atom, _CONSTANT)

        for eqn in jaxpr.eqns:
            operands = tuple(map(find, eqn.invars))
            results = self._unless_zero(eqn, operands)
            values.update(zip(eqn.outvars, results, strict=True))
        return list(map(find, jaxpr.outvars))

    def _unless_zero(self, eqn: Any, operands: tuple[int, ...]) -> Sequence[int]:
        """Returns the results of an equation; a sum with zeros is the other operand."""
        name = eqn.primitive.name
        zeros = [
            _is_zero(atom) if value == _CONSTANT else value in self._zeros
            for atom, value in zip(eqn.invars, operands, strict=True)
        ]
        if name in ("add", "add_any", "sub") and any(zeros):
            kept = operands[0] if zeros[1] else operands[1]
            is_sum = name != "sub" or zeros[1]
            if is_sum and self.shape(kept) == eqn.outvars[0].aval.shape:
                return (kept,)
        results = self._results(eqn, operands)
        if zeros == [True] and (name in _RESHAPES or name == "broadcast_in_dim"):
            self._zeros.update(results)
        return results

    def _results(self, eqn: Any, operands: tuple[int, ...]) -> Sequence[int]:
        """Adds the operations that XLA makes of an equation; returns its results."""
        name, params = eqn.primitive.name, eqn.params
        avals = [var.aval for var in eqn.outvars]
        if name in _INLINED and _INLINED[name] in params:
            return self._splice(with_constants(params[_INLINED[name]]), operands)
        if name in _IDENTITIES:
            return operands
        if name in _SUMS_OF_DAFJAX:
            return self._add("reduce_sum", operands, avals, params)
        add = _SPECIAL.get(name)
        if add is not None:
            return add(self, eqn, operands, avals)
        if rule_of(name).is_elementwise and len(avals) == 1:
            operands = tuple(self._widened(value, avals[0]) for value in operands)
        return self._add(name, operands, avals, params)

    def _widened(self, value: int, aval: Any) -> int:
        """Returns an operand with the shape of the result, as XLA needs it."""
        if value == _CONSTANT or self.shape(value) == aval.shape:
            return value
        wide = aval.update(dtype=self.avals[value].dtype)
        return self._add("broadcast_in_dim", (value,), [wide], {})[0]

    def _add_barrier(self, eqn: Any, operands: Any, avals: Any) -> Sequence[int]:
        awaited = eqn.params["num_awaited"]
        held = self._add("dafjax_hold", operands, avals[awaited:], eqn.params)
        return (*operands[:awaited], *held)

    def _add_draw(self, eqn: Any, operands: Any, avals: Any) -> Sequence[int]:
        inner = sum(4 * math.prod(aval.shape) for aval in avals)
        name, params = eqn.primitive.name, eqn.params
        return self._add(name, operands, avals, params, inner_nbytes=inner)

    def _add_split(self, eqn: Any, operands: Any, avals: Any) -> Sequence[int]:
        return [
            self._add("slice", operands, [aval], {"number": n, **eqn.params})[0]
            for n, aval in enumerate(avals)
        ]

    def _add_branches(self, eqn: Any, operands: Any, avals: Any) -> Sequence[int]:
        branches = list(map(with_constants, eqn.params["branches"]))
        platforms = eqn.params.get("branches_platforms")
        if platforms:
            on_cpus = (p is None or "cpu" in p for p in platforms)
            pairs = zip(branches, on_cpus, strict=True)
            body = next(branch for branch, is_chosen in pairs if is_chosen)
            return self._splice(body, operands[1:])
        inner = max(self._inner(branch, (0, 0)) for branch in branches)
        return self._add("cond", operands, avals, {}, inner_nbytes=inner)

    def _add_while(self, eqn: Any, operands: Any, avals: Any) -> Sequence[int]:
        consts = eqn.params["body_nconsts"]
        body = with_constants(eqn.params["body_jaxpr"])
        carried = operands[eqn.params["cond_nconsts"] + consts :]
        return self._add_loop(body, (consts, len(carried)), carried, operands, avals)

    def _add_scan(self, eqn: Any, operands: Any, avals: Any) -> Sequence[int]:
        consts, num_carried = scan_arity(eqn.params)
        body = with_constants(eqn.params["jaxpr"])
        carried = operands[consts : consts + num_carried]
        return self._add_loop(body, (consts, num_carried), carried, operands, avals)

    def _add_loop(
        self, body: Any, carry: Any, carried: Any, operands: Any, avals: Any
    ) -> Sequence[int]:
        inner = self._inner(body, carry)
        more = {"inner_nbytes": inner, "carried": carried}
        # Loops are never merged: the body is no part of the parameters.
        return self._add("scan", operands, avals, {"number": len(self.ops)}, **more)

    def _add_product(self, eqn: Any, operands: Any, avals: Any) -> Sequence[int]:
        """Adds a product, after copies of operands whose axes are in another order."""
        contracted, batch = eqn.params["dimension_numbers"]
        ready = []
        for number, (value, c, b) in enumerate(
            zip(operands, contracted, batch, strict=True)
        ):
            shape = self.shape(value)
            free = [d for d in range(len(shape)) if d not in (*c, *b)]
            order = (*b, *free, *c) if number == 0 else (*b, *c, *free)
            order = tuple(d for d in order if shape[d] != 1) if shape else ()
            # The product of two matrices reads a transposed one as it is.
            is_read_as_it_is = len(order) == 2 and not b
            if list(order) != sorted(order) and not is_read_as_it_is:
                copied = {"order": order}
                (value,) = self._add("transpose", (value,), [self.avals[value]], copied)
            ready.append(value)
        return self._add("dot_general", tuple(ready), avals, eqn.params)

    def _add_convolution(self, eqn: Any, operands: Any, avals: Any) -> Sequence[int]:
        """Adds a convolution, and copies to and from the layout with channels last."""
        numbers = eqn.params["dimension_numbers"]
        last = len(numbers.lhs_spec) - 1
        images, kernel = (0, last, *range(1, last)), (last, last - 1, *range(last - 1))
        ready = []
        for value, spec, wanted in zip(
            operands,
            (numbers.lhs_spec, numbers.rhs_spec),
            (images, kernel),
            strict=True,
        ):
            if tuple(spec) != wanted and value != _CONSTANT:
                copied = {"spec": tuple(spec)}
                (value,) = self._add("transpose", (value,), [self.avals[value]], copied)
            ready.append(value)
        groups = eqn.params["batch_group_count"]
        # With groups, XLA:CPU computes all pairs of groups, and selects.
        nbytes = avals[0].size * avals[0].dtype.itemsize
        inner = 2 * groups * nbytes if groups > 1 else 0
        results = self._add(
            eqn.primitive.name, tuple(ready), avals, eqn.params, inner_nbytes=inner
        )
        if tuple(numbers.out_spec) == images:
            return results
        copied = {"spec": tuple(numbers.out_spec)}
        return self._add("transpose", results, avals, copied)


_Special = Callable[[_Program, Any, tuple[int, ...], list[Any]], Sequence[int]]
_SPECIAL: Mapping[str, _Special] = {
    "cond": _Program._add_branches,
    "conv_general_dilated": _Program._add_convolution,
    "dafjax_tie": _Program._add_barrier,
    "dot_general": _Program._add_product,
    "scan": _Program._add_scan,
    "split": _Program._add_split,
    "while": _Program._add_while,
    **dict.fromkeys(_DRAWS, _Program._add_draw),
}


def _is_zero(atom: Any) -> bool:
    value = np.asarray(getattr(atom, "val", 1))
    # Tangents of integers have a dtype without numbers.
    return value.ndim == 0 and value.dtype.kind in "biufc" and value == 0


@final
@dataclasses.dataclass(frozen=True, eq=False)
class _Kernel:
    """An operation whose results are written to memory, with those fused into it.

    Attributes:
        op: The operation.
        reads: The values that it reads from memory; for each, whether the element at
            the same place is all that an element of the result needs of it.
    """

    op: _Op
    reads: Mapping[int, bool]


@final
class _Fusion:
    """Finds the values that are written to memory.

    A value is written if something that reads it is a kernel of its own, such as a
    matrix product, or if it is costly and several kernels read it.
    """

    def __init__(self, program: _Program) -> None:
        self._program = program
        # The kernels that a fused operation is computed in.
        self._kernels_of: dict[_Op, set[_Op]] = {}
        # Operations that are computed in the kernel of a reduction. They are computed
        # nowhere else.
        self._in_reductions: set[_Op] = set()
        # Written operations that other kernels compute again, instead of reading them.
        self._repeated: set[_Op] = set()
        for op in reversed(program.ops):
            self._place(op)

    def _place(self, op: _Op) -> None:
        """Finds the kernels that compute an operation."""
        (result, *others) = op.results
        if others or not op.is_fusible or result in self._program.outputs:
            return
        users = self._program.users[result]
        can_join = [self._can_join(op, user) for user in users]
        kernels: set[_Op] = set()
        for user in users:
            kernels |= self._kernels_of.get(user, {user})
        if not all(can_join):
            if op.name not in _COMPUTED_ONCE and self._is_cheap_to_repeat(op):
                self._repeated.add(op)
        elif op.name not in _COMPUTED_ONCE or len(kernels) == 1:
            self._kernels_of[op] = kernels
            if any(map(self._is_for_reduction, users)):
                self._in_reductions.add(op)

    def _is_for_reduction(self, op: _Op) -> bool:
        return op.is_reduction or op in self._in_reductions

    def _can_join(self, op: _Op, user: _Op) -> bool:
        """Returns whether the kernel of a user can compute an operation."""
        (result,) = op.results
        if self._is_for_reduction(user):
            return len(self._program.users[result]) == 1
        if op.name in _COMPUTED_ONCE and user.name in ("broadcast_in_dim", "gather"):
            # Each element would be computed many times.
            nbytes = self._program.nbytes
            return nbytes[user.results[0]] <= nbytes[result]
        return user.is_fusible

    def _is_cheap_to_repeat(self, op: _Op) -> bool:
        """Returns whether the operands are at most as large as the result."""
        if not (op.is_elementwise or op.name in _RESHAPES | {"broadcast_in_dim"}):
            return False
        nbytes, shape = self._program.nbytes, self._program.shape
        (result,) = op.results
        operands = {value for value in op.operands if value != _CONSTANT}
        large = [
            value
            for value in operands
            if len(shape(value)) >= len(shape(result)) and not self._is_spread(value)
        ]
        return len(large) <= 1 or sum(nbytes[v] for v in operands) <= nbytes[result]

    def _is_spread(self, value: int) -> bool:
        maker = self._program.makers.get(value)
        return maker is not None and maker.name in ("broadcast_in_dim", "iota")

    def kernels(self) -> list[_Kernel]:
        """Returns the kernels in the order of the program."""
        found: list[_Kernel] = []
        # For each value, the buffers that a kernel reads to have it.
        of_value: dict[int, Mapping[int, bool]] = {
            value: {value: True} for value in self._program.arguments
        }
        of_repeated: dict[int, Mapping[int, bool]] = {}
        for op in self._program.ops:
            reads: dict[int, bool] = {}
            for value in op.operands:
                if value == _CONSTANT:
                    continue
                leaves = of_value[value]
                maker = self._program.makers.get(value)
                if value in of_repeated and maker and self._can_join(maker, op):
                    leaves = of_repeated[value]
                same = op.is_elementwise and self._program.shape(
                    value
                ) == self._program.shape(op.results[0])
                for leaf, is_same in leaves.items():
                    reads[leaf] = reads.get(leaf, True) and is_same and same
            if op in self._kernels_of:
                of_value[op.results[0]] = reads
                continue
            found.append(_Kernel(op, reads))
            for result in op.results:
                of_value[result] = {result: not self._is_reshaped(op)}
            if op in self._repeated:
                of_repeated[op.results[0]] = reads
        return found

    def _is_reshaped(self, op: _Op) -> bool:
        """Returns whether XLA makes a matrix of a product's result, and reshapes it."""
        if not op.is_product:
            return False
        contracted, batch = op.params["dimension_numbers"]
        free = (
            len(self._program.shape(value)) - len(c) - len(b)
            for value, c, b in zip(op.operands, contracted, batch, strict=True)
        )
        return max(free) > 1 or len(batch[0]) > 1


def _makers(kernels: Sequence[_Kernel]) -> dict[int, _Kernel]:
    return {value: kernel for kernel in kernels for value in kernel.op.results}


def _breadth_first(program: _Program, kernels: Sequence[_Kernel]) -> list[_Kernel]:
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
    order: list[_Kernel] = []
    while queue:
        item = queue.popleft()
        if isinstance(item, _Kernel):
            order.append(item)
        for user in users[item]:
            waits[user] -= 1
            if waits[user] == 0:
                queue.append(user)
    return order


def _depth_first(program: _Program, kernels: Sequence[_Kernel]) -> list[_Kernel]:
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
    rank: dict[_Kernel, tuple[int, int]] = {}
    for kernel in kernels:
        extra = max(num_users[kernel] - 1, 0) + sum(rank[s][0] for s in sources[kernel])
        total = sizes[kernel] + sum(rank[s][1] for s in sources[kernel])
        rank[kernel] = min(extra, limits[0]), min(total, limits[1])

    def last_first(found: Iterable[_Kernel]) -> list[_Kernel]:
        # A stack takes the last one first.
        return sorted(found, key=rank.__getitem__, reverse=True)[::-1]

    order: dict[_Kernel, None] = {}
    stack = last_first(kernel for kernel in kernels if not num_users[kernel])
    visited: set[_Kernel] = set()
    while stack:
        kernel = stack[-1]
        if kernel in visited:
            order.setdefault(stack.pop())
            continue
        visited.add(kernel)
        stack.extend(last_first(s for s in sources[kernel] if s not in visited))
    return list(order)


@final
class _Buffers:
    """The buffers of a program: when each begins and ends, and its size.

    A buffer is called by the value that is written to it first.
    """

    def __init__(self, program: _Program, carry: tuple[int, int]) -> None:
        self._program = program
        first, count = carry
        arguments = program.arguments[first : first + count]
        # A loop writes the new value that it carries into the buffer of the old one.
        self._old = dict(zip(program.outputs, arguments, strict=False))
        self._is_loop = count > 0
        self._outputs = set(program.outputs)
        # Buffers that are not temporary: of arguments and results.
        self._given: set[int] = set(program.arguments)
        self._buffer: dict[int, int] = {v: v for v in program.arguments}
        # The live values in each buffer.
        self._num_live = collections.Counter(program.arguments)
        self._uses: collections.Counter[int] = collections.Counter()
        self._start: dict[int, int] = {}
        self._end: dict[int, int] = {}

    def peak(self, order: Sequence[_Kernel]) -> int:
        """Returns the largest sum of live temporary buffers."""
        for kernel in order:
            self._uses.update(kernel.reads.keys())
        for time, kernel in enumerate(order):
            self._run(time, kernel)
        for value in self._outputs.intersection(self._buffer):
            self._end[self._buffer[value]] = len(order) - 1
        change = [0] * (len(order) + 1)
        for buffer in self._beside_results():
            nbytes = self._program.nbytes[buffer]
            aligned = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
            change[self._start[buffer]] += aligned
            change[self._end[buffer] + 1] -= aligned
        live = peak = 0
        for kernel, step in zip(order, change, strict=False):
            live += step
            peak = max(peak, live + kernel.op.inner_nbytes)
        return peak

    def _run(self, time: int, kernel: _Kernel) -> None:
        """Finds buffers for the results of a kernel, and ends others."""
        free = [v for v in kernel.reads if self._is_free_after(v)]
        if self._is_view(kernel):
            self._buffer[kernel.op.results[0]] = self._buffer[kernel.op.operands[0]]
            self._num_live[self._buffer[kernel.op.results[0]]] += 1
            free = []
        for position, value in enumerate(kernel.op.results):
            if value in self._buffer:
                continue
            source = self._source(kernel, position, free)
            if source is None:
                self._buffer[value] = value
                self._start[value] = time
                if self._has_place(kernel, value):
                    self._given.add(value)
            else:
                free.remove(source)
                self._buffer[value] = self._buffer[source]
                if value in self._outputs and not self._is_loop:
                    self._given.add(self._buffer[source])
            self._num_live[self._buffer[value]] += 1
        for value in (*kernel.reads, *kernel.op.results):
            self._end[self._buffer[value]] = time
        self._uses.subtract(kernel.reads.keys())
        for value in (*kernel.reads, *kernel.op.results):
            if not self._uses[value]:
                self._num_live[self._buffer[value]] -= 1

    def _is_view(self, kernel: _Kernel) -> bool:
        """Returns whether a kernel only gives a written value another shape."""
        op = kernel.op
        is_written = op.operands[:1] == tuple(kernel.reads)
        is_result = op.results[0] in self._outputs
        return op.name in _RESHAPES and is_written and not is_result

    def _is_free_after(self, value: int) -> bool:
        """Returns whether a value's buffer is free after the next use of the value."""
        buffer = self._buffer[value]
        is_last = self._uses[value] == 1 and self._num_live[buffer] == 1
        return is_last and buffer not in self._given

    def _has_place(self, kernel: _Kernel, value: int) -> bool:
        """Returns whether a result is written to where the program returns it."""
        old = self._old.get(value)
        if old is None:
            return value in self._outputs
        is_last_use = kernel.reads.get(old, False) and self._uses[old] == 1
        return self._uses[old] == 0 or is_last_use

    def _source(
        self, kernel: _Kernel, position: int, free: Sequence[int]
    ) -> int | None:
        """Returns the value whose buffer a result takes over, if there is one."""
        op, value = kernel.op, kernel.op.results[position]
        aliased = op.aliased(position)
        if aliased is not None:
            return aliased if aliased in free else None
        if value in self._outputs or not op.is_fusible or self._is_shared(value):
            return None
        nbytes = self._program.nbytes
        fitting = (v for v in free if kernel.reads[v] and nbytes[v] == nbytes[value])
        return next(fitting, None)

    def _is_shared(self, value: int) -> bool:
        """Returns whether another operation takes over the buffer of a value.

        XLA never computes such a value in the buffer of an operand.
        """
        return any(
            value == user.aliased(position)
            for user in self._program.users[value]
            if user.name in ("dafjax_hold", *_LOOPS)
            for position in range(len(user.results))
        )

    def _beside_results(self) -> Iterator[int]:
        """Finds the temporary buffers that do not fit into buffers of results.

        XLA places the largest buffers first. One that ends before a result begins can
        be where the result will be.
        """
        nbytes = self._program.nbytes
        results = [] if self._is_loop else self._given.intersection(self._start)
        taken: dict[int, list[int]] = {
            r: [] for r in sorted(results, key=nbytes.__getitem__)
        }
        temporary = [b for b in self._start if b not in self._given]
        for buffer in sorted(temporary, key=lambda b: (-nbytes[b], self._start[b])):
            for result, others in taken.items():
                fits = nbytes[result] >= nbytes[buffer]
                is_over = self._end[buffer] < self._start[result]
                if (
                    fits
                    and is_over
                    and not any(map(functools.partial(self._overlap, buffer), others))
                ):
                    others.append(buffer)
                    break
            else:
                yield buffer

    def _overlap(self, first: int, second: int) -> bool:
        return not (
            self._end[first] < self._start[second]
            or self._end[second] < self._start[first]
        )
