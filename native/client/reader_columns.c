/* Converts columns of a view: to one buffer of all values, or to Arrow's BinaryView. Declared in
 * client/reader.h.
 *
 * Source: Arrow's columnar format, "Variable-size Binary View Layout": int32 size, then 12 bytes
 * inline, or a prefix of 4 bytes, int32 number of a buffer, int32 position in that buffer.
 */
#include "client/reader.h"

#include <string.h>

#include "base/error.h"

#define VIEW_BYTES 16
#define INLINE_BYTES_MAX 12

int64_t mqd_columns_gather(const uint8_t *base, const uint64_t *positions, const int32_t *sizes, uint32_t count,
                           uint8_t *out, uint64_t capacity, int64_t *offsets)
{
    uint64_t at = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (offsets)
            offsets[i] = (int64_t)at;
        if (sizes[i] <= 0)
            continue;
        if ((uint64_t)sizes[i] > capacity - at)
            return mqd_error_set_static(MQD_E_FULL, "the buffer is smaller than all the blobs together");
        memcpy(out + at, base + positions[i], (size_t)sizes[i]);
        at += (uint64_t)sizes[i];
    }
    if (offsets)
        offsets[count] = (int64_t)at;
    return (int64_t)at;
}

int64_t mqd_columns_arrow(const uint8_t *base, uint64_t origin, const uint64_t *positions, const int32_t *sizes,
                          uint32_t count, uint8_t *views, uint8_t *validity)
{
    int64_t null_count = 0;
    if (validity)
        memset(validity, 0xff, (count + 7u) / 8u);
    for (uint32_t i = 0; i < count; i++, views += VIEW_BYTES) {
        const uint8_t *blob = base + positions[i];
        memset(views, 0, VIEW_BYTES);
        if (sizes[i] < 0) {
            null_count++;
            if (validity)
                validity[i / 8] &= (uint8_t)~(1u << i % 8);
            continue;
        }
        memcpy(views, &sizes[i], 4);
        if (sizes[i] <= INLINE_BYTES_MAX) {
            memcpy(views + 4, blob, (size_t)sizes[i]);
            continue;
        }
        if (positions[i] < origin || positions[i] - origin > INT32_MAX - (uint32_t)sizes[i])
            return mqd_error_set_static(
                MQD_E_INVALID, "a blob is too far from the others for one Arrow array; read fewer records at a time");
        int32_t position = (int32_t)(positions[i] - origin);
        memcpy(views + 4, blob, 4);
        memcpy(views + 12, &position, 4);
    }
    return null_count;
}
