/* fuzz: -max_len=512 */
/* Any bytes into validate and decode. Most inputs get a valid checksum, otherwise none would
 * pass it. Accepted batches must have the properties that the log relies on. */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "native.h"

static void require(int condition)
{
    if (!condition)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 1)
        return 0;
    unsigned mode = data[0] & 3;
    size_t length = size - 1;
    uint8_t *bytes = malloc(length ? length : 1);
    memcpy(bytes, data + 1, length);
    if (mode >= 1 && length >= 61) {
        if (mode >= 2) { /* and the right length */
            uint32_t batch_length = __builtin_bswap32((uint32_t)length - 12);
            memcpy(bytes + 8, &batch_length, 4);
            bytes[16] = 2;
        }
        uint32_t crc = __builtin_bswap32(mqd_crc32c(0, bytes + 21, length - 21));
        memcpy(bytes + 17, &crc, 4);
    }
    struct mqd_batch batch, stored;
    const char *reason = "";
    int16_t error = mqd_batch_validate(bytes, length, &batch, &reason);
    require(error == 0 || error == 2 || error == 47 || error == 76 || error == 87);
    require((error == 0) == (reason == NULL));
    if (error == 0) {
        require(batch.size_bytes == (int64_t)length && batch.record_count == batch.last_offset_delta + 1 &&
                batch.record_count > 0);
        bool transactional = batch.attributes & 0x10, control = batch.attributes & 0x20;
        require((batch.attributes & 7) <= 4);
        if (batch.producer_id >= 0 && !control) /* a negative one is none, as in Kafka */
            require(batch.base_sequence >= 0 && (batch.producer_epoch >= 0 || !transactional));
        memset(bytes, 0, 8); /* what the broker does before it stores */
        require(mqd_batch_decode(bytes, length, &stored) == 0);
    }
    if (mqd_batch_decode(bytes, length, &stored) == 0)
        require(stored.size_bytes >= 61 && stored.base_offset >= 0 && stored.last_offset_delta >= 0 &&
                stored.base_offset + stored.last_offset_delta >= 0);
    free(bytes);
    return 0;
}
