// Sixteen float lanes in the instruction set that this translation unit is compiled for: one zmm, or two ymm.
// Everything is in an anonymous namespace: each kernels_*.cpp has its own.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace pdm {
namespace {

#if defined(__AVX512F__)

struct F16 {
    __m512 v;
};
inline F16 zero() { return {_mm512_setzero_ps()}; }
inline F16 splat(float x) { return {_mm512_set1_ps(x)}; }
inline F16 load(const float *p) { return {_mm512_loadu_ps(p)}; }
inline void store(float *p, F16 a) { _mm512_storeu_ps(p, a.v); }
inline F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
// First n lanes of a, the others from b; n in 0 ... 16.
inline F16 first(int n, F16 a, F16 b) { return {_mm512_mask_blend_ps(__mmask16((1u << n) - 1), b.v, a.v)}; }
inline float sum(F16 a) { return _mm512_reduce_add_ps(a.v); }
inline float largest(F16 a) { return _mm512_reduce_max_ps(a.v); }
// A bit per lane; a NaN equals nothing.
inline uint32_t equal_lanes(F16 a, F16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
inline F16 round_even(F16 a) { return {_mm512_roundscale_ps(a.v, 0)}; }
// a * 2^n for whole n.
inline F16 scale_by_power(F16 a, F16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }
// Sixteen bf16 to float, and back with rounding to nearest even.
inline F16 from_bf16(const uint16_t *p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16))};
}
inline void to_bf16(uint16_t *p, F16 a) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(a.v));
#else
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc00000));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
#endif
}
// Sixteen int8 to float.
inline F16 from_i8(const int8_t *p) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)))}; }
// c + pairs of bf16 (a: the same pair in all lanes, b: a pair per lane).
inline F16 splat_pair(uint32_t pair) { return {_mm512_castsi512_ps(_mm512_set1_epi32((int)pair))}; }
inline F16 load_pairs(const void *p) { return {_mm512_loadu_ps((const float *)p)}; }
inline F16 dot_pairs(F16 c, F16 a, F16 b) {
#if defined(__AVX512BF16__)
    return {_mm512_dpbf16_ps(c.v, (__m512bh)_mm512_castps_si512(a.v), (__m512bh)_mm512_castps_si512(b.v))};
#else
    const __m512i high = _mm512_set1_epi32((int)0xffff0000), ai = _mm512_castps_si512(a.v), bi = _mm512_castps_si512(b.v);
    const __m512 even_a = _mm512_castsi512_ps(_mm512_slli_epi32(ai, 16)), even_b = _mm512_castsi512_ps(_mm512_slli_epi32(bi, 16));
    const __m512 odd_a = _mm512_castsi512_ps(_mm512_and_si512(ai, high)), odd_b = _mm512_castsi512_ps(_mm512_and_si512(bi, high));
    return {_mm512_fmadd_ps(odd_a, odd_b, _mm512_fmadd_ps(even_a, even_b, c.v))};
#endif
}

// Sixteen f16 to float.
inline F16 from_f16(const uint16_t *p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p))}; }
// Lanes 0-7 or 8-15, twice each.
inline F16 twice_low(F16 a) { return {_mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7), a.v)}; }
inline F16 twice_high(F16 a) {
    return {_mm512_permutexvar_ps(_mm512_setr_epi32(8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15), a.v)};
}
// Bits 4n ... 4n + 3 of sixteen dwords; the permutation looks at no others, so there is nothing to mask or convert.
inline F16 from_nibble(const void *p, int n) {
    const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return {_mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_loadu_si512(p), unsigned(4 * n)), numbers)};
}
// Thirty-two to bf16, as pairs: lanes of a, then of b.
#if defined(__AVX512BF16__)
inline F16 bf16_pairs(F16 a, F16 b) { return {_mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(b.v, a.v))}; }
#endif
// Thirty-two to bf16.
inline void to_bf16_pair(uint16_t *p, F16 a, F16 b) {
#if defined(__AVX512BF16__)
    _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v));
#else
    to_bf16(p, a);
    to_bf16(p + 16, b);
#endif
}

