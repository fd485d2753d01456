/* Has a mapped pool's next pages at hand, in a thread that gives way to all others and holds no lock of theirs. */
#ifndef PDMESH_PAGES_H
#define PDMESH_PAGES_H

#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(default)
#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    char *blocks;
    size_t block_bytes, header_bytes; /* header: before the first block in the file */
    int64_t num_blocks;
    int64_t num_ahead;
    int64_t num_given; /* blocks up to here are in use; set by others at any time, below 0 to end. Then `wake_fd` is written to */
    int32_t wake_fd;   /* an eventfd that blocks */
    int32_t pool_fd;   /* of a pool that is only read: what its owner has not taken is left alone; -1: its pages are taken */
} PdmPages;

/* Works until `num_given` is below 0. Returns 0, or the error number for which it ended early. */
int pdm_pages_ahead(const PdmPages *pages);

#ifdef __cplusplus
}
#endif
#pragma GCC visibility pop

#endif
