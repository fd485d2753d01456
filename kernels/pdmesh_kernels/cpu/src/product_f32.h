// A panel times rows in f32: for each output one chain of fused multiply-adds, inputs in order.
#pragma once

#include <algorithm>

#include "epilogue.h"
#include "kernels.h"
#include "simd.h"

namespace pdm {
namespace {

template <int R, int HALVES, bool FETCHES>
inline void multiply_rows_f32(const float *rows, size_t stride, const float *weights, int k_count, bool is_first, float *sums) {
    constexpr size_t FETCH_BYTES = 2048;
    F16 sum[R][HALVES];
    for (int r = 0; r < R; r++)
        for (int h = 0; h < HALVES; h++) sum[r][h] = is_first ? zero() : load(sums + r * PDM_PANEL + h * 16);
    for (int k = 0; k < k_count; k++, weights += PDM_PANEL) {
        F16 weight[HALVES];
        for (int h = 0; h < HALVES; h++) {
            weight[h] = load(weights + h * 16);
            if (FETCHES) _mm_prefetch(reinterpret_cast<const char *>(weights + h * 16) + FETCH_BYTES, _MM_HINT_T0);
        }
        for (int r = 0; r < R; r++) {
            const F16 input = splat(rows[size_t(r) * stride + size_t(k)]);
            for (int h = 0; h < HALVES; h++) sum[r][h] = fma(input, weight[h], sum[r][h]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int h = 0; h < HALVES; h++) store(sums + r * PDM_PANEL + h * 16, sum[r][h]);
}

template <int R, bool FETCHES>
inline int multiply_while_f32(int row, int num_rows, const float *rows, size_t stride, const float *weights, int k_count,
                              bool is_first, float *sums) {
#if defined(__AVX512F__)
    constexpr int HALVES = 2;
#else
    constexpr int HALVES = 1;
#endif
    for (; row + R <= num_rows; row += R)
        for (int half = 0; half < 2; half += HALVES)
            multiply_rows_f32<R, HALVES, FETCHES>(rows + size_t(row) * stride, stride, weights + half * 16, k_count, is_first,
                                                  sums + row * PDM_PANEL + half * 16);
    return row;
}

// sums [num_rows][32] (+)= rows [num_rows, k_count] times weights [k_count][32].
template <bool FETCHES>
inline void multiply_f32(int num_rows, const float *rows, size_t stride, const float *weights, int k_count, bool is_first,
                         float *sums) {
    int row = 0;
#if defined(__AVX512F__)
    row = multiply_while_f32<12, FETCHES>(row, num_rows, rows, stride, weights, k_count, is_first, sums);
    row = multiply_while_f32<8, FETCHES>(row, num_rows, rows, stride, weights, k_count, is_first, sums);
#else
    row = multiply_while_f32<6, FETCHES>(row, num_rows, rows, stride, weights, k_count, is_first, sums);
#endif
    row = multiply_while_f32<4, FETCHES>(row, num_rows, rows, stride, weights, k_count, is_first, sums);
    row = multiply_while_f32<2, FETCHES>(row, num_rows, rows, stride, weights, k_count, is_first, sums);
    multiply_while_f32<1, FETCHES>(row, num_rows, rows, stride, weights, k_count, is_first, sums);
}

inline void linear_f32(const pdm_linear_args &args, int row_begin, int row_end, int panel_begin, int panel_end, void *scratch) {
    // Weights of this many inputs stay in the first cache (32 KB of 48) while all rows pass.
    constexpr int BLOCK = 256;
    float *const all_sums = static_cast<float *>(scratch);
    const int num_inputs = args.weight->num_inputs;
    const bool is_few = row_end - row_begin <= TILE_ROWS;
    for (int panel = panel_begin; panel < panel_end; panel++) {
        const float *const weights =
            reinterpret_cast<const float *>(static_cast<const char *>(args.weight->panels) + size_t(panel) * args.weight->panel_bytes);
        for (int k = 0; k < num_inputs; k += BLOCK) {
            const int count = std::min(BLOCK, num_inputs - k);
            for (int row = row_begin; row < row_end; row += TILE_ROWS) {
                const int num_rows = std::min(TILE_ROWS, row_end - row);
                float *const sums = all_sums + size_t(row - row_begin) * PDM_PANEL;
                const float *const rows = static_cast<const float *>(args.input) + size_t(row) * args.input_stride + k;
                const float *const block = weights + size_t(k) * PDM_PANEL;
                if (is_few)
                    multiply_f32<true>(num_rows, rows, args.input_stride, block, count, k == 0, sums);
                else
                    multiply_f32<false>(num_rows, rows, args.input_stride, block, count, k == 0, sums);
                if (k + count == num_inputs) finish(args, panel, row, num_rows, sums);
            }
        }
    }
}
static_assert(sizeof(float) * ROW_BLOCK * PDM_PANEL <= SCRATCH_BYTES);

}  // namespace
}  // namespace pdm