// Sixteen 32-bit integers.
struct I16 {
    __m512i v;
};
inline I16 load_i32(const void *p) { return {_mm512_loadu_si512(p)}; }
inline F16 to_float(I16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
// Rounded to nearest even, saturated.
inline void to_i8(int8_t *p, F16 a) { _mm_storeu_si128((__m128i *)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.v))); }
// c + four int8 products per lane (a: the same four in all lanes), plus in VNNI 128 * the lane's own four, which dot_quads_end takes
// away: `totals` are the sums of all that a lane was given.
#if defined(__AVX512VNNI__)
constexpr int I8_ROWS = 8;
inline I16 dot_quads(I16 c, uint32_t a, I16 b) { return {_mm512_dpbusd_epi32(c.v, _mm512_set1_epi32(int(a ^ 0x80808080u)), b.v)}; }
inline I16 dot_quads_end(I16 c, I16 totals) { return {_mm512_sub_epi32(c.v, _mm512_slli_epi32(totals.v, 7))}; }
#else
constexpr int I8_ROWS = 4;
inline __m512i even_bytes(__m512i x) { return _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8); }
inline I16 dot_quads(I16 c, uint32_t a, I16 b) {
    const __m512i four = _mm512_set1_epi32(int(a));
    const __m512i even = _mm512_madd_epi16(even_bytes(four), even_bytes(b.v));
    const __m512i odd = _mm512_madd_epi16(_mm512_srai_epi16(four, 8), _mm512_srai_epi16(b.v, 8));
    return {_mm512_add_epi32(c.v, _mm512_add_epi32(even, odd))};
}
inline I16 dot_quads_end(I16 c, I16) { return c; }
#endif
// c + four products per lane of codes below 16 and int8 numbers: at most eight times on one c, then code_sums makes it 32-bit integers.
#if defined(__AVX512VNNI__)
inline I16 dot_codes(I16 c, I16 codes, I16 numbers) { return {_mm512_dpbusd_epi32(c.v, codes.v, numbers.v)}; }
inline I16 code_sums(I16 c) { return c; }
#else
inline I16 dot_codes(I16 c, I16 codes, I16 numbers) {
    return {_mm512_add_epi16(c.v, _mm512_maddubs_epi16(codes.v, numbers.v))};
}
inline I16 code_sums(I16 c) { return {_mm512_madd_epi16(c.v, _mm512_set1_epi16(1))}; }
#endif
inline I16 splat_quad(const int8_t *p) {
    int32_t quad;
    memcpy(&quad, p, 4);
    return {_mm512_set1_epi32(quad)};
}
inline I16 splat_octet(const int8_t *p) {
    int64_t octet;
    memcpy(&octet, p, 8);
    return {_mm512_set1_epi64(octet)};
}
inline void store_i32(void *p, I16 a) { _mm512_storeu_si512(p, a.v); }
inline I16 operator+(I16 a, I16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
// Of thirty-two lanes those with even, and those with odd numbers.
inline I16 even_lanes(I16 a, I16 b) {
    const __m512i numbers = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    return {_mm512_permutex2var_epi32(a.v, numbers, b.v)};
}
inline I16 odd_lanes(I16 a, I16 b) {
    const __m512i numbers = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    return {_mm512_permutex2var_epi32(a.v, numbers, b.v)};
}
// Of each byte.
inline I16 low_nibbles(I16 a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline I16 high_nibbles(I16 a) { return low_nibbles({_mm512_srli_epi16(a.v, 4)}); }

#else

struct F16 {
    __m256 lo, hi;
};
inline F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float *p, F16 a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
inline F16 operator+(F16 a, F16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline F16 max(F16 a, F16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F16 min(F16 a, F16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline __m256 first_eight(int n, __m256 a, __m256 b) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes)));
}
inline F16 first(int n, F16 a, F16 b) { return {first_eight(n, a.lo, b.lo), first_eight(n - 8, a.hi, b.hi)}; }
inline float sum(F16 a) {
    const __m256 eight = _mm256_add_ps(a.lo, a.hi);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline float largest(F16 a) {
    const __m256 eight = _mm256_max_ps(a.lo, a.hi);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
inline uint32_t equal_lanes(F16 a, F16 b) {
    return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ))) |
           uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ))) << 8;
}
inline F16 round_even(F16 a) { return {_mm256_round_ps(a.lo, 8), _mm256_round_ps(a.hi, 8)}; }
inline __m256 scale_eight(__m256 a, __m256 n) {
    // In two halves, so that results below the least normal number are reached; n is within +-252 here.
    const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), rest = _mm256_sub_epi32(whole, half);
    const __m256i bias = _mm256_set1_epi32(127);
    const __m256 x = _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
    return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
}
inline F16 scale_by_power(F16 a, F16 n) { return {scale_eight(a.lo, n.lo), scale_eight(a.hi, n.hi)}; }
inline __m256 eight_from_bf16(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
inline F16 from_bf16(const uint16_t *p) {
    return {eight_from_bf16(_mm_loadu_si128((const __m128i *)p)), eight_from_bf16(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
inline __m256i bf16_bits(__m256 a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256 is_nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
    const __m256 kept = _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), is_nan);
    return _mm256_srli_epi32(_mm256_castps_si256(kept), 16);
}
inline void to_bf16(uint16_t *p, F16 a) {
    const __m256i mixed = _mm256_packus_epi32(bf16_bits(a.lo), bf16_bits(a.hi));
    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(mixed, 0xd8));
}
inline F16 from_i8(const int8_t *p) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)p);
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
inline F16 splat_pair(uint32_t pair) {
    const __m256 x = _mm256_castsi256_ps(_mm256_set1_epi32((int)pair));
    return {x, x};
}
inline F16 load_pairs(const void *p) { return load((const float *)p); }
inline __m256 dot_eight(__m256 c, __m256 a, __m256 b) {
    const __m256i high = _mm256_set1_epi32((int)0xffff0000), ai = _mm256_castps_si256(a), bi = _mm256_castps_si256(b);
    const __m256 even_a = _mm256_castsi256_ps(_mm256_slli_epi32(ai, 16)), even_b = _mm256_castsi256_ps(_mm256_slli_epi32(bi, 16));
    const __m256 odd_a = _mm256_castsi256_ps(_mm256_and_si256(ai, high)), odd_b = _mm256_castsi256_ps(_mm256_and_si256(bi, high));
    return _mm256_fmadd_ps(odd_a, odd_b, _mm256_fmadd_ps(even_a, even_b, c));
}
inline F16 dot_pairs(F16 c, F16 a, F16 b) { return {dot_eight(c.lo, a.lo, b.lo), dot_eight(c.hi, a.hi, b.hi)}; }
inline F16 from_f16(const uint16_t *p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
inline F16 twice(__m256 a) {
    return {_mm256_permutevar8x32_ps(a, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)),
            _mm256_permutevar8x32_ps(a, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7))};
}
inline F16 twice_low(F16 a) { return twice(a.lo); }
inline F16 twice_high(F16 a) { return twice(a.hi); }
inline __m256 eight_from_nibble(const __m256i *p, int n) {
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(_mm256_loadu_si256(p), 4 * n), _mm256_set1_epi32(15)));
}
inline F16 from_nibble(const void *p, int n) {
    return {eight_from_nibble((const __m256i *)p, n), eight_from_nibble((const __m256i *)p + 1, n)};
}
inline void to_bf16_pair(uint16_t *p, F16 a, F16 b) {
    to_bf16(p, a);
    to_bf16(p + 16, b);
}

