#include "base/error.h"
#include "mqd_test.h"

enum { SIZE = 61 + 7 * 3 }; /* three records of the least size */
static uint8_t batch[SIZE + 64];

static void put(int at, int bytes, int64_t value)
{
    for (int i = 0; i < bytes; i++)
        batch[at + i] = (uint8_t)((uint64_t)value >> (8 * (bytes - 1 - i)));
}

static void seal(int size)
{
    put(17, 4, mqd_crc32c(0, batch + 21, (size_t)size - 21));
}

static void make(void)
{
    memset(batch, 0, sizeof batch);
    put(8, 4, SIZE - 12);
    put(12, 4, -1);
    batch[16] = 2;
    put(23, 4, 2);
    put(27, 8, 1000);
    put(35, 8, 1002);
    put(43, 8, -1);
    put(51, 2, -1);
    put(53, 4, -1);
    put(57, 4, 3);
    seal(SIZE);
}

/* In a separate block of exactly that size. */
static int16_t validate(uint64_t size, const char **reason)
{
    struct mqd_batch out;
    uint8_t *copy = malloc(size ? size : 1);
    memcpy(copy, batch, size);
    int16_t error = mqd_batch_validate(copy, size, &out, reason);
    free(copy);
    return error;
}

#define REFUSED(size, error, text)                                                                                     \
    do {                                                                                                               \
        const char *reason_;                                                                                           \
        CHECK_EQUAL(validate((size), &reason_), error);                                                                \
        CHECK(reason_);                                                                                                \
        CHECK_CONTAINS(reason_, text);                                                                                 \
    } while (0)

TEST(a_good_batch_is_decoded)
{
    make();
    put(0, 8, 0x0102030405060708);
    put(12, 4, 0x11121314);
    put(21, 2, 0x001c); /* zstd, log append time, transactional */
    put(43, 8, 0x2122232425262728);
    put(51, 2, 0x3132);
    put(53, 4, 0x41424344);
    seal(SIZE);
    struct mqd_batch out;
    const char *reason;
    CHECK_EQUAL(mqd_batch_validate(batch, SIZE, &out, &reason), 0);
    CHECK(reason == NULL);
    CHECK_EQUAL(out.base_offset, 0x0102030405060708);
    CHECK_EQUAL(out.size_bytes, SIZE);
    CHECK_EQUAL(out.partition_leader_epoch, 0x11121314);
    CHECK_EQUAL(out.crc, mqd_crc32c(0, batch + 21, SIZE - 21));
    CHECK_EQUAL(out.attributes, 0x1c);
    CHECK_EQUAL(out.last_offset_delta, 2);
    CHECK_EQUAL(out.base_timestamp_ms, 1000);
    CHECK_EQUAL(out.max_timestamp_ms, 1002);
    CHECK_EQUAL(out.producer_id, 0x2122232425262728);
    CHECK_EQUAL(out.producer_epoch, 0x3132);
    CHECK_EQUAL(out.base_sequence, 0x41424344);
    CHECK_EQUAL(out.record_count, 3);
}

TEST(base_offset_and_leader_epoch_are_outside_the_checksum)
{
    const char *reason;
    make();
    put(0, 8, 77);
    put(12, 4, 5);
    CHECK_EQUAL(validate(SIZE, &reason), 0);
    for (int at = 17; at < SIZE; at++) { /* every other byte is inside */
        batch[at] ^= 0x40;
        CHECK_EQUAL(validate(SIZE, &reason), 2);
        batch[at] ^= 0x40;
    }
}

TEST(every_truncated_batch_is_refused)
{
    const char *reason;
    make();
    REFUSED(0, 87, "no record batch");
    for (uint64_t size = 1; size < SIZE; size++) {
        CHECK_EQUAL(validate(size, &reason), 2);
        CHECK(reason);
    }
    REFUSED(SIZE + 1, 87, "exactly one batch");
    REFUSED(SIZE + 64, 87, "exactly one batch");
}

TEST(wrong_lengths_are_refused)
{
    static const int64_t lengths[] = {
        0, -1, 1, 48, INT32_MIN, INT32_MAX, INT32_MAX - 11, INT32_MAX - 12, SIZE - 12 + 1};
    make();
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        put(8, 4, lengths[i]);
        REFUSED(SIZE, 2, "batch length");
    }
    put(8, 4, SIZE - 13);
    REFUSED(SIZE, 87, "exactly one batch");
}

TEST(magic)
{
    make();
    batch[16] = 0;
    REFUSED(SIZE, 87, "magic 2");
    REFUSED(17, 87, "magic 2"); /* an old message set may be shorter than the new header */
    batch[16] = 1;
    REFUSED(SIZE, 87, "magic 2");
    batch[16] = 3;
    REFUSED(SIZE, 2, "magic");
    batch[16] = 0xff;
    REFUSED(SIZE, 2, "magic");
}

