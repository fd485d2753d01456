// Scans over a row of logits, sixteen at a time. Included by sampling_avx2.cpp and sampling_avx512.cpp only.
//
// The race: the largest logit plus Gumbel noise is the shortest of the times -log(u) / w, where w = exp(logit - largest) and u is
// the noise's number in (0, 1). No time is below (1 - u) / w, the earliest time, which takes one exponential and no logarithm.
#pragma once

#include <math.h>

#include "sampling.h"
#include "simd.h"

namespace pdm {
namespace {

constexpr uint64_t MULTIPLIER_0 = 0xD2511F53, MULTIPLIER_1 = 0xCD9E8D57, KEY_STEP_0 = 0x9E3779B9, KEY_STEP_1 = 0xBB67AE85;
// exp(88) is the last that a float holds; a time that long has lost.
constexpr float MAX_EXPONENT = 88.0f;

// Eight 32-bit words, each in 64 bits. What is above a word is garbage that multiplication does not see.
#if defined(__AVX512F__)
struct W8 {
    __m512i v;
};
inline W8 words(uint64_t x) { return {_mm512_set1_epi64((int64_t)x)}; }
inline W8 count_from(uint64_t x) { return {_mm512_add_epi64(_mm512_set1_epi64((int64_t)x), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7))}; }
inline W8 product(W8 a, W8 b) { return {_mm512_mul_epu32(a.v, b.v)}; }
inline W8 high(W8 a) { return {_mm512_srli_epi64(a.v, 32)}; }
inline W8 operator^(W8 a, W8 b) { return {_mm512_xor_si512(a.v, b.v)}; }
// Eight ids, and of each the word that its two low bits choose.
inline W8 load_ids(const int32_t *p) { return {_mm512_cvtepi32_epi64(_mm256_loadu_si256((const __m256i *)p))}; }
inline W8 quarter(W8 a) { return {_mm512_srli_epi64(a.v, 2)}; }
inline W8 chosen(W8 ids, const W8 w[4]) {
    const __mmask8 odd = _mm512_test_epi64_mask(ids.v, _mm512_set1_epi64(1)), upper = _mm512_test_epi64_mask(ids.v, _mm512_set1_epi64(2));
    const __m512i low = _mm512_mask_mov_epi64(w[0].v, odd, w[1].v), top = _mm512_mask_mov_epi64(w[2].v, odd, w[3].v);
    return {_mm512_mask_mov_epi64(low, upper, top)};
}
// 1 - u of the low words of a, then of b.
inline F16 distances_of(__m512i bits) {
    const __m512 wide = _mm512_cvtepu32_ps(_mm512_xor_si512(bits, _mm512_set1_epi32(-1)));
    return {_mm512_mul_ps(_mm512_add_ps(wide, _mm512_set1_ps(0.5f)), _mm512_set1_ps(0x1p-32f))};
}
inline F16 distances(W8 a, W8 b) {
    const __m512i low = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi64_epi32(a.v)), _mm512_cvtepi64_epi32(b.v), 1);
    return distances_of(low);
}
// Those of 32 tokens in a row, whose words are w[token % 4] at token / 4.
inline void distances_in_order(const W8 w[4], F16 d[2]) {
    const __m512i first = _mm512_mask_mov_epi32(w[0].v, 0xaaaa, _mm512_slli_epi64(w[1].v, 32));
    const __m512i second = _mm512_mask_mov_epi32(w[2].v, 0xaaaa, _mm512_slli_epi64(w[3].v, 32));
    d[0] = distances_of(_mm512_permutex2var_epi64(first, _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11), second));
    d[1] = distances_of(_mm512_permutex2var_epi64(first, _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15), second));
}
inline uint32_t at_least(F16 a, F16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
inline F16 unless(uint32_t lanes, F16 a, F16 b) { return {_mm512_mask_mov_ps(a.v, (__mmask16)lanes, b.v)}; }
inline int keep_places(uint32_t lanes, int first, int32_t *places) {
    const __m512i ids = _mm512_add_epi32(_mm512_set1_epi32(first), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    _mm512_storeu_si512(places, _mm512_maskz_compress_epi32((__mmask16)lanes, ids));
    return __builtin_popcount(lanes);
}
inline void keep(uint32_t lanes, F16 values, int first, Candidates &found) {
    _mm512_storeu_ps(found.values + found.count, _mm512_maskz_compress_ps((__mmask16)lanes, values.v));
    found.count += keep_places(lanes, first, found.ids + found.count);
}
struct Sums {
    __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
    void add(F16 a) {
        low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(a.v)));
        high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(a.v, 1)));
    }
    double all() const { return _mm512_reduce_add_pd(_mm512_add_pd(low, high)); }
};
#else
struct W8 {
    __m256i lo, hi;
};
inline W8 words(uint64_t x) { return {_mm256_set1_epi64x((int64_t)x), _mm256_set1_epi64x((int64_t)x)}; }
inline W8 count_from(uint64_t x) {
    const __m256i from = _mm256_set1_epi64x((int64_t)x);
    return {_mm256_add_epi64(from, _mm256_setr_epi64x(0, 1, 2, 3)), _mm256_add_epi64(from, _mm256_setr_epi64x(4, 5, 6, 7))};
}
inline W8 product(W8 a, W8 b) { return {_mm256_mul_epu32(a.lo, b.lo), _mm256_mul_epu32(a.hi, b.hi)}; }
inline W8 high(W8 a) { return {_mm256_srli_epi64(a.lo, 32), _mm256_srli_epi64(a.hi, 32)}; }
inline W8 operator^(W8 a, W8 b) { return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)}; }
inline W8 load_ids(const int32_t *p) {
    return {_mm256_cvtepi32_epi64(_mm_loadu_si128((const __m128i *)p)), _mm256_cvtepi32_epi64(_mm_loadu_si128((const __m128i *)(p + 4)))};
}
inline W8 quarter(W8 a) { return {_mm256_srli_epi64(a.lo, 2), _mm256_srli_epi64(a.hi, 2)}; }
inline __m256i chosen_four(__m256i ids, __m256i w0, __m256i w1, __m256i w2, __m256i w3) {
    const __m256d odd = _mm256_castsi256_pd(_mm256_slli_epi64(ids, 63)), upper = _mm256_castsi256_pd(_mm256_slli_epi64(ids, 62));
    const __m256d low = _mm256_blendv_pd(_mm256_castsi256_pd(w0), _mm256_castsi256_pd(w1), odd);
    const __m256d top = _mm256_blendv_pd(_mm256_castsi256_pd(w2), _mm256_castsi256_pd(w3), odd);
    return _mm256_castpd_si256(_mm256_blendv_pd(low, top, upper));
}
inline W8 chosen(W8 ids, const W8 w[4]) {
    return {chosen_four(ids.lo, w[0].lo, w[1].lo, w[2].lo, w[3].lo), chosen_four(ids.hi, w[0].hi, w[1].hi, w[2].hi, w[3].hi)};
}
inline __m256 eight_distances(__m256i bits) {
    // No unsigned conversion here: in two halves, of which the sum is rounded once.
    const __m256i turned = _mm256_xor_si256(bits, _mm256_set1_epi32(-1));
    const __m256 top = _mm256_cvtepi32_ps(_mm256_srli_epi32(turned, 16)), low = _mm256_cvtepi32_ps(_mm256_and_si256(turned, _mm256_set1_epi32(0xffff)));
    const __m256 wide = _mm256_fmadd_ps(top, _mm256_set1_ps(65536.0f), low);
    return _mm256_mul_ps(_mm256_add_ps(wide, _mm256_set1_ps(0.5f)), _mm256_set1_ps(0x1p-32f));
}
inline __m256i low_words(W8 a) {
    const __m256i even = _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6);
    return _mm256_permute2x128_si256(_mm256_permutevar8x32_epi32(a.lo, even), _mm256_permutevar8x32_epi32(a.hi, even), 0x20);
}
inline F16 distances(W8 a, W8 b) { return {eight_distances(low_words(a)), eight_distances(low_words(b))}; }
inline F16 sixteen_in_order(__m256i w0, __m256i w1, __m256i w2, __m256i w3) {
    const __m256i first = _mm256_blend_epi32(w0, _mm256_slli_epi64(w1, 32), 0xaa), second = _mm256_blend_epi32(w2, _mm256_slli_epi64(w3, 32), 0xaa);
    const __m256i even = _mm256_unpacklo_epi64(first, second), odd = _mm256_unpackhi_epi64(first, second);
    return {eight_distances(_mm256_permute2x128_si256(even, odd, 0x20)), eight_distances(_mm256_permute2x128_si256(even, odd, 0x31))};
}
inline void distances_in_order(const W8 w[4], F16 d[2]) {
    d[0] = sixteen_in_order(w[0].lo, w[1].lo, w[2].lo, w[3].lo);
    d[1] = sixteen_in_order(w[0].hi, w[1].hi, w[2].hi, w[3].hi);
}
inline uint32_t at_least(F16 a, F16 b) {
    return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ))) |
           uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ))) << 8;
}
inline __m256 lanes_of(uint32_t lanes) {
    const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int(lanes)), bits), bits));
}
inline F16 unless(uint32_t lanes, F16 a, F16 b) {
    return {_mm256_blendv_ps(a.lo, b.lo, lanes_of(lanes)), _mm256_blendv_ps(a.hi, b.hi, lanes_of(lanes >> 8))};
}
inline int keep_places(uint32_t lanes, int first, int32_t *places) {
    int count = 0;
    for (; lanes; lanes &= lanes - 1) places[count++] = first + __builtin_ctz(lanes);
    return count;
}
inline void keep(uint32_t lanes, F16 values, int first, Candidates &found) {
    float all[16];
    store(all, values);
    for (; lanes; lanes &= lanes - 1) {
        const int lane = __builtin_ctz(lanes);
        found.values[found.count] = all[lane];
        found.ids[found.count++] = first + lane;
    }
}
struct Sums {
    __m256d sums[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()};
    void add_eight(__m256 a, int place) {
        sums[place] = _mm256_add_pd(sums[place], _mm256_cvtps_pd(_mm256_castps256_ps128(a)));
        sums[place + 1] = _mm256_add_pd(sums[place + 1], _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1)));
    }
    void add(F16 a) {
        add_eight(a.lo, 0);
        add_eight(a.hi, 2);
    }
    double all() const {
        double four[4];
        _mm256_storeu_pd(four, _mm256_add_pd(_mm256_add_pd(sums[0], sums[1]), _mm256_add_pd(sums[2], sums[3])));
        return (four[0] + four[1]) + (four[2] + four[3]);
    }
};
#endif

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011) of eight counters (token / 4, position, choice, 0): four words for each.
inline void philox(W8 counters, const NoiseStream &stream, W8 out[4]) {
    W8 c0 = counters, c1 = words(stream.position), c2 = words(stream.choice), c3 = words(0);
    const W8 m0 = words(MULTIPLIER_0), m1 = words(MULTIPLIER_1);
    uint64_t k0 = uint32_t(stream.seed), k1 = uint32_t(stream.seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const W8 p0 = product(c0, m0), p1 = product(c2, m1);
        c0 = high(p1) ^ c1 ^ words(k0);
        c2 = high(p0) ^ c3 ^ words(k1);
        c1 = p1;
        c3 = p0;
        k0 = uint32_t(k0 + KEY_STEP_0);
        k1 = uint32_t(k1 + KEY_STEP_1);
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

inline F16 load_some(const float *p, int count, float rest) {
    if (count >= 16) return load(p);
    float padded[16];
    for (int lane = 0; lane < 16; ++lane) padded[lane] = lane < count ? p[lane] : rest;
    return load(padded);
}

inline F16 divided(F16 x, F16 temperature, bool is_one) { return is_one ? x : x / temperature; }

void collect(const float *logits, int vocab, float temperature, float floor, Candidates &found) {
    found.count = 0;
    const F16 t = splat(temperature), least = splat(floor);
    // Rounding is monotonous: what is below this cannot come to the floor by division.
    const float slack = fabsf(floor * temperature) * 1e-6f;
    const F16 raw_floor = splat(floor * temperature - slack);
    for (int first = 0; first < vocab; first += 16) {
        const F16 x = load_some(logits + first, vocab - first, -INFINITY);
        uint32_t lanes = at_least(x, raw_floor);
        if (vocab - first < 16) lanes &= (1u << (vocab - first)) - 1;
        if (!lanes) continue;
        const F16 values = divided(x, t, temperature == 1.0f);
        lanes &= at_least(values, least);
        if (lanes) keep(lanes, values, first, found);
    }
}

double total(const float *logits, int vocab, float temperature, float largest) {
    const F16 t = splat(temperature), top = splat(largest), deepest = splat(-MAX_EXPONENT);
    Sums sums;
    for (int first = 0; first < vocab; first += 16) {
        const F16 x = load_some(logits + first, vocab - first, -INFINITY);
        sums.add(exp(max(divided(x, t, temperature == 1.0f) - top, deepest)));
    }
    return sums.all();
}

void weigh(Candidates &found, float largest) {
    const F16 top = splat(largest), deepest = splat(-MAX_EXPONENT);
    for (int first = 0; first < found.count; first += 16)
        store(found.scratch + first, exp(max(load(found.values + first) - top, deepest)));
}

inline F16 earliest(F16 values, F16 top, F16 distance) {
    return exp(min(top - values, splat(MAX_EXPONENT))) * distance;
}

int race(Candidates &found, float largest, const NoiseStream &stream) {
    const F16 top = splat(largest);
    // Behind the end lie ids and values of earlier scans, which lose.
    for (int index = found.count; index < found.count + 16; ++index) found.ids[index] = 0, found.values[index] = -INFINITY;
    F16 least = splat(INFINITY);
    for (int first = 0; first < found.count; first += 16) {
        W8 drawn[2];
        for (int half = 0; half < 2; ++half) {
            const W8 ids = load_ids(found.ids + first + 8 * half);
            W8 w[4];
            philox(quarter(ids), stream, w);
            drawn[half] = chosen(ids, w);
        }
        const F16 times = earliest(load(found.values + first), top, distances(drawn[0], drawn[1]));
        store(found.scratch + first, times);
        least = min(least, times);
    }
    const float first_time = -pdm::largest(zero() - least);
    for (int index = 0; index < found.count; ++index)
        if (found.scratch[index] == first_time) return index;
    return -1;
}

int race_all(const float *logits, int vocab, float temperature, float floor, float largest, const NoiseStream &stream, float *times) {
    const F16 t = splat(temperature), top = splat(largest), lost = splat(INFINITY);
    const float slack = fabsf(floor * temperature) * 1e-6f;
    const F16 raw_floor = splat(floor * temperature - slack);
    F16 least = lost;
    for (int first = 0; first < vocab; first += 32) {
        F16 x[2];
        uint32_t lanes[2];
        for (int half = 0; half < 2; ++half) {
            const int left = vocab - first - 16 * half;
            x[half] = left > 0 ? load_some(logits + first + 16 * half, left, -INFINITY) : splat(-INFINITY);
            lanes[half] = at_least(x[half], raw_floor);
        }
        if (!(lanes[0] | lanes[1])) {
            store(times + first, lost);
            store(times + first + 16, lost);
            continue;
        }
        W8 w[4];
        F16 d[2];
        philox(count_from(uint64_t(first) / 4), stream, w);
        distances_in_order(w, d);
        for (int half = 0; half < 2; ++half) {
            const F16 values = divided(x[half], t, temperature == 1.0f);
            const F16 each = unless(~lanes[half] & 0xffff, earliest(values, top, d[half]), lost);
            store(times + first + 16 * half, each);
            least = min(least, each);
        }
    }
    const F16 first_time = splat(-pdm::largest(zero() - least));
    for (int first = 0; first < vocab; first += 16)
        if (const uint32_t lanes = equal_lanes(load(times + first), first_time)) return first + __builtin_ctz(lanes);
    return -1;
}

int within(const float *times, int count, float limit, int32_t *places) {
    const F16 last = splat(limit);
    int num_found = 0;
    for (int first = 0; first < count; first += 16) {
        uint32_t lanes = at_least(last, load(times + first));
        if (count - first < 16) lanes &= (1u << (count - first)) - 1;
        if (lanes) num_found += keep_places(lanes, first, places + num_found);
    }
    return num_found;
}

constexpr Scans scans() { return {collect, total, weigh, race, race_all, within}; }

}  // namespace
}  // namespace pdm
