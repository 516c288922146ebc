/* The ways to compute CRC32C (Castagnoli), by name: for tests and benchmarks. Everyone else calls
 * mqd_crc32c, which takes the best. */
#ifndef MQD_CRC32C_H
#define MQD_CRC32C_H

#include "native.h"

enum mqd_crc32c_kind {
    MQD_CRC32C_BITWISE,    /* the definition */
    MQD_CRC32C_TABLE,      /* eight tables, eight bytes a step; any machine */
    MQD_CRC32C_ONE_STREAM, /* of the crc32 instruction: x86-64 with SSE 4.2, ARMv8 with CRC */
    MQD_CRC32C_3WAY,       /* three streams, joined by carry-less multiplication; falls to one stream for short input */
    MQD_CRC32C_KIND_COUNT
};

bool mqd_crc32c_available(enum mqd_crc32c_kind kind);
/* kind must be available */
uint32_t mqd_crc32c_by(enum mqd_crc32c_kind kind, uint32_t crc, const void *bytes, size_t size_bytes);

#endif
