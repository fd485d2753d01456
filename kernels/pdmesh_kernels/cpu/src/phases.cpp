#include "phases.h"

#include <math.h>
#include <time.h>

#include <algorithm>

namespace pdm {
namespace {

constexpr int NORM_ROWS = 8;
constexpr int EMBED_ROWS = 4;
constexpr int HEADS_TOKENS = 8;
constexpr int ANGLES_TOKENS = 32;
// Claims per thread and phase: enough that a thread which lost its core for a while does not hold up the others.
constexpr int PIECES_PER_THREAD = 6;
constexpr int MAX_PANELS_PER_PIECE = 8;
// So many that two threads seldom share one, and that looking through them takes no time.
constexpr int MOST_RUNS = 8;

int64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return int64_t(time.tv_sec) * 1000000000 + time.tv_nsec;
}

int pieces_of(int count, int per_piece) { return (count + per_piece - 1) / per_piece; }

struct Step {
    pdm_pool &pool;
    const Kernels &kernels;
    const std::vector<Phase *> &phases;
    int64_t *times_ns;
    // A phase's pieces are so many runs; how many of each were claimed, [run][phase]. A thread claims its own run's first: their weights
    // follow each other in memory, and what is fetched ahead of one piece is the next one's.
    const int num_runs;
    std::vector<std::atomic<int>> claimed;
    // The phase that is being done; all before it are.
    std::atomic<size_t> current;
    // Thread 0's: the phase that it times, and since when.
    size_t timed;
    int64_t begun_ns;
};

// The first phase from `at` on that has anything to do.
size_t next_phase(const std::vector<Phase *> &phases, size_t at) {
    while (at < phases.size() && phases[at]->num_pieces == 0) at++;
    return at;
}

int run_begin(const Phase &phase, int run, int num_runs) { return int(int64_t{phase.num_pieces} * run / num_runs); }

// Does what pieces of a phase are left, and returns whether the phase has ended with them.
bool do_pieces(Step &step, size_t at, int thread) {
    Phase &phase = *step.phases[at];
    int num_done = 0;
    for (int turn = 0; turn < step.num_runs; turn++) {
        const int run = (thread + turn) % step.num_runs;
        const int begin = run_begin(phase, run, step.num_runs), count = run_begin(phase, run + 1, step.num_runs) - begin;
        std::atomic<int> &claimed = step.claimed[size_t(run) * step.phases.size() + at];
        // Looking comes first, since claiming takes the counter out of the other threads' caches.
        for (int index; claimed.load(std::memory_order_relaxed) < count &&
                        (index = claimed.fetch_add(1, std::memory_order_relaxed)) < count;
             num_done++)
            phase.piece(begin + index, step.pool.scratch(thread));
    }
    return num_done && phase.num_done.fetch_add(num_done) + num_done == phase.num_pieces;
}

void note_time(Step &step, size_t at) {
    if (!step.times_ns || at == step.timed) return;
    const int64_t now = now_ns();
    step.times_ns[step.phases[step.timed]->time_slot] += now - step.begun_ns;
    step.timed = at;
    step.begun_ns = now;
}

bool work_on(void *context, int thread) {
    Step &step = *static_cast<Step *>(context);
    const size_t end = step.phases.size();
    size_t at = step.current.load();
    if (at == end) return true;
    step.kernels.enter();
    for (uint32_t turns; at < end; at = step.current.load()) {
        turns = step.pool.num_turns();
        if (thread == 0) note_time(step, at);
        if (do_pieces(step, at, thread)) {
            step.current.store(next_phase(step.phases, at + 1));
            step.pool.turn();
        } else if (step.current.load() == at && !step.pool.turns_soon(turns)) {
            break;
        }
    }
    step.kernels.leave();
    if (thread == 0) note_time(step, at);
    return at == end;
}

}  // namespace

void run_phases(pdm_pool &pool, const Kernels &kernels, const std::vector<Phase *> &phases, int64_t *times_ns) {
    for (Phase *phase : phases) phase->num_done.store(0, std::memory_order_relaxed);
    const size_t first = next_phase(phases, 0);
    const int num_runs = std::min(pool.num_threads(), MOST_RUNS);
    Step step{pool, kernels, phases, times_ns, num_runs, std::vector<std::atomic<int>>(size_t(num_runs) * phases.size()),
              {first}, first, times_ns ? now_ns() : 0};
    pool.run(work_on, &step);
}

