"""The CUDA kernels, run on the CPU by a simulator; and bugs that it must find."""

import shutil

import pytest

from tests.helpers import slow
from tests.native_build import POOL, SANITIZERS, SOURCES, Build, run, shared_folder


# What tests of kernels are linked with.
CODES = ("cpu/batch.cc", "cpu/kernels.cc", "cuda/bitmask.cu", "cuda/copy.cu",
         "cuda/graph.cu", "cuda/pack_affine.cu", "cuda/unpack_affine.cu")  # fmt: skip
POOLS = ("cpu/batch.cc", "cpu/kernels.cc", "cuda/copy.cu", "cuda/notes.cu",
         "cuda/pack_entry.cu", "cuda/unpack_entry.cu", "cuda/update_table.cu",
         "device_pool/device_pool.cu", "device_pool/entry_packer.cu",
         "device_pool/host_packer.cu",
         "device_pool/mapped_memory.cu", "device_pool/note_queue.cu",
         "device_pool/page_lists.cu", "device_pool/told_entries.cu",
         *POOL)  # fmt: skip
LEDGERS = ("ledger/device_notes.cu", "ledger/ledger.cc")
REDUCTIONS = ("cpu/reduce.cc", "cuda/copy.cu", "cuda/graph.cu", "cuda/reduce.cu")


def _assert_passes(program, *arguments):
    done = run(program, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    return {
        name: Build(shared_folder(tmp_path_factory, f"native-{name}"), sanitizer=name)
        for name in SANITIZERS
    }


@pytest.mark.parametrize("sanitizer", ["none", slow("address")])
def test_kernels_give_the_cpus_bytes_and_stay_in_bounds(builds, sanitizer):
    program = builds[sanitizer].program("cuda_kernels_test", CODES)
    assert "cases" in _assert_passes(program)


def test_reductions_give_what_a_loop_gives(builds):
    _assert_passes(builds["none"].program("cuda_reduce_test", REDUCTIONS))


def test_loads_of_pools_give_what_the_host_had_decided(builds):
    program = builds["none"].program("cuda_pool_test", POOLS)
    assert "evictions" in _assert_passes(program)


@pytest.mark.slow
def test_pools_are_sound_over_many_seeds_and_in_bounds(builds):
    program = builds["address"].program("cuda_pool_test", POOLS)
    _assert_passes(program, "all")


SLOW_SANITIZERS = ["none", slow("address"), slow("thread")]


@pytest.mark.parametrize("sanitizer", SLOW_SANITIZERS)
def test_ledgers_have_what_devices_have_measured(builds, sanitizer):
    _assert_passes(builds[sanitizer].program("cuda_ledger_test", LEDGERS))


@pytest.mark.parametrize("sanitizer", SLOW_SANITIZERS)
def test_the_simulator_runs_correct_kernels_without_alarm(builds, sanitizer):
    _assert_passes(builds[sanitizer].program("simulator_test"))


# Bugs in kernels of the simulator's own test, and who finds them.
BUGS = {
    "missing_barrier": {"none", "address", "thread"},
    "missing_second_barrier": {"none", "address", "thread"},
    "shared_overrun": {"none", "address", "thread"},
    "shared_underrun": {"none", "address", "thread"},
    "global_overrun": {"address"},
    "update_that_is_not_atomic": {"thread"},
    "missing_fence": {"thread"},
    "host_reads_memory_of_the_device": {"none", "address", "thread"},
    "shuffle_taken_for_a_barrier": {"thread"},
}


@pytest.mark.parametrize("sanitizer", SLOW_SANITIZERS)
def test_the_simulator_notices_bugs(builds, sanitizer):
    program = builds[sanitizer].program("simulator_test")
    found = {bug for bug in BUGS if run(program, bug).returncode not in (0, 2)}
    assert found == {bug for bug, by in BUGS.items() if sanitizer in by}


@pytest.mark.slow
def test_kernels_give_the_cpus_bytes_over_the_whole_grid(builds):
    program = builds["none"].program("cuda_kernels_test", CODES)
    cases = int(_assert_passes(program, "all").split()[0])
    assert cases > 50_000


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_kernels_are_sound_under_sanitizers(builds, sanitizer):
    program = builds[sanitizer].program("cuda_kernels_test", CODES)
    _assert_passes(program, "spread")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sanitizer", "what"), [("address", "all"), ("thread", "orders")]
)
def test_reductions_are_sound_under_sanitizers(builds, sanitizer, what):
    _assert_passes(builds[sanitizer].program("cuda_reduce_test", REDUCTIONS), what)


