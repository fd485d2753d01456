// Takes the place of the instruction sets that a driver was built without.
#include <stdlib.h>

#include "kernels.h"

namespace pdm {
namespace {

// Angles, which are plain C++, only enter and leave.
constexpr Kernels absent() {
    Kernels kernels{};
    kernels.name = "absent";
    kernels.enter = kernels.leave = [] {};
    return kernels;
}

}  // namespace

#ifndef HAS_KERNELS_AVX2
const Kernels avx2_kernels = absent();
#endif
#ifndef HAS_KERNELS_AVX512
const Kernels avx512_kernels = absent();
#endif
#ifndef HAS_KERNELS_AVX512_BF16
const Kernels avx512_bf16_kernels = absent();
#endif
#ifndef HAS_KERNELS_AMX
const Kernels amx_kernels = absent();
#endif

}  // namespace pdm
