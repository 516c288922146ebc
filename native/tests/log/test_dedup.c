/* Deduplication (log/dedup/dedup.h): any sequence of batches, transactions, failed writes,
 * restarts and leader changes against a model that keeps every record; then cases that the model
 * does not reach. */
#define MQD_PLANTED_DEDUP
#define LOG_TEST_IN_MEMORY
#include "mqd_log_test.h"

#include <signal.h>
#include <sys/wait.h>

#include "log/partition_follow.h"
#include "wire/record_scan.h"

/* with planted bugs, instead of the broker's */
uint32_t mqd_dedup_planted;
#include "../../log/dedup/ids.c"
#undef FREE
#include "../../log/dedup/dedup.c"

#define WINDOW_MS 10000
#define STEP_MS 100 /* longer than the resolution of the window's marks, so that the model is exact */
#define ID_COUNT 60
#define PRODUCERS 6 /* 0, 1: idempotent; 2 to 5: transactional */
#define RECORDS_MAX 200000
#define BATCH_RECORDS_MAX 6
#define BATCH_BYTES 512

static struct mqd_log_options options_with_window(void)
{
    struct mqd_log_options options = log_options();
    options.segment_bytes = 1 << 26;
    options.log_append_time = 1;
    options.flush_on_ack = 0;
    options.dedup_window_ms = WINDOW_MS;
    options.dedup_count_max = 1000000;
    strcpy(options.dedup_header, "id");
    return options;
}

/* A batch of records, each with a header "id"; negative id: without. producer -1: none. */
static uint32_t encode(uint8_t *out, const int *ids, int count, int producer, int32_t sequence)
{
    uint8_t records[BATCH_BYTES], *at = records;
    for (int i = 0; i < count; i++) {
        char text[16];
        int text_bytes = ids[i] < 0 ? 0 : snprintf(text, sizeof text, "%d", ids[i]);
        uint8_t body[64], *to = body;
        *to++ = 0;                  /* attributes */
        *to++ = 0;                  /* timestamp delta */
        *to++ = (uint8_t)(2 * i);   /* offset delta */
        *to++ = 1;                  /* no key */
        *to++ = 2, *to++ = 'v';     /* value */
        *to++ = ids[i] < 0 ? 2 : 4; /* headers: another one first */
        *to++ = 4, *to++ = 'n', *to++ = 'o', *to++ = 1;
        if (ids[i] >= 0) {
            *to++ = 4, *to++ = 'i', *to++ = 'd', *to++ = (uint8_t)(2 * text_bytes);
            memcpy(to, text, (size_t)text_bytes);
            to += text_bytes;
        }
        *at++ = (uint8_t)(2 * (to - body));
        memcpy(at, body, (size_t)(to - body));
        at += to - body;
    }
    struct mqd_batch batch = {.partition_leader_epoch = -1,
                              .attributes = producer >= 2 ? MQD_ATTRIBUTE_TRANSACTIONAL : 0,
                              .last_offset_delta = count - 1,
                              .base_timestamp_ms = NOW,
                              .max_timestamp_ms = NOW,
                              .producer_id = producer < 0 ? -1 : 100 + producer,
                              .producer_epoch = producer < 0 ? -1 : 0,
                              .base_sequence = producer < 0 ? -1 : sequence,
                              .record_count = count};
    mqd_batch_put_header(out, &batch, records, (uint32_t)(at - records));
    memcpy(out + MQD_BATCH_HEADER_BYTES, records, (size_t)(at - records));
    return (uint32_t)(MQD_BATCH_HEADER_BYTES + (at - records));
}

static int16_t stage(struct mqd_partition *partition, uint8_t *bytes, uint32_t size_bytes, int64_t now_ms,
                     uint32_t flags, struct mqd_stage_result *result)
{
    struct mqd_batch batch;
    mqd_batch_decode(bytes, size_bytes, &batch);
    return mqd_partition_stage(partition, &batch, bytes, now_ms % 200 == 0, flags, 0, now_ms, result);
}

/* ---- the model ---- */

struct known {
    int id, producer; /* -1: not transactional */
    int64_t offset, time_ms, marker;
    bool aborted;
};

