#ifndef DAFJAX_LEDGER_DEVICE_NOTES_H_
#define DAFJAX_LEDGER_DEVICE_NOTES_H_

#include <cstdint>

#include "cuda/kernels.h"
#include "ledger/ledger.h"

namespace dafjax {

// Enqueues what has `note` called with rows that a GPU has measured: `rows` is the
// device's, `sites` is read at once. Whoever waits for the stream finds the rows in the
// ledger. Nothing waits for the GPU; it waits until the host has added a few numbers.
//
// Called for the first time, with more numbers than before, or where more notes are under
// way than ever before, it allocates pinned memory, which takes long.
Failure NoteFromDevice(Stream stream, NoteFunction note, uint64_t ledger,
                       const int64_t* sites, int64_t num_sites, const float* rows,
                       int64_t num_rows);

}  // namespace dafjax

#endif  // DAFJAX_LEDGER_DEVICE_NOTES_H_
