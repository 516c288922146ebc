/* tsan: long */
/* Leaders of partitions: what a worker returns to clients it cannot serve (KIP-951), and which
 * waiters it wakes when the leader changes. */
#include "mqd_check_test.h"

#include "server/topics.h"

#define SELF 1

/* Partition 0 of "quick" as the metadata has it; the others are led here. */
static void place(struct bench *b, uint32_t slot, int32_t leader, int32_t leader_epoch, uint32_t retiring)
{
    struct mqd_topic_partition partitions[4];
    for (uint32_t i = 0; i < 4; i++)
        partitions[i] = (struct mqd_topic_partition){.slot = i, .leader = SELF, .redirect = -1};
    partitions[0] = (struct mqd_topic_partition){
        .slot = slot, .leader = leader, .leader_epoch = leader_epoch, .redirect = -1, .retiring = retiring};
    for (uint32_t worker = 0; worker < REACTORS; worker++) {
        CHECK_EQUAL(
            mqd_reactor_topic_put_partitions(b->reactors[worker], ++b->token, b->topic_id, "quick", partitions, 4), 0);
        CHECK_EQUAL(bench_done(b, worker, b->token).error, 0);
    }
}

static void brokers(struct bench *b, uint32_t count)
{
    static const struct mqd_broker_address all[] = {
        {.node_id = 9, .port = 9099, .host = "nine.example", .has_rack = 1, .rack = "r9"},
        {.node_id = SELF, .port = 9091, .host = "one.example"},
        {.node_id = 7, .port = 9097, .host = "seven.example"}};
    for (uint32_t worker = 0; worker < REACTORS; worker++) {
        CHECK_EQUAL(mqd_reactor_brokers_put(b->reactors[worker], ++b->token, SELF, all, count), 0);
        CHECK_EQUAL(bench_done(b, worker, b->token).error, 0);
    }
}

struct led {
    int16_t error;
    int32_t leader, leader_epoch;
    uint32_t node_count;
    int32_t node_id, port;
    char host[64], rack[64];
};

static void take_text(struct client *client, char *out, uint32_t capacity)
{
    uint32_t size_bytes = (uint32_t)take(client, 1);
    size_bytes = size_bytes ? size_bytes - 1 : 0;
    CHECK_OR(size_bytes < capacity && client->at + size_bytes <= client->reply_bytes, return);
    memcpy(out, client->reply + client->at, size_bytes);
    out[size_bytes] = 0;
    client->at += size_bytes;
}

/* Produce v10 to partition 0. */
static void request_led(struct client *client, struct led *out)
{
    struct frame frame = {0};
    uint8_t batch[512];
    uint32_t size_bytes = log_encode(batch, (struct log_batch){.mark = 1, .record_count = 1, .body_bytes = 40});
    char name[64];
    CHECK(size_bytes < 127);
    uint32_t begin = frame_begin(&frame, 0, 10, 5);
    put(&frame, 1, 0), put(&frame, 1, 0), put(&frame, 2, 1), put(&frame, 4, LIMIT_MS), put(&frame, 1, 2),
        put(&frame, 1, 6), put_bytes(&frame, "quick", 5);
    put(&frame, 1, 2), put(&frame, 4, 0), put(&frame, 1, size_bytes + 1), put_bytes(&frame, batch, size_bytes),
        put(&frame, 1, 0), put(&frame, 1, 0), put(&frame, 1, 0);
    frame_end(&frame, begin);
    CHECK(client_send(client, &frame));
    CHECK_EQUAL(client_receive(client), 1);
    frame_free(&frame);
    CHECK_EQUAL(take(client, 4), 5);
    take(client, 1);
    CHECK_EQUAL(take(client, 1), 2);
    take_text(client, name, sizeof name);
    CHECK_EQUAL(take(client, 1), 2);
    CHECK_EQUAL(take(client, 4), 0);
    out->error = (int16_t)take(client, 2);
    take(client, 8), take(client, 8), take(client, 8);
    CHECK_EQUAL(take(client, 1), 1);
    char message[256] = "";
    take_text(client, message, sizeof message);
    if (take(client, 1)) {
        CHECK_EQUAL(take(client, 1), 0);
        CHECK_EQUAL(take(client, 1), 9);
        out->leader = (int32_t)take(client, 4), out->leader_epoch = (int32_t)take(client, 4);
        CHECK_EQUAL(take(client, 1), 0);
    }
    CHECK_EQUAL(take(client, 1), 0);
    take(client, 4);
    if (take(client, 1)) {
        CHECK_EQUAL(take(client, 1), 0);
        uint32_t bytes = (uint32_t)take(client, 1), at = client->at;
        out->node_count = (uint32_t)take(client, 1) - 1;
        out->node_id = (int32_t)take(client, 4);
        take_text(client, out->host, sizeof out->host);
        out->port = (int32_t)take(client, 4);
        take_text(client, out->rack, sizeof out->rack);
        CHECK_EQUAL(take(client, 1), 0);
        CHECK_EQUAL(client->at - at, bytes);
    }
    CHECK(!client->broken && client->at == client->reply_bytes);
}

static struct led produce_flexible(struct client *client)
{
    struct led out = {.leader = -9};
    request_led(client, &out);
    return out;
}

