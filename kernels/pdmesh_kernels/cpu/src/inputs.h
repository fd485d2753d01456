// A piece's rows of bf16 input, readable as the product reads them: 16 rows at a time, 32 inputs at a time.
#pragma once

#include "multiply.h"

namespace pdm {
namespace {

constexpr int MAX_TAIL = 8192;  // inputs of the copied last rows

struct InputCopies {
    alignas(64) uint16_t last_inputs[ROW_BLOCK + 16][STEP];  // of all rows: the last K % 32 inputs, then zeros
    alignas(64) uint16_t last_rows[16 * MAX_TAIL];           // the matrix's last M % 16 rows
};

// The rows of one piece: where they may not be read as they lie, a copy.
class Bf16Input {
  public:
    Bf16Input(const pdm_linear_args &args, int row_begin, int row_end, InputCopies &scratch)
        : args_(args), row_begin_(row_begin), row_end_(row_end), num_whole_(args.weight->num_inputs / STEP * STEP),
          scratch_(scratch) {
        const int rest = args.weight->num_inputs - num_whole_;
        if (rest == 0) return;
        memset(scratch.last_inputs, 0, sizeof scratch.last_inputs);
        for (int row = row_begin; row < row_end; row++)
            memcpy(scratch.last_inputs[row - row_begin], at(row, num_whole_), size_t(rest) * 2);
    }

    // Rows [row, row + num_rows) from input k_begin on; k_count inputs are going to be read.
    InputRows rows(int row, int num_rows, int k_begin, int k_count) {
        InputRows found;
        found.num_rows = num_rows;
        half(row, k_begin, k_count, found.first, found.first_stride);
        found.second = found.first;
        found.second_stride = found.first_stride;
        if (num_rows > 16) half(row + 16, k_begin, k_count, found.second, found.second_stride);
        return found;
    }

    int num_whole() const { return num_whole_; }

  private:
    const uint16_t *at(int row, int k) const {
        return static_cast<const uint16_t *>(args_.input) + size_t(row) * args_.input_stride + k;
    }

    void half(int row, int k_begin, int k_count, const uint16_t *&items, size_t &stride) {
        if (k_begin >= num_whole_) {
            items = scratch_.last_inputs[row - row_begin_];
            stride = STEP;
        } else if (!READS_WHOLE_TILES || row + 16 <= args_.num_rows) {
            items = at(row, k_begin);
            stride = args_.input_stride;
        } else if (row + 1 == args_.num_rows) {
            // Sixteen times the only row.
            items = at(row, k_begin);
            stride = 0;
        } else {
            copy_last_rows(row, k_begin, k_count);
            items = scratch_.last_rows + (k_begin - copy_begin_);
            stride = size_t(copy_count_);
        }
    }

    void copy_last_rows(int row, int k_begin, int k_count) {
        if (k_begin >= copy_begin_ && k_begin + k_count <= copy_begin_ + copy_count_) return;
        // All at once where they fit, so that the next panels find them.
        copy_begin_ = num_whole_ <= MAX_TAIL ? 0 : k_begin;
        copy_count_ = num_whole_ <= MAX_TAIL ? num_whole_ : k_count;
        // What lies behind them is multiplied too, into sums that nobody reads.
        for (int r = row; r < row_end_; r++)
            memcpy(scratch_.last_rows + size_t(r - row) * size_t(copy_count_), at(r, copy_begin_), size_t(copy_count_) * 2);
    }

    const pdm_linear_args &args_;
    const int row_begin_, row_end_, num_whole_;
    InputCopies &scratch_;
    int copy_begin_ = 0, copy_count_ = 0;
};

}  // namespace
}  // namespace pdm
