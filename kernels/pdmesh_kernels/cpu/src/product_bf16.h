// A panel times rows, in bf16 with f32 sums: the heart of every format that is multiplied as bf16.
//
// A `Source` says where a panel's tiles are. It has
//     explicit Source(const pdm_weight &weight);
//     // Inputs per call of `tiles` at most, multiples of 32: where there are at most TILE_ROWS rows (each weight is used once),
//     // and where there are more.
//     static constexpr int FEW_ROWS_BLOCK, MANY_ROWS_BLOCK;
//     static constexpr bool IS_PACKED;  // tiles lie in the panel itself: the product fetches them ahead
//     // Tiles of inputs [k_begin, k_begin + k_count) of a panel, laid out as PDM_W_BF16's: [k_count / 32][2][16][16][2]. Both are
//     // multiples of 32; inputs from K on are zero. Written to `buffer` (64-byte aligned, k_count * 32 items) or where they are.
//     // `buffer` keeps its content until the next call. May fetch ahead what follows in the panel or in the next one.
//     const uint16_t *tiles(int panel, int k_begin, int k_count, uint16_t *buffer) const;
#pragma once

#include "kernels.h"
#include "simd.h"
#include "tiles.h"

namespace pdm {
namespace {

constexpr int STEP = 32;                             // inputs of a tile
constexpr int STEP_ITEMS = STEP * PDM_PANEL;         // of a panel
constexpr int MAX_BLOCK = 2048;                      // inputs of one call of `tiles`

// Rows of input in two halves, each of 16 rows that may be read (AMX) or of those that exist.
struct InputRows {
    const uint16_t *first, *second;  // second: nullptr when there are at most 16 rows
    size_t first_stride, second_stride;
    int num_rows;
};

struct PackedTiles {
    explicit PackedTiles(const pdm_weight &weight)
        : panels(static_cast<const uint8_t *>(weight.panels)), panel_bytes(weight.panel_bytes) {}
    static constexpr int FEW_ROWS_BLOCK = 1 << 30, MANY_ROWS_BLOCK = 1 << 30;
    static constexpr bool IS_PACKED = true;
    const uint16_t *tiles(int panel, int k_begin, int, uint16_t *) const {
        return reinterpret_cast<const uint16_t *>(panels + size_t(panel) * panel_bytes) + size_t(k_begin) * PDM_PANEL;
    }
    const uint8_t *const panels;
    const size_t panel_bytes;
};

}  // namespace
}  // namespace pdm
