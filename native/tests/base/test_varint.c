#include "base/varint.h"
#include "mqd_test.h"

enum { SIZE_MAX_BYTES = 11 };

/* The definition, without a fast path: 0 bytes = truncated, or more than 64 bits. */
static size_t defined(const uint8_t *bytes, size_t size, int64_t *out)
{
    uint64_t value = 0;
    for (size_t i = 0; i < size && i < 10; i++) {
        if (i == 9 && bytes[i] > 1)
            return 0;
        value |= (uint64_t)(bytes[i] & 0x7f) << (7 * i);
        if (bytes[i] < 0x80) {
            *out = (int64_t)(value >> 1) ^ -(int64_t)(value & 1);
            return i + 1;
        }
    }
    return 0;
}

/* The buffer ends where the data ends, so that an overrun is detected. */
static void check_all(const uint8_t *bytes, size_t size)
{
    uint8_t *copy = malloc(size ? size : 1);
    memcpy(copy, bytes, size);
    const uint8_t *end = copy + size;
    int64_t expected = 0, number = 0;
    size_t used = defined(copy, size, &expected);
    bool small = used && expected >= INT32_MIN && expected <= INT32_MAX;
    bool follows = small && expected >= -1 && expected <= (int64_t)(size - used);
    CHECK_EQUAL(mqd_varlong(copy, end, &number) == (used ? copy + used : NULL) && (!used || number == expected), 1);
    CHECK_EQUAL(mqd_varlong_skip(copy, end) == (used ? copy + used : NULL), 1);
    CHECK_EQUAL(mqd_varint(copy, end, &number) == (small ? copy + used : NULL) && (!small || number == expected), 1);
    CHECK_EQUAL(
        mqd_varint_size(copy, end, &number) == (follows ? copy + used : NULL) && (!follows || number == expected), 1);
    free(copy);
}

TEST(every_number_of_one_and_two_bytes_before_all_that_may_follow)
{
    static uint8_t bytes[2 + 8192];
    for (uint32_t head = 0; head <= UINT16_MAX; head++) {
        bytes[0] = (uint8_t)head;
        bytes[1] = (uint8_t)(head >> 8);
        for (size_t size = 0; size <= 3; size++)
            check_all(bytes, size);
        int64_t number;
        size_t used = defined(bytes, 2, &number);
        for (int64_t more = -1; used && number >= 0 && more <= 1; more++) /* one too few, enough, and one more */
            if ((int64_t)used + number + more >= 0)
                check_all(bytes, (size_t)((int64_t)used + number + more));
    }
}

TEST(long_numbers_and_the_ends_of_their_ranges)
{
    static const uint8_t lasts[] = {0, 1, 2, 0x0f, 0x10, 0x7f, 0x80, 0xff};
    for (size_t size = 0; size <= SIZE_MAX_BYTES; size++)
        for (size_t first = 0; first < sizeof lasts; first++)
            for (size_t last = 0; last < sizeof lasts; last++)
                for (size_t cut = 0; cut <= size; cut++) {
                    uint8_t bytes[SIZE_MAX_BYTES];
                    memset(bytes, first % 2 ? 0xff : 0x80, sizeof bytes);
                    bytes[0] = lasts[first];
                    if (size > 0)
                        bytes[size - 1] = lasts[last];
                    check_all(bytes, cut);
                }
}
