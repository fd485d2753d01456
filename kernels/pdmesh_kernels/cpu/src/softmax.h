// The softmax of one query over one split's scores, and how the results of splits are put together.
// Exponents are of 2: a score's factor holds log2(e) too, and maxima are kept in these units.
#pragma once

#include <math.h>

#include "kv_places.h"
#include "simd.h"

namespace pdm {
namespace {

constexpr float LOG2_E = 1.44269504f;
// In place of a maximum of minus infinity.
constexpr float LEAST = -3e38f;
// A row of scores, in floats: not a power of two, so that 16 rows do not fall into the same few sets of the first cache.
constexpr int SCORE_STRIDE = PDM_SPLIT + 16;

// 2^x for x <= 0 (or a rounding error above) by a minimax polynomial on [0, 1): of degree 5, relative error under 3e-7 and exactly 1
// at 0, or of degree 3, under 8e-5, for what is rounded to bf16 next. Exactly 0 for minus infinity, and NaN for NaN.
template <int DEGREE = 5>
inline F16 exp2(F16 x) {
    static_assert(DEGREE == 5 || DEGREE == 3);
#if defined(__AVX512F__)
    const F16 r = {_mm512_reduce_ps(x.v, 9)};
#else
    // Operands in this order let a NaN through.
    x = max(splat(-127.0f), x);
    const F16 whole = {_mm256_round_ps(x.lo, 9), _mm256_round_ps(x.hi, 9)}, r = x - whole;
#endif
    F16 y;
    if (DEGREE == 5) {
        y = fma(splat(0.00187757669f), r, splat(0.00898933969f));
        y = fma(y, r, splat(0.0558263175f));
        y = fma(y, r, splat(0.240153611f));
        y = fma(y, r, splat(0.693153083f));
        y = fma(y, r, splat(1.0f));
    } else {
        y = fma(splat(0.07802452f), r, splat(0.22606716f));
        y = fma(y, r, splat(0.69583356f));
        y = fma(y, r, splat(0.9999252f));
    }
#if defined(__AVX512F__)
    return {_mm512_scalef_ps(y.v, x.v)};
#else
    // At -127 the exponent's bits are all zero, and so is the power.
    const __m256i bias = _mm256_set1_epi32(127);
    const __m256i low = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole.lo), bias), 23);
    const __m256i high = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole.hi), bias), 23);
    return y * F16{_mm256_castsi256_ps(low), _mm256_castsi256_ps(high)};
#endif
}

// What all queries of a split share.
struct Scoring {
    float factor;               // of a score: scale * log2(e), or log2(e) alone once a soft cap has been applied
    float scale, soft_cap;      // soft_cap 0: none
    const float *key_scales;    // [PDM_SPLIT], or nullptr
    const float *value_scales;  // likewise
    int step_begin, step_end;   // steps of the split that some query of the tile sees
};

// Keys [begin, end) of the split, those that one query sees; none: begin >= end.
struct Seen {
    int begin, end;
};

inline void store_share(float *row, int i, F16 a, F16 b) {
    store(row + i, a);
    store(row + i + 16, b);
}
// In place: 2 bytes come where 4 were, and those behind are still to be read.
inline void store_share(uint16_t *row, int i, F16 a, F16 b) { to_bf16_pair(row + i, a, b); }

// Rows whose maxima and sums are reduced together: one row's would take as long as a third of its exponentials.
constexpr int SOFTMAX_ROWS = 4;