struct I16 {
    __m256i lo, hi;
};
constexpr int I8_ROWS = 2;
inline I16 load_i32(const void *p) { return {_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)p + 1)}; }
inline F16 to_float(I16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline void to_i8(int8_t *p, F16 a) {
    const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi));
    const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
    _mm_storeu_si128((__m128i *)p, _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1)));
}
inline __m256i even_bytes(__m256i x) { return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8); }
inline __m256i dot_eight_quads(__m256i c, __m256i a, __m256i b) {
    const __m256i even = _mm256_madd_epi16(even_bytes(a), even_bytes(b));
    const __m256i odd = _mm256_madd_epi16(_mm256_srai_epi16(a, 8), _mm256_srai_epi16(b, 8));
    return _mm256_add_epi32(c, _mm256_add_epi32(even, odd));
}
inline I16 dot_quads(I16 c, uint32_t a, I16 b) {
    const __m256i four = _mm256_set1_epi32(int(a));
    return {dot_eight_quads(c.lo, four, b.lo), dot_eight_quads(c.hi, four, b.hi)};
}
inline I16 dot_quads_end(I16 c, I16) { return c; }
inline I16 dot_codes(I16 c, I16 codes, I16 numbers) {
    return {_mm256_add_epi16(c.lo, _mm256_maddubs_epi16(codes.lo, numbers.lo)),
            _mm256_add_epi16(c.hi, _mm256_maddubs_epi16(codes.hi, numbers.hi))};
}
inline I16 code_sums(I16 c) {
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(c.lo, ones), _mm256_madd_epi16(c.hi, ones)};
}
inline I16 splat_quad(const int8_t *p) {
    int32_t quad;
    memcpy(&quad, p, 4);
    return {_mm256_set1_epi32(quad), _mm256_set1_epi32(quad)};
}
inline void store_i32(void *p, I16 a) {
    _mm256_storeu_si256((__m256i *)p, a.lo);
    _mm256_storeu_si256((__m256i *)p + 1, a.hi);
}
template <int CHOICE>
inline __m256i eight_lanes(I16 a) {
    const __m256 mixed = _mm256_shuffle_ps(_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi), CHOICE);
    return _mm256_permute4x64_epi64(_mm256_castps_si256(mixed), 0xd8);
}
inline I16 even_lanes(I16 a, I16 b) { return {eight_lanes<0x88>(a), eight_lanes<0x88>(b)}; }
inline I16 odd_lanes(I16 a, I16 b) { return {eight_lanes<0xdd>(a), eight_lanes<0xdd>(b)}; }
inline I16 low_nibbles(I16 a) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask)};
}
inline I16 high_nibbles(I16 a) { return low_nibbles({_mm256_srli_epi16(a.lo, 4), _mm256_srli_epi16(a.hi, 4)}); }

