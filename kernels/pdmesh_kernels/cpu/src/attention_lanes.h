// Scores and outputs of attention by vector lanes: 16 keys, or 16 columns of the values. A lane's sum runs over pairs, one after
// the other, whatever else is computed beside it.
#pragma once

#include <type_traits>

#include "softmax.h"
#include "split.h"

namespace pdm {
namespace {

// Rows that share what was loaded, and vectors of 16 keys or columns beside each other: each sum is a chain of its own, and there are
// to be as many as hide a multiplication's latency and as registers hold.
#if defined(__AVX512F__)
constexpr int LANE_ROWS = 8;
constexpr int vectors_of(int rows) { return rows > 4 ? 2 : 4; }
#else
constexpr int LANE_ROWS = 4;
constexpr int vectors_of(int rows) { return rows > 2 ? 1 : 2; }
#endif

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
        const size_t P = size_t(width);
        // Keys of two steps stay in the first cache while all rows use them.
        for (int step = split.step_begin; step < split.step_end; step += 2)
            by_rows(rows, [&](auto count, int row) {
                score_block<decltype(count)::value>(queries + size_t(row) * P, P, split, step, row == 0, scores + row * SCORE_STRIDE);
            });
    }

    static void outputs(const float *shares, int rows, int width, const Split &split, float *outputs, uint16_t *) {
        const size_t P = size_t(width);
        by_rows(rows, [&](auto count, int row) {
            output_block<decltype(count)::value>(shares + row * SCORE_STRIDE, P, split, row == 0, outputs + size_t(row) * P);
        });
    }

  private:
    static constexpr size_t ITEM = DTYPE == PDM_F32 ? 4 : DTYPE == PDM_BF16 ? 2 : 1;
    // In f32 a token's items lie side by side, in the others a pair's.
    static constexpr size_t SIDE = DTYPE == PDM_F32 ? 1 : 2;

    template <int ROWS>
    using Count = std::integral_constant<int, ROWS>;

    template <typename Block>
    static void by_rows(int rows, Block block) {
        int row = 0;
        for (; row + LANE_ROWS <= rows; row += LANE_ROWS) block(Count<LANE_ROWS>(), row);
        for (; row + 4 <= rows; row += 4) block(Count<4>(), row);
        switch (rows - row) {
            case 3: return block(Count<3>(), row);
            case 2: return block(Count<2>(), row);
            case 1: return block(Count<1>(), row);
        }
    }

    // What Pairs::right will read.
    static void fetch(const uint8_t *step, size_t i, size_t apart) {
        _mm_prefetch(reinterpret_cast<const char *>(step + i * ITEM), _MM_HINT_T0);
        if (DTYPE == PDM_F32) _mm_prefetch(reinterpret_cast<const char *>(step + (i + apart) * ITEM), _MM_HINT_T0);
    }

    // The keys of `step` and, where there is one, the next.
    template <int ROWS>
    static void score_block(const Query *queries, size_t P, const Split &split, int step, bool fetches, float *scores) {
        constexpr int VECTORS = vectors_of(ROWS);
        const int end = 2 * (step + 2 < split.step_end ? step + 2 : split.step_end);
        int group = 2 * step;
        for (; group + VECTORS <= end; group += VECTORS) {
            if (fetches)
                score_rows<ROWS, VECTORS, true>(queries, P, split, group, scores + group * 16);
            else
                score_rows<ROWS, VECTORS, false>(queries, P, split, group, scores + group * 16);
        }
        if (VECTORS == 4 && group < end) {
            if (fetches)
                score_rows<ROWS, 2, true>(queries, P, split, group, scores + group * 16);
            else
                score_rows<ROWS, 2, false>(queries, P, split, group, scores + group * 16);
        }
    }

    template <int ROWS, int VECTORS, bool FETCHES>
    static void score_rows(const Query *queries, size_t P, const Split &split, int group, float *target) {
        const uint8_t *keys[VECTORS], *next[VECTORS];
        F16 sums[ROWS][VECTORS];
        for (int vector = 0; vector < VECTORS; vector++) {
            const size_t at = size_t((group + vector) % 2) * 16 * P * ITEM;
            keys[vector] = split.keys[(group + vector) / 2] + at;
            next[vector] = split.after_keys((group + vector) / 2) + at;
            for (int row = 0; row < ROWS; row++) sums[row][vector] = zero();
        }
        for (size_t pair = 0; pair < P / 2; pair++) {
            typename Pairs::Right right[VECTORS];
            for (int vector = 0; vector < VECTORS; vector++) {
                right[vector] = Pairs::right(keys[vector], pair * 32, 16);
                if (FETCHES) fetch(next[vector], pair * 32, 16);
            }
            for (int row = 0; row < ROWS; row++) {
                const Query *const left = queries + size_t(row) * P + 2 * pair;
                for (int vector = 0; vector < VECTORS; vector++) sums[row][vector] = Pairs::dot(sums[row][vector], left, right[vector]);
            }
        }
        for (int row = 0; row < ROWS; row++)
            for (int vector = 0; vector < VECTORS; vector++) store(target + row * SCORE_STRIDE + vector * 16, sums[row][vector]);
    }

    template <int ROWS>
    static void output_block(const float *shares, size_t P, const Split &split, bool fetches, float *outputs) {
        constexpr int VECTORS = vectors_of(ROWS);
        size_t column = 0;
        for (; column + VECTORS * 16 <= P; column += VECTORS * 16) {
            if (fetches)
                output_rows<ROWS, VECTORS, true>(shares, P, split, column, outputs + column);
            else
                output_rows<ROWS, VECTORS, false>(shares, P, split, column, outputs + column);
        }
        if (VECTORS == 4 && column < P) {
            if (fetches)
                output_rows<ROWS, 2, true>(shares, P, split, column, outputs + column);
            else
                output_rows<ROWS, 2, false>(shares, P, split, column, outputs + column);
        }
    }

    template <int ROWS, int VECTORS, bool FETCHES>
    static void output_rows(const float *shares, size_t P, const Split &split, size_t column, float *target) {
        F16 sums[ROWS][VECTORS];
        for (int row = 0; row < ROWS; row++)
            for (int vector = 0; vector < VECTORS; vector++) sums[row][vector] = zero();
        for (int step = split.step_begin; step < split.step_end; step++) {
            const uint8_t *const values = split.values[step], *const next = split.after_values(step);
            const Share *const lefts = reinterpret_cast<const Share *>(shares) + step * STEP_KEYS;
            for (size_t pair = 0; pair < STEP_KEYS / 2; pair++) {
                typename Pairs::Right right[VECTORS];
                for (size_t vector = 0; vector < VECTORS; vector++) {
                    const size_t at = pair * 2 * P + (column + vector * 16) * SIDE;
                    right[vector] = Pairs::right(values, at, P);
                    if (FETCHES) fetch(next, at, P);
                }
                for (int row = 0; row < ROWS; row++) {
                    const Share *const left = lefts + size_t(row) * (SCORE_STRIDE * sizeof(float) / sizeof(Share)) + 2 * pair;
                    for (int vector = 0; vector < VECTORS; vector++) sums[row][vector] = Pairs::dot(sums[row][vector], left, right[vector]);
                }
            }
        }
        for (int row = 0; row < ROWS; row++)
            for (int vector = 0; vector < VECTORS; vector++) store(target + size_t(row) * P + vector * 16, sums[row][vector]);
    }
};

}  // namespace
}  // namespace pdm
