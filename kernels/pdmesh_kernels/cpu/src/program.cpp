// A model as a list of operations over numbered buffers, run by one call per step.
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <functional>
#include <new>
#include <stdexcept>

#include "phases.h"

namespace pdm {
namespace {

constexpr int ROW_UNIT = 32;
constexpr int WIDTH_UNIT = 64;
const char UNLIKE_GROUP[] = "kv: not like that of the group's other layers";

// Memory that only grows, 64-byte aligned; new memory is zero.
class Memory {
  public:
    ~Memory() { free(data_); }
    void *reserve(size_t num_bytes) {
        if (num_bytes > num_bytes_) {
            free(data_);
            data_ = nullptr;
            num_bytes_ = 0;
            constexpr size_t HUGE_PAGE = size_t{2} << 20;
            const size_t alignment = num_bytes >= HUGE_PAGE ? HUGE_PAGE : 64;
            if (posix_memalign(&data_, alignment, num_bytes)) throw std::bad_alloc();
            if (alignment == HUGE_PAGE) madvise(data_, num_bytes, MADV_HUGEPAGE);
            memset(data_, 0, num_bytes);
            num_bytes_ = num_bytes;
        }
        return data_;
    }

  private:
    void *data_ = nullptr;
    size_t num_bytes_ = 0;
};

struct Buffer {
    int dtype = PDM_F32, width = 0;
    Memory memory;
    void *data = nullptr;
    size_t stride() const { return size_t(round_up(width, WIDTH_UNIT)); }
    size_t bytes(int num_rows) const {
        return size_t(round_up(std::max(num_rows, 1), ROW_UNIT)) * stride() * (dtype == PDM_F32 ? 4 : 2);
    }
    void prepare(int num_rows) { data = memory.reserve(bytes(num_rows)); }
};

struct Group {
    const pdm_kv *kv;
    int num_heads;
    GroupPlan plan;
};

}  // namespace
}  // namespace pdm

using namespace pdm;

struct pdm_program {
  public:
    explicit pdm_program(const Kernels &kernels) : kernels_(kernels) {}

