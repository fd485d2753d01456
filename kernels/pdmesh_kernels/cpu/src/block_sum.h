/* Sums over blocks of memory, alone or of what is copied in the same pass: the definition is block_sum/reference.py. */
#ifndef PDMESH_BLOCK_SUM_H
#define PDMESH_BLOCK_SUM_H

#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(default)
#ifdef __cplusplus
extern "C" {
#endif

/* sums [num]: of the blocks numbered ids [num] among `blocks`, each `bytes` long. `isa` as in pdmesh_cpu.h. */
void pdm_block_sums(int isa, const void *blocks, size_t bytes, const int64_t *ids, int num, uint64_t *sums);

/* Copies blocks source_ids [num] of `source` to target_ids [num] of `target`, which do not overlap; sums [num] as above. */
void pdm_copy_blocks(int isa, void *target, const int64_t *target_ids, const void *source, const int64_t *source_ids, size_t bytes,
                     int num, uint64_t *sums);

/* Sums blocks ids [num] from the one numbered `done` on while they arrive: another thread counts in `arrived` how many have, and
   less than none says that it is over. Returns how many have been summed: all, or fewer when nothing came for `patience_us`. */
int pdm_sum_arrivals(int isa, const void *blocks, size_t bytes, const int64_t *ids, int done, int num, const int *arrived,
                     int patience_us, uint64_t *sums);

#ifdef __cplusplus
}
#endif
#pragma GCC visibility pop

#ifdef __cplusplus
namespace pdm {

/* One instruction set's ways. */
struct BlockSums {
    uint64_t (*sum)(const void *source, size_t bytes);
    uint64_t (*copy)(void *target, const void *source, size_t bytes);
};

extern const BlockSums block_sums_avx2, block_sums_avx512;

}  // namespace pdm
#endif
#endif
