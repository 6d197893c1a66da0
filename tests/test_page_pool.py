"""Page pools from Python: a model of their content, forks, threads, settings."""

import copy
import gc
import re
import subprocess
import sys
import threading
import uuid

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from dafjax._native import _cpu, pool_hash
from dafjax.codecs import Affine
from dafjax.stores import (
    AdaptiveGrowth,
    FixedGrowth,
    PagePool,
    PoolExhausted,
    PoolStats,
    SiteStats,
    StaleHandle,
)
from tests.helpers import slow


PAGE = 1 << 16
TILE = 64


def _pool(budget=None, **options):
    return _cpu.Pool(f"test {uuid.uuid4()}", budget=budget, **options)


def _bytes(seed, nbytes):
    """Returns bytes that depend on the seed and on their place."""
    x = np.arange(nbytes, dtype=np.uint32) * np.uint32(2654435761) + np.uint32(seed)
    return (x >> 13).astype(np.uint8)


def _put(pool, *, run=1, device=0, site=0, bits=8, tiles=100, metadata=200, seed=0):
    codes = _bytes(seed, tiles * TILE * bits)
    return pool.put(run, device, site, bits, codes, _bytes(seed + 1, metadata))


def _python(program, *arguments):
    """Runs a program in a process; returns its output, errors and exit status."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip(), done.stderr, done.returncode


class _Kept:
    """The expected content of an entry: upper planes of its codes, and metadata."""

    def __init__(self, *, run, device, bits, tiles, metadata, seed):
        self.run = run
        self.device = device
        self.bits = bits
        self.codes = _bytes(seed, tiles * TILE * bits)
        self.metadata = _bytes(seed + 1, metadata)
        self.tiles = tiles
        self.reads = 0
        self.is_spent = False

    def count(self, reads):
        """Counts a load by one who says how many there are in a backward pass."""
        if reads > 0:
            self.reads += 1
            self.is_spent |= self.reads >= reads

    def check(self, got):
        bits_put, bits_kept, codes, metadata = got
        assert bits_put in (1, 2, 4, 8)
        assert bits_kept in (0, 1, 2, 4, 8)
        assert bits_kept <= bits_put <= 8
        # Precision that is lost does not come back.
        assert bits_kept <= self.bits
        self.bits = bits_kept
        assert codes.size == self.tiles * TILE * bits_kept
        np.testing.assert_array_equal(codes, self.codes[: codes.size])
        np.testing.assert_array_equal(metadata, self.metadata)


class PoolMachine(RuleBasedStateMachine):
    """Random operations on a pool, beside a dictionary of its expected content."""

    steps = 0

    def __init__(self):
        super().__init__()
        self.kept = {}
        self.gone = set()
        self.run = 1
        # For each device, the runs with entries, in the order of their start.
        self.started = {0: [], 1: []}

    @initialize(in_flight=st.integers(1, 3), pages=st.integers(3, 40))
    def make(self, in_flight, pages):
        self.in_flight = in_flight
        self.limits = {pages * PAGE}
        self.pool = _pool(pages * PAGE, executions_in_flight=in_flight)

    def is_over(self, kept):
        started = self.started[kept.device]
        return len(started) - 1 - started.index(kept.run) >= self.in_flight

    def choose(self, number):
        return list(self.kept)[number % len(self.kept)] if self.kept else None

    def forget(self, handle):
        self.gone.add(handle)
        del self.kept[handle]

    @rule(
        back=st.integers(0, 1),
        device=st.integers(0, 1),
        site=st.integers(0, 7),
        bits=st.sampled_from([1, 2, 4, 8]),
        tiles=st.one_of(st.integers(0, 300), st.integers(0, 3000)),
        metadata=st.one_of(st.integers(0, 2000), st.integers(0, 100_000)),
        seed=st.integers(0, 1 << 30),
    )
    def put(self, back, device, site, bits, tiles, metadata, seed):
        run = self.run - back
        if run not in self.started[device]:
            self.started[device].append(run)
        shape = {"device": device, "bits": bits, "tiles": tiles}
        shape |= {"metadata": metadata, "seed": seed, "run": run}
        try:
            handle = tuple(_put(self.pool, site=site, **shape))
        except PoolExhausted:
            return
        assert handle not in self.kept
        assert handle not in self.gone
        self.kept[handle] = _Kept(**shape)

    @rule(number=st.integers(0, 1 << 30), reads=st.integers(0, 3))
    def get(self, number, reads):
        handle = self.choose(number)
        if handle is None:
            return
        try:
            got = self.pool.get(0, 0, handle, reads)
        except StaleHandle:
            got = None
        if got is not None:
            self.kept[handle].check(got)
            self.kept[handle].count(reads)
        else:
            assert self.is_over(self.kept[handle])
            self.forget(handle)

    @rule(number=st.integers(0, 1 << 30))
    def get_what_is_gone(self, number):
        if self.gone:
            handle = list(self.gone)[number % len(self.gone)]
            with pytest.raises(StaleHandle):
                self.pool.get(0, 0, handle)

    @rule(
        number=st.integers(0, 1 << 30),
        word=st.integers(0, 3),
        change=st.integers(1, (1 << 32) - 1),
    )
    def forge(self, number, word, change):
        handle = list(self.choose(number) or (0, 0, 0, 0))
        handle[word] ^= change
        with pytest.raises(StaleHandle, match="no handle of this pool"):
            self.pool.get(0, 0, handle)

    @rule(length=st.sampled_from([0, 1, 2, 3, 5, 8]))
    def truncate(self, length):
        with pytest.raises(StaleHandle, match="instead of 4"):
            self.pool.get(0, 0, [7] * length)

    @rule(tiles=st.integers(0, 500))
    def put_and_abort(self, tiles):
        if self.run not in self.started[0]:
            self.started[0].append(self.run)
        codes = _bytes(0, tiles * TILE * 8)
        try:
            handle = self.pool.put(self.run, 0, 3, 8, codes, codes[:9], commit=False)
        except PoolExhausted:
            return
        with pytest.raises(ValueError, match="still being written"):
            self.pool.get(0, 0, handle)
        self.pool.abort(handle)
        self.gone.add(tuple(handle))

    @rule()
    def next_execution(self):
        self.run += 1

    @rule(site=st.integers(0, 7), bits=st.sampled_from([0, 1, 2, 4, 8]))
    def set_bits(self, site, bits):
        self.pool.set_bits(site, bits)

    @rule(site=st.integers(0, 7), importance=st.floats())
    def set_importance(self, site, importance):
        self.pool.set_importance(site, importance)
        self.pool.add_importance(site, importance)

    @rule(pages=st.integers(0, 40))
    def set_budget(self, pages):
        self.pool.budget = pages * PAGE
        self.limits.add(pages * PAGE)

    @rule()
    def collect(self):
        self.pool.collect()
        gone = [h for h, k in self.kept.items() if self.is_over(k) or k.is_spent]
        for handle in gone:
            with pytest.raises(StaleHandle, match="its execution is over"):
                self.pool.get(0, 0, handle)
            self.forget(handle)

    @invariant()
    def nothing_is_violated(self):
        type(self).steps += 1
        assert self.pool.violation() is None
        stats = self.pool.stats()
        live = sum(not self.is_over(kept) for kept in self.kept.values())
        assert stats["entries_live"] == live
        assert stats["committed"]["current"] <= max(self.limits)
        assert stats["bytes"]["current"] <= stats["pages_used"] * PAGE


@pytest.mark.parametrize("least", [4_000, slow(50_000)])
def test_a_pool_does_what_its_model_does(least):
    options = settings(
        # Some examples are shorter than they may be.
        max_examples=least // 80,
        stateful_step_count=100,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    PoolMachine.steps = 0
    run_state_machine_as_test(PoolMachine, settings=options)
    assert PoolMachine.steps >= least


def test_a_handle_of_another_pool_is_refused():
    first, second = _pool(), _pool()
    handle = _put(first)
    _put(second)
    with pytest.raises(StaleHandle, match="no handle of this pool"):
        second.get(1, 0, handle)
    first.get(1, 0, handle)


FORK = """
import os
import numpy as np
from dafjax.stores import PagePool, StaleHandle

