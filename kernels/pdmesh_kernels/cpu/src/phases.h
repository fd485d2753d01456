// A step as a sequence of phases: each is cut into pieces that the pool's threads claim one by one, their own run of them first, and
// all are done before the next begins. What holds the others up is a thread that loses its core within a piece, not one that claims none.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace pdm {

class Phase {
  public:
    explicit Phase(int time_slot) : time_slot(time_slot) {}
    virtual ~Phase() = default;
    // Does piece `index` on the calling thread.
    virtual void piece(int index, void *scratch) const = 0;

    std::atomic<int> num_done{0};
    int num_pieces = 0;
    const int time_slot;  // of pdm_program_times
};

enum TimeSlot { TIME_EMBED, TIME_NORM, TIME_LINEAR, TIME_HEADS, TIME_ATTENTION, TIME_LOGITS, NUM_TIMES };

// Runs phases in order on all threads; adds what each took to times_ns unless that is nullptr.
void run_phases(pdm_pool &pool, const Kernels &kernels, const std::vector<Phase *> &phases, int64_t *times_ns);

inline bool quantizes_rows(const pdm_weight &weight) { return weight.format == PDM_W_I8 || weight.int8_rows; }

class LinearPhase : public Phase {
  public:
    LinearPhase(const Kernels &kernels, const pdm_linear_args &args, int time_slot = TIME_LINEAR)
        : Phase(time_slot), args(args), kernels_(kernels) {}
    void prepare(int num_threads);
    void piece(int index, void *scratch) const override;
    pdm_linear_args args;

  private:
    const Kernels &kernels_;
    int panels_per_piece_ = 1, pieces_per_row_block_ = 1;
};

// Before a LinearPhase whose rows are quantised.
class QuantizePhase : public Phase {
  public:
    QuantizePhase(const Kernels &kernels, const LinearPhase &linear)
        : Phase(linear.time_slot), linear_(linear), kernels_(kernels) {}
    void prepare();
    void piece(int index, void *scratch) const override;

  private:
    const LinearPhase &linear_;
    const Kernels &kernels_;
};

class NormPhase : public Phase {
  public:
    NormPhase(const Kernels &kernels, const pdm_norm_args &args, int time_slot = TIME_NORM)
        : Phase(time_slot), args(args), kernels_(kernels) {}
    void prepare();
    void piece(int index, void *scratch) const override;
    pdm_norm_args args;

  private:
    const Kernels &kernels_;
};

class EmbedPhase : public Phase {
  public:
    EmbedPhase(const Kernels &kernels, const pdm_embed_args &args) : Phase(TIME_EMBED), args(args), kernels_(kernels) {}
    void prepare();
    void piece(int index, void *scratch) const override;
    pdm_embed_args args;

  private:
    const Kernels &kernels_;
};

// cos and sin of a step's positions.
class AnglesPhase : public Phase {
  public:
    AnglesPhase(const float *frequencies, int rotary_dim, float factor)
        : Phase(TIME_EMBED), frequencies_(frequencies), rotary_dim_(rotary_dim), factor_(factor) {}
    void prepare(const int64_t *positions, int num_tokens, float *angles);
    void piece(int index, void *scratch) const override;
    int rotary_dim() const { return rotary_dim_; }

  private:
    const float *const frequencies_;
    const int rotary_dim_;
    const float factor_;
    const int64_t *positions_ = nullptr;
    int num_tokens_ = 0;
    float *angles_ = nullptr;
};

// What a step's layers of one KV group share.
struct GroupPlan {
    std::vector<int32_t> block_of_token;
    std::vector<AttentionTask> attend, merge;
    std::vector<float> partials;
};

// Fills `plan`; returns nullptr, or what is wrong with the batch. Only block ids that this accepts are ever read or written.
const char *plan_group(const pdm_batch &batch, int group, const pdm_kv &kv, int num_heads, int num_threads, GroupPlan &plan);

class HeadsPhase : public Phase {
  public:
    HeadsPhase(const Kernels &kernels, const pdm_heads_args &args) : Phase(TIME_HEADS), args(args), kernels_(kernels) {}
    void prepare(const pdm_batch &batch, const GroupPlan &plan);
    void piece(int index, void *scratch) const override;
    pdm_heads_args args;

  private:
    const Kernels &kernels_;
    const pdm_batch *batch_ = nullptr;
    const GroupPlan *plan_ = nullptr;
};

class AttentionPhase : public Phase {
  public:
    // `merges`: the second of the two phases, which joins the results of tiles that several pieces share.
    AttentionPhase(const Kernels &kernels, const pdm_attention_args &args, bool merges)
        : Phase(TIME_ATTENTION), args(args), kernels_(kernels), merges_(merges) {}
    void prepare(const pdm_batch &batch, const GroupPlan &plan);
    void piece(int index, void *scratch) const override;
    pdm_attention_args args;

  private:
    const Kernels &kernels_;
    const bool merges_;
    const pdm_batch *batch_ = nullptr;
    const GroupPlan *plan_ = nullptr;
};

// The largest logit of each row from those of its panels.
class BestPhase : public Phase {
  public:
    explicit BestPhase(const LinearPhase &head) : Phase(TIME_LOGITS), head_(head) {}
    void prepare(int32_t *best_ids);
    void piece(int index, void *scratch) const override;

  private:
    const LinearPhase &head_;
    int32_t *best_ids_ = nullptr;
};

// What is wrong with the arguments of an operation, or nullptr.
const char *check(const pdm_weight *weight);
const char *check(const pdm_linear_args &args);
const char *check(const pdm_norm_args &args);
const char *check(const pdm_embed_args &args);
const char *check(const pdm_heads_args &args);
const char *check(const pdm_attention_args &args);
const char *check(const pdm_batch &batch);

// Keeps the text for pdm_last_error and returns -1; the text must live for ever.
int fail(const char *message);

}  // namespace pdm
