// Packed weights of every format, in memory of exactly their size.
#pragma once

#include "memory.h"
#include "pdmesh_cpu.h"

struct Packed {
    Packed(int format, int num_outputs, int num_inputs, int is_gated, Random &random, float scale = 0.1f)
        : group(format >= PDM_W_Q8 ? 32 * random.between(1, 4) : 0),
          weight{format, num_outputs, num_inputs, group, is_gated, may_have_int8_rows(format) && random.once_in(2),
                 pdm_panel_bytes(format, num_inputs, group), nullptr},
          panels(size_t(pdm_num_panels(num_outputs, is_gated)) * weight.panel_bytes, random.guard(), 64) {
        weight.panels = panels.data();
        if (format == PDM_W_Q4 || format == PDM_W_Q4_WIDE)
            pack_codes(random);
        else
            pack_values(random, scale);
    }

    const int group;
    pdm_weight weight;
    Exact<uint8_t> panels;

  private:
    static bool may_have_int8_rows(int format) { return format == PDM_W_Q4 || format == PDM_W_Q4_WIDE; }
    void pack_values(Random &random, float scale) {
        Exact<float> values(size_t(weight.num_outputs) * size_t(weight.num_inputs), random.guard());
        fill(values.begin(), values.end(), random, scale);
        const int result = pdm_pack(weight.format, weight.num_outputs, weight.num_inputs, group, weight.is_gated, values.data(), panels.data());
        REQUIRE(result == 0, "%s", pdm_last_error());
    }
    void pack_codes(Random &random) {
        const size_t num_groups = size_t((weight.num_inputs + group - 1) / group) * size_t(weight.num_outputs);
        Exact<uint8_t> codes(size_t(weight.num_outputs) * size_t(weight.num_inputs), random.guard());
        Exact<float> scales(num_groups, random.guard()), offsets(num_groups, random.guard());
        for (uint8_t &code : codes) code = uint8_t(random.between(0, 15));
        for (float &scale : scales) scale = float(random.between(1, 64)) / 1024;
        for (float &offset : offsets) offset = float(random.between(-64, 64)) / 256;
        const int result = pdm_pack_codes(weight.format, weight.num_outputs, weight.num_inputs, group, weight.is_gated, codes.data(),
                                          scales.data(), offsets.data(), panels.data());
        REQUIRE(result == 0, "%s", pdm_last_error());
    }
};
