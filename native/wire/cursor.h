/* Reading primitives of the wire format: big-endian words, strings, arrays and tagged fields, read
 * in sequence from bytes that a peer wrote.
 *
 * For the parsers of wire/, server/ and client/; inline, because a Produce request with one batch
 * needs ten of these calls and must cost only tens of nanoseconds.
 *
 *   C1  begin <= at <= end always; nothing is read at or after `end`.
 *   C2  before use, a length is checked against the remaining bytes, and an array's count against
 *       the number of elements of minimum size that fit into them, so no loop exceeds the frame.
 *   C3  after a failure the cursor is unusable; the message names the field and the position.
 *
 * Source: the protocol guide's "Protocol Primitive Types", KIP-482 (compact types, tagged fields).
 */
#ifndef MQD_WIRE_CURSOR_H
#define MQD_WIRE_CURSOR_H

#include <string.h>

#include "base/big_endian.h"
#include "wire/wire.h"

#define MQD_VARINT_BYTES_MAX 5
#define MQD_STRING_BYTES_MAX 32767 /* both forms: the INT16 maximum */

/* Cold path: these functions set the message. The inline functions below return -1 themselves, so
 * that the compiler sees that no value is used after a failure. */
void mqd_wire_report_short(const struct mqd_byte_cursor *cursor, const char *field, size_t needed_bytes);
void mqd_wire_report_wrong(const struct mqd_byte_cursor *cursor, const char *field, const char *what, int64_t value);
int mqd_wire_misused(const char *what);

static inline int mqd_wire_short(const struct mqd_byte_cursor *cursor, const char *field, size_t needed_bytes)
{
    mqd_wire_report_short(cursor, field, needed_bytes);
    return -1;
}

static inline int mqd_wire_wrong(const struct mqd_byte_cursor *cursor, const char *field, const char *what,
                                 int64_t value)
{
    mqd_wire_report_wrong(cursor, field, what, value);
    return -1;
}

static inline struct mqd_byte_cursor mqd_cursor_over(const uint8_t *bytes, uint32_t size_bytes)
{
    return (struct mqd_byte_cursor){.at = bytes, .end = bytes + size_bytes, .begin = bytes};
}

static inline size_t mqd_cursor_left(const struct mqd_byte_cursor *cursor)
{
    return (size_t)(cursor->end - cursor->at);
}

#define MQD_UNLIKELY(condition) __builtin_expect(!!(condition), 0)

static inline int mqd_take_i8(struct mqd_byte_cursor *cursor, const char *field, int8_t *out)
{
    if (MQD_UNLIKELY(mqd_cursor_left(cursor) < 1))
        return mqd_wire_short(cursor, field, 1);
    *out = (int8_t)*cursor->at++;
    return 0;
}

static inline int mqd_take_i16(struct mqd_byte_cursor *cursor, const char *field, int16_t *out)
{
    if (MQD_UNLIKELY(mqd_cursor_left(cursor) < 2))
        return mqd_wire_short(cursor, field, 2);
    *out = (int16_t)mqd_get_be16(cursor->at);
    cursor->at += 2;
    return 0;
}

static inline int mqd_take_i32(struct mqd_byte_cursor *cursor, const char *field, int32_t *out)
{
    if (MQD_UNLIKELY(mqd_cursor_left(cursor) < 4))
        return mqd_wire_short(cursor, field, 4);
    *out = (int32_t)mqd_get_be32(cursor->at);
    cursor->at += 4;
    return 0;
}

static inline int mqd_take_i64(struct mqd_byte_cursor *cursor, const char *field, int64_t *out)
{
    if (MQD_UNLIKELY(mqd_cursor_left(cursor) < 8))
        return mqd_wire_short(cursor, field, 8);
    *out = (int64_t)mqd_get_be64(cursor->at);
    cursor->at += 8;
    return 0;
}

/* UNSIGNED_VARINT of at most 32 bits. Longer encodings of a small number are legal, more than 32
 * bits are not. */
static inline int mqd_take_varint(struct mqd_byte_cursor *cursor, const char *field, uint32_t *out)
{
    if (MQD_UNLIKELY(cursor->at == cursor->end))
        return mqd_wire_short(cursor, field, 1);
    uint32_t value = *cursor->at++;
    if (value >= 0x80) {
        value &= 0x7f;
        for (int shift = 7;; shift += 7) {
            if (MQD_UNLIKELY(cursor->at == cursor->end))
                return mqd_wire_short(cursor, field, 1);
            uint8_t byte = *cursor->at++;
            if (MQD_UNLIKELY(shift == 28 && byte > 0x0f))
                return mqd_wire_wrong(cursor, field, "a varint above 32 bits, its fifth byte is", byte);
            value |= (uint32_t)(byte & 0x7f) << shift;
            if (byte < 0x80)
                break;
        }
    }
    *out = value;
    return 0;
}

/* Array length in either form. A null array is refused: none of the hot requests has a nullable
 * one. */
