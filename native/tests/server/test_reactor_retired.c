/* tsan: long */
/* Partitions that are being retired: what their owner accepts, refuses and redirects to the
 * partition that takes their records; producer ids, checksums, sequence numbers and transactions
 * there. */
#include "mqd_check_test.h"

#include "server/redirect.h"

enum { SEALED = MQD_RETIRING_SEALED, REDIRECTED = MQD_RETIRING_REDIRECTED };
enum { TRY_AGAIN = 19, OUT_OF_ORDER = 45, FORGOTTEN = 46, FENCED = 47, NO_SUCH_PRODUCER = 49 };

static int32_t epoch_of_step; /* each step has its own */

static void place(struct bench *b, uint32_t first, uint32_t step, int32_t leader_epoch_sent)
{
    struct mqd_topic_partition partitions[4];
    for (uint32_t i = 0; i < 4; i++)
        partitions[i] = (struct mqd_topic_partition){.slot = i,
                                                     .leader = MQD_LEADER_HERE,
                                                     .leader_epoch = i < first ? 0 : leader_epoch_sent,
                                                     .redirect = i < first ? -1 : (int32_t)(i % first),
                                                     .retiring = i < first ? 0 : step};
    for (uint32_t worker = 0; worker < REACTORS; worker++) {
        CHECK_EQUAL(
            mqd_reactor_topic_put_partitions(b->reactors[worker], ++b->token, b->topic_id, "quick", partitions, 4), 0);
        CHECK_EQUAL(bench_done(b, worker, b->token).error, 0);
    }
}

static void lead(struct bench *b, uint32_t slot, int32_t epoch)
{
    CHECK_EQUAL(mqd_reactor_set_leader_epoch(b->reactors[bench_owner(slot)], ++b->token, slot, epoch), 0);
    CHECK_EQUAL(bench_done(b, bench_owner(slot), b->token).error, 0);
}

/* Partitions from `first` on take the step, as in the metadata: places first, then epochs. */
static void step(struct bench *b, uint32_t first, uint32_t to)
{
    epoch_of_step++;
    place(b, first, to, epoch_of_step);
    for (uint32_t slot = first; slot < 4; slot++)
        lead(b, slot, epoch_of_step);
}

static struct raw sequenced(int64_t producer_id, int16_t epoch, int32_t sequence, int32_t count)
{
    return raw_noise((struct log_batch){.producer_id = producer_id,
                                        .producer_epoch = epoch,
                                        .base_sequence = sequence,
                                        .record_count = count,
                                        .attributes = 1,
                                        .mark = (uint64_t)producer_id << 32 | (uint32_t)sequence});
}

static struct outcome produce_one(struct client *client, int32_t partition, const char *transactional_id,
                                  struct raw raw)
{
    struct outcome none = {.error = 999};
    CHECK_OR(client_produce_one(client, 1, transactional_id, -1, LIMIT_MS, partition, raw), return none);
    struct outcomes out = client_take(client);
    return out.count == 1 ? out.of[0] : none;
}

/* Sends one batch and checks the response. */
static void expect(struct client *client, int32_t partition, struct raw raw, int16_t error, int64_t base_offset)
{
    struct outcome out = produce_one(client, partition, NULL, raw);
    CHECK_EQUAL(out.error, error);
    if (error == 0)
        CHECK_EQUAL(out.base_offset, base_offset);
}

/* The batch at `index` of a partition's log; every checksum before it is verified. */
static struct mqd_batch logged(uint32_t partition, int index)
{
    char path[128];
    uint8_t *bytes = calloc(1, 1 << 20);
    struct mqd_batch batch = {0};
    const char *reason = NULL;
    snprintf(path, sizeof path, "%s/quick-%u/%020d.log", log_root, partition, 0);
    int fd = open(path, O_RDONLY);
    ssize_t size_bytes = pread(fd, bytes, 1 << 20, 0);
    close(fd);
    uint8_t *at = bytes;
    for (int i = 0; i <= index; i++) {
        CHECK_OR(at + MQD_BATCH_HEADER_BYTES <= bytes + size_bytes &&
                     mqd_batch_decode(at, (uint64_t)(bytes + size_bytes - at), &batch) == 0,
                 break);
        CHECK_OR(mqd_batch_validate(at, (uint64_t)batch.size_bytes, &batch, &reason) == 0,
                 fprintf(stderr, "%s\n", reason ? reason : "?"));
        at += batch.size_bytes;
    }
    free(bytes);
    return batch;
}

