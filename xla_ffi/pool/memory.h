#ifndef DAFJAX_POOL_MEMORY_H_
#define DAFJAX_POOL_MEMORY_H_

#include <cstdint>

namespace dafjax::pool {

// Where memory comes from. Address space is reserved first and costs nothing; parts of it
// are committed and released. All sizes are multiples of kPageNbytes. Limits and
// statistics are further memories around one.
class Memory {
 public:
  virtual ~Memory() = default;

  // Address space, aligned to kChunkNbytes; null if the system has none.
  virtual uint8_t* Reserve(int64_t nbytes) = 0;
  // Gives address space back, with what is committed in it.
  virtual void Unreserve(uint8_t* data, int64_t nbytes) = 0;

  // Makes reserved bytes usable; false, and nothing changed, if that is refused. They
  // are zero if they never were committed or have been released.
  virtual bool Commit(uint8_t* data, int64_t nbytes) = 0;
  // Gives committed bytes back to the system. Never fails.
  virtual void Release(uint8_t* data, int64_t nbytes) = 0;
};

// The operating system's.
class SystemMemory final : public Memory {
 public:
  uint8_t* Reserve(int64_t nbytes) override;
  void Unreserve(uint8_t* data, int64_t nbytes) override;
  bool Commit(uint8_t* data, int64_t nbytes) override;
  void Release(uint8_t* data, int64_t nbytes) override;
};

}  // namespace dafjax::pool

#endif  // DAFJAX_POOL_MEMORY_H_
