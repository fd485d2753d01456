// A panel times rows, in bf16 with f32 sums.
//
// A `Source` says where a panel's tiles are. It has
//     explicit Source(const pdm_weight &weight);
//     // Inputs per call of `tiles` at most, multiples of 32: where there are at most TILE_ROWS rows (each weight is used once),
//     // and where there are more.
//     static constexpr int FEW_ROWS_BLOCK, MANY_ROWS_BLOCK;
//     static constexpr bool IS_PACKED;  // tiles lie in the panel itself: the product fetches them ahead
//     // Tiles of inputs [k_begin, k_begin + k_count) of a panel, laid out as PDM_W_BF16's: [k_count / 32][2][16][16][2]. Both are
//     // multiples of 32; inputs from K on are zero. Written to `buffer` (64-byte aligned, k_count * 32 items) or where they are.
//     // `buffer` keeps its content until the next call. May fetch ahead what follows in the panel or in the next one.
//     const uint16_t *tiles(int panel, int k_begin, int k_count, uint16_t *buffer) const;
#pragma once

#include <algorithm>
#include <optional>

#include "epilogue.h"
#include "inputs.h"
#include "multiply.h"

namespace pdm {
namespace {

constexpr int MAX_BLOCK = 2048;  // inputs that `tiles` may write at once

struct PackedTiles {
    explicit PackedTiles(const pdm_weight &weight)
        : panels(static_cast<const uint8_t *>(weight.panels)), panel_bytes(weight.panel_bytes) {}
    static constexpr int FEW_ROWS_BLOCK = MAX_TAIL;
    // 36 KB of the first cache's 48: a panel of 576 inputs; larger blocks compete with rows and sums, smaller ones reload sums.
    static constexpr int MANY_ROWS_BLOCK = 576;
    static constexpr bool IS_PACKED = true;
    const uint16_t *tiles(int panel, int k_begin, int, uint16_t *) const {
        return reinterpret_cast<const uint16_t *>(panels + size_t(panel) * panel_bytes) + size_t(k_begin) * PDM_PANEL;
    }
    const uint8_t *const panels;
    const size_t panel_bytes;
};

struct Bf16Scratch : InputCopies {
    alignas(64) float sums[2 * ROW_BLOCK][PDM_PANEL];
    alignas(64) uint16_t tiles[MAX_BLOCK * PDM_PANEL];
};
static_assert(sizeof(Bf16Scratch) <= SCRATCH_BYTES);

// What a core does beside multiplying: it ends the rows multiplied before, makes room for the outputs of those that are being
// multiplied, and fetches weights that come next.
struct Between {
    Ending *ending = nullptr;
    int rows_per_step = 0;
    const char *weights = nullptr;
    int lines_per_step = 0;
    bool is_few = false;
    const char *outputs = nullptr;
    size_t output_stride = 0;
    int output_bytes = 0, rows_left = 0;

    void fetch(int num_steps) {
        const int num_rows = rows_per_step * num_steps;
        for (int row = std::min(num_rows, rows_left); row > 0; row--, rows_left--, outputs += output_stride)
            for (int byte = 0; byte < output_bytes; byte += 64) fetch_to_write(outputs + byte);
        // Into the second cache: lines on their way to the first one hold up the rows' there.
        for (int line = lines_per_step * num_steps; line > 0; line--, weights += 64) _mm_prefetch(weights, _MM_HINT_T1);
    }
    void end(int num_rows) {
        if (ending) ending->some(num_rows);
    }
    void operator()(int num_steps) {
        fetch(num_steps);
        end(rows_per_step * num_steps);
    }
};

template <typename Source>
class Bf16Product {
  public:
    Bf16Product(const pdm_linear_args &args, int row_begin, int row_end, Bf16Scratch &scratch)
        : args_(args), row_begin_(row_begin), row_end_(row_end),
          num_panels_(pdm_num_panels(args.weight->num_outputs, args.weight->is_gated)), scratch_(scratch),
          input_(args, row_begin, row_end, scratch), source_(*args.weight) {}

    void panel(int panel) {
        const int num_inputs = args_.weight->num_inputs, num_whole = input_.num_whole();
        const int most = is_few() ? Source::FEW_ROWS_BLOCK : Source::MANY_ROWS_BLOCK;
        const int num_blocks = std::max((num_whole + most - 1) / most, 1);
        const int block = round_up((num_whole + num_blocks - 1) / num_blocks, STEP);
        for (int k = 0; k < num_inputs;) {
            const int count = k < num_whole ? std::min(block, num_whole - k) : STEP;
            multiply_block(panel, k, count);
            k += count;
        }
    }