static int64_t end_of(struct bench *b, uint32_t slot)
{
    struct mqd_partition_view view;
    CHECK_OR(mqd_slot_view(b->control, slot, &view) == 0, abort());
    return view.positions.high_watermark;
}

#define PRODUCER_OF(producer_id, partition) ((producer_id) + ((int64_t)((partition) + 1) << 40))

BOTH(a_sealed_partition_answers_known_batches_and_refuses_new_ones)
{
    struct bench *b = bench_start(backend, NULL);
    for (uint32_t worker = 0; worker < REACTORS; worker++) {
        struct client client = client_open(b, worker);
        int64_t id = 7 + worker;
        place(b, 2, 0, 0);
        int64_t start = end_of(b, 2);
        expect(&client, 2, sequenced(id, 0, 0, 3), 0, start);
        step(b, 2, SEALED);
        expect(&client, 2, sequenced(id, 0, 0, 3), 0, start);
        expect(&client, 2, sequenced(id, 0, 3, 1), TRY_AGAIN, -1);
        expect(&client, 2, raw_noise((struct log_batch){.mark = 4}), TRY_AGAIN, -1);
        expect(&client, 0, sequenced(id, 0, 0, 1), 0, end_of(b, 0));
        CHECK_EQUAL(end_of(b, 2), start + 3);
        client_close(&client);
    }
    bench_stop(b);
}

/* M = 1: partition 1 has another owner than 0, partition 2 the same; both through both workers. */
BOTH(a_redirected_batch_is_in_the_other_partition_under_the_rewritten_producer)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client[REACTORS] = {client_open(b, 0), client_open(b, 1)};
    for (int32_t p = 1; p < 4; p++)
        expect(&client[p % 2], p, sequenced(7, 3, 0, 2), 0, 0);
    step(b, 1, SEALED);
    step(b, 1, REDIRECTED);
    int64_t end = 0;
    for (int32_t p = 1; p < 4; p++) {
        expect(&client[0], p, sequenced(7, 3, 2, 2), 0, end);
        expect(&client[1], p, sequenced(7, 3, 4, 1), 0, end + 2);
        expect(&client[0], p, sequenced(7, 3, 2, 2), 0, end); /* sent again: in the target */
        expect(&client[1], p, sequenced(7, 3, 0, 2), 0, 0);   /* ... and in the retired one */
        expect(&client[0], p, sequenced(7, 3, 6, 1), OUT_OF_ORDER, -1);
        expect(&client[1], p, sequenced(7, 2, 5, 1), FENCED, -1);
        end += 3;
        CHECK_EQUAL(end_of(b, (uint32_t)p), 2);
        struct mqd_batch batch = logged(0, 2 * (p - 1));
        CHECK_EQUAL(batch.producer_id, PRODUCER_OF(7, p));
        CHECK(batch.producer_epoch == 3 && batch.base_sequence == 2 && batch.base_offset == end - 3);
    }
    expect(&client[0], 1, raw_noise((struct log_batch){.mark = 4}), 0, end); /* of no producer */
    CHECK_EQUAL(logged(0, 6).producer_id, -1);
    expect(&client[0], 3, sequenced(1ll << 40, 0, 0, 1), NO_SUCH_PRODUCER, -1);
    expect(&client[0], 0, sequenced(7, 0, 0, 1), 0, end + 1); /* the same client, to the target itself */
    client_close(&client[0]), client_close(&client[1]);
    bench_stop(b);
}

