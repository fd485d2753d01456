// Filling panels of f32 and bf16, and reading single rows of any format.
#include "pack.h"

#include <string.h>

#include <algorithm>

#include "phases.h"

namespace pdm {
namespace {

constexpr int STEP = 32, STEP_ITEMS = STEP * PDM_PANEL, HALF = PDM_PANEL / 2;

uint16_t rounded_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return 0x7fc0;
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float widened(uint16_t value) {
    const uint32_t bits = uint32_t{value} << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

int padded_inputs(int num_inputs) { return round_up(num_inputs, 64); }

// The matrix's row that a panel has in `column`; -1: none.
int row_at(int panel, int column, int num_outputs, int is_gated) {
    if (!is_gated) {
        const int row = panel * PDM_PANEL + column;
        return row < num_outputs ? row : -1;
    }
    const int half = num_outputs / 2, within = panel * HALF + column % HALF;
    if (within >= half) return -1;
    return column < HALF ? within : half + within;
}

void pack_f32_panel(const float *const rows[PDM_PANEL], int num_inputs, float *panel) {
    for (int k = 0; k < num_inputs; k++)
        for (int column = 0; column < PDM_PANEL; column++) panel[k * PDM_PANEL + column] = rows[column] ? rows[column][k] : 0.0f;
    std::fill(panel + size_t(num_inputs) * PDM_PANEL, panel + size_t(padded_inputs(num_inputs)) * PDM_PANEL, 0.0f);
}

// Sixteen outputs of 32 inputs: [16 pairs][16 outputs][2].
void pack_tile(const float *const rows[HALF], int k_begin, int num_inputs, uint16_t *tile) {
    const int count = std::min(STEP, num_inputs - k_begin);
    if (count < STEP) std::fill(tile, tile + STEP * HALF, uint16_t{0});
    for (int output = 0; output < HALF; output++) {
        const float *const from = rows[output] ? rows[output] + k_begin : nullptr;
        for (int k = 0; k < count; k++)
            tile[k / 2 * PDM_PANEL + output * 2 + k % 2] = from ? rounded_to_bf16(from[k]) : uint16_t{0};
    }
}

void pack_bf16_panel(const float *const rows[PDM_PANEL], int num_inputs, uint16_t *panel) {
    for (int k = 0; k < padded_inputs(num_inputs); k += STEP)
        for (int half = 0; half < 2; half++)
            pack_tile(rows + half * HALF, k, num_inputs, panel + size_t(k) * PDM_PANEL + half * HALF * STEP);
}

}  // namespace

void unpack_row(const pdm_weight &weight, int row, float *values) {
    if (weight.format != PDM_W_F32 && weight.format != PDM_W_BF16) return unpack_quantised_row(weight, row, values);
    const PanelPlace place = place_of(row, weight.num_outputs, weight.is_gated);
    const char *const panel = static_cast<const char *>(weight.panels) + size_t(place.panel) * weight.panel_bytes;
    if (weight.format == PDM_W_F32) {
        const float *const from = reinterpret_cast<const float *>(panel) + place.column;
        for (int k = 0; k < weight.num_inputs; k++) values[k] = from[size_t(k) * PDM_PANEL];
        return;
    }
    const uint16_t *const from = reinterpret_cast<const uint16_t *>(panel) + place.column / HALF * HALF * STEP + place.column % HALF * 2;
    for (int k = 0; k < weight.num_inputs; k++)
        values[k] = widened(from[size_t(k / STEP) * STEP_ITEMS + size_t(k % STEP / 2) * PDM_PANEL + size_t(k % 2)]);
}

}  // namespace pdm

using namespace pdm;

extern "C" {

size_t pdm_panel_bytes(int format, int num_inputs, int group) {
    if (num_inputs < 1 || num_inputs > MAX_INPUTS) return 0;
    const size_t items = size_t(padded_inputs(num_inputs)) * PDM_PANEL;
    switch (format) {
        case PDM_W_F32: return items * sizeof(float);
        case PDM_W_BF16: return items * sizeof(uint16_t);
        case PDM_W_I8:
        case PDM_W_Q8:
        case PDM_W_Q4:
        case PDM_W_Q4_WIDE: return quantised_panel_bytes(format, num_inputs, group);
        default: return 0;
    }
}

int pdm_num_panels(int num_outputs, int is_gated) {
    if (num_outputs < 1 || num_outputs > MAX_OUTPUTS) return 0;
    return is_gated ? round_up(num_outputs / 2, HALF) / HALF : round_up(num_outputs, PDM_PANEL) / PDM_PANEL;
}

int pdm_pack(int format, int num_outputs, int num_inputs, int group, int is_gated, const float *values, void *panels) {
    const size_t panel_bytes = pdm_panel_bytes(format, num_inputs, group);
    const pdm_weight weight = {format, num_outputs, num_inputs, group, is_gated, 0, panel_bytes, panels};
    if (const char *wrong = check(&weight)) return fail(wrong);
    if (!values) return fail("values: missing");
    if (format != PDM_W_F32 && format != PDM_W_BF16)
        return pack_quantised(format, num_outputs, num_inputs, group, is_gated, values, panels);
    for (int panel = 0; panel < pdm_num_panels(num_outputs, is_gated); panel++) {
        const float *rows[PDM_PANEL];
        for (int column = 0; column < PDM_PANEL; column++) {
            const int row = row_at(panel, column, num_outputs, is_gated);
            rows[column] = row < 0 ? nullptr : values + size_t(row) * size_t(num_inputs);
        }
        char *const target = static_cast<char *>(panels) + size_t(panel) * panel_bytes;
        if (format == PDM_W_F32)
            pack_f32_panel(rows, num_inputs, reinterpret_cast<float *>(target));
        else
            pack_bf16_panel(rows, num_inputs, reinterpret_cast<uint16_t *>(target));
    }
    return 0;
}

int pdm_unpack_row(const pdm_weight *weight, int row, float *values) {
    if (const char *wrong = check(weight)) return fail(wrong);
    if (row < 0 || row >= weight->num_outputs) return fail("row: not of the weight");
    if (!values) return fail("values: missing");
    unpack_row(*weight, row, values);
    return 0;
}

}  // extern "C"
