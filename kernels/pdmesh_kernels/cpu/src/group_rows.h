// W4A8: input rows made into int8, with a scale for each 32 inputs.
#pragma once

#include "quantised_rows.h"
#include "simd.h"

namespace pdm {
namespace {

// What is smaller has no scale that a float could invert.
constexpr float LEAST_INT8_MAXIMUM = 1e-35f;

struct GroupRows {
    explicit GroupRows(const pdm_linear_args &args)
        : num_steps(row_steps(args.weight->num_inputs)), codes_(static_cast<int8_t *>(args.scratch)),
          scales_(reinterpret_cast<GroupScale *>(codes_ + group_codes_bytes(args.weight->num_inputs, args.num_rows))) {}

    size_t stride() const { return size_t(num_steps) * STEP_INPUTS; }
    int8_t *codes(int row) const { return codes_ + size_t(row) * stride(); }
    GroupScale *scales(int row) const { return scales_ + size_t(row) * size_t(num_steps); }
    const int num_steps;

  private:
    int8_t *const codes_;
    GroupScale *const scales_;
};

// Code times scale, scale = the group's largest magnitude / 127. A NaN or an infinity makes the group's sum a NaN.
inline GroupScale quantize_group(const uint16_t *x, int8_t *codes) {
    const F16 low = from_bf16(x), high = from_bf16(x + 16);
    const float most = largest(max(max(low, zero() - low), max(high, zero() - high)));
    const F16 factor = splat(most < LEAST_INT8_MAXIMUM ? 0.0f : 127.0f / most);
    const F16 low_codes = round_even(low * factor), high_codes = round_even(high * factor);
    alignas(16) int8_t plain[STEP_INPUTS];
    to_i8(plain, low_codes);
    to_i8(plain + 16, high_codes);
    const __m128i transposed = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int part = 0; part < STEP_INPUTS; part += 16) {
        const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i *>(plain + part));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(codes + part), _mm_shuffle_epi8(bytes, transposed));
    }
    const float scale = most / 127.0f;
    return {scale, scale * sum(low_codes + high_codes)};
}

inline void quantize_groups(const pdm_linear_args &args, int row_begin, int row_end) {
    const GroupRows rows(args);
    const int width = args.weight->num_inputs, num_whole = width / STEP_INPUTS;
    for (int row = row_begin; row < row_end; row++) {
        const uint16_t *const x = static_cast<const uint16_t *>(args.input) + size_t(row) * args.input_stride;
        int8_t *const codes = rows.codes(row);
        GroupScale *const scales = rows.scales(row);
        for (int step = 0; step < num_whole; step++)
            scales[step] = quantize_group(x + step * STEP_INPUTS, codes + step * STEP_INPUTS);
        if (num_whole == rows.num_steps) continue;
        uint16_t last[STEP_INPUTS] = {};
        memcpy(last, x + num_whole * STEP_INPUTS, size_t(width - num_whole * STEP_INPUTS) * sizeof(uint16_t));
        scales[num_whole] = quantize_group(last, codes + num_whole * STEP_INPUTS);
    }
}

}  // namespace
}  // namespace pdm
