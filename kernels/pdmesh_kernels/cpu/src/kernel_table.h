// Puts together one instruction set's kernels. Included by kernels_*.cpp only.
#pragma once

#include "attention.h"
#include "heads.h"
#include "kernels.h"
#include "linear.h"
#include "rows.h"
#include "tiles.h"

namespace pdm {
namespace {

constexpr Kernels kernel_table(const char *name) {
    return {name, enter_tiles, leave_tiles, linear, quantize_rows, norm, embed, heads, attend, merge};
}

}  // namespace
}  // namespace pdm
