// How large the pool's heads are.
#include "kv_places.h"

extern "C" size_t pdm_kv_head_bytes(int dtype, int block_size, int head_dim) {
    const size_t items = 2 * size_t(block_size) * size_t(pdm::padded_head(head_dim));
    return items * pdm::item_bytes(dtype) + (dtype == PDM_I8 ? 2 * size_t(block_size) * sizeof(float) : 0);
}
