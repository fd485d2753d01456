// How quantised weights lie in memory: what packing writes and each instruction set's kernels read.
//
// A panel is 32 outputs, one contiguous piece that is read once, in order:
//   Q4, Q4_WIDE, Q8: per group its header, then its K-steps of 32 inputs. Header: scales [32], then but for Q8 offsets [32],
//       f16 (Q4_WIDE: f32). The codes of a step are in the order that makes the bf16 panel's step (PDM_W_BF16) without a
//       permutation: [half of 16 outputs][...]
//       Q8: [16 pairs of inputs][16 outputs][2] int8
//       Q4: [2: pairs 0-7, 8-15][2: outputs 0-7, 8-15][8 outputs][2 of a pair] dwords of 8 codes, pair n in bits 4n ... 4n + 3
//   I8: scales f32 [32], sums of the codes i32 [32], then per 64 inputs [half][16 quads of inputs][16 outputs][4] int8, as an AMX
//       tile holds them.
// Value: scale * code + offset in f32, rounded once; then, where the product is bf16's, to bf16.
#pragma once

#include "kernels.h"

namespace pdm {

constexpr int STEP_INPUTS = 32;
constexpr int HALF_PANEL = PDM_PANEL / 2;
constexpr size_t Q4_STEP_BYTES = PDM_PANEL * STEP_INPUTS / 2;
constexpr size_t Q8_STEP_BYTES = PDM_PANEL * STEP_INPUTS;
constexpr size_t BF16_STEP_BYTES = PDM_PANEL * STEP_INPUTS * 2;
constexpr size_t I8_HEADER_BYTES = PDM_PANEL * (sizeof(float) + sizeof(int32_t));
constexpr int I8_STEP_INPUTS = 64;
constexpr size_t I8_STEP_BYTES = PDM_PANEL * I8_STEP_INPUTS;

constexpr int padded_inputs(int num_inputs) { return (num_inputs + 63) / 64 * 64; }
constexpr int num_steps(int num_inputs) { return padded_inputs(num_inputs) / STEP_INPUTS; }
constexpr bool is_grouped(int format) { return format == PDM_W_Q8 || format == PDM_W_Q4 || format == PDM_W_Q4_WIDE; }
constexpr size_t step_bytes(int format) { return format == PDM_W_Q8 ? Q8_STEP_BYTES : Q4_STEP_BYTES; }
constexpr size_t group_header_bytes(int format) {
    return PDM_PANEL * (format == PDM_W_Q8 ? 2 : format == PDM_W_Q4 ? 4 : 8);
}
// Where step `step` of a panel begins, and the header of its group.
constexpr size_t header_offset(int format, int group, int step) {
    const size_t steps = size_t(group / STEP_INPUTS);
    return size_t(step) / steps * (group_header_bytes(format) + steps * step_bytes(format));
}
constexpr size_t step_offset(int format, int group, int step) {
    return header_offset(format, group, step) + group_header_bytes(format) +
           size_t(step % (group / STEP_INPUTS)) * step_bytes(format);
}

// Scratch of PDM_W_I8 for M rows: codes [M rounded up to 32][K'] int8, then scales f32 [M rounded up to 32].
constexpr size_t i8_codes_bytes(int num_inputs, int num_rows) {
    return (size_t(num_rows) + 31) / 32 * 32 * size_t(padded_inputs(num_inputs));
}
constexpr size_t i8_scratch_bytes(int num_inputs, int num_rows) {
    return i8_codes_bytes(num_inputs, num_rows) + (size_t(num_rows) + 31) / 32 * 32 * sizeof(float);
}

}  // namespace pdm