#if defined(__AVX512F__)
inline F16 unpack_low(F16 a, F16 b) { return {_mm512_unpacklo_ps(a.v, b.v)}; }
inline F16 unpack_high(F16 a, F16 b) { return {_mm512_unpackhi_ps(a.v, b.v)}; }
inline F16 low_pairs(F16 a, F16 b) { return {_mm512_shuffle_ps(a.v, b.v, 0x44)}; }
inline F16 high_pairs(F16 a, F16 b) { return {_mm512_shuffle_ps(a.v, b.v, 0xee)}; }
inline F16 swap_halves(F16 a) { return {_mm512_shuffle_f32x4(a.v, a.v, 0x4e)}; }
inline F16 swap_quarters(F16 a) { return {_mm512_shuffle_f32x4(a.v, a.v, 0xb1)}; }
template <int LANE>
inline F16 splat_lane(F16 a) {
    return {_mm512_permute_ps(a.v, LANE * 0x55)};
}
inline void store_four(float *p, F16 a) { _mm_storeu_ps(p, _mm512_castps512_ps128(a.v)); }
#else
inline F16 unpack_low(F16 a, F16 b) { return {_mm256_unpacklo_ps(a.lo, b.lo), _mm256_unpacklo_ps(a.hi, b.hi)}; }
inline F16 unpack_high(F16 a, F16 b) { return {_mm256_unpackhi_ps(a.lo, b.lo), _mm256_unpackhi_ps(a.hi, b.hi)}; }
inline F16 low_pairs(F16 a, F16 b) { return {_mm256_shuffle_ps(a.lo, b.lo, 0x44), _mm256_shuffle_ps(a.hi, b.hi, 0x44)}; }
inline F16 high_pairs(F16 a, F16 b) { return {_mm256_shuffle_ps(a.lo, b.lo, 0xee), _mm256_shuffle_ps(a.hi, b.hi, 0xee)}; }
inline F16 swap_halves(F16 a) { return {a.hi, a.lo}; }
inline F16 swap_quarters(F16 a) { return {_mm256_permute2f128_ps(a.lo, a.lo, 1), _mm256_permute2f128_ps(a.hi, a.hi, 1)}; }
template <int LANE>
inline F16 splat_lane(F16 a) {
    return {_mm256_permute_ps(a.lo, LANE * 0x55), _mm256_permute_ps(a.hi, LANE * 0x55)};
}
inline void store_four(float *p, F16 a) { _mm_storeu_ps(p, _mm256_castps256_ps128(a.lo)); }
#endif
inline F16 splat_lane(F16 a, int lane) {
    return lane == 0 ? splat_lane<0>(a) : lane == 1 ? splat_lane<1>(a) : lane == 2 ? splat_lane<2>(a) : splat_lane<3>(a);
}

// Four vectors' lanes joined to one number each, which is then in every fourth lane of the result.
template <typename Join>
F16 reduce_four(const F16 *rows, Join join) {
    const F16 ab = join(unpack_low(rows[0], rows[1]), unpack_high(rows[0], rows[1]));
    const F16 cd = join(unpack_low(rows[2], rows[3]), unpack_high(rows[2], rows[3]));
    F16 all = join(low_pairs(ab, cd), high_pairs(ab, cd));
    all = join(all, swap_halves(all));
    return join(all, swap_quarters(all));
}

inline void refine_scores(float *row, int begin, int end, const Scoring &scoring) {
    for (int i = begin; i < end; i += 16) {
        F16 x = load(row + i);
        if (scoring.key_scales) x = x * load(scoring.key_scales + i);
        if (scoring.soft_cap != 0.0f) x = splat(scoring.soft_cap) * tanh(x * splat(scoring.scale / scoring.soft_cap));
        store(row + i, x);
    }
}

// Scores [begin, end) that the query does not see become minus infinity.
inline void hide_scores(float *row, int begin, int end, Seen seen) {
    for (int i = begin; i < end; i += 16) {
        if (seen.begin <= i && seen.end >= i + 16) continue;
        const int before = seen.begin - i, until = seen.end - i;
        F16 x = first(until < 0 ? 0 : until > 16 ? 16 : until, load(row + i), splat(-INFINITY));
        x = first(before < 0 ? 0 : before > 16 ? 16 : before, splat(-INFINITY), x);
        store(row + i, x);
    }
}

