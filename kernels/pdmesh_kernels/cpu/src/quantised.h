// Groupwise quantised weights (Q4, Q4_WIDE, Q8) made into the panel of PDM_W_BF16, a few K-steps at a time, into scratch that stays
// in the cache; then they are multiplied as bf16 weights are. So any number of rows gives what a bf16 model of the same file gives.
#pragma once

#include "int8.h"
#include "multiply.h"
#include "quantised_panels.h"
#include "simd.h"

namespace pdm {
namespace {

// The nearest cache cannot have enough reads in flight for memory's latency, so lines come to the second one first. Measured, cycles
// per 32 cold 4-bit weights: 6.3; with the near distance alone 6.6.
constexpr int NEAR_BYTES = 1024, FAR_BYTES = 2560;

inline void prefetch(const uint8_t *p) {
    _mm_prefetch(reinterpret_cast<const char *>(p + NEAR_BYTES), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char *>(p + FAR_BYTES), _MM_HINT_T1);
}

// One value of each kind for eight outputs, twice each, as the codes of a pair of inputs lie: [half][outputs 0-7, 8-15].
struct StepScales {
    F16 lanes[2][2];
};
template <bool IS_WIDE>
inline StepScales load_scales(const uint8_t *p) {
    StepScales scales;
    for (int half = 0; half < 2; half++) {
        F16 values;
        if constexpr (IS_WIDE) {
            values = load(reinterpret_cast<const float *>(p) + half * HALF_PANEL);
        } else {
            values = from_f16(reinterpret_cast<const uint16_t *>(p) + half * HALF_PANEL);
        }
        scales.lanes[half][0] = twice_low(values);
        scales.lanes[half][1] = twice_high(values);
    }
    return scales;
}

// Writes pairs where tiles have them.
struct PairWriter {
    uint16_t *target;
    void operator()(int half, int pair, F16 a, F16 b) const { to_bf16_pair(target + (half * 16 + pair) * 32, a, b); }
};

// Gives `take` each pair of inputs of a step as (half, pair, outputs 0-7 twice each, outputs 8-15): a pair of both halves, then the
// next one (IS_TOGETHER), or one half after the other.
template <bool IS_TOGETHER, typename Take>
inline void expand_q4(const uint8_t *step, const StepScales &scales, const StepScales &offsets, Take &&take) {
    constexpr int HALVES = IS_TOGETHER ? 2 : 1;
#pragma GCC unroll 2
    for (int first = 0; first < 2; first += HALVES) {
        for (int part = 0; part < 2; part++) {
            const uint8_t *const codes = step + first * 256 + part * 128;
            for (int half = 0; half < HALVES; half++) {
                prefetch(codes + half * 256);
                prefetch(codes + half * 256 + 64);
            }
#pragma GCC unroll 8
            for (int n = 0; n < 8; n++) {
#pragma GCC unroll 2
                for (int half = first; half < first + HALVES; half++) {
                    const uint8_t *const p = codes + (half - first) * 256;
                    take(half, part * 8 + n, fma(from_nibble(p, n), scales.lanes[half][0], offsets.lanes[half][0]),
                         fma(from_nibble(p + 64, n), scales.lanes[half][1], offsets.lanes[half][1]));
                }
            }
        }
    }
}

template <bool IS_TOGETHER, typename Take>
inline void expand_q8(const uint8_t *step, const StepScales &scales, Take &&take) {
    constexpr int HALVES = IS_TOGETHER ? 2 : 1;
#pragma GCC unroll 2
    for (int first = 0; first < 2; first += HALVES) {
#pragma GCC unroll 16
        for (int pair = 0; pair < 16; pair++) {
#pragma GCC unroll 2
            for (int half = first; half < first + HALVES; half++) {
                const uint8_t *const p = step + half * 512 + pair * 32;
                if (pair % 2 == 0) prefetch(p);
                const int8_t *const codes = reinterpret_cast<const int8_t *>(p);
                take(half, pair, from_i8(codes) * scales.lanes[half][0], from_i8(codes + 16) * scales.lanes[half][1]);
            }
        }
    }
}

// A source of tiles for product_bf16.h.
template <int FORMAT>
struct GroupTiles {
    explicit GroupTiles(const pdm_weight &weight)
        : panels_(static_cast<const uint8_t *>(weight.panels)), panel_bytes_(weight.panel_bytes), group_(weight.group) {}
    // By lanes each block costs some calls, and what is expanded lies in the second cache as well as in the first.
    static constexpr int MANY_ROWS_BLOCK = 2048, FEW_ROWS_BLOCK = READS_WHOLE_TILES ? 128 : MANY_ROWS_BLOCK;
    // Of linear_fused: with more, the registers do not hold what Q8 has under way.
    static constexpr int MOST_FUSED_ROWS = FORMAT == PDM_W_Q8 ? 4 : 8;
    static constexpr bool IS_PACKED = false;

    const uint16_t *tiles(int panel, int k_begin, int k_count, uint16_t *buffer) const {
        const int first = k_begin / STEP_INPUTS;
        each_step<false>(panel, first, first + k_count / STEP_INPUTS, [&](int step) {
            return PairWriter{buffer + size_t(step - first) * (BF16_STEP_BYTES / 2)};
        });
        return buffer;
    }

    // Expands steps [first, end) of a panel, each into what `taker(step)` returns.
    template <bool IS_TOGETHER, typename Taker>
    void each_step(int panel, int first, int end, Taker &&taker) const {
        constexpr bool IS_WIDE = FORMAT == PDM_W_Q4_WIDE;
        constexpr size_t HEADER_BYTES = group_header_bytes(FORMAT), CODES_BYTES = step_bytes(FORMAT);
        const int per_group = group_ / STEP_INPUTS;
        const uint8_t *const begin = panels_ + size_t(panel) * panel_bytes_;
        const uint8_t *header = begin + header_offset(FORMAT, group_, first), *codes = begin + step_offset(FORMAT, group_, first);
        for (int step = first, group_end = first / per_group * per_group; step < end; header = codes, codes += HEADER_BYTES) {
            group_end += per_group;
            for (size_t line = 0; line < HEADER_BYTES; line += 64) prefetch(header + line);
            const StepScales scales = load_scales<IS_WIDE>(header);
            if constexpr (FORMAT == PDM_W_Q8) {
                for (; step < end && step < group_end; step++, codes += CODES_BYTES)
                    expand_q8<IS_TOGETHER>(codes, scales, taker(step));
            } else {
                const StepScales offsets = load_scales<IS_WIDE>(header + HEADER_BYTES / 2);
                for (; step < end && step < group_end; step++, codes += CODES_BYTES)
                    expand_q4<IS_TOGETHER>(codes, scales, offsets, taker(step));
            }
        }
    }

  private:
    const uint8_t *const panels_;
    const size_t panel_bytes_;
    const int group_;
};
using Q8Tiles = GroupTiles<PDM_W_Q8>;
using Q4Tiles = GroupTiles<PDM_W_Q4>;
using Q4WideTiles = GroupTiles<PDM_W_Q4_WIDE>;

}  // namespace
}  // namespace pdm
