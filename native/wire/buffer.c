/* The growing buffer of the encoders, and the frame around a response. See wire/wire.h and
 * wire/buffer.h. */
#include "wire/buffer.h"

#include <errno.h>
#include <stdlib.h>

#include "base/error.h"

#define BUFFER_BYTES_MIN 256u
#define API_VERSIONS 18

void mqd_buffer_reserve(struct mqd_buffer *buffer, uint32_t more_bytes)
{
    if (buffer->failed || buffer->capacity_bytes - buffer->size_bytes >= more_bytes)
        return;
    uint64_t needed = (uint64_t)buffer->size_bytes + more_bytes;
    if (needed > MQD_BUFFER_BYTES_MAX) {
        buffer->failed = true;
        mqd_error_set_static(EMSGSIZE, "a response would be larger than 1 GiB; request less data");
        return;
    }
    uint64_t capacity = buffer->capacity_bytes > BUFFER_BYTES_MIN ? buffer->capacity_bytes : BUFFER_BYTES_MIN;
    while (capacity < needed)
        capacity *= 2;
    uint8_t *bytes = realloc(buffer->bytes, capacity);
    if (bytes == NULL) {
        buffer->failed = true;
        mqd_error_set_static(ENOMEM,
                             "no memory for a response; lower queued.max.request.bytes or give the broker more memory");
        return;
    }
    buffer->bytes = bytes;
    buffer->capacity_bytes = (uint32_t)capacity;
}

void mqd_buffer_free(struct mqd_buffer *buffer)
{
    free(buffer->bytes);
    *buffer = (struct mqd_buffer){0};
}

void mqd_response_begin(struct mqd_buffer *buffer, int16_t api_key, int16_t version, int32_t correlation_id)
{
    buffer->response_at = buffer->size_bytes;
    mqd_put_i32(buffer, 0);
    mqd_put_i32(buffer, correlation_id);
    /* KIP-511: a client that does not know our versions must be able to read the response, so
     * ApiVersions keeps header v0 */
    mqd_put_no_tags(buffer, api_key != API_VERSIONS && mqd_api_flexible(api_key, version));
}

void mqd_response_finish(struct mqd_buffer *buffer, uint64_t extra_bytes)
{
    if (buffer->failed)
        return;
    uint64_t size_bytes = (uint64_t)(buffer->size_bytes - buffer->response_at) - 4 + extra_bytes;
    if (size_bytes > INT32_MAX) {
        buffer->failed = true;
        mqd_error_set_static(EMSGSIZE,
                             "a response would be larger than its length word allows (2 GiB); lower fetch.max.bytes");
        return;
    }
    mqd_store_be32(buffer->bytes + buffer->response_at, (uint32_t)size_bytes);
}
