/* Reads the keys of records for groups with FIFO (share/fifo.c): once per group, when the first
 * member reaches them, from pages that are in memory.
 *
 *   small batches    immediately, each time that an acquisition needs them
 *   larger batches   a share-partition keeps one such batch until the keys of all its records are
 *                    in the state. A thread of the worker's pool decompresses it; then the slot is
 *                    woken, and the acquisitions that wait there continue
 *
 * The key is the record's own key, or the value of the last header with the configured name. Only
 * hashes are kept. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "codec/codec.h"
#include "server/share/share.h"
#include "wire/record_scan.h"

#define ROUND_BYTES_MAX (512u << 10) /* bytes of batches whose keys one acquisition reads; at least one batch */
#define INLINE_BYTES_MAX (8u << 10)  /* as in server/check/check_records.c */
#define INLINE_RECORDS_BYTES_MAX (32u << 10)
#define ATTRIBUTES_AT 22 /* position of the attributes' low byte in a batch's header */
#define TOO_LARGE (-1)
#define KEPT_BYTES_MAX (64u << 10) /* memory kept between acquisitions */

/* a placeholder in batch->records: the records are in shares->keys, whose memory moves when it
 * grows */
static const struct mqd_share_record in_shared_buffer[1];

static uint32_t hash_of(const uint8_t *key, int32_t key_bytes)
{
    uint32_t hash = mqd_crc32c(0, key, (size_t)key_bytes);
    hash = (hash ^ hash >> 16) * 0x9e3779b1u;
    hash ^= hash >> 15;
    return hash ? hash : 1;
}

static bool reserve(struct mqd_share_keys *keys)
{
    if (keys->count < keys->capacity)
        return true;
    uint32_t capacity = keys->capacity ? keys->capacity * 2 : 1024;
    struct mqd_share_record *grown = realloc(keys->records, capacity * sizeof *grown);
    if (!grown)
        return false;
    keys->records = grown;
    keys->capacity = capacity;
    return true;
}

/* Appends the keys of the batch in keys->bytes. Returns 0; a Kafka error code for the client; or
 * TOO_LARGE: the records would decompress to more than `size_max` bytes. */
static int16_t read_batch(struct mqd_share_keys *keys, uint32_t size_max)
{
    struct mqd_batch batch;
    struct mqd_records records;
    struct mqd_record record;
    const uint8_t *bytes = keys->bytes + MQD_BATCH_HEADER_BYTES;
    const char *reason;
    int result;
    if (mqd_batch_decode(keys->bytes, MQD_BATCH_HEADER_BYTES, &batch) < 0 || !reserve(keys))
        return MQD_KAFKA_CORRUPT_MESSAGE;
    int64_t size_bytes = keys->size_bytes - MQD_BATCH_HEADER_BYTES;
    if (keys->codec)
        size_bytes = mqd_decompress(keys->codec, bytes, (size_t)size_bytes, size_max, &bytes, &reason);
    if (size_bytes == MQD_CODEC_TOO_LARGE && size_max < MQD_RECORDS_BYTES_MAX)
        return TOO_LARGE;
    if (size_bytes < 0)
        return size_bytes == MQD_CODEC_NO_MEMORY ? MQD_KAFKA_STORAGE_ERROR : MQD_KAFKA_CORRUPT_MESSAGE;
    mqd_records_begin(&records, &batch, bytes, (uint64_t)size_bytes);
    while ((result = mqd_records_next(&records, &record)) > 0) {
        const uint8_t *key = record.key;
        int32_t key_bytes = record.key_bytes;
        if (keys->header_bytes &&
            !mqd_record_header(&record, (const char *)keys->header, keys->header_bytes, &key, &key_bytes))
            key_bytes = -1;
        if (!reserve(keys))
            return MQD_KAFKA_STORAGE_ERROR;
        keys->records[keys->count++] =
            (struct mqd_share_record){record.offset_delta, key_bytes < 0 ? 0 : hash_of(key, key_bytes)};
    }
    return result < 0 ? MQD_KAFKA_CORRUPT_MESSAGE : 0;
}

/* ---- larger batches, which many acquisitions may need ---- */

static int run_read(void *argument)
{
    struct mqd_share_keys *keys = argument;
    keys->error = read_batch(keys, MQD_RECORDS_BYTES_MAX);
    free(keys->bytes);
    keys->bytes = NULL;
    mqd_decompress_trim();
    return 0;
}

void mqd_share_keys_forget(struct mqd_share_owned *owned)
{
    if (!owned->keys)
        return;
    free(owned->keys->records);
    free(owned->keys->bytes);
    free(owned->keys);
    owned->keys = NULL;
}

static bool keys_match_batch(const struct mqd_share_keys *keys, const struct mqd_share_owned *owned,
                             const struct mqd_share_batch *batch)
{
    return keys->first == batch->first && keys->last == batch->last &&
           keys->fifo == owned->partition.state.settings.fifo && keys->leader_epoch == owned->partition.leader_epoch;
}

/* Takes the keys of a larger batch. Returns false if they have not been read yet. */
static bool take_larger(struct mqd_share_owned *owned, struct mqd_share_batch *batch, int16_t *error)
{
    if (!owned->keys || owned->reading_keys || !keys_match_batch(owned->keys, owned, batch))
        return false;
    batch->records = owned->keys->records;
    batch->record_count = owned->keys->count;
    *error = owned->keys->error;
    if (*error)
        mqd_share_keys_forget(owned);
    return true;
}

/* Reads the keys of the batch whose bytes are in shares->keys; if it is compressed, a thread of the
 * pool does so. */
