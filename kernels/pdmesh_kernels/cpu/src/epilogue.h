// From sums to outputs: what is done with a product before it leaves the core.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "simd.h"

namespace pdm {
namespace {

// Sixteen outputs, of which `count` exist.
inline void store_f32(float *to, F16 values, int count) {
    if (count >= 16) return store(to, values);
    float lanes[16];
    store(lanes, values);
    memcpy(to, lanes, size_t(count) * sizeof(float));
}
inline void store_bf16(uint16_t *to, F16 values, int count) {
    if (count >= 16) return to_bf16(to, values);
    uint16_t lanes[16];
    to_bf16(lanes, values);
    memcpy(to, lanes, size_t(count) * sizeof(uint16_t));
}

// A panel's place in the outputs.
struct PanelOutputs {
    PanelOutputs(const pdm_linear_args &args, int panel)
        : width(args.weight->is_gated ? args.weight->num_outputs / 2 : args.weight->num_outputs),
          panel_width(args.weight->is_gated ? PDM_PANEL / 2 : PDM_PANEL),
          begin(panel * panel_width),
          count(std::min(panel_width, width - begin)),
          // The last panel also writes zeros up to where a reader of whole cache lines stops.
          zeros(begin + count == width ? int(std::min(size_t(round_up(width, 64)), args.output_stride)) - width : 0) {
        std::fill(bias, bias + PDM_PANEL, 0.0f);
        if (!args.bias) return;
        memcpy(bias, args.bias + begin, size_t(count) * sizeof(float));
        if (args.weight->is_gated) memcpy(bias + 16, args.bias + width + begin, size_t(count) * sizeof(float));
    }
    const int width, panel_width, begin, count, zeros;
    alignas(64) float bias[PDM_PANEL];
};

// Writes one or two groups of sixteen, then the zeros.
inline void write_row(const pdm_linear_args &args, const PanelOutputs &outputs, int row, F16 low, F16 high) {
    const size_t place = size_t(row) * args.output_stride + size_t(outputs.begin);
    if (args.output_dtype == PDM_F32) {
        float *const to = static_cast<float *>(args.output) + place;
        store_f32(to, low, outputs.count);
        if (outputs.count > 16) store_f32(to + 16, high, outputs.count - 16);
        std::fill(to + outputs.count, to + outputs.count + outputs.zeros, 0.0f);
    } else {
        uint16_t *const to = static_cast<uint16_t *>(args.output) + place;
        store_bf16(to, low, outputs.count);
        if (outputs.count > 16) store_bf16(to + 16, high, outputs.count - 16);
        std::fill(to + outputs.count, to + outputs.count + outputs.zeros, uint16_t{0});
    }
}

inline void add_row(const pdm_linear_args &args, const PanelOutputs &outputs, int row, F16 low, F16 high) {
    float *const to = static_cast<float *>(args.output) + size_t(row) * args.output_stride + size_t(outputs.begin);
    if (outputs.count == PDM_PANEL) {
        store(to, load(to) + low);
        store(to + 16, load(to + 16) + high);
        return;
    }
    float lanes[PDM_PANEL];
    store(lanes, low);
    store(lanes + 16, high);
    for (int i = 0; i < outputs.count; i++) to[i] += lanes[i];
}

inline F16 capped(F16 x, float cap) { return cap > 0.0f ? tanh(x / splat(cap)) * splat(cap) : x; }

inline void write_logits(const pdm_linear_args &args, const PanelOutputs &outputs, int panel, int row, F16 low, F16 high) {
    low = capped(low, args.soft_cap);
    high = capped(high, args.soft_cap);
    float *const to = static_cast<float *>(args.output) + size_t(row) * args.output_stride + size_t(outputs.begin);
    store_f32(to, low, outputs.count);
    if (outputs.count > 16) store_f32(to + 16, high, outputs.count - 16);
    if (!args.best_value) return;
    const F16 nothing = splat(-__builtin_inff());
    low = first(std::min(outputs.count, 16), low, nothing);
    high = first(std::max(outputs.count - 16, 0), high, nothing);
    const uint32_t numbers = equal_lanes(low, low) & equal_lanes(high, high);
    const float best = numbers == 0xffff ? largest(max(low, high)) : __builtin_nanf("");
    const uint32_t found = equal_lanes(low, splat(best)) | equal_lanes(high, splat(best)) << 16;
    const size_t place = size_t(row) * size_t(pdm_num_panels(outputs.width, 0)) + size_t(panel);
    args.best_value[place] = best;
    args.best_id[place] = outputs.begin + (found ? __builtin_ctz(found) : 0);
}

// Ends `num_rows` rows (at most TILE_ROWS) from `row` on of one panel. sums: f32 [num_rows][32], 64-byte aligned; y without bias.
inline void finish(const pdm_linear_args &args, int panel, int row, int num_rows, const float *sums) {
    const PanelOutputs outputs(args, panel);
    const F16 low_bias = load(outputs.bias), high_bias = load(outputs.bias + 16);
    for (int end = row + num_rows; row < end; row++, sums += PDM_PANEL) {
        const F16 low = load(sums) + low_bias, high = load(sums + 16) + high_bias;
        switch (args.epilogue) {
            case PDM_STORE: write_row(args, outputs, row, low, high); break;
            case PDM_ADD: add_row(args, outputs, row, low, high); break;
            case PDM_SILU_MUL: write_row(args, outputs, row, silu(low) * high, zero()); break;
            case PDM_GELU_MUL: write_row(args, outputs, row, gelu_tanh(low) * high, zero()); break;
            default: write_logits(args, outputs, panel, row, low, high);
        }
    }
}

}  // namespace
}  // namespace pdm
