/* tsan: long */
/* Random checks: producers that pipeline transactional batches over both workers, an acceptor
 * that answers late, out of order, with errors, never, and that dies.
 *
 * Checked, whatever happens:
 *   order       a batch is refused as out of sequence only when an earlier one of its producer and
 *               partition was refused: nothing overtakes
 *   durability  what was acknowledged is in the log, at its offset, once, and the batches of a
 *               producer are there in their order */
#include "mqd_check_test.h"

#include <pthread.h>

enum {
    PRODUCERS = 6,
    ROUND_COUNT = 40,
    PIPELINE_MAX = 8,
    HELD_MAX = 16,
    ACKNOWLEDGED_MAX = PRODUCERS * 400 * PIPELINE_MAX * 4
};

struct acknowledged {
    uint64_t mark;
    int64_t offset;
    int32_t partition;
};
struct mix {
    struct bench *b;
    uint64_t seed;
    uint32_t rounds;
    int ended; /* atomic */
    pthread_mutex_t mutex;
    struct acknowledged *acknowledged;
    uint32_t acknowledged_count, refused_count, check_count, restart_count;
};
struct producer {
    struct mix *mix;
    uint32_t number;
    uint64_t seed;
};

/* ---- the acceptor ---- */

static void answer_by_chance(struct mix *mix, uint32_t from, const struct mqd_descriptor *check, uint64_t *seed)
{
    static const int16_t errors[] = {48, 19, 51, 47};
    int16_t codes[64] = {0};
    struct mqd_check_transaction head;
    memcpy(&head, mix->b->arenas[from] + check->offset, sizeof head);
    CHECK(head.partition_count >= 1 && head.partition_count <= 4);
    if (test_random(seed) % 4 == 0)
        codes[test_random(seed) % head.partition_count] = errors[test_random(seed) % 4];
    check_answer(mix->b, from, check, codes, head.partition_count);
}

static void *accept_checks(void *argument)
{
    struct mix *mix = argument;
    struct mqd_descriptor held[HELD_MAX], check;
    uint32_t held_from[HELD_MAX], held_count = 0, from;
    uint64_t seed = mix->seed;
    while (!__atomic_load_n(&mix->ended, __ATOMIC_ACQUIRE)) {
        bool got = bench_take(mix->b, ACCEPTOR, &check, &from, 1);
        /* like the real one, drops requests to its predecessor */
        bool own = got && (uint64_t)check.error == (mqd_endpoint_generation(mix->b->control, ACCEPTOR) & 0x7fffffff);
        if (own && check.kind == MQD_LINK_CHECK) {
            mix->check_count++;
            uint64_t choice = test_random(&seed) % 8;
            if (choice < 4)
                answer_by_chance(mix, from, &check, &seed);
            else if (choice < 7 && held_count < HELD_MAX)
                held[held_count] = check, held_from[held_count++] = from;
            /* else never: it times out */
        }
        if (held_count && test_random(&seed) % 3 == 0) {
            uint32_t pick = (uint32_t)(test_random(&seed) % held_count);
            answer_by_chance(mix, held_from[pick], &held[pick], &seed);
            held[pick] = held[--held_count], held_from[pick] = held_from[held_count];
        }
        if (test_random(&seed) % 200 == 0) {
            acceptor_restarts(mix->b);
            mix->restart_count++;
            held_count = 0;
        }
    }
    return NULL;
}

/* ---- producers ---- */

struct sent {
    int32_t partition[4];
    uint64_t mark[4];
    uint32_t count;
};

static void note(struct mix *mix, uint64_t mark, int64_t offset, int32_t partition)
{
    pthread_mutex_lock(&mix->mutex);
    if (mix->acknowledged_count < ACKNOWLEDGED_MAX)
        mix->acknowledged[mix->acknowledged_count++] = (struct acknowledged){mark, offset, partition};
    pthread_mutex_unlock(&mix->mutex);
}

static bool send_some(struct client *client, uint64_t *seed, int64_t producer_id, uint32_t sequence[4],
                      struct sent *sent, int32_t correlation_id)
{
    struct partition_batch batches[4];
    sent->count = 0;
    for (int32_t partition = 0; partition < 4; partition++) {
        if (test_random(seed) % 2 && sent->count + (3 - (uint32_t)partition))
            continue;
        int32_t bytes = test_random(seed) % 16 ? 8 + (int32_t)(test_random(seed) % 5000)
                                               : 60000 + (int32_t)(test_random(seed) % 60000);
        struct raw raw = raw_transactional(producer_id, 1, (int32_t)sequence[partition], bytes);
        memcpy(&sent->mark[sent->count], raw.bytes + MQD_BATCH_HEADER_BYTES, 8);
        sequence[partition]++;
        batches[sent->count] = (struct partition_batch){partition, raw};
        sent->partition[sent->count++] = partition;
    }
    return client_produce_batches(client, correlation_id, "id", test_random(seed) % 2 ? -1 : 1,
                                  test_random(seed) % 8 ? 400 : LIMIT_MS, batches, sent->count);
}