struct model {
    struct known *records;
    uint32_t count, staged_from;
    struct mqd_partition *partition[2]; /* the leader's, and a follower's */
    char path[2][96];
    int leader;
    int64_t now_ms, high_watermark, fed_bytes;
    int32_t sequence[PRODUCERS], sequence_before[PRODUCERS];
    bool open[PRODUCERS], open_before[PRODUCERS];
    uint64_t random, left_out, refused, rewritten;
    uint8_t bytes[64][BATCH_BYTES];
    uint32_t staged;
};

static uint64_t pick(struct model *model, uint64_t below)
{
    return test_random(&model->random) % below;
}

static const struct known *model_find(const struct model *model, int id)
{
    for (uint32_t i = model->count; i-- > 0 && model->records[i].time_ms > model->now_ms - WINDOW_MS;) {
        const struct known *known = &model->records[i];
        if (known->id == id && !(known->aborted && known->marker < model->high_watermark))
            return known;
    }
    return NULL;
}

static bool undecided(const struct model *model, const struct known *known, int producer)
{
    return known->producer >= 0 && (known->marker < 0 || known->marker >= model->high_watermark) &&
           !(known->marker < 0 && known->producer == producer);
}

static void check_written(const struct model *model, uint32_t from, int64_t base_offset)
{
    const struct mqd_partition *partition = model->partition[model->leader];
    const struct mqd_staged *staged =
        mqd_partition_staged_at((struct mqd_partition *)partition, partition->staged_count - 1);
    struct mqd_records records;
    struct mqd_record record;
    struct mqd_batch batch = staged->batch;
    mqd_records_begin(&records, &batch, staged->bytes + MQD_BATCH_HEADER_BYTES,
                      (uint64_t)batch.size_bytes - MQD_BATCH_HEADER_BYTES);
    for (uint32_t i = from; i < model->count; i++) {
        CHECK(mqd_records_next(&records, &record) == 1);
        CHECK_EQUAL(base_offset + record.offset_delta, model->records[i].offset);
    }
    CHECK_EQUAL(mqd_records_next(&records, &record), 0);
}

static void produce(struct model *model)
{
    struct mqd_partition *partition = model->partition[model->leader];
    int producer = (int)pick(model, PRODUCERS + 2) - 2, ids[BATCH_RECORDS_MAX], count = 1;
    producer = producer < 0 ? -1 : producer;
    int transactional = producer >= 2 ? producer : -1;
    if (pick(model, 3) == 0)
        count += (int)pick(model, BATCH_RECORDS_MAX);
    for (int i = 0; i < count; i++)
        ids[i] = (int)pick(model, ID_COUNT);
    uint32_t before = model->count, left_out = 0;
    int64_t base = partition->staged_end_offset, old_offset = -1, old_end = -1;
    bool refused = false;
    for (int i = 0; i < count && !refused; i++) {
        const struct known *known = model_find(model, ids[i]);
        if (known && undecided(model, known, transactional))
            refused = true;
        else if (known) {
            old_offset = left_out++ ? old_offset : known->offset;
            old_end = known->offset >= old_end ? known->offset + 1 : old_end;
        } else
            model->records[model->count++] = (struct known){ids[i], transactional, base + i, model->now_ms, -1, false};
    }
    struct mqd_stage_result result;
    uint8_t *bytes = model->bytes[model->staged];
    uint32_t size_bytes = encode(bytes, ids, count, producer, producer < 0 ? -1 : model->sequence[producer]);
    int16_t error = stage(partition, bytes, size_bytes, model->now_ms, 0, &result);
    CHECK_EQUAL(error, refused ? 19 : 0);
    if (refused) {
        model->count = before;
        model->refused++;
        CHECK(result.message);
        return;
    }
    CHECK_EQUAL(result.left_out_count, left_out);
    bool all = left_out == (uint32_t)count;
    CHECK_EQUAL(result.duplicate, all && producer < 0);
    if (all)
        CHECK_EQUAL(result.base_offset, old_offset);
    else
        CHECK_EQUAL(result.base_offset, base);
    model->left_out += left_out;
    if (result.duplicate) {
        CHECK_EQUAL(result.end_offset, old_end);
        return;
    }
    CHECK_EQUAL(result.end_offset, base + count);
    model->rewritten += left_out != 0;
    model->staged++;
    check_written(model, before, base);
    if (producer >= 0)
        model->sequence[producer] += count;
    if (producer >= 2)
        model->open[producer] = true;
}

