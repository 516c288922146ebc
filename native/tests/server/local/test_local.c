/* tsan */
/* Well-behaved clients through shared memory: everything that works over TCP works, nothing is
 * lost while either side sleeps, limits are enforced, all memory is returned. */
#include "mqd_local_test.h"
#include "mqd_seccomp_test.h"

#define SIZES ((struct local_sizes){1 << 20, 1 << 16, 256})

BOTH(a_record_is_produced_and_fetched)
{
    struct bench *b = local_bench(backend, NULL);
    struct local local = local_open(b, 0, SIZES);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    CHECK_EQUAL(local.welcome.error, 0);
    CHECK_EQUAL(local_counter(b, 0, MQD_GAUGE_LOCAL_ATTACHMENTS), 1);
    CHECK_EQUAL(local_counter(b, 0, MQD_GAUGE_LOCAL_BYTES), local.total_bytes);
    for (int32_t partition = 0; partition < 4; partition++) { /* own and forwarded */
        struct part part = {partition, {.mark = 40 + (uint64_t)partition, .body_bytes = partition == 3 ? 200000 : 64}};
        struct produced produced = local_produce(&local, -1, &part, 1);
        CHECK_EQUAL(produced.error[0], 0);
        CHECK_EQUAL(produced.base_offset[0], 0);
        struct fetch_position requested = {partition, 0};
        local_fetch(&local, (struct fetch){.correlation_id = 5, .bytes_max = 1 << 20}, &requested, 1, fetched);
        CHECK_EQUAL(fetched->batch_count, 1);
        CHECK_EQUAL(fetched->batches[0].mark, 40 + partition);
    }
    local_close(&local);
    local_wait_none(b);
    free(fetched);
    local_bench_stop(b);
}

/* Requests of every size in a small memory: windows, runs of extents, wrap-around of the data
 * area and of both rings. */
static void sizes(struct bench *b, uint64_t seed)
{
    struct local local =
        local_open(b, (uint32_t)(seed % 2), (struct local_sizes){seed % 3 ? 1 << 19 : 1 << 17, 1 << 12, 16});
    CHECK_EQUAL(local.submission_count, 16);
    CHECK_EQUAL(local.reply_bytes, 1 << 12);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    int64_t next[PARTITIONS] = {0};
    for (int round = 0; round < 60; round++) {
        int32_t partition = (int32_t)(test_random(&seed) % 4);
        int32_t size_bytes = 64 + (int32_t)(test_random(&seed) % (round % 4 ? 5000 : local.data_bytes - 5000));
        struct part part = {partition, {.mark = test_random(&seed), .body_bytes = size_bytes}};
        struct produced produced = local_produce(&local, round % 2 ? -1 : 1, &part, 1);
        CHECK_EQUAL(produced.error[0], 0);
        struct fetch_position requested = {partition, produced.base_offset[0]};
        CHECK(produced.base_offset[0] >= next[partition]);
        next[partition] = produced.base_offset[0] + 1;
        local_fetch(&local,
                    (struct fetch){.correlation_id = 5, .bytes_max = 8 << 20, .wait_ms = LIMIT_MS, .bytes_min = 1},
                    &requested, 1, fetched);
        CHECK(fetched->batch_count >= 1);
        CHECK_EQUAL(fetched->batches[0].mark, part.batch.mark);
    }
    local_close(&local);
    free(fetched);
}

BOTH(every_size_through_small_rings)
{
    struct bench *b = local_bench(backend, NULL);
    for (uint64_t seed = 1; seed <= (test_long() ? 40 : 2); seed++)
        sizes(b, seed);
    local_wait_none(b);
    local_bench_stop(b);
}

/* Many requests in flight, answered in order, and more than the submission ring and the reply ring
 * hold; then a client that disconnects without reading any response. */
BOTH(pipelined_in_order)
{
    struct bench *b = local_bench(backend, NULL);
    struct local local = local_open(b, 1, (struct local_sizes){1 << 20, 1 << 12, 16});
    for (int32_t first = 0; first < 3000; first += 300) {
        for (int32_t i = 0; i < 300; i++) {
            struct frame frame = {0};
            struct part part = {i % 4, {.mark = (uint64_t)(first + i)}};
            put_produce(&frame, first + i, 1, LIMIT_MS, &part, 1);
            CHECK_EQUAL(local_send(&local, &frame), 1);
            frame_free(&frame);
            if (i >= 40) {
                CHECK_EQUAL(local_receive(&local), 1);
                struct produced produced = take_produced(&local.client);
                CHECK_EQUAL(produced.correlation_id, first + i - 40);
                CHECK_EQUAL(produced.error[0], 0);
            }
        }
        for (int32_t i = 260; i < 300; i++) {
            CHECK_EQUAL(local_receive(&local), 1);
            CHECK_EQUAL(take_produced(&local.client).correlation_id, first + i);
        }
    }
    local_close(&local);
    local_wait_none(b);
    local_bench_stop(b);
}

