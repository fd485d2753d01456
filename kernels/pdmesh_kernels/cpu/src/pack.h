// What lies in a panel, for those that fill panels and those that read single rows. See pdmesh_cpu.h for the formats.
#pragma once

#include "kernels.h"

namespace pdm {

// One row of a packed weight as f32 [K], as products use it.
void unpack_row(const pdm_weight &weight, int row, float *values);

// pack_quantised.cpp (which also has pdm_pack_codes and pdm_linear_scratch_bytes): PDM_W_I8, PDM_W_Q8, PDM_W_Q4, PDM_W_Q4_WIDE.
// Arguments as those of pdm_panel_bytes, pdm_pack (0, or -1 after fail()), pdm_unpack_row; they were checked.
size_t quantised_panel_bytes(int format, int num_inputs, int group);
int pack_quantised(int format, int num_outputs, int num_inputs, int group, int is_gated, const float *values, void *panels);
void unpack_quantised_row(const pdm_weight &weight, int row, float *values);

}  // namespace pdm