static void end_transaction(struct model *model)
{
    int producer = 2 + (int)pick(model, PRODUCERS - 2);
    if (!model->open[producer])
        return;
    bool commit = pick(model, 2);
    struct mqd_partition *partition = model->partition[model->leader];
    struct mqd_stage_result result;
    int64_t offset = partition->staged_end_offset;
    uint8_t *bytes = model->bytes[model->staged++];
    uint32_t size_bytes = log_encode(
        bytes, (struct log_batch){.marker = commit ? 2 : 1, .producer_id = 100 + producer, .record_count = 1});
    CHECK_EQUAL(stage(partition, bytes, size_bytes, model->now_ms, MQD_STAGE_COORDINATOR, &result), 0);
    for (uint32_t i = 0; i < model->count; i++)
        if (model->records[i].producer == producer && model->records[i].marker < 0) {
            model->records[i].marker = offset;
            model->records[i].aborted = !commit;
        }
    model->open[producer] = false;
}

/* The write failed: none of it happened. */
static void fail_write(struct model *model)
{
    struct mqd_partition *partition = model->partition[model->leader];
    mqd_partition_unstage(partition);
    model->count = model->staged_from;
    for (uint32_t i = 0; i < model->count; i++)
        if (model->records[i].marker >= partition->log_end_offset) {
            model->records[i].marker = -1;
            model->records[i].aborted = false;
        }
    memcpy(model->sequence, model->sequence_before, sizeof model->sequence);
    memcpy(model->open, model->open_before, sizeof model->open);
    model->staged = 0;
}

static void feed(struct model *model)
{
    struct mqd_partition *leader = model->partition[model->leader], *follower = model->partition[!model->leader];
    static uint8_t bytes[1 << 16];
    struct mqd_follow_result follow;
    bool rolled;
    int64_t size_bytes = leader->active.size_bytes - follower->active.size_bytes;
    CHECK(size_bytes <= (int64_t)sizeof bytes);
    CHECK_EQUAL(pread(leader->active.fd, bytes, (size_t)size_bytes, follower->active.size_bytes), size_bytes);
    CHECK_EQUAL(mqd_partition_follow(follower, bytes, (uint64_t)size_bytes, 0, INT64_MAX, model->now_ms, &follow), 0);
    CHECK_EQUAL(follow.taken_bytes, size_bytes);
    CHECK_EQUAL(mqd_partition_write(follower, model->now_ms, &rolled), 0);
}

static void write_staged(struct model *model)
{
    bool rolled;
    CHECK_EQUAL(mqd_partition_write(model->partition[model->leader], model->now_ms, &rolled), 0);
    model->staged = 0;
    feed(model);
}

static void raise_high_watermark(struct model *model, int who)
{
    struct mqd_partition *partition = model->partition[who];
    int64_t from = partition->high_watermark.offset, to = who == model->leader
                                                              ? partition->log_end_offset
                                                              : model->partition[model->leader]->high_watermark.offset;
    if (to > from)
        mqd_partition_raise_high_watermark(partition, from + (int64_t)pick(model, (uint64_t)(to - from) + 1));
}

static void reopen(struct model *model)
{
    struct mqd_log_options options = options_with_window();
    struct mqd_partition *old = model->partition[model->leader];
    struct mqd_recovery recovery = {.recovery_point_offset = old->log_end_offset,
                                    .trusted_end_offset = old->log_end_offset,
                                    .replicated = 1,
                                    .high_watermark = old->high_watermark.offset};
    mqd_partition_close(old, (int)pick(model, 2));
    model->partition[model->leader] =
        mqd_partition_open(model->path[model->leader], &options, 0, model->now_ms, &recovery);
    CHECK(model->partition[model->leader]);
}

