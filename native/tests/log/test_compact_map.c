/* The tables of a compaction against plain arrays. */
#include "base/error.h"
#include "log/compaction/map.h"
#include "mqd_test.h"

/* From the reference's vectors for 128 bits: key 00..0f, input 00, 01, .. of the listed length. */
TEST(siphash_is_the_reference)
{
    static const uint8_t expected[3][16] = {
        {0xa3, 0x81, 0x7f, 0x04, 0xba, 0x25, 0xa8, 0xe6, 0x6d, 0xf6, 0x72, 0x14, 0xc7, 0x55, 0x02, 0x93},
        {0xda, 0x87, 0xc1, 0xd8, 0x6b, 0x99, 0xaf, 0x44, 0x34, 0x76, 0x59, 0x11, 0x9b, 0x22, 0xfc, 0x45},
        {0x81, 0x77, 0x22, 0x8d, 0xa4, 0xa4, 0x5d, 0xc7, 0xfc, 0xa3, 0x8b, 0xde, 0xf6, 0x0a, 0xff, 0xe4}};
    const uint64_t seed[2] = {0x0706050403020100ull, 0x0f0e0d0c0b0a0908ull};
    uint8_t input[64];
    for (int i = 0; i < 64; i++)
        input[i] = (uint8_t)i;
    for (int size = 0; size < 3; size++) {
        uint64_t out[2];
        mqd_siphash(seed, input, (size_t)size, out);
        CHECK(memcmp(out, expected[size], 16) == 0);
    }
}

TEST(key_map_keeps_the_last_offset_of_each_key)
{
    enum { KEYS = 5000 };
    static int64_t model[KEYS];
    const uint64_t seed[2] = {1, 2};
    struct mqd_key_map map;
    uint64_t chance = 7;
    CHECK(mqd_key_map_open(&map, 24 * 6000, 90, seed) == 0);
    memset(model, -1, sizeof model);
    for (int64_t offset = 0; offset < 40000; offset++) {
        uint32_t key = (uint32_t)(test_random(&chance) % KEYS);
        CHECK(mqd_key_map_put(&map, (const uint8_t *)&key, sizeof key, offset));
        model[key] = offset;
    }
    for (uint32_t key = 0; key < KEYS; key++)
        CHECK_EQUAL(mqd_key_map_get(&map, (const uint8_t *)&key, sizeof key), model[key]);
    uint32_t unknown = KEYS + 1;
    CHECK_EQUAL(mqd_key_map_get(&map, (const uint8_t *)&unknown, sizeof unknown), -1);
    CHECK(mqd_key_map_put(&map, (const uint8_t *)"", 0, 3) && mqd_key_map_get(&map, (const uint8_t *)"", 0) == 3);
    mqd_key_map_close(&map);
}

TEST(key_map_reports_that_it_is_full)
{
    struct mqd_key_map map;
    CHECK(mqd_key_map_open(&map, 24 * 100, 90, NULL) == 0);
    uint32_t key = 0;
    while (mqd_key_map_put(&map, (const uint8_t *)&key, sizeof key, key))
        key++;
    CHECK_EQUAL(key, 90);
    key = 10;
    CHECK(mqd_key_map_put(&map, (const uint8_t *)&key, sizeof key, 1000)); /* a known key keeps its entry */
    CHECK_EQUAL(mqd_key_map_get(&map, (const uint8_t *)&key, sizeof key), 1000);
    CHECK(mqd_key_map_put(&map, (const uint8_t *)&key, sizeof key, 5));
    CHECK_EQUAL(mqd_key_map_get(&map, (const uint8_t *)&key, sizeof key), 1000); /* M2 */
    mqd_key_map_close(&map);
}

TEST(id_map_is_a_map)
{
    enum { IDS = 300 };
    int64_t model[IDS], value;
    bool there[IDS] = {0};
    struct mqd_id_map map = {0};
    uint64_t chance = 11;
    CHECK(!mqd_id_map_get(&map, 5, &value) && !mqd_id_map_remove(&map, 5));
    for (int turn = 0; turn < 200000; turn++) {
        uint32_t i = (uint32_t)(test_random(&chance) % IDS);
        int64_t id = (int64_t)i << 33; /* all adjacent, if it were not for the hash */
        if (test_random(&chance) % 2) {
            model[i] = turn;
            there[i] = true;
            CHECK(mqd_id_map_put(&map, id, turn) == 0);
        } else {
            CHECK(mqd_id_map_remove(&map, id) == there[i]);
            there[i] = false;
        }
        i = (uint32_t)(test_random(&chance) % IDS);
        CHECK(mqd_id_map_get(&map, (int64_t)i << 33, &value) == there[i] && (!there[i] || value == model[i]));
    }
    uint32_t count = 0;
    for (int i = 0; i < IDS; i++)
        count += there[i];
    CHECK_EQUAL(map.count, count);
    mqd_id_map_free(&map);
}
