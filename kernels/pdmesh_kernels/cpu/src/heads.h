// From the projected rows to attention's inputs: norms of heads, rotary embedding, queries to their buffer, keys and values to the pool.
#pragma once

#include <algorithm>
#include <math.h>

#include "kv_write.h"

namespace pdm {
namespace {

// `count` items as float, followed by zeros up to a multiple of 16 or more. Reads no further than the items.
inline void read_head(float *head, const pdm_heads_args &args, size_t at, int count, int width) {
    const bool is_f32 = args.qkv_dtype == PDM_F32;
    const float *const floats = static_cast<const float *>(args.qkv) + (is_f32 ? at : 0);
    const uint16_t *const halves = static_cast<const uint16_t *>(args.qkv) + (is_f32 ? 0 : at);
    int i = 0;
    for (; i + 16 <= count; i += 16) store(head + i, is_f32 ? load(floats + i) : from_bf16(halves + i));
    for (; i < count; i++) head[i] = is_f32 ? floats[i] : bf16_to_float(halves[i]);
    for (; i < width; i++) head[i] = 0.0f;
}

inline void norm_head(float *head, const float *gain, float epsilon, int count) {
    F16 squares = zero();
    for (int i = 0; i < count; i += 16) squares = fma(load(head + i), load(head + i), squares);
    const float factor = 1.0f / sqrtf(sum(squares) / float(count) + epsilon);
    int i = 0;
    for (; i + 16 <= count; i += 16) store(head + i, load(head + i) * splat(factor) * load(gain + i));
    for (; i < count; i++) head[i] = head[i] * factor * gain[i];
}

inline void rotate_head(float *head, const float *angles, int rotary_dim, bool is_interleaved) {
    const int half = rotary_dim / 2;
    const float *const cosines = angles, *const sines = angles + half;
    if (is_interleaved) {
        for (int i = 0; i < half; i++) {
            const float x = head[2 * i], y = head[2 * i + 1];
            head[2 * i] = x * cosines[i] - y * sines[i];
            head[2 * i + 1] = y * cosines[i] + x * sines[i];
        }
        return;
    }
    int i = 0;
    for (; i + 16 <= half; i += 16) {
        const F16 x = load(head + i), y = load(head + half + i), cosine = load(cosines + i), sine = load(sines + i);
        store(head + i, x * cosine - y * sine);
        store(head + half + i, y * cosine + x * sine);
    }
    for (; i < half; i++) {
        const float x = head[i], y = head[half + i];
        head[i] = x * cosines[i] - y * sines[i];
        head[half + i] = y * cosines[i] + x * sines[i];
    }
}

inline void write_query(const pdm_heads_args &args, size_t at, const float *head, int width) {
    if (args.kv->dtype == PDM_F32) {
        memcpy(static_cast<float *>(args.queries) + at, head, size_t(width) * 4);
    } else {
        uint16_t *const halves = static_cast<uint16_t *>(args.queries) + at;
        for (int i = 0; i < width; i += 16) to_bf16(halves + i, load(head + i));
    }
}

// Zeroes a block's slots behind a token's when it is the last of its sequence in this step and the block was begun in this step.
// Those before it are written by their own tokens, those behind it by nobody, and attention reads them under its mask.
inline void clear_behind(const pdm_heads_args &args, int32_t block, int slot, int width) {
    const pdm_kv &kv = *args.kv;
    alignas(64) const float nothing[256] = {};
    for (int head = 0; head < kv.num_kv_heads; head++) {
        const HeadPlace place = head_place(kv, block, head);
        if (slot == 0) {
            memset(place.keys, 0, kv.head_bytes);
            continue;
        }
        for (int behind = slot + 1; behind < kv.block_size; behind++)
            write_slot(kv.dtype, {place, behind, width}, nothing, nothing);
    }
}

inline void heads(const pdm_heads_args &args, const pdm_batch &batch, const int32_t *block_of_token, int token_begin, int token_end) {
    const pdm_kv &kv = *args.kv;
    const int D = kv.head_dim, width = padded_head(D), J = kv.num_kv_heads, H = args.num_heads;
    alignas(64) float head[256], value[256];
    const int64_t *const starts = batch.query_start;
    // The sequence of a token: the last one that starts at or before it.
    int sequence = int(std::upper_bound(starts, starts + batch.num_sequences + 1, int64_t{token_begin}) - starts) - 1;
    for (int token = token_begin; token < token_end; token++) {
        while (starts[sequence + 1] <= token) sequence++;
        const size_t row = size_t(token) * args.qkv_stride;
        const float *const angles = args.angles + size_t(token) * size_t(args.rotary_dim);
        for (int h = 0; h < H; h++) {
            read_head(head, args, row + size_t(h) * size_t(D), D, width);
            if (args.q_gain) norm_head(head, args.q_gain, args.epsilon, D);
            rotate_head(head, angles, args.rotary_dim, args.is_interleaved);
            write_query(args, (size_t(token) * size_t(H) + size_t(h)) * size_t(width), head, width);
        }
        const int slot = int(batch.positions[token] % kv.block_size);
        const bool is_last = token + 1 == starts[sequence + 1];
        if (is_last && batch.positions[token] - slot >= batch.context_len[sequence]) clear_behind(args, block_of_token[token], slot, width);
        for (int j = 0; j < J; j++) {
            read_head(head, args, row + size_t(H + j) * size_t(D), D, width);
            read_head(value, args, row + size_t(H + J + j) * size_t(D), D, width);
            if (args.k_gain) norm_head(head, args.k_gain, args.epsilon, D);
            rotate_head(head, angles, args.rotary_dim, args.is_interleaved);
            write_slot(kv.dtype, {head_place(kv, block_of_token[token], j), slot, width}, head, value);
        }
    }
}

}  // namespace
}  // namespace pdm
