#ifndef DAFJAX_CPU_INSTRUCTION_SETS_H_
#define DAFJAX_CPU_INSTRUCTION_SETS_H_

#include <vector>

#include "cpu/kernels.h"

namespace dafjax {

// Kernels that run on this processor, best first; "scalar" is always the last.
const std::vector<const Kernels*>& InstructionSets();

const Kernels& BestKernels();

}  // namespace dafjax

#endif  // DAFJAX_CPU_INSTRUCTION_SETS_H_
