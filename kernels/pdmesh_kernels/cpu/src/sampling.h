/* Draws tokens from logits as pdmesh.engine.draw defines it, without sorting, and mostly without touching, the vocabulary.

   A draw is the largest of logit / temperature plus Gumbel noise among the tokens that top_k, top_p and min_p leave. Everything
   approximate here only leaves out what surely loses; where rounding could decide (two scores that nearly tie, a top_p border
   that nearly falls between two tokens), the answer is PDM_UNDECIDED and the caller computes the definition. So a token that
   is returned is the definition's token, bit for bit. */
#ifndef PDMESH_SAMPLING_H
#define PDMESH_SAMPLING_H

#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(default)
#ifdef __cplusplus
extern "C" {
#endif

#define PDM_UNDECIDED (-1)

typedef struct {
    int64_t row;        /* of the logits */
    int64_t best;       /* lowest id of the row's largest logit, which is finite */
    double temperature; /* over 0 */
    int64_t top_k;      /* 0: off */
    double top_p;       /* 1: off */
    double log_min_p;   /* -infinity: off */
    int64_t seed, choice, position; /* of the noise, see engine/philox.py */
} pdm_draw;

/* token_ids [num_draws]: of draws[i] from row draws[i].row of `logits` (f32, `stride` items between rows, `vocab` in each).
   `isa` as in pdmesh_cpu.h. Returns 0, or -1 when memory ran out. */
int pdm_sample_draw(int isa, const float *logits, size_t stride, int vocab, const pdm_draw *draws, int num_draws,
                    int64_t *token_ids);

#ifdef __cplusplus
}
#endif
#pragma GCC visibility pop

#ifdef __cplusplus
namespace pdm {

/* What lies near the largest logit: ids ascending, logits over temperature, and what scans leave beside them. Each array has room
   for the vocabulary and a vector more. */
struct Candidates {
    int32_t *ids;
    float *values;
    float *scratch; /* weights or times, by position in ids; times of the whole vocabulary by id */
    int count;
};

struct NoiseStream {
    uint64_t seed;
    uint32_t position, choice;
};

/* One instruction set's scans over a vocabulary. */
struct Scans {
    /* Fills `found` with all tokens whose logit over temperature is at least `floor`. */
    void (*collect)(const float *logits, int vocab, float temperature, float floor, Candidates &found);
    /* Sum of exp(logit / temperature - largest), to a relative error below 3e-7. */
    double (*total)(const float *logits, int vocab, float temperature, float largest);
    /* scratch[i] = exp(values[i] - largest). */
    void (*weigh)(Candidates &found, float largest);
    /* scratch[i]: the earliest time of candidate i in the race, see sampling_scans.h; returns the place of the least. */
    int (*race)(Candidates &found, float largest, const NoiseStream &stream);
    /* The same over the whole vocabulary, where what is below `floor` does not take part. */
    int (*race_all)(const float *logits, int vocab, float temperature, float floor, float largest, const NoiseStream &stream,
                    float *times);
    /* The places of times that are at most `limit`, ascending; returns how many. */
    int (*within)(const float *times, int count, float limit, int32_t *places);
};

extern const Scans sampling_avx2, sampling_avx512;

}  // namespace pdm
#endif
#endif
