// Attention of a tile of queries over a sequence's keys, split by split: scores, softmax and output of PDM_SPLIT keys at a time,
// put together in order. One task that does all splits and several that share them do the same operations.
#pragma once

#include "attention_lanes.h"
#include "attention_tiles.h"

namespace pdm {
namespace {

// What a task works in; lives in the thread's scratch.
struct alignas(64) AttentionSpace {
    float scores[TILE_ROWS * SCORE_STRIDE];
    float split_result[TILE_ROWS * (256 + 2)], outputs[TILE_ROWS * 256];
    alignas(64) float queries[TILE_ROWS * 256];  // or as many bf16
    uint16_t expanded[PDM_SPLIT * 256];
    float key_scales[PDM_SPLIT], value_scales[PDM_SPLIT];
    Sight sights[TILE_ROWS];
    Seen seen[TILE_ROWS];
    Joined joined;
};
static_assert(sizeof(AttentionSpace) <= SCRATCH_BYTES);

// A task's rows, found again in the step's arrays.
struct TileRows {
    TileRows(const pdm_attention_args &args, const pdm_batch &batch, const AttentionTask &task)
        : count(task.row_end - task.row_begin), width(padded_head(args.kv->head_dim)), group_(args.num_heads / args.kv->num_kv_heads),
          num_heads_(args.num_heads), first_head_(task.kv_head * group_), row_begin_(task.row_begin),
          first_token_(batch.query_start[task.sequence]), context_(batch.context_len[task.sequence]), window_(args.kv->window) {}

    const int count, width;

    Sight sight(int row) const { return sight_of(context_ + (row_begin_ + row) / group_, window_); }
    // What the tile's rows see together.
    Sight sight() const { return {sight(0).begin, sight(count - 1).end}; }
    size_t query(int row) const { return (size_t(token(row)) * size_t(num_heads_) + size_t(head(row))) * size_t(width); }
    size_t output(int row, size_t stride, int head_dim) const { return size_t(token(row)) * stride + size_t(head(row)) * size_t(head_dim); }

