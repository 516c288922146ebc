/* See codec/codec.h.
 *
 * The input comes from a peer and is not trusted. The output goes to a buffer that grows as needed,
 * up to size_max, so a decompression bomb costs only the memory that it fills. gzip and zstd may
 * consist of several members or frames, as Kafka's own readers allow; LZ4 is one frame.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "codec/library.h"

#define START_BYTES ((size_t)64 << 10)
#define GROWTH_FACTOR 4
#define KEPT_BYTES_MAX ((size_t)1 << 20) /* of a thread's buffer, after mqd_decompress_trim() */
#define GZIP_WINDOW (16 + 15)            /* inflateInit2: a gzip header, a window of 32 KiB */
#define XERIAL_HEADER_BYTES 16
/* an element of two or three bytes yields at most 64 bytes; the output size that a block states is
 * checked against this ratio before memory is allocated */
#define SNAPPY_RATIO_MAX ((size_t)64)
#define LZ4_FLAGS_AT 4
#define LZ4_FLAG_INDEPENDENT 0x20

struct workspace {
    uint8_t *bytes;
    size_t capacity, length;
    struct mqd_zlib_stream gzip;
    bool gzip_ready;
    void *lz4, *zstd;
};

/* The input and output of one step of a codec. The step replaces in_bytes and out_bytes, the
 * available sizes, with the numbers of bytes that it consumed and produced. */
struct step {
    const uint8_t *in;
    size_t in_bytes;
    uint8_t *out;
    size_t out_bytes;
    bool ended; /* a member or frame is complete */
    const char *problem;
};

static pthread_key_t key;
static pthread_once_t key_once = PTHREAD_ONCE_INIT;

static void workspace_free(void *argument)
{
    struct workspace *workspace = argument;
    if (workspace->gzip_ready)
        mqd_codec_functions.inflateEnd(&workspace->gzip);
    if (workspace->lz4)
        mqd_codec_functions.LZ4F_freeDecompressionContext(workspace->lz4);
    if (workspace->zstd)
        mqd_codec_functions.ZSTD_freeDCtx(workspace->zstd);
    free(workspace->bytes);
    free(workspace);
}

static void make_key(void)
{
    pthread_key_create(&key, workspace_free);
}

static struct workspace *workspace_of_thread(bool create)
{
    pthread_once(&key_once, make_key);
    struct workspace *workspace = pthread_getspecific(key);
    if (!workspace && create && (workspace = calloc(1, sizeof *workspace)) && pthread_setspecific(key, workspace)) {
        free(workspace);
        workspace = NULL;
    }
    return workspace;
}

/* Ensures at least one free byte: grows a full buffer. Returns false if out of memory. */
static bool make_room(struct workspace *workspace, size_t start_bytes, size_t size_max)
{
    if (workspace->length < workspace->capacity)
        return true;
    size_t new_capacity = workspace->capacity ? workspace->capacity * GROWTH_FACTOR : start_bytes;
    if (new_capacity > size_max + 1)
        /* the extra byte distinguishes output of exactly the bound from output beyond it */
        new_capacity = size_max + 1;
    if (new_capacity <= workspace->capacity)
        new_capacity = workspace->capacity + 1;
    uint8_t *bytes = realloc(workspace->bytes, new_capacity);
    if (!bytes)
        return false;
    workspace->bytes = bytes;
    workspace->capacity = new_capacity;
    return true;
}

/* ---- the codecs: reset() runs before each member; it returns false if out of memory ---- */

static bool gzip_reset(struct workspace *workspace)
{
    if (workspace->gzip_ready)
        return mqd_codec_functions.inflateReset(&workspace->gzip) == Z_OK;
    workspace->gzip = (struct mqd_zlib_stream){0};
    workspace->gzip_ready =
        mqd_codec_functions.inflateInit2_(&workspace->gzip, GZIP_WINDOW, mqd_codec_functions.zlibVersion(),
                                          (int)sizeof workspace->gzip) == Z_OK;
    return workspace->gzip_ready;
}

static unsigned clamp_to_uint(size_t bytes)
{
    return bytes > UINT32_MAX ? UINT32_MAX : (unsigned)bytes;
}

