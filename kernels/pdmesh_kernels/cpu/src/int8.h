// W8A8: int8 weights with a scale per output times activations quantised row by row. Integer sums are exact, so all instruction
// sets agree.
#pragma once

#include <algorithm>
#include <optional>

#include "epilogue.h"
#include "group_rows.h"
#include "quantised_panels.h"
#include "simd.h"
#include "tiles.h"

namespace pdm {
namespace {

inline int8_t *i8_codes(const pdm_linear_args &args) { return static_cast<int8_t *>(args.scratch); }
inline float *i8_scales(const pdm_linear_args &args) {
    return reinterpret_cast<float *>(i8_codes(args) + i8_codes_bytes(args.weight->num_inputs, args.num_rows));
}

// x to code * scale with scale = the row's largest magnitude / 127; a row with a NaN or an infinity has a NaN for its scale.
inline float quantize_row(const uint16_t *x, int width, int8_t *codes) {
    F16 largest_lanes = zero(), poison = zero();
    alignas(64) uint16_t tail[16] = {};
    const int whole = width / 16 * 16;
    if (whole < width) memcpy(tail, x + whole, size_t(width - whole) * sizeof(uint16_t));
    for (int i = 0; i < width; i += 16) {
        const F16 value = from_bf16(i < whole ? x + i : tail);
        largest_lanes = max(max(value, zero() - value), largest_lanes);
        poison = fma(value, zero(), poison);
    }
    const float most = largest(largest_lanes);
    const F16 factor = splat(most < LEAST_INT8_MAXIMUM ? 0.0f : 127.0f / most);
    for (int i = 0; i < width; i += 16) to_i8(codes + i, from_bf16(i < whole ? x + i : tail) * factor);
    return most / 127.0f + sum(poison);
}

void quantize_rows(const pdm_linear_args &args, int row_begin, int row_end) {
    if (args.weight->int8_rows) return quantize_groups(args, row_begin, row_end);
    const int width = args.weight->num_inputs, padded = padded_inputs(width);
    for (int row = row_begin; row < row_end; row++) {
        int8_t *const codes = i8_codes(args) + size_t(row) * size_t(padded);
        const uint16_t *const x = static_cast<const uint16_t *>(args.input) + size_t(row) * args.input_stride;
        i8_scales(args)[row] = quantize_row(x, width, codes);
        const int written = round_up(width, 16);
        memset(codes + written, 0, size_t(padded - written));
    }
}

// Scales one row's sums into `y`, f32 [32].
inline void scale_i8(const uint8_t *panel, float row_scale, I16 low, I16 high, float *y) {
    const float *const scales = reinterpret_cast<const float *>(panel);
    store(y, to_float(low) * splat(row_scale) * load(scales));
    store(y + HALF_PANEL, to_float(high) * splat(row_scale) * load(scales + HALF_PANEL));
}

#if defined(__AMX_INT8__)

// The rows of one product: scaled, and ended as epilogue.h has it, a few at a time.
class I8Ending {
  public:
    I8Ending(const pdm_linear_args &args, const uint8_t *panel, int index, int row, int num_rows, const int32_t *sums, float *scaled)
        : panel_(panel), row_scales_(i8_scales(args) + row), sums_(sums), scaled_(scaled), num_rows_(num_rows),
          ending_(args, index, row, num_rows, scaled) {}

    void some(int count) {
        for (const int last = std::min(done_ + count, num_rows_); done_ < last; done_++) {
            const int32_t *const sums = sums_ + done_ * PDM_PANEL;
            scale_i8(panel_, row_scales_[done_], load_i32(sums), load_i32(sums + HALF_PANEL), scaled_ + done_ * PDM_PANEL);
        }
        ending_.some(count);
    }

