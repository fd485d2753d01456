// A small decoder with two KV groups (all keys, a window), as a program whose weights, pool and batches are exactly sized.
#pragma once

#include <functional>
#include <vector>

#include "weights.h"

struct Shape {
    int vocabulary, hidden, num_heads, num_kv_heads, head_dim, intermediate, block_size, num_blocks, window, kv_dtype, format;
    bool is_wide() const { return format == PDM_W_F32; }
    int activations() const { return is_wide() ? PDM_F32 : PDM_BF16; }
};

inline Shape any_shape(Random &random) {
    const int kv_heads[] = {1, 2, 3}, groups[] = {1, 2, 3, 7}, head_dims[] = {2, 16, 40, 64, 80, 128}, blocks[] = {32, 64};
    const int formats[] = {PDM_W_F32, PDM_W_BF16, PDM_W_BF16, PDM_W_I8, PDM_W_Q8, PDM_W_Q4, PDM_W_Q4_WIDE};
    Shape shape;
    shape.vocabulary = random.between(1, 120);
    shape.hidden = random.between(1, 150);
    shape.num_kv_heads = random.one_of(kv_heads);
    shape.num_heads = shape.num_kv_heads * random.one_of(groups);
    shape.head_dim = random.one_of(head_dims);
    shape.intermediate = random.between(1, 150);
    shape.block_size = random.one_of(blocks);
    shape.num_blocks = random.between(4, 24);
    shape.window = random.between(1, 150);
    shape.format = random.one_of(formats);
    shape.kv_dtype = shape.is_wide() ? PDM_F32 : random.once_in(2) ? PDM_BF16 : PDM_I8;
    return shape;
}

// What programs share: read only.
struct Weights {
    Weights(const Shape &shape, Random &random) : shape(shape) {
        const int width = shape.num_heads * shape.head_dim, kv_width = shape.num_kv_heads * shape.head_dim;
        table = make(shape.vocabulary, shape.hidden, 0, random);
        head = make(shape.vocabulary, shape.hidden, 0, random);
        for (Layer &layer : layers) {
            layer.qkv = make(width + 2 * kv_width, shape.hidden, 0, random);
            layer.out = make(shape.hidden, width, 0, random);
            layer.up = make(2 * shape.intermediate, shape.hidden, 1, random);
            layer.down = make(shape.hidden, shape.intermediate, 0, random);
        }
        gain = vector(shape.hidden, random);
        head_gain = vector(shape.head_dim, random);
        frequencies = vector(std::max(1, rotary_dim() / 2), random);
    }
    int rotary_dim() const { return shape.head_dim / 4 * 2; }

    struct Layer {
        std::unique_ptr<Packed> qkv, out, up, down;
    };
    const Shape shape;
    Layer layers[2];
    std::unique_ptr<Packed> table, head;
    std::unique_ptr<Exact<float>> gain, head_gain, frequencies;

  private:
    std::unique_ptr<Packed> make(int num_outputs, int num_inputs, int is_gated, Random &random) {
        return std::make_unique<Packed>(shape.format, num_outputs, num_inputs, is_gated, random);
    }
    static std::unique_ptr<Exact<float>> vector(int width, Random &random) {
        auto made = std::make_unique<Exact<float>>(size_t(width), random.guard());
        fill(made->begin(), made->end(), random);
        return made;
    }
};

// A program and its KV pool.
struct Model {
    Model(const Weights &weights, int isa, Random &random)
        : shape(weights.shape), weights(weights),
          head_bytes(pdm_kv_head_bytes(shape.kv_dtype, shape.block_size, shape.head_dim)),
          block_bytes(size_t(shape.num_kv_heads) * head_bytes),
          program(pdm_program_create(isa), pdm_program_destroy) {
        REQUIRE(program, "%s", pdm_last_error());
        for (int group = 0; group < 2; group++) {
            pools[group] = std::make_unique<Exact<uint8_t>>(size_t(shape.num_blocks) * block_bytes, random.guard(), 64);
            kv[group] = {pools[group]->data(), block_bytes, 0, head_bytes, shape.num_blocks, shape.block_size, shape.num_kv_heads,
                         shape.head_dim, shape.kv_dtype, group ? shape.window : 0};
        }
        describe();
    }

