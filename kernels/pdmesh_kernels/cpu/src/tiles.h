// AMX tile registers: their configuration is a thread's own, made once per step.
#pragma once

#include "simd.h"

namespace pdm {
namespace {

#if defined(__AMX_TILE__)

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// All eight tiles 16 rows of 64 bytes. Rows that a product does not need are computed in vain: a tile's time is set by memory.
inline void enter_tiles() {
    TileConfig config;
    for (int tile = 0; tile < 8; tile++) {
        config.row_bytes[tile] = 64;
        config.rows[tile] = 16;
    }
    // GCC 12 believes that _tile_loadconfig reads 8 bytes, and drops the stores of the others.
    asm volatile("" ::"m"(config) : "memory");
    _tile_loadconfig(&config);
}
inline void leave_tiles() { _tile_release(); }

#else

inline void enter_tiles() {}
inline void leave_tiles() {}

#endif

}  // namespace
}  // namespace pdm
