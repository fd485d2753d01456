// A table that the signal's handler looks through: what it may call there is little, so that all it needs lies here.
#include "mappings.h"

#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>

namespace {

constexpr int MOST_MAPPINGS = 64;

enum State { FREE, FILLING, NAMED };

struct Mapping {
    std::atomic<int> state{FREE};
    uintptr_t begin = 0, end = 0;
    size_t text_bytes = 0;
    char text[1024] = {};
};

Mapping mappings[MOST_MAPPINGS];
struct sigaction before;
std::once_flag is_installed;

void tell(int number, siginfo_t *info, void *) {
    // Sent by somebody, it says nothing of memory.
    const bool is_sent = info->si_code <= 0;
    const uintptr_t at = reinterpret_cast<uintptr_t>(info->si_addr);
    for (const Mapping &mapping : mappings) {
        if (is_sent || mapping.state.load(std::memory_order_acquire) != NAMED || at < mapping.begin || at >= mapping.end) continue;
        // There is nobody to tell that the message could not be written.
        if (write(STDERR_FILENO, mapping.text, mapping.text_bytes) < 0) break;
    }
    // The access is repeated, and ends as it would have.
    sigaction(number, &before, nullptr);
    if (is_sent) raise(number);
}

void install() {
    struct sigaction action = {};
    action.sa_sigaction = tell;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, &before);
}

}  // namespace

extern "C" {

int pdm_name_mapping(const void *begin, size_t num_bytes, const char *text) {
    std::call_once(is_installed, install);
    for (int number = 0; number < MOST_MAPPINGS; number++) {
        Mapping &mapping = mappings[number];
        int expected = FREE;
        if (!mapping.state.compare_exchange_strong(expected, FILLING)) continue;
        mapping.begin = reinterpret_cast<uintptr_t>(begin);
        mapping.end = mapping.begin + num_bytes;
        mapping.text_bytes = std::min(strlen(text), sizeof mapping.text - 1);
        memcpy(mapping.text, text, mapping.text_bytes);
        mapping.state.store(NAMED, std::memory_order_release);
        return number;
    }
    return -1;
}

void pdm_forget_mapping(int number) {
    if (number >= 0 && number < MOST_MAPPINGS) mappings[number].state.store(FREE);
}

}  // extern "C"