def with_bug(name, there, instead):
    """Returns the text of a source file with a bug."""
    text = (SOURCES / name).read_text()
    assert text.count(there) == 1, f"{name} has no longer {there!r}"
    return text.replace(there, instead)


def plant(name, there, instead, folder):
    """Copies all sources into a folder, one of them with a bug."""
    shutil.copytree(SOURCES, folder, dirs_exist_ok=True)
    (folder / name).write_text(with_bug(name, there, instead))


# File, what is there, what is put in its place. Each is a mistake that one could make
# where the host and the device are apart.
BUGS_OF_POOLS = {
    "losses are told after the pages are written": (
        "device_pool/device_pool.cu",
        "  Failure failure = TellChanges(put.stream);\n",
        "  Failure failure = nullptr;\n",
    ),
    "a load reads the table when it is enqueued": (
        "device_pool/device_pool.cu",
        "UnpackEntryOnDevice(stream, shape, entries_.table(), handle, reads, y,",
        """UnpackEntryOnDevice(stream, shape, [this] {
    const EntryTable table = entries_.table();
    if (table.chunks[0] == nullptr) return table;
    DeviceEntry* now = nullptr;
    const size_t nbytes = 256 * sizeof(DeviceEntry);
    static_cast<void>(cudaMalloc(reinterpret_cast<void**>(&now), nbytes));
    static_cast<void>(cudaMemcpyAsync(now, table.chunks[0], nbytes,
                                      cudaMemcpyDeviceToDevice, nullptr));
    return EntryTable{256, {now}};
  }(), handle, reads, y,""",
    ),
    "streams do not wait for each other": (
        "device_pool/stream_order.h",
        "if (!any_ || stream == last_stream_) return nullptr;",
        "if (!any_ || last_stream_ != nullptr) return nullptr;",
    ),
    "memory is given back at once": (
        "device_pool/mapped_memory.cu",
        "->second.state = State::kReleased;\n    ++num_released_;",
        "->second.state = State::kReleased;\n    ++num_released_;\n"
        "    Unmap(data + at);",
    ),
    "memory is given back that was sealed too late": (
        "device_pool/device_pool.cu",
        "if (!unmaps_) seals_ = memory_.Seal();",
        "seals_ = memory_.Seal();",
    ),
    "the GPU loads before the CPU has packed": (
        "device_pool/device_pool.cu",
        "  if (failure == nullptr) failure = packer_.WaitForAll(stream);\n",
        "",
    ),
    "the CPU packs into pages that were taken away": (
        "device_pool/entry_packer.cu",
        "return host_.WaitFor(stream, last);",
        "return nullptr;",
    ),
    "what was mapped before goes with a refused pin": (
        "device_pool/mapped_memory.cu",
        "} else if (state == State::kInUse) {",
        "} else {",
    ),
    "the CPU packs before the GPU has quantized": (
        "device_pool/host_packer.cu",
        "failure = WhatFailed(cudaStreamWaitEvent(stream_, slot.written, 0));",
        "failure = nullptr;",
    ),
    "the GPU quantizes into a slot that is not packed yet": (
        "device_pool/host_packer.cu",
        "return WhatFailed(cudaStreamWaitEvent(stream, next.packed, 0));",
        "return nullptr;",
    ),
    "the list of pages of a longer entry is no longer than that before": (
        "device_pool/page_lists.cu",
        "had.data == nullptr || int64_t{1} << had.size < num_pages",
        "had.data == nullptr",
    ),
    "two entries have one list of pages": (
        "device_pool/page_lists.cu",
        "    of_size.pop_back();\n",
        "",
    ),
    "what is gone stays in the table": (
        "cuda/update_table.cu",
        "      entry->handle = {};\n",
        "",
    ),
    "half of a handle is compared": (
        "cuda/unpack_entry.cu",
        "words[0] != slot || words[1] != generation || words[2] != pool ||\n"
        "      words[3] != check",
        "words[0] != slot || words[2] != pool",
    ),
    "what was read in part counts as read": (
        "cuda/unpack_entry.cu",
        "entry->is_spent = ++entry->reads >= job.reads;",
        "entry->is_spent = 1;",
    ),
    "what has been read is asked before it is": (
        "device_pool/device_pool.cu",
        "pool::Handle> spent;\n  Failure failure = order_.Enter(own_stream_);",
        "pool::Handle> spent;\n  Failure failure = nullptr;",
    ),
    "a code that is left stands for the lowest": (
        "cuda/unpack_entry.cu",
        "(step - 1.0f) * 0.5f",
        "0.0f",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS_OF_POOLS)
def test_a_planted_bug_in_a_pool_is_found(bug, tmp_path):
    plant(*BUGS_OF_POOLS[bug], tmp_path)
    build = Build(tmp_path, sources=tmp_path, flags=["-Wno-error"])
    done = run(build.program("cuda_pool_test", POOLS))
    assert done.returncode != 0


# File, what is there, what is put in its place, and who finds it. Each is a mistake
# that one could make.
MUTANTS = {
    "ranges are read before they are written": (
        "cuda/pack_columns.h",
        "  __syncthreads();\n  const int64_t block =",
        "  const int64_t block =",
        "none",
    ),
    "parameters are read before they are written": (
        "cuda/pack_columns.h",
        "  __syncthreads();\n  if (job.sums.sum != nullptr) {",
        "  if (job.sums.sum != nullptr) {",
        "none",
    ),
    "sums are read before they are written": (
        "cuda/pack_columns.h",
        "  __syncthreads();\n  if (warp != 0) return;",
        "  if (warp != 0) return;",
        "none",
    ),
    "a shared array is too short": (
        "cuda/pack_columns.h",
        "DAFJAX_SHARED(float, shared_inverse, kTileLanes);",
        "DAFJAX_SHARED(float, shared_inverse, kTileLanes - 1);",
        "none",
    ),
    "scales are stored beyond the last block": (
        "cuda/pack_rows.h",
        " && block < job.blocks_per_row) {",
        ") {",
        "address",
    ),
    "padding is stored": (
        "cuda/bitmask.h",
        "if (i < present) to[row",
        "to[row",
        "address",
    ),
    "rows that are not aligned are loaded four at a time": (
        "cuda/launch.h",
        "(num_rows == 1 || row_elements % 4 == 0)",
        "true",
        "address",
    ),
    "blocks of two tiles begin anywhere": (
        "cuda/pack_launch.h",
        "in_pairs ? CeilDiv(tiles, 2) * 2 : tiles",
        "tiles",
        "none",
    ),
    "a flagged block keeps all its bits": (
        "cuda/parameters.h",
        "16 - kBits + (flagged ? 1 : 0)",
        "16 - kBits",
        "none",
    ),
    "padding counts as a value": (
        "cuda/pack_rows.h",
        " && i < num_present",
        "",
        "address",
    ),
    "a NaN is no reason for a second look": (
        "cuda/parameters.h",
        "IsFinite(lo) && IsFinite(hi)",
        "!(lo < -3e38f) && IsFinite(hi)",
        "none",
    ),
    "a value that is not finite counts in the checksum": (
        "cuda/pack_rows.h",
        "if (r % 2 == 0 && IsFinite(v))",
        "if (r % 2 == 0)",
        "none",
    ),
    "what does not fit is not cut off": (
        "cuda/encode.h",
        "(fixed < most ? fixed : most)",
        "fixed",
        "none",
    ),
    "whether all fits is not asked": (
        "cuda/pack_rows.h",
        "all_finite && __all_sync(kAllLanes, parameters.fits)",
        "all_finite",
        "none",
    ),
    "columns do not ask whether all fits": (
        "cuda/pack_columns.h",
        "unusual == 0 && all_fit",
        "unusual == 0",
        "none",
    ),
    "lanes of a pair change places": (
        "cuda/tile_pairs.h",
        "of_lanes[2 * i] = of_registers[i].Lower();\n"
        "      of_lanes[2 * i + 1] = of_registers[i].Upper();",
        "of_lanes[2 * i] = of_registers[i].Upper();\n"
        "      of_lanes[2 * i + 1] = of_registers[i].Lower();",
        "none",
    ),
    "padding of a pair is zero": (
        "cuda/tile_pairs.h",
        "two[row][i] = 0x7fc07fc0;",
        "two[row][i] = 0;",
        "none",
    ),
    "a pair counts once in the checksum": (
        "cuda/tile_pairs.h",
        "__dp2a_lo(two[row][i], 0x0101u, sum)",
        "sum + two[row][i]",
        "none",
    ),
    "a launch block is taken for its neighbor": (
        "cuda/divisor.h",
        "((uint64_t{1} << (31 + shift_)) + divisor - 1) / divisor",
        "(uint64_t{1} << (31 + shift_)) / divisor",
        "none",
    ),
    "rows change places in a plane": (
        "cuda/planes.h",
        "Select(kOddBits, odd, ShiftRight(even, 1))",
        "Select(kOddBits, even, ShiftRight(odd, 1))",
        "none",
    ),
    "a part of a row is left without a fence": (
        "cuda/reduce.h",
        "    __threadfence();\n    const uint32_t last",
        "    const uint32_t last",
        "thread",
    ),
    "parts of a row are read without a fence": (
        "cuda/reduce.h",
        "== last ? 1 : 0;\n    __threadfence();\n",
        "== last ? 1 : 0;\n",
        "thread",
    ),
    "a state is changed by halves": (
        "cuda/reduce.h",
        "    atomicMax(state, words.x);\n",
        "    if (*state < words.x) *state = words.x;\n",
        "thread",
    ),
    "a state is looked at before all warps have changed it": (
        "cuda/reduce.h",
        "      __threadfence();\n    }\n    __syncthreads();\n",
        "      __threadfence();\n    }\n",
        "none",
    ),
    "tickets never start anew": (
        "cuda/reduce.h",
        "atomicInc(state + 2, last) == last",
        "atomicAdd(state + 2, 1u) == last",
        "none",
    ),
    "subnormals count": (
        "simulator/grid.cc",
        "  const FlushSubnormals flush;  // device code is compiled so\n",
        "",
        "none",
    ),
    "rows are read when they are enqueued": (
        "ledger/device_notes.cu",
        "return WhatFailed(cudaLaunchHostFunc(stream, RunNote, taken));",
        "RunNote(taken);\n  return nullptr;",
        "none",
    ),
    "a note is used again before it was made": (
        "ledger/device_notes.cu",
        "  // If that fails,",
        "  IdleNotes::All().GiveBack(taken);\n  // If that fails,",
        "none",
    ),
    "sites are left behind": (
        "ledger/device_notes.cu",
        "  taken->sites.assign(sites, sites + num_sites);\n",
        "",
        "none",
    ),
    "notes have room for anything": (
        "ledger/device_notes.cu",
        "const bool has_room = (*it)->capacity >= count;",
        "const bool has_room = count > 0;",
        "address",
    ),
    # Where the device waits for the host, and the host for the lock.
    "memory is allocated under the lock": (
        "ledger/device_notes.cu",
        "if (const Failure failure =\n            WhatFailed(cudaHostAlloc",
        "if (const std::lock_guard<std::mutex> lock(mutex_);\n"
        "        const Failure failure = WhatFailed(cudaHostAlloc",
        "thread",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_planted_bug_is_found(mutant, tmp_path):
    *change, sanitizer = MUTANTS[mutant]
    plant(*change, tmp_path)
    name, *_ = change
    build = Build(tmp_path, sanitizer, sources=tmp_path, flags=["-Wno-error"])
    if name == "ledger/device_notes.cu":
        done = run(build.program("cuda_ledger_test", LEDGERS))
    elif name == "cuda/reduce.h":
        done = run(build.program("cuda_reduce_test", REDUCTIONS), "orders")
    else:
        done = run(build.program("cuda_kernels_test", CODES), "spread")
    assert done.returncode != 0


def test_what_bugs_replace_is_there():
    """They are planted where there is time; that they still can be is seen always."""
    for name, there, instead, *_ in (*BUGS_OF_POOLS.values(), *MUTANTS.values()):
        assert with_bug(name, there, instead)
