// Where a head's keys and values lie in the pool (see pdm_kv), and which of them a query sees.
#pragma once

#include "kernels.h"

namespace pdm {
namespace {

// Keys are read in steps of this many: a block holds whole steps, a split too.
constexpr int STEP_KEYS = 32;
constexpr int SPLIT_STEPS = PDM_SPLIT / STEP_KEYS;

inline size_t item_bytes(int dtype) { return dtype == PDM_F32 ? 4 : dtype == PDM_BF16 ? 2 : 1; }

// One head of one block.
struct HeadPlace {
    uint8_t *keys, *values;
    float *key_scales, *value_scales;  // int8 only
};
inline HeadPlace head_place(const pdm_kv &kv, int32_t block, int head) {
    uint8_t *const keys = kv.blocks + size_t(block) * kv.block_bytes + kv.layer_offset + size_t(head) * kv.head_bytes;
    const size_t bytes = size_t(kv.block_size) * size_t(padded_head(kv.head_dim)) * item_bytes(kv.dtype);
    float *const scales = reinterpret_cast<float *>(keys + 2 * bytes);
    return {keys, keys + bytes, scales, scales + kv.block_size};
}

// Keys that a query sees, itself included: positions [begin, end).
struct Sight {
    int64_t begin, end;
};
inline Sight sight_of(int64_t position, int window) {
    return {window > 0 && position >= window ? position - window + 1 : 0, position + 1};
}

}  // namespace
}  // namespace pdm