static inline int mqd_take_count(struct mqd_byte_cursor *cursor, bool compact, const char *field,
                                 uint32_t element_bytes_min, int32_t *out)
{
    int64_t count;
    if (compact) {
        uint32_t raw;
        if (mqd_take_varint(cursor, field, &raw))
            return -1;
        count = (int64_t)raw - 1;
    } else {
        int32_t raw;
        if (mqd_take_i32(cursor, field, &raw))
            return -1;
        count = raw;
    }
    if (MQD_UNLIKELY(count < 0))
        return mqd_wire_wrong(cursor, field, "an array that must not be null or negative, its count is", count);
    if (MQD_UNLIKELY((uint64_t)count > mqd_cursor_left(cursor) / element_bytes_min))
        return mqd_wire_wrong(cursor, field, "more elements than the rest of the frame can hold, its count is", count);
    *out = (int32_t)count;
    return 0;
}

/* Length of a string or byte sequence in either form; -1 = null. Checked against the remaining
 * bytes. */
static inline int mqd_take_length(struct mqd_byte_cursor *cursor, bool compact, bool is_string, const char *field,
                                  int32_t *out)
{
    int64_t length;
    if (compact) {
        uint32_t raw;
        if (mqd_take_varint(cursor, field, &raw))
            return -1;
        length = (int64_t)raw - 1;
    } else if (is_string) {
        int16_t raw;
        if (mqd_take_i16(cursor, field, &raw))
            return -1;
        length = raw;
    } else {
        int32_t raw;
        if (mqd_take_i32(cursor, field, &raw))
            return -1;
        length = raw;
    }
    if (MQD_UNLIKELY(length < -1))
        return mqd_wire_wrong(cursor, field, "a negative length,", length);
    if (MQD_UNLIKELY(is_string && length > MQD_STRING_BYTES_MAX))
        return mqd_wire_wrong(cursor, field, "a string above 32767 bytes, its length is", length);
    if (MQD_UNLIKELY(length > (int64_t)mqd_cursor_left(cursor)))
        return mqd_wire_short(cursor, field, (size_t)length);
    *out = (int32_t)length;
    return 0;
}

static inline int mqd_take_text(struct mqd_byte_cursor *cursor, bool compact, bool nullable, const char *field,
                                struct mqd_text *out)
{
    int32_t length;
    if (mqd_take_length(cursor, compact, true, field, &length))
        return -1;
    if (length < 0) {
        if (MQD_UNLIKELY(!nullable))
            return mqd_wire_wrong(cursor, field, "a string that must not be null, its length is", length);
        *out = (struct mqd_text){.bytes = NULL, .size_bytes = -1};
        return 0;
    }
    *out = (struct mqd_text){.bytes = cursor->at, .size_bytes = length};
    cursor->at += length;
    return 0;
}

static inline int mqd_take_topic_key(struct mqd_byte_cursor *cursor, bool compact, bool by_id,
                                     struct mqd_topic_key *out)
{
    out->by_id = by_id;
    if (!by_id) {
        memset(out->topic_id, 0, sizeof out->topic_id);
        return mqd_take_text(cursor, compact, false, "topic name", &out->name);
    }
    if (MQD_UNLIKELY(mqd_cursor_left(cursor) < 16))
        return mqd_wire_short(cursor, "topic id", 16);
    out->name = (struct mqd_text){.bytes = NULL, .size_bytes = -1};
    memcpy(out->topic_id, cursor->at, 16);
    cursor->at += 16;
    return 0;
}

/* Reads the head of one tagged field: `value` becomes a cursor over its bytes only; the outer
 * cursor continues after them. */
static inline int mqd_take_tag(struct mqd_byte_cursor *cursor, uint32_t *tag, struct mqd_byte_cursor *value)
{
    uint32_t size_bytes;
    if (mqd_take_varint(cursor, "tag", tag) || mqd_take_varint(cursor, "size of a tagged field", &size_bytes))
        return -1;
    if (MQD_UNLIKELY(size_bytes > mqd_cursor_left(cursor)))
        return mqd_wire_short(cursor, "tagged field", size_bytes);
    *value = (struct mqd_byte_cursor){.at = cursor->at, .end = cursor->at + size_bytes, .begin = cursor->begin};
    cursor->at += size_bytes;
    return 0;
}

/* A tagged field that we parse must end exactly at its declared length. */
static inline int mqd_tag_finished(const struct mqd_byte_cursor *value, const char *field)
{
    if (MQD_UNLIKELY(value->at != value->end))
        return mqd_wire_wrong(value, field, "a tagged field that is longer than its type; bytes left over:",
                              (int64_t)mqd_cursor_left(value));
    return 0;
}

int mqd_skip_tags_many(struct mqd_byte_cursor *cursor, uint32_t tag_count);

/* Skips tagged fields (KIP-482: unknown ones are ignored). Versions that are not flexible have
 * none. */
static inline int mqd_skip_tags(struct mqd_byte_cursor *cursor, bool flexible)
{
    uint32_t tag_count;
    if (!flexible)
        return 0;
    if (mqd_take_varint(cursor, "tagged fields", &tag_count))
        return -1;
    return MQD_UNLIKELY(tag_count > 0) ? mqd_skip_tags_many(cursor, tag_count) : 0;
}

static inline int mqd_cursor_finished(const struct mqd_byte_cursor *cursor, const char *request)
{
    if (MQD_UNLIKELY(cursor->at != cursor->end))
        return mqd_wire_wrong(cursor, request, "a request followed by bytes that its schema does not have; count:",
                              (int64_t)mqd_cursor_left(cursor));
    return 0;
}

#endif
