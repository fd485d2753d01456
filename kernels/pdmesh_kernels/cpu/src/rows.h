// What is done row by row: norms, and the embedding of tokens.
#pragma once

#include <math.h>

#include "kernels.h"
#include "pack.h"
#include "simd.h"

namespace pdm {
namespace {

template <typename Load>
float mean_of(int width, Load lanes) {
    F16 total = zero();
    int i = 0;
    for (; i + 16 <= width; i += 16) total = total + lanes(i, 16);
    if (i < width) total = total + first(width - i, lanes(i, width - i), zero());
    return sum(total) / float(width);
}

// x, y, gain and bias may be read up to the next multiple of 16: they lie in padded memory.
inline void norm_row(const pdm_norm_args &args, const float *x, float *y) {
    const int width = args.width;
    float mean = 0.0f;
    if (args.is_layer_norm) mean = mean_of(width, [&](int i, int) { return load(x + i); });
    const F16 middle = splat(mean);
    const float variance = mean_of(width, [&](int i, int) {
        const F16 distance = load(x + i) - middle;
        return distance * distance;
    });
    const F16 factor = splat(1.0f / sqrtf(variance + args.epsilon));
    for (int i = 0; i < width; i += 16) {
        F16 value = (load(x + i) - middle) * factor * load(args.gain + i);
        if (args.bias) value = value + load(args.bias + i);
        store(y + i, value);
    }
}

// Rows are normed in a copy, since they may have another type, or end inside a vector.
void norm(const pdm_norm_args &args, int row_begin, int row_end, void *scratch) {
    const int width = args.width, padded = round_up(width, 16);
    float *const x = static_cast<float *>(scratch), *const y = x + padded;
    float *const gain = y + padded, *const bias = gain + padded;
    pdm_norm_args padded_args = args;
    memset(x, 0, size_t(padded) * 4 * sizeof(float));
    memcpy(gain, args.gain, size_t(width) * sizeof(float));
    if (args.bias) memcpy(bias, args.bias, size_t(width) * sizeof(float));
    padded_args.gain = gain;
    padded_args.bias = args.bias ? bias : nullptr;
    for (int row = row_begin; row < row_end; row++) {
        const size_t source = size_t(args.row_index ? args.row_index[row] : row) * args.input_stride;
        if (args.input_dtype == PDM_F32) {
            memcpy(x, static_cast<const float *>(args.input) + source, size_t(width) * sizeof(float));
        } else {
            const uint16_t *from = static_cast<const uint16_t *>(args.input) + source;
            for (int i = 0; i < width; i++) x[i] = bf16_to_float(from[i]);
        }
        norm_row(padded_args, x, y);
        const size_t target = size_t(row) * args.output_stride;
        if (args.adds) {
            float *out = static_cast<float *>(args.output) + target;
            for (int i = 0; i < width; i++) out[i] += y[i];
        } else if (args.output_dtype == PDM_F32) {
            memcpy(static_cast<float *>(args.output) + target, y, size_t(width) * sizeof(float));
        } else {
            uint16_t *out = static_cast<uint16_t *>(args.output) + target;
            int i = 0;
            for (; i + 16 <= width; i += 16) to_bf16(out + i, load(y + i));
            for (; i < width; i++) out[i] = float_to_bf16(y[i]);
        }
    }
}

void embed(const pdm_embed_args &args, int row_begin, int row_end) {
    const int width = args.table->num_inputs;
    // A model in bf16 has its scale in bf16 too.
    const float scale = args.rounds ? bf16_to_float(float_to_bf16(args.scale)) : args.scale;
    for (int row = row_begin; row < row_end; row++) {
        float *out = args.output + size_t(row) * args.output_stride;
        unpack_row(*args.table, int(args.token_ids[row]), out);
        if (args.scale == 1.0f) continue;
        for (int i = 0; i < width; i++) out[i] = args.rounds ? bf16_to_float(float_to_bf16(out[i] * scale)) : out[i] * scale;
    }
}

}  // namespace
}  // namespace pdm
