#include "device_pool/note_queue.h"

#include <cstddef>
#include <cstdint>
#include <utility>

#include "cuda/pool_kernels.h"
#include "pool/pool.h"

namespace dafjax {
namespace {

int64_t NumNumbers(bool ranges, size_t num_sites) {
  return static_cast<int64_t>(num_sites) + (ranges ? 0 : 1);
}

}  // namespace

bool NoteQueue::Add(Note note, int64_t count, NotePlace* place) {
  if (count > NoteBoard::kNumbers - used_) return false;
  note.number = ++last_number_;
  *place = {on_device_, note.number, (first_ + used_) % NoteBoard::kNumbers};
  queue_.push_back(std::move(note));
  used_ += count;
  return true;
}

void NoteQueue::Deliver(pool::AttachablePool* pool) {
  const uint64_t done = __atomic_load_n(&board_->done, __ATOMIC_ACQUIRE);
  size_t count = 0;
  for (size_t i = 0; i < queue_.size() && queue_[i].number <= done; ++i) {
    // Where nothing measures sensitivities, ranges make room for others.
    const bool is_old = used_ > NoteBoard::kNumbers / 2;
    if (queue_[i].kind == kSensitivities || is_old) count = i + 1;
  }
  for (; count > 0; --count) DeliverFirst(pool);
}

void NoteQueue::DeliverFirst(pool::AttachablePool* pool) {
  const Note& note = queue_.front();
  const bool ranges = note.kind == kRanges;
  for (const pool::SiteId site : note.sites) {
    const double number = board_->numbers[first_];
    if (ranges) {
      pool->NoteRange(site, number * note.factor, note.num_tiles);
    } else {
      pool->NoteSensitivity(site, number);
    }
    first_ = (first_ + 1) % NoteBoard::kNumbers;
  }
  if (!ranges) {
    pool->NoteGradient(board_->numbers[first_]);
    first_ = (first_ + 1) % NoteBoard::kNumbers;
  }
  used_ -= NumNumbers(ranges, note.sites.size());
  queue_.pop_front();
}

}  // namespace dafjax