static void gzip_step(struct workspace *workspace, struct step *step)
{
    struct mqd_zlib_stream *stream = &workspace->gzip;
    unsigned in = clamp_to_uint(step->in_bytes), out = clamp_to_uint(step->out_bytes);
    stream->next_in = step->in, stream->avail_in = in;
    stream->next_out = step->out, stream->avail_out = out;
    int code = mqd_codec_functions.inflate(stream, 0);
    step->in_bytes = in - stream->avail_in;
    step->out_bytes = out - stream->avail_out;
    step->ended = code == Z_STREAM_END;
    if (code != Z_OK && code != Z_STREAM_END && code != Z_BUF_ERROR)
        step->problem = stream->msg ? stream->msg : "not gzip";
}

static bool lz4_reset(struct workspace *workspace)
{
    if (workspace->lz4)
        mqd_codec_functions.LZ4F_resetDecompressionContext(workspace->lz4);
    else if (mqd_codec_functions.LZ4F_isError(
                 mqd_codec_functions.LZ4F_createDecompressionContext(&workspace->lz4, LZ4F_VERSION)))
        workspace->lz4 = NULL;
    return workspace->lz4 != NULL;
}

static void lz4_step(struct workspace *workspace, struct step *step)
{
    size_t result = mqd_codec_functions.LZ4F_decompress(workspace->lz4, step->out, &step->out_bytes, step->in,
                                                        &step->in_bytes, NULL);
    if (mqd_codec_functions.LZ4F_isError(result))
        step->problem = mqd_codec_functions.LZ4F_getErrorName(result);
    step->ended = result == 0;
}

static bool zstd_reset(struct workspace *workspace)
{
    if (!workspace->zstd)
        workspace->zstd = mqd_codec_functions.ZSTD_createDCtx();
    else
        mqd_codec_functions.ZSTD_DCtx_reset(workspace->zstd, ZSTD_RESET_SESSION_ONLY);
    return workspace->zstd != NULL;
}

static void zstd_step(struct workspace *workspace, struct step *step)
{
    struct mqd_zstd_in in = {step->in, step->in_bytes, 0};
    struct mqd_zstd_out out = {step->out, step->out_bytes, 0};
    size_t result = mqd_codec_functions.ZSTD_decompressStream(workspace->zstd, &out, &in);
    step->in_bytes = in.position;
    step->out_bytes = out.position;
    if (mqd_codec_functions.ZSTD_isError(result))
        step->problem = mqd_codec_functions.ZSTD_getErrorName(result);
    step->ended = result == 0;
}

static const struct stream {
    bool (*reset)(struct workspace *workspace);
    void (*step)(struct workspace *workspace, struct step *step);
    bool single_member; /* bytes after the first member are an error */
} streams[] = {[MQD_CODEC_GZIP] = {gzip_reset, gzip_step, false},
               [MQD_CODEC_LZ4] = {lz4_reset, lz4_step, true},
               [MQD_CODEC_ZSTD] = {zstd_reset, zstd_step, false}};

static int decompress_stream(struct workspace *workspace, const struct stream *stream, const uint8_t *data,
                             size_t size_bytes, size_t size_max, const char **reason)
{
    size_t start_bytes = size_bytes * GROWTH_FACTOR > START_BYTES ? size_bytes * GROWTH_FACTOR : START_BYTES;
    if (!stream->reset(workspace))
        return MQD_CODEC_NO_MEMORY;
    for (;;) {
        if (!make_room(workspace, start_bytes, size_max))
            return MQD_CODEC_NO_MEMORY;
        size_t room = workspace->capacity - workspace->length;
        struct step step = {data, size_bytes, workspace->bytes + workspace->length, room, false, NULL};
        stream->step(workspace, &step);
        if (step.problem) {
            *reason = step.problem;
            return MQD_CODEC_DAMAGED;
        }
        workspace->length += step.out_bytes;
        data += step.in_bytes;
        size_bytes -= step.in_bytes;
        if (workspace->length > size_max)
            return MQD_CODEC_TOO_LARGE;
        if (step.ended && size_bytes == 0)
            return 0;
        if (step.ended && stream->single_member) {
            *reason = "bytes follow the frame";
            return MQD_CODEC_DAMAGED;
        }
        if (step.ended && !stream->reset(workspace))
            return MQD_CODEC_NO_MEMORY;
        *reason = "it is cut off";
        /* the output has room, but no more input can be consumed */
        if (!step.ended && step.out_bytes < room && (size_bytes == 0 || step.in_bytes == 0))
            return MQD_CODEC_DAMAGED;
    }
}

