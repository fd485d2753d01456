// Goes over the blocks that are named.
#include "block_sum.h"

#include "kernels.h"

namespace {

const pdm::BlockSums &ways_of(int isa) { return isa >= PDM_AVX512 ? pdm::block_sums_avx512 : pdm::block_sums_avx2; }

}  // namespace

extern "C" {

void pdm_block_sums(int isa, const void *blocks, size_t bytes, const int64_t *ids, int num, uint64_t *sums) {
    const pdm::BlockSums &ways = ways_of(isa);
    for (int index = 0; index < num; ++index) sums[index] = ways.sum((const char *)blocks + size_t(ids[index]) * bytes, bytes);
}

void pdm_copy_blocks(int isa, void *target, const int64_t *target_ids, const void *source, const int64_t *source_ids, size_t bytes,
                     int num, uint64_t *sums) {
    const pdm::BlockSums &ways = ways_of(isa);
    for (int index = 0; index < num; ++index) {
        char *to = (char *)target + size_t(target_ids[index]) * bytes;
        sums[index] = ways.copy(to, (const char *)source + size_t(source_ids[index]) * bytes, bytes);
    }
}
}