codes = np.arange(64 * 8 * 100, dtype=np.uint8)
pool = PagePool("1MiB", name="forked")
handle = pool._pool.put(1, 0, 0, 8, codes, codes[:99])
child = os.fork()
if child == 0:
    code = 1
    try:
        pool._pool.get(1, 0, handle)
    except StaleHandle:
        own = pool._pool.put(1, 0, 0, 8, codes, codes[:99])
        np.testing.assert_array_equal(pool._pool.get(1, 0, own)[2], codes)
        assert (pool.stats().entries, pool.budget) == (1, 1 << 20)
        assert pool._pool.violation() is None
        code = 0
    finally:
        os._exit(code)
_, status = os.waitpid(child, 0)
np.testing.assert_array_equal(pool._pool.get(1, 0, handle)[2], codes)
print(os.waitstatus_to_exitcode(status))
"""


# In a process of its own: JAX warns of forks.
def test_a_forked_child_starts_empty_and_works():
    assert _python(FORK) == ("0", "", 0)


def test_threads_that_dispatch_get_what_they_put_or_an_error():
    pool = _pool(4 << 20, executions_in_flight=4)
    runs = iter(range(1, 1000))
    lock = threading.Lock()
    wrong, stale = [], []

    def work(device):
        for _ in range(40):
            with lock:
                run = next(runs)
            shapes = [
                {"run": run, "device": device, "bits": 8, "tiles": 37 * i,
                 "metadata": 64 * i, "seed": run * 100 + i}
                for i in range(8)
            ]  # fmt: skip
            handles = [_put(pool, **shape) for shape in shapes]
            for handle, shape in zip(handles, shapes, strict=True):
                try:
                    _Kept(**shape).check(pool.get(run, device, handle))
                except StaleHandle:
                    # Others may start any number of executions in between.
                    stale.append(run)
                except Exception as error:
                    wrong.append(error)

    threads = [threading.Thread(target=work, args=(t % 2,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(stale) < 4 * 40 * 8
    assert pool.violation() is None


def test_a_process_ends_cleanly_with_live_entries():
    program = (
        "import numpy as np; from dafjax._native import _cpu; import dafjax;"
        "pool = dafjax.stores.PagePool('8MiB', name='at exit');"
        "codes = np.zeros(64 * 8 * 500, np.uint8);"
        "handles = [pool._pool.put(1, 0, i, 8, codes, codes[:99]) for i in range(9)];"
        "held = pool._pool.put(2, 0, 1, 8, codes, codes[:99], commit=False);"
        "print(pool.stats().live_entries)"
    )
    assert _python(program) == ("1", "", 0)


def test_without_memory_of_the_system_residuals_lose_planes_or_are_refused():
    program = (
        "import resource, pathlib, numpy as np; from dafjax._native import _cpu;"
        "import dafjax.stores as s; codes = np.zeros(64 * 8 * 4000, np.uint8);"
        "pages = int(pathlib.Path('/proc/self/statm').read_text().split()[0]);"
        "most = pages * resource.getpagesize() + (96 << 20);"
        "resource.setrlimit(resource.RLIMIT_AS, (most, most));"
        "pool = s.PagePool(name='poor');"
        "[pool._pool.put(1, 0, i, 8, codes, codes[:999]) for i in range(200)];"
        "stats = pool.stats(); assert pool._pool.violation() is None;"
        "print(stats.live_entries, stats.degraded_nbytes > 0, stats.evictions > 0)"
    )
    assert _python(program) == ("200 True True", "", 0)


def test_a_budget_holds_from_the_next_execution():
    with PagePool("16MiB") as pool:
        for i in range(40):
            _put(pool._pool, run=1, site=i, tiles=1000)
        used = pool.stats().committed_nbytes
        pool.budget = "1MiB"
        assert pool.budget == 1 << 20
        assert pool.stats().committed_nbytes == used
        _put(pool._pool, run=2, site=0)
        assert pool.stats().committed_nbytes <= 1 << 20
        pool.budget = None
        assert pool.budget is None
        degraded = pool.stats().degraded_nbytes
        for i in range(40):
            _put(pool._pool, run=3, site=i, tiles=1000)
        assert pool.stats().degraded_nbytes == degraded
        assert pool.stats().budget is None


def test_statistics_tell_what_was_degraded():
    with PagePool("1MiB") as pool:
        pool._pool.set_importance(0, 1e6)
        pool._pool.set_importance(1, 1.0)
        _put(pool._pool, site=1, tiles=1500)
        _put(pool._pool, site=0, tiles=1500)
        stats = pool.stats()
        assert isinstance(stats, PoolStats)
        most, least = (stats.sites[f"site {site:016x}"] for site in (0, 1))
        assert isinstance(least, SiteStats)
        assert (least.bits_put, least.max_bits, least.puts) == (8.0, 8, 1)
        assert least.bits_kept < most.bits_kept
        assert least.evictions == stats.evictions > 0
        lost = (8 - least.bits_kept) * 1500 * TILE
        lost += (8 - most.bits_kept) * 1500 * TILE
        assert stats.degraded_nbytes == lost
        assert most.importance is None or most.importance == 1e6
        assert 0.9 < stats.utilization <= 1


def test_bits_of_a_site_hold_from_the_next_execution():
    with PagePool() as pool:
        pool.codec(Affine(bits=8), site="x")
        site = pool_hash("x")
        _put(pool._pool, run=1, site=site)
        pool.set_bits("x", 2)
        assert pool._pool.get(1, 0, _put(pool._pool, run=1, site=site))[0] == 8
        assert pool._pool.get(2, 0, _put(pool._pool, run=2, site=site))[0] == 2
        pool.set_bits("x", None)
        assert pool._pool.get(3, 0, _put(pool._pool, run=3, site=site))[0] == 8


def test_collecting_gives_memory_back():
    pool = PagePool()
    with pool:
        handle = _put(pool._pool, run=1, tiles=19_000)
        assert pool.stats().live_entries == 1
        _put(pool._pool, run=2)
        assert pool._pool.get(1, 0, handle)[1] == 8
        pool.collect()
        assert pool.stats().entries == 1
        assert pool.stats().reclaims == 1
    assert pool.stats().committed_nbytes == 0
    assert pool.stats().entries == 0


def test_collecting_frees_what_its_backward_pass_has_read():
    with PagePool() as pool:
        read, in_part, unread = (_put(pool._pool, site=n) for n in range(3))
        for _ in range(2):
            pool._pool.get(1, 0, read, reads=2)
        pool._pool.get(1, 0, in_part, reads=2)
        assert pool.stats().live_entries == 3
        pool.collect()
        assert (pool.stats().live_entries, pool.stats().entries) == (2, 2)
        for handle in (in_part, unread):
            assert pool._pool.get(1, 0, handle)[1] == 8
        with pytest.raises(
            StaleHandle, match=r"backward pass has run.*`PagePool.colle"
        ):
            pool._pool.get(1, 0, read)
        assert pool._pool.violation() is None


@pytest.mark.parametrize("growth", [AdaptiveGrowth(), FixedGrowth("10MB")], ids=repr)
def test_pools_grow_as_they_are_told(growth):
    with PagePool(growth=growth) as pool:
        for i in range(40):
            _put(pool._pool, site=i, tiles=2000)
        stats = pool.stats()
        steps = {AdaptiveGrowth: range(10, 21), FixedGrowth: range(4, 6)}
        assert stats.growths in steps[type(growth)]
        assert stats.nbytes <= stats.committed_nbytes <= stats.nbytes + 12e6


def test_a_pool_is_found_by_its_name_while_it_is_in_use():
    name = f"test {uuid.uuid4()}"
    pool = PagePool(name=name)
    found = _cpu.pool_hash(name)
    assert _cpu.find_pool(found) is pool._pool
    with pytest.raises(ValueError, match="`name` must differ"):
        PagePool(name=name)
    assert pool == pool
    assert pool != PagePool()
    assert name in repr(pool)
    del pool
    gc.collect()
    assert _cpu.find_pool(found) is None
    PagePool(name=name)


def test_names_are_hashed_alike_in_every_process():
    assert _cpu.pool_hash("pool 0") == 16860574002753298827


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "64 elephants"}, "`budget` cannot be read"),
        ({"budget": 0}, "`budget` must be at least 1 byte"),
        ({"executions_in_flight": 0}, "`executions_in_flight` must be an integer from"),
        ({"name": "\ud800"}, "`name` must be text that UTF-8 can encode"),
        ({"packer": "tpu"}, "`packer` must be one of 'auto', 'gpu', 'cpu'"),
    ],
    ids=repr,
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PagePool(**options)


# In a process of its own: a mistake here ends the process.
COPY = """
import copy, pickle
import jax
import dafjax
from dafjax._native import make_ledger