/* acks=0 and a disconnect: as after TCP's FIN, submitted requests are written. */
BOTH(requests_submitted_before_the_end_are_written)
{
    struct bench *b = local_bench(backend, NULL);
    struct local local = local_open(b, 0, (struct local_sizes){1 << 20, 1 << 12, 256});
    struct frame frame = {0};
    for (int32_t i = 0; i < 200; i++) {
        struct part part = {0, {.mark = (uint64_t)i, .body_bytes = 2000}};
        put_produce(&frame, i, 0, LIMIT_MS, &part, 1);
    }
    CHECK_EQUAL(local_send(&local, &frame), 1);
    frame_free(&frame);
    local_close(&local);
    local_wait_none(b);
    struct mqd_positions positions = {0};
    /* the turn continues after the close */
    for (int64_t end_ns = test_now_ns() + LIMIT_MS * 1000000ll;
         positions.high_watermark < 200 && test_now_ns() < end_ns; poll(NULL, 0, 1))
        mqd_slot_positions(mqd_control_partition(b->control, 0), &positions);
    CHECK_EQUAL(positions.high_watermark, 200);
    struct client client = client_open(b, 1);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    struct fetch_position requested = {0, 199};
    client_fetch(&client,
                 (struct fetch){.correlation_id = 5, .bytes_max = 1 << 20, .bytes_min = 1, .wait_ms = LIMIT_MS},
                 &requested, 1, fetched);
    CHECK_EQUAL(fetched->batch_count, 1);
    CHECK_EQUAL(fetched->batches[0].mark, 199);
    client_close(&client);
    free(fetched);
    local_bench_stop(b);
}

/* ---- sleeping ---- */

struct pace {
    struct bench *b;
    uint32_t worker;
    int32_t partition;
    uint64_t seed;
    uint32_t rounds;
    uint64_t sleeps;
};

static void *round_trips(void *argument)
{
    struct pace *pace = argument;
    struct local local = local_open(pace->b, pace->worker, (struct local_sizes){1 << 16, 1 << 12, 16});
    for (uint32_t i = 0; i < pace->rounds; i++) {
        struct part part = {pace->partition, {.mark = i}};
        CHECK_OR(local_produce(&local, 1, &part, 1).error[0] == 0, break);
        if (test_random(&pace->seed) % 8 == 0)
            poll(NULL, 0, (int)(test_random(&pace->seed) % 2)); /* so that the worker falls asleep too */
    }
    pace->sleeps = local.sleeps;
    local_close(&local);
    return NULL;
}

static void sleepers(int backend, void (*change)(struct bench *b))
{
    struct bench *b = local_bench(backend, change);
    pthread_t threads[6];
    struct pace paces[6];
    uint64_t sleeps = 0;
    for (uint32_t i = 0; i < 6; i++) {
        paces[i] = (struct pace){
            .b = b, .worker = i % 2, .partition = (int32_t)(i % 4), .seed = i + 1, .rounds = test_long() ? 5000 : 500};
        CHECK(pthread_create(&threads[i], NULL, round_trips, &paces[i]) == 0);
    }
    for (uint32_t i = 0; i < 6; i++) {
        pthread_join(threads[i], NULL);
        sleeps += paces[i].sleeps;
    }
    test_message("%llu sleeps in %u round trips", (unsigned long long)sleeps, 6 * paces[0].rounds);
    local_wait_none(b);
    local_bench_stop(b);
}

BOTH(no_wake_up_is_lost)
{
    sleepers(backend, local_options);
}
BOTH(no_wake_up_is_lost_while_a_worker_spins)
{
    sleepers(backend, local_options_spin);
}

static void on_an_old_kernel(int backend)
{
    sleepers(backend, local_options);
}
/* Kernels before 6.5 have no SO_PEERPIDFD. */
BOTH(no_wake_up_is_lost_where_sockets_have_no_pidfd)
{
    where_calls_refused(SYS_getsockopt, ENOPROTOOPT, SYS_getsockopt, 0, on_an_old_kernel, backend);
}

/* ---- positions ---- */

/* A Fetch with max_bytes 0 parks, wakes, and returns without records; over TCP the same is an
 * ordinary Fetch. */