    int add_buffer(int dtype, int width) {
        buffers_.push_back(std::make_unique<Buffer>());
        buffers_.back()->dtype = dtype;
        buffers_.back()->width = width;
        return int(buffers_.size()) - 1;
    }
    int add_angles(const float *frequencies, int rotary_dim, float factor) {
        const int buffer = add_buffer(PDM_F32, rotary_dim);
        AnglesPhase &phase = add(std::make_unique<AnglesPhase>(frequencies, rotary_dim, factor));
        Buffer &angles = *buffers_[size_t(buffer)];
        prepares_.push_back([&phase, &angles](const pdm_batch &batch, int) {
            phase.prepare(batch.positions, batch.num_tokens, static_cast<float *>(angles.data));
        });
        return buffer;
    }
    const char *add_embed(const pdm_embed_args &args, int output) {
        if (!is_buffer(output, PDM_F32, args.table->num_inputs)) return "output: not an f32 buffer of the table's width";
        EmbedPhase &phase = add(std::make_unique<EmbedPhase>(kernels_, args));
        Buffer &to = *buffers_[size_t(output)];
        vocabulary_ = vocabulary_ ? std::min(vocabulary_, args.table->num_outputs) : args.table->num_outputs;
        prepares_.push_back([&phase, &to](const pdm_batch &batch, int) {
            phase.args.token_ids = batch.token_ids;
            phase.args.num_rows = batch.num_tokens;
            phase.args.output = static_cast<float *>(to.data);
            phase.args.output_stride = to.stride();
            phase.prepare();
        });
        return nullptr;
    }
    const char *add_norm(const pdm_norm_args &args, int input, int output) {
        if (!is_buffer(input, args.input_dtype, args.width)) return "input: not a buffer of that type and width";
        if (!is_buffer(output, args.output_dtype, args.width)) return "output: not a buffer of that type and width";
        NormPhase &phase = add(std::make_unique<NormPhase>(kernels_, args));
        Buffer &from = *buffers_[size_t(input)], &to = *buffers_[size_t(output)];
        prepares_.push_back([&phase, &from, &to](const pdm_batch &batch, int) {
            phase.args.row_index = nullptr;
            set_rows(phase.args, batch.num_tokens, from, to);
            phase.prepare();
        });
        return nullptr;
    }
    const char *add_linear(const pdm_linear_args &args, int input, int output) {
        const pdm_weight &weight = *args.weight;
        const int num_outputs = weight.is_gated ? weight.num_outputs / 2 : weight.num_outputs;
        if (!is_buffer(input, weight.format == PDM_W_F32 ? PDM_F32 : PDM_BF16, weight.num_inputs))
            return "input: not a buffer of that type and width";
        if (!is_buffer(output, args.output_dtype, num_outputs)) return "output: not a buffer of that type and width";
        auto linear = std::make_unique<LinearPhase>(kernels_, args);
        LinearPhase &phase = *linear;
        QuantizePhase *quantize = nullptr;
        if (quantizes_rows(weight)) quantize = &add(std::make_unique<QuantizePhase>(kernels_, phase));
        add(std::move(linear));
        Buffer &from = *buffers_[size_t(input)], &to = *buffers_[size_t(output)];
        int8_weights_.push_back(quantizes_rows(weight) ? &weight : nullptr);
        prepares_.push_back([this, &phase, quantize, &from, &to](const pdm_batch &batch, int num_threads) {
            set_rows(phase.args, batch.num_tokens, from, to);
            phase.args.scratch = int8_rows_.reserve(0);
            phase.prepare(num_threads);
            if (quantize) quantize->prepare();
        });
        return nullptr;
    }
    const char *add_heads(const pdm_heads_args &args, int qkv, int queries, int angles) {
        const pdm_kv &kv = *args.kv;
        if (!is_buffer(qkv, args.qkv_dtype, (args.num_heads + 2 * kv.num_kv_heads) * kv.head_dim))
            return "qkv: not a buffer of that type and width";
        if (!is_buffer(queries, query_dtype(kv), args.num_heads * padded_head(kv.head_dim))) return "queries: not a buffer for them";
        if (args.rotary_dim && !is_buffer(angles, PDM_F32, args.rotary_dim)) return "angles: not of this rotary_dim";
        Group &group = groups_[size_t(args.group)];
        if (!join(group, kv, args.num_heads)) return UNLIKE_GROUP;
        HeadsPhase &phase = add(std::make_unique<HeadsPhase>(kernels_, args));
        Buffer &from = *buffers_[size_t(qkv)], &to = *buffers_[size_t(queries)];
        Buffer *table = args.rotary_dim ? buffers_[size_t(angles)].get() : nullptr;
        prepares_.push_back([&phase, &group, &from, &to, table](const pdm_batch &batch, int) {
            phase.args.qkv = from.data;
            phase.args.qkv_stride = from.stride();
            phase.args.queries = to.data;
            phase.args.angles = table ? static_cast<const float *>(table->data) : nullptr;
            phase.prepare(batch, group.plan);
        });
        return nullptr;
    }
    const char *add_attention(const pdm_attention_args &args, int queries, int output) {
        const pdm_kv &kv = *args.kv;
        if (!is_buffer(queries, query_dtype(kv), args.num_heads * padded_head(kv.head_dim))) return "queries: not a buffer for them";
        if (!is_buffer(output, query_dtype(kv), args.num_heads * kv.head_dim)) return "output: not a buffer for it";
        Group &group = groups_[size_t(args.group)];
        if (!join(group, kv, args.num_heads)) return UNLIKE_GROUP;
        AttentionPhase &attend = add(std::make_unique<AttentionPhase>(kernels_, args, false));
        AttentionPhase &merge = add(std::make_unique<AttentionPhase>(kernels_, args, true));
        Buffer &from = *buffers_[size_t(queries)], &to = *buffers_[size_t(output)];
        prepares_.push_back([&attend, &merge, &group, &from, &to](const pdm_batch &batch, int) {
            for (AttentionPhase *phase : {&attend, &merge}) {
                phase->args.queries = from.data;
                phase->args.output = to.data;
                phase->args.output_stride = to.stride();
                phase->prepare(batch, group.plan);
            }
        });
        return nullptr;
    }
    const char *add_logits(const pdm_norm_args &norm, const pdm_linear_args &head, int input) {
        if (!is_buffer(input, norm.input_dtype, norm.width)) return "input: not a buffer of that type and width";
        if (norm.width != head.weight->num_inputs) return "head: not of the norm's width";
        if (norm.output_dtype != (head.weight->format == PDM_W_F32 ? PDM_F32 : PDM_BF16)) return "norm.output_dtype: not the head's";
        if (head.epilogue != PDM_LOGITS) return "head.epilogue: not PDM_LOGITS";
        normed_.dtype = norm.output_dtype;
        normed_.width = norm.width;
        num_panels_ = size_t(pdm_num_panels(head.weight->num_outputs, 0));
        NormPhase &first = add(std::make_unique<NormPhase>(kernels_, norm, TIME_LOGITS));
        auto linear = std::make_unique<LinearPhase>(kernels_, head, TIME_LOGITS);
        LinearPhase &second = *linear;
        QuantizePhase *quantize = nullptr;
        if (quantizes_rows(*head.weight)) quantize = &add(std::make_unique<QuantizePhase>(kernels_, second));
        add(std::move(linear));
        BestPhase &third = add(std::make_unique<BestPhase>(second));
        Buffer &from = *buffers_[size_t(input)];
        int8_weights_.push_back(quantizes_rows(*head.weight) ? head.weight : nullptr);
        prepares_.push_back([this, &first, &second, quantize, &third, &from](const pdm_batch &batch, int num_threads) {
            first.args.row_index = batch.logits_index;
            set_rows(first.args, batch.num_logits, from, normed_);
            first.prepare();
            second.args.input = normed_.data;
            second.args.input_stride = normed_.stride();
            second.args.num_rows = batch.num_logits;
            second.args.output = logits_;
            second.args.output_stride = size_t(second.args.weight->num_outputs);
            second.args.best_value = static_cast<float *>(best_values_.reserve(0));
            second.args.best_id = static_cast<int32_t *>(best_panel_ids_.reserve(0));
            second.args.scratch = int8_rows_.reserve(0);
            second.prepare(num_threads);
            if (quantize) quantize->prepare();
            third.prepare(best_ids_);
        });
        return nullptr;
    }

