// From sums to outputs: what is done with a product before it leaves the core.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace pdm {
namespace {

// Ends `num_rows` rows (at most TILE_ROWS) from `row` on of one panel. sums: f32 [num_rows][32], 64-byte aligned; y without bias.
inline void finish(const pdm_linear_args &args, int panel, int row, int num_rows, const float *sums);

}  // namespace
}  // namespace pdm
