#ifndef DAFJAX_CPU_TAPE_H_
#define DAFJAX_CPU_TAPE_H_

#include <cstdint>

namespace dafjax {

// Runs a tape on each row: `given` [num_rows, num_given]; `values`, [num_rows, num_given +
// num_entries], begins with that. All entries must be operations on what comes before.
void EvaluateTape(const uint64_t* entries, int64_t num_entries, int64_t num_rows,
                  int64_t num_given, const float* given, float* values);

}  // namespace dafjax

#endif  // DAFJAX_CPU_TAPE_H_
