/* tsan: long */
/* Transactions as readers see them: read_committed through any worker, waking, aborted
 * transactions across segments; and reports of producers to the acceptor. */
#include <fcntl.h>

#include "mqd_check_test.h"

#define SLOT 0

static void small_segments(struct bench *b)
{
    b->log_options.segment_bytes = 2000;
    b->log_options.index_interval_bytes = 200;
}

static void in_memory(struct bench *b)
{
    b->log_options.flush_on_ack = 0;
}

/* Writes of a coordinator through the acceptor; all of them, then all results. Returns the last
 * base offset. */
static int64_t coordinator_write(struct bench *b, const struct log_batch *batches, uint32_t count)
{
    uint32_t owner = bench_owner(SLOT), from, sent = 0, answered = 0;
    int64_t base_offset = -1;
    struct mqd_descriptor answer;
    while (answered < count) {
        uint32_t place = 0;
        for (; sent < count && sent - answered < 500; sent++, place += 256) {
            uint32_t size_bytes = log_encode(b->arenas[ACCEPTOR] + place, batches[sent]);
            struct mqd_descriptor produce = {.kind = MQD_LINK_PRODUCE,
                                             .flags = MQD_PRODUCE_CONTROL | MQD_PRODUCE_ACKS_ALL,
                                             .slot = SLOT,
                                             .token = sent,
                                             .offset = place,
                                             .size_bytes = size_bytes,
                                             .a = -1,
                                             .c = (int64_t)mqd_endpoint_generation(b->control, owner)};
            CHECK_OR(mqd_endpoint_send(b->endpoints[ACCEPTOR], owner, &produce) == 0, return -1);
        }
        mqd_endpoint_flush(b->endpoints[ACCEPTOR]);
        while (answered < sent) {
            answer = bench_expect(b, ACCEPTOR, MQD_LINK_PRODUCED, &from);
            CHECK_OR(answer.error == 0, return -1);
            base_offset = answer.a;
            answered++;
        }
    }
    return base_offset;
}

static int64_t coordinator_end(struct bench *b, int64_t producer_id, int16_t epoch, bool commit)
{
    struct log_batch marker = {.marker = commit ? 2 : 1, .producer_id = producer_id, .producer_epoch = epoch};
    return coordinator_write(b, &marker, 1);
}

static int64_t client_write(struct client *client, struct raw raw, const char *transactional_id)
{
    CHECK_OR(client_produce_one(client, 1, transactional_id, -1, LIMIT_MS, 0, raw), return -1);
    struct outcomes out = client_take(client);
    CHECK_OR(out.of[0].error == 0, return -1);
    return out.of[0].base_offset;
}

static struct fetch committed(int32_t wait_ms)
{
    return (struct fetch){
        .wait_ms = wait_ms, .bytes_min = 1, .bytes_max = 8 << 20, .session_epoch = -1, .committed = 1};
}

/* While a compaction replaces files, data and aborted transactions could be of different
 * versions: readers of committed records get nothing until it is done. */
BOTH(read_committed_waits_for_a_swap_of_files)
{
    struct bench *b = bench_start(backend, small_segments);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    struct client producer = client_open(b, 0), reader[REACTORS];
    struct fetch_position from_start = {0, 0};
    char path[256];
    CHECK_EQUAL(client_write(&producer, raw_transactional(7, 0, 0, 64), "t"), 0);
    CHECK_EQUAL(coordinator_end(b, 7, 0, false), 1);
    CHECK_EQUAL(client_write(&producer, raw_noise((struct log_batch){.mark = 4}), NULL), 2);
    snprintf(path, sizeof path, "%s/quick-0/%020d.swap", log_root, 0);
    CHECK_OR(close(open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600)) == 0, return);
    struct fetch dirty = committed(0);
    dirty.committed = 0;
    for (uint32_t worker = 0; worker < REACTORS; worker++) {
        reader[worker] = client_open(b, worker);
        client_fetch(&reader[worker], committed(0), &from_start, 1, fetched);
        CHECK_EQUAL(fetched->batch_count, 0);
        CHECK_EQUAL(fetched->last_stable_offset[0], 3);
        client_fetch(&reader[worker], dirty, &from_start, 1, fetched);
        CHECK_EQUAL(fetched->batch_count, 3);
    }
    CHECK(unlink(path) == 0); /* as one that is undone: no generation changes */
    for (uint32_t worker = 0; worker < REACTORS; worker++) {
        client_fetch(&reader[worker], committed(0), &from_start, 1, fetched); /* by the list as it was */
        client_fetch(&reader[worker], committed(0), &from_start, 1, fetched);
        CHECK_EQUAL(fetched->batch_count, 3);
        CHECK_EQUAL(fetched->aborted_count, 1);
        client_close(&reader[worker]);
    }
    client_close(&producer);
    free(fetched);
    bench_stop(b);
}