BOTH(pipelined_batches_stay_in_order)
{
    struct bench *b = bench_start(backend, NULL);
    enum { COUNT = 400 };
    for (uint32_t worker = 0; worker < REACTORS; worker++) {
        struct client client = client_open(b, worker);
        int64_t id = 7 + worker, start = end_of(b, 0);
        place(b, 1, 0, 0);
        expect(&client, 1, sequenced(id, 0, 0, 1), 0, worker);
        step(b, 1, SEALED);
        step(b, 1, REDIRECTED);
        for (int32_t sequence = 1, taken = 1; taken <= COUNT;) {
            for (; sequence <= COUNT && sequence - taken < 12; sequence++)
                CHECK(client_produce_one(&client, sequence, NULL, -1, LIMIT_MS, 1, sequenced(id, 0, sequence, 1)));
            struct outcomes out = client_take(&client);
            CHECK_EQUAL(out.correlation_id, taken);
            CHECK_EQUAL(out.of[0].error, 0);
            CHECK_EQUAL(out.of[0].base_offset, start + taken - 1);
            taken++;
        }
        client_close(&client);
    }
    bench_stop(b);
}

/* The retired partition does not know the producer: batches after a refused one must not be written
 * first. */
BOTH(a_refused_batch_is_not_overtaken)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0);
    step(b, 1, SEALED);
    expect(&client, 1, sequenced(7, 0, 0, 1), TRY_AGAIN, -1);
    step(b, 1, REDIRECTED);
    expect(&client, 1, sequenced(7, 0, 1, 1), OUT_OF_ORDER, -1);
    expect(&client, 1, sequenced(7, 0, 0, 1), 0, 0);
    expect(&client, 1, sequenced(7, 0, 1, 1), 0, 1);
    expect(&client, 1, sequenced(8, 0, 41, 1), 0, 2); /* whose state has expired, say: any is accepted, as always */
    expect(&client, 2, sequenced(8, 0, 0, 1), 0, 3);
    expect(&client, 2, sequenced(8, 1, 0, 1), 0, 4); /* bumped its epoch */
    expect(&client, 2, sequenced(8, 1, 1, 1), 0, 5);
    expect(&client, 2, sequenced(8, 0, 1, 1), FENCED, -1);
    client_close(&client);
    bench_stop(b);
}

/* 2^31 sequences later: the retired partition remembers the same number, of another batch. */
BOTH(sequences_that_wrap_are_not_duplicates)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 1);
    expect(&client, 1, sequenced(7, 0, 0, 5), 0, 0);
    for (int32_t i = 1; i < 6; i++)
        expect(&client, 1, sequenced(7, 0, 5 * i, 5), 0, 5 * i);
    step(b, 1, SEALED);
    step(b, 1, REDIRECTED);
    expect(&client, 1, sequenced(7, 0, 0, 5), FORGOTTEN, -1); /* written, its offset forgotten */
    expect(&client, 1, sequenced(7, 0, 5, 5), 0, 5);
    expect(&client, 1, sequenced(7, 0, 30, 1 << 30), 0, 0);
    /* half of the circle behind what it remembers */
    expect(&client, 1, sequenced(7, 0, 30 + (1 << 30), (1 << 30) - 30), 0, 1 << 30);
    for (int32_t i = 0; i < 5; i++)
        expect(&client, 1, sequenced(7, 0, 5 * i, 5), 0, 2ll * (1 << 30) - 30 + 5 * i);
    expect(&client, 1, sequenced(7, 0, 15, 5), 0, 2ll * (1 << 30) - 30 + 15);
    client_close(&client);
    bench_stop(b);
}

