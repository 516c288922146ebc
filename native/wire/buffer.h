/* Primitives for writing the wire format: they append to a struct mqd_buffer (declared in
 * wire/wire.h), which grows by doubling.
 *
 * Private to the encoders. Each call checks for room itself, so no caller can write past the end.
 * After a failure (out of memory, more than MQD_BUFFER_BYTES_MAX) `failed` stays set and every call
 * is a no-op; it is checked once, when the response is finished.
 */
#ifndef MQD_BUFFER_H
#define MQD_BUFFER_H

#include <string.h>

#include "wire/wire.h"

#define MQD_BUFFER_BYTES_MAX (1u << 30)

/* Reserves size_bytes at the end, counted as written; NULL on failure. */
static inline uint8_t *mqd_buffer_extend(struct mqd_buffer *buffer, uint32_t size_bytes)
{
    if (__builtin_expect(buffer->failed || buffer->capacity_bytes - buffer->size_bytes < size_bytes, 0)) {
        mqd_buffer_reserve(buffer, size_bytes);
        if (buffer->failed)
            return NULL;
    }
    uint8_t *at = buffer->bytes + buffer->size_bytes;
    buffer->size_bytes += size_bytes;
    return at;
}

static inline void mqd_store_be32(uint8_t *at, uint32_t value)
{
    value = __builtin_bswap32(value);
    memcpy(at, &value, sizeof value);
}

static inline void mqd_put_i16(struct mqd_buffer *buffer, int16_t value)
{
    uint8_t *at = mqd_buffer_extend(buffer, 2);
    uint16_t word = __builtin_bswap16((uint16_t)value);
    if (at)
        memcpy(at, &word, sizeof word);
}

static inline void mqd_put_i32(struct mqd_buffer *buffer, int32_t value)
{
    uint8_t *at = mqd_buffer_extend(buffer, 4);
    if (at)
        mqd_store_be32(at, (uint32_t)value);
}

static inline void mqd_put_i64(struct mqd_buffer *buffer, int64_t value)
{
    uint8_t *at = mqd_buffer_extend(buffer, 8);
    uint64_t word = __builtin_bswap64((uint64_t)value);
    if (at)
        memcpy(at, &word, sizeof word);
}

static inline void mqd_put_bytes(struct mqd_buffer *buffer, const void *bytes, uint32_t size_bytes)
{
    uint8_t *at = mqd_buffer_extend(buffer, size_bytes);
    if (at && size_bytes > 0)
        memcpy(at, bytes, size_bytes);
}

static inline void mqd_put_varint(struct mqd_buffer *buffer, uint32_t value)
{
    uint8_t encoded[5];
    uint32_t size_bytes = 0;
    for (; value >= 0x80; value >>= 7)
        encoded[size_bytes++] = (uint8_t)(value | 0x80);
    encoded[size_bytes++] = (uint8_t)value;
    mqd_put_bytes(buffer, encoded, size_bytes);
}

/* The length of an array or of BYTES/RECORDS; -1 = null. */
static inline void mqd_put_count(struct mqd_buffer *buffer, bool compact, int32_t count)
{
    if (compact)
        mqd_put_varint(buffer, (uint32_t)count + 1);
    else
        mqd_put_i32(buffer, count);
}

static inline void mqd_put_text(struct mqd_buffer *buffer, bool compact, struct mqd_text text)
{
    if (compact)
        mqd_put_varint(buffer, (uint32_t)text.size_bytes + 1);
    else
        mqd_put_i16(buffer, (int16_t)text.size_bytes);
    if (text.size_bytes > 0)
        mqd_put_bytes(buffer, text.bytes, (uint32_t)text.size_bytes);
}

/* A C string, or NULL = null; truncated to the INT16 maximum. */
static inline void mqd_put_c_string(struct mqd_buffer *buffer, bool compact, const char *message)
{
    struct mqd_text text = {.bytes = (const uint8_t *)message,
                            .size_bytes = message ? (int32_t)strnlen(message, INT16_MAX) : -1};
    mqd_put_text(buffer, compact, text);
}

static inline void mqd_put_topic_key(struct mqd_buffer *buffer, bool compact, bool by_id,
                                     const struct mqd_topic_key *key)
{
    if (by_id)
        mqd_put_bytes(buffer, key->topic_id, sizeof key->topic_id);
    else
        mqd_put_text(buffer, compact, key->name);
}

/* Tagged fields shared by several responses (wire/nodes.c). The caller first writes the number of
 * tags. */
void mqd_put_current_leader(struct mqd_buffer *buffer, uint32_t tag, const struct mqd_current_leader *current);
void mqd_put_nodes(struct mqd_buffer *buffer, uint32_t tag, const struct mqd_node_endpoint *nodes, uint32_t node_count);
/* the node endpoints as an ordinary field instead of a tagged one */
void mqd_put_node_list(struct mqd_buffer *buffer, const struct mqd_node_endpoint *nodes, uint32_t node_count);

/* An empty set of tagged fields, if the version has one. */
static inline void mqd_put_no_tags(struct mqd_buffer *buffer, bool flexible)
{
    uint8_t *at = flexible ? mqd_buffer_extend(buffer, 1) : NULL;
    if (at)
        *at = 0;
}

#endif
