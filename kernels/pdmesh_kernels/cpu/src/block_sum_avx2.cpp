// Sums for one instruction set; build.py compiles this file with its flags.
#include "block_sum_lanes.h"

namespace pdm {
const BlockSums block_sums_avx2 = ways();
}  // namespace pdm
