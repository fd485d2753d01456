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

// Rows of one panel whose sums are there and whose outputs are still to be written: as a whole, or a few at a time while the next
// sums are made. sums: f32 [num_rows][32], 64-byte aligned; without bias.
class Ending {
  public:
    Ending(const pdm_linear_args &args, int panel, int row, int num_rows, const float *sums)
        : args_(args), outputs_(args, panel), panel_(panel), row_(row), end_(row + num_rows), sums_(sums), rows_(choose()) {}

    void some(int count) { (this->*rows_)(std::min(row_ + count, end_)); }

  private:
    using Rows = void (Ending::*)(int);

    // Whole panels, which are nearly all, have a loop without questions.
    Rows choose() const {
        const bool is_whole = outputs_.count == outputs_.panel_width && outputs_.zeros == 0, is_bf16 = args_.output_dtype == PDM_BF16;
        if (!is_whole || args_.epilogue == PDM_LOGITS) return &Ending::any_rows;
        switch (args_.epilogue) {
            case PDM_STORE: return is_bf16 ? &Ending::whole_rows<PDM_STORE, uint16_t> : &Ending::whole_rows<PDM_STORE, float>;
            case PDM_ADD: return &Ending::whole_rows<PDM_ADD, float>;
            case PDM_SILU_MUL: return is_bf16 ? &Ending::whole_rows<PDM_SILU_MUL, uint16_t> : &Ending::whole_rows<PDM_SILU_MUL, float>;
            default: return is_bf16 ? &Ending::whole_rows<PDM_GELU_MUL, uint16_t> : &Ending::whole_rows<PDM_GELU_MUL, float>;
        }
    }

    template <int EPILOGUE, typename Item>
    void whole_rows(int last) {
        const size_t stride = args_.output_stride;
        Item *to = static_cast<Item *>(args_.output) + size_t(row_) * stride + size_t(outputs_.begin);
        const float *sums = sums_;
        for (int row = row_; row < last; row++, sums += PDM_PANEL, to += stride) {
            F16 low = load(sums) + load(outputs_.bias), high = load(sums + 16) + load(outputs_.bias + 16);
            if constexpr (EPILOGUE == PDM_SILU_MUL) {
                put(to, silu(low) * high);
            } else if constexpr (EPILOGUE == PDM_GELU_MUL) {
                put(to, gelu_tanh(low) * high);
            } else if constexpr (EPILOGUE == PDM_ADD) {
                put(to, load(to) + low);
                put(to + 16, load(to + 16) + high);
            } else {
                put(to, low);
                put(to + 16, high);
            }
        }
        row_ = last;
        sums_ = sums;
    }
    static void put(float *to, F16 values) { store(to, values); }
    static void put(uint16_t *to, F16 values) { to_bf16(to, values); }

    void any_rows(int last) {
        for (; row_ < last; row_++, sums_ += PDM_PANEL) {
            const F16 low = load(sums_) + load(outputs_.bias), high = load(sums_ + 16) + load(outputs_.bias + 16);
            switch (args_.epilogue) {
                case PDM_STORE: write_row(args_, outputs_, row_, low, high); break;
                case PDM_ADD: add_row(args_, outputs_, row_, low, high); break;
                case PDM_SILU_MUL: write_row(args_, outputs_, row_, silu(low) * high, zero()); break;
                case PDM_GELU_MUL: write_row(args_, outputs_, row_, gelu_tanh(low) * high, zero()); break;
                default: write_logits(args_, outputs_, panel_, row_, low, high);
            }
        }
    }

    const pdm_linear_args &args_;
    const PanelOutputs outputs_;
    const int panel_;
    int row_;
    const int end_;
    const float *sums_;
    const Rows rows_;
};

// Ends `num_rows` rows (at most TILE_ROWS) from `row` on of one panel.
inline void finish(const pdm_linear_args &args, int panel, int row, int num_rows, const float *sums) {
    Ending(args, panel, row, num_rows, sums).some(num_rows);
}

}  // namespace
}  // namespace pdm
