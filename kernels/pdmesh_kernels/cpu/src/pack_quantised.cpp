// Packing of quantised weights (the layouts: quantised_panels.h), and their rows back as floats. Plain C++: it runs once per model.
#include <algorithm>

#include "half.h"
#include "pack.h"
#include "phases.h"
#include "quantised_panels.h"
#include "quantised_rows.h"

namespace pdm {
namespace {

constexpr float MOST_CODE = 127.0f;
constexpr int Q8_ZERO = 128;

struct Shape {
    int format, num_outputs, num_inputs, group, is_gated;
    size_t panel_bytes() const { return quantised_panel_bytes(format, num_inputs, group); }
    int num_groups() const { return (num_inputs + group - 1) / group; }
};

const char *check_shape(const Shape &shape, bool has_arrays) {
    if (shape.num_outputs < 1 || shape.num_inputs < 1) return "weight: a size is less than 1";
    if (shape.num_outputs > MAX_OUTPUTS || shape.num_inputs > MAX_INPUTS) return "weight: a size is too large";
    if (shape.is_gated && shape.num_outputs % 2) return "weight.num_outputs: odd, but gated";
    if (is_grouped(shape.format) && (shape.group < STEP_INPUTS || shape.group % STEP_INPUTS))
        return "weight.group: not a multiple of 32";
    if (!has_arrays) return "values, codes, scales, offsets or panels: missing";
    return nullptr;
}

// One output's part of its panel.
class Column {
  public:
    Column(const Shape &shape, int row, uint8_t *panels) : shape_(shape) {
        const PanelPlace place = place_of(row, shape.num_outputs, shape.is_gated);
        panel_ = panels + size_t(place.panel) * shape.panel_bytes();
        column_ = place.column;
        half_ = place.column / HALF_PANEL;
        output_ = place.column % HALF_PANEL;
    }

    // False where the header's type cannot hold `value` as it is.
    bool set_header(int group, int which, float value) {
        const int step = group * (shape_.group / STEP_INPUTS);
        uint8_t *const header = panel_ + header_offset(shape_.format, shape_.group, step);
        const size_t index = size_t(which) * PDM_PANEL + size_t(column_);
        if (shape_.format == PDM_W_Q4_WIDE) {
            memcpy(header + index * sizeof(float), &value, sizeof(float));
            return isfinite(value);
        }
        const uint16_t half = float_to_half(value);
        memcpy(header + index * sizeof(uint16_t), &half, sizeof(uint16_t));
        return half_to_float(half) == value && isfinite(value);
    }
    float header(int group, int which) const {
        const int step = group * (shape_.group / STEP_INPUTS);
        const uint8_t *const from = panel_ + header_offset(shape_.format, shape_.group, step);
        const size_t index = size_t(which) * PDM_PANEL + size_t(column_);
        if (shape_.format == PDM_W_Q4_WIDE) {
            float value;
            memcpy(&value, from + index * sizeof(float), sizeof(float));
            return value;
        }
        uint16_t half;
        memcpy(&half, from + index * sizeof(uint16_t), sizeof(uint16_t));
        return half_to_float(half);
    }

    void set_q8(int input, int code) { panel_[q8_at(input)] = uint8_t(int8_t(code)); }
    int q8(int input) const { return int8_t(panel_[q8_at(input)]); }
    // The panel was zero before.
    void set_q4(int input, int code) {
        const Nibble at = q4_at(input);
        panel_[at.byte] = uint8_t(panel_[at.byte] | code << at.shift);
    }
    int q4(int input) const {
        const Nibble at = q4_at(input);
        return panel_[at.byte] >> at.shift & 15;
    }
    void set_i8(int input, int code) { panel_[i8_at(input)] = uint8_t(int8_t(code)); }
    int i8(int input) const { return int8_t(panel_[i8_at(input)]); }
    void set_i8_header(float scale, int32_t sum) {
        memcpy(panel_ + size_t(column_) * 4, &scale, 4);
        memcpy(panel_ + size_t(PDM_PANEL + column_) * 4, &sum, 4);
    }
    float i8_scale() const {
        float scale;
        memcpy(&scale, panel_ + size_t(column_) * 4, 4);
        return scale;
    }

