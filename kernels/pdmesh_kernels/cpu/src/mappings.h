/* Says which file it was when the memory that maps it cannot be read: it was cut short, or its disk fails. */
#ifndef PDMESH_MAPPINGS_H
#define PDMESH_MAPPINGS_H

#include <stddef.h>

#pragma GCC visibility push(default)
#ifdef __cplusplus
extern "C" {
#endif

/* From now on a SIGBUS at one of these bytes writes `text`, of at most 1023 bytes, to standard error before it ends the process as it
   would have without. Returns a number for pdm_forget_mapping, or -1 where 64 mappings are named already. */
int pdm_name_mapping(const void *begin, size_t num_bytes, const char *text);
void pdm_forget_mapping(int number);

#ifdef __cplusplus
}
#endif
#pragma GCC visibility pop

#endif