#endif

// e^x: 2^n e^r with r in +-log(2)/2 and a Taylor polynomial of degree 6 (relative error under 2e-7); 0 far below, inf far above.
inline F16 exp(F16 x) {
    x = max(min(x, splat(89.0f)), splat(-104.0f));
    const F16 n = round_even(x * splat(1.44269504f));
    F16 r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    F16 y = splat(1.0f / 720.0f);
    y = fma(y, r, splat(1.0f / 120.0f));
    y = fma(y, r, splat(1.0f / 24.0f));
    y = fma(y, r, splat(1.0f / 6.0f));
    y = fma(y, r, splat(0.5f));
    y = fma(y, r, splat(1.0f));
    y = fma(y, r, splat(1.0f));
    return scale_by_power(y, n);
}
inline F16 tanh(F16 x) {
    // 1 - 2 / (e^2x + 1), saturated where a float cannot tell the difference.
    const F16 e = exp(min(max(x, splat(-10.0f)), splat(10.0f)) * splat(2.0f));
    return splat(1.0f) - splat(2.0f) / (e + splat(1.0f));
}
inline F16 silu(F16 x) { return x / (splat(1.0f) + exp(zero() - x)); }
inline F16 gelu_tanh(F16 x) {
    const F16 inner = splat(0.7978845608f) * fma(splat(0.044715f) * x * x, x, x);
    return splat(0.5f) * x * (splat(1.0f) + tanh(inner));
}
inline float bf16_to_float(uint16_t x) {
    const uint32_t bits = uint32_t{x} << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
inline uint16_t float_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7fc0;
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Brings the line of `p` into the first cache as one's own, so that a later write does not wait for it. All processors with AVX2
// have it, but compilers want to be told (-mprfchw).
inline void fetch_to_write(const char *p) { asm volatile("prefetchw %0" ::"m"(*p)); }

}  // namespace
}  // namespace pdm