/* ---- snappy: blocks, not a stream ---- */

static int decompress_block(struct workspace *workspace, const uint8_t *data, size_t size_bytes, size_t size_max,
                            const char **reason)
{
    size_t length;
    *reason = "not a snappy block";
    if (mqd_codec_functions.snappy_uncompressed_length((const char *)data, size_bytes, &length) != SNAPPY_OK)
        return MQD_CODEC_DAMAGED;
    if (length > size_max - workspace->length)
        return MQD_CODEC_TOO_LARGE;
    if (length > SNAPPY_RATIO_MAX * size_bytes + SNAPPY_RATIO_MAX) {
        *reason = "a snappy block states an impossibly large size";
        return MQD_CODEC_DAMAGED;
    }
    while (workspace->capacity - workspace->length < length) {
        size_t before = workspace->length;
        workspace->length = workspace->capacity; /* as if full, so that make_room grows the buffer */
        bool grown = make_room(workspace, length > START_BYTES ? length : START_BYTES, size_max);
        workspace->length = before;
        if (!grown)
            return MQD_CODEC_NO_MEMORY;
    }
    if (mqd_codec_functions.snappy_uncompress((const char *)data, size_bytes,
                                              (char *)workspace->bytes + workspace->length, &length) != SNAPPY_OK)
        return MQD_CODEC_DAMAGED;
    workspace->length += length;
    return 0;
}

static int decompress_snappy(struct workspace *workspace, const uint8_t *data, size_t size_bytes, size_t size_max,
                             const char **reason)
{
    static const uint8_t magic[8] = "\x82SNAPPY";
    if (size_bytes < sizeof magic || memcmp(data, magic, sizeof magic) != 0)
        return decompress_block(workspace, data, size_bytes, size_max, reason);
    *reason = "a snappy stream's header is cut off";
    if (size_bytes < XERIAL_HEADER_BYTES)
        return MQD_CODEC_DAMAGED;
    const uint8_t *at = data + XERIAL_HEADER_BYTES, *end = data + size_bytes;
    *reason = "a snappy block is cut off";
    while (at < end) {
        if (end - at < 4)
            return MQD_CODEC_DAMAGED;
        uint32_t block_bytes = (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
        at += 4;
        if (block_bytes == 0 || block_bytes > (size_t)(end - at))
            return MQD_CODEC_DAMAGED;
        int error = decompress_block(workspace, at, block_bytes, size_max, reason);
        if (error)
            return error;
        *reason = "a snappy block is cut off";
        at += block_bytes;
    }
    return 0;
}

int64_t mqd_decompress(uint8_t codec, const uint8_t *data, size_t size_bytes, size_t size_max, const uint8_t **records,
                       const char **reason)
{
    struct workspace *workspace = workspace_of_thread(true);
    if (!workspace)
        return MQD_CODEC_NO_MEMORY;
    workspace->length = 0;
    int error;
    if (codec == MQD_CODEC_LZ4 && size_bytes > LZ4_FLAGS_AT && !(data[LZ4_FLAGS_AT] & LZ4_FLAG_INDEPENDENT)) {
        *reason = "its blocks depend on each other, which Java's consumers cannot read";
        error = MQD_CODEC_DAMAGED;
    } else {
        error = codec == MQD_CODEC_SNAPPY
                    ? decompress_snappy(workspace, data, size_bytes, size_max, reason)
                    : decompress_stream(workspace, &streams[codec], data, size_bytes, size_max, reason);
    }
    *records = workspace->bytes;
    return error ? error : (int64_t)workspace->length;
}

void mqd_decompress_trim(void)
{
    struct workspace *workspace = workspace_of_thread(false);
    if (!workspace || workspace->capacity <= KEPT_BYTES_MAX)
        return;
    free(workspace->bytes);
    workspace->bytes = NULL;
    workspace->capacity = workspace->length = 0;
}
