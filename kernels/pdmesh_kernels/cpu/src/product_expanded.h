// Few rows times weights that are made into bf16 tiles first. What is summed, and in which order, is as in product_bf16.h, whose
// sums of a block go through memory; here they stay in tiles.
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

#else

template <typename Source>
void linear_expanded(const pdm_linear_args &args, int row_begin, int row_end, int panel_begin, int panel_end, void *scratch) {
    linear_bf16<Source>(args, row_begin, row_end, panel_begin, panel_end, scratch);
}

#endif

}  // namespace
}  // namespace pdm
