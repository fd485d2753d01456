// W4A8: 4-bit codes times rows in int8 (group_rows.h). Sums of 32 products are exact integers; of these, step by step,
//     sum += (scale * row scale) * integer; sum += offset * row sum
// in f32, whatever the number of rows and the instruction set. So a row's result depends on nothing else.
#pragma once

#include <algorithm>

#include "epilogue.h"
#include "group_rows.h"
#include "quantised.h"

namespace pdm {
namespace {

// Steps of codes that are unpacked at a time, for many rows: with their scales 23 KB, which the first cache holds beside rows and sums.
constexpr int BLOCK_STEPS = 18;

struct CodeScratch {
    // [step][half of the outputs][quad of inputs][16 outputs][4 inputs]
    alignas(64) uint8_t codes[BLOCK_STEPS][2][8][64];
    // [step][scales, offsets]
    alignas(64) float scales[BLOCK_STEPS][2][PDM_PANEL];
    alignas(64) float sums[ROW_BLOCK][PDM_PANEL];
};
static_assert(sizeof(CodeScratch) <= SCRATCH_BYTES);

// Scales (which = 0) or offsets (1) of 16 outputs from a group's header.
template <int FORMAT>
inline F16 from_header(const uint8_t *header, int which, int half) {
    const int first = which * PDM_PANEL + half * HALF_PANEL;
    if constexpr (FORMAT == PDM_W_Q4_WIDE)
        return load(reinterpret_cast<const float *>(header) + first);
    else
        return from_f16(reinterpret_cast<const uint16_t *>(header) + first);
}

inline F16 add_step(F16 sum, I16 products, F16 scales, F16 offsets, const GroupScale &row) {
    return fma(offsets, splat(row.sum), fma(to_float(products), scales * splat(row.scale), sum));
}

inline void unpack_codes(const uint8_t *codes, uint8_t (*to)[8][64]) {
    for (int part = 0; part < 4; part++) {
        const I16 low = load_i32(codes + part * 128), high = load_i32(codes + part * 128 + 64);
        const I16 even = even_lanes(low, high), odd = odd_lanes(low, high);
        uint8_t(*const quads)[64] = to[part / 2] + part % 2 * 4;
        store_i32(quads[0], low_nibbles(even));
        store_i32(quads[1], low_nibbles(odd));
        store_i32(quads[2], high_nibbles(even));
        store_i32(quads[3], high_nibbles(odd));
    }
}

template <int FORMAT>
void unpack_steps(const uint8_t *panel, int group, int first, int count, CodeScratch &space) {
    const int per_group = group / STEP_INPUTS;
    const uint8_t *header = panel + header_offset(FORMAT, group, first), *codes = panel + step_offset(FORMAT, group, first);
    for (int step = 0, end = per_group - first % per_group; step < count; end += per_group) {
        F16 scales[2][2];
        for (int which = 0; which < 2; which++)
            for (int half = 0; half < 2; half++) scales[which][half] = from_header<FORMAT>(header, which, half);
        for (; step < std::min(end, count); step++, codes += Q4_STEP_BYTES) {
            for (int which = 0; which < 2; which++)
                for (int half = 0; half < 2; half++) store(space.scales[step][which] + half * HALF_PANEL, scales[which][half]);
            unpack_codes(codes, space.codes[step]);
        }
        header = codes;
        codes += group_header_bytes(FORMAT);
    }
}

// R rows times HALVES of unpacked steps, which is what the registers hold.
template <int R, int HALVES>
inline void multiply_codes(const GroupRows &rows, int row, int first, int count, int half, const CodeScratch &space, float *sums) {
    const int8_t *x = rows.codes(row) + size_t(first) * STEP_INPUTS;
    const GroupScale *const scales = rows.scales(row) + first;
    const size_t stride = rows.stride(), scale_stride = size_t(rows.num_steps);
    F16 sum[R][HALVES];
    for (int r = 0; r < R; r++)
        for (int h = 0; h < HALVES; h++) sum[r][h] = first == 0 ? zero() : load(sums + r * PDM_PANEL + (half + h) * HALF_PANEL);
    for (int step = 0; step < count; step++, x += STEP_INPUTS) {
        I16 products[R][HALVES] = {};
#pragma GCC unroll 8
        for (int quad = 0; quad < 8; quad++) {
            I16 codes[HALVES];
            for (int h = 0; h < HALVES; h++) codes[h] = load_i32(space.codes[step][half + h][quad]);
            for (int r = 0; r < R; r++) {
                const I16 numbers = splat_quad(x + size_t(r) * stride + quad * 4);
                for (int h = 0; h < HALVES; h++) products[r][h] = dot_codes(products[r][h], codes[h], numbers);
            }
        }
        for (int h = 0; h < HALVES; h++) {
            const F16 scale = load(space.scales[step][0] + (half + h) * HALF_PANEL);
            const F16 offset = load(space.scales[step][1] + (half + h) * HALF_PANEL);
            for (int r = 0; r < R; r++)
                sum[r][h] = add_step(sum[r][h], code_sums(products[r][h]), scale, offset, scales[size_t(r) * scale_stride + size_t(step)]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int h = 0; h < HALVES; h++) store(sums + r * PDM_PANEL + (half + h) * HALF_PANEL, sum[r][h]);
}

#if defined(__AVX512F__)
constexpr int CODE_ROWS = 4, CODE_HALVES = 2;
#else
constexpr int CODE_ROWS = 2, CODE_HALVES = 1;
#endif

// Up to TILE_ROWS rows; `ahead` is what is fetched meanwhile.
inline void multiply_block(const GroupRows &rows, int row, int num_rows, int first, int count, const CodeScratch &space, float *sums,
                           const uint8_t *ahead, size_t ahead_bytes) {
    int done = 0;
    const size_t bytes_per_row = (ahead_bytes + size_t(num_rows) - 1) / size_t(num_rows);
    const auto next = [&](auto size) {
        constexpr int R = decltype(size)::value;
        for (; done + R <= num_rows; done += R) {
            for (size_t byte = 0; byte < bytes_per_row * R; byte += 64, ahead += 64)
                _mm_prefetch(reinterpret_cast<const char *>(ahead), _MM_HINT_T1);
            for (int half = 0; half < 2; half += CODE_HALVES)
                multiply_codes<R, CODE_HALVES>(rows, row + done, first, count, half, space, sums + done * PDM_PANEL);
        }
    };
    next(std::integral_constant<int, CODE_ROWS>());
    if (CODE_ROWS > 2) next(std::integral_constant<int, 2>());
    next(std::integral_constant<int, 1>());
}

template <int FORMAT>
void linear_codes_blocks(const pdm_linear_args &args, int row_begin, int row_end, int panel_begin, int panel_end, CodeScratch &space) {
    const GroupRows rows(args);
    const int group = args.weight->group, num_blocks = (rows.num_steps + BLOCK_STEPS - 1) / BLOCK_STEPS;
    const int block_steps = (rows.num_steps + num_blocks - 1) / num_blocks;
    const int num_parts = (row_end - row_begin + TILE_ROWS - 1) / TILE_ROWS;
    for (int index = panel_begin; index < panel_end; index++) {
        const uint8_t *const panel = static_cast<const uint8_t *>(args.weight->panels) + size_t(index) * args.weight->panel_bytes;
        for (int first = 0; first < rows.num_steps; first += block_steps) {
            const int count = std::min(block_steps, rows.num_steps - first);
            const bool is_last = first + count == rows.num_steps;
            unpack_steps<FORMAT>(panel, group, first, count, space);
            // As many bytes as this block has follow it in memory, be it in the next panel.
            const uint8_t *const following = panel + header_offset(FORMAT, group, first + count);
            const size_t part_bytes = args.weight->panel_bytes * size_t(count) / size_t(rows.num_steps) / size_t(num_parts);
            for (int row = row_begin, part = 0; row < row_end; row += TILE_ROWS, part++) {
                const int num_rows = std::min(TILE_ROWS, row_end - row);
                float *const sums = space.sums[num_blocks == 1 ? 0 : row - row_begin];
                multiply_block(rows, row, num_rows, first, count, space, sums, following + size_t(part) * part_bytes, part_bytes);
                if (is_last) finish(args, index, row, num_rows, sums);
            }
        }
    }
}

#if defined(__AVX512VNNI__)

// Of one pass, and of both: the second one finds the panel in the first cache. Measured, 5 rows take a seventh less time so than
// unpacked, 8 as much.
constexpr int DIRECT_ROWS = 4, MOST_DIRECT_ROWS = 6;

// At most R rows times a panel: codes go from it into the products, so that memory is read all the time.
template <int FORMAT, int R>
void direct_panel(const pdm_linear_args &args, const GroupRows &rows, int row, int num_rows, int index, CodeScratch &space) {
    constexpr size_t HEADER_BYTES = group_header_bytes(FORMAT);
    const int per_group = args.weight->group / STEP_INPUTS;
    const int8_t *x[R];
    const GroupScale *row_scales[R];
    for (int r = 0; r < R; r++) {
        // Rows that there are not are the last one again.
        x[r] = rows.codes(row + std::min(r, num_rows - 1));
        row_scales[r] = rows.scales(row + std::min(r, num_rows - 1));
    }
    const uint8_t *at = static_cast<const uint8_t *>(args.weight->panels) + size_t(index) * args.weight->panel_bytes;
    F16 sum[R][2];
    for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = zero();
    for (int step = 0; step < rows.num_steps;) {
        const uint8_t *const header = at;
        for (size_t line = 0; line < HEADER_BYTES; line += 64) prefetch(header + line);
        at += HEADER_BYTES;
        for (const int end = std::min(step + per_group, rows.num_steps); step < end; step++, at += Q4_STEP_BYTES) {
            for (size_t line = 0; line < Q4_STEP_BYTES; line += 64) prefetch(at + line);
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                I16 products[R][2] = {};
#pragma GCC unroll 4
                for (int place = 0; place < 4; place++) {
                    const I16 codes = load_i32(at + half * 256 + place * 64), low = low_nibbles(codes), high = high_nibbles(codes);
                    for (int r = 0; r < R; r++) {
                        const int8_t *const numbers = x[r] + step * STEP_INPUTS + place / 2 * 16;
                        I16 &product = products[r][place % 2];
                        product = dot_codes(dot_codes(product, low, splat_octet(numbers)), high, splat_octet(numbers + 8));
                    }
                }
                const F16 scale = from_header<FORMAT>(header, 0, half), offset = from_header<FORMAT>(header, 1, half);
                for (int r = 0; r < R; r++) {
                    const I16 pairs = even_lanes(products[r][0], products[r][1]) + odd_lanes(products[r][0], products[r][1]);
                    sum[r][half] = add_step(sum[r][half], pairs, scale, offset, row_scales[r][step]);
                }
            }
        }
    }
    for (int r = 0; r < num_rows; r++)
        for (int half = 0; half < 2; half++) store(space.sums[r] + half * HALF_PANEL, sum[r][half]);
    finish(args, index, row, num_rows, space.sums[0]);
}

template <int FORMAT>
void linear_codes(const pdm_linear_args &args, int row_begin, int row_end, int panel_begin, int panel_end, void *scratch) {
    CodeScratch &space = *static_cast<CodeScratch *>(scratch);
    if (row_end - row_begin > MOST_DIRECT_ROWS)
        return linear_codes_blocks<FORMAT>(args, row_begin, row_end, panel_begin, panel_end, space);
    const GroupRows rows(args);
    for (int index = panel_begin; index < panel_end; index++) {
        for (int row = row_begin; row < row_end; row += DIRECT_ROWS) {
            const int num_rows = std::min(DIRECT_ROWS, row_end - row);
            if (num_rows == 1)
                direct_panel<FORMAT, 1>(args, rows, row, 1, index, space);
            else if (num_rows == 2)
                direct_panel<FORMAT, 2>(args, rows, row, 2, index, space);
            else
                direct_panel<FORMAT, DIRECT_ROWS>(args, rows, row, num_rows, index, space);
        }
    }
}

#else

template <int FORMAT>
void linear_codes(const pdm_linear_args &args, int row_begin, int row_end, int panel_begin, int panel_end, void *scratch) {
    linear_codes_blocks<FORMAT>(args, row_begin, row_end, panel_begin, panel_end, *static_cast<CodeScratch *>(scratch));
}

#endif

}  // namespace
}  // namespace pdm