static int16_t read_larger(struct mqd_reactor *r, struct mqd_share_owned *owned, const struct mqd_share_batch *batch)
{
    struct mqd_share_keys *loaded = &r->shares->keys, *keys;
    if (owned->reading_keys)
        return 0;
    mqd_share_keys_forget(owned);
    if (!(keys = malloc(sizeof *keys)))
        return MQD_KAFKA_STORAGE_ERROR;
    *keys = *loaded;
    loaded->bytes = NULL;
    loaded->capacity_bytes = 0;
    keys->first = batch->first;
    keys->last = batch->last;
    keys->leader_epoch = owned->partition.leader_epoch;
    keys->fifo = owned->partition.state.settings.fifo;
    keys->records = NULL;
    keys->count = keys->capacity = 0;
    owned->keys = keys;
    uint64_t token = mqd_token(MQD_TOKEN_SHARE, MQD_SHARE_TOKEN_KEYS | owned->index);
    if (keys->codec && mqd_poll_run(r->poll, -1, run_read, keys, token) == 0)
        owned->reading_keys = 1;
    else
        run_read(keys); /* reads them here: the batch is not compressed, or the pool is full */
    return 0;
}

/* ---- the interface for the owner ---- */

static int16_t load(struct mqd_share_keys *keys, int fd, uint32_t position, uint32_t size_bytes)
{
    uint8_t *grown = size_bytes > keys->capacity_bytes ? realloc(keys->bytes, size_bytes) : keys->bytes;
    if (!grown)
        return MQD_KAFKA_STORAGE_ERROR;
    keys->capacity_bytes = size_bytes > keys->capacity_bytes ? size_bytes : keys->capacity_bytes;
    keys->bytes = grown;
    keys->size_bytes = size_bytes;
    if (pread(fd, grown, size_bytes, position) != (ssize_t)size_bytes)
        return MQD_KAFKA_CORRUPT_MESSAGE;
    keys->codec = grown[ATTRIBUTES_AT] & MQD_ATTRIBUTE_COMPRESSION;
    return keys->codec && !mqd_codec_available(keys->codec) ? MQD_KAFKA_UNSUPPORTED_COMPRESSION_TYPE : 0;
}

/* Reads the keys of one batch. Sets batch->records: to `in_shared_buffer` if the keys were appended
 * to shares->keys, or to the records in owned->keys for a larger batch. batch->records remains NULL
 * if a thread reads the keys, or if an earlier batch uses owned->keys (`is_kept_batch_in_use`). */
static int16_t read_batch_keys(struct mqd_reactor *r, struct mqd_share_owned *owned, int fd,
                               struct mqd_share_batch *batch, uint32_t position, uint32_t size_bytes,
                               bool is_kept_batch_in_use)
{
    struct mqd_share_keys *keys = &r->shares->keys;
    uint32_t old_count = keys->count;
    int16_t error = load(keys, fd, position, size_bytes);
    if (error)
        return error;
    error = size_bytes > INLINE_BYTES_MAX ? TOO_LARGE : read_batch(keys, INLINE_RECORDS_BYTES_MAX);
    if (error == TOO_LARGE) {
        keys->count = old_count;
        if (is_kept_batch_in_use)
            return 0;
        error = read_larger(r, owned, batch);
        if (!error)
            take_larger(owned, batch, &error);
        return error;
    }
    batch->records = in_shared_buffer;
    batch->record_count = keys->count - old_count;
    return error;
}

int16_t mqd_share_keys_read(struct mqd_reactor *r, struct mqd_share_owned *owned, int fd,
                            struct mqd_share_batch *batches, const uint32_t *batch_positions, uint32_t count)
{
    struct mqd_share_keys *keys = &r->shares->keys;
    const struct mqd_share_group_settings *settings = &owned->partition.settings;
    int64_t next_key_offset = mqd_share_next_key_offset(&owned->partition.state);
    uint32_t read_bytes = 0, next_key = 0;
    int16_t error = 0;
    bool is_kept_batch_in_use = false;
    if (next_key_offset == MQD_SHARE_NEVER)
        return 0;
    if (owned->keys && !owned->reading_keys && owned->keys->last < next_key_offset)
        mqd_share_keys_forget(owned);
    keys->count = 0;
    keys->header_bytes = settings->fifo_header_bytes;
    memcpy(keys->header, settings->fifo_header, settings->fifo_header_bytes);
    for (uint32_t i = 0; i < count && read_bytes < ROUND_BYTES_MAX && !error; i++) {
        uint32_t size_bytes = batch_positions[i + 1] - batch_positions[i];
        if (batches[i].skipped || batches[i].last < next_key_offset)
            continue;
        if (!take_larger(owned, &batches[i], &error)) {
            error = read_batch_keys(r, owned, fd, &batches[i], batch_positions[i], size_bytes, is_kept_batch_in_use);
            read_bytes += size_bytes;
        }
        if (!batches[i].records)
            break;
        is_kept_batch_in_use |= batches[i].records != in_shared_buffer;
    }
    for (uint32_t i = 0; i < count; i++)
        if (batches[i].records == in_shared_buffer) {
            batches[i].records = &keys->records[next_key];
            next_key += batches[i].record_count;
        }
    return error;
}

void mqd_share_keys_done(struct mqd_shares *shares)
{
    struct mqd_share_keys *keys = &shares->keys;
    if (keys->capacity * sizeof *keys->records > KEPT_BYTES_MAX) {
        free(keys->records);
        keys->records = NULL;
        keys->capacity = 0;
    }
    if (keys->capacity_bytes > KEPT_BYTES_MAX) {
        free(keys->bytes);
        keys->bytes = NULL;
        keys->capacity_bytes = 0;
    }
}
