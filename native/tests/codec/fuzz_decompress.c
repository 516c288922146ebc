/* fuzz: -max_len=4096 */
/* Decompression of any bytes: the output stays within the bound and can be read to its end. The
 * first byte selects the codec. */
#include <stdlib.h>
#include <string.h>

#include "codec/codec.h"

#define SIZE_MAX_BYTES (64 << 10)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 1)
        return 0;
    uint8_t codec = (uint8_t)(MQD_CODEC_GZIP + data[0] % MQD_CODEC_ZSTD);
    const uint8_t *records = NULL;
    const char *reason = NULL;
    if (!mqd_codec_available(codec))
        return 0;
    int64_t length = mqd_decompress(codec, data + 1, size - 1, SIZE_MAX_BYTES, &records, &reason);
    if (length > SIZE_MAX_BYTES || (length == MQD_CODEC_DAMAGED && !reason))
        abort();
    uint8_t sum = 0;
    for (int64_t i = 0; i < length; i++)
        sum ^= records[i];
    __asm__ volatile("" : : "r"(sum));
    return 0;
}
