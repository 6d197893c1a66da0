#ifndef DAFJAX_POOL_WRITING_H_
#define DAFJAX_POOL_WRITING_H_

#include "pool/handle.h"
#include "pool/pool.h"
#include "pool/status.h"

namespace dafjax::pool {

// Takes back an entry that has been put and is not committed in the end.
class Writing {
 public:
  Writing(AttachablePool* pool, const Handle& handle) : pool_(pool), handle_(handle) {}
  ~Writing() {
    if (pool_ != nullptr) static_cast<void>(pool_->Abort(handle_));
  }
  Writing(const Writing&) = delete;
  Writing& operator=(const Writing&) = delete;

  Status Commit() {
    AttachablePool* const pool = pool_;
    pool_ = nullptr;
    return pool->Commit(handle_);
  }

 private:
  AttachablePool* pool_;
  const Handle handle_;
};

}  // namespace dafjax::pool

#endif  // DAFJAX_POOL_WRITING_H_
