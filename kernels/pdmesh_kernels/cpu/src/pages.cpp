// Maps pages piece by piece.
#include "pages.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

namespace {

// The map's lock is held for one piece: whoever needs it to allocate memory waits for a thread that may get no processor.
constexpr size_t PIECE_BYTES = 64 << 10, PAGE_BYTES = 4096;
// A processor with somebody on it who gives way to all others is still not one that Linux takes for idle: whoever is woken
// meanwhile is put where the others run, and waits for them. So it rests behind each stretch, of some 150 us.
constexpr size_t STRETCH_BYTES = 512 << 10;
constexpr useconds_t REST_US = 1000;

int64_t given(const PdmPages &pages) { return __atomic_load_n(&pages.num_given, __ATOMIC_ACQUIRE); }

// Up to which block the memory should be here by now.
int64_t wanted(const PdmPages &pages, int64_t num_ready) {
    const int64_t most = std::min(given(pages) + pages.num_ahead, pages.num_blocks);
    if (pages.pool_fd < 0 || num_ready >= most) return most;
    // Reading a page that the owner has not taken would take it.
    const off_t from = off_t(pages.header_bytes + size_t(num_ready) * pages.block_bytes);
    const off_t hole = lseek(pages.pool_fd, from, SEEK_HOLE);
    return hole < 0 ? num_ready : std::min<int64_t>(most, (hole - off_t(pages.header_bytes)) / off_t(pages.block_bytes));
}

// Takes one block's pages; 0 or an error number. `stretch`: bytes since the last rest.
int take(const PdmPages &pages, int64_t block, size_t &stretch) {
    char *const end = pages.blocks + size_t(block + 1) * pages.block_bytes;
    char *at = end - pages.block_bytes;
    at -= size_t(at) % PAGE_BYTES;
    const int advice = pages.pool_fd < 0 ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
    for (; at < end && given(pages) >= 0; at += PIECE_BYTES) {
        const size_t piece = std::min(PIECE_BYTES, size_t(end - at));
        if (madvise(at, piece, advice) && errno != EINTR && errno != EAGAIN) return errno;
        if ((stretch += piece) < STRETCH_BYTES) continue;
        stretch = 0;
        usleep(REST_US);
    }
    return 0;
}

}  // namespace

extern "C" int pdm_pages_ahead(const PdmPages *pages) {
    // What is in use at the beginning is being written, or read, already.
    int64_t num_ready = std::max<int64_t>(given(*pages), 0);
    size_t stretch = 0;
    while (given(*pages) >= 0) {
        if (num_ready >= wanted(*pages, num_ready)) {
            uint64_t count;
            if (read(pages->wake_fd, &count, sizeof count) < 0 && errno != EINTR) return errno;
            num_ready = std::max(num_ready, given(*pages));
        } else if (const int error = take(*pages, num_ready++, stretch)) {
            return error;
        }
    }
    return 0;
}