BOTH(read_committed_stops_at_the_last_stable_offset)
{
    struct bench *b = bench_start(backend, small_segments);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    struct client producer = client_open(b, 0), reader[REACTORS];
    struct fetch_position from_start = {0, 0};
    CHECK_EQUAL(client_write(&producer, raw_noise((struct log_batch){.mark = 4}), NULL), 0);
    CHECK_EQUAL(client_write(&producer, raw_transactional(7, 0, 0, 64), "t"), 1);
    for (int i = 0; i < 30; i++) /* others continue, over several segments */
        CHECK_EQUAL(client_write(&producer, raw_noise((struct log_batch){.mark = 100, .body_bytes = 200}), NULL),
                    2 + i);
    for (uint32_t worker = 0; worker < REACTORS; worker++) {
        reader[worker] = client_open(b, worker);
        client_fetch(&reader[worker], committed(0), &from_start, 1, fetched);
        CHECK_EQUAL(fetched->batch_count, 1);
        CHECK_EQUAL(fetched->high_watermark[0], 32);
        CHECK_EQUAL(fetched->last_stable_offset[0], 1);
        CHECK_EQUAL(fetched->aborted_count, 0);
        struct fetch dirty = committed(0);
        dirty.committed = 0;
        client_fetch(&reader[worker], dirty, &from_start, 1, fetched);
        CHECK(fetched->batch_count > 1);
        CHECK_EQUAL(fetched->aborted_count, -1);
    }
    /* all wait at the last stable offset, though there is more below the high watermark */
    struct frame frames[REACTORS] = {{0}};
    for (uint32_t worker = 0; worker < REACTORS; worker++) {
        struct fetch_position at_end = {0, 1};
        put_fetch(&frames[worker], committed(LIMIT_MS), &at_end, 1);
        CHECK(client_send(&reader[worker], &frames[worker]));
        frame_free(&frames[worker]);
    }
    /* wakes them for nothing */
    CHECK_EQUAL(client_write(&producer, raw_noise((struct log_batch){.mark = 5}), NULL), 32);
    CHECK_EQUAL(coordinator_end(b, 7, 0, false), 33);
    for (uint32_t worker = 0; worker < REACTORS; worker++) {
        CHECK_EQUAL(client_receive(&reader[worker]), 1);
        take_fetched(&reader[worker], fetched);
        CHECK_EQUAL(fetched->batches[0].offset, 1);
        CHECK_EQUAL(fetched->last_stable_offset[0], 34);
        CHECK_EQUAL(fetched->aborted_count, 1); /* its marker is in a later segment */
        CHECK(fetched->aborted_producer[0] == 7 && fetched->aborted_first[0] == 1);
        struct fetch_position behind = {0, 33};
        client_fetch(&reader[worker], committed(LIMIT_MS), &behind, 1, fetched);
        CHECK_EQUAL(fetched->batch_count, 1);
        CHECK_EQUAL(fetched->aborted_count, 1);
        client_close(&reader[worker]);
    }
    client_close(&producer);
    free(fetched);
    bench_stop(b);
}

BOTH(a_session_is_sent_the_last_stable_offset)
{
    struct bench *b = bench_start(backend, NULL);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    struct client producer = client_open(b, 0), reader = client_open(b, 1);
    struct fetch_position requested = {0, 0};
    CHECK_EQUAL(client_write(&producer, raw_transactional(7, 0, 0, 64), "t"), 0);
    struct fetch fetch = committed(0);
    fetch.session_epoch = 0;
    client_fetch(&reader, fetch, &requested, 1, fetched);
    CHECK(fetched->session_id != 0 && fetched->batch_count == 0 && fetched->last_stable_offset[0] == 0);
    fetch = committed(LIMIT_MS);
    fetch.session_id = fetched->session_id;
    fetch.session_epoch = 1;
    struct frame frame = {0};
    put_fetch(&frame, fetch, NULL, 0);
    CHECK(client_send(&reader, &frame));
    frame_free(&frame);
    CHECK_EQUAL(coordinator_end(b, 7, 0, true), 1);
    CHECK_EQUAL(client_receive(&reader), 1);
    take_fetched(&reader, fetched);
    CHECK_EQUAL(fetched->batch_count, 2);
    CHECK_EQUAL(fetched->last_stable_offset[0], 2);
    CHECK_EQUAL(fetched->aborted_count, 0);
    client_close(&reader);
    client_close(&producer);
    free(fetched);
    bench_stop(b);
}

