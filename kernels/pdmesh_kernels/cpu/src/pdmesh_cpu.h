/* The CPU library's whole interface: plain C, called through ctypes.

   Legend: T tokens of a step, N sequences, R rows with logits, E hidden size, H query heads, J key-value heads, G = H / J,
   D head_dim, P = D rounded up to 32, S block size (tokens), V vocabulary, M rows of a matrix, K inputs, n outputs.

   Rules that hold everywhere:
   - Results of a row depend on that row alone: never on M, on the other rows, on the number of threads or on the path taken.
     So sums over K run in one fixed order, and sums over keys in splits of PDM_SPLIT keys at absolute positions.
   - Activations are row-major with a row stride in items; a buffer's width is rounded up to 64 items, and what is behind a
     row's own items is zero.
   - Pointers are borrowed for the call, or for the program's life where a structure is added to one. */
#ifndef PDMESH_CPU_H
#define PDMESH_CPU_H

#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(default)
#ifdef __cplusplus
extern "C" {
#endif

#define PDM_ABI_VERSION 1
#define PDM_PANEL 32  /* output columns of a weight panel */
#define PDM_SPLIT 256 /* keys whose softmax is computed at once, beginning at multiples of it */

enum pdm_isa { PDM_AVX2 = 0, PDM_AVX512 = 1, PDM_AVX512_BF16 = 2, PDM_AMX = 3, PDM_NUM_ISAS = 4 };
enum pdm_dtype { PDM_F32 = 0, PDM_BF16 = 1, PDM_I8 = 2 };

/* ---- weights: y[M, n] = x[M, K] Wt + b, W in panels of 32 outputs, each panel one contiguous piece -------------------- */
enum pdm_format {
    PDM_W_F32 = 0,  /* panel [K'][32] f32, K' = K rounded up to 64 */
    PDM_W_BF16 = 1, /* panel [K'/32][2 halves of 16 outputs][16 pairs of inputs][16 outputs][2] bf16: what an AMX tile holds */
    PDM_W_I8 = 2,   /* W8A8: int8 weights with one scale per output, activations quantised per row as they come */
    PDM_W_Q8 = 3,   /* W8A16: int8 with a scale per `group` inputs; multiplied as bf16 */
    PDM_W_Q4 = 4,   /* W4A16: 4 bits with scale and offset per `group` inputs, f16; multiplied as bf16, but for int8_rows */
    PDM_W_Q4_WIDE = 5 /* the same with scale and offset in f32, where f16 would change them (Q4_K, GPTQ, AWQ) */
};

typedef struct {
    int32_t format;
    int32_t num_outputs; /* n; for gated weights 2 I */
    int32_t num_inputs;  /* K */
    int32_t group;       /* inputs that share a scale (Q8, Q4, Q4_WIDE), a multiple of 32; else 0 */
    int32_t is_gated;    /* rows are [gate I; up I]; a panel has 16 of gate, then the same 16 of up */
    int32_t int8_rows;   /* Q4, Q4_WIDE: 1: W4A8, a row's inputs are quantised as they come, 32 to a scale; else 0 */
    size_t panel_bytes;  /* pdm_panel_bytes(format, K, group) */
    const void *panels;  /* 64-byte aligned, pdm_num_panels(...) * panel_bytes */
} pdm_weight;

size_t pdm_panel_bytes(int format, int num_inputs, int group);
int pdm_num_panels(int num_outputs, int is_gated);

/* ---- operations ------------------------------------------------------------------------------------------------------- */
enum pdm_epilogue {
    PDM_STORE = 0,    /* out = y + bias */
    PDM_ADD = 1,      /* out (f32) += y + bias */
    PDM_SILU_MUL = 2, /* gated: out = silu(gate) * up, n / 2 columns */
    PDM_GELU_MUL = 3, /* gated: out = gelu_tanh(gate) * up */
    PDM_LOGITS = 4    /* out (f32) = cap(y); best_* get each row's largest */
};

typedef struct {
    const pdm_weight *weight;
    const void *input; /* [M, K]: f32 for PDM_W_F32, bf16 otherwise (PDM_W_I8 and int8_rows quantise it themselves, into `scratch`) */
    size_t input_stride;
    int32_t num_rows;
    int32_t epilogue;
    const float *bias; /* [n] f32 or NULL */
    void *output;
    size_t output_stride;
    int32_t output_dtype; /* PDM_F32 or PDM_BF16 */
    float soft_cap;       /* PDM_LOGITS: 0 none */
    float *best_value;    /* PDM_LOGITS: [M, num_panels] f32 workspace: largest logit of each panel (NaN when one is NaN), or NULL */
    int32_t *best_id;     /* [M, num_panels] its lowest id */
    void *scratch;        /* PDM_W_I8, int8_rows: pdm_linear_scratch_bytes(weight, M), else NULL */
} pdm_linear_args;

typedef struct {
    const void *input; /* [M, E] of input_dtype: f32 or bf16 */
    size_t input_stride;
    int32_t num_rows;
    int32_t width;
    const float *gain; /* [E] f32, any unit offset already in it */
    const float *bias; /* [E] or NULL: LayerNorm only */
    float epsilon;
    int32_t is_layer_norm; /* 0: RMSNorm */
    int32_t adds;          /* 0: output = norm(input); 1: output (f32) += norm(input) */
    int32_t input_dtype, output_dtype;
    void *output;
    size_t output_stride;
    const int64_t *row_index; /* [M] rows of `input` to read, or NULL: 0 ... M - 1 */
} pdm_norm_args;

typedef struct {
    const pdm_weight *table; /* any format; its rows are the vocabulary */
    const int64_t *token_ids; /* [T] */
    int32_t num_rows;
    float scale; /* multiplies, as the model was trained; 1: none */
    float *output; /* [T, E] f32 */
    size_t output_stride;
    int32_t rounds; /* 1: the scaled row is rounded to bf16 first (a bf16 model) */
} pdm_embed_args;

/* A KV group's layer in the pool. Key k of a sequence lies in block table[k / S], slot k % S. S is a multiple of 32.
   One head: keys, values, then for int8 the scales f32 [2][S].
   bf16, int8: keys [S/16][P/2][16][2], values [S/2][P][2]; f32: keys [S/16][P][16], values [S][P]. */
typedef struct {
    uint8_t *blocks;        /* block 0 */
    size_t block_bytes;
    size_t layer_offset;    /* of this layer inside a block */
    size_t head_bytes;      /* of one key-value head: pdm_kv_head_bytes */
    int32_t num_blocks, block_size, num_kv_heads, head_dim;
    int32_t dtype;          /* PDM_F32, PDM_BF16, PDM_I8 */
    int32_t window;         /* tokens that a query sees, itself included; 0: all */
} pdm_kv;

size_t pdm_kv_head_bytes(int dtype, int block_size, int head_dim);

/* The step's sequences, as engine.backend.StepBatch has them. */
typedef struct {
    int32_t num_tokens, num_sequences, table_width, num_groups;
    const int64_t *token_ids, *positions; /* [T] */
    const int64_t *query_start;           /* [N + 1] */
    const int64_t *context_len;           /* [N] */
    const int32_t *const *block_tables;   /* [group] -> [N, table_width]; -1: none */
    const int64_t *logits_index;          /* [R] */
    int32_t num_logits;
    int32_t reserved;
} pdm_batch;

typedef struct {
    const void *qkv; /* [T, (H + 2 J) D] f32 or bf16 (qkv_dtype) */
    size_t qkv_stride;
    int32_t qkv_dtype;
    int32_t num_heads;     /* H; J and D are the kv's */
    const float *q_gain, *k_gain; /* [D] RMSNorm of each head, or NULL */
    float epsilon;
    int32_t rotary_dim;    /* first items of a head that are turned, halves rotated; <= D, even */
    const float *frequencies; /* [rotary_dim / 2] radians per position */
    float rotary_factor;   /* multiplies cos and sin */
    int32_t is_interleaved; /* 1: neighbours are pairs (GPT-J), 0: halves (NeoX) */
    void *queries;         /* [T, H, P] of the qkv's compute type: bf16, or f32 when kv dtype is f32 */
    const pdm_kv *kv;
    int32_t group;         /* of the batch */
    const float *angles;   /* [T, rotary_dim] cos then sin, made once per step by pdm_angles; never NULL */
} pdm_heads_args;

typedef struct {
    const void *queries; /* as pdm_heads_args.queries */
    void *output;        /* [T, H D] same type; stride in items */
    size_t output_stride;
    int32_t num_heads;
    float scale, soft_cap; /* soft_cap 0: none */
    const pdm_kv *kv;
    int32_t group;
    int32_t reserved;
} pdm_attention_args;

/* ---- threads ---------------------------------------------------------------------------------------------------------- */
typedef struct pdm_pool pdm_pool;
/* `cpus`: one per thread, -1 for not pinned; or NULL. Thread 0 is whoever calls, and is not pinned here. NULL on failure. */
pdm_pool *pdm_pool_create(int num_threads, const int *cpus);
void pdm_pool_destroy(pdm_pool *pool);
int pdm_pool_num_threads(const pdm_pool *pool);

/* ---- single operations: 0, or -1 with pdm_last_error() ---------------------------------------------------------------- */
int pdm_linear(pdm_pool *pool, int isa, const pdm_linear_args *args);
int pdm_norm(pdm_pool *pool, int isa, const pdm_norm_args *args);
int pdm_embed(pdm_pool *pool, int isa, const pdm_embed_args *args);
int pdm_heads(pdm_pool *pool, int isa, const pdm_heads_args *args, const pdm_batch *batch);
int pdm_attention(pdm_pool *pool, int isa, const pdm_attention_args *args, const pdm_batch *batch);
/* angles [T, rotary_dim]: cos(position * frequency) * factor, then sin likewise */
int pdm_angles(pdm_pool *pool, const int64_t *positions, int num_tokens, const float *frequencies, int rotary_dim,
               float factor, float *angles);
size_t pdm_linear_scratch_bytes(const pdm_weight *weight, int num_rows);

/* ---- packing: `values` row-major f32 [n, K] --------------------------------------------------------------------------- */
int pdm_pack(int format, int num_outputs, int num_inputs, int group, int is_gated, const float *values, void *panels);
/* From codes u8 [n, K] and per group w = scale * code + offset, f32 [n, K / group rounded up] (Q4, Q4_WIDE: codes 0..15; Q8:
   code - 128, no offsets). Fails where a scale or offset has no exact f16 (Q4, Q8) or is not finite. */
int pdm_pack_codes(int format, int num_outputs, int num_inputs, int group, int is_gated, const uint8_t *codes,
                   const float *scales, const float *offsets, void *panels);
/* One row of a packed weight as f32 [K], exactly what a product would use. */
int pdm_unpack_row(const pdm_weight *weight, int row, float *values);

/* ---- programs: a model as a list of operations, one call per step ------------------------------------------------------ */
typedef struct pdm_program pdm_program;
pdm_program *pdm_program_create(int isa);
void pdm_program_destroy(pdm_program *program);
/* Activations [T, width] that live as long as the program; returns a number >= 0. */
int pdm_program_buffer(pdm_program *program, int dtype, int width);
/* In order. Pointers in `args` to activations are given as buffer numbers instead (-1: none). */
int pdm_program_embed(pdm_program *program, const pdm_embed_args *args, int output);
int pdm_program_norm(pdm_program *program, const pdm_norm_args *args, int input, int output);
int pdm_program_linear(pdm_program *program, const pdm_linear_args *args, int input, int output);
int pdm_program_heads(pdm_program *program, const pdm_heads_args *args, int qkv, int queries, int angles);
int pdm_program_attention(pdm_program *program, const pdm_attention_args *args, int queries, int output);
/* A rotary table of the step, made before the first operation; returns its number for pdm_program_heads. */
int pdm_program_angles(pdm_program *program, const float *frequencies, int rotary_dim, float factor);
/* The end: rows of logits_index, normed, times the head. */
int pdm_program_logits(pdm_program *program, const pdm_norm_args *norm, const pdm_linear_args *head, int input);
size_t pdm_program_bytes(const pdm_program *program, int num_tokens, int num_logits); /* of activations for such a step */
/* Runs it. logits f32 [R, V] (stride V); best_ids i32 [R]: the largest logit's lowest id, -1 when a logit is NaN. */
int pdm_program_run(pdm_program *program, pdm_pool *pool, const pdm_batch *batch, float *logits, int32_t *best_ids);
/* Nanoseconds by operation kind since the last call: embed, norm, linear, heads, attention, logits. */
void pdm_program_times(pdm_program *program, int64_t times_ns[6]);

/* ---- about the library ------------------------------------------------------------------------------------------------ */
int pdm_abi_version(void);
const char *pdm_source_digest(void); /* what it was built from: build.py's source_digest() */
int pdm_isa_supported(int isa);
const char *pdm_isa_name(int isa);
const char *pdm_last_error(void); /* of this thread */

#ifdef __cplusplus
}
#endif
#pragma GCC visibility pop
#endif