BOTH(positions_only)
{
    struct bench *b = local_bench(backend, NULL);
    struct local local = local_open(b, 0, SIZES), other = local_open(b, 1, SIZES);
    struct client client = client_open(b, 1);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    struct frame frame = {0};
    struct fetch_position requested = {1, 0};
    put_fetch(&frame, (struct fetch){.correlation_id = 9, .wait_ms = LIMIT_MS, .bytes_min = 1}, &requested, 1);
    CHECK_EQUAL(local_send(&local, &frame), 1);
    frame_free(&frame);
    struct part part = {1, {.mark = 6}};
    CHECK_EQUAL(local_produce(&other, -1, &part, 1).error[0], 0);
    CHECK_EQUAL(local_receive(&local), 1);
    take_fetched(&local.client, fetched);
    CHECK_EQUAL(fetched->correlation_id, 9);
    CHECK_EQUAL(fetched->partition_count, 1);
    CHECK_EQUAL(fetched->high_watermark[0], 1);
    CHECK_EQUAL(fetched->batch_count, 0);
    /* records exist already: answered immediately, and again, and for read_committed with a list */
    for (int i = 0; i < 3; i++) {
        local_fetch(&local,
                    (struct fetch){.correlation_id = 10, .wait_ms = LIMIT_MS, .bytes_min = 1, .committed = i == 2},
                    &requested, 1, fetched);
        CHECK_EQUAL(fetched->high_watermark[0], 1);
        CHECK_EQUAL(fetched->batch_count, 0);
        CHECK_EQUAL(fetched->aborted_count, i == 2 ? 0 : -1);
    }
    client_fetch(&client, (struct fetch){.correlation_id = 11, .wait_ms = LIMIT_MS, .bytes_min = 1}, &requested, 1,
                 fetched);
    CHECK_EQUAL(fetched->batch_count, 1);
    client_close(&client);
    local_close(&local);
    local_close(&other);
    free(fetched);
    local_wait_none(b);
    local_bench_stop(b);
}

/* In a session: parks while there is nothing new, reports changes. */
BOTH(positions_only_in_a_session)
{
    struct bench *b = local_bench(backend, NULL);
    struct local local = local_open(b, 0, SIZES);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    struct fetch_position requested[2] = {{0, 0}, {1, 0}};
    local_fetch(&local, (struct fetch){.correlation_id = 1, .bytes_min = 1}, requested, 2, fetched);
    CHECK(fetched->session_id != 0);
    CHECK_EQUAL(fetched->partition_count, 2);
    int32_t session_id = fetched->session_id;
    for (int32_t epoch = 1; epoch < 6; epoch++) {
        struct frame frame = {0};
        put_fetch(&frame,
                  (struct fetch){.correlation_id = 2,
                                 .wait_ms = LIMIT_MS,
                                 .bytes_min = 1,
                                 .session_id = session_id,
                                 .session_epoch = epoch},
                  &(struct fetch_position){1, epoch - 1}, epoch > 1);
        struct part part = {1, {.mark = (uint64_t)epoch}};
        put_produce(&frame, 3, 1, LIMIT_MS, &part, 1); /* answered after the fetch, which waits for it */
        CHECK_EQUAL(local_send(&local, &frame), 1);
        frame_free(&frame);
        CHECK_EQUAL(local_receive(&local), 1);
        take_fetched(&local.client, fetched);
        CHECK_EQUAL(fetched->partition_count, 1);
        CHECK_EQUAL(fetched->partition[0], 1);
        CHECK_EQUAL(fetched->high_watermark[0], epoch);
        CHECK_EQUAL(local_receive(&local), 1);
        CHECK_EQUAL(take_produced(&local.client).error[0], 0);
    }
    local_close(&local);
    free(fetched);
    local_wait_none(b);
    local_bench_stop(b);
}

/* ---- segment queries ---- */

static void check_place(struct local *local, int32_t partition, int64_t offset, int64_t end_offset)
{
    struct mqd_local_segment answer;
    struct mqd_batch batch;
    uint8_t bytes[MQD_BATCH_HEADER_BYTES];
    int fd;
    CHECK(local_query(local, partition, offset, (uint32_t)offset + 3));
    CHECK(local_answer(local, &answer, &fd));
    CHECK_EQUAL(answer.number, offset + 3);
    CHECK_EQUAL(answer.error, 0);
    CHECK_EQUAL(answer.slot, partition);
    CHECK(answer.base_offset <= offset && offset <= answer.next_base_offset);
    CHECK(answer.position <= answer.size_bytes && answer.size_bytes <= answer.map_bytes);
    CHECK_EQUAL(fcntl(fd, F_GETFL) & O_ACCMODE, O_RDONLY);
    if (offset == end_offset) {
        CHECK_EQUAL(answer.next_base_offset, INT64_MAX);
        CHECK_EQUAL(answer.position, answer.size_bytes);
    } else {
        CHECK_EQUAL(pread(fd, bytes, sizeof bytes, answer.position), (ssize_t)sizeof bytes);
        CHECK_EQUAL(mqd_batch_decode(bytes, sizeof bytes, &batch), 0);
        CHECK(batch.base_offset <= offset && offset <= batch.base_offset + batch.last_offset_delta);
        CHECK(answer.position + (uint32_t)batch.size_bytes <= answer.size_bytes);
    }
    close(fd);
}