/* More aborted transactions than one response lists: the ranges get shorter, none is omitted. */
BOTH(many_overlapping_transactions_make_short_ranges)
{
    enum { COUNT = 4200 };
    struct bench *b = bench_start(backend, in_memory);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    struct log_batch *batches = calloc(2 * COUNT, sizeof *batches);
    struct client reader = client_open(b, 1);
    for (int i = 0; i < COUNT; i++) {
        batches[i] = (struct log_batch){.producer_id = 100 + i, .attributes = 0x10, .mark = (uint64_t)i * 2};
        batches[COUNT + i] = (struct log_batch){.marker = 1, .producer_id = 100 + i};
    }
    CHECK_EQUAL(coordinator_write(b, batches, 2 * COUNT), 2 * COUNT - 1);
    struct fetch_position requested = {0, 0};
    client_fetch(&reader, committed(0), &requested, 1, fetched);
    CHECK_EQUAL(fetched->batch_count, 1); /* all overlap the whole range: it is the first batch alone */
    CHECK_EQUAL(fetched->aborted_count, 1);
    requested.offset = COUNT - 1;
    client_fetch(&reader, committed(0), &requested, 1, fetched); /* at this one all of them have begun */
    CHECK_EQUAL(fetched->batch_count, 1);
    CHECK_EQUAL(fetched->aborted_count, COUNT);
    for (int i = 0; i < fetched->aborted_count && i < COUNT; i++)
        CHECK(fetched->aborted_producer[i] == 100 + i && fetched->aborted_first[i] == i);
    requested.offset = COUNT + 200;
    client_fetch(&reader, committed(0), &requested, 1, fetched);
    CHECK(fetched->batch_count > 1);
    CHECK_EQUAL(fetched->aborted_count, COUNT - 200);
    client_close(&reader);
    free(batches);
    free(fetched);
    bench_stop(b);
}

BOTH(the_acceptor_receives_producer_states)
{
    struct bench *b = bench_start(backend, NULL);
    struct client producer = client_open(b, 0);
    uint32_t owner = bench_owner(SLOT), from;
    struct mqd_descriptor request = {.kind = MQD_LINK_DESCRIBE, .slot = SLOT, .token = 1ull << 62 | 1};
    CHECK_EQUAL(mqd_endpoint_send(b->endpoints[ACCEPTOR], owner, &request), 0);
    mqd_endpoint_flush(b->endpoints[ACCEPTOR]);
    struct mqd_descriptor answer = bench_expect(b, ACCEPTOR, MQD_LINK_DESCRIBED, &from);
    CHECK(answer.token == request.token && answer.error == 0 && answer.size_bytes == 0);
    CHECK_EQUAL(client_write(&producer, raw_transactional(7, 3, 10, 64), "t"), 0);
    CHECK_EQUAL(client_write(&producer, raw_transactional(8, 0, 0, 64), "t"), 1);
    CHECK_EQUAL(coordinator_end(b, 8, 1, true), 2);
    for (int round = 0; round < 40; round++) { /* more than may be lent at a time: each is returned */
        CHECK_EQUAL(mqd_endpoint_send(b->endpoints[ACCEPTOR], owner, &request), 0);
        mqd_endpoint_flush(b->endpoints[ACCEPTOR]);
        answer = bench_expect(b, ACCEPTOR, MQD_LINK_DESCRIBED, &from);
        CHECK_EQUAL(answer.error, 0);
        CHECK_EQUAL(answer.size_bytes, 2 * sizeof(struct mqd_producer_view));
        const struct mqd_producer_view *views = (const struct mqd_producer_view *)(b->arenas[owner] + answer.offset);
        for (int i = 0; i < 2; i++) {
            bool open = views[i].producer_id == 7;
            CHECK(views[i].producer_id == 7 || views[i].producer_id == 8);
            CHECK_EQUAL(views[i].transaction_first_offset, open ? 0 : -1);
            CHECK_EQUAL(views[i].producer_epoch, open ? 3 : 1);
            CHECK_EQUAL(views[i].last_sequence, open ? 10 : -1); /* the marker has begun an epoch without batches */
            CHECK_EQUAL(views[i].coordinator_epoch, open ? -1 : 0);
        }
        struct mqd_descriptor release = {
            .kind = MQD_LINK_RELEASE, .slot = SLOT, .token = request.token, .offset = answer.offset};
        CHECK_EQUAL(mqd_endpoint_send(b->endpoints[ACCEPTOR], owner, &release), 0);
    }
    request.slot = 9999;
    CHECK_EQUAL(mqd_endpoint_send(b->endpoints[ACCEPTOR], owner, &request), 0);
    mqd_endpoint_flush(b->endpoints[ACCEPTOR]);
    CHECK_EQUAL(bench_expect(b, ACCEPTOR, MQD_LINK_DESCRIBED, &from).error, 6);
    client_close(&producer);
    bench_stop(b);
}