static void step(struct model *model)
{
    struct mqd_partition *leader = model->partition[model->leader];
    uint64_t what = pick(model, 100);
    model->high_watermark = leader->high_watermark.offset;
    if (!model->staged) {
        model->staged_from = model->count;
        memcpy(model->sequence_before, model->sequence, sizeof model->sequence);
        memcpy(model->open_before, model->open, sizeof model->open);
        model->now_ms += what % 4 == 0 ? STEP_MS * (int64_t)pick(model, 8) : 0;
    }
    if (what < 50 && model->staged < 60)
        produce(model);
    else if (what < 62 && model->staged < 60)
        end_transaction(model);
    else if (what < 76 || model->staged == 60)
        write_staged(model);
    else if (what < 80 && model->staged)
        fail_write(model);
    else if (what < 96)
        raise_high_watermark(model, (int)pick(model, 2));
    else if (!model->staged && what < 98)
        reopen(model);
    else if (!model->staged)
        model->leader ^= 1; /* it has the log, and possibly a lower high watermark */
}

static void run_model(uint64_t seed, uint32_t steps)
{
    struct mqd_log_options options = options_with_window();
    struct model *model = calloc(1, sizeof *model);
    model->records = calloc(RECORDS_MAX, sizeof *model->records);
    model->random = seed;
    model->now_ms = NOW;
    log_fresh();
    for (int i = 0; i < 2; i++) {
        struct mqd_recovery recovery = log_untrusted();
        snprintf(model->path[i], sizeof model->path[i], "%.80s-%d", log_path, i);
        model->partition[i] = mqd_partition_open(model->path[i], &options, 0, NOW, &recovery);
        mqd_partition_set_replicated(model->partition[i], true);
    }
    for (uint32_t i = 0; i < steps && !test_failed && model->count < RECORDS_MAX - 100; i++) {
        step(model);
        const char *wrong = i % 64 ? NULL : mqd_ids_check(&model->partition[model->leader]->dedup->ids);
        CHECK_OR(!wrong, fprintf(stderr, "%s\n", wrong));
        if (test_failed)
            fprintf(stderr, "seed %llu, step %u\n", (unsigned long long)seed, i);
    }
    CHECK_OR(model->left_out > steps / 100 && model->refused > steps / 1000 && model->rewritten > steps / 1000, );
    for (int i = 0; i < 2; i++)
        mqd_partition_close(model->partition[i], 0);
    free(model->records);
    free(model);
}

TEST(any_history_agrees_with_a_model_that_keeps_every_record)
{
    uint32_t seeds = test_long() ? 60 : 3;
    for (uint64_t seed = 1; seed <= seeds && !test_failed; seed++)
        run_model(seed, 20000);
}

static void on_assertion(int number)
{
    log_clean();
    _exit(number);
}

/* In a separate process: an assertion may fail first. */
static bool notices(uint32_t rule, uint64_t seeds)
{
    int status = 0;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        if (!freopen("/dev/null", "w", stderr))
            _exit(0);
        signal(SIGABRT, on_assertion);
        mqd_dedup_planted = rule;
        for (uint64_t seed = 1; seed <= seeds && !test_failed; seed++)
            run_model(seed, 20000);
        log_clean();
        _exit(test_failed);
    }
    return child > 0 && waitpid(child, &status, 0) == child && status != 0;
}

TEST(the_model_notices_each_planted_bug)
{
    CHECK(!notices(0, 1));
    for (uint32_t rule = 1; rule <= MQD_PLANTED_HOLES; rule *= 2)
        CHECK_OR(notices(rule, 10), fprintf(stderr, "the bug planted with bit %u is not noticed\n", rule));
}

/* ---- cases that the model does not reach ---- */

static struct mqd_partition *opened(struct mqd_log_options options)
{
    log_fresh();
    return log_open(&options, NULL);
}

static int16_t produce_one(struct mqd_partition *partition, int id, int64_t now_ms, struct mqd_stage_result *result)
{
    uint8_t bytes[BATCH_BYTES];
    bool rolled;
    int16_t error = stage(partition, bytes, encode(bytes, &id, 1, -1, 0), now_ms, 0, result);
    if (!error && !result->duplicate)
        CHECK_OR(mqd_partition_write(partition, now_ms, &rolled) == 0, );
    return error;
}

