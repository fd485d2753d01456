// Scores and outputs of attention by vector lanes: 16 keys, or 16 columns of the values. A lane's sum runs over pairs, one after
// the other, whatever else is computed beside it.
#pragma once

#include "softmax.h"
#include "split.h"

namespace pdm {
namespace {

// Rows that share what was loaded; with twice as many registers, twice as many.
#if defined(__AVX512F__)
constexpr int LANE_ROWS = 8;
#else
constexpr int LANE_ROWS = 4;
#endif

inline void fetch_bytes(const uint8_t *p, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) _mm_prefetch(reinterpret_cast<const char *>(p + i), _MM_HINT_T0);
}

// Pairs in f32: what the pool holds is expanded as it is loaded. Item i of a step; in f32 its partner lies `apart` items behind.
template <int DTYPE>
struct ExpandedPairs {
    using Left = float;
    struct Right {
        F16 first, second;
    };
    static Right right(const uint8_t *step, size_t i, size_t apart) {
        if (DTYPE == PDM_F32) {
            const float *const items = reinterpret_cast<const float *>(step) + i;
            return {load(items), load(items + apart)};
        }
        return DTYPE == PDM_BF16 ? pairs_from_bf16(step + 2 * i) : pairs_from_i8(step + i);
    }
    static F16 dot(F16 c, const Left *left, const Right &right) {
        return fma(splat(left[1]), right.second, fma(splat(left[0]), right.first, c));
    }

  private:
#if defined(__AVX512F__)
    static Right pairs_from_bf16(const uint8_t *p) {
        const __m512i pairs = _mm512_loadu_si512(p);
        return {{_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))},
                {_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000))))}};
    }
    static Right pairs_from_i8(const uint8_t *p) {
        const __m512i pairs = _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
        return {{_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(pairs, 24), 24))},
                {_mm512_cvtepi32_ps(_mm512_srai_epi32(pairs, 8))}};
    }
#else
    static Right pairs_from_bf16(const uint8_t *p) {
        const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
        const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p) + 1), mask = _mm256_set1_epi32(int(0xffff0000));
        return {{_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))},
                {_mm256_castsi256_ps(_mm256_and_si256(low, mask)), _mm256_castsi256_ps(_mm256_and_si256(high, mask))}};
    }
    static Right pairs_from_i8(const uint8_t *p) {
        const __m256i low = _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
        const __m256i high = _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p) + 1));
        return {{low_bytes(low), low_bytes(high)},
                {_mm256_cvtepi32_ps(_mm256_srai_epi32(low, 8)), _mm256_cvtepi32_ps(_mm256_srai_epi32(high, 8))}};
    }
    static __m256 low_bytes(__m256i pairs) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(pairs, 24), 24)); }
#endif
};

#if defined(__AVX512BF16__)
// Pairs of bf16, multiplied as they are.
struct Bf16Pairs {
    using Left = uint16_t;
    using Right = F16;
    static Right right(const uint8_t *step, size_t i, size_t) { return load_pairs(step + 2 * i); }
    static F16 dot(F16 c, const Left *left, Right right) {
        uint32_t pair;
        memcpy(&pair, left, 4);
        return dot_pairs(c, splat_pair(pair), right);
    }
};
#endif

template <typename Pairs, int DTYPE>
struct LaneProduct {
    using Query = typename Pairs::Left;
    using Share = typename Pairs::Left;

    static void scores(const Query *queries, int rows, int width, const Split &split, float *scores, uint16_t *) {
        const size_t P = size_t(width), step_bytes = STEP_KEYS * P * item_bytes(DTYPE);
        for (int step = split.step_begin; step < split.step_end; step++) {
            fetch_bytes(split.after_keys(step), step_bytes);
            for (size_t group = 0; group < 2; group++) {
                float *const target = scores + step * STEP_KEYS + group * 16;
                int row = 0;
                for (; row + LANE_ROWS <= rows; row += LANE_ROWS)
                    score_rows<LANE_ROWS>(queries + size_t(row) * P, P, split.keys[step], group, target + row * SCORE_STRIDE);
                for (; row + 4 <= rows; row += 4)
                    score_rows<4>(queries + size_t(row) * P, P, split.keys[step], group, target + row * SCORE_STRIDE);
                for (; row + 2 <= rows; row += 2)
                    score_rows<2>(queries + size_t(row) * P, P, split.keys[step], group, target + row * SCORE_STRIDE);
                if (row < rows) score_rows<1>(queries + size_t(row) * P, P, split.keys[step], group, target + row * SCORE_STRIDE);
            }
        }
    }

    static void outputs(const float *shares, int rows, int width, const Split &split, float *outputs, uint16_t *) {
        const size_t P = size_t(width);
        for (size_t column = 0; column < P; column += 16) {
            int row = 0;
            for (; row + LANE_ROWS <= rows; row += LANE_ROWS)
                output_rows<LANE_ROWS>(shares + row * SCORE_STRIDE, P, split, column, outputs + size_t(row) * P);
            for (; row + 4 <= rows; row += 4) output_rows<4>(shares + row * SCORE_STRIDE, P, split, column, outputs + size_t(row) * P);
            for (; row + 2 <= rows; row += 2) output_rows<2>(shares + row * SCORE_STRIDE, P, split, column, outputs + size_t(row) * P);
            if (row < rows) output_rows<1>(shares + row * SCORE_STRIDE, P, split, column, outputs + size_t(row) * P);
        }
    }

  private:
    template <int ROWS>
    static void score_rows(const Query *queries, size_t P, const uint8_t *keys, size_t group, float *target) {
        F16 sums[ROWS];
        for (int row = 0; row < ROWS; row++) sums[row] = zero();
        for (size_t pair = 0; pair < P / 2; pair++) {
            const typename Pairs::Right right = Pairs::right(keys, group * 16 * P + pair * 32, 16);
            for (int row = 0; row < ROWS; row++) sums[row] = Pairs::dot(sums[row], queries + size_t(row) * P + 2 * pair, right);
        }
        for (int row = 0; row < ROWS; row++) store(target + row * SCORE_STRIDE, sums[row]);
    }

    template <int ROWS>
    static void output_rows(const float *shares, size_t P, const Split &split, size_t column, float *target) {
        // In f32 a token's items lie side by side, in the others a pair's.
        constexpr size_t SIDE = DTYPE == PDM_F32 ? 1 : 2;
        const size_t step_bytes = STEP_KEYS * P * item_bytes(DTYPE);
        F16 sums[ROWS];
        for (int row = 0; row < ROWS; row++) sums[row] = zero();
        for (int step = split.step_begin; step < split.step_end; step++) {
            if (column == 0) fetch_bytes(split.after_values(step), step_bytes);
            for (size_t pair = 0; pair < STEP_KEYS / 2; pair++) {
                const typename Pairs::Right right = Pairs::right(split.values[step], pair * 2 * P + column * SIDE, P);
                for (int row = 0; row < ROWS; row++) {
                    const Share *const left = reinterpret_cast<const Share *>(shares + row * SCORE_STRIDE) + step * STEP_KEYS;
                    sums[row] = Pairs::dot(sums[row], left + 2 * pair, right);
                }
            }
        }
        for (int row = 0; row < ROWS; row++) store(target + size_t(row) * P + column, sums[row]);
    }
};

}  // namespace
}  // namespace pdm
