/* Writing varints. Reading them from untrusted bytes: base/varint.h, wire/cursor.h.
 *
 * The caller ensures room for 5 (32 bits) or 10 bytes (64 bits). Source: Kafka's protocol guide,
 * "Record" (zigzag) and "Protocol Primitive Types" (unsigned).
 */
#ifndef MQD_VARINT_PUT_H
#define MQD_VARINT_PUT_H

#include <stdint.h>

/* Returns the length of `value` as a varint (7 bits per byte), computed without a division or a
 * loop; correct for every highest bit from 0 to 63. */
static inline uint32_t mqd_unsigned_varint_bytes(uint64_t value)
{
    return (9u * (63u - (uint32_t)__builtin_clzll(value | 1)) + 73) >> 6;
}

static inline uint8_t *mqd_put_unsigned_varint(uint8_t *at, uint64_t value)
{
    for (; value >= 0x80; value >>= 7)
        *at++ = (uint8_t)(value | 0x80);
    *at++ = (uint8_t)value;
    return at;
}

/* Like mqd_put_unsigned_varint, for a caller that knows the length: size_bytes =
 * mqd_unsigned_varint_bytes(value). */
static inline void mqd_put_unsigned_varint_sized(uint8_t *at, uint64_t value, uint32_t size_bytes)
{
    for (uint32_t i = 0; i + 1 < size_bytes; i++, value >>= 7)
        at[i] = (uint8_t)(value | 0x80);
    at[size_bytes - 1] = (uint8_t)value;
}

static inline uint64_t mqd_zigzag(int64_t value)
{
    return (uint64_t)value << 1 ^ (uint64_t)(value >> 63);
}

#endif
