/* Zigzag varints in records, from bytes that come from a peer or a disk.
 *
 * All functions return the address after the number, or NULL when it is truncated or out of range.
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

/* Skips a number without decoding it. */
static inline const uint8_t *mqd_varlong_skip(const uint8_t *at, const uint8_t *end)
{
    for (int count = 1; count <= 10 && at != end; count++)
        if (*at++ < 0x80)
            return count < 10 || at[-1] <= 1 ? at : NULL;
    return NULL;
}

static inline const uint8_t *mqd_varint(const uint8_t *at, const uint8_t *end, int64_t *out)
{
    if (at != end && *at < 0x80) { /* the most frequent case */
        *out = (int64_t)(*at >> 1) ^ -(int64_t)(*at & 1);
        return at + 1;
    }
    if (end - at >= 2 && at[1] < 0x80) {
        uint32_t value = (uint32_t)at[1] << 7 | (at[0] & 0x7f);
        *out = (int32_t)(value >> 1) ^ -(int32_t)(value & 1);
        return at + 2;
    }
    at = mqd_varlong(at, end, out);
    return at && *out >= INT32_MIN && *out <= INT32_MAX ? at : NULL;
}

/* Reads the size of a blob (-1 = null). Returns NULL also if fewer bytes follow than the size
 * states. */
static inline const uint8_t *mqd_varint_size(const uint8_t *at, const uint8_t *end, int64_t *out)
{
    int64_t bytes_left = end - at;
    if (bytes_left == 0)
        return NULL;
    /* 64 bits wide: widening it later would delay the computation of the next address */
    uint64_t first = at[0];
    if (__builtin_expect((first & 0x81) == 0, 1)) { /* one byte, and not null: most frequent */
        *out = (int64_t)(first >> 1);
        return *out < bytes_left ? at + 1 : NULL;
    }
    if (bytes_left >= 2 && (first & 1) == 0 && at[1] < 0x80) { /* two bytes */
        *out = (int64_t)((uint64_t)at[1] << 6 | (first & 0x7f) >> 1);
        return *out < bytes_left - 1 ? at + 2 : NULL;
    }
    at = mqd_varint(at, end, out);
    return at && *out >= -1 && *out <= end - at ? at : NULL;
}

#endif
