#include "base/crc32c.h"
#include "mqd_test.h"

static const char *const names[] = {"bitwise", "table", "one stream", "3-way"};

/* RFC 3720 B.4 and the well-known check value. */
TEST(known_values)
{
    uint8_t zeros[32] = {0}, ones[32], rising[32];
    memset(ones, 0xff, sizeof ones);
    for (int i = 0; i < 32; i++)
        rising[i] = (uint8_t)i;
    for (int kind = 0; kind < MQD_CRC32C_KIND_COUNT; kind++) {
        if (!mqd_crc32c_available(kind)) {
            test_message("%s is not available here", names[kind]);
            continue;
        }
        CHECK_EQUAL(mqd_crc32c_using(kind, 0, zeros, 32), 0x8a9136aau);
        CHECK_EQUAL(mqd_crc32c_using(kind, 0, ones, 32), 0x62a8ab43u);
        CHECK_EQUAL(mqd_crc32c_using(kind, 0, rising, 32), 0x46dd794eu);
        CHECK_EQUAL(mqd_crc32c_using(kind, 0, "123456789", 9), 0xe3069283u);
        CHECK_EQUAL(mqd_crc32c_using(kind, 0, "", 0), 0);
    }
    CHECK_EQUAL(mqd_crc32c(0, "123456789", 9), 0xe3069283u);
    CHECK_EQUAL(mqd_crc32c(mqd_crc32c(0, "1234", 4), "56789", 5), 0xe3069283u);
}

/* Every size up to 2048, at changing alignments; the buffer ends where the data ends, so that an
 * overrun is detected. */
TEST(every_size_equals_the_definition)
{
    uint64_t seed = 1;
    for (size_t size = 0; size <= 2048; size++) {
        size_t shift = size % 11 % 8;
        uint8_t *memory = malloc(size + shift + (size == 0));
        uint8_t *bytes = memory + shift;
        for (size_t i = 0; i < size; i++)
            bytes[i] = (uint8_t)test_random(&seed);
        uint32_t start = (uint32_t)test_random(&seed);
        uint32_t expected = mqd_crc32c_using(MQD_CRC32C_BITWISE, start, bytes, size);
        for (int kind = 1; kind < MQD_CRC32C_KIND_COUNT; kind++)
            if (mqd_crc32c_available(kind) && mqd_crc32c_using(kind, start, bytes, size) != expected) {
                TEST_FAIL("%s differs at size %zu", names[kind], size);
                free(memory);
                return;
            }
        free(memory);
    }
}

TEST(random_sizes_and_cuts)
{
    enum { SIZE_MAX_BYTES = 70000 };
    uint64_t seed = 2;
    uint8_t *bytes = malloc(SIZE_MAX_BYTES);
    for (int i = 0; i < SIZE_MAX_BYTES; i++)
        bytes[i] = (uint8_t)test_random(&seed);
    int rounds = test_long() ? 3000 : 150;
    for (int round = 0; round < rounds; round++) {
        size_t begin = test_random(&seed) % 64;
        size_t size = test_random(&seed) % (SIZE_MAX_BYTES - 64);
        size_t cut = size ? test_random(&seed) % size : 0;
        uint32_t expected = mqd_crc32c_using(MQD_CRC32C_BITWISE, 0, bytes + begin, size);
        uint32_t whole = mqd_crc32c(0, bytes + begin, size);
        uint32_t pieces = mqd_crc32c(mqd_crc32c(0, bytes + begin, cut), bytes + begin + cut, size - cut);
        uint32_t by_table = mqd_crc32c_using(MQD_CRC32C_TABLE, 0, bytes + begin, size);
        if (whole != expected || pieces != expected || by_table != expected) {
            TEST_FAIL("round %d: size %zu at %zu cut at %zu", round, size, begin, cut);
            break;
        }
    }
    free(bytes);
}

TEST(any_flipped_bit_is_detected)
{
    uint8_t bytes[777];
    memset(bytes, 0x5a, sizeof bytes);
    uint32_t good = mqd_crc32c(0, bytes, sizeof bytes);
    for (size_t bit = 0; bit < 8 * sizeof bytes; bit++) {
        bytes[bit / 8] ^= (uint8_t)(1u << (bit % 8));
        CHECK(mqd_crc32c(0, bytes, sizeof bytes) != good);
        bytes[bit / 8] ^= (uint8_t)(1u << (bit % 8));
    }
}
