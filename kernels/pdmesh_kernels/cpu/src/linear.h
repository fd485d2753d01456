// Linear layers: which kernel multiplies which format.
//
// quantised.h has, for the formats that it owns:
//     struct Q8Tiles, Q4Tiles, Q4WideTiles;  // sources of bf16 tiles (product_bf16.h)
//     void linear_i8(const pdm_linear_args &args, int row_begin, int row_end, int panel_begin, int panel_end, void *scratch);
//     void quantize_rows(const pdm_linear_args &args, int row_begin, int row_end);
// product_codes.h has W4A8's. linear_i8 ends with finish() of epilogue.h on f32 sums.
#pragma once

#include "product_bf16.h"
#include "product_codes.h"
#include "product_expanded.h"
#include "product_f32.h"
#include "quantised.h"

namespace pdm {
namespace {

void linear(const pdm_linear_args &args, int row_begin, int row_end, int panel_begin, int panel_end, void *scratch) {
    switch (args.weight->format) {
        case PDM_W_F32: return linear_f32(args, row_begin, row_end, panel_begin, panel_end, scratch);
        case PDM_W_BF16: return linear_bf16<PackedTiles>(args, row_begin, row_end, panel_begin, panel_end, scratch);
        case PDM_W_I8: return linear_i8(args, row_begin, row_end, panel_begin, panel_end, scratch);
        case PDM_W_Q8: return linear_expanded<Q8Tiles>(args, row_begin, row_end, panel_begin, panel_end, scratch);
        case PDM_W_Q4:
            if (args.weight->int8_rows) return linear_codes<PDM_W_Q4>(args, row_begin, row_end, panel_begin, panel_end, scratch);
            return linear_expanded<Q4Tiles>(args, row_begin, row_end, panel_begin, panel_end, scratch);
        default:
            if (args.weight->int8_rows) return linear_codes<PDM_W_Q4_WIDE>(args, row_begin, row_end, panel_begin, panel_end, scratch);
            return linear_expanded<Q4WideTiles>(args, row_begin, row_end, panel_begin, panel_end, scratch);
    }
}

}  // namespace
}  // namespace pdm
