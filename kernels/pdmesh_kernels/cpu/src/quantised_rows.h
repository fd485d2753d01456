// How rows of W4A8 (int8_rows) lie in scratch: int8 codes [M][steps of 32 inputs][32], then a scale for each step, [M][steps].
//
// A step's codes are in the order in which four bits of a panel give weights to multiply: 4x4 bytes of 16 inputs transposed, so that
// four codes that follow each other are inputs i, i + 4, i + 8, i + 12.
#pragma once

#include "quantised_panels.h"

namespace pdm {

struct GroupScale {
    float scale;
    float sum;  // of the codes, times scale: what an offset of the weights is multiplied with
};

constexpr int row_steps(int num_inputs) { return (num_inputs + STEP_INPUTS - 1) / STEP_INPUTS; }
constexpr size_t group_codes_bytes(int num_inputs, int num_rows) { return size_t(num_rows) * size_t(row_steps(num_inputs)) * STEP_INPUTS; }
constexpr size_t group_scratch_bytes(int num_inputs, int num_rows) {
    return group_codes_bytes(num_inputs, num_rows) + size_t(num_rows) * size_t(row_steps(num_inputs)) * sizeof(GroupScale);
}

}  // namespace pdm