    const char *run(pdm_pool &pool, const pdm_batch &batch, float *logits, int32_t *best_ids) {
        if (const char *wrong = check(batch)) return wrong;
        for (int token = 0; token < batch.num_tokens; token++)
            if (batch.token_ids[token] < 0 || batch.token_ids[token] >= vocabulary_) return "token_ids: not in the vocabulary";
        for (Group &group : groups_)
            if (group.kv)
                if (const char *wrong = plan_group(batch, int(&group - groups_.data()), *group.kv, group.num_heads,
                                                   pool.num_threads(), group.plan))
                    return wrong;
        for (auto &buffer : buffers_) buffer->prepare(batch.num_tokens);
        normed_.prepare(batch.num_logits);
        int8_rows_.reserve(std::max<size_t>(1, int8_bytes(batch.num_tokens)));
        best_values_.reserve(std::max<size_t>(1, size_t(batch.num_logits) * num_panels_ * sizeof(float)));
        best_panel_ids_.reserve(std::max<size_t>(1, size_t(batch.num_logits) * num_panels_ * sizeof(int32_t)));
        logits_ = logits;
        best_ids_ = best_ids;
        for (auto &prepare : prepares_) prepare(batch, pool.num_threads());
        run_phases(pool, kernels_, order_, times_ns_);
        return nullptr;
    }