TEST(a_record_without_an_id_is_refused_and_so_is_its_batch)
{
    struct mqd_partition *partition = opened(options_with_window());
    struct mqd_stage_result result;
    uint8_t bytes[BATCH_BYTES];
    const int ids[] = {1, -1};
    CHECK_EQUAL(stage(partition, bytes, encode(bytes, ids, 2, -1, 0), NOW, 0, &result), 87);
    CHECK_CONTAINS(result.message, "dedup.header");
    CHECK_EQUAL(produce_one(partition, 1, NOW, &result), 0);
    CHECK(!result.duplicate); /* the refused batch left no id */
    mqd_partition_close(partition, 0);
}

TEST(a_compressed_batch_is_refused)
{
    struct mqd_partition *partition = opened(options_with_window());
    struct mqd_stage_result result;
    uint8_t bytes[BATCH_BYTES];
    const int id = 1;
    uint32_t size_bytes = encode(bytes, &id, 1, -1, 0);
    bytes[22] |= 1;
    CHECK_EQUAL(stage(partition, bytes, size_bytes, NOW, 0, &result), 87);
    CHECK_CONTAINS(result.message, "uncompressed");
    mqd_partition_close(partition, 0);
}

TEST(a_full_window_refuses_until_ids_expire)
{
    struct mqd_log_options options = options_with_window();
    options.dedup_count_max = 3;
    struct mqd_partition *partition = opened(options);
    struct mqd_stage_result result;
    for (int id = 0; id < 3; id++)
        CHECK_EQUAL(produce_one(partition, id, NOW + id * 1000, &result), 0);
    CHECK_EQUAL(produce_one(partition, 3, NOW + 3000, &result), 19);
    CHECK_CONTAINS(result.message, "dedup.ids.max");
    CHECK_EQUAL(produce_one(partition, 1, NOW + 3000, &result), 0); /* a known one is still found */
    CHECK(result.duplicate);
    CHECK_EQUAL(result.base_offset, 1);
    CHECK_EQUAL(produce_one(partition, 3, NOW + WINDOW_MS, &result), 0); /* the first one has expired */
    CHECK(!result.duplicate);
    mqd_partition_close(partition, 0);
}

TEST(a_lowered_limit_forgets_the_oldest_ids_that_a_follower_learned)
{
    struct mqd_log_options options = options_with_window();
    struct mqd_partition *partition = opened(options);
    struct mqd_stage_result result;
    struct mqd_batch batch;
    uint8_t bytes[BATCH_BYTES];
    for (int id = 0; id < 10; id++)
        CHECK_EQUAL(produce_one(partition, id, NOW, &result), 0);
    partition->dedup->ids.count_max = 4;
    for (int id = 10; id < 12; id++) {
        uint32_t size_bytes = encode(bytes, &id, 1, -1, 0);
        CHECK_EQUAL(mqd_batch_decode(bytes, size_bytes, &batch), 0);
        batch.base_offset = id;
        batch.attributes |= 8; /* LogAppendTime */
        batch.max_timestamp_ms = NOW;
        mqd_dedup_learn(partition->dedup, &batch, bytes);
        CHECK_EQUAL(mqd_ids_count(&partition->dedup->ids), 4);
    }
    partition->dedup->ids.count_max = 100;
    for (int id = 8; id < 12; id++) { /* the four newest */
        CHECK_EQUAL(produce_one(partition, id, NOW, &result), 0);
        CHECK(result.duplicate);
    }
    CHECK_EQUAL(mqd_ids_count(&partition->dedup->ids), 4);
    mqd_partition_close(partition, 0);
}