  private:
    struct Nibble {
        size_t byte;
        int shift;
    };

    size_t q8_at(int input) const {
        const int pair = input % STEP_INPUTS / 2;
        return step_offset(shape_.format, shape_.group, input / STEP_INPUTS) +
               size_t(((half_ * 16 + pair) * HALF_PANEL + output_) * 2 + input % 2);
    }
    Nibble q4_at(int input) const {
        const int pair = input % STEP_INPUTS / 2;
        const int dword = ((half_ * 2 + pair / 8) * 2 + output_ / 8) * 16 + output_ % 8 * 2 + input % 2;
        const size_t step = step_offset(shape_.format, shape_.group, input / STEP_INPUTS);
        return {step + size_t(dword * 4 + pair % 8 / 2), pair % 2 * 4};
    }
    size_t i8_at(int input) const {
        const int quad = input % I8_STEP_INPUTS / 4;
        return I8_HEADER_BYTES + size_t(input / I8_STEP_INPUTS) * I8_STEP_BYTES +
               size_t(((half_ * 16 + quad) * HALF_PANEL + output_) * 4 + input % 4);
    }

    const Shape &shape_;
    uint8_t *panel_;
    int column_, half_, output_;
};

float largest_magnitude(const float *values, int count, bool &is_finite) {
    float most = 0.0f;
    for (int i = 0; i < count; i++) {
        is_finite = is_finite && isfinite(values[i]);
        most = std::max(most, fabsf(values[i]));
    }
    return most;
}

int code_of(float value, float scale) {
    return scale > 0.0f ? int(std::min(MOST_CODE, std::max(-MOST_CODE, rintf(value / scale)))) : 0;
}

// The least f16 that keeps every code within +-127: rounding it down would clip the largest value.
float scale_in_half(float most) {
    const float wanted = most / MOST_CODE;
    uint16_t half = float_to_half(wanted);
    if (half_to_float(half) < wanted) half++;
    return half_to_float(half);
}

bool pack_i8_row(Column column, const float *values, int num_inputs) {
    bool is_finite = true;
    const float scale = largest_magnitude(values, num_inputs, is_finite) / MOST_CODE;
    int32_t sum = 0;
    for (int input = 0; input < num_inputs; input++) {
        const int code = code_of(values[input], scale);
        column.set_i8(input, code);
        sum += code;
    }
    column.set_i8_header(scale, sum);
    return is_finite;
}

bool pack_q8_row(Column column, const Shape &shape, const float *values) {
    bool is_finite = true;
    for (int group = 0; group < shape.num_groups(); group++) {
        const int begin = group * shape.group, end = std::min(begin + shape.group, shape.num_inputs);
        const float scale = scale_in_half(largest_magnitude(values + begin, end - begin, is_finite));
        is_finite = column.set_header(group, 0, scale) && is_finite;
        for (int input = begin; input < end; input++) column.set_q8(input, code_of(values[input], scale));
    }
    return is_finite;
}

const char *pack_codes_row(Column column, const Shape &shape, const uint8_t *codes, const float *scales, const float *offsets) {
    for (int group = 0; group < shape.num_groups(); group++) {
        const int begin = group * shape.group, end = std::min(begin + shape.group, shape.num_inputs);
        if (!column.set_header(group, 0, scales[group]) || (offsets && !column.set_header(group, 1, offsets[group])))
            return "scales or offsets: one is not finite, or not exact in f16 (Q4_WIDE has f32)";
        for (int input = begin; input < end; input++) {
            if (!offsets) {
                column.set_q8(input, codes[input] - Q8_ZERO);
            } else if (codes[input] < 16) {
                column.set_q4(input, codes[input]);
            } else {
                return "codes: not in 0 ... 15";
            }
        }
    }
    return nullptr;
}

float to_bf16_and_back(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    memcpy(&value, &bits, 4);
    return value;
}

}  // namespace

size_t quantised_panel_bytes(int format, int num_inputs, int group) {
    if (format == PDM_W_I8) return I8_HEADER_BYTES + size_t(padded_inputs(num_inputs)) * PDM_PANEL;
    if (!is_grouped(format) || group < STEP_INPUTS || group % STEP_INPUTS) return 0;
    const int steps = num_steps(num_inputs), per_group = group / STEP_INPUTS;
    return size_t((steps + per_group - 1) / per_group) * group_header_bytes(format) + size_t(steps) * step_bytes(format);
}

int pack_quantised(int format, int num_outputs, int num_inputs, int group, int is_gated, const float *values, void *panels) {
    const Shape shape{format, num_outputs, num_inputs, group, is_gated};
    if (format != PDM_W_I8 && format != PDM_W_Q8) return fail("format: 4 bits are packed from a quantised checkpoint's codes");
    if (const char *wrong = check_shape(shape, values && panels)) return fail(wrong);
    memset(panels, 0, size_t(pdm_num_panels(num_outputs, is_gated)) * shape.panel_bytes());
    bool is_finite = true;
    for (int row = 0; row < num_outputs; row++) {
        const float *const from = values + size_t(row) * size_t(num_inputs);
        const Column column(shape, row, static_cast<uint8_t *>(panels));
        is_finite = (format == PDM_W_I8 ? pack_i8_row(column, from, num_inputs) : pack_q8_row(column, shape, from)) && is_finite;
    }
    return is_finite ? 0 : fail("values: one is not finite, or too large for its scale in f16");
}

void unpack_quantised_row(const pdm_weight &weight, int row, float *values) {
    const Shape shape{weight.format, weight.num_outputs, weight.num_inputs, weight.group, weight.is_gated};
    // Column is for reading here: the panels are not written.
    const Column column(shape, row, const_cast<uint8_t *>(static_cast<const uint8_t *>(weight.panels)));
    for (int input = 0; input < weight.num_inputs; input++) {
        if (weight.format == PDM_W_I8) {
            values[input] = float(column.i8(input)) * column.i8_scale();
            continue;
        }
        const int group = input / weight.group;
        const float scale = column.header(group, 0);
        // Codes times scales are exact in f32 up to 20 bits of scale, so this is the fused operation of the kernels.
        const float value = weight.format == PDM_W_Q8 ? float(column.q8(input)) * scale
                                                      : fmaf(float(column.q4(input)), scale, column.header(group, 1));
        values[input] = to_bf16_and_back(value);
    }
}

}  // namespace pdm