    size_t bytes(int num_tokens, int num_logits) const {
        size_t total = normed_.bytes(num_logits) + int8_bytes(num_tokens) + size_t(num_logits) * num_panels_ * 8;
        for (const auto &buffer : buffers_) total += buffer->bytes(num_tokens);
        return total;
    }

    void take_times(int64_t times_ns[NUM_TIMES]) {
        std::copy(times_ns_, times_ns_ + NUM_TIMES, times_ns);
        std::fill(times_ns_, times_ns_ + NUM_TIMES, 0);
    }

  private:
    template <typename Kind>
    Kind &add(std::unique_ptr<Kind> phase) {
        Kind &kept = *phase;
        phases_.push_back(std::move(phase));
        order_.push_back(&kept);
        return kept;
    }
    bool is_buffer(int number, int dtype, int width) const {
        if (number < 0 || size_t(number) >= buffers_.size()) return false;
        return buffers_[size_t(number)]->dtype == dtype && buffers_[size_t(number)]->width == width;
    }
    static int query_dtype(const pdm_kv &kv) { return kv.dtype == PDM_F32 ? PDM_F32 : PDM_BF16; }
    // A group's layers share one plan, so that it must fit all of them.
    static bool join(Group &group, const pdm_kv &kv, int num_heads) {
        if (!group.kv) {
            group.kv = &kv;
            group.num_heads = num_heads;
        }
        return group.num_heads == num_heads && group.kv->num_blocks == kv.num_blocks && group.kv->block_size == kv.block_size &&
               group.kv->num_kv_heads == kv.num_kv_heads && group.kv->head_dim == kv.head_dim && group.kv->window == kv.window;
    }
    template <typename Args>
    static void set_rows(Args &args, int num_rows, const Buffer &from, const Buffer &to) {
        args.num_rows = num_rows;
        args.input = from.data;
        args.input_stride = from.stride();
        args.output = to.data;
        args.output_stride = to.stride();
    }
    size_t int8_bytes(int num_tokens) const {
        size_t most = 0;
        for (const pdm_weight *weight : int8_weights_)
            if (weight) most = std::max(most, pdm_linear_scratch_bytes(weight, num_tokens));
        return most;
    }

  public:
    static constexpr int MAX_GROUPS = 64;

  private:
    const Kernels &kernels_;
    std::vector<std::unique_ptr<Buffer>> buffers_;
    std::vector<std::unique_ptr<Phase>> phases_;
    std::vector<Phase *> order_;
    std::vector<std::function<void(const pdm_batch &, int num_threads)>> prepares_;
    std::vector<Group> groups_ = std::vector<Group>(MAX_GROUPS);
    std::vector<const pdm_weight *> int8_weights_;
    Memory int8_rows_, best_values_, best_panel_ids_;
    Buffer normed_;
    size_t num_panels_ = 0;
    int vocabulary_ = 0;
    float *logits_ = nullptr;
    int32_t *best_ids_ = nullptr;
    int64_t times_ns_[NUM_TIMES] = {};
};

namespace {

// Runs what may not let an exception out; `body` returns what is wrong, or nullptr.
template <typename Body>
int guarded(Body body) {
    try {
        const char *const wrong = body();
        return wrong ? fail(wrong) : 0;
    } catch (const std::bad_alloc &) {
        return fail("not enough memory");
    } catch (const std::length_error &) {
        return fail("not enough memory");
    }
}

bool is_group(int group) { return group >= 0 && group < pdm_program::MAX_GROUPS; }

// Activations are the program's: what a check wants to see of them is filled in.
char unused;

}  // namespace