static void small_segments(struct bench *b)
{
    local_options(b);
    b->log_options.segment_bytes = 4096;
}

BOTH(segment_queries)
{
    struct bench *b = local_bench(backend, small_segments);
    struct local local = local_open(b, 1, SIZES); /* partition 0 is another worker's */
    struct mqd_local_segment answer;
    int fd;
    check_place(&local, 0, 0, 0);
    int64_t end_offset = 0;
    for (int i = 0; i < 60; i++) {
        struct part part = {0, {.mark = (uint64_t)i, .record_count = 3, .body_bytes = 300}};
        CHECK_EQUAL(local_produce(&local, -1, &part, 1).error[0], 0);
        end_offset += 3;
        if (i % 7 == 0)
            for (int64_t offset = 0; offset <= end_offset; offset += i % 2 ? 1 : 5)
                check_place(&local, 0, offset, end_offset);
    }
    check_place(&local, 0, end_offset, end_offset);
    static const struct {
        int32_t partition;
        int64_t offset;
        int32_t error;
    } wrong[] = {{0, -1, 1}, {0, 1 << 20, 1}, {0, INT64_MIN, 1}, {0, INT64_MAX, 1},
                 {5, 0, 3},  {-1, 0, 3},      {INT32_MAX, 0, 3}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        CHECK(local_query(&local, wrong[i].partition, wrong[i].offset, 1));
        CHECK(local_answer(&local, &answer, &fd));
        CHECK_EQUAL(answer.error, wrong[i].error);
    }
    uint8_t unknown[16] = {99};
    memcpy(b->topic_id, unknown, 16);
    CHECK(local_query(&local, 0, 0, 1));
    CHECK(local_answer(&local, &answer, &fd));
    CHECK_EQUAL(answer.error, 100);
    local_close(&local);
    local_wait_none(b);
    local_bench_stop(b);
}

/* ---- limits ---- */

BOTH(limits)
{
    struct bench *b = local_bench(backend, NULL);
    /* gets the rest of the memory, in shorter rings */
    struct local big = local_open(b, 0, (struct local_sizes){UINT64_MAX, UINT32_MAX, UINT32_MAX});
    CHECK_EQUAL(big.welcome.error, 0);
    CHECK(big.total_bytes <= LOCAL_BYTES_MAX && big.data_bytes >= MQD_LOCAL_DATA_BYTES_MIN);
    struct part part = {0, {.mark = 1}};
    CHECK_EQUAL(local_produce(&big, 1, &part, 1).error[0], 0);
    struct local refused = local_open(b, 0, (struct local_sizes){1 << 30, 1 << 16, 256});
    CHECK_EQUAL(refused.welcome.error, MQD_E_FULL);
    CHECK(strstr(refused.welcome.reason, "local.memory.max.bytes"));
    uint8_t byte;
    CHECK_EQUAL(client_recv(&refused.client, &byte, 1), 0);
    local_close(&refused);
    local_close(&big);
    local_wait_none(b);
    struct local all[LOCAL_COUNT_MAX];
    for (uint32_t i = 0; i < LOCAL_COUNT_MAX; i++) {
        all[i] = local_open(b, 0, (struct local_sizes){0, 0, 0});
        CHECK_EQUAL(all[i].welcome.error, 0);
        CHECK_EQUAL(all[i].data_bytes, MQD_LOCAL_DATA_BYTES_MIN);
    }
    refused = local_open(b, 0, (struct local_sizes){0, 0, 0});
    CHECK_EQUAL(refused.welcome.error, MQD_E_FULL);
    CHECK(strstr(refused.welcome.reason, "local.attachments.max"));
    local_close(&refused);
    local_close(&all[7]); /* another one in its place */
    while (local_counter(b, 0, MQD_GAUGE_LOCAL_ATTACHMENTS) == LOCAL_COUNT_MAX)
        poll(NULL, 0, 1);
    all[7] = local_open(b, 0, (struct local_sizes){0, 0, 0});
    CHECK_EQUAL(all[7].welcome.error, 0);
    for (uint32_t i = 0; i < LOCAL_COUNT_MAX; i++) {
        CHECK_EQUAL(local_produce(&all[i], 1, &part, 1).error[0], 0);
        local_close(&all[i]);
    }
    local_wait_none(b);
    CHECK_EQUAL(local_counter(b, 0, MQD_COUNT_LOCAL_REFUSED), 2);
    local_bench_stop(b);
}

