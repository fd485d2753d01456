// What an operation refuses, before anything is read.
#include <math.h>

#include "phases.h"

namespace pdm {
namespace {

thread_local const char *last_error = "";

constexpr int MAX_HEADS = 4096, MAX_BLOCK_SIZE = 65536;

bool is_float(int dtype) { return dtype == PDM_F32 || dtype == PDM_BF16; }

const char *check(const pdm_kv *kv) {
    if (!kv || !kv->blocks) return "kv: missing";
    if (kv->block_size < 32 || kv->block_size % 32 || kv->block_size > MAX_BLOCK_SIZE)
        return "kv.block_size: not a multiple of 32 up to 65536";
    if (kv->num_kv_heads < 1 || kv->num_kv_heads > MAX_HEADS) return "kv.num_kv_heads: not in 1 ... 4096";
    if (kv->head_dim < 2 || kv->head_dim % 2 || kv->head_dim > 256) return "kv.head_dim: not an even number up to 256";
    if (kv->dtype != PDM_I8 && !is_float(kv->dtype)) return "kv.dtype: unknown";
    if (kv->num_blocks < 1 || kv->window < 0) return "kv: num_blocks or window out of range";
    if (kv->head_bytes != pdm_kv_head_bytes(kv->dtype, kv->block_size, kv->head_dim)) return "kv.head_bytes: not of its layout";
    const size_t layer_bytes = size_t(kv->num_kv_heads) * kv->head_bytes;
    if (layer_bytes > kv->block_bytes || kv->layer_offset > kv->block_bytes - layer_bytes) return "kv.layer_offset: beyond a block";
    return nullptr;
}

const char *check_heads(int num_heads, const pdm_kv &kv) {
    return num_heads < 1 || num_heads > MAX_HEADS || num_heads % kv.num_kv_heads ? "num_heads: no multiple of num_kv_heads up to 4096"
                                                                                : nullptr;
}

}  // namespace

int fail(const char *message) {
    last_error = message;
    return -1;
}

const char *check(const pdm_weight *weight) {
    if (!weight || !weight->panels) return "weight: missing";
    if (weight->format < PDM_W_F32 || weight->format > PDM_W_Q4_WIDE) return "weight.format: unknown";
    if (weight->num_outputs < 1 || weight->num_inputs < 1) return "weight: a size is less than 1";
    if (weight->num_outputs > MAX_OUTPUTS || weight->num_inputs > MAX_INPUTS) return "weight: a size is too large";
    if (weight->is_gated && weight->num_outputs % 2) return "weight.num_outputs: odd, but gated";
    const bool is_grouped = weight->format >= PDM_W_Q8;
    if (is_grouped && (weight->group < 32 || weight->group % 32)) return "weight.group: not a multiple of 32";
    const bool has_four_bits = weight->format == PDM_W_Q4 || weight->format == PDM_W_Q4_WIDE;
    if (weight->int8_rows != 0 && !(weight->int8_rows == 1 && has_four_bits)) return "weight.int8_rows: not 0, or 1 for 4 bits";
    if (weight->panel_bytes != pdm_panel_bytes(weight->format, weight->num_inputs, weight->group))
        return "weight.panel_bytes: not of its format";
    return nullptr;
}

const char *check(const pdm_linear_args &args) {
    if (const char *wrong = check(args.weight)) return wrong;
    const pdm_weight &weight = *args.weight;
    const bool is_gate = args.epilogue == PDM_SILU_MUL || args.epilogue == PDM_GELU_MUL;
    if (args.epilogue < PDM_STORE || args.epilogue > PDM_LOGITS) return "epilogue: unknown";
    if (is_gate != bool(weight.is_gated)) return "epilogue: a gate needs gated weights, and they need a gate";
    if (!is_float(args.output_dtype)) return "output_dtype: neither f32 nor bf16";
    if ((args.epilogue == PDM_ADD || args.epilogue == PDM_LOGITS) && args.output_dtype != PDM_F32)
        return "output_dtype: sums and logits are f32";
    if (args.num_rows < 0) return "num_rows: less than 0";
    if (args.input_stride < size_t(weight.num_inputs)) return "input_stride: less than a row";
    if (args.output_stride < size_t(is_gate ? weight.num_outputs / 2 : weight.num_outputs)) return "output_stride: less than a row";
    if (args.num_rows && (!args.input || !args.output)) return "input or output: missing";
    if (bool(args.best_value) != bool(args.best_id)) return "best_value and best_id: only one is there";
    if (quantizes_rows(weight) && args.num_rows && !args.scratch) return "scratch: missing";
    return nullptr;
}

const char *check(const pdm_norm_args &args) {
    if (args.width < 1 || size_t(args.width) * 16 > SCRATCH_BYTES) return "width: not in 1 ... 65536";
    if (!args.gain) return "gain: missing";
    if (!is_float(args.input_dtype) || !is_float(args.output_dtype)) return "dtype: neither f32 nor bf16";
    if (args.adds && args.output_dtype != PDM_F32) return "output_dtype: sums are f32";
    if (args.num_rows < 0) return "num_rows: less than 0";
    if (args.input_stride < size_t(args.width) || args.output_stride < size_t(args.width)) return "stride: less than a row";
    if (args.num_rows && (!args.input || !args.output)) return "input or output: missing";
    return nullptr;
}

const char *check(const pdm_embed_args &args) {
    if (const char *wrong = check(args.table)) return wrong;
    if (args.num_rows < 0) return "num_rows: less than 0";
    if (args.output_stride < size_t(args.table->num_inputs)) return "output_stride: less than a row";
    if (args.num_rows && (!args.token_ids || !args.output)) return "token_ids or output: missing";
    for (int row = 0; row < args.num_rows; row++)
        if (args.token_ids[row] < 0 || args.token_ids[row] >= args.table->num_outputs) return "token_ids: not in the vocabulary";
    return nullptr;
}

const char *check(const pdm_heads_args &args) {
    if (const char *wrong = check(args.kv)) return wrong;
    if (const char *wrong = check_heads(args.num_heads, *args.kv)) return wrong;
    const int heads = args.num_heads + 2 * args.kv->num_kv_heads;
    if (!is_float(args.qkv_dtype)) return "qkv_dtype: neither f32 nor bf16";
    if (args.qkv_stride < size_t(heads) * size_t(args.kv->head_dim)) return "qkv_stride: less than a row";
    if (args.rotary_dim < 0 || args.rotary_dim % 2 || args.rotary_dim > args.kv->head_dim) return "rotary_dim: not even, or too large";
    if (!args.qkv || !args.queries || (args.rotary_dim && !args.angles)) return "qkv, queries or angles: missing";
    if (bool(args.q_gain) != bool(args.k_gain)) return "q_gain and k_gain: only one is there";
    return nullptr;
}

const char *check(const pdm_attention_args &args) {
    if (const char *wrong = check(args.kv)) return wrong;
    if (const char *wrong = check_heads(args.num_heads, *args.kv)) return wrong;
    // Maxima are taken before scores are scaled.
    if (!(args.scale > 0.0f && isfinite(args.scale))) return "scale: not a number above 0";
    if (!(args.soft_cap >= 0.0f && isfinite(args.soft_cap))) return "soft_cap: neither 0 nor a number above it";
    if (args.output_stride < size_t(args.num_heads) * size_t(args.kv->head_dim)) return "output_stride: less than a row";
    if (!args.queries || !args.output) return "queries or output: missing";
    return nullptr;
}

const char *check(const pdm_batch &batch) {
    if (batch.num_tokens < 1 || batch.num_sequences < 1) return "batch: empty";
    if (batch.table_width < 1 || batch.num_groups < 1 || !batch.block_tables) return "block_tables: missing";
    for (int group = 0; group < batch.num_groups; group++)
        if (!batch.block_tables[group]) return "block_tables: one is missing";
    if (!batch.token_ids || !batch.positions || !batch.query_start || !batch.context_len) return "batch: an array is missing";
    if (batch.query_start[0] != 0 || batch.query_start[batch.num_sequences] != batch.num_tokens)
        return "query_start: does not go from 0 to the number of tokens";
    for (int sequence = 0; sequence < batch.num_sequences; sequence++) {
        if (batch.query_start[sequence] > batch.query_start[sequence + 1]) return "query_start: falls";
        if (batch.context_len[sequence] < 0 || batch.context_len[sequence] > INT32_MAX) return "context_len: out of range";
    }
    if (batch.num_logits < 0 || (batch.num_logits && !batch.logits_index)) return "logits_index: missing";
    for (int row = 0; row < batch.num_logits; row++)
        if (batch.logits_index[row] < 0 || batch.logits_index[row] >= batch.num_tokens) return "logits_index: not of the step's tokens";
    return nullptr;
}

}  // namespace pdm

extern "C" {
const char *pdm_last_error(void) { return pdm::last_error; }
}
