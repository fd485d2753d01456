// The inner product of every format that is multiplied as bf16: up to 32 rows times a panel's tiles, with f32 sums.
#pragma once

#include "kernels.h"
#include "simd.h"
#include "tiles.h"

namespace pdm {
namespace {

constexpr int STEP = 32;                      // inputs of a tile
constexpr int STEP_ITEMS = STEP * PDM_PANEL;  // of a panel

// At most TILE_ROWS rows of input in halves of 16; `second` is not used when there are fewer. AMX reads whole halves.
struct InputRows {
    const uint16_t *first, *second;
    size_t first_stride, second_stride;
    int num_rows;
};

#if defined(__AMX_BF16__)

constexpr bool READS_WHOLE_TILES = true;

// Tiles 0 to 3 are the sums, 4 and 5 rows, 6 and 7 weights. Few rows stay in the first cache and weights pass by it, once; with many
// rows it is the other way round: a panel stays, rows come from the second cache and do not drive it out.
template <bool IS_FEW>
inline void load_first_rows_and_weights(const uint16_t *rows, size_t stride_bytes, const char *weights) {
    if constexpr (IS_FEW) {
        _tile_stream_loadd(6, weights, 64);
        _tile_loadd(4, rows, stride_bytes);
        _tile_stream_loadd(7, weights + 1024, 64);
    } else {
        _tile_loadd(6, weights, 64);
        _tile_stream_loadd(4, rows, stride_bytes);
        _tile_loadd(7, weights + 1024, 64);
    }
}

template <bool IS_FEW, typename Between>
inline void multiply_steps(const InputRows &rows, const uint16_t *tiles, int num_steps, Between &between) {
    const char *weights = reinterpret_cast<const char *>(tiles);
    const size_t first_bytes = rows.first_stride * 2, second_bytes = rows.second_stride * 2;
    if (rows.num_rows <= 16) {
        for (int step = 0; step < num_steps; step++, weights += STEP_ITEMS * 2) {
            load_first_rows_and_weights<IS_FEW>(rows.first + step * STEP, first_bytes, weights);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            between(1);
        }
        return;
    }
    for (int step = 0; step < num_steps; step++, weights += STEP_ITEMS * 2) {
        load_first_rows_and_weights<IS_FEW>(rows.first + step * STEP, first_bytes, weights);
        if constexpr (IS_FEW)
            _tile_loadd(5, rows.second + step * STEP, second_bytes);
        else
            _tile_stream_loadd(5, rows.second + step * STEP, second_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        between(1);
    }
}

// sums [32][32] (+)= rows times the tiles of num_steps; `between` is called after each, and what it does runs while tiles multiply.
template <bool IS_FEW, typename Between>
inline void multiply(const InputRows &rows, const uint16_t *tiles, int num_steps, bool is_first, float *sums, Between &between) {
    constexpr size_t ROW_BYTES = PDM_PANEL * sizeof(float);
    float *const second_sums = sums + 16 * PDM_PANEL;
    if (is_first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, ROW_BYTES);
        _tile_loadd(1, sums + 16, ROW_BYTES);
        if (rows.num_rows > 16) {
            _tile_loadd(2, second_sums, ROW_BYTES);
            _tile_loadd(3, second_sums + 16, ROW_BYTES);
        }
    }
    multiply_steps<IS_FEW>(rows, tiles, num_steps, between);
    _tile_stored(0, sums, ROW_BYTES);
    _tile_stored(1, sums + 16, ROW_BYTES);
    if (rows.num_rows > 16) {
        _tile_stored(2, second_sums, ROW_BYTES);
        _tile_stored(3, second_sums + 16, ROW_BYTES);
    }
}

#else

constexpr bool READS_WHOLE_TILES = false;

// Weights of few rows are fetched so far ahead, into the second cache, a line with each line that is used: bursts of them hold up the
// lines that are needed now.
template <int R>
inline void fetch_ahead(const uint16_t *tiles, int item) {
    constexpr int BYTES = R <= 2 ? 4096 : 6144;
    _mm_prefetch(reinterpret_cast<const char *>(tiles + item) + BYTES, _MM_HINT_T1);
}

inline F16 input_pair(const uint16_t *from) {
    uint32_t bits;
    memcpy(&bits, from, 4);
    return splat_pair(bits);
}

// R rows times a panel whose weights come from memory: one half of a tile after the other, as they lie, for a core reads one stream at
// 29 GB/s and the two halves in turn at 17 (Zen 4, one row).
template <int R>
inline void stream_rows(const uint16_t *rows, size_t stride, const uint16_t *tiles, int num_steps, bool is_first, float *sums) {
    F16 sum[R][2];
    for (int r = 0; r < R; r++)
        for (int h = 0; h < 2; h++) sum[r][h] = is_first ? zero() : load(sums + r * PDM_PANEL + h * 16);
    for (int step = 0; step < num_steps; step++, tiles += STEP_ITEMS, rows += STEP) {
        for (int h = 0; h < 2; h++) {
#pragma GCC unroll 16
            for (int pair = 0; pair < STEP / 2; pair++) {
                const int item = h * 16 * STEP + pair * 32;
                fetch_ahead<R>(tiles, item);
                const F16 weight = load_pairs(tiles + item);
                for (int r = 0; r < R; r++)
                    sum[r][h] = dot_pairs(sum[r][h], input_pair(rows + size_t(r) * stride + pair * 2), weight);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int h = 0; h < 2; h++) store(sums + r * PDM_PANEL + h * 16, sum[r][h]);
}

enum class Fetch { NOTHING, LINES, STEPS };

// R rows times HALVES of a panel's two halves, which is what the registers hold: nothing is called before the last step, since a call
// would have all of them written to memory and read back, at a seventh of the time.
template <int R, int HALVES, Fetch FETCH, typename Between>
inline void multiply_rows(const uint16_t *rows, size_t stride, const uint16_t *tiles, int num_steps, bool is_first, float *sums,
                          Between &between) {
    F16 sum[R][HALVES];
    for (int r = 0; r < R; r++)
        for (int h = 0; h < HALVES; h++) sum[r][h] = is_first ? zero() : load(sums + r * PDM_PANEL + h * 16);
    for (int step = 0; step < num_steps; step++, tiles += STEP_ITEMS, rows += STEP) {
        for (int pair = 0; pair < STEP / 2; pair++) {
            F16 weight[HALVES];
            for (int h = 0; h < HALVES; h++) weight[h] = load_pairs(tiles + h * 16 * STEP + pair * 32);
            // Both halves' lines, which the second one finds in the second cache.
            for (int line = 0; FETCH == Fetch::LINES && line < 2; line++) fetch_ahead<R>(tiles, (pair * 2 + line) * 32);
            for (int r = 0; r < R; r++) {
                const F16 input = input_pair(rows + size_t(r) * stride + pair * 2);
                for (int h = 0; h < HALVES; h++) sum[r][h] = dot_pairs(sum[r][h], input, weight[h]);
            }
        }
        if (FETCH == Fetch::STEPS) between.fetch(1);
    }
    for (int r = 0; r < R; r++)
        for (int h = 0; h < HALVES; h++) store(sums + r * PDM_PANEL + h * 16, sum[r][h]);
}

template <bool IS_FEW, int R, typename Between>
inline int multiply_while(int row, const InputRows &rows, const uint16_t *tiles, int num_steps, bool is_first, float *sums,
                          Between &between) {
#if defined(__AVX512F__)
    // With eight rows it is the products that take the time.
    constexpr int HALVES = 2, MOST_STREAMED = 4;
#else
    constexpr int HALVES = 1, MOST_STREAMED = 2;
#endif
    for (; row + R <= rows.num_rows; row += R) {
        const bool is_second = row >= 16;
        const size_t stride = is_second ? rows.second_stride : rows.first_stride;
        const uint16_t *const from = is_second ? rows.second + size_t(row - 16) * stride : rows.first + size_t(row) * stride;
        if (IS_FEW && row == 0 && R <= MOST_STREAMED) {
            stream_rows<R>(from, stride, tiles, num_steps, is_first, sums);
            between.end(R);
            continue;
        }
        for (int half = 0; half < 2; half += HALVES) {
            const uint16_t *const half_tiles = tiles + half * 16 * STEP;
            float *const half_sums = sums + row * PDM_PANEL + half * 16;
            if (row + half == 0)
                multiply_rows<R, HALVES, IS_FEW ? Fetch::LINES : Fetch::STEPS>(from, stride, half_tiles, num_steps, is_first, half_sums,
                                                                               between);
            else
                multiply_rows<R, HALVES, Fetch::NOTHING>(from, stride, half_tiles, num_steps, is_first, half_sums, between);
        }
        between.end(R);
    }
    return row;
}

// sums [num_rows][32] (+)= rows times the tiles of num_steps.
template <bool IS_FEW, typename Between>
inline void multiply(const InputRows &rows, const uint16_t *tiles, int num_steps, bool is_first, float *sums, Between &between) {
    int row = 0;
#if defined(__AVX512F__)
    row = multiply_while<IS_FEW, 8>(row, rows, tiles, num_steps, is_first, sums, between);
#endif
    row = multiply_while<IS_FEW, 4>(row, rows, tiles, num_steps, is_first, sums, between);
    row = multiply_while<IS_FEW, 2>(row, rows, tiles, num_steps, is_first, sums, between);
    multiply_while<IS_FEW, 1>(row, rows, tiles, num_steps, is_first, sums, between);
}

#endif

}  // namespace
}  // namespace pdm