BOTH(a_leader_on_another_host_is_named_with_its_address)
{
    struct bench *b = bench_start(backend, NULL);
    struct client own = client_open(b, 0), other = client_open(b, 1);
    struct client *clients[] = {&own, &other};
    for (int i = 0; i < 2; i++) {
        CHECK_EQUAL(produce_flexible(clients[i]).error, 0); /* as on a host of its own */
        brokers(b, 3);
        place(b, MQD_SLOT_NONE, 9, 4, 0);
        struct led led = produce_flexible(clients[i]);
        CHECK_EQUAL(led.error, 6);
        CHECK_EQUAL(led.leader, 9);
        CHECK_EQUAL(led.leader_epoch, 4);
        CHECK_EQUAL(led.node_count, 1);
        CHECK_EQUAL(led.node_id, 9);
        CHECK_EQUAL(led.port, 9099);
        CHECK(strcmp(led.host, "nine.example") == 0 && strcmp(led.rack, "r9") == 0);
        place(b, MQD_SLOT_NONE, 7, 5, 0);
        led = produce_flexible(clients[i]);
        CHECK(led.leader == 7 && strcmp(led.host, "seven.example") == 0 && led.rack[0] == 0);
        place(b, MQD_SLOT_NONE, -1, 6, 0); /* no leader */
        led = produce_flexible(clients[i]);
        CHECK(led.error == 6 && led.leader == -9 && led.node_count == 0);
        brokers(b, 2); /* node 7 is fenced: no client is sent there */
        place(b, MQD_SLOT_NONE, 7, 7, 0);
        led = produce_flexible(clients[i]);
        CHECK(led.error == 6 && led.leader == -9 && led.node_count == 0);
        place(b, 0, SELF, 8, 0);
        CHECK_EQUAL(produce_flexible(clients[i]).error, 0);
    }
    client_close(&own), client_close(&other);
    bench_stop(b);
}

BOTH(a_waiting_fetch_learns_of_another_leader)
{
    struct bench *b = bench_start(backend, NULL);
    struct client readers[2] = {client_open(b, 0), client_open(b, 1)};
    struct fetch_position requested = {0, 0};
    struct frame frame = {0};
    struct fetched *fetched = calloc(1, sizeof *fetched);
    brokers(b, 3);
    place(b, 0, SELF, 1, 0);
    put_fetch(&frame,
              (struct fetch){
                  .correlation_id = 3, .wait_ms = LIMIT_MS, .bytes_min = 1, .bytes_max = 1 << 20, .session_epoch = -1},
              &requested, 1);
    for (int i = 0; i < 2; i++)
        CHECK(client_send(&readers[i], &frame));
    while (mqd_load_acquire(&mqd_control_partition(b->control, 0)->waiters) != 3)
        usleep(1000); /* both are parked */
    place(b, MQD_SLOT_NONE, 9, 2, 0);
    for (int i = 0; i < 2; i++) {
        CHECK_EQUAL(client_receive(&readers[i]), 1);
        take_fetched(&readers[i], fetched);
        CHECK_EQUAL(fetched->error[0], 6);
        client_close(&readers[i]);
    }
    free(fetched);
    frame_free(&frame);
    bench_stop(b);
}

BOTH(a_retiring_partition_takes_no_records_and_is_read)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0);
    struct fetch_position requested = {0, 0};
    struct fetched *fetched = calloc(1, sizeof *fetched);
    brokers(b, 3);
    place(b, 0, SELF, 1, 0);
    CHECK_EQUAL(produce_flexible(&client).error, 0);
    place(b, 0, SELF, 2, 1);
    CHECK_EQUAL(produce_flexible(&client).error, 19);
    /* acks=1 is answered before the flush, after which it is read */
    client_fetch(&client,
                 (struct fetch){.wait_ms = LIMIT_MS, .bytes_min = 1, .bytes_max = 1 << 20, .session_epoch = -1},
                 &requested, 1, fetched);
    CHECK_EQUAL(fetched->batch_count, 1);
    free(fetched);
    client_close(&client);
    bench_stop(b);
}

static struct outcome produce_sequenced(struct client *client, int32_t sequence)
{
    struct raw raw = raw_noise(
        (struct log_batch){.producer_id = 5, .base_sequence = sequence, .record_count = 1, .mark = (uint64_t)sequence});
    CHECK_OR(client_produce_one(client, sequence, NULL, -1, LIMIT_MS, 0, raw), abort());
    struct outcomes out = client_take(client);
    return out.of[0];
}

/* The partition of worker 0 has no owner for a moment; a producer that it does not know has two
 * batches in flight, through its owner's worker or through the other one. */
BOTH(a_batch_does_not_overtake_the_one_that_was_refused_before_it)
{
    for (uint32_t worker = 0; worker < REACTORS; worker++) {
        struct bench *b = bench_start(backend, NULL);
        struct client client = client_open(b, worker);
        bench_partition_close(b, 0);
        /* NOT_LEADER_OR_FOLLOWER by its owner, KAFKA_STORAGE_ERROR by the other worker */
        CHECK_EQUAL(produce_sequenced(&client, 0).error, worker == 0 ? 6 : 56);
        bench_partition_open(b, 0, 0);
        for (int32_t sequence = 1; sequence < 4; sequence++)
            CHECK_EQUAL(produce_sequenced(&client, sequence).error, 19); /* NOT_ENOUGH_REPLICAS */
        for (int32_t sequence = 0; sequence < 5; sequence++) {
            struct outcome out = produce_sequenced(&client, sequence);
            CHECK_EQUAL(out.error, 0);
            CHECK_EQUAL(out.base_offset, sequence);
        }
        client_close(&client);
        bench_stop(b);
    }
}

/* Its state has expired: it has nothing earlier to send, and continues after one refusal. */
BOTH(an_unknown_producer_without_earlier_batches_continues)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 1);
    bench_partition_close(b, 0);
    CHECK_EQUAL(produce_sequenced(&client, 70).error, 56);
    bench_partition_open(b, 0, 0);
    CHECK_EQUAL(produce_sequenced(&client, 70).error, 19);
    for (int32_t sequence = 70; sequence < 75; sequence++)
        CHECK_EQUAL(produce_sequenced(&client, sequence).error, 0);
    client_close(&client);
    bench_stop(b);
}