BOTH(nothing_is_redirected_before_its_epoch_or_without_a_target)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0);
    expect(&client, 3, sequenced(7, 0, 0, 1), 0, 0);
    place(b, 1, REDIRECTED, 9); /* the metadata says so; that it leads in this epoch it does not know yet */
    expect(&client, 3, sequenced(7, 0, 1, 1), TRY_AGAIN, -1);
    lead(b, 3, 9);
    expect(&client, 3, sequenced(7, 0, 1, 1), 0, 0);
    bench_partition_close(b, 0);
    expect(&client, 3, sequenced(7, 0, 0, 1), TRY_AGAIN, -1);
    expect(&client, 3, sequenced(7, 0, 2, 1), TRY_AGAIN, -1);
    bench_partition_open(b, 0, 0);
    mqd_slot_set_state(b->control, 0, MQD_SLOT_ONLINE);
    expect(&client, 3, sequenced(7, 0, 2, 1), 0, 1);
    bench_partition_close(b, 3); /* opened again it knows its step by itself */
    bench_partition_open(b, 3, 3);
    lead(b, 3, 9);
    expect(&client, 3, sequenced(7, 0, 3, 1), 0, 2);
    expect(&client, 3, sequenced(7, 0, 0, 1), 0, 0);
    client_close(&client);
    bench_stop(b);
}

/* Once it is hidden, the controller must learn that producers still write to it. */
BOTH(use_of_a_hidden_partition_is_reported)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0);
    struct mqd_event event;
    uint32_t reported = 0;
    step(b, 1, REDIRECTED);
    expect(&client, 1, sequenced(7, 0, 0, 1), 0, 0);
    while (mqd_reactor_next_event(b->reactors[1], &event))
        reported += event.kind == MQD_EVENT_RETIRED_USED;
    CHECK_EQUAL(reported, 0);
    step(b, 1, MQD_RETIRING_HIDDEN);
    expect(&client, 1, sequenced(7, 0, 1, 1), 0, 1);
    expect(&client, 1, sequenced(7, 0, 2, 1), 0, 2);
    while (mqd_reactor_next_event(b->reactors[1], &event))
        reported += event.kind == MQD_EVENT_RETIRED_USED && event.slot == 1;
    CHECK_EQUAL(reported, 1);
    client_close(&client);
    bench_stop(b);
}

/* ---- transactions ---- */

/* Writes of a coordinator through the acceptor. */
static struct mqd_descriptor marker(struct bench *b, uint32_t slot, int64_t producer_id, bool commit)
{
    uint32_t owner = bench_owner(slot), from;
    uint32_t size_bytes =
        log_encode(b->arenas[ACCEPTOR], (struct log_batch){.marker = commit ? 2 : 1, .producer_id = producer_id});
    bench_put(b, ACCEPTOR, owner,
              (struct mqd_descriptor){.kind = MQD_LINK_PRODUCE,
                                      .flags = MQD_PRODUCE_CONTROL | MQD_PRODUCE_ACKS_ALL,
                                      .slot = slot,
                                      .token = slot + 1,
                                      .size_bytes = size_bytes,
                                      .a = -1,
                                      .c = (int64_t)mqd_endpoint_generation(b->control, owner)});
    return bench_expect(b, ACCEPTOR, MQD_LINK_PRODUCED, &from);
}

static struct outcome transactional(struct bench *b, struct client *client, uint32_t worker, int32_t partition,
                                    int32_t sequence, bool verified)
{
    struct mqd_check_partition requested;
    struct outcome none = {.error = 999};
    uint32_t from;
    CHECK_OR(client_produce_one(client, 1, "t", -1, LIMIT_MS, partition, raw_transactional(7, 0, sequence, 64)),
             return none);
    if (!verified) {
        struct mqd_descriptor check = bench_expect(b, ACCEPTOR, MQD_LINK_CHECK, &from);
        struct mqd_check_transaction head;
        memcpy(&head, b->arenas[from] + check.offset, sizeof head);
        memcpy(&requested, b->arenas[from] + check.offset + sizeof head, sizeof requested);
        /* as the client and its coordinator know it */
        CHECK_OR(from == worker && head.producer_id == 7 && head.partition_count == 1, return none);
        CHECK_OR(requested.partition_index == partition && requested.slot == (uint32_t)partition, return none);
        check_answer_all(b, from, &check, 0);
    }
    struct outcomes out = client_take(client);
    return out.count == 1 ? out.of[0] : none;
}

