/* Big-endian numbers at any alignment, as in Kafka's formats and in mqd's own files. The put
 * functions return the address after the number. */
#ifndef MQD_BIG_ENDIAN_H
#define MQD_BIG_ENDIAN_H

#include <stdint.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "this file always swaps bytes, and the readers of shared segments assume a little-endian CPU too");

static inline uint16_t mqd_get_be16(const uint8_t *at)
{
    uint16_t value;
    memcpy(&value, at, sizeof value);
    return __builtin_bswap16(value);
}

static inline uint32_t mqd_get_be32(const uint8_t *at)
{
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return __builtin_bswap32(value);
}

static inline uint64_t mqd_get_be64(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return __builtin_bswap64(value);
}

static inline uint8_t *mqd_put_be16(uint8_t *at, uint16_t value)
{
    value = __builtin_bswap16(value);
    return (uint8_t *)memcpy(at, &value, sizeof value) + sizeof value;
}

static inline uint8_t *mqd_put_be32(uint8_t *at, uint32_t value)
{
    value = __builtin_bswap32(value);
    return (uint8_t *)memcpy(at, &value, sizeof value) + sizeof value;
}

static inline uint8_t *mqd_put_be64(uint8_t *at, uint64_t value)
{
    value = __builtin_bswap64(value);
    return (uint8_t *)memcpy(at, &value, sizeof value) + sizeof value;
}

#endif
