/* The functions of the codecs' libraries that mqd uses, declared here. No function of a codec may
 * be called before mqd_codec_available(codec) has returned true. Private to this folder.
 *
 * Source: the libraries' manuals; layouts and numbers are part of the ABI of the files named in
 * codec/README.md.
 */
#ifndef MQD_CODEC_LIBRARY_H
#define MQD_CODEC_LIBRARY_H

#include "codec/codec.h"

struct mqd_zlib_stream {
    const uint8_t *next_in;
    unsigned avail_in;
    unsigned long total_in;
    uint8_t *next_out;
    unsigned avail_out;
    unsigned long total_out;
    const char *msg;
    void *state, *zalloc, *zfree, *opaque;
    int data_type;
    unsigned long adler, reserved;
};
struct mqd_zstd_in {
    const void *bytes;
    size_t size_bytes, position;
};
struct mqd_zstd_out {
    void *bytes;
    size_t size_bytes, position;
};
enum { Z_OK = 0, Z_STREAM_END = 1, Z_BUF_ERROR = -5, LZ4F_VERSION = 100, ZSTD_RESET_SESSION_ONLY = 1, SNAPPY_OK = 0 };

/* FUNCTION(result, name, parameters) */
#define MQD_ZLIB_FUNCTIONS(FUNCTION)                                                                                   \
    FUNCTION(int, inflateInit2_, (struct mqd_zlib_stream *, int, const char *, int))                                   \
    FUNCTION(int, inflate, (struct mqd_zlib_stream *, int))                                                            \
    FUNCTION(int, inflateReset, (struct mqd_zlib_stream *))                                                            \
    FUNCTION(int, inflateEnd, (struct mqd_zlib_stream *))                                                              \
    FUNCTION(const char *, zlibVersion, (void))
#define MQD_SNAPPY_FUNCTIONS(FUNCTION)                                                                                 \
    FUNCTION(int, snappy_uncompressed_length, (const char *, size_t, size_t *))                                        \
    FUNCTION(int, snappy_uncompress, (const char *, size_t, char *, size_t *))
#define MQD_LZ4_FUNCTIONS(FUNCTION)                                                                                    \
    FUNCTION(size_t, LZ4F_createDecompressionContext, (void **, unsigned))                                             \
    FUNCTION(size_t, LZ4F_freeDecompressionContext, (void *))                                                          \
    FUNCTION(void, LZ4F_resetDecompressionContext, (void *))                                                           \
    FUNCTION(size_t, LZ4F_decompress, (void *, void *, size_t *, const void *, size_t *, const void *))                \
    FUNCTION(unsigned, LZ4F_isError, (size_t))                                                                         \
    FUNCTION(const char *, LZ4F_getErrorName, (size_t))
#define MQD_ZSTD_FUNCTIONS(FUNCTION)                                                                                   \
    FUNCTION(void *, ZSTD_createDCtx, (void))                                                                          \
    FUNCTION(size_t, ZSTD_freeDCtx, (void *))                                                                          \
    FUNCTION(size_t, ZSTD_DCtx_reset, (void *, int))                                                                   \
    FUNCTION(size_t, ZSTD_decompressStream, (void *, struct mqd_zstd_out *, struct mqd_zstd_in *))                     \
    FUNCTION(unsigned, ZSTD_isError, (size_t))                                                                         \
    FUNCTION(const char *, ZSTD_getErrorName, (size_t))

#define MQD_CODEC_FUNCTION(result, name, parameters) result(*name) parameters;
struct mqd_codec_functions {
    MQD_ZLIB_FUNCTIONS(MQD_CODEC_FUNCTION)
    MQD_SNAPPY_FUNCTIONS(MQD_CODEC_FUNCTION)
    MQD_LZ4_FUNCTIONS(MQD_CODEC_FUNCTION)
    MQD_ZSTD_FUNCTIONS(MQD_CODEC_FUNCTION)
};
#undef MQD_CODEC_FUNCTION
extern struct mqd_codec_functions mqd_codec_functions;

#endif
