// Half precision for code that no instruction set is chosen for: packing.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

namespace pdm {

inline float half_to_float(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = (half >> 10) & 31, fraction = half & 0x3ff;
    uint32_t bits = sign | 0x7f800000 | fraction << 13;
    if (exponent == 0) {
        const float value = float(fraction) * 0x1p-24f;
        memcpy(&bits, &value, 4);
        bits |= sign;
    } else if (exponent < 31) {
        bits = sign | (exponent + 112) << 23 | fraction << 13;
    }
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// Rounded to nearest even; infinite above 65504.
inline uint16_t float_to_half(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);
    if (magnitude < 0x38800000) return uint16_t(sign | uint32_t(lrintf(fabsf(value) * 0x1p24f)));
    return uint16_t(sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

}  // namespace pdm
