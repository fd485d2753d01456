// Single operations of the interface: for tests, benchmarks and whoever needs just one.
#include <algorithm>
#include <new>
#include <stdexcept>

#include "phases.h"

namespace pdm {
namespace {

const char UNSUPPORTED[] = "isa: unknown, or not supported by this processor";
const char NO_MEMORY[] = "not enough memory";

// Calls `body` with the kernels; no C++ exception leaves the library.
template <typename Body>
int with_kernels(pdm_pool *pool, int isa, Body body) {
    if (!pool) return fail("pool: missing");
    const Kernels *const kernels = kernels_of(isa);
    if (!kernels) return fail(UNSUPPORTED);
    try {
        return body(*kernels);
    } catch (const std::bad_alloc &) {
        return fail(NO_MEMORY);
    } catch (const std::length_error &) {
        return fail(NO_MEMORY);
    }
}

}  // namespace
}  // namespace pdm

using namespace pdm;

extern "C" {

int pdm_linear(pdm_pool *pool, int isa, const pdm_linear_args *args) {
    if (const char *wrong = check(*args)) return fail(wrong);
    return with_kernels(pool, isa, [&](const Kernels &kernels) {
        LinearPhase linear(kernels, *args);
        QuantizePhase quantize(kernels, linear);
        linear.prepare(pool->num_threads());
        std::vector<Phase *> phases;
        if (quantizes_rows(*args->weight)) {
            quantize.prepare();
            phases.push_back(&quantize);
        }
        phases.push_back(&linear);
        run_phases(*pool, kernels, phases, nullptr);
        return 0;
    });
}

int pdm_norm(pdm_pool *pool, int isa, const pdm_norm_args *args) {
    if (const char *wrong = check(*args)) return fail(wrong);
    return with_kernels(pool, isa, [&](const Kernels &kernels) {
        NormPhase norm(kernels, *args);
        norm.prepare();
        run_phases(*pool, kernels, {&norm}, nullptr);
        return 0;
    });
}

int pdm_embed(pdm_pool *pool, int isa, const pdm_embed_args *args) {
    if (const char *wrong = check(*args)) return fail(wrong);
    return with_kernels(pool, isa, [&](const Kernels &kernels) {
        EmbedPhase embed(kernels, *args);
        embed.prepare();
        run_phases(*pool, kernels, {&embed}, nullptr);
        return 0;
    });
}

int pdm_heads(pdm_pool *pool, int isa, const pdm_heads_args *args, const pdm_batch *batch) {
    if (const char *wrong = check(*args)) return fail(wrong);
    if (const char *wrong = check(*batch)) return fail(wrong);
    return with_kernels(pool, isa, [&](const Kernels &kernels) {
        GroupPlan plan;
        if (const char *wrong = plan_group(*batch, args->group, *args->kv, args->num_heads, pool->num_threads(), plan))
            return fail(wrong);
        HeadsPhase heads(kernels, *args);
        heads.prepare(*batch, plan);
        run_phases(*pool, kernels, {&heads}, nullptr);
        return 0;
    });
}

int pdm_attention(pdm_pool *pool, int isa, const pdm_attention_args *args, const pdm_batch *batch) {
    if (const char *wrong = check(*args)) return fail(wrong);
    if (const char *wrong = check(*batch)) return fail(wrong);
    return with_kernels(pool, isa, [&](const Kernels &kernels) {
        GroupPlan plan;
        if (const char *wrong = plan_group(*batch, args->group, *args->kv, args->num_heads, pool->num_threads(), plan))
            return fail(wrong);
        AttentionPhase attend(kernels, *args, false), merge(kernels, *args, true);
        attend.prepare(*batch, plan);
        merge.prepare(*batch, plan);
        run_phases(*pool, kernels, {&attend, &merge}, nullptr);
        return 0;
    });
}

int pdm_angles(pdm_pool *pool, const int64_t *positions, int num_tokens, const float *frequencies, int rotary_dim,
               float factor, float *angles) {
    if (num_tokens < 0 || rotary_dim < 0 || rotary_dim % 2 || !positions || !frequencies || !angles)
        return fail("angles: a size is out of range or an array is missing");
    return with_kernels(pool, PDM_AVX2, [&](const Kernels &kernels) {
        AnglesPhase phase(frequencies, rotary_dim, factor);
        phase.prepare(positions, num_tokens, angles);
        run_phases(*pool, kernels, {&phase}, nullptr);
        return 0;
    });
}

}  // extern "C"
