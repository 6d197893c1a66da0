#ifndef DAFJAX_POOL_MEMORY_ADAPTORS_H_
#define DAFJAX_POOL_MEMORY_ADAPTORS_H_

#include <cstdint>

#include "pool/memory.h"
#include "pool/statistics.h"

namespace dafjax::pool {

// Another memory, which may change as long as nothing is committed.
class ReplaceableMemory final : public Memory {
 public:
  explicit ReplaceableMemory(Memory* memory) : memory_(memory) {}

  uint8_t* Reserve(int64_t nbytes) override { return memory_->Reserve(nbytes); }
  void Unreserve(uint8_t* data, int64_t nbytes) override {
    memory_->Unreserve(data, nbytes);
  }
  bool Commit(uint8_t* data, int64_t nbytes) override {
    return memory_->Commit(data, nbytes);
  }
  void Release(uint8_t* data, int64_t nbytes) override {
    memory_->Release(data, nbytes);
  }

  // What is reserved already is the new memory's from now on.
  void Replace(Memory* memory) { memory_ = memory; }

 private:
  Memory* memory_;
};

// Counts what is committed.
//
// Invariant: committed().current is what was committed minus what was released.
class ObservedMemory final : public Memory {
 public:
  explicit ObservedMemory(Memory* memory) : memory_(memory) {}

  uint8_t* Reserve(int64_t nbytes) override { return memory_->Reserve(nbytes); }
  void Unreserve(uint8_t* data, int64_t nbytes) override {
    memory_->Unreserve(data, nbytes);
  }
  bool Commit(uint8_t* data, int64_t nbytes) override {
    if (!memory_->Commit(data, nbytes)) return false;
    committed_.Add(nbytes);
    return true;
  }
  void Release(uint8_t* data, int64_t nbytes) override {
    memory_->Release(data, nbytes);
    committed_.Remove(nbytes);
  }

  const Amount& committed() const { return committed_; }

 private:
  Memory* memory_;
  Amount committed_;
};

// Refuses to commit more than a limit.
//
// Invariant: committed <= the largest limit since committed was last below it.
class LimitedMemory final : public Memory {
 public:
  LimitedMemory(Memory* memory, int64_t limit) : memory_(memory), limit_(limit) {}

  uint8_t* Reserve(int64_t nbytes) override { return memory_->Reserve(nbytes); }
  void Unreserve(uint8_t* data, int64_t nbytes) override {
    memory_->Unreserve(data, nbytes);
  }
  bool Commit(uint8_t* data, int64_t nbytes) override {
    if (nbytes > Room() || !memory_->Commit(data, nbytes)) return false;
    committed_ += nbytes;
    return true;
  }
  void Release(uint8_t* data, int64_t nbytes) override {
    memory_->Release(data, nbytes);
    committed_ -= nbytes;
  }

  int64_t limit() const { return limit_; }
  // Takes effect for what is committed later.
  void set_limit(int64_t limit) { limit_ = limit; }
  // Negative while more is committed than a lowered limit allows.
  int64_t Room() const { return limit_ - committed_; }

 private:
  Memory* memory_;
  int64_t limit_;
  int64_t committed_ = 0;
};

}  // namespace dafjax::pool

#endif  // DAFJAX_POOL_MEMORY_ADAPTORS_H_
