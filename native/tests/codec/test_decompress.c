/* Decompression by the system's libraries (codec/): data written by other implementations, and
 * damaged data. A codec whose library is missing is named and skipped. */
#include "codec/codec.h"
#include "mqd_test.h"

/* "record N of the batch, " twenty times, N from 0 to 6, by cramjam 2.11 */
#define PLAIN_BYTES 460
static const uint8_t as_gzip[] = {
    0x1f, 0x8b, 0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0xff, 0xed, 0xce, 0xb9, 0x09, 0x00, 0x20, 0x10, 0x04, 0xc0,
    0x56, 0xb6, 0x00, 0x03, 0xff, 0x7e, 0x7c, 0x31, 0x13, 0x8e, 0xeb, 0x1f, 0x03, 0xd3, 0x05, 0x1b, 0x30, 0x9d, 0x68,
    0x64, 0xb4, 0x2d, 0x1d, 0x16, 0x7b, 0x42, 0xd7, 0x40, 0x2d, 0xda, 0x96, 0x81, 0x5c, 0x76, 0x9c, 0x3d, 0xe7, 0xc0,
    0x39, 0x72, 0x4e, 0x9c, 0x33, 0xe7, 0x1f, 0x7c, 0x07, 0x0f, 0x70, 0xf0, 0xca, 0xd9, 0xcc, 0x01, 0x00, 0x00};
static const uint8_t as_lz4[] = {
    0x04, 0x22, 0x4d, 0x18, 0x70, 0x40, 0xad, 0x44, 0x00, 0x00, 0x00, 0xf3, 0x08, 0x72, 0x65, 0x63, 0x6f, 0x72,
    0x64, 0x20, 0x30, 0x20, 0x6f, 0x66, 0x20, 0x74, 0x68, 0x65, 0x20, 0x62, 0x61, 0x74, 0x63, 0x68, 0x2c, 0x20,
    0x17, 0x00, 0x1f, 0x31, 0x17, 0x00, 0x03, 0x1f, 0x32, 0x17, 0x00, 0x03, 0x1f, 0x33, 0x17, 0x00, 0x03, 0x1f,
    0x34, 0x17, 0x00, 0x03, 0x1f, 0x35, 0x17, 0x00, 0x03, 0x1f, 0x36, 0x17, 0x00, 0x03, 0x0f, 0xa1, 0x00, 0xff,
    0x0d, 0x50, 0x74, 0x63, 0x68, 0x2c, 0x20, 0x8e, 0x1a, 0xe4, 0xea, 0x00, 0x00, 0x00, 0x00};
static const uint8_t as_zstd[] = {0x28, 0xb5, 0x2f, 0xfd, 0x60, 0xcc, 0x00, 0xb5, 0x02, 0x00, 0xa4, 0x02, 0x72, 0x65,
                                  0x63, 0x6f, 0x72, 0x64, 0x20, 0x30, 0x20, 0x6f, 0x66, 0x20, 0x74, 0x68, 0x65, 0x20,
                                  0x62, 0x61, 0x74, 0x63, 0x68, 0x2c, 0x20, 0x31, 0x32, 0x33, 0x34, 0x35, 0x36, 0x30,
                                  0x31, 0x32, 0x33, 0x34, 0x35, 0x36, 0x30, 0x31, 0x32, 0x33, 0x34, 0x35, 0x14, 0x00,
                                  0xa0, 0x13, 0xa0, 0x1c, 0x50, 0x18, 0x50, 0x04, 0x28, 0x07, 0x14, 0x06, 0x14, 0x01,
                                  0xca, 0x01, 0x85, 0x01, 0x45, 0x80, 0x72, 0x40, 0x61, 0x40, 0x11, 0xa0, 0x1c, 0x50,
                                  0x18, 0x50, 0x04, 0x28, 0x07, 0x14, 0x06, 0x94, 0xa8, 0xd9, 0x6c, 0x02};
