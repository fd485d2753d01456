#include "pool.h"

#include <immintrin.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <new>

#include "kernels.h"

namespace {

// About 50 us: longer than any wait of an undisturbed step and than a sleeper takes to come back, which would else have put the next
// one to sleep; shorter than what a thread that lost its core is away.
constexpr int SPINS = 1000;
// Longer than what the last pieces of a phase take one thread more than another.
constexpr int FEW_SPINS = 100;

void futex(std::atomic<uint32_t> *word, int operation, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(word), operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

void place(pthread_t thread, int cpu) {
    pthread_setname_np(thread, "pdm-cpu");
    if (cpu < 0) return;
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(cpu, &only);
    // A core that is gone or forbidden: the thread runs anywhere, as without pinning.
    pthread_setaffinity_np(thread, sizeof only, &only);
}

}  // namespace

bool pdm_pool::Word::changes_within(uint32_t old, int spins) const {
    for (int spin = 0; spin < spins; spin++) {
        if (value.load(std::memory_order_acquire) != old) return true;
        _mm_pause();
    }
    return false;
}

void pdm_pool::Word::wait_while(uint32_t old) {
    if (changes_within(old, SPINS)) return;
    sleepers.fetch_add(1);
    while (value.load() == old) futex(&value, FUTEX_WAIT, old);
    sleepers.fetch_sub(1);
}

void pdm_pool::Word::advance() {
    value.fetch_add(1);
    if (sleepers.load()) futex(&value, FUTEX_WAKE, INT_MAX);
}

pdm_pool::pdm_pool(int num_threads, const int *cpus) : num_threads_(num_threads) {
    try {
        for (int thread = 0; thread < num_threads; thread++) {
            void *memory = nullptr;
            if (posix_memalign(&memory, 4096, pdm::SCRATCH_BYTES)) throw std::bad_alloc();
            scratch_.push_back(memory);
        }
        threads_.reserve(size_t(num_threads));
        for (int thread = 1; thread < num_threads; thread++) {
            threads_.emplace_back(&pdm_pool::live, this, thread);
            place(threads_.back().native_handle(), cpus ? cpus[thread] : -1);
        }
    } catch (...) {
        stop();
        throw;
    }
}

pdm_pool::~pdm_pool() { stop(); }

void pdm_pool::run(Function function, void *context) {
    if (num_threads_ > 1) {
        function_ = function;
        context_ = context;
        is_open_.store(true);
        turn();
    }
    for (uint32_t turns = num_turns(); !function(context, 0); turns = num_turns()) turn_.wait_while(turns);
    if (num_threads_ == 1) return;
    is_open_.store(false);
    for (uint32_t turns = num_turns(); num_inside_.load(); turns = num_turns()) turn_.wait_while(turns);
}

bool pdm_pool::turns_soon(uint32_t num_turns) const { return turn_.changes_within(num_turns, FEW_SPINS); }

void pdm_pool::live(int thread) {
    for (uint32_t turns = 0;;) {
        turn_.wait_while(turns);
        if (is_stopping_.load()) return;
        turns = num_turns();
        help(thread);
    }
}

void pdm_pool::help(int thread) {
    // Most turns are of a job that has ended; who counted itself in then would have to tell of its leaving, which is a turn again.
    if (!is_open_.load()) return;
    num_inside_.fetch_add(1);
    if (is_open_.load()) function_(context_, thread);
    // The caller may have closed the job meanwhile, and wait for the last one to leave.
    if (num_inside_.fetch_sub(1) == 1 && !is_open_.load()) turn();
}

void pdm_pool::stop() {
    is_stopping_.store(true);
    turn();
    for (std::thread &thread : threads_) thread.join();
    for (void *memory : scratch_) free(memory);
}

extern "C" {

pdm_pool *pdm_pool_create(int num_threads, const int *cpus) {
    if (num_threads < 1 || num_threads > 1024) return nullptr;
    try {
        return new pdm_pool(num_threads, cpus);
    } catch (...) {
        return nullptr;
    }
}
void pdm_pool_destroy(pdm_pool *pool) { delete pool; }
int pdm_pool_num_threads(const pdm_pool *pool) { return pool->num_threads(); }

}  // extern "C"