  private:
    const uint8_t *const panel_;
    const float *const row_scales_;
    const int32_t *const sums_;
    float *const scaled_;
    const int num_rows_;
    int done_ = 0;
    Ending ending_;
};

// Sums of up to 32 rows, i32 [32][32]. Rows beyond the last are computed from whatever lies there, and are not used. Ends the rows
// multiplied before while tiles multiply.
template <bool HAS_SECOND, bool FETCHES>
inline void i8_tile(const int8_t *x, size_t stride, const uint8_t *codes, int steps, int32_t *sums, I8Ending *ending) {
    const int rows_per_step = (TILE_ROWS + steps - 1) / steps;
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (HAS_SECOND) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int step = 0; step < steps; step++, x += I8_STEP_INPUTS, codes += I8_STEP_BYTES) {
        if constexpr (FETCHES)
            for (size_t line = 0; line < I8_STEP_BYTES; line += 64)
                _mm_prefetch(reinterpret_cast<const char *>(codes + line + I8_STEP_BYTES), _MM_HINT_T0);
        _tile_loadd(6, codes, 64);
        _tile_loadd(7, codes + I8_STEP_BYTES / 2, 64);
        if constexpr (HAS_SECOND) {
            _tile_loadd(4, x, int(stride));
            _tile_loadd(5, x + 16 * stride, int(stride));
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        } else {
            _tile_loadd(4, x, int(stride));
        }
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        if (ending) ending->some(rows_per_step);
    }
    constexpr int STRIDE = PDM_PANEL * sizeof(int32_t);
    _tile_stored(0, sums, STRIDE);
    _tile_stored(1, sums + HALF_PANEL, STRIDE);
    if constexpr (HAS_SECOND) {
        _tile_stored(2, sums + 16 * PDM_PANEL, STRIDE);
        _tile_stored(3, sums + 16 * PDM_PANEL + HALF_PANEL, STRIDE);
    }
}

struct I8Scratch {
    alignas(64) int32_t sums[2][TILE_ROWS * PDM_PANEL];
    alignas(64) float scaled[2][TILE_ROWS * PDM_PANEL];
};

inline void linear_i8(const pdm_linear_args &args, int row_begin, int row_end, int panel_begin, int panel_end, void *scratch) {
    I8Scratch &space = *static_cast<I8Scratch *>(scratch);
    const size_t stride = size_t(padded_inputs(args.weight->num_inputs));
    const int steps = int(stride) / I8_STEP_INPUTS;
    std::optional<I8Ending> ending;
    unsigned turn = 0;
    for (int index = panel_begin; index < panel_end; index++) {
        const uint8_t *const panel = static_cast<const uint8_t *>(args.weight->panels) + size_t(index) * args.weight->panel_bytes;
        for (int row = row_begin; row < row_end; row += TILE_ROWS, turn ^= 1) {
            const int8_t *const x = i8_codes(args) + size_t(row) * stride;
            const uint8_t *const codes = panel + I8_HEADER_BYTES;
            const int count = std::min(TILE_ROWS, row_end - row);
            int32_t *const sums = space.sums[turn];
            I8Ending *const before = ending ? &*ending : nullptr;
            if (row > row_begin)
                i8_tile<true, false>(x, stride, codes, steps, sums, before);
            else if (count > 16)
                i8_tile<true, true>(x, stride, codes, steps, sums, before);
            else
                i8_tile<false, true>(x, stride, codes, steps, sums, before);
            ending.reset();
            ending.emplace(args, panel, index, row, count, sums, space.scaled[turn]);
        }
    }
    if (ending) ending->some(TILE_ROWS);
}

#else

// ROWS rows by a panel, in registers.
template <int ROWS>
inline void i8_rows(const pdm_linear_args &args, const uint8_t *panel, int panel_index, int row) {
    const size_t stride = size_t(padded_inputs(args.weight->num_inputs));
    const int8_t *const x = i8_codes(args) + size_t(row) * stride;
    I16 sums[ROWS][2] = {};
    const uint8_t *codes = panel + I8_HEADER_BYTES;
    for (size_t k = 0; k < stride; k += I8_STEP_INPUTS, codes += I8_STEP_BYTES) {
        for (int quad = 0; quad < 16; quad++) {
            const uint8_t *const first = codes + quad * 64, *const second = first + I8_STEP_BYTES / 2;
            _mm_prefetch(reinterpret_cast<const char *>(first + I8_STEP_BYTES), _MM_HINT_T0);
            _mm_prefetch(reinterpret_cast<const char *>(second + I8_STEP_BYTES), _MM_HINT_T0);
            const I16 low = load_i32(first), high = load_i32(second);
            for (int r = 0; r < ROWS; r++) {
                uint32_t four;
                memcpy(&four, x + size_t(r) * stride + k + size_t(quad) * 4, 4);
                sums[r][0] = dot_quads(sums[r][0], four, low);
                sums[r][1] = dot_quads(sums[r][1], four, high);
            }
        }
    }
    alignas(64) float y[ROWS * PDM_PANEL];
    const int32_t *const totals = reinterpret_cast<const int32_t *>(panel) + PDM_PANEL;
    for (int r = 0; r < ROWS; r++) {
        const I16 low = dot_quads_end(sums[r][0], load_i32(totals)), high = dot_quads_end(sums[r][1], load_i32(totals + HALF_PANEL));
        scale_i8(panel, i8_scales(args)[row + r], low, high, y + r * PDM_PANEL);
    }
    finish(args, panel_index, row, ROWS, y);
}

inline void linear_i8(const pdm_linear_args &args, int row_begin, int row_end, int panel_begin, int panel_end, void *) {
    for (int index = panel_begin; index < panel_end; index++) {
        const uint8_t *const panel = static_cast<const uint8_t *>(args.weight->panels) + size_t(index) * args.weight->panel_bytes;
        int row = row_begin;
        for (; row + I8_ROWS <= row_end; row += I8_ROWS) i8_rows<I8_ROWS>(args, panel, index, row);
        for (; row < row_end; row++) i8_rows<1>(args, panel, index, row);
    }
}

#endif

}  // namespace
}  // namespace pdm
