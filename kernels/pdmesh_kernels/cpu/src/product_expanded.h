// Few rows times weights that are made into bf16 first. What is summed, and in which order, is as in product_bf16.h, whose tiles and
// sums of a block go through memory; here sums stay in registers, and without AMX the weights too.
#pragma once

#include "product_bf16.h"

namespace pdm {
namespace {

#if defined(__AMX_BF16__)

// Steps of 32 inputs that are made, then multiplied. Measured, cycles per 32 cold weights: 2 steps 7.0 (going from one to the other
// costs some 60 cycles), 4 steps 6.8, 10 steps 8.1 (memory waits while tiles multiply).
constexpr int MOST_BLOCK_STEPS = 4;

template <typename Source, bool HAS_SECOND>
void linear_expanded_rows(const pdm_linear_args &args, int row_begin, int num_rows, int panel_begin, int panel_end,
                          Bf16Scratch &space) {
    constexpr int ROW_BYTES = PDM_PANEL * sizeof(float);
    Bf16Input input(args, row_begin, row_begin + num_rows, space);
    const Source source(*args.weight);
    const int num_whole = input.num_whole() / STEP, num_steps = (args.weight->num_inputs + STEP - 1) / STEP;
    const InputRows whole = num_whole > 0 ? input.rows(row_begin, num_rows, 0, num_whole * STEP) : InputRows{};
    const InputRows last = num_whole < num_steps ? input.rows(row_begin, num_rows, num_whole * STEP, STEP) : InputRows{};
    const int num_blocks = (num_steps + MOST_BLOCK_STEPS - 1) / MOST_BLOCK_STEPS;
    const int block_steps = (num_steps + num_blocks - 1) / num_blocks;
    float *const sums = space.sums[0];
    for (int panel = panel_begin; panel < panel_end; panel++) {
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (HAS_SECOND) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int begin = 0; begin < num_steps; begin += block_steps) {
            const int count = std::min(block_steps, num_steps - begin);
            const uint16_t *tiles = source.tiles(panel, begin * STEP, count * STEP, space.tiles);
            for (int step = begin; step < begin + count; step++, tiles += STEP_ITEMS) {
                const InputRows &rows = step < num_whole ? whole : last;
                const int k = step < num_whole ? step * STEP : 0;
                _tile_loadd(4, rows.first + k, rows.first_stride * 2);
                _tile_loadd(6, tiles, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, tiles + STEP_ITEMS / 2, 64);
                _tile_dpbf16ps(1, 4, 7);
                if constexpr (HAS_SECOND) {
                    _tile_loadd(5, rows.second + k, rows.second_stride * 2);
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(3, 5, 7);
                }
            }
        }
        _tile_stored(0, sums, ROW_BYTES);
        _tile_stored(1, sums + 16, ROW_BYTES);
        if constexpr (HAS_SECOND) {
            _tile_stored(2, sums + 16 * PDM_PANEL, ROW_BYTES);
            _tile_stored(3, sums + 16 * PDM_PANEL + 16, ROW_BYTES);
        }
        finish(args, panel, row_begin, num_rows, sums);
    }
}

template <typename Source>
void linear_expanded(const pdm_linear_args &args, int row_begin, int row_end, int panel_begin, int panel_end, void *scratch) {
    const int num_rows = row_end - row_begin;
    // Of a longer row the copy of the last rows holds only a part at a time.
    if (num_rows > TILE_ROWS || args.weight->num_inputs > MAX_TAIL)
        return linear_bf16<Source>(args, row_begin, row_end, panel_begin, panel_end, scratch);
    Bf16Scratch &space = *static_cast<Bf16Scratch *>(scratch);
    if (num_rows > 16)
        linear_expanded_rows<Source, true>(args, row_begin, num_rows, panel_begin, panel_end, space);
    else
        linear_expanded_rows<Source, false>(args, row_begin, num_rows, panel_begin, panel_end, space);
}

#elif defined(__AVX512BF16__)

// At most R rows. A pair of weights goes from its codes into the products, without a detour through memory: one hides the other's
// latency. Measured, GB/s of 4-bit weights per thread, rows 1, 2, 4, 8: 13.4, 11.7, 8.9, 5.5; one after the other 8.3, 6.7, 7.0, 4.6.
template <typename Source, int R>
void linear_fused(const pdm_linear_args &args, int row_begin, int num_rows, int panel_begin, int panel_end, Bf16Scratch &space) {
    Bf16Input input(args, row_begin, row_begin + num_rows, space);
    const Source source(*args.weight);
    const int num_whole = input.num_whole() / STEP, num_steps = (args.weight->num_inputs + STEP - 1) / STEP;
    const InputRows whole = num_whole > 0 ? input.rows(row_begin, num_rows, 0, num_whole * STEP) : InputRows{};
    const InputRows last = num_whole < num_steps ? input.rows(row_begin, num_rows, num_whole * STEP, STEP) : InputRows{};
    float *const sums = space.sums[0];
    for (int panel = panel_begin; panel < panel_end; panel++) {
        F16 sum[R][2];
        for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = zero();
        const uint16_t *rows[R];
        const auto multiply = [&](int half, int pair, F16 a, F16 b) __attribute__((always_inline)) {
            const F16 weights = bf16_pairs(a, b);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                uint32_t bits;
                memcpy(&bits, rows[r] + pair * 2, 4);
                sum[r][half] = dot_pairs(sum[r][half], splat_pair(bits), weights);
            }
        };
        source.template each_step<(R <= 2)>(panel, 0, num_steps, [&](int step) __attribute__((always_inline)) {
            const InputRows &from = step < num_whole ? whole : last;
            const size_t k = step < num_whole ? size_t(step) * STEP : 0;
            // Rows that there are not are the last one again.
            for (int r = 0; r < R; r++) rows[r] = from.first + size_t(std::min(r, num_rows - 1)) * from.first_stride + k;
            return multiply;
        });
        for (int r = 0; r < num_rows; r++)
            for (int half = 0; half < 2; half++) store(sums + r * PDM_PANEL + half * 16, sum[r][half]);
        finish(args, panel, row_begin, num_rows, sums);
    }
}

template <typename Source>
void linear_expanded(const pdm_linear_args &args, int row_begin, int row_end, int panel_begin, int panel_end, void *scratch) {
    const int num_rows = row_end - row_begin;
    if (num_rows > Source::MOST_FUSED_ROWS) return linear_bf16<Source>(args, row_begin, row_end, panel_begin, panel_end, scratch);
    Bf16Scratch &space = *static_cast<Bf16Scratch *>(scratch);
    if constexpr (Source::MOST_FUSED_ROWS > 4)
        if (num_rows > 4) return linear_fused<Source, 8>(args, row_begin, num_rows, panel_begin, panel_end, space);
    if (num_rows > 2) return linear_fused<Source, 4>(args, row_begin, num_rows, panel_begin, panel_end, space);
    if (num_rows > 1) return linear_fused<Source, 2>(args, row_begin, num_rows, panel_begin, panel_end, space);
    linear_fused<Source, 1>(args, row_begin, num_rows, panel_begin, panel_end, space);
}

#else

template <typename Source>
void linear_expanded(const pdm_linear_args &args, int row_begin, int row_end, int panel_begin, int panel_end, void *scratch) {
    linear_bf16<Source>(args, row_begin, row_end, panel_begin, panel_end, scratch);
}

#endif

}  // namespace
}  // namespace pdm
