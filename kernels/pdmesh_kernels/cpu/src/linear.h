// Linear layers: which kernel multiplies which format.
//
// quantised.h has, for the formats that it owns:
//     struct Q8Tiles, Q4Tiles;  // sources of bf16 tiles (product_bf16.h)
//     void linear_i8(const pdm_linear_args &args, int row_begin, int row_end, int panel_begin, int panel_end, void *scratch);
//     void quantize_rows(const pdm_linear_args &args, int row_begin, int row_end);
// linear_i8 ends with finish() of epilogue.h on f32 sums.
#pragma once

#include "quantised.h"

namespace pdm {
namespace {

}  // namespace
}  // namespace pdm
