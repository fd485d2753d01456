/* Reads memory as fast as it goes: what decoding, which reads each weight once, is measured against. */
#define _GNU_SOURCE
#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <time.h>

#define MAX_THREADS 64
/* Further ahead is no faster on the machines that were tried, nearer is slower. */
#define AHEAD_BYTES 1024

struct share {
    const char *begin, *end;
    long long sum;
};

static void *read_share(void *argument) {
    struct share *share = argument;
    __m256i sums[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
    for (const char *line = share->begin; line < share->end; line += 128) {
        _mm_prefetch(line + AHEAD_BYTES, _MM_HINT_T0);
        _mm_prefetch(line + AHEAD_BYTES + 64, _MM_HINT_T0);
        for (int part = 0; part < 4; ++part)
            sums[part] = _mm256_xor_si256(sums[part], _mm256_load_si256((const __m256i *)(line + 32 * part)));
    }
    __m256i sum = _mm256_xor_si256(_mm256_xor_si256(sums[0], sums[1]), _mm256_xor_si256(sums[2], sums[3]));
    share->sum = _mm256_extract_epi64(sum, 0);
    return NULL;
}

/* Seconds that threads on these cores, the first one the caller's, take for `size` bytes at a multiple of 64; -1 when one cannot
   start. At most 64 threads. */
double read_seconds(const char *memory, size_t size, int threads, const int *cpus) {
    pthread_t helpers[MAX_THREADS];
    pthread_attr_t there;
    cpu_set_t only;
    struct share shares[MAX_THREADS];
    struct timespec begin, end;
    const size_t each = size / (size_t)threads / 128 * 128;
    pthread_attr_init(&there);
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int thread = 0; thread < threads; ++thread) {
        shares[thread].begin = memory + (size_t)thread * each;
        shares[thread].end = shares[thread].begin + each;
        /* Born on its core: on the caller's, which reads by now, it would wait for a slice of that before it could move. */
        CPU_ZERO(&only);
        CPU_SET(cpus[thread], &only);
        pthread_attr_setaffinity_np(&there, sizeof only, &only);
        if (thread > 0 && pthread_create(&helpers[thread], &there, read_share, &shares[thread]))
            return -1.0;
    }
    read_share(&shares[0]);
    for (int thread = 1; thread < threads; ++thread)
        pthread_join(helpers[thread], NULL);
    clock_gettime(CLOCK_MONOTONIC, &end);
    return (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
}