  private:
    int64_t token(int row) const { return first_token_ + (row_begin_ + row) / group_; }
    int head(int row) const { return first_head_ + (row_begin_ + row) % group_; }
    const int group_, num_heads_, first_head_, row_begin_;
    const int64_t first_token_, context_;
    const int window_;
};

inline void read_query(float *target, const pdm_attention_args &args, size_t at, int width) {
    const bool is_f32 = args.kv->dtype == PDM_F32;
    const float *const floats = static_cast<const float *>(args.queries) + (is_f32 ? at : 0);
    const uint16_t *const halves = static_cast<const uint16_t *>(args.queries) + (is_f32 ? 0 : at);
    for (int i = 0; i < width; i += 16) store(target + i, is_f32 ? load(floats + i) : from_bf16(halves + i));
}
inline void read_query(uint16_t *target, const pdm_attention_args &args, size_t at, int width) {
    memcpy(target, static_cast<const uint16_t *>(args.queries) + at, size_t(width) * 2);
}

// Exactly head_dim items: what lies behind them is another task's.
inline void write_output(const pdm_attention_args &args, size_t at, const float *output, float sum) {
    const int head_dim = args.kv->head_dim;
    const F16 sums = splat(sum);
    alignas(64) float floats[256];
    alignas(64) uint16_t halves[256];
    if (args.kv->dtype == PDM_F32) {
        for (int i = 0; i < head_dim; i += 16) store(floats + i, load(output + i) / sums);
        memcpy(static_cast<float *>(args.output) + at, floats, size_t(head_dim) * 4);
    } else {
        for (int i = 0; i < head_dim; i += 16) to_bf16(halves + i, load(output + i) / sums);
        memcpy(static_cast<uint16_t *>(args.output) + at, halves, size_t(head_dim) * 2);
    }
}

// Those keys of split number `index` that a query sees.
inline Seen seen_of(const Sight &sight, int index) {
    const int64_t start = int64_t{index} * PDM_SPLIT, begin = sight.begin - start, end = sight.end - start;
    return {int(begin < 0 ? 0 : begin > PDM_SPLIT ? PDM_SPLIT : begin), int(end < 0 ? 0 : end > PDM_SPLIT ? PDM_SPLIT : end)};
}

inline void read_scales(const Split &split, AttentionSpace &space) {
    for (int step = split.step_begin; step < split.step_end; step++) {
        memcpy(space.key_scales + step * STEP_KEYS, split.key_scales[step], STEP_KEYS * 4);
        memcpy(space.value_scales + step * STEP_KEYS, split.value_scales[step], STEP_KEYS * 4);
    }
}

template <typename Product>
void attend_by(const pdm_attention_args &args, const pdm_batch &batch, const AttentionTask &task, AttentionSpace &space) {
    using Query = typename Product::Query;
    const pdm_kv &kv = *args.kv;
    const TileRows rows(args, batch, task);
    const int width = rows.width;
    const int32_t *const table = batch.block_tables[args.group] + size_t(task.sequence) * size_t(batch.table_width);
    const bool is_i8 = kv.dtype == PDM_I8;

    Query *const queries = reinterpret_cast<Query *>(space.queries);
    for (int row = 0; row < rows.count; row++) {
        read_query(queries + row * width, args, rows.query(row), width);
        space.sights[row] = rows.sight(row);
    }
    if (!task.partial) {
        memset(space.outputs, 0, size_t(rows.count) * size_t(width) * 4);
        begin_joined(space.joined);
    }
    Scoring scoring{args.soft_cap != 0.0f ? LOG2_E : args.scale * LOG2_E, args.scale, args.soft_cap, nullptr, nullptr, 0, 0};
    if (is_i8) {
        scoring.key_scales = space.key_scales;
        scoring.value_scales = space.value_scales;
    }

    Split split = find_split(kv, table, task.kv_head, task.split_begin, rows.sight());
    for (int index = task.split_begin; index < task.split_end; index++) {
        Split next;
        if (index + 1 < task.split_end) {
            next = find_split(kv, table, task.kv_head, index + 1, rows.sight());
            split.following = next.keys[next.step_begin];
        }
        if (is_i8) read_scales(split, space);
        scoring.step_begin = split.step_begin;
        scoring.step_end = split.step_end;
        for (int row = 0; row < rows.count; row++) space.seen[row] = seen_of(space.sights[row], index);
        float *const result = task.partial ? task.partial + size_t(index - task.split_begin) * result_floats(width) : space.split_result;
        float *const maxima = result + TILE_ROWS * width, *const sums = maxima + TILE_ROWS;
        Product::scores(queries, rows.count, width, split, space.scores, space.expanded);
        softmax<typename Product::Share>(space.scores, rows.count, space.seen, scoring, maxima, sums);
        Product::outputs(space.scores, rows.count, width, split, result, space.expanded);
        if (!task.partial) join(space.joined, space.outputs, rows.count, width, result, maxima, sums);
        split = next;
    }
    if (task.partial) return;
    for (int row = 0; row < rows.count; row++)
        write_output(args, rows.output(row, args.output_stride, kv.head_dim), space.outputs + row * width, space.joined.sums[row]);
}

inline void attend(const pdm_attention_args &args, const pdm_batch &batch, const AttentionTask &task, void *scratch) {
    AttentionSpace &space = *static_cast<AttentionSpace *>(scratch);
    switch (args.kv->dtype) {
        case PDM_F32: return attend_by<LaneProduct<ExpandedPairs<PDM_F32>, PDM_F32>>(args, batch, task, space);
#if defined(__AMX_BF16__)
        case PDM_BF16: return attend_by<TileProduct<false>>(args, batch, task, space);
        default: return attend_by<TileProduct<true>>(args, batch, task, space);
#else
#if defined(__AVX512BF16__)
        case PDM_BF16: return attend_by<LaneProduct<Bf16Pairs, PDM_BF16>>(args, batch, task, space);
#else
        case PDM_BF16: return attend_by<LaneProduct<ExpandedPairs<PDM_BF16>, PDM_BF16>>(args, batch, task, space);
#endif
        default: return attend_by<LaneProduct<ExpandedPairs<PDM_I8>, PDM_I8>>(args, batch, task, space);
#endif
    }
}

inline void merge(const pdm_attention_args &args, const pdm_batch &batch, const AttentionTask &task) {
    const TileRows rows(args, batch, task);
    const int width = rows.width;
    alignas(64) float outputs[TILE_ROWS * 256];
    memset(outputs, 0, size_t(rows.count) * size_t(width) * 4);
    Joined joined;
    begin_joined(joined);
    for (int index = 0; index < task.split_end - task.split_begin; index++) {
        const float *const result = task.partial + size_t(index) * result_floats(width), *const maxima = result + TILE_ROWS * width;
        join(joined, outputs, rows.count, width, result, maxima, maxima + TILE_ROWS);
    }
    for (int row = 0; row < rows.count; row++)
        write_output(args, rows.output(row, args.output_stride, args.kv->head_dim), outputs + row * width, joined.sums[row]);
}

}  // namespace
}  // namespace pdm