TEST(a_clock_that_jumps_back_expires_nothing_early_and_does_not_stop_expiry)
{
    struct mqd_partition *partition = opened(options_with_window());
    struct mqd_stage_result result;
    int64_t behind = NOW - 100 * WINDOW_MS;
    CHECK_EQUAL(produce_one(partition, 1, NOW, &result), 0);
    CHECK_EQUAL(produce_one(partition, 1, behind, &result), 0);
    CHECK(result.duplicate);
    CHECK_EQUAL(produce_one(partition, 1, behind + WINDOW_MS - STEP_MS, &result), 0);
    CHECK(result.duplicate);
    CHECK_EQUAL(produce_one(partition, 1, behind + WINDOW_MS, &result), 0);
    CHECK(!result.duplicate);
    mqd_partition_close(partition, 0);
}

TEST(records_from_before_the_window_are_not_read_at_the_start)
{
    struct mqd_log_options options = options_with_window();
    struct mqd_partition *partition = opened(options);
    struct mqd_stage_result result;
    struct mqd_recovery recovery = log_untrusted();
    for (int id = 0; id < 10; id++)
        CHECK_EQUAL(produce_one(partition, id, NOW + id * 1000, &result), 0);
    mqd_partition_close(partition, 0);
    partition = mqd_partition_open(log_path, &options, 0, NOW + WINDOW_MS + 5000, &recovery);
    CHECK(partition);
    CHECK_EQUAL(produce_one(partition, 6, NOW + WINDOW_MS + 5000, &result), 0);
    CHECK(result.duplicate);
    CHECK_EQUAL(produce_one(partition, 4, NOW + WINDOW_MS + 5000, &result), 0);
    CHECK(!result.duplicate);
    mqd_partition_close(partition, 0);
}

TEST(a_removed_setting_forgets_the_ids)
{
    struct mqd_log_options options = options_with_window(), without = options;
    struct mqd_partition *partition = opened(options);
    struct mqd_stage_result result;
    without.dedup_window_ms = 0;
    CHECK_EQUAL(produce_one(partition, 1, NOW, &result), 0);
    mqd_partition_set_options(partition, &without);
    CHECK_EQUAL(produce_one(partition, 1, NOW, &result), 0);
    CHECK(!result.duplicate);
    mqd_partition_set_options(partition, &options);
    CHECK_EQUAL(produce_one(partition, -1, NOW, &result), 87);
    CHECK_EQUAL(produce_one(partition, 1, NOW, &result), 0); /* ids are recorded from now on */
    CHECK(!result.duplicate);
    mqd_partition_close(partition, 0);
}

TEST(without_memory_for_ids_batches_are_refused)
{
    struct mqd_partition *partition = opened(options_with_window());
    struct mqd_stage_result result;
    mqd_dedup_free(partition->dedup);
    partition->dedup = NULL;
    CHECK_EQUAL(produce_one(partition, 1, NOW, &result), 56);
    CHECK_CONTAINS(result.message, "out of memory");
    mqd_partition_close(partition, 0);
}

/* 10,000 records a second for five minutes. */
TEST(three_million_ids_take_less_than_64_mb)
{
    struct mqd_ids ids;
    struct mqd_id_hash hash;
    int64_t offset, begin_ns = test_now_ns();
    uint32_t count = test_long() ? 3000000 : 300000;
    CHECK_EQUAL(mqd_ids_open(&ids, 3000000), 0);
    mqd_ids_set_time(&ids, NOW, 300000);
    for (uint32_t i = 0; i < count; i++) {
        mqd_ids_hash(&ids, (const uint8_t *)&i, sizeof i, &hash);
        CHECK_EQUAL(mqd_ids_find(&ids, &hash, -1, &offset), MQD_ID_FREE);
        CHECK_EQUAL(mqd_ids_put(&ids, &hash, i, -1), 0);
    }
    test_message("%u ids: %.1f MB, %.0f ns an id", count, (double)mqd_ids_bytes(&ids) / 1e6,
                 (double)(test_now_ns() - begin_ns) / count);
    CHECK(mqd_ids_bytes(&ids) < 64000000);
    CHECK(!mqd_ids_check(&ids));
    mqd_ids_expire(&ids, NOW);
    CHECK_EQUAL(mqd_ids_count(&ids), 0);
    CHECK(mqd_ids_bytes(&ids) < 18000000); /* the table does not shrink */
    mqd_ids_close(&ids);
}