static const uint8_t as_snappy[] = {
    0xcc, 0x03, 0x58, 0x72, 0x65, 0x63, 0x6f, 0x72, 0x64, 0x20, 0x30, 0x20, 0x6f, 0x66, 0x20, 0x74, 0x68, 0x65, 0x20,
    0x62, 0x61, 0x74, 0x63, 0x68, 0x2c, 0x20, 0x0d, 0x17, 0x00, 0x31, 0x56, 0x17, 0x00, 0x00, 0x32, 0x56, 0x17, 0x00,
    0x00, 0x33, 0x56, 0x17, 0x00, 0x00, 0x34, 0x56, 0x17, 0x00, 0x00, 0x35, 0x56, 0x17, 0x00, 0x00, 0x36, 0x56, 0x17,
    0x00, 0xfe, 0xa1, 0x00, 0xfe, 0xa1, 0x00, 0xfe, 0xa1, 0x00, 0xfe, 0xa1, 0x00, 0x8e, 0xa1, 0x00};

static const struct {
    uint8_t codec;
    const char *name;
    const uint8_t *bytes;
    size_t size_bytes;
    bool several; /* members or frames */
} vectors[] = {{MQD_CODEC_GZIP, "gzip", as_gzip, sizeof as_gzip, true},
               {MQD_CODEC_SNAPPY, "snappy", as_snappy, sizeof as_snappy, false},
               {MQD_CODEC_LZ4, "lz4", as_lz4, sizeof as_lz4, false},
               {MQD_CODEC_ZSTD, "zstd", as_zstd, sizeof as_zstd, true}};
#define VECTOR_COUNT (sizeof vectors / sizeof *vectors)

static const char *plain(void)
{
    static char text[PLAIN_BYTES + 1];
    for (int i = 0, at = 0; i < 20; i++)
        at += snprintf(text + at, sizeof text - (size_t)at, "record %d of the batch, ", i % 7);
    return text;
}

static bool is_here(size_t index)
{
    bool here = mqd_codec_available(vectors[index].codec);
    if (!here)
        test_message("%s: %s is not installed", vectors[index].name, mqd_codec_library(vectors[index].codec));
    return here;
}

/* Copied to its exact size, so that ASan sees a read beyond it. */
static int64_t decompress(uint8_t codec, const uint8_t *bytes, size_t size_bytes, size_t size_max,
                          const uint8_t **records)
{
    const char *reason = NULL;
    uint8_t *copy = memcpy(malloc(size_bytes ? size_bytes : 1), bytes, size_bytes);
    int64_t length = mqd_decompress(codec, copy, size_bytes, size_max, records, &reason);
    if (length == MQD_CODEC_DAMAGED && !reason)
        TEST_FAIL("damage without a reason");
    free(copy);
    return length;
}

TEST(reads_output_of_other_implementations)
{
    for (size_t i = 0; i < VECTOR_COUNT; i++) {
        const uint8_t *records;
        if (!is_here(i))
            continue;
        for (int again = 0; again < 3; again++) { /* the contexts are reused */
            CHECK_EQUAL(decompress(vectors[i].codec, vectors[i].bytes, vectors[i].size_bytes, PLAIN_BYTES, &records),
                        PLAIN_BYTES);
            CHECK(memcmp(records, plain(), PLAIN_BYTES) == 0);
            CHECK_EQUAL(
                decompress(vectors[i].codec, vectors[i].bytes, vectors[i].size_bytes, PLAIN_BYTES - 1, &records),
                MQD_CODEC_TOO_LARGE);
        }
    }
}

TEST(damage)
{
    for (size_t i = 0; i < VECTOR_COUNT; i++) {
        const uint8_t *records;
        if (!is_here(i))
            continue;
        for (size_t size_bytes = 0; size_bytes < vectors[i].size_bytes; size_bytes++)
            CHECK(decompress(vectors[i].codec, vectors[i].bytes, size_bytes, 4096, &records) < 0);
        uint8_t *copy = malloc(vectors[i].size_bytes);
        for (size_t bit = 0; bit < 8 * vectors[i].size_bytes; bit++) {
            memcpy(copy, vectors[i].bytes, vectors[i].size_bytes);
            copy[bit / 8] ^= (uint8_t)(1 << bit % 8);
            CHECK(decompress(vectors[i].codec, copy, vectors[i].size_bytes, 4096, &records) <= 4096);
        }
        free(copy);
    }
}

