// The softmax of one query over one split's scores, and how the results of splits are put together.
// Exponents are of 2: a score's factor holds log2(e) too, and maxima are kept in these units.
#pragma once

#include <math.h>

#include "kv_places.h"
#include "simd.h"

namespace pdm {
namespace {

constexpr float LOG2_E = 1.44269504f;
// A row of scores, in floats: not a power of two, so that 16 rows do not fall into the same few sets of the first cache.
constexpr int SCORE_STRIDE = PDM_SPLIT + 16;

// 2^x for x <= 0 (or a rounding error above): a minimax polynomial of degree 5 on [0, 1), relative error under 2e-7. Exactly 0 for
// minus infinity, and NaN for NaN.
inline F16 exp2(F16 x) {
#if defined(__AVX512F__)
    const F16 r = {_mm512_reduce_ps(x.v, 9)};
#else
    // Operands in this order let a NaN through.
    x = max(splat(-127.0f), x);
    const F16 whole = {_mm256_round_ps(x.lo, 9), _mm256_round_ps(x.hi, 9)}, r = x - whole;
#endif
    F16 y = fma(splat(0.00187757669f), r, splat(0.00898933969f));
    y = fma(y, r, splat(0.0558263175f));
    y = fma(y, r, splat(0.240153611f));
    y = fma(y, r, splat(0.693153083f));
    y = fma(y, r, splat(0.99999994f));
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
inline float exp2(float x) {
    alignas(64) float lanes[16];
    store(lanes, exp2(splat(x)));
    return lanes[0];
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

inline void refine_scores(float *row, int begin, int end, const Scoring &scoring) {
    for (int i = begin; i < end; i += 16) {
        F16 x = load(row + i);
        if (scoring.key_scales) x = x * load(scoring.key_scales + i);
        if (scoring.soft_cap != 0.0f) x = splat(scoring.soft_cap) * tanh(x * splat(scoring.scale / scoring.soft_cap));
        store(row + i, x);
    }
}

// Turns a row of scores into shares exp(score - maximum), in place, as `Share` (float or bf16). Unseen ones are exactly 0, within
// the steps that the tile works on. A row that sees nothing has sum 0.
template <typename Share>
void softmax_row(float *row, Seen seen, const Scoring &scoring, float &maximum, float &sum_of_shares) {
    Share *const shares = reinterpret_cast<Share *>(row);
    maximum = -INFINITY;
    sum_of_shares = 0.0f;
    const bool sees = seen.begin < seen.end;
    const int begin = sees ? seen.begin / STEP_KEYS * STEP_KEYS : scoring.step_begin * STEP_KEYS;
    const int end = sees ? round_up(seen.end, STEP_KEYS) : begin;
    if (sees) {
        if (scoring.key_scales || scoring.soft_cap != 0.0f) refine_scores(row, begin, end, scoring);
        for (int i = begin; i < seen.begin; i++) row[i] = -INFINITY;
        for (int i = seen.end; i < end; i++) row[i] = -INFINITY;
        F16 best = load(row + begin), other = load(row + begin + 16);
        for (int i = begin + STEP_KEYS; i < end; i += STEP_KEYS) {
            best = max(best, load(row + i));
            other = max(other, load(row + i + 16));
        }
        maximum = largest(max(best, other)) * scoring.factor;
        const F16 factor = splat(scoring.factor), shift = splat(-maximum);
        F16 total = zero(), rest = zero();
        for (int i = begin; i < end; i += STEP_KEYS) {
            F16 a = exp2(fma(load(row + i), factor, shift)), b = exp2(fma(load(row + i + 16), factor, shift));
            total = total + a;
            rest = rest + b;
            if (scoring.value_scales) {
                a = a * load(scoring.value_scales + i);
                b = b * load(scoring.value_scales + i + 16);
            }
            store_share(shares, i, a, b);
        }
        sum_of_shares = sum(total + rest);
    }
    // After the scores have been read: as bf16 these places are where scores were.
    for (int i = scoring.step_begin * STEP_KEYS; i < begin; i += STEP_KEYS) store_share(shares, i, zero(), zero());
    for (int i = end; i < scoring.step_end * STEP_KEYS; i += STEP_KEYS) store_share(shares, i, zero(), zero());
}

// Of one query: the splits put together so far.
struct Joined {
    float maximum = -INFINITY, sum = 0.0f;
};

// Adds one split's result. `output` is zero before the first. The order of splits is part of the result.
inline void join(Joined &joined, float *output, int width, float maximum, float sum, const float *split_output) {
    if (sum == 0.0f) return;
    const float larger = joined.maximum > maximum ? joined.maximum : maximum;
    const float keep = exp2(joined.maximum - larger), take = exp2(maximum - larger);
    joined.sum = joined.sum * keep + sum * take;
    joined.maximum = larger;
    const F16 keeps = splat(keep), takes = splat(take);
    for (int i = 0; i < width; i += 16) store(output + i, fma(load(split_output + i), takes, load(output + i) * keeps));
}

}  // namespace
}  // namespace pdm
