// Scores and outputs of attention by tile registers: bf16, and int8 expanded to bf16, which is exact.
#pragma once

#include "softmax.h"
#include "split.h"

#if defined(__AMX_BF16__)

namespace pdm {
namespace {

// Tile loads are not known to the compiler as reads of memory.
inline void memory_barrier() { asm volatile("" ::: "memory"); }

// The lines of one tile.
inline void fetch_tile(const void *first, size_t stride) {
    for (size_t row = 0; row < 16; row++) _mm_prefetch(static_cast<const char *>(first) + row * stride, _MM_HINT_T0);
}

// Expands `count` int8 to bf16 and fetches as many bytes of what is read next.
inline void expand(uint16_t *target, const uint8_t *source, const uint8_t *next, size_t count) {
    for (size_t i = 0; i < count; i += 64) {
        _mm_prefetch(reinterpret_cast<const char *>(next + i), _MM_HINT_T0);
        const int8_t *const bytes = reinterpret_cast<const int8_t *>(source + i);
        to_bf16_pair(target + i, from_i8(bytes), from_i8(bytes + 16));
        to_bf16_pair(target + i + 32, from_i8(bytes + 32), from_i8(bytes + 48));
    }
}

template <bool IS_I8>
struct TileProduct {
    using Query = uint16_t;
    using Share = uint16_t;

    // scores [rows][SCORE_STRIDE] = queries [32][P] times the split's keys.
    static void scores(const Query *queries, int rows, int width, const Split &split, float *scores, uint16_t *expanded) {
        const size_t P = size_t(width), group = P * 32;
        memory_barrier();
        for (int step = split.step_begin; step < split.step_end; step++) {
            const uint8_t *keys = split.keys[step], *next = split.after_keys(step);
            if (IS_I8) {
                expand(expanded, keys, next, STEP_KEYS * P);
                memory_barrier();
                keys = next = reinterpret_cast<const uint8_t *>(expanded);
            }
            float *const target = scores + step * STEP_KEYS;
            if (rows > 16)
                score_step<true, !IS_I8>(queries, P, keys, next, group, target);
            else
                score_step<false, !IS_I8>(queries, P, keys, next, group, target);
        }
        memory_barrier();
    }

    // outputs [rows][P] = shares [rows][SCORE_STRIDE floats] times the split's values.
    static void outputs(const float *shares, int rows, int width, const Split &split, float *outputs, uint16_t *expanded) {
        memory_barrier();
        const uint8_t *values[SPLIT_STEPS];
        for (int step = split.step_begin; step < split.step_end; step++) {
            values[step] = split.values[step];
            if (IS_I8) {
                uint16_t *const target = expanded + size_t(step) * STEP_KEYS * size_t(width);
                expand(target, values[step], split.after_values(step), STEP_KEYS * size_t(width));
                values[step] = reinterpret_cast<const uint8_t *>(target);
            }
        }
        memory_barrier();
        const uint8_t *const first = split.values[split.step_begin];
        int column = 0;
        if (rows <= 16) {
            for (; column + 64 <= width; column += 64) output_columns<64, !IS_I8>(shares, width, split, values, outputs, column, first);
            if (column < width) output_columns<32, !IS_I8>(shares, width, split, values, outputs, column, first);
        } else {
            for (; column < width; column += 32) output_columns<0, !IS_I8>(shares, width, split, values, outputs, column, first);
        }
        memory_barrier();
    }

  private:
    // 32 keys: 16 rows (tiles 0, 1) or 32 (and 2, 3).
    template <bool IS_TALL, bool FETCHES>
    static void score_step(const Query *queries, size_t P, const uint8_t *keys, const uint8_t *next, size_t group, float *target) {
        _tile_zero(0);
        _tile_zero(1);
        if (IS_TALL) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (size_t k = 0; k < P; k += 32) {
            const size_t at = k * 32, beside = at + group;
            _tile_loadd(4, queries + k, P * 2);
            _tile_loadd(6, keys + at, 64);
            _tile_loadd(7, keys + beside, 64);
            if (IS_TALL) _tile_loadd(5, queries + 16 * P + k, P * 2);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (IS_TALL) {
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            if (FETCHES) {
                fetch_tile(next + at, 64);
                fetch_tile(next + beside, 64);
            }
        }
        _tile_stored(0, target, SCORE_STRIDE * 4);
        _tile_stored(1, target + 16, SCORE_STRIDE * 4);
        if (IS_TALL) {
            _tile_stored(2, target + 16 * SCORE_STRIDE, SCORE_STRIDE * 4);
            _tile_stored(3, target + 16 * SCORE_STRIDE + 16, SCORE_STRIDE * 4);
        }
    }

    // COLUMNS of 16 rows, or for 0: 32 columns of 32 rows.
    template <int COLUMNS, bool FETCHES>
    static void output_columns(const float *shares, int width, const Split &split, const uint8_t *const *values, float *outputs,
                               int column, const uint8_t *first) {
        constexpr bool IS_TALL = COLUMNS == 0, IS_WIDE = COLUMNS == 64;
        const size_t stride = size_t(width) * 4, at = size_t(column) * 4;
        const bool is_last = column + (IS_WIDE ? 64 : 32) >= width;
        _tile_zero(0);
        _tile_zero(1);
        if (IS_TALL || IS_WIDE) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int step = split.step_begin; step < split.step_end; step++) {
            const uint16_t *const row = reinterpret_cast<const uint16_t *>(shares) + step * STEP_KEYS;
            const uint8_t *const tile = values[step] + at;
            _tile_loadd(4, row, SCORE_STRIDE * 4);
            _tile_loadd(6, tile, stride);
            _tile_loadd(7, tile + 64, stride);
            if (IS_TALL) _tile_loadd(5, row + 16 * SCORE_STRIDE * 2, SCORE_STRIDE * 4);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (IS_TALL) {
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            if (IS_WIDE) {
                _tile_loadd(5, tile + 128, stride);
                _tile_loadd(6, tile + 192, stride);
                _tile_dpbf16ps(2, 4, 5);
                _tile_dpbf16ps(3, 4, 6);
            }
            if (FETCHES) {
                const bool is_end = step + 1 == split.step_end;
                const uint8_t *const next = is_end && !is_last ? first + at + (IS_WIDE ? 256 : 128) : split.after_values(step) + at;
                fetch_tile(next, stride);
                fetch_tile(next + 64, stride);
                if (IS_WIDE) {
                    fetch_tile(next + 128, stride);
                    fetch_tile(next + 192, stride);
                }
            }
        }
        float *const target = outputs + column;
        _tile_stored(0, target, stride);
        _tile_stored(1, target + 16, stride);
        if (IS_TALL) {
            _tile_stored(2, target + 16 * width, stride);
            _tile_stored(3, target + 16 * width + 16, stride);
        }
        if (IS_WIDE) {
            _tile_stored(2, target + 32, stride);
            _tile_stored(3, target + 48, stride);
        }
    }
};

}  // namespace
}  // namespace pdm

#endif
