/* Decompresses the records of a batch with the system's libraries.
 *
 * Concurrency: any thread. Each thread keeps its own contexts and buffer until it ends.
 * Source of the framings: Kafka's record format; RFC 1952 (gzip), xerial's stream (snappy), LZ4
 * frames with independent blocks (KIP-57), RFC 8878 (zstd).
 */
#ifndef MQD_CODEC_H
#define MQD_CODEC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* the codec numbers in a batch's attributes */
enum mqd_codec { MQD_CODEC_NONE, MQD_CODEC_GZIP, MQD_CODEC_SNAPPY, MQD_CODEC_LZ4, MQD_CODEC_ZSTD };

/* limit of the decompressed size of a batch's records, in every process */
#define MQD_RECORDS_BYTES_MAX (128u << 20)

enum mqd_codec_error {
    MQD_CODEC_DAMAGED = -1,   /* the bytes are not of that format */
    MQD_CODEC_TOO_LARGE = -2, /* the bytes decompress to more than size_max */
    MQD_CODEC_NO_MEMORY = -3
};

/* Whether this host has the codec's library. The first call loads it. */
bool mqd_codec_available(uint8_t codec);
const char *mqd_codec_library(uint8_t codec); /* the name of its file */

/* Returns the decompressed size, at most `size_max`; *records points to the bytes, which stay valid
 * until this thread's next call of any function here. Negative: enum mqd_codec_error; DAMAGED sets
 * `reason`. The codec must be available. */
int64_t mqd_decompress(uint8_t codec, const uint8_t *data, size_t size_bytes, size_t size_max, const uint8_t **records,
                       const char **reason);
/* Frees this thread's buffer if it is large. */
void mqd_decompress_trim(void);

#endif
