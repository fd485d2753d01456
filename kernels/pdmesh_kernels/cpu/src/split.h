// The keys and values of one head and one split, as pointers to its steps.
#pragma once

#include "kv_places.h"

namespace pdm {
namespace {

struct Split {
    int step_begin = 0, step_end = 0;  // those that are needed
    const uint8_t *keys[SPLIT_STEPS], *values[SPLIT_STEPS];
    const float *key_scales[SPLIT_STEPS], *value_scales[SPLIT_STEPS];  // int8 only
    const uint8_t *following;                                         // what is read after this split

    // What is read after a step, to be fetched meanwhile: all keys come before all values.
    const uint8_t *after_keys(int step) const { return step + 1 < step_end ? keys[step + 1] : values[step_begin]; }
    const uint8_t *after_values(int step) const { return step + 1 < step_end ? values[step + 1] : following; }
};

// Steps of split number `index` that hold some of positions [sight.begin, sight.end). No other table entry is looked at.
inline Split find_split(const pdm_kv &kv, const int32_t *table, int head, int index, Sight sight) {
    Split split;
    const int64_t start = int64_t{index} * PDM_SPLIT;
    const int64_t begin = sight.begin > start ? sight.begin - start : 0, end = sight.end - start < PDM_SPLIT ? sight.end - start : PDM_SPLIT;
    split.step_begin = int(begin / STEP_KEYS);
    split.step_end = int((end + STEP_KEYS - 1) / STEP_KEYS);
    const size_t token_bytes = size_t(padded_head(kv.head_dim)) * item_bytes(kv.dtype);
    for (int step = split.step_begin; step < split.step_end; step++) {
        const int64_t key = start + step * STEP_KEYS;
        const int32_t slot = int32_t(key % kv.block_size);
        const HeadPlace place = head_place(kv, table[key / kv.block_size], head);
        split.keys[step] = place.keys + size_t(slot) * token_bytes;
        split.values[step] = place.values + size_t(slot) * token_bytes;
        split.key_scales[step] = place.key_scales + slot;
        split.value_scales[step] = place.value_scales + slot;
    }
    split.following = split.step_begin < split.step_end ? split.keys[split.step_begin] : kv.blocks;
    return split;
}

}  // namespace
}  // namespace pdm
