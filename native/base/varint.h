/* Zigzag varints in records, from bytes that come from a peer or a disk.
 *
 * Both functions return the address after the number, or NULL when it is truncated or out of range.
 * Encodings longer than necessary are accepted: they mean the same number. The caller's `at` must
 * be at most `end`. Source: Kafka's protocol guide, "Record" (the encoding is Protocol Buffers').
 */
#ifndef MQD_VARINT_H
#define MQD_VARINT_H

#include <stddef.h>
#include <stdint.h>

/* 64 bits, in at most ten bytes. */
static inline const uint8_t *mqd_varlong(const uint8_t *at, const uint8_t *end, int64_t *out)
{
    uint64_t value = 0;
    for (int shift = 0; shift <= 63; shift += 7) {
        if (at == end)
            return NULL;
        uint8_t byte = *at++;
        if (shift == 63 && byte > 1)
            return NULL;
        value |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80) {
            *out = (int64_t)(value >> 1) ^ -(int64_t)(value & 1);
            return at;
        }
    }
    return NULL;
}

static inline const uint8_t *mqd_varint(const uint8_t *at, const uint8_t *end, int64_t *out)
{
    if (at != end && *at < 0x80) { /* the most frequent case */
        *out = (int64_t)(*at >> 1) ^ -(int64_t)(*at & 1);
        return at + 1;
    }
    at = mqd_varlong(at, end, out);
    return at && *out >= INT32_MIN && *out <= INT32_MAX ? at : NULL;
}

/* The size of a blob (-1 = null) whose bytes follow. */
static inline const uint8_t *mqd_varint_size(const uint8_t *at, const uint8_t *end, int64_t *out)
{
    at = mqd_varint(at, end, out);
    return at && *out >= -1 && *out <= end - at ? at : NULL;
}

#endif
