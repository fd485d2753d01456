// From a step's block tables to pieces of attention, and the checks that keep every access inside the pool.
#include <algorithm>

#include "phases.h"

namespace pdm {
namespace {

// Pieces per thread that the work is cut into where tiles allow it.
constexpr int SHARES_PER_THREAD = 4;

bool is_block(int32_t block, const pdm_kv &kv) { return block >= 0 && block < kv.num_blocks; }

const char *check_sequence(const pdm_batch &batch, const int32_t *table, int sequence, const pdm_kv &kv) {
    const int64_t context = batch.context_len[sequence];
    const int64_t begin = batch.query_start[sequence], length = batch.query_start[sequence + 1] - begin;
    const int64_t first_key = kv.window > 0 ? std::max<int64_t>(0, context - kv.window + 1) : 0;
    const int64_t last_block = (context + length - 1) / kv.block_size;
    if (last_block >= batch.table_width) return "block table: too narrow for a sequence's length";
    for (int64_t block = first_key / kv.block_size; block <= last_block; block++)
        if (!is_block(table[block], kv)) return "block table: a needed block is missing or not of the pool";
    for (int64_t token = begin; token < begin + length; token++)
        if (batch.positions[token] != context + token - begin) return "positions: not context_len and up";
    return nullptr;
}

void add_tiles(const pdm_batch &batch, int sequence, const pdm_kv &kv, int group_size, std::vector<AttentionTask> &tiles) {
    const int64_t context = batch.context_len[sequence];
    const int num_rows = int(batch.query_start[sequence + 1] - batch.query_start[sequence]) * group_size;
    // Tiles of one head follow each other: its keys and values stay in the second cache where those of all heads would not.
    for (int head = 0; head < kv.num_kv_heads; head++) {
        for (int row = 0; row < num_rows; row += TILE_ROWS) {
            const int end = std::min(row + TILE_ROWS, num_rows);
            const int64_t first_query = context + row / group_size, last_query = context + (end - 1) / group_size;
            const int64_t first_key = kv.window > 0 ? std::max<int64_t>(0, first_query - kv.window + 1) : 0;
            tiles.push_back({sequence, head, row, end, int(first_key / PDM_SPLIT), int(last_query / PDM_SPLIT) + 1, nullptr});
        }
    }
}

}  // namespace

const char *plan_group(const pdm_batch &batch, int group, const pdm_kv &kv, int num_heads, int num_threads, GroupPlan &plan) {
    if (group < 0 || group >= batch.num_groups) return "group: not of the batch";
    if (int64_t{batch.num_tokens} * num_heads > INT32_MAX) return "batch: too many tokens at once";
    plan.block_of_token.resize(size_t(batch.num_tokens));
    plan.attend.clear();
    plan.merge.clear();
    std::vector<AttentionTask> tiles;
    int64_t num_splits = 0;
    for (int sequence = 0; sequence < batch.num_sequences; sequence++) {
        const int32_t *const table = batch.block_tables[group] + size_t(sequence) * size_t(batch.table_width);
        if (batch.query_start[sequence] == batch.query_start[sequence + 1]) continue;
        if (const char *wrong = check_sequence(batch, table, sequence, kv)) return wrong;
        for (int64_t token = batch.query_start[sequence]; token < batch.query_start[sequence + 1]; token++)
            plan.block_of_token[size_t(token)] = table[batch.positions[token] / kv.block_size];
        add_tiles(batch, sequence, kv, num_heads / kv.num_kv_heads, tiles);
    }
    for (const AttentionTask &tile : tiles) num_splits += tile.split_end - tile.split_begin;
    // A tile above this share is computed by several pieces; with one thread there is nobody to share with.
    const int64_t share = num_threads == 1 ? INT64_MAX : std::max<int64_t>(1, num_splits / (num_threads * SHARES_PER_THREAD));
    const size_t split_floats = result_floats(padded_head(kv.head_dim));
    size_t num_partials = 0;
    for (const AttentionTask &tile : tiles)
        if (tile.split_end - tile.split_begin > share) num_partials += size_t(tile.split_end - tile.split_begin);
    if (plan.partials.size() < num_partials * split_floats) plan.partials.resize(num_partials * split_floats);
    float *partial = plan.partials.data();
    for (const AttentionTask &tile : tiles) {
        if (tile.split_end - tile.split_begin <= share) {
            plan.attend.push_back(tile);
            continue;
        }
        AttentionTask whole = tile;
        whole.partial = partial;
        plan.merge.push_back(whole);
        for (int split = tile.split_begin; split < tile.split_end; split += int(share)) {
            AttentionTask part = tile;
            part.split_begin = split;
            part.split_end = int(std::min<int64_t>(split + share, tile.split_end));
            part.partial = partial;
            partial += size_t(part.split_end - split) * split_floats;
            plan.attend.push_back(part);
        }
    }
    // The longest first, so that no thread begins one when the others are done.
    std::stable_sort(plan.attend.begin(), plan.attend.end(), [](const AttentionTask &a, const AttentionTask &b) {
        return a.split_end - a.split_begin > b.split_end - b.split_begin;
    });
    return nullptr;
}

}  // namespace pdm
