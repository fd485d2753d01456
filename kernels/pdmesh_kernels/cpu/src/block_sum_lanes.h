// A block's sum in the instruction set that this translation unit is compiled for; each block_sum_*.cpp has its own.
#pragma once

#include <immintrin.h>
#include <string.h>

#include "block_sum.h"

namespace pdm {
namespace {

constexpr size_t STRIDE = 64;
constexpr int LANES = 16;

// Sixteen 32-bit words widened to 64 bits: those at even places, and those at odd ones.
#if defined(__AVX512F__)

struct U64x8 {
    __m512i v;
};
inline U64x8 nothing() { return {_mm512_setzero_si512()}; }
inline U64x8 operator+(U64x8 a, U64x8 b) { return {_mm512_add_epi64(a.v, b.v)}; }
inline U64x8 load(const void *p) { return {_mm512_loadu_si512(p)}; }
inline void store(void *p, U64x8 a) { _mm512_storeu_si512(p, a.v); }
inline void store_past_caches(void *p, U64x8 a) { _mm512_stream_si512((__m512i *)p, a.v); }
inline U64x8 even_words(U64x8 a) { return {_mm512_and_si512(a.v, _mm512_set1_epi64(0xffffffff))}; }
inline U64x8 odd_words(U64x8 a) { return {_mm512_srli_epi64(a.v, 32)}; }

#else

struct U64x8 {
    __m256i lo, hi;
};
inline U64x8 nothing() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline U64x8 operator+(U64x8 a, U64x8 b) { return {_mm256_add_epi64(a.lo, b.lo), _mm256_add_epi64(a.hi, b.hi)}; }
inline U64x8 load(const void *p) {
    return {_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)p + 1)};
}
inline void store(void *p, U64x8 a) {
    _mm256_storeu_si256((__m256i *)p, a.lo);
    _mm256_storeu_si256((__m256i *)p + 1, a.hi);
}
inline void store_past_caches(void *p, U64x8 a) {
    _mm256_stream_si256((__m256i *)p, a.lo);
    _mm256_stream_si256((__m256i *)p + 1, a.hi);
}
inline U64x8 even_words(U64x8 a) {
    const __m256i low = _mm256_set1_epi64x(0xffffffff);
    return {_mm256_and_si256(a.lo, low), _mm256_and_si256(a.hi, low)};
}
inline U64x8 odd_words(U64x8 a) { return {_mm256_srli_epi64(a.lo, 32), _mm256_srli_epi64(a.hi, 32)}; }

#endif

struct Lanes {
    U64x8 even = nothing(), odd = nothing();
    U64x8 even_total = nothing(), odd_total = nothing();

    void take(U64x8 words) {
        even = even + even_words(words);
        odd = odd + odd_words(words);
        even_total = even_total + even;
        odd_total = odd_total + odd;
    }

    uint64_t folded(size_t bytes) const {
        uint64_t parts[4][LANES / 2];
        store(parts[0], even), store(parts[1], odd), store(parts[2], even_total), store(parts[3], odd_total);
        constexpr uint64_t FACTOR = 0x9E3779B97F4A7C15u;
        uint64_t sum = bytes * FACTOR;
        for (int kind = 0; kind < 4; kind += 2) {
            for (int lane = 0; lane < LANES; ++lane) {
                sum = (sum ^ parts[kind + lane % 2][lane / 2]) * FACTOR;
                sum ^= sum >> 32;
            }
        }
        return sum;
    }
};

enum class To { NOWHERE, CACHES, MEMORY };

template <To to>
uint64_t sum_of(char *target, const char *source, size_t bytes) {
    Lanes lanes;
    size_t at = 0;
    for (; at + STRIDE <= bytes; at += STRIDE) {
        const U64x8 words = load(source + at);
        if constexpr (to == To::CACHES) store(target + at, words);
        if constexpr (to == To::MEMORY) store_past_caches(target + at, words);
        lanes.take(words);
    }
    if (at < bytes) {
        char rest[STRIDE] = {};
        memcpy(rest, source + at, bytes - at);
        if constexpr (to != To::NOWHERE) memcpy(target + at, rest, bytes - at);
        lanes.take(load(rest));
    }
    // Or another core might see what is written next before what was written past the caches.
    if constexpr (to == To::MEMORY) _mm_sfence();
    return lanes.folded(bytes);
}

uint64_t sum(const void *source, size_t bytes) { return sum_of<To::NOWHERE>(nullptr, (const char *)source, bytes); }

uint64_t copy(void *target, const void *source, size_t bytes) {
    // Nothing of a block is needed here soon, and lines that are not read before they are written make three accesses two: 64 MB
    // took 4.8 ms instead of 6.5 where memcpy took 6.5.
    if (uintptr_t(target) % STRIDE == 0) return sum_of<To::MEMORY>((char *)target, (const char *)source, bytes);
    return sum_of<To::CACHES>((char *)target, (const char *)source, bytes);
}

BlockSums ways() { return {sum, copy}; }

}  // namespace
}  // namespace pdm
