// One token's key and value into its slot. Nothing beside the slot is written, so that tokens of one block may be several threads'.
#pragma once

#include "kv_places.h"
#include "simd.h"

namespace pdm {
namespace {

// A slot of one head: items of a key lie in pairs, 16 tokens apart; those of a value 2 apart (f32: side by side).
struct Slot {
    HeadPlace place;
    int slot, width;

    size_t key_at() const { return size_t(slot / 16) * size_t(width) * 16; }
    size_t value_at() const { return size_t(slot / 2) * size_t(width) * 2 + size_t(slot % 2); }
};

inline void write_f32(const Slot &to, const float *key, const float *value) {
    float *const keys = reinterpret_cast<float *>(to.place.keys) + to.key_at() + to.slot % 16;
    for (int i = 0; i < to.width; i++) keys[i * 16] = key[i];
    memcpy(reinterpret_cast<float *>(to.place.values) + size_t(to.slot) * size_t(to.width), value, size_t(to.width) * 4);
}

inline void write_bf16(const Slot &to, const float *key, const float *value) {
    alignas(64) uint16_t halves[256];
    for (int i = 0; i < to.width; i += 16) to_bf16(halves + i, load(key + i));
    uint16_t *const keys = reinterpret_cast<uint16_t *>(to.place.keys) + to.key_at() + to.slot % 16 * 2;
    for (int i = 0; i < to.width; i += 2) memcpy(keys + i * 16, halves + i, 4);
    for (int i = 0; i < to.width; i += 16) to_bf16(halves + i, load(value + i));
    uint16_t *const values = reinterpret_cast<uint16_t *>(to.place.values) + to.value_at();
#if defined(__AVX512BW__)
    const __mmask32 own = 0x55555555;
    for (int i = 0; i < to.width; i += 16) {
        const __m256i sixteen = _mm256_load_si256(reinterpret_cast<const __m256i *>(halves + i));
        _mm512_mask_storeu_epi16(values + i * 2, own, _mm512_cvtepu16_epi32(sixteen));
    }
#else
    for (int i = 0; i < to.width; i++) values[i * 2] = halves[i];
#endif
}

// Codes of one row, and the factor that turns them back: the largest magnitude becomes 127.
inline float quantize(int8_t *codes, const float *items, int width) {
    F16 largest_yet = zero();
    // Operands in this order let a NaN through.
    for (int i = 0; i < width; i += 16) largest_yet = max(largest_yet, max(load(items + i), zero() - load(items + i)));
    float magnitude = largest(largest_yet);
    for (int i = 0; i < width; i++)
        if (items[i] != items[i]) magnitude = items[i];
    const F16 inverse = splat(magnitude > 0.0f ? 127.0f / magnitude : 0.0f);
    // Tiny rows, whose inverse is infinite, and rows that are not finite keep to the range of codes.
    const F16 top = splat(127.0f), bottom = splat(-127.0f);
    for (int i = 0; i < width; i += 16) to_i8(codes + i, max(min(load(items + i) * inverse, top), bottom));
    return magnitude / 127.0f;
}

inline void write_i8(const Slot &to, const float *key, const float *value) {
    alignas(64) int8_t codes[256];
    to.place.key_scales[to.slot] = quantize(codes, key, to.width);
    int8_t *const keys = reinterpret_cast<int8_t *>(to.place.keys) + to.key_at() + to.slot % 16 * 2;
    for (int i = 0; i < to.width; i += 2) memcpy(keys + i * 16, codes + i, 2);
    to.place.value_scales[to.slot] = quantize(codes, value, to.width);
    int8_t *const values = reinterpret_cast<int8_t *>(to.place.values) + to.value_at();
#if defined(__AVX512BW__)
    const __mmask32 own = 0x55555555;
    for (int i = 0; i < to.width; i += 16) {
        const __m128i sixteen = _mm_load_si128(reinterpret_cast<const __m128i *>(codes + i));
        _mm256_mask_storeu_epi8(values + i * 2, own, _mm256_cvtepu8_epi16(sixteen));
    }
#else
    for (int i = 0; i < to.width; i++) values[i * 2] = codes[i];
#endif
}

inline void write_slot(int dtype, const Slot &to, const float *key, const float *value) {
    if (dtype == PDM_F32) return write_f32(to, key, value);
    if (dtype == PDM_BF16) return write_bf16(to, key, value);
    write_i8(to, key, value);
}

}  // namespace
}  // namespace pdm
