/* tsan */
/* Threads that read one view through one cache, which has memory for a part of it: each gets what
 * the filter selects. Truncations and compactions: tests/sim/views. */
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "mqd_test.h"

#include "log/views/view_cache.h"
#include "wire/filter.h"

#define BATCH_COUNT 400
#define RECORD_COUNT 3 /* of a batch */
#define THREAD_COUNT 4
#define PIECE_BYTES 1024

static const uint8_t filter[] = {2, 1, 't', 0, 1, 'a'}; /* t = 'a' */

struct world {
    int fd;
    uint32_t size_bytes;
    uint8_t bytes[BATCH_COUNT * 256];
    struct mqd_view_cache *cache;
    struct mqd_filtered wanted;
};

/* A record with the header t=TAG. */
static uint32_t put_record(uint8_t *out, uint8_t delta, char tag)
{
    const uint8_t record[] = {2 * 12, 0, 0, (uint8_t)(2 * delta), 1, 2 * 1, 'v', 2, 2 * 1, 't', 2 * 1, (uint8_t)tag};
    out[0] = 2 * sizeof record - 2;
    memcpy(out + 1, record + 1, sizeof record - 1);
    return sizeof record;
}

static void begin(struct world *w, uint64_t bytes_max)
{
    *w = (struct world){.fd = memfd_create("segment", 0), .cache = mqd_view_cache_create(bytes_max, PIECE_BYTES)};
    for (uint32_t i = 0; i < BATCH_COUNT; i++) {
        uint8_t records[RECORD_COUNT * 16];
        uint32_t records_bytes = 0;
        for (uint8_t delta = 0; delta < RECORD_COUNT; delta++)
            records_bytes += put_record(records + records_bytes, delta, delta == 1 && i % 20 == 0 ? 'a' : 'b');
        struct mqd_batch batch = {.base_offset = i * RECORD_COUNT,
                                  .record_count = RECORD_COUNT,
                                  .last_offset_delta = RECORD_COUNT - 1,
                                  .base_sequence = -1};
        uint8_t *at = w->bytes + w->size_bytes;
        memcpy(at + MQD_BATCH_HEADER_BYTES, records, records_bytes);
        mqd_batch_put_header(at, &batch, at + MQD_BATCH_HEADER_BYTES, records_bytes);
        w->size_bytes += MQD_BATCH_HEADER_BYTES + records_bytes;
    }
    CHECK(w->fd >= 0 && w->cache && write(w->fd, w->bytes, w->size_bytes) == (ssize_t)w->size_bytes);
    CHECK_EQUAL(mqd_filter_batches(filter, sizeof filter, w->bytes, w->size_bytes, 0, 1 << 30, &w->wanted), 0);
    CHECK(w->wanted.size_bytes > 1000);
}

static void end(struct world *w)
{
    mqd_view_cache_destroy(w->cache);
    mqd_filtered_free(&w->wanted);
    close(w->fd);
}

static bool read_all(struct world *w, uint64_t room_bytes)
{
    struct mqd_view_read read = {.fd = w->fd,
                                 .file = 1,
                                 .view = 1,
                                 .filter = filter,
                                 .filter_bytes = sizeof filter,
                                 .limit = w->size_bytes,
                                 .filtered_bytes_max = UINT32_MAX,
                                 .output_bytes_max = room_bytes};
    uint64_t done = 0;
    for (int64_t offset = 0, next_offset; offset < BATCH_COUNT * RECORD_COUNT; offset = next_offset) {
        uint32_t batch_bytes = w->size_bytes / BATCH_COUNT;
        read.from_offset = offset;
        read.position = (uint32_t)(offset / RECORD_COUNT) * batch_bytes;
        int16_t error = mqd_view_read(w->cache, &read);
        uint64_t found_bytes = read.selection.size_bytes;
        next_offset = read.selection.next_offset;
        bool same = !error && next_offset > offset && done + found_bytes <= w->wanted.size_bytes &&
                    (!found_bytes || memcmp(read.selection.bytes, w->wanted.bytes + done, found_bytes) == 0);
        mqd_filtered_free(&read.selection);
        if (!same)
            return false;
        done += found_bytes;
    }
    return done == w->wanted.size_bytes;
}

static void *run(void *argument)
{
    bool right = true;
    for (uint64_t turn = 0; right && turn < 60; turn++)
        right = read_all(argument, turn % 3 ? 100 * turn : 1 << 20);
    return right ? argument : NULL;
}

static void read_in_parallel(uint64_t bytes_max)
{
    static struct world w;
    pthread_t threads[THREAD_COUNT];
    void *right[THREAD_COUNT];
    struct mqd_view_cache_stats stats;
    begin(&w, bytes_max);
    for (int i = 0; i < THREAD_COUNT; i++)
        CHECK_EQUAL(pthread_create(&threads[i], NULL, run, &w), 0);
    for (int i = 0; i < THREAD_COUNT; i++)
        pthread_join(threads[i], &right[i]);
    for (int i = 0; i < THREAD_COUNT; i++)
        CHECK(right[i] == &w);
    mqd_view_cache_stats(w.cache, &stats);
    CHECK(stats.hits > 0 && stats.bytes <= bytes_max);
    CHECK_EQUAL(stats.evicted > 0, bytes_max < 1 << 20);
    end(&w);
}

TEST(readers_with_memory_for_all)
{
    read_in_parallel(1 << 20);
}

TEST(readers_with_memory_for_some)
{
    read_in_parallel(3000);
}

TEST(a_file_that_ends_early_is_reported)
{
    static struct world w;
    begin(&w, 1 << 20);
    CHECK(read_all(&w, 1 << 20));
    CHECK_EQUAL(ftruncate(w.fd, 100), 0);
    CHECK(!read_all(&w, 1 << 20)); /* the cached pieces of the rest are not used */
    end(&w);
}
