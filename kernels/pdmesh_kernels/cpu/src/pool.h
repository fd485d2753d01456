// Threads that do one job together, and sleep when there is none.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

// One call of `run` at a time. A job's work lies where whoever has a core takes it, piece by piece (see phases.h): a thread that has none
// is missed, but not waited for.
struct pdm_pool {
  public:
    // Takes what there is to take; true when the job is done, false when what is left waits for others.
    using Function = bool (*)(void *context, int thread);

    // `cpus`: see pdm_pool_create. Throws std::system_error or std::bad_alloc.
    pdm_pool(int num_threads, const int *cpus);
    ~pdm_pool();
    pdm_pool(const pdm_pool &) = delete;
    pdm_pool &operator=(const pdm_pool &) = delete;

    // Calls function(context, thread) on all threads that have a core, the caller as thread 0, again after each turn while it is
    // false; returns when it was true for the caller and nobody is in it any more.
    void run(Function function, void *context);
    // Inside `run`: lets those that wait look again. What they shall see comes first.
    void turn() { turn_.advance(); }
    // Inside `run`: the number of turns so far.
    uint32_t num_turns() const { return turn_.value.load(); }
    // Inside `run`: whether there have been more turns than `num_turns`, after a short wait at the most.
    bool turns_soon(uint32_t num_turns) const;
    int num_threads() const { return num_threads_; }
    // pdm::SCRATCH_BYTES of memory for each thread.
    void *scratch(int thread) const { return scratch_[size_t(thread)]; }

  private:
    // A word that one thread changes and others wait for: they look at it for a while, then sleep.
    struct alignas(64) Word {
        std::atomic<uint32_t> value{0};
        std::atomic<uint32_t> sleepers{0};
        bool changes_within(uint32_t old, int spins) const;
        void wait_while(uint32_t old);
        void advance();
    };
    void live(int thread);
    void help(int thread);
    void stop();

    const int num_threads_;
    std::vector<std::thread> threads_;
    std::vector<void *> scratch_;
    // Counts jobs and their turns.
    Word turn_;
    // Who is in the job, but for the caller: what it is made of lives until they have left, and nobody enters when it is closed.
    alignas(64) std::atomic<int> num_inside_{0};
    std::atomic<bool> is_open_{false}, is_stopping_{false};
    Function function_ = nullptr;
    void *context_ = nullptr;
};
