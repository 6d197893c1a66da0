"""The page pool's own tests, with sanitizers; and bugs that they must find."""

import shutil

import pytest

from tests.helpers import slow
from tests.native_build import POOL, SOURCES, Build, run, shared_folder


@pytest.mark.parametrize("sanitizer", ["none", slow("address")])
def test_the_pool_keeps_its_promises(tmp_path_factory, sanitizer):
    folder = shared_folder(tmp_path_factory, f"native-{sanitizer}")
    done = run(Build(folder, sanitizer).program("pool_test", POOL), timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_threads_share_a_pool_without_races(tmp_path_factory):
    folder = shared_folder(tmp_path_factory, "native-thread")
    done = run(Build(folder, "thread").program("pool_test", POOL), "threads")
    assert done.returncode == 0, done.stderr


# File, what is there, what is put in its place: each is a mistake that one could make.
BUGS = {
    "a page is lost when a plane goes": (
        "streams.h",
        "pages_->Free(stream->pages.back());",
        "if (stream->pages.size() != 3) pages_->Free(stream->pages.back());",
    ),
    "the slot that is taken is not the one that is used": (
        "bookkeeping.cc",
        "  vacant_.pop_back();\n  StartExecution(wanted.execution);",
        "  StartExecution(wanted.execution);\n  vacant_.pop_back();",
    ),
    "pinned entries lose planes": (
        "bookkeeping.cc",
        "victim != tree_.end() && entries_[victim->second].pins > 0",
        "victim == tree_.end() && entries_[victim->second].pins > 0",
    ),
    "pinned entries are reclaimed": (
        "bookkeeping.cc",
        "slot != kNoEntry && entries_[slot].pins > 0",
        "slot == kNoEntry && entries_[slot].pins > 0",
    ),
    "what is yet to be read again is collected": (
        "bookkeeping.cc",
        "if (reads > 0 && ++entry.reads >= reads)",
        "if (reads > 0 && ++entry.reads > 0)",
    ),
    "what nobody has read is collected": (
        "bookkeeping.cc",
        "if (entry.spent) {",
        "if (entry.spent || entry.reads == 0) {",
    ),
    "what took the place of what was read counts as read": (
        "bookkeeping.cc",
        "  entry->spent = false;\n",
        "",
    ),
    "the most important loses": (
        "eviction.h",
        "return a.loss_per_byte < b.loss_per_byte;",
        "return a.loss_per_byte > b.loss_per_byte;",
    ),
    "what is asked for is thought to fit": (
        "bit_allocator.cc",
        "Target::Fits(division.demands, asked, division.taken, room);",
        "room > 0 && !asked.empty();",
    ),
    "what an exponential is taken of gives way first": (
        "bit_allocator.cc",
        "All(division, 1), division.taken, room)",
        "All(division, 1), division.taken, room - room)",
    ),
    "what an exponential is taken of never gives way": (
        "bit_allocator.cc",
        "All(division, 1), division.taken, room)",
        "All(division, 1), division.taken, room + (1L << 50))",
    ),
    "an execution is over too late": (
        "epochs.h",
        "if (runs.size() == in_flight_) {",
        "if (runs.size() == in_flight_ + 1) {",
    ),
    "the check of a handle is not looked at": (
        "bookkeeping.cc",
        "handle.check == HandleCheck(key_, handle)",
        "true",
    ),
    "generations do not rise": (
        "bookkeeping.cc",
        "++entry.generation !=",
        "entry.generation !=",
    ),
    "a budget that falls is not looked at": (
        "bookkeeping.cc",
        "if (memory_.Room() >= 0) return;",
        "if (memory_.Room() >= 0 || pool_id_ > 0) return;",
    ),
    "slots of the tail are freed in part": (
        "small_allocator.cc",
        "page.free |= MaskOf(run);",
        "page.free |= MaskOf(run) & (MaskOf(run) - 1);",
    ),
    "settings hold at once": (
        "bookkeeping.cc",
        "if (site.now.bits > 0) bits = site.now.bits;",
        "if (site.next.bits > 0) bits = site.next.bits;",
    ),
    "the child keeps the parent's entries": (
        "fork.cc",
        "num_forks.fetch_add(1",
        "num_forks.fetch_add(0",
    ),
    "an allocation that fails comes too late": (
        "bookkeeping.cc",
        "  StartExecution(wanted.execution);\n",
        "  StartExecution(wanted.execution);\n  PrepareEntry(wanted);\n",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug, tmp_path):
    name, there, instead = BUGS[bug]
    for folder in ("pool", "format"):
        shutil.copytree(SOURCES / folder, tmp_path / folder)
    path = tmp_path / "pool" / name
    text = path.read_text()
    assert text.count(there) == 1
    path.write_text(text.replace(there, instead))
    build = Build(tmp_path, sources=tmp_path)
    assert run(build.program("pool_test", POOL), timeout=600).returncode != 0