    void end() {
        if (ending_) ending_->some(TILE_ROWS);
    }

  private:
    bool is_few() const { return row_end_ - row_begin_ <= TILE_ROWS; }

    void multiply_block(int panel, int k, int count) {
        const bool is_first = k == 0, is_last = k + count >= args_.weight->num_inputs;
        const uint16_t *const tiles = source_.tiles(panel, k, count, scratch_.tiles);
        const int num_steps = count / STEP;
        for (int row = row_begin_; row < row_end_; row += TILE_ROWS) {
            const int num_rows = std::min(TILE_ROWS, row_end_ - row);
            // Sums that live only until they are written stay in the same lines.
            float *const sums = is_first && is_last ? scratch_.sums[turn_++ % 2 * TILE_ROWS]
                                                    : scratch_.sums[panel % 2 * ROW_BLOCK + row - row_begin_];
            Between between;
            between.is_few = Source::IS_PACKED && is_few();
            between.ending = ending_ ? &*ending_ : nullptr;
            between.rows_per_step = (TILE_ROWS + num_steps - 1) / num_steps;
            if (Source::IS_PACKED) fetch_weights(between, tiles, num_steps, row, is_last && panel + 1 == num_panels_);
            if (is_last) fetch_outputs(between, panel, row, num_rows);
            const InputRows rows = input_.rows(row, num_rows, k, count);
            if (between.is_few)
                multiply<true>(rows, tiles, num_steps, is_first, sums, between);
            else
                multiply<false>(rows, tiles, num_steps, is_first, sums, between);
            if (ending_) ending_->some(TILE_ROWS);
            ending_.reset();
            if (is_last) ending_.emplace(args_, panel, row, num_rows, sums);
        }
    }

    // Few rows: a little ahead. Many: the block that follows in memory, a part with each 32 rows; behind a piece too, for whoever has
    // the next one.
    void fetch_weights(Between &between, const uint16_t *tiles, int num_steps, int row, bool is_end) const {
        constexpr size_t AHEAD_BYTES = 4096;
        constexpr int STEP_LINES = STEP_ITEMS * 2 / 64;
        const char *const here = reinterpret_cast<const char *>(tiles);
        if (between.is_few) {
            between.weights = here + AHEAD_BYTES;
            between.lines_per_step = STEP_LINES;
        } else if (!is_end) {
            const int num_parts = (row_end_ - row_begin_ + TILE_ROWS - 1) / TILE_ROWS, part = (row - row_begin_) / TILE_ROWS;
            between.lines_per_step = (STEP_LINES + num_parts - 1) / num_parts;
            between.weights = here + size_t(num_steps) * size_t(STEP_LINES + part * between.lines_per_step) * 64;
        }
    }

    void fetch_outputs(Between &between, int panel, int row, int num_rows) const {
        const int item_bytes = args_.output_dtype == PDM_F32 ? 4 : 2;
        between.output_bytes = item_bytes * (args_.weight->is_gated ? PDM_PANEL / 2 : PDM_PANEL);
        between.output_stride = args_.output_stride * size_t(item_bytes);
        between.outputs = static_cast<const char *>(args_.output) + size_t(row) * between.output_stride +
                          size_t(panel) * size_t(between.output_bytes);
        between.rows_left = num_rows;
    }

    const pdm_linear_args &args_;
    const int row_begin_, row_end_, num_panels_;
    Bf16Scratch &scratch_;
    Bf16Input input_;
    const Source source_;
    std::optional<Ending> ending_;
    unsigned turn_ = 0;
};

template <typename Source>
void linear_bf16(const pdm_linear_args &args, int row_begin, int row_end, int panel_begin, int panel_end, void *scratch) {
    static_assert(Source::FEW_ROWS_BLOCK % STEP == 0 && Source::MANY_ROWS_BLOCK % STEP == 0);
    static_assert(Source::FEW_ROWS_BLOCK <= MAX_TAIL && Source::MANY_ROWS_BLOCK <= MAX_TAIL);
    static_assert(Source::IS_PACKED || (Source::FEW_ROWS_BLOCK <= MAX_BLOCK && Source::MANY_ROWS_BLOCK <= MAX_BLOCK));
    Bf16Product<Source> product(args, row_begin, row_end, *static_cast<Bf16Scratch *>(scratch));
    for (int panel = panel_begin; panel < panel_end; panel++) product.panel(panel);
    product.end();
}

}  // namespace
}  // namespace pdm
