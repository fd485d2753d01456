// Which instruction sets this processor and its kernel let us use.
#ifndef PDM_SOURCE_DIGEST
#define PDM_SOURCE_DIGEST "unknown"
#endif

#include <sys/syscall.h>
#include <unistd.h>

#include "kernels.h"

namespace pdm {
namespace {

// The kernel hands out the 8 KiB of tile state only to processes that ask (arch/x86/include/uapi/asm/prctl.h).
bool may_use_tiles() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

bool has_amx() {
    unsigned a = 7, b, c = 0, d;
    asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    constexpr unsigned AMX_BF16 = 1u << 22, AMX_TILE = 1u << 24, AMX_INT8 = 1u << 25;
    return (d & AMX_BF16) && (d & AMX_TILE) && (d & AMX_INT8);
}

bool is_supported(int isa) {
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    switch (isa) {
        case PDM_AVX2: return avx2;
        case PDM_AVX512: return avx512;
        case PDM_AVX512_BF16: return bf16;
        case PDM_AMX: return bf16 && has_amx() && may_use_tiles();
        default: return false;
    }
}

}  // namespace

const Kernels *kernels_of(int isa) {
    static const bool supported[PDM_NUM_ISAS] = {is_supported(0), is_supported(1), is_supported(2), is_supported(3)};
    static const Kernels *const all[PDM_NUM_ISAS] = {&avx2_kernels, &avx512_kernels, &avx512_bf16_kernels, &amx_kernels};
    return isa >= 0 && isa < PDM_NUM_ISAS && supported[isa] ? all[isa] : nullptr;
}

}  // namespace pdm

extern "C" {
int pdm_abi_version(void) { return PDM_ABI_VERSION; }
const char *pdm_source_digest(void) { return PDM_SOURCE_DIGEST; }
int pdm_isa_supported(int isa) { return pdm::kernels_of(isa) != nullptr; }
const char *pdm_isa_name(int isa) {
    static const char *const names[PDM_NUM_ISAS] = {"avx2", "avx512", "avx512_bf16", "amx"};
    return isa >= 0 && isa < PDM_NUM_ISAS ? names[isa] : "unknown";
}
}
