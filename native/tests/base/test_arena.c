#include "base/error.h"
#include "mqd_test.h"

enum { EXTENT = 64 };

TEST(single_extents_come_back_hot)
{
    uint8_t bytes[1];
    struct mqd_arena *arena = mqd_arena_open(bytes, 8 * EXTENT + 63, EXTENT);
    CHECK_EQUAL(mqd_arena_extents_total(arena), 8);
    int64_t a = mqd_arena_allocate(arena, 1), b = mqd_arena_allocate(arena, EXTENT);
    CHECK_EQUAL(a, 0);
    CHECK_EQUAL(b, EXTENT);
    CHECK_EQUAL(mqd_arena_release(arena, (uint64_t)a), 1);
    CHECK_EQUAL(mqd_arena_allocate(arena, 5), a);
    CHECK_EQUAL(mqd_arena_release(arena, (uint64_t)b), 1);
    CHECK_EQUAL(mqd_arena_release(arena, (uint64_t)a), 1);
    CHECK_EQUAL(mqd_arena_allocate(arena, 0), a); /* freed last */
    CHECK_EQUAL(mqd_arena_allocate(arena, 5), b);
    CHECK_EQUAL(mqd_arena_extents_used(arena), 2);
    mqd_arena_close(arena);
}

TEST(any_byte_of_a_run_refers_to_it)
{
    uint8_t bytes[1];
    struct mqd_arena *arena = mqd_arena_open(bytes, 8 * EXTENT, EXTENT);
    int64_t run = mqd_arena_allocate(arena, 3 * EXTENT - 1);
    CHECK_EQUAL(run, 5 * EXTENT); /* from the high end */
    CHECK_EQUAL(mqd_arena_extents_used(arena), 3);
    mqd_arena_hold(arena, (uint64_t)run + 2 * EXTENT + 17);
    CHECK_EQUAL(mqd_arena_release(arena, (uint64_t)run + EXTENT), 0);
    CHECK_EQUAL(mqd_arena_release(arena, (uint64_t)run), 1);
    CHECK_EQUAL(mqd_arena_extents_used(arena), 0);
    CHECK_EQUAL(mqd_arena_release(arena, (uint64_t)run), -1);
    CHECK_EQUAL(mqd_error_code(), MQD_E_INVALID);
    CHECK_EQUAL(mqd_arena_release(arena, 8 * EXTENT), -1);
    CHECK_EQUAL(mqd_arena_release(arena, UINT64_MAX), -1);
    mqd_arena_close(arena);
}

TEST(full_and_impossible)
{
    uint8_t bytes[1];
    struct mqd_arena *arena = mqd_arena_open(bytes, 4 * EXTENT, EXTENT);
    CHECK_EQUAL(mqd_arena_allocate(arena, 4 * EXTENT + 1), -1);
    CHECK_EQUAL(mqd_error_code(), MQD_E_INVALID);
    CHECK_EQUAL(mqd_arena_allocate(arena, UINT64_MAX), -1);
    CHECK_EQUAL(mqd_error_code(), MQD_E_INVALID);
    CHECK_EQUAL(mqd_arena_allocate(arena, 4 * EXTENT), 0);
    CHECK_EQUAL(mqd_arena_allocate(arena, 1), -1);
    CHECK_EQUAL(mqd_error_code(), MQD_E_FULL);
    CHECK_EQUAL(mqd_arena_release(arena, 3 * EXTENT), 1);
    mqd_arena_allocate(arena, 1);
    CHECK_EQUAL(mqd_arena_allocate(arena, 4 * EXTENT), -1);
    CHECK_EQUAL(mqd_error_code(), MQD_E_FULL);
    mqd_arena_close(arena);
    CHECK(mqd_arena_open(bytes, EXTENT - 1, EXTENT) == NULL);
    CHECK(mqd_arena_open(bytes, EXTENT, 0) == NULL);
}

/* Random use against a plain map of each extent's owner. */
TEST(random_use_equals_a_plain_map)
{
    enum { EXTENTS = 200, RUNS = 300 };
    static int owner[EXTENTS];
    static struct {
        int64_t offset;
        int length;
        int references;
    } run[RUNS];
    uint8_t bytes[1];
    uint64_t rounds = test_long() ? 3000000 : 100000;
    for (uint64_t seed_start = 1; seed_start <= 3; seed_start++) {
        struct mqd_arena *arena = mqd_arena_open(bytes, EXTENTS * EXTENT, EXTENT);
        memset(owner, -1, sizeof owner);
        memset(run, 0, sizeof run);
        uint64_t seed = seed_start;
        uint32_t used = 0;
        for (uint64_t round = 0; round < rounds; round++) {
            int i = (int)(test_random(&seed) % RUNS);
            uint64_t action = test_random(&seed) % 4;
            if (run[i].references == 0) {
                int length = action ? 1 : 1 + (int)(test_random(&seed) % (test_random(&seed) % 90 + 1));
                int64_t offset = mqd_arena_allocate(arena, (uint64_t)length * EXTENT - test_random(&seed) % EXTENT);
                if (offset < 0) { /* right only when there is no such run */
                    int longest = 0, current = 0;
                    for (int e = 0; e < EXTENTS; e++) {
                        current = owner[e] < 0 ? current + 1 : 0;
                        longest = current > longest ? current : longest;
                    }
                    CHECK(longest < length);
                    continue;
                }
                run[i].offset = offset, run[i].length = length, run[i].references = 1;
                used += (uint32_t)length;
                for (int e = 0; e < length; e++) {
                    CHECK(offset / EXTENT + e < EXTENTS && owner[offset / EXTENT + e] < 0);
                    owner[offset / EXTENT + e] = i;
                }
            } else {
                uint64_t inside = (uint64_t)run[i].offset + test_random(&seed) % ((uint64_t)run[i].length * EXTENT);
                if (action == 0) {
                    mqd_arena_hold(arena, inside);
                    run[i].references++;
                } else {
                    CHECK_EQUAL(mqd_arena_release(arena, inside), --run[i].references == 0);
                    if (run[i].references == 0) {
                        used -= (uint32_t)run[i].length;
                        for (int e = 0; e < run[i].length; e++)
                            owner[run[i].offset / EXTENT + e] = -1;
                    }
                }
            }
            CHECK_EQUAL(mqd_arena_extents_used(arena), used);
        }
        mqd_arena_close(arena);
    }
}