TEST(counts)
{
    make();
    put(57, 4, 0), put(23, 4, -1), seal(SIZE);
    REFUSED(SIZE, 87, "record count");
    put(57, 4, -5), put(23, 4, -6), seal(SIZE);
    REFUSED(SIZE, 87, "record count");
    put(57, 4, INT32_MIN), put(23, 4, INT32_MAX), seal(SIZE);
    REFUSED(SIZE, 87, "record count");
    put(57, 4, 3), put(23, 4, -1), seal(SIZE);
    REFUSED(SIZE, 87, "negative");
    put(57, 4, 3), put(23, 4, 3), seal(SIZE);
    REFUSED(SIZE, 87, "record count - 1");
    put(57, 4, 4), put(23, 4, 3), seal(SIZE);
    REFUSED(SIZE, 87, "can hold");
    put(21, 2, 1), seal(SIZE); /* compressed: any count may be inside */
    const char *reason;
    CHECK_EQUAL(validate(SIZE, &reason), 0);
}

TEST(compression_types)
{
    const char *reason;
    for (int type = 0; type < 8; type++) {
        make();
        put(21, 2, type), seal(SIZE);
        CHECK_EQUAL(validate(SIZE, &reason), type <= 4 ? 0 : 76);
    }
}

TEST(producer_fields)
{
    const char *reason;
    make();
    put(43, 8, 7), seal(SIZE);
    REFUSED(SIZE, 87, "base sequence");
    put(53, 4, 0), seal(SIZE); /* a negative epoch is checked by the log */
    CHECK_EQUAL(validate(SIZE, &reason), 0);
    put(21, 2, 0x10), seal(SIZE);
    REFUSED(SIZE, 47, "producer epoch");
    put(21, 2, 0), put(51, 2, 0), put(53, 4, -1), seal(SIZE);
    REFUSED(SIZE, 87, "base sequence");
    put(53, 4, 0), seal(SIZE);
    CHECK_EQUAL(validate(SIZE, &reason), 0);
    put(53, 4, -1), put(21, 2, 0x30), seal(SIZE); /* a transaction marker has no sequence */
    CHECK_EQUAL(validate(SIZE, &reason), 0);
    make();
    put(43, 8, -2), seal(SIZE); /* no producer id, as -1 */
    CHECK_EQUAL(validate(SIZE, &reason), 0);
    make();
    put(51, 2, 0), put(53, 4, 0), seal(SIZE); /* some clients: no producer id, but zeros */
    CHECK_EQUAL(validate(SIZE, &reason), 0);
    put(21, 2, 0x10), seal(SIZE);
    CHECK_EQUAL(validate(SIZE, &reason), 0);
}

TEST(decode_accepts_compacted_batches)
{
    struct mqd_batch out;
    make();
    put(0, 8, 1000);
    CHECK_EQUAL(mqd_batch_decode(batch, 61, &out), 0);
    CHECK_EQUAL(out.base_offset, 1000);
    CHECK_EQUAL(out.size_bytes, SIZE);
    put(57, 4, 0);
    CHECK_EQUAL(mqd_batch_decode(batch, SIZE, &out), 0);
    put(57, 4, 4);
    CHECK_EQUAL(mqd_batch_decode(batch, SIZE, &out), -1);
    CHECK_EQUAL(mqd_error_code(), MQD_E_CORRUPT);
    put(57, 4, -1);
    CHECK_EQUAL(mqd_batch_decode(batch, SIZE, &out), -1);
}

TEST(decode_refuses_nonsense)
{
    struct mqd_batch out;
    make();
    CHECK_EQUAL(mqd_batch_decode(batch, 60, &out), -1);
    put(0, 8, -1);
    CHECK_EQUAL(mqd_batch_decode(batch, SIZE, &out), -1);
    put(0, 8, INT64_MAX - 1);
    CHECK_EQUAL(mqd_batch_decode(batch, SIZE, &out), -1);
    put(0, 8, 0);
    put(8, 4, 48);
    CHECK_EQUAL(mqd_batch_decode(batch, SIZE, &out), -1);
    CHECK_CONTAINS(mqd_error_message(), "batch length");
    make();
    batch[16] = 1;
    CHECK_EQUAL(mqd_batch_decode(batch, SIZE, &out), -1);
    memset(batch, 0, SIZE); /* preallocated space */
    CHECK_EQUAL(mqd_batch_decode(batch, SIZE, &out), -1);
}