TEST(several_members)
{
    for (size_t i = 0; i < VECTOR_COUNT; i++) {
        const uint8_t *records;
        if (!is_here(i) || vectors[i].codec == MQD_CODEC_SNAPPY)
            continue;
        size_t size_bytes = vectors[i].size_bytes;
        uint8_t *twice = malloc(2 * size_bytes);
        memcpy(twice, vectors[i].bytes, size_bytes);
        memcpy(twice + size_bytes, vectors[i].bytes, size_bytes);
        int64_t length = decompress(vectors[i].codec, twice, 2 * size_bytes, 4096, &records);
        CHECK_EQUAL(length, vectors[i].several ? 2 * PLAIN_BYTES : MQD_CODEC_DAMAGED);
        if (vectors[i].several)
            CHECK(memcmp(records, plain(), PLAIN_BYTES) == 0 &&
                  memcmp(records + PLAIN_BYTES, plain(), PLAIN_BYTES) == 0);
        CHECK_EQUAL(decompress(vectors[i].codec, twice, size_bytes + 3, 4096, &records), MQD_CODEC_DAMAGED);
        free(twice);
    }
}

TEST(xerial_blocks)
{
    if (!is_here(1))
        return;
    uint8_t stream[16 + 2 * (4 + sizeof as_snappy)] = "\x82SNAPPY\0\0\0\0\1\0\0\0\1";
    const uint8_t *records;
    for (size_t at = 16; at < sizeof stream; at += 4 + sizeof as_snappy) {
        stream[at + 3] = sizeof as_snappy;
        memcpy(stream + at + 4, as_snappy, sizeof as_snappy);
    }
    CHECK_EQUAL(decompress(MQD_CODEC_SNAPPY, stream, sizeof stream, 4096, &records), 2 * PLAIN_BYTES);
    CHECK_EQUAL(decompress(MQD_CODEC_SNAPPY, stream, sizeof stream - 1, 4096, &records), MQD_CODEC_DAMAGED);
    CHECK_EQUAL(decompress(MQD_CODEC_SNAPPY, stream, 12, 4096, &records), MQD_CODEC_DAMAGED);
    CHECK_EQUAL(decompress(MQD_CODEC_SNAPPY, (const uint8_t *)"\xff\xff\xff\xff\x07", 5, 1u << 31, &records),
                MQD_CODEC_DAMAGED);
}

TEST(linked_blocks_are_refused)
{
    const uint8_t *records;
    const char *reason = "";
    uint8_t linked[sizeof as_lz4];
    if (!is_here(2))
        return;
    memcpy(linked, as_lz4, sizeof as_lz4);
    linked[4] &= (uint8_t)~0x20;
    CHECK_EQUAL(mqd_decompress(MQD_CODEC_LZ4, linked, sizeof linked, 4096, &records, &reason), MQD_CODEC_DAMAGED);
    CHECK_CONTAINS(reason, "depend on each other");
}

/* 2 KiB that become 64 MiB: 512 blocks of one repeated byte. */
TEST(a_decompression_bomb_is_bounded)
{
    enum { BLOCKS = 512, BLOCK_BYTES = 128 << 10 };
    const uint8_t *records;
    if (!is_here(3))
        return;
    uint32_t size = (uint32_t)BLOCKS * BLOCK_BYTES;
    uint8_t *bomb = malloc(10 + 4 * BLOCKS), *at = bomb;
    static const uint8_t magic[] = {0x28, 0xb5, 0x2f, 0xfd, 0x80, 0x38}; /* a window of 128 KiB */
    memcpy(at, magic, sizeof magic), at += sizeof magic;
    memcpy(at, &size, 4), at += 4; /* little-endian, as this machine */
    for (int i = 0; i < BLOCKS; i++) {
        uint32_t head = (uint32_t)(i == BLOCKS - 1) | 1u << 1 | (uint32_t)BLOCK_BYTES << 3;
        memcpy(at, &head, 3), at += 3;
        *at++ = 'x';
    }
    size_t bomb_bytes = (size_t)(at - bomb);
    CHECK_EQUAL(decompress(MQD_CODEC_ZSTD, bomb, bomb_bytes, 1 << 20, &records), MQD_CODEC_TOO_LARGE);
    CHECK_EQUAL(decompress(MQD_CODEC_ZSTD, bomb, bomb_bytes, (size_t)size - 1, &records), MQD_CODEC_TOO_LARGE);
    CHECK_EQUAL(decompress(MQD_CODEC_ZSTD, bomb, bomb_bytes, size, &records), size);
    mqd_decompress_trim();
    free(bomb);
}
