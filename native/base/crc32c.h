/* The implementations of CRC32C (Castagnoli), for tests and benchmarks. Other code calls
 * mqd_crc32c, which uses the fastest. */
#ifndef MQD_CRC32C_H
#define MQD_CRC32C_H

#include "native.h"

enum mqd_crc32c_kind {
    MQD_CRC32C_BITWISE,    /* bit by bit, as defined */
    MQD_CRC32C_TABLE,      /* eight tables, eight bytes a step; runs on any machine */
    MQD_CRC32C_ONE_STREAM, /* the crc32 instruction: x86-64 with SSE 4.2, ARMv8 with CRC */
    MQD_CRC32C_3WAY,       /* three streams, joined by carry-less multiplication; uses one stream for short input */
    MQD_CRC32C_KIND_COUNT
};

bool mqd_crc32c_available(enum mqd_crc32c_kind kind);
/* kind must be available */
uint32_t mqd_crc32c_using(enum mqd_crc32c_kind kind, uint32_t crc, const void *bytes, size_t size_bytes);

#endif
