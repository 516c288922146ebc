/* A producer that is killed at any instruction: the submissions that its worker then finds are
 * complete frames with valid batches, with the first records in order, none torn, none duplicated.
 * Each round kills another process at another time, by a seed; MQD_TEST_SEED=N begins with that
 * round. */
#include "mqd_test.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "base/varint.h"
#include "mqd_client_test.h"

enum { PARTITIONS = 2 };

/* Never returns: writes numbered records, of random sizes, at full speed. */
static void produce_for_ever(const char *path, uint64_t seed)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    struct mqd_client_options options = {.socket_path = path,
                                         .client_id = "victim",
                                         .data_bytes = 128 << 10,
                                         .reply_bytes = 4096,
                                         .submission_count = 32,
                                         .timeout_ms = 10000};
    struct mqd_client *client = mqd_client_open(&options);
    struct mqd_producer_options producer_options = {.acks = -1,
                                                    .producer_id = 1,
                                                    .producer_epoch = 0,
                                                    .batch_bytes = 1500,
                                                    .inflight_max = 5,
                                                    .produce_version = 12};
    struct mqd_producer *producer = client ? mqd_producer_open(client, &producer_options) : NULL;
    if (!producer)
        _exit(1);
    int32_t topic = mqd_producer_topic(producer, "t", PARTITIONS, MQD_PARTITIONER_RANDOM);
    static uint8_t value[400];
    uint32_t next[PARTITIONS] = {0};
    struct mqd_delivery deliveries[64];
    for (;;) {
        uint32_t partition = (uint32_t)(test_random(&seed) % PARTITIONS);
        int32_t size = 4 + (int32_t)(test_random(&seed) % 390);
        memcpy(value, &next[partition], 4);
        if (mqd_producer_put(producer, topic, (int32_t)partition, value, size, NULL, -1, NULL, 0, 1) > 0)
            next[partition]++;
        else if (mqd_client_wait(client, 100000) < 0)
            _exit(1);
        if (test_random(&seed) % 8 == 0)
            mqd_producer_send(producer, test_now_ns() / 1000, test_random(&seed) % 2 == 0);
        mqd_client_poll(client);
        mqd_producer_deliveries(producer, deliveries, 64);
    }
}

/* The open batch contains the next records of its partition. */
static void check_records(struct fake *fake, uint32_t *next, uint32_t *sequence)
{
    int32_t partition = fake->partition.partition_index;
    CHECK(partition >= 0 && partition < PARTITIONS);
    CHECK_EQUAL(fake->batch.base_sequence, sequence[partition]);
    sequence[partition] += (uint32_t)fake->batch.record_count;
    const uint8_t *at = fake->partition.records + MQD_BATCH_HEADER_BYTES,
                  *end = fake->partition.records + fake->partition.size_bytes;
    for (int32_t i = 0; i < fake->batch.record_count; i++) {
        int64_t size, skip, value_bytes;
        at = mqd_varint(at, end, &size);
        CHECK(at && size <= end - at);
        const uint8_t *after = at + size, *field = mqd_varlong(at + 1, after, &skip);
        field = mqd_varint(mqd_varint(field, after, &skip), after, &skip);
        field = mqd_varint_size(field, after, &value_bytes);
        uint32_t number;
        CHECK(field && value_bytes >= 4);
        memcpy(&number, field, 4);
        CHECK_EQUAL(number, next[partition]);
        next[partition]++;
        at = after;
    }
    CHECK(at == end);
}

static uint64_t crash_round(uint64_t seed)
{
    struct fake fake;
    uint32_t next[PARTITIONS] = {0}, sequence[PARTITIONS] = {0};
    int64_t base_offset = 0;
    fake_open(&fake, "crash");
    pid_t victim = fork();
    if (victim == 0)
        produce_for_ever(fake.path, seed);
    fake_accept(&fake);
    int64_t end = test_now_ns() + (int64_t)(test_random(&seed) % 3000000);
    while (!test_failed && test_now_ns() < end)
        if (fake_next(&fake)) {
            check_records(&fake, next, sequence);
            fake_answer(&fake, 0, base_offset++);
        }
    kill(victim, SIGKILL);
    int status;
    CHECK_OR(waitpid(victim, &status, 0) == victim && WIFSIGNALED(status), );
    char byte;
    CHECK_OR(recv(fake.socket, &byte, 1, 0) <= 0, ); /* its end is detected */
    while (!test_failed && fake_next(&fake))
        check_records(&fake, next, sequence);
    fake_close(&fake);
    return next[0] + next[1];
}

TEST(killed_at_any_instruction)
{
    uint64_t first = getenv("MQD_TEST_SEED") ? strtoull(getenv("MQD_TEST_SEED"), NULL, 10) : 1,
             rounds = test_long() ? 400 : 25, records = 0;
    for (uint64_t seed = first; seed < first + rounds && !test_failed; seed++) {
        records += crash_round(seed);
        if (test_failed)
            test_message("MQD_TEST_SEED=%llu", (unsigned long long)seed);
    }
    CHECK(records > 0);
    test_message("%llu records by %llu processes that were killed", (unsigned long long)records,
                 (unsigned long long)rounds);
}