extern "C" {

pdm_program *pdm_program_create(int isa) {
    const Kernels *const kernels = kernels_of(isa);
    if (!kernels) {
        fail("isa: unknown, or not supported by this processor");
        return nullptr;
    }
    return new (std::nothrow) pdm_program(*kernels);
}

void pdm_program_destroy(pdm_program *program) { delete program; }

int pdm_program_buffer(pdm_program *program, int dtype, int width) {
    if ((dtype != PDM_F32 && dtype != PDM_BF16) || width < 1) return fail("buffer: neither f32 nor bf16, or no width");
    int number = -1;
    return guarded([&] {
               number = program->add_buffer(dtype, width);
               return nullptr;
           })
               ? -1
               : number;
}

int pdm_program_angles(pdm_program *program, const float *frequencies, int rotary_dim, float factor) {
    if (rotary_dim < 2 || rotary_dim % 2 || !frequencies) return fail("angles: rotary_dim is not even, or frequencies are missing");
    int number = -1;
    return guarded([&] {
               number = program->add_angles(frequencies, rotary_dim, factor);
               return nullptr;
           })
               ? -1
               : number;
}

int pdm_program_embed(pdm_program *program, const pdm_embed_args *args, int output) {
    return guarded([&] {
        if (const char *wrong = check(args->table)) return wrong;
        return program->add_embed(*args, output);
    });
}

int pdm_program_norm(pdm_program *program, const pdm_norm_args *args, int input, int output) {
    pdm_norm_args whole = *args;
    whole.num_rows = 0;
    whole.input_stride = whole.output_stride = size_t(args->width);
    return guarded([&] {
        if (const char *wrong = check(whole)) return wrong;
        return program->add_norm(whole, input, output);
    });
}

int pdm_program_linear(pdm_program *program, const pdm_linear_args *args, int input, int output) {
    if (!args->weight) return fail("weight: missing");
    pdm_linear_args whole = *args;
    whole.num_rows = 0;
    whole.input_stride = size_t(args->weight->num_inputs);
    whole.output_stride = size_t(args->weight->num_outputs);
    return guarded([&] {
        if (const char *wrong = check(whole)) return wrong;
        return program->add_linear(whole, input, output);
    });
}

int pdm_program_heads(pdm_program *program, const pdm_heads_args *args, int qkv, int queries, int angles) {
    pdm_heads_args whole = *args;
    whole.qkv = whole.queries = &unused;
    whole.angles = reinterpret_cast<const float *>(&unused);
    whole.qkv_stride = SIZE_MAX;
    return guarded([&] {
        if (!is_group(args->group)) return "group: out of range";
        if (const char *wrong = check(whole)) return wrong;
        return program->add_heads(whole, qkv, queries, angles);
    });
}

int pdm_program_attention(pdm_program *program, const pdm_attention_args *args, int queries, int output) {
    pdm_attention_args whole = *args;
    whole.queries = whole.output = &unused;
    whole.output_stride = SIZE_MAX;
    return guarded([&] {
        if (!is_group(args->group)) return "group: out of range";
        if (const char *wrong = check(whole)) return wrong;
        return program->add_attention(whole, queries, output);
    });
}

int pdm_program_logits(pdm_program *program, const pdm_norm_args *norm, const pdm_linear_args *head, int input) {
    if (!head->weight) return fail("weight: missing");
    pdm_norm_args whole_norm = *norm;
    whole_norm.num_rows = 0;
    whole_norm.input_stride = whole_norm.output_stride = size_t(norm->width);
    pdm_linear_args whole_head = *head;
    whole_head.num_rows = 0;
    whole_head.input_stride = size_t(head->weight->num_inputs);
    whole_head.output_stride = size_t(head->weight->num_outputs);
    return guarded([&] {
        if (const char *wrong = check(whole_norm)) return wrong;
        if (const char *wrong = check(whole_head)) return wrong;
        return program->add_logits(whole_norm, whole_head, input);
    });
}

size_t pdm_program_bytes(const pdm_program *program, int num_tokens, int num_logits) {
    return program->bytes(num_tokens, num_logits);
}

int pdm_program_run(pdm_program *program, pdm_pool *pool, const pdm_batch *batch, float *logits, int32_t *best_ids) {
    if (!pool || (batch->num_logits && (!logits || !best_ids))) return fail("pool, logits or best_ids: missing");
    return guarded([&] { return program->run(*pool, *batch, logits, best_ids); });
}

void pdm_program_times(pdm_program *program, int64_t times_ns[6]) { program->take_times(times_ns); }

}  // extern "C"