void LinearPhase::prepare(int num_threads) {
    const int num_panels = pdm_num_panels(args.weight->num_outputs, args.weight->is_gated);
    const int row_blocks = pieces_of(args.num_rows, ROW_BLOCK);
    const int wanted = num_panels * row_blocks / (num_threads * PIECES_PER_THREAD);
    panels_per_piece_ = std::min(std::max(wanted, 1), MAX_PANELS_PER_PIECE);
    pieces_per_row_block_ = pieces_of(num_panels, panels_per_piece_);
    num_pieces = row_blocks * pieces_per_row_block_;
}

void LinearPhase::piece(int index, void *scratch) const {
    const int row = index / pieces_per_row_block_ * ROW_BLOCK;
    const int panel = index % pieces_per_row_block_ * panels_per_piece_;
    const int num_panels = pdm_num_panels(args.weight->num_outputs, args.weight->is_gated);
    kernels_.linear(args, row, std::min(row + ROW_BLOCK, args.num_rows), panel,
                    std::min(panel + panels_per_piece_, num_panels), scratch);
}

void QuantizePhase::prepare() { num_pieces = pieces_of(linear_.args.num_rows, NORM_ROWS); }

void QuantizePhase::piece(int index, void *) const {
    const int row = index * NORM_ROWS;
    kernels_.quantize_rows(linear_.args, row, std::min(row + NORM_ROWS, linear_.args.num_rows));
}

void NormPhase::prepare() { num_pieces = pieces_of(args.num_rows, NORM_ROWS); }

void NormPhase::piece(int index, void *scratch) const {
    const int row = index * NORM_ROWS;
    kernels_.norm(args, row, std::min(row + NORM_ROWS, args.num_rows), scratch);
}

void EmbedPhase::prepare() { num_pieces = pieces_of(args.num_rows, EMBED_ROWS); }

void EmbedPhase::piece(int index, void *) const {
    const int row = index * EMBED_ROWS;
    kernels_.embed(args, row, std::min(row + EMBED_ROWS, args.num_rows));
}

void AnglesPhase::prepare(const int64_t *positions, int num_tokens, float *angles) {
    positions_ = positions;
    num_tokens_ = num_tokens;
    angles_ = angles;
    num_pieces = pieces_of(num_tokens, ANGLES_TOKENS);
}

void AnglesPhase::piece(int index, void *) const {
    const int half = rotary_dim_ / 2, begin = index * ANGLES_TOKENS, end = std::min(begin + ANGLES_TOKENS, num_tokens_);
    for (int token = begin; token < end; token++) {
        float *const cosines = angles_ + size_t(token) * size_t(rotary_dim_), *const sines = cosines + half;
        for (int i = 0; i < half; i++) {
            const float angle = float(positions_[token]) * frequencies_[i];
            cosines[i] = cosf(angle) * factor_;
            sines[i] = sinf(angle) * factor_;
        }
    }
}

void HeadsPhase::prepare(const pdm_batch &batch, const GroupPlan &plan) {
    batch_ = &batch;
    plan_ = &plan;
    num_pieces = pieces_of(batch.num_tokens, HEADS_TOKENS);
}

void HeadsPhase::piece(int index, void *) const {
    const int token = index * HEADS_TOKENS;
    kernels_.heads(args, *batch_, plan_->block_of_token.data(), token, std::min(token + HEADS_TOKENS, batch_->num_tokens));
}

void AttentionPhase::prepare(const pdm_batch &batch, const GroupPlan &plan) {
    batch_ = &batch;
    plan_ = &plan;
    num_pieces = int((merges_ ? plan.merge : plan.attend).size());
}

void AttentionPhase::piece(int index, void *scratch) const {
    if (merges_)
        kernels_.merge(args, *batch_, plan_->merge[size_t(index)]);
    else
        kernels_.attend(args, *batch_, plan_->attend[size_t(index)], scratch);
}

void BestPhase::prepare(int32_t *best_ids) {
    best_ids_ = best_ids;
    num_pieces = head_.args.num_rows;
}

void BestPhase::piece(int index, void *) const {
    const int num_panels = pdm_num_panels(head_.args.weight->num_outputs, 0);
    const float *const values = head_.args.best_value + size_t(index) * size_t(num_panels);
    const int32_t *const ids = head_.args.best_id + size_t(index) * size_t(num_panels);
    int best = 0;
    for (int panel = 0; panel < num_panels; panel++) {
        if (isnan(values[panel])) {
            best_ids_[index] = -1;
            return;
        }
        if (values[panel] > values[best]) best = panel;
    }
    best_ids_[index] = ids[best];
}

}  // namespace pdm