static void read_committed(struct bench *b, int32_t partition, struct fetched *fetched)
{
    struct client reader = client_open(b, 0);
    struct fetch_position from_start = {partition, 0};
    struct fetch fetch = {.bytes_min = 1, .bytes_max = 8 << 20, .session_epoch = -1, .committed = 1};
    client_fetch(&reader, fetch, &from_start, 1, fetched);
    client_close(&reader);
}

BOTH(a_transaction_across_the_change_ends_in_both_partitions)
{
    struct bench *b = bench_start(backend, verifying);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    for (uint32_t worker = 0; worker < REACTORS; worker++) {
        struct client client = client_open(b, worker);
        int32_t p = worker ? 3 : 1, sequence = 0; /* into 0: another worker's */
        place(b, 1, 0, 0);
        int64_t start = end_of(b, 0);
        CHECK_EQUAL(transactional(b, &client, worker, p, sequence, false).base_offset, 0);
        step(b, 1, SEALED);
        CHECK_EQUAL(transactional(b, &client, worker, p, sequence, true).base_offset, 0);
        CHECK_EQUAL(transactional(b, &client, worker, p, 1, true).error, TRY_AGAIN);
        step(b, 1, REDIRECTED);
        /* in the target it begins: its coordinator is queried about the partition that the client
         * knows */
        struct outcome out = transactional(b, &client, worker, p, 1, false);
        CHECK(out.error == 0 && out.base_offset == start);
        CHECK_EQUAL(transactional(b, &client, worker, p, 2, true).base_offset, start + 1);
        CHECK_EQUAL(transactional(b, &client, worker, p, 1, true).base_offset, start); /* sent again */
        read_committed(b, 0, fetched);
        CHECK_EQUAL(fetched->last_stable_offset[0], start);
        struct mqd_descriptor answer = marker(b, (uint32_t)p, 7, worker == 0);
        CHECK(answer.error == 0 && answer.flags == MQD_PRODUCED_REDIRECTED && answer.size_bytes == 0);
        CHECK_EQUAL(end_of(b, (uint32_t)p), 2);
        read_committed(b, 0, fetched);
        CHECK_EQUAL(fetched->last_stable_offset[0], start);
        answer = marker(b, 0, PRODUCER_OF(7, p), worker == 0);
        CHECK(answer.error == 0 && answer.flags == 0);
        read_committed(b, 0, fetched);
        CHECK_EQUAL(fetched->last_stable_offset[0], start + 3);
        CHECK_EQUAL(fetched->aborted_count, worker);
        if (worker)
            CHECK(fetched->aborted_producer[0] == PRODUCER_OF(7, p) && fetched->aborted_first[0] == start);
        /* nothing of a transaction there: not written, but the target is named */
        answer = marker(b, (uint32_t)p, 7, worker == 0);
        CHECK(answer.error == 0 && answer.flags == MQD_PRODUCED_REDIRECTED);
        CHECK_EQUAL(end_of(b, (uint32_t)p), 2);
        client_close(&client);
    }
    free(fetched);
    bench_stop(b);
}

/* Verified for a transaction that has ended in the target since: it does not begin one there. */
BOTH(a_late_batch_begins_no_transaction_in_the_target)
{
    struct bench *b = bench_start(backend, verifying);
    struct client client = client_open(b, 1);
    uint32_t from;
    step(b, 1, SEALED);
    step(b, 1, REDIRECTED);
    CHECK(client_produce_one(&client, 1, "t", -1, LIMIT_MS, 3, raw_transactional(7, 0, 0, 64)));
    struct mqd_descriptor check = bench_expect(b, ACCEPTOR, MQD_LINK_CHECK, &from);
    CHECK_EQUAL(marker(b, 3, 7, false).flags, MQD_PRODUCED_REDIRECTED);
    CHECK_EQUAL(marker(b, 0, PRODUCER_OF(7, 3), false).error, 0);
    check_answer_all(b, from, &check, 0);
    CHECK_EQUAL(client_take(&client).of[0].error, TRY_AGAIN);
    CHECK_EQUAL(end_of(b, 0), 1);
    CHECK_EQUAL(end_of(b, 3), 0);
    CHECK(serves(&client, 5));
    client_close(&client);
    bench_stop(b);
}