    int run(pdm_pool *pool, const pdm_batch &batch, float *logits, int32_t *best) {
        return pdm_program_run(program.get(), pool, &batch, logits, best);
    }

    const Shape shape;
    const Weights &weights;
    const size_t head_bytes, block_bytes;
    std::unique_ptr<pdm_program, void (*)(pdm_program *)> program;
    std::unique_ptr<Exact<uint8_t>> pools[2];
    pdm_kv kv[2];

  private:
    int need(int number) {
        REQUIRE(number >= 0, "%s", pdm_last_error());
        return number;
    }
    int buffer(int dtype, int width) { return need(pdm_program_buffer(program.get(), dtype, width)); }

    void describe() {
        pdm_program *const p = program.get();
        const int kind = shape.activations(), queries_kind = shape.kv_dtype == PDM_F32 ? PDM_F32 : PDM_BF16;
        const int width = shape.num_heads * shape.head_dim, all = width + 2 * shape.num_kv_heads * shape.head_dim;
        const int padded = (shape.head_dim + 31) / 32 * 32;
        const int x = buffer(PDM_F32, shape.hidden), normed = buffer(kind, shape.hidden), qkv = buffer(kind, all);
        const int queries = buffer(queries_kind, shape.num_heads * padded), attended = buffer(queries_kind, width);
        const int gated = buffer(kind, shape.intermediate);
        const int rotary = weights.rotary_dim();
        const int angles = rotary ? need(pdm_program_angles(p, weights.frequencies->data(), rotary, 1.0f)) : -1;
        const pdm_embed_args embed{&weights.table->weight, nullptr, 0, 2.0f, nullptr, 0, 1};
        pdm_norm_args norm{};
        norm.width = shape.hidden;
        norm.gain = weights.gain->data();
        norm.epsilon = 1e-5f;
        norm.input_dtype = PDM_F32;
        norm.output_dtype = kind;
        need(pdm_program_embed(p, &embed, x));
        for (int layer = 0; layer < 2; layer++) {
            const Weights::Layer &of = weights.layers[layer];
            pdm_heads_args heads{};
            heads.qkv_dtype = kind;
            heads.num_heads = shape.num_heads;
            heads.q_gain = heads.k_gain = layer ? weights.head_gain->data() : nullptr;
            heads.epsilon = 1e-5f;
            heads.rotary_dim = rotary;
            heads.frequencies = weights.frequencies->data();
            heads.rotary_factor = 1.0f;
            heads.is_interleaved = layer;
            heads.kv = &kv[layer];
            heads.group = layer;
            pdm_attention_args attention{};
            attention.num_heads = shape.num_heads;
            attention.scale = 0.1f;
            attention.soft_cap = layer ? 20.0f : 0.0f;
            attention.kv = &kv[layer];
            attention.group = layer;
            need(pdm_program_norm(p, &norm, x, normed));
            linear(of.qkv->weight, PDM_STORE, kind, normed, qkv);
            need(pdm_program_heads(p, &heads, qkv, queries, angles));
            need(pdm_program_attention(p, &attention, queries, attended));
            linear(of.out->weight, PDM_ADD, PDM_F32, attended, x);
            need(pdm_program_norm(p, &norm, x, normed));
            linear(of.up->weight, layer ? PDM_SILU_MUL : PDM_GELU_MUL, kind, normed, gated);
            linear(of.down->weight, PDM_ADD, PDM_F32, gated, x);
        }
        pdm_linear_args head{};
        head.weight = &weights.head->weight;
        head.epilogue = PDM_LOGITS;
        head.output_dtype = PDM_F32;
        need(pdm_program_logits(p, &norm, &head, x));
    }

    void linear(const pdm_weight &weight, int epilogue, int dtype, int input, int output) {
        pdm_linear_args args{};
        args.weight = &weight;
        args.epilogue = epilogue;
        args.output_dtype = dtype;
        need(pdm_program_linear(program.get(), &args, input, output));
    }
};
