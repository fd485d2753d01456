// Memory that ends where it ends: reading or writing past it is caught by the address sanitizer, or by a page without access,
// which also catches what instructions do that no sanitizer sees (tile loads).
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <memory>
#include <random>

enum class Guard { HEAP, PAGE_BEHIND, PAGE_BEFORE };

struct Random {
    explicit Random(uint64_t seed) : engine(seed) {}
    int between(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine); }
    bool once_in(int n) { return between(1, n) == 1; }
    float normal() { return std::normal_distribution<float>()(engine); }
    template <typename T, size_t N>
    T one_of(const T (&choices)[N]) {
        return choices[between(0, int(N) - 1)];
    }
    Guard guard() { return Guard(between(0, 2)); }
    std::mt19937_64 engine;
};

#define REQUIRE(condition, ...)                                          \
    do {                                                                 \
        if (!(condition)) {                                              \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            fprintf(stderr, __VA_ARGS__);                                \
            fprintf(stderr, "\n");                                       \
            abort();                                                     \
        }                                                                \
    } while (0)

// `count` items of T, filled with bytes that are a NaN as f32 and as bf16.
template <typename T>
class Exact {
  public:
    Exact(size_t count, Guard guard, size_t alignment = alignof(T)) : count_(count), guard_(guard) {
        constexpr size_t PAGE = 4096;
        const size_t num_bytes = count * sizeof(T);
        if (guard == Guard::HEAP) {
            REQUIRE(!posix_memalign(&base_, alignment < 16 ? 16 : alignment, num_bytes ? num_bytes : 1), "%zu bytes", num_bytes);
            data_ = static_cast<T *>(base_);
        } else {
            mapped_bytes_ = (num_bytes + PAGE - 1) / PAGE * PAGE + 2 * PAGE;
            base_ = mmap(nullptr, mapped_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            REQUIRE(base_ != MAP_FAILED, "%zu bytes", mapped_bytes_);
            char *const begin = static_cast<char *>(base_) + PAGE, *const end = begin + mapped_bytes_ - 2 * PAGE;
            if (end > begin) REQUIRE(!mprotect(begin, size_t(end - begin), PROT_READ | PROT_WRITE), "mprotect");
            const size_t padding = size_t(end - begin) - num_bytes;
            data_ = reinterpret_cast<T *>(guard == Guard::PAGE_BEFORE ? begin : begin + padding / alignment * alignment);
        }
        memset(static_cast<void *>(data_), 0xff, num_bytes);
    }
    ~Exact() {
        if (guard_ == Guard::HEAP)
            free(base_);
        else
            munmap(base_, mapped_bytes_);
    }
    Exact(const Exact &) = delete;
    Exact &operator=(const Exact &) = delete;

    T *data() const { return data_; }
    size_t size() const { return count_; }
    T &operator[](size_t index) const { return data_[index]; }
    T *begin() const { return data_; }
    T *end() const { return data_ + count_; }

  private:
    const size_t count_;
    const Guard guard_;
    void *base_ = nullptr;
    size_t mapped_bytes_ = 0;
    T *data_ = nullptr;
};

inline uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline void fill(float *begin, float *end, Random &random, float scale = 1.0f) {
    for (; begin < end; begin++) *begin = random.normal() * scale;
}
inline void fill(uint16_t *begin, uint16_t *end, Random &random, float scale = 1.0f) {
    for (; begin < end; begin++) *begin = to_bf16(random.normal() * scale);
}
