// What one instruction set's kernels offer: each function does a piece of an operation on the calling thread.
#pragma once

#include "pdmesh_cpu.h"

namespace pdm {

// Inputs may be read only within their rows: an array of M rows ends there. A kernel that wants 16 copies the tail to scratch.

// Per thread, 64-byte aligned; enough for any kernel's intermediate results.
constexpr size_t SCRATCH_BYTES = size_t{1} << 20;

// A piece of attention: query rows [row_begin, row_end) of one sequence and key-value head, where row = token * G + head of the
// group (G = H / J) and token counts from the sequence's first in this step.
struct AttentionTask {
    int sequence;
    int kv_head;
    int row_begin, row_end;  // at most 32 rows
    int split_begin, split_end;
    // Where partial results go when a tile's splits are shared among tasks: result_floats(P) for each of this task's own splits; for
    // `merge`, whose task has all of the tile's splits, the first one's.
    // nullptr: this task does all splits of the tile, merges them in order and writes the output.
    float *partial;
};

struct Kernels {
    const char *name;
    // Once per thread around a step: tile registers.
    void (*enter)();
    void (*leave)();
    // Rows [row_begin, row_end) of panels [panel_begin, panel_end). Rows begin at a multiple of 32.
    void (*linear)(const pdm_linear_args &args, int row_begin, int row_end, int panel_begin, int panel_end, void *scratch);
    // PDM_W_I8, int8_rows: quantises input rows into args.scratch, before `linear`.
    void (*quantize_rows)(const pdm_linear_args &args, int row_begin, int row_end);
    void (*norm)(const pdm_norm_args &args, int row_begin, int row_end, void *scratch);
    void (*embed)(const pdm_embed_args &args, int row_begin, int row_end);
    // Head norms, rotary, queries out, keys and values into the pool, for tokens [token_begin, token_end). A
    // sequence's last token zeroes the slots behind it where the step began its block. block_of_token: [T] block ids.
    void (*heads)(const pdm_heads_args &args, const pdm_batch &batch, const int32_t *block_of_token, int token_begin, int token_end);
    void (*attend)(const pdm_attention_args &args, const pdm_batch &batch, const AttentionTask &task, void *scratch);
    // Merges partials of [split_begin, split_end) in order and writes the tile's output.
    void (*merge)(const pdm_attention_args &args, const pdm_batch &batch, const AttentionTask &task);
};

// Weights beyond these are refused: below them no size in this library overflows.
constexpr int MAX_INPUTS = 1 << 24, MAX_OUTPUTS = 1 << 28;
constexpr int TILE_ROWS = 32;
// A piece of a linear: this many rows at most, and panels by what few rows make of them (operations.cpp).
constexpr int ROW_BLOCK = 256;

// nullptr where this processor cannot run it.
const Kernels *kernels_of(int isa);

extern const Kernels avx2_kernels, avx512_kernels, avx512_bf16_kernels, amx_kernels;

inline int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }
inline int padded_head(int head_dim) { return round_up(head_dim, 32); }
// One split's results of a tile: outputs [32 rows][P], maxima [32], sums [32].
inline size_t result_floats(int width) { return size_t(TILE_ROWS) * size_t(width + 2); }
// Where row `row` of a weight's matrix lies: gated ones have 16 of gate, then 16 of up in a panel.
struct PanelPlace {
    int panel, column;
};
inline PanelPlace place_of(int row, int num_outputs, int is_gated) {
    if (!is_gated) return {row / PDM_PANEL, row % PDM_PANEL};
    const int half = num_outputs / 2, within = row % half;
    return {within / 16, within % 16 + (row >= half ? 16 : 0)};
}

}  // namespace pdm