BOTH(where_there_are_none)
{
    struct bench *b = bench_start(backend, NULL);
    struct local refused = local_open(b, 0, SIZES);
    CHECK_EQUAL(refused.welcome.error, MQD_E_INVALID);
    CHECK(strstr(refused.welcome.reason, "connect over TCP"));
    local_close(&refused);
    bench_stop(b);
}

/* A broker that stops sends its responses, then ends every attachment. */
BOTH(the_end_of_a_worker)
{
    struct bench *b = local_bench(backend, NULL);
    struct local local = local_open(b, 0, SIZES);
    struct frame frame = {0};
    struct fetch_position requested = {0, 0};
    put_fetch(&frame, (struct fetch){.correlation_id = 9, .wait_ms = LIMIT_MS, .bytes_min = 1}, &requested, 1);
    CHECK_EQUAL(local_send(&local, &frame), 1);
    frame_free(&frame);
    CHECK(mqd_reactor_stop(b->reactors[0]) == 0);
    CHECK_EQUAL(local_receive(&local), 0);
    local_close(&local);
    CHECK_EQUAL(local_counter(b, 0, MQD_GAUGE_LOCAL_ATTACHMENTS), 0);
    local_bench_stop(b);
}

/* ---- memory that outlives its attachment ---- */

/* Keeps its resources and only closes its socket. `keep`: 0 the mapping, 1 the descriptor, 2
 * both in a child process. For a child it returns the end of a pipe whose closing ends it. */
static int leave_but_keep(struct local *local, int keep)
{
    int ends[2] = {-1, -1};
    if (keep == 2) {
        CHECK_OR(pipe(ends) == 0, abort());
        fflush(NULL);
        if (fork() == 0) {
            uint8_t byte;
            close(ends[1]);
            close(local->client.fd);
            _exit(read(ends[0], &byte, 1) != 0);
        }
        close(ends[0]);
    }
    close(local->client.fd);
    if (keep != 0)
        munmap(local->header, local->total_bytes);
    if (keep != 1)
        close(local->fds[0]);
    for (uint32_t i = 1; i < MQD_LOCAL_FD_COUNT; i++)
        close(local->fds[i]);
    return ends[1];
}

static void let_go(struct local *local, int keep, int child)
{
    if (keep == 0)
        munmap(local->header, local->total_bytes);
    else if (keep == 1)
        close(local->fds[0]);
    else
        CHECK(close(child) == 0 && wait(NULL) > 0);
}

BOTH(retained_memory_counts_until_released)
{
    struct bench *b = local_bench(backend, NULL);
    for (int keep = 0; keep < 3; keep++) {
        struct local kept[LOCAL_COUNT_MAX];
        int children[LOCAL_COUNT_MAX];
        uint64_t bytes = 0;
        uint32_t count = 0;
        for (; count < LOCAL_COUNT_MAX; count++) {
            kept[count] = local_open(b, 0, (struct local_sizes){3 << 20, 4096, 16});
            if (kept[count].welcome.error)
                break;
            bytes += kept[count].total_bytes;
            CHECK(bytes <= LOCAL_BYTES_MAX);
            children[count] = leave_but_keep(&kept[count], keep);
            int64_t end_ns = test_now_ns() + LIMIT_MS * 1000000ll;
            while (local_counter(b, 0, MQD_GAUGE_LOCAL_ATTACHMENTS)) {
                CHECK(test_now_ns() < end_ns);
                poll(NULL, 0, 1);
            }
        }
        CHECK(count >= 2 && count < LOCAL_COUNT_MAX);
        CHECK(strstr(kept[count].welcome.reason, "local.memory.max.bytes"));
        local_close(&kept[count]);
        CHECK_EQUAL(local_counter(b, 0, MQD_GAUGE_LOCAL_BYTES), bytes);
        while (count--) /* a later child has the pipes of the earlier ones */
            let_go(&kept[count], keep, children[count]);
        local_wait_none(b);
        struct local next = local_open(b, 0, (struct local_sizes){3 << 20, 4096, 16});
        CHECK_EQUAL(next.welcome.error, 0);
        local_close(&next);
        local_wait_none(b);
    }
    local_bench_stop(b);
}
