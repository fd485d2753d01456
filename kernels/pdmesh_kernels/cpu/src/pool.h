// Threads that run one function at the same time, wait for each other inside it, and sleep when there is nothing to run.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

// One call of `run` at a time.
struct pdm_pool {
  public:
    // `cpus`: see pdm_pool_create. Throws std::system_error or std::bad_alloc.
    pdm_pool(int num_threads, const int *cpus);
    ~pdm_pool();
    pdm_pool(const pdm_pool &) = delete;
    pdm_pool &operator=(const pdm_pool &) = delete;

    // Calls function(context, thread) on all threads, the caller as thread 0; returns when all have returned.
    void run(void (*function)(void *context, int thread), void *context);
    // Inside `run`: returns when all threads have called it.
    void wait_for_all();
    int num_threads() const { return num_threads_; }
    // pdm::SCRATCH_BYTES of memory for each thread.
    void *scratch(int thread) const { return scratch_[size_t(thread)]; }

  private:
    // A word that one thread changes and others wait for: they look at it for a while, then sleep.
    struct alignas(64) Word {
        std::atomic<uint32_t> value{0};
        std::atomic<uint32_t> sleepers{0};
        void wait_while(uint32_t old);
        void advance();
    };
    void live(int thread, int cpu);
    void stop();

    const int num_threads_;
    std::vector<std::thread> threads_;
    std::vector<void *> scratch_;
    Word job_, phase_;
    alignas(64) std::atomic<int> num_arrived_{0};
    void (*function_)(void *, int) = nullptr;
    void *context_ = nullptr;
    bool is_stopping_ = false;
};
