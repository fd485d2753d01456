// Goes over the blocks that are named.
#include "block_sum.h"

#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "kernels.h"

namespace {

const pdm::BlockSums &ways_of(int isa) { return isa >= PDM_AVX512 ? pdm::block_sums_avx512 : pdm::block_sums_avx2; }

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

// Spins as long as waking a sleeper takes, then sleeps ever longer, so that a slow arrival costs no core.
constexpr microseconds SPIN{50}, MOST_SLEEP{1000};

// Waits until the count differs from `done` or nothing has come for `patience`; returns the count.
int wait_for_more(const int *arrived, int done, microseconds patience) {
    const Clock::time_point begin = Clock::now();
    for (;;) {
        const int count = __atomic_load_n(arrived, __ATOMIC_ACQUIRE);
        if (count != done) return count;
        const auto waited = std::chrono::duration_cast<microseconds>(Clock::now() - begin);
        if (waited >= patience) return done;
        if (waited < SPIN) {
            for (int turn = 0; turn < 16; ++turn) _mm_pause();
        } else {
            std::this_thread::sleep_for(std::min(waited / 4, MOST_SLEEP));
        }
    }
}

}  // namespace

extern "C" {

void pdm_block_sums(int isa, const void *blocks, size_t bytes, const int64_t *ids, int num, uint64_t *sums) {
    const pdm::BlockSums &ways = ways_of(isa);
    for (int index = 0; index < num; ++index) sums[index] = ways.sum((const char *)blocks + size_t(ids[index]) * bytes, bytes);
}

void pdm_copy_blocks(int isa, void *target, const int64_t *target_ids, const void *source, const int64_t *source_ids, size_t bytes,
                     int num, uint64_t *sums) {
    const pdm::BlockSums &ways = ways_of(isa);
    for (int index = 0; index < num; ++index) {
        char *to = (char *)target + size_t(target_ids[index]) * bytes;
        sums[index] = ways.copy(to, (const char *)source + size_t(source_ids[index]) * bytes, bytes);
    }
}

int pdm_sum_arrivals(int isa, const void *blocks, size_t bytes, const int64_t *ids, int done, int num, const int *arrived,
                     int patience_us, uint64_t *sums) {
    while (done < num) {
        const int count = std::min(num, wait_for_more(arrived, done, microseconds{patience_us}));
        if (count <= done) break;
        pdm_block_sums(isa, blocks, bytes, ids + done, count - done, sums + done);
        done = count;
    }
    return done;
}
}
