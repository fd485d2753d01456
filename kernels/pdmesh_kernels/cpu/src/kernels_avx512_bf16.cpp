// The kernels for one instruction set; build.py compiles this file with its flags.
#include "kernel_table.h"

namespace pdm {
const Kernels avx512_bf16_kernels = kernel_table("avx512_bf16");
}  // namespace pdm