using namespace pdm;

extern "C" {

int pdm_pack_codes(int format, int num_outputs, int num_inputs, int group, int is_gated, const uint8_t *codes,
                   const float *scales, const float *offsets, void *panels) {
    const Shape shape{format, num_outputs, num_inputs, group, is_gated};
    if (!is_grouped(format)) return fail("format: only Q8, Q4 and Q4_WIDE are packed from codes");
    const bool has_offsets = format != PDM_W_Q8;
    if (const char *wrong = check_shape(shape, codes && scales && panels && (offsets || !has_offsets))) return fail(wrong);
    memset(panels, 0, size_t(pdm_num_panels(num_outputs, is_gated)) * shape.panel_bytes());
    for (int row = 0; row < num_outputs; row++) {
        const size_t first_group = size_t(row) * size_t(shape.num_groups());
        const Column column(shape, row, static_cast<uint8_t *>(panels));
        if (const char *wrong = pack_codes_row(column, shape, codes + size_t(row) * size_t(num_inputs), scales + first_group,
                                               has_offsets ? offsets + first_group : nullptr))
            return fail(wrong);
    }
    return 0;
}

size_t pdm_linear_scratch_bytes(const pdm_weight *weight, int num_rows) {
    if (weight->format == PDM_W_I8) return i8_scratch_bytes(weight->num_inputs, std::max(num_rows, 0));
    return weight->int8_rows ? group_scratch_bytes(weight->num_inputs, std::max(num_rows, 0)) : 0;
}

}  // extern "C"