owners = {
    "PagePool": dafjax.stores.PagePool("1MiB", name="copied"),
    "native pool": dafjax.stores.PagePool("1MiB", name="within")._pool,
    "ledger": make_ledger("copied", [1, 2]),
    "step": dafjax.jit(lambda x: x),
}
ways = {f"protocol {n}": lambda owner, n=n: pickle.dumps(owner, n)
        for n in range(pickle.HIGHEST_PROTOCOL + 1)}
ways |= {"copy": copy.copy, "deepcopy": lambda owner: copy.deepcopy([owner])}
ways |= {"reduce": lambda owner: owner.__reduce__()}
for name, owner in owners.items():
    for way, attempt in ways.items():
        try:
            print(name, way, "made", attempt(owner))
        except TypeError as error:
            if "cannot be copied or pickled" not in str(error):
                print(name, way, "said", error)
print("refused")
"""


def test_owners_of_native_state_are_not_copied():
    stdout, stderr, status = _python(COPY)
    assert (stdout, stderr, status) == ("refused", "", 0)


def test_a_pool_works_on_after_a_copy_was_refused():
    with PagePool() as pool:
        handle = _put(pool._pool)
        with pytest.raises(TypeError, match=re.escape(f"name={pool.name!r}")):
            copy.copy(pool)
        assert pool._pool.get(1, 0, handle)[1] == 8


def test_wrong_settings_are_refused():
    with pytest.raises(TypeError, match="`growth` must be"):
        PagePool(growth=100)
    with pytest.raises(ValueError, match=r"`AdaptiveGrowth\(share=...\)` must be"):
        AdaptiveGrowth(0.0)
    with pytest.raises(ValueError, match=r"`FixedGrowth\(nbytes=...\)` cannot be read"):
        FixedGrowth("much")
    for options in ({"name": 5}, {"backward_once": 1}, {"lasting_only": "no"}):
        with pytest.raises(TypeError, match=f"`{next(iter(options))}` must be"):
            PagePool(**options)
    with PagePool() as pool:
        pool.codec(Affine(bits=8), site="x")
        for bits in (3, True, 2.0, float("nan"), "2", 2**70):
            with pytest.raises(ValueError, match="`bits` must be 1, 2, 4, 8 or None"):
                pool.set_bits("*", bits)
        with pytest.raises(TypeError, match="`sites` must be the name"):
            pool.set_bits(7, 2)
        pool.set_bits("*", np.int64(2))
        with pytest.raises(TypeError, match="`budget` must be an integer or a string"):
            pool.budget = 1.5
        with pytest.raises(ValueError, match="`max_bits` must be 1, 2, 4 or 8"):
            pool._pool.put(1, 0, 0, 3, np.zeros(0, np.uint8), np.zeros(0, np.uint8))
        with pytest.raises(ValueError, match="`codes` must be whole tiles"):
            pool._pool.put(1, 0, 0, 1, np.zeros(63, np.uint8), np.zeros(0, np.uint8))
        handle = _put(pool._pool)
        short = np.zeros(3, np.uint8)
        with pytest.raises(ValueError, match="too short"):
            pool._pool.get_into(1, 0, handle, short, short)


def test_a_residual_that_cannot_fit_is_refused_with_what_to_change():
    with PagePool("128KiB") as pool:
        _put(pool._pool)
        with pytest.raises(PoolExhausted) as error_info:
            _put(pool._pool, metadata=200_000)
        for part in ("200000 bytes", "131072 bytes", "pool.budget", "block_size"):
            assert part in str(error_info.value)
        assert pool.stats().exhausted == 1
        assert pool._pool.violation() is None
