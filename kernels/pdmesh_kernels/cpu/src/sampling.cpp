// One row's draw: what top_k, top_p and min_p leave, whom the race leaves, and among those the largest of logit plus noise.
#include "sampling.h"

#include <math.h>

#include <algorithm>
#include <new>
#include <vector>

#include "kernels.h"

namespace pdm {
namespace {

// No noise is above 33 log 2.
constexpr double MAX_NOISE = 22.88;
// Below the largest logit: a look costs less the less it finds.
constexpr float LOOKS[] = {2.0f, 4.0f, 8.0f, 16.0f, INFINITY};
// Above the relative error of a time, of what two sums of float32 exponentials may differ by (each is good to 2e-7), and of a score.
constexpr double RACE_MARGIN = 1.0001, SUM_MARGIN = 8e-7, SCORE_MARGIN = 1e-9;
constexpr int NUM_BUCKETS = 1024;

// A thread's memory for one vocabulary.
struct Workspace {
    std::vector<int32_t> ids, places;
    std::vector<float> values, scratch, copy;
    Candidates found{};

    void fit(int vocab) {
        const size_t size = size_t(vocab) + 64;
        // The last to grow: where memory ran out before it, all of it is done again.
        if (copy.size() >= size) return;
        ids.resize(size), places.resize(size), values.resize(size), scratch.resize(size), copy.resize(size);
        found = {ids.data(), values.data(), scratch.data(), 0};
    }
};

struct Row {
    const Scans &scans;
    const float *logits;
    int vocab;
    const pdm_draw &draw;
    Workspace &work;
    float temperature, largest;
    NoiseStream stream;
};

uint32_t word_of(const NoiseStream &stream, uint32_t token) {
    uint32_t c0 = token / 4, c1 = stream.position, c2 = stream.choice, c3 = 0;
    uint32_t k0 = uint32_t(stream.seed), k1 = uint32_t(stream.seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = uint64_t(c0) * 0xD2511F53u, p1 = uint64_t(c2) * 0xCD9E8D57u;
        c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
        c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
        c1 = uint32_t(p1), c3 = uint32_t(p0);
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    const uint32_t words[4] = {c0, c1, c2, c3};
    return words[token % 4];
}

// -log(u): how long the race of a token of weight 1 takes.
double time_of(const NoiseStream &stream, uint32_t token) { return -log((double(word_of(stream, token)) + 0.5) * 0x1p-32); }

// A float that is at most `value`.
float round_down(double value) { return nextafterf(float(value), -INFINITY); }

float divided(const Row &row, int64_t token) {
    const float logit = row.logits[token];
    return row.draw.temperature == 1.0 ? logit : logit / row.temperature;
}

// Keeps what lies above `border`, and the first `num_ties` of what equals it.
void cut(Candidates &found, float border, int64_t num_ties) {
    int kept = 0;
    for (int index = 0; index < found.count; ++index) {
        const float value = found.values[index];
        if (value > border || (value == border && num_ties-- > 0)) {
            found.ids[kept] = found.ids[index];
            found.values[kept++] = value;
        }
    }
    found.count = kept;
}

void find_top_k(const Row &row) {
    Candidates &found = row.work.found;
    const int64_t count = row.draw.top_k;
    for (const float depth : LOOKS) {
        row.scans.collect(row.logits, row.vocab, row.temperature, round_down(double(row.largest) - depth), found);
        if (found.count >= count) break;
    }
    if (found.count <= count) return;
    float *copy = row.work.copy.data();
    std::copy(found.values, found.values + found.count, copy);
    std::nth_element(copy, copy + (count - 1), copy + found.count, std::greater<float>());
    const float border = copy[count - 1];
    int64_t num_above = 0;
    for (int index = 0; index < found.count; ++index) num_above += found.values[index] > border;
    cut(found, border, count - num_above);
}

// Finds where weights, largest first, reach `target`. False where rounding could decide. `found.scratch` holds the weights.
class Nucleus {
  public:
    Nucleus(Candidates &found, float largest, float depth, double target)
        : found_(found), largest_(largest), scale_(NUM_BUCKETS / (std::min(depth, 64.0f) + 0.001f)), target_(target) {
        for (int index = 0; index < found.count; ++index) sums_[bucket(index)] += double(found.scratch[index]);
    }

    bool cut_at_target() {
        double before = 0.0;
        int place = 0;
        while (place < NUM_BUCKETS && before + sums_[place] < target_) before += sums_[place++];
        if (place == NUM_BUCKETS || is_close(before + sums_[place])) return false;
        std::vector<int> members;
        for (int index = 0; index < found_.count; ++index)
            if (bucket(index) == place) members.push_back(index);
        // Equal values stay in the order of their ids.
        std::stable_sort(members.begin(), members.end(), [&](int a, int b) { return found_.values[a] > found_.values[b]; });
        size_t num_kept = 0;
        for (; num_kept < members.size() && before < target_; ++num_kept) {
            if (before > 0.0 && is_close(before)) return false;
            before += double(found_.scratch[members[num_kept]]);
        }
        if (num_kept == 0 || is_close(before)) return false;
        const float border = found_.values[members[num_kept - 1]];
        int64_t num_ties = 0;
        for (size_t index = 0; index < num_kept; ++index) num_ties += found_.values[members[index]] == border;
        cut(found_, border, num_ties);
        return true;
    }

  private:
    int bucket(int index) const { return int(std::min((largest_ - found_.values[index]) * scale_, float(NUM_BUCKETS - 1))); }
    bool is_close(double sum) const { return fabs(sum - target_) <= SUM_MARGIN * target_; }

    Candidates &found_;
    const float largest_, scale_;
    const double target_;
    double sums_[NUM_BUCKETS] = {};
};

double weight_sum(const Candidates &found) {
    double sum = 0.0;
    for (int index = 0; index < found.count; ++index) sum += double(found.scratch[index]);
    return sum;
}

bool find_nucleus(const Row &row) {
    Candidates &found = row.work.found;
    if (row.draw.top_k > 0 && row.draw.top_k < row.vocab) {
        find_top_k(row);
        row.scans.weigh(found, row.largest);
        return Nucleus(found, row.largest, 64.0f, row.draw.top_p * weight_sum(found)).cut_at_target();
    }
    const double target = row.draw.top_p * row.scans.total(row.logits, row.vocab, row.temperature, row.largest);
    for (const float depth : LOOKS) {
        row.scans.collect(row.logits, row.vocab, row.temperature, round_down(double(row.largest) - depth), found);
        row.scans.weigh(found, row.largest);
        if (weight_sum(found) > target * (1.0 + SUM_MARGIN)) return Nucleus(found, row.largest, depth, target).cut_at_target();
    }
    return false;
}

// Leaves in row.work.found what may be drawn. False where rounding could decide.
bool truncate(const Row &row) {
    const pdm_draw &draw = row.draw;
    Candidates &found = row.work.found;
    const bool has_min_p = draw.log_min_p > -INFINITY;
    const float floor = has_min_p ? float(double(row.largest) + draw.log_min_p) : -INFINITY;
    if (draw.top_p < 1.0) {
        if (!find_nucleus(row)) return false;
    } else if (draw.top_k > 0 && draw.top_k < row.vocab) {
        find_top_k(row);
    } else {
        row.scans.collect(row.logits, row.vocab, row.temperature, floor, found);
        return true;
    }
    if (has_min_p) cut(found, floor, found.count);
    return true;
}

// Which of those that may still win does, by the noise itself.
class Winner {
  public:
    explicit Winner(const Row &row) : row_(row) {}
    void consider(int64_t token) {
        const double score = double(divided(row_, token)) - log(time_of(row_.stream, uint32_t(token)));
        if (score > best_) {
            second_ = best_, best_ = score, token_ = token;
        } else if (score > second_) {
            second_ = score;
        }
    }
    int64_t token() const { return best_ - second_ > SCORE_MARGIN ? token_ : PDM_UNDECIDED; }

  private:
    const Row &row_;
    double best_ = -INFINITY, second_ = -INFINITY;
    int64_t token_ = PDM_UNDECIDED;
};

// The time that the leader surely needs: who cannot be there by then has lost.
float limit_of(const Row &row, int64_t leader) {
    const double weight = exp(double(divided(row, leader)) - double(row.largest));
    return float(time_of(row.stream, uint32_t(leader)) / weight * RACE_MARGIN);
}

// Of the tokens at `num_times` places, whose times are in work.scratch, the one that wins; `ids` names them, nullptr: by place.
int64_t winner_of(const Row &row, int leader, int num_times, const int32_t *ids) {
    if (leader < 0) return PDM_UNDECIDED;
    const auto token_at = [&](int place) { return ids ? ids[place] : place; };
    int32_t *places = row.work.places.data();
    const int num_left = row.scans.within(row.work.scratch.data(), num_times, limit_of(row, token_at(leader)), places);
    Winner winner(row);
    for (int index = 0; index < num_left; ++index) winner.consider(token_at(places[index]));
    return winner.token();
}

int64_t draw_of_all(const Row &row) {
    const double score = double(row.largest) - log(time_of(row.stream, uint32_t(row.draw.best)));
    const float floor = round_down(score - MAX_NOISE);
    float *times = row.work.scratch.data();
    const int leader = row.scans.race_all(row.logits, row.vocab, row.temperature, floor, row.largest, row.stream, times);
    return winner_of(row, leader, row.vocab, nullptr);
}

int64_t draw_of_some(const Row &row) {
    Candidates &found = row.work.found;
    return winner_of(row, row.scans.race(found, row.largest, row.stream), found.count, found.ids);
}

int64_t draw_token(const Scans &scans, const float *logits, int vocab, const pdm_draw &draw, Workspace &work) {
    work.fit(vocab);
    const float temperature = float(draw.temperature);
    Row row{scans, logits, vocab, draw, work, temperature, 0.0f, {uint64_t(draw.seed), uint32_t(draw.position), uint32_t(draw.choice)}};
    row.largest = divided(row, draw.best);
    // Divided by so little that it overflows: the definition shifts such a row first.
    if (!isfinite(row.largest)) return PDM_UNDECIDED;
    const bool is_whole = !(draw.top_k > 0 && draw.top_k < vocab) && draw.top_p >= 1.0 && !(draw.log_min_p > -INFINITY);
    if (is_whole) return draw_of_all(row);
    return truncate(row) ? draw_of_some(row) : PDM_UNDECIDED;
}

}  // namespace
}  // namespace pdm

extern "C" int pdm_sample_draw(int isa, const float *logits, size_t stride, int vocab, const pdm_draw *draws, int num_draws,
                               int64_t *token_ids) {
    static thread_local pdm::Workspace work;
    const pdm::Scans &scans = isa >= PDM_AVX512 ? pdm::sampling_avx512 : pdm::sampling_avx2;
    try {
        for (int index = 0; index < num_draws; ++index)
            token_ids[index] = pdm::draw_token(scans, logits + size_t(draws[index].row) * stride, vocab, draws[index], work);
    } catch (const std::bad_alloc &) {
        return -1;
    }
    return 0;
}
