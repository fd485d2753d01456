// The scans for one instruction set; build.py compiles this file with its flags.
#include "sampling_scans.h"

namespace pdm {
const Scans sampling_avx512 = scans();
}  // namespace pdm