static void one_round(struct producer *producer, struct client *client, int64_t producer_id)
{
    struct sent sent[PIPELINE_MAX];
    uint32_t sequence[4] = {0}, count = 1 + (uint32_t)(test_random(&producer->seed) % PIPELINE_MAX);
    bool broken[4] = {0}; /* an earlier one was refused, or its outcome is unknown */
    int64_t last_offset[4] = {-1, -1, -1, -1};
    for (uint32_t i = 0; i < count; i++)
        CHECK(send_some(client, &producer->seed, producer_id, sequence, &sent[i], (int32_t)i));
    for (uint32_t i = 0; i < count; i++) {
        struct outcomes out = client_take(client);
        CHECK_EQUAL(out.correlation_id, i);
        CHECK_EQUAL(out.count, sent[i].count);
        for (uint32_t j = 0; j < out.count; j++) {
            int32_t partition = sent[i].partition[j];
            int16_t error = out.of[j].error;
            if (error == 0) {
                CHECK(out.of[j].base_offset > last_offset[partition]);
                last_offset[partition] = out.of[j].base_offset;
                note(producer->mix, sent[i].mark[j], out.of[j].base_offset, partition);
                continue;
            }
            CHECK_OR(error == 48 || error == 19 || error == 51 || error == 47 || error == 7 ||
                         (error == 45 && broken[partition]),
                     fprintf(stderr, "seed %llu: error %d\n", (unsigned long long)producer->mix->seed, error));
            broken[partition] = true;
            __atomic_fetch_add(&producer->mix->refused_count, 1, __ATOMIC_RELAXED);
        }
    }
}

static void *produce_by_chance(void *argument)
{
    struct producer *producer = argument;
    struct mix *mix = producer->mix;
    struct client client = client_open(mix->b, producer->number % REACTORS);
    for (uint32_t round = 0; round < mix->rounds && !__atomic_load_n(&test_failed, __ATOMIC_SEQ_CST); round++) {
        one_round(producer, &client, 1 + (int64_t)(producer->number * 1000 + round));
        if (test_random(&producer->seed) % 6 == 0) { /* leaves, with something under way */
            struct sent sent;
            uint32_t sequence[4] = {0};
            send_some(&client, &producer->seed, 100000 + (int64_t)(producer->number * 1000 + round), sequence, &sent,
                      0);
            client_close(&client);
            client = client_open(mix->b, (producer->number + round) % REACTORS);
        }
    }
    client_close(&client);
    return NULL;
}

/* ---- afterwards ---- */

static void read_back(struct mix *mix, int32_t partition)
{
    struct client client = client_open(mix->b, 0);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    uint64_t *marks = calloc(1 << 16, sizeof *marks);
    uint32_t *last_sequence = calloc(1 << 18, sizeof *last_sequence); /* + 1, by producer id */
    int64_t next = 0;
    do {
        struct fetch_position requested = {partition, next};
        client_fetch(&client, (struct fetch){.bytes_max = 8 << 20, .session_epoch = -1}, &requested, 1, fetched);
        for (uint32_t i = 0; i < fetched->batch_count; i++) {
            uint64_t mark = fetched->batches[i].mark, producer_id = mark >> 32 & 0x3ffff, sequence = mark & 0xffffffff;
            CHECK_EQUAL(fetched->batches[i].offset, next);
            CHECK_EQUAL(last_sequence[producer_id], sequence); /* none is missing, none is there twice */
            last_sequence[producer_id] = (uint32_t)sequence + 1;
            CHECK(next < 1 << 16);
            marks[next++] = mark;
        }
    } while (fetched->batch_count);
    for (uint32_t i = 0; i < mix->acknowledged_count; i++)
        if (mix->acknowledged[i].partition == partition) {
            CHECK(mix->acknowledged[i].offset < next);
            CHECK_EQUAL(marks[mix->acknowledged[i].offset], mix->acknowledged[i].mark);
        }
    free(fetched);
    free(marks);
    free(last_sequence);
    client_close(&client);
}

static void run_mix(int backend, uint64_t seed)
{
    struct mix mix = {.b = bench_start(backend, verifying),
                      .seed = seed,
                      .rounds = ROUND_COUNT,
                      .mutex = PTHREAD_MUTEX_INITIALIZER,
                      .acknowledged = calloc(ACKNOWLEDGED_MAX, sizeof *mix.acknowledged)};
    struct producer producers[PRODUCERS];
    pthread_t acceptor, threads[PRODUCERS];
    pthread_create(&acceptor, NULL, accept_checks, &mix);
    for (uint32_t i = 0; i < PRODUCERS; i++) {
        producers[i] = (struct producer){&mix, i, seed * 1000003 + i};
        pthread_create(&threads[i], NULL, produce_by_chance, &producers[i]);
    }
    for (uint32_t i = 0; i < PRODUCERS; i++)
        pthread_join(threads[i], NULL);
    __atomic_store_n(&mix.ended, 1, __ATOMIC_RELEASE);
    pthread_join(acceptor, NULL);
    for (int32_t partition = 0; partition < 4; partition++)
        read_back(&mix, partition);
    test_message("seed %llu: %u checks, %u batches acknowledged, %u refused, %u restarts", (unsigned long long)seed,
                 mix.check_count, mix.acknowledged_count, mix.refused_count, mix.restart_count);
    CHECK(mix.check_count > 50 && mix.acknowledged_count > 100 && mix.refused_count > 10);
    free(mix.acknowledged);
    bench_stop(mix.b);
}

BOTH(mixes)
{
    for (uint64_t seed = 1; seed <= (test_long() ? 40 : 1); seed++)
        run_mix(backend, seed);
}
