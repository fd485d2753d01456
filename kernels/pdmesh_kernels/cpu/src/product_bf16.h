// A panel times rows, in bf16 with f32 sums: the heart of every format that is multiplied as bf16.
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

#include "epilogue.h"
#include "kernels.h"
#include "simd.h"
#include "tiles.h"

namespace pdm {
namespace {

constexpr int STEP = 32;                      // inputs of a tile
constexpr int STEP_ITEMS = STEP * PDM_PANEL;  // of a panel
constexpr int MAX_BLOCK = 2048;               // inputs that `tiles` may write at once
constexpr int MAX_TAIL = 8192;                // inputs of the copied last rows

struct PackedTiles {
    explicit PackedTiles(const pdm_weight &weight)
        : panels(static_cast<const uint8_t *>(weight.panels)), panel_bytes(weight.panel_bytes) {}
    static constexpr int FEW_ROWS_BLOCK = MAX_TAIL, MANY_ROWS_BLOCK = 1536;
    static constexpr bool IS_PACKED = true;
    const uint16_t *tiles(int panel, int k_begin, int, uint16_t *) const {
        return reinterpret_cast<const uint16_t *>(panels + size_t(panel) * panel_bytes) + size_t(k_begin) * PDM_PANEL;
    }
    const uint8_t *const panels;
    const size_t panel_bytes;
};

// At most TILE_ROWS rows of input in halves of 16; `second` is not used when there are fewer. AMX reads whole halves.
struct InputRows {
    const uint16_t *first, *second;
    size_t first_stride, second_stride;
    int num_rows;
};

#if defined(__AMX_BF16__)

// sums [32][32] (+)= rows times the tiles of num_steps. Tiles 0 to 3 are the sums, 4 and 5 rows, 6 and 7 weights.
template <bool FETCHES>
inline void multiply(const InputRows &rows, const uint16_t *tiles, int num_steps, bool is_first, float *sums) {
    // Weights come from memory once: this far ahead, plain reads are fastest.
    constexpr size_t FETCH_BYTES = 2048;
    constexpr size_t ROW_BYTES = PDM_PANEL * sizeof(float);
    const char *weights = reinterpret_cast<const char *>(tiles);
    const size_t first_bytes = rows.first_stride * 2, second_bytes = rows.second_stride * 2;
    if (is_first) {
        _tile_zero(0);
        _tile_zero(1);
    } else {
        _tile_loadd(0, sums, ROW_BYTES);
        _tile_loadd(1, sums + 16, ROW_BYTES);
    }
    if (rows.num_rows <= 16) {
        for (int step = 0; step < num_steps; step++, weights += STEP_ITEMS * 2) {
            if (FETCHES)
                for (int line = 0; line < 32; line++) _mm_prefetch(weights + FETCH_BYTES + line * 64, _MM_HINT_T0);
            _tile_loadd(4, rows.first + step * STEP, first_bytes);
            _tile_loadd(6, weights, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, weights + 1024, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
    } else {
        if (is_first) {
            _tile_zero(2);
            _tile_zero(3);
        } else {
            _tile_loadd(2, sums + 16 * PDM_PANEL, ROW_BYTES);
            _tile_loadd(3, sums + 16 * PDM_PANEL + 16, ROW_BYTES);
        }
        for (int step = 0; step < num_steps; step++, weights += STEP_ITEMS * 2) {
            if (FETCHES)
                for (int line = 0; line < 32; line++) _mm_prefetch(weights + FETCH_BYTES + line * 64, _MM_HINT_T0);
            _tile_loadd(6, weights, 64);
            _tile_loadd(4, rows.first + step * STEP, first_bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, weights + 1024, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, rows.second + step * STEP, second_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(2, sums + 16 * PDM_PANEL, ROW_BYTES);
        _tile_stored(3, sums + 16 * PDM_PANEL + 16, ROW_BYTES);
    }
    _tile_stored(0, sums, ROW_BYTES);
    _tile_stored(1, sums + 16, ROW_BYTES);
}

#else

// R rows times HALVES of a panel's two halves, which is what the registers hold.
template <int R, int HALVES, bool FETCHES>
inline void multiply_rows(const uint16_t *rows, size_t stride, const uint16_t *tiles, int num_steps, bool is_first, float *sums) {
    constexpr size_t FETCH_BYTES = 2048;
    F16 sum[R][HALVES];
    for (int r = 0; r < R; r++)
        for (int h = 0; h < HALVES; h++) sum[r][h] = is_first ? zero() : load(sums + r * PDM_PANEL + h * 16);
    for (int step = 0; step < num_steps; step++, tiles += STEP_ITEMS, rows += STEP) {
        for (int pair = 0; pair < STEP / 2; pair++) {
            F16 weight[HALVES];
            for (int h = 0; h < HALVES; h++) {
                const uint16_t *const lanes = tiles + h * 16 * STEP + pair * 32;
                weight[h] = load_pairs(lanes);
                if (FETCHES) _mm_prefetch(reinterpret_cast<const char *>(lanes) + FETCH_BYTES, _MM_HINT_T0);
            }
            for (int r = 0; r < R; r++) {
                uint32_t bits;
                memcpy(&bits, rows + size_t(r) * stride + pair * 2, 4);
                const F16 input = splat_pair(bits);
                for (int h = 0; h < HALVES; h++) sum[r][h] = dot_pairs(sum[r][h], input, weight[h]);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int h = 0; h < HALVES; h++) store(sums + r * PDM_PANEL + h * 16, sum[r][h]);
}

template <int R, bool FETCHES>
inline int multiply_while(int row, const InputRows &rows, const uint16_t *tiles, int num_steps, bool is_first, float *sums) {
#if defined(__AVX512F__)
    constexpr int HALVES = 2;
#else
    constexpr int HALVES = 1;
#endif
    for (; row + R <= rows.num_rows; row += R) {
        const uint16_t *const from = row < 16 ? rows.first + size_t(row) * rows.first_stride
                                              : rows.second + size_t(row - 16) * rows.second_stride;
        for (int half = 0; half < 2; half += HALVES)
            multiply_rows<R, HALVES, FETCHES>(from, row < 16 ? rows.first_stride : rows.second_stride, tiles + half * 16 * STEP,
                                              num_steps, is_first, sums + row * PDM_PANEL + half * 16);
    }
    return row;
}

// sums [num_rows][32] (+)= rows times the tiles of num_steps.
template <bool FETCHES>
inline void multiply(const InputRows &rows, const uint16_t *tiles, int num_steps, bool is_first, float *sums) {
#if defined(__AVX512F__)
    int row = multiply_while<8, FETCHES>(0, rows, tiles, num_steps, is_first, sums);
    row = multiply_while<4, FETCHES>(row, rows, tiles, num_steps, is_first, sums);
#else
    int row = multiply_while<4, FETCHES>(0, rows, tiles, num_steps, is_first, sums);
#endif
    row = multiply_while<2, FETCHES>(row, rows, tiles, num_steps, is_first, sums);
    multiply_while<1, FETCHES>(row, rows, tiles, num_steps, is_first, sums);
}

#endif

struct Bf16Scratch {
    alignas(64) float sums[ROW_BLOCK][PDM_PANEL];
    alignas(64) uint16_t last_inputs[ROW_BLOCK + 16][STEP];  // of all rows: the last K % 32 inputs, then zeros
    alignas(64) uint16_t last_rows[16 * MAX_TAIL];           // the matrix's last M % 16 rows
    alignas(64) uint16_t tiles[MAX_BLOCK * PDM_PANEL];
};
static_assert(sizeof(Bf16Scratch) <= SCRATCH_BYTES);

// The rows of one piece: where they may not be read as they lie, a copy.
class Bf16Input {
  public:
    Bf16Input(const pdm_linear_args &args, int row_begin, int row_end, Bf16Scratch &scratch)
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
        } else if (row + 16 <= args_.num_rows) {
            items = at(row, k_begin);
            stride = args_.input_stride;
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
        for (int r = row; r < row + 16; r++) {
            uint16_t *const to = scratch_.last_rows + size_t(r - row) * size_t(copy_count_);
            if (r < row_end_)
                memcpy(to, at(r, copy_begin_), size_t(copy_count_) * 2);
            else
                memset(to, 0, size_t(copy_count_) * 2);
        }
    }

    const pdm_linear_args &args_;
    const int row_begin_, row_end_, num_whole_;
    Bf16Scratch &scratch_;
    int copy_begin_ = 0, copy_count_ = 0;
};

template <typename Source>
void linear_bf16(const pdm_linear_args &args, int row_begin, int row_end, int panel_begin, int panel_end, void *scratch) {
    static_assert(Source::FEW_ROWS_BLOCK % STEP == 0 && Source::MANY_ROWS_BLOCK % STEP == 0);
    static_assert(Source::FEW_ROWS_BLOCK <= MAX_TAIL && Source::MANY_ROWS_BLOCK <= MAX_TAIL);
    static_assert(Source::IS_PACKED || (Source::FEW_ROWS_BLOCK <= MAX_BLOCK && Source::MANY_ROWS_BLOCK <= MAX_BLOCK));
    Bf16Scratch &space = *static_cast<Bf16Scratch *>(scratch);
    Bf16Input input(args, row_begin, row_end, space);
    const Source source(*args.weight);
    const int num_inputs = args.weight->num_inputs, num_whole = input.num_whole();
    const bool is_few = row_end - row_begin <= TILE_ROWS;
    const int block = is_few ? Source::FEW_ROWS_BLOCK : Source::MANY_ROWS_BLOCK;
    for (int panel = panel_begin; panel < panel_end; panel++) {
        for (int k = 0; k < num_inputs;) {
            const int count = k < num_whole ? std::min(block, num_whole - k) : STEP;
            const uint16_t *const tiles = source.tiles(panel, k, count, space.tiles);
            const bool is_first = k == 0, is_last = k + count >= num_inputs;
            for (int row = row_begin; row < row_end; row += TILE_ROWS) {
                const int num_rows = std::min(TILE_ROWS, row_end - row);
                // Sums that live only until they are written stay in the same lines.
                float *const sums = space.sums[is_first && is_last ? 0 : row - row_begin];
                const InputRows rows = input.rows(row, num_rows, k, count);
                if (is_few && Source::IS_PACKED)
                    multiply<true>(rows, tiles, count / STEP, is_first, sums);
                else
                    multiply<false>(rows, tiles, count / STEP, is_first, sums);
                if (is_last) finish(args, panel, row, num_rows, sums);
            }
            k += count;
        }
    }
}

}  // namespace
}  // namespace pdm