// Turns COUNT rows of scores into shares exp(score - maximum), in place, as `Share` (float or bf16). Unseen ones are exactly 0,
// within the steps that the tile works on. A row that sees nothing has sum 0. What a row's results are does not depend on the
// others: where only they see keys, it has exponentials of minus infinity, which change no sum. Writes 4 maxima and sums.
template <typename Share, int COUNT>
void softmax_rows(float *scores, const Seen *seen, const Scoring &scoring, float *maxima, float *sums) {
    constexpr int DEGREE = sizeof(Share) == 2 ? 3 : 5;
    int begin = PDM_SPLIT, end = 0;
    for (int row = 0; row < COUNT; row++) {
        if (seen[row].begin >= seen[row].end) continue;
        if (seen[row].begin < begin) begin = seen[row].begin;
        if (seen[row].end > end) end = seen[row].end;
    }
    begin = begin < end ? begin / STEP_KEYS * STEP_KEYS : scoring.step_begin * STEP_KEYS;
    end = begin < end ? round_up(end, STEP_KEYS) : begin;

    F16 best[SOFTMAX_ROWS];
    for (int row = 0; row < COUNT; row++) {
        float *const x = scores + row * SCORE_STRIDE;
        if (scoring.key_scales || scoring.soft_cap != 0.0f) refine_scores(x, begin, end, scoring);
        if (seen[row].begin > begin || seen[row].end < end) hide_scores(x, begin, end, seen[row]);
        F16 even = splat(-INFINITY), odd = even;
        for (int i = begin; i < end; i += STEP_KEYS) {
            even = max(even, load(x + i));
            odd = max(odd, load(x + i + 16));
        }
        best[row] = max(even, odd);
    }
    for (int row = COUNT; row < SOFTMAX_ROWS; row++) best[row] = best[0];
    const F16 factor = splat(scoring.factor);
    const F16 largest_ones = reduce_four(best, [](F16 a, F16 b) { return max(a, b); }) * factor;
    store_four(maxima, largest_ones);
    // With minus infinity the scores of a row that sees nothing would become NaN. Operands in this order let a NaN through.
    const F16 shifts = zero() - max(splat(LEAST), largest_ones);
    F16 totals[SOFTMAX_ROWS];
    for (int row = 0; row < COUNT; row++) {
        const float *const x = scores + row * SCORE_STRIDE;
        Share *const shares = reinterpret_cast<Share *>(scores + row * SCORE_STRIDE);
        const F16 shift = splat_lane(shifts, row);
        F16 even = zero(), odd = zero();
        for (int i = begin; i < end; i += STEP_KEYS) {
            F16 a = exp2<DEGREE>(fma(load(x + i), factor, shift)), b = exp2<DEGREE>(fma(load(x + i + 16), factor, shift));
            even = even + a;
            odd = odd + b;
            if (scoring.value_scales) {
                a = a * load(scoring.value_scales + i);
                b = b * load(scoring.value_scales + i + 16);
            }
            store_share(shares, i, a, b);
        }
        totals[row] = even + odd;
        // After the scores have been read: as bf16 these places are where scores were.
        for (int i = scoring.step_begin * STEP_KEYS; i < begin; i += STEP_KEYS) store_share(shares, i, zero(), zero());
        for (int i = end; i < scoring.step_end * STEP_KEYS; i += STEP_KEYS) store_share(shares, i, zero(), zero());
    }
    for (int row = COUNT; row < SOFTMAX_ROWS; row++) totals[row] = totals[0];
    store_four(sums, reduce_four(totals, [](F16 a, F16 b) { return a + b; }));
}

// `count` rows; the arrays of results, and of what is seen, have room for a multiple of SOFTMAX_ROWS.
template <typename Share>
void softmax(float *scores, int count, const Seen *seen, const Scoring &scoring, float *maxima, float *sums) {
    int row = 0;
    for (; row + 4 <= count; row += 4) softmax_rows<Share, 4>(scores + row * SCORE_STRIDE, seen + row, scoring, maxima + row, sums + row);
    switch (count - row) {
        case 1: return softmax_rows<Share, 1>(scores + row * SCORE_STRIDE, seen + row, scoring, maxima + row, sums + row);
        case 2: return softmax_rows<Share, 2>(scores + row * SCORE_STRIDE, seen + row, scoring, maxima + row, sums + row);
        case 3: return softmax_rows<Share, 3>(scores + row * SCORE_STRIDE, seen + row, scoring, maxima + row, sums + row);
        default: return;
    }
}

// Of a tile's queries: the splits put together so far.
struct Joined {
    float maxima[TILE_ROWS], sums[TILE_ROWS];
};

inline void begin_joined(Joined &joined) {
    for (int row = 0; row < TILE_ROWS; row += 16) {
        store(joined.maxima + row, splat(-INFINITY));
        store(joined.sums + row, zero());
    }
}

// Adds one split's results of `count` rows. `outputs` are zero before the first. The order of splits is part of the result; a split of
// which a row sees nothing (sum 0) leaves the row as it was.
inline void join(Joined &joined, float *outputs, int count, int width, const float *split_outputs, const float *maxima, const float *sums) {
    alignas(64) float keeps[TILE_ROWS], takes[TILE_ROWS];
    for (int row = 0; row < count; row += 16) {
        const F16 before = load(joined.maxima + row), now = load(maxima + row), largest_yet = max(before, now);
        // As in softmax_rows.
        const F16 shift = max(splat(LEAST), largest_yet), keep = exp2(before - shift), take = exp2(now - shift);
        store(joined.maxima + row, largest_yet);
        store(joined.sums + row, load(joined.sums + row) * keep + load(sums + row) * take);
        store(keeps + row, keep);
        store(takes + row, take);
    }
    for (int row = 0; row < count; row++) {
        if (sums[row] == 0.0f) continue;
        float *const output = outputs + row * width;
        const float *const split_output = split_outputs + row * width;
        const F16 keep = splat(keeps[row]), take = splat(takes[row]);
        for (int i = 0; i < width; i += 16) store(output + i, fma(load(split_output + i), take, load(output + i) * keep));
    }
}

}  // namespace
}  // namespace pdm
