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

void futex(std::atomic<uint32_t> *word, int operation, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(word), operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

}  // namespace

void pdm_pool::Word::wait_while(uint32_t old) {
    for (int spin = 0; spin < SPINS; spin++) {
        if (value.load(std::memory_order_acquire) != old) return;
        _mm_pause();
    }
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
        for (int thread = 1; thread < num_threads; thread++)
            threads_.emplace_back(&pdm_pool::live, this, thread, cpus ? cpus[thread] : -1);
    } catch (...) {
        stop();
        throw;
    }
}

pdm_pool::~pdm_pool() { stop(); }

void pdm_pool::run(void (*function)(void *context, int thread), void *context) {
    function_ = function;
    context_ = context;
    if (num_threads_ > 1) job_.advance();
    function(context, 0);
    wait_for_all();
}

void pdm_pool::wait_for_all() {
    if (num_threads_ == 1) return;
    const uint32_t phase = phase_.value.load();
    if (num_arrived_.fetch_add(1) + 1 == num_threads_) {
        num_arrived_.store(0);
        phase_.advance();
    } else {
        phase_.wait_while(phase);
    }
}

void pdm_pool::live(int thread, int cpu) {
    pthread_setname_np(pthread_self(), "pdm-cpu");
    if (cpu >= 0) {
        cpu_set_t only;
        CPU_ZERO(&only);
        CPU_SET(cpu, &only);
        // A core that is gone or forbidden: the thread runs anywhere, as without pinning.
        pthread_setaffinity_np(pthread_self(), sizeof only, &only);
    }
    for (uint32_t job = 0;; job++) {
        job_.wait_while(job);
        if (is_stopping_) return;
        function_(context_, thread);
        wait_for_all();
    }
}

void pdm_pool::stop() {
    is_stopping_ = true;
    job_.advance();
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
