/* A share-partition at its owner (share/partition.h) against a share coordinator with faults:
 * random histories with owners that die, and planted bugs that must be found. */
#define MQD_PLANTED_PARTITION
#include "share/partition.c"

#include "mqd_test.h"
#include "wire/buffer.h"
#include "wire/cursor.h"

#define OFFSETS 60
#define BLOCKS 256

/* ---- the coordinator ---- */

struct coordinator {
    int32_t state_epoch, leader_epoch;
    int64_t start; /* -1: initialized without one */
    int16_t state[OFFSETS], count[OFFSETS];
    int16_t error; /* the next response's */
    int writes;
};

static const uint8_t settings_bytes[MQD_SHARE_SETTINGS_BYTES] = {[0] = 100, [4] = 5, [8] = 40};
static const struct mqd_share_partition_id partition_id = {.group_id = {(const uint8_t *)"jobs", 4},
                                                           .partition_index = 3};

static void put_head(struct mqd_buffer *out, int16_t error)
{
    mqd_put_bytes(out, settings_bytes, sizeof settings_bytes);
    mqd_put_count(out, true, 1);
    mqd_put_bytes(out, partition_id.topic_id, 16);
    mqd_put_count(out, true, 1);
    mqd_put_i32(out, partition_id.partition_index);
    mqd_put_i16(out, error);
    mqd_put_c_string(out, true, error ? "refused" : NULL);
}

static void put_tail(struct mqd_buffer *out)
{
    for (int level = 0; level < 3; level++)
        mqd_put_no_tags(out, true);
}

static void put_state(struct mqd_buffer *out, const struct coordinator *c)
{
    int32_t count = 0;
    for (int pass = 0; pass < 2; pass++) {
        if (pass)
            mqd_put_count(out, true, count);
        for (int64_t offset = c->start < 0 ? OFFSETS : c->start; offset < OFFSETS; offset++) {
            struct mqd_share_state_run run = {offset, offset, c->state[offset], c->count[offset]};
            if (!run.state && !run.count)
                continue;
            if (pass)
                mqd_share_write_run(out, &run);
            else
                count++;
        }
    }
}

/* Applies a WRITE; returns its error. */
static int16_t apply(struct coordinator *c, const struct mqd_buffer *body)
{
    struct mqd_byte_cursor at = mqd_cursor_over(body->bytes, body->size_bytes);
    struct mqd_text group;
    struct mqd_topic_key topic;
    int32_t one, index, state_epoch, leader_epoch, complete, runs;
    int64_t start;
    CHECK_OR(mqd_take_text(&at, true, false, "", &group) == 0 && mqd_take_count(&at, true, "", 1, &one) == 0 &&
                 mqd_take_topic_key(&at, true, true, &topic) == 0 && mqd_take_count(&at, true, "", 1, &one) == 0 &&
                 mqd_take_i32(&at, "", &index) == 0 && mqd_take_i32(&at, "", &state_epoch) == 0 &&
                 mqd_take_i32(&at, "", &leader_epoch) == 0 && mqd_take_i64(&at, "", &start) == 0 &&
                 mqd_take_i32(&at, "", &complete) == 0 && mqd_take_count(&at, true, "", 1, &runs) == 0,
             return 42);
    if (leader_epoch < c->leader_epoch)
        return MQD_KAFKA_FENCED_LEADER_EPOCH;
    if (state_epoch != c->state_epoch)
        return MQD_KAFKA_FENCED_STATE_EPOCH;
    if (start > c->start)
        c->start = start;
    for (int32_t i = 0; i < runs; i++) {
        int64_t first, last;
        int8_t state;
        int16_t count;
        CHECK_OR(mqd_take_i64(&at, "", &first) == 0 && mqd_take_i64(&at, "", &last) == 0 &&
                     mqd_take_i8(&at, "", &state) == 0 && mqd_take_i16(&at, "", &count) == 0 &&
                     mqd_skip_tags(&at, true) == 0,
                 return 42);
        for (int64_t offset = first; offset <= last && offset < OFFSETS; offset++)
            c->state[offset] = state, c->count[offset] = count;
    }
    c->writes++;
    return 0;
}

static void answer_to(struct coordinator *c, int api_key, const struct mqd_buffer *body, struct mqd_buffer *out)
{
    int16_t error = c->error;
    out->size_bytes = 0;
    if (!error && api_key == MQD_SHARE_WRITE)
        error = apply(c, body);
    put_head(out, error);
    if (api_key == MQD_SHARE_READ) {
        mqd_put_i32(out, c->state_epoch);
        mqd_put_i64(out, c->start);
        put_state(out, c);
    }
    put_tail(out);
}

/* ---- the owner ---- */

struct owner {
    struct mqd_share_pool pool;
    uint8_t *memory;
    struct mqd_share_partition partition;
    struct coordinator coordinator;
    struct mqd_buffer answer;
    int64_t now_ms;
    int answered[OFFSETS]; /* accepted, and the client knows; by offset */
    int16_t last_error;
    int answers;
};

/* A waiter's token is the accepted offset, or OFFSETS. */
static void on_answer(void *context, struct mqd_share_waiter *waiter, int16_t error)
{
    struct owner *o = context;
    if (!error && waiter->token < OFFSETS)
        o->answered[waiter->token] = 1;
    o->last_error = error;
    o->answers++;
    free(waiter);
}

static void owner_load(struct owner *o, uint32_t planted)
{
    mqd_share_pool_init(&o->pool, o->memory, (uint64_t)BLOCKS * MQD_SHARE_BLOCK_BYTES);
    mqd_share_partition_init(&o->partition, &o->pool, &partition_id, 0, on_answer, o);
    o->partition.planted_rules = planted;
}

static struct owner *owner_of(int64_t start, uint32_t planted)
{
    struct owner *o = calloc(1, sizeof *o);
    o->memory = aligned_alloc(64, (size_t)BLOCKS * MQD_SHARE_BLOCK_BYTES);
    o->coordinator.start = start;
    o->now_ms = 1000;
    owner_load(o, planted);
    return o;
}

static void owner_end(struct owner *o)
{
    mqd_share_partition_free(&o->partition);
    CHECK_EQUAL(o->pool.used, 0);
    mqd_buffer_free(&o->answer);
    free(o->memory);
    free(o);
}

/* Sends the request that is due, and processes the response immediately. Returns the request. */
static int run_request(struct owner *o)
{
    int api_key = mqd_share_partition_next_request(&o->partition, o->now_ms);
    if (!api_key)
        return 0;
    answer_to(&o->coordinator, api_key, &o->partition.body, &o->answer);
    mqd_share_partition_on_response(&o->partition, o->answer.bytes, o->answer.size_bytes, o->now_ms);
    return api_key;
}

static uint32_t acquire(struct owner *o, uint32_t most, struct mqd_share_run *runs)
{
    struct mqd_share *state = &o->partition.state;
    struct mqd_share_acquisition asked = {.member = 7, .now_ms = o->now_ms, .records_max = most, .strict = 1};
    int64_t from = mqd_share_next_offset(state);
    struct mqd_share_batch batch = {.first = from, .last = OFFSETS - 1};
    return from < 0 || from >= OFFSETS ? 0 : mqd_share_acquire(state, &asked, from, &batch, 1, runs, 8);
}

static int acknowledge(struct owner *o, int64_t offset, uint8_t type)
{
    struct mqd_share_acknowledgement given = {.first = offset, .last = offset, .types = &type, .type_count = 1};
    int error = mqd_share_acknowledge(&o->partition.state, 7, &given, 1, o->now_ms);
    if (error)
        return error;
    struct mqd_share_waiter *waiter = calloc(1, sizeof *waiter);
    mqd_list_init(&waiter->node);
    waiter->token = type == MQD_SHARE_ACCEPT ? (uint64_t)offset : OFFSETS;
    mqd_share_partition_await(&o->partition, waiter);
    return 0;
}

/* ---- single rules ---- */

TEST(the_state_is_read_first_and_begins_where_the_owner_places_it)
{
    struct owner *o = owner_of(-1, 0);
    CHECK_EQUAL(run_request(o), MQD_SHARE_READ);
    CHECK_EQUAL(o->partition.phase, MQD_SHARE_NO_START);
    CHECK_EQUAL(o->partition.settings.state.lock_ms, 100);
    CHECK_EQUAL(run_request(o), 0);
    mqd_share_partition_set_start(&o->partition, 11);
    CHECK_EQUAL(run_request(o), 0); /* no response waits for it */
    o->now_ms += MQD_SHARE_LAZY_MS;
    CHECK(mqd_share_partition_deadline(&o->partition) <= o->now_ms);
    CHECK_EQUAL(run_request(o), MQD_SHARE_WRITE);
    CHECK_EQUAL(o->coordinator.start, 11);
    CHECK(mqd_share_partition_is_idle(&o->partition));
    owner_end(o);
}

static uint32_t two_epochs(void *context, const struct mqd_share_partition *partition, struct mqd_share_epoch *out)
{
    out[0] = (struct mqd_share_epoch){3, 10};
    out[1] = (struct mqd_share_epoch){MQD_SHARE_EPOCH_LOG_END, 0x1234};
    return 2;
}

TEST(a_read_contains_where_the_leader_epochs_of_the_log_begin)
{
    static const uint8_t tail[] = {
        1,    0x8c, 0x47, 1 + 2 * 13, 2 + 1,                               /* tag 9100, its size, two of */
        0,    0,    0,    3,          0,     0, 0, 0, 0, 0, 0,    10,   0, /* epoch, start, no tags */
        0x7f, 0xff, 0xff, 0xff,       0,     0, 0, 0, 0, 0, 0x12, 0x34, 0, 0, 0};
    struct owner *o = owner_of(0, 0);
    o->partition.get_log_epochs = two_epochs;
    CHECK_EQUAL(mqd_share_partition_next_request(&o->partition, o->now_ms), MQD_SHARE_READ);
    const struct mqd_buffer *body = &o->partition.body;
    CHECK_EQUAL(memcmp(body->bytes + body->size_bytes - sizeof tail, tail, sizeof tail), 0);
    owner_end(o);
}

TEST(a_response_waits_for_the_write_that_carries_it)
{
    struct owner *o = owner_of(0, 0);
    struct mqd_share_run runs[8];
    run_request(o);
    acquire(o, 4, runs);
    CHECK_EQUAL(acknowledge(o, 0, MQD_SHARE_ACCEPT), 0);
    CHECK_EQUAL(mqd_share_partition_next_request(&o->partition, o->now_ms), MQD_SHARE_WRITE);
    CHECK_EQUAL(acknowledge(o, 1, MQD_SHARE_ACCEPT), 0); /* during the write */
    CHECK_EQUAL(o->answers, 0);
    CHECK_EQUAL(mqd_share_partition_next_request(&o->partition, o->now_ms), 0);
    answer_to(&o->coordinator, MQD_SHARE_WRITE, &o->partition.body, &o->answer);
    mqd_share_partition_on_response(&o->partition, o->answer.bytes, o->answer.size_bytes, o->now_ms);
    CHECK(o->answered[0] && !o->answered[1]);
    CHECK_EQUAL(run_request(o), MQD_SHARE_WRITE);
    CHECK(o->answered[1]);
    CHECK_EQUAL(acknowledge(o, 2, MQD_SHARE_RENEW), 0); /* nothing to write: answered immediately */
    CHECK_EQUAL(run_request(o), 0);
    CHECK_EQUAL(o->answers, 3);
    owner_end(o);
}

TEST(a_retriable_error_repeats_the_same_write_later_each_time)
{
    struct owner *o = owner_of(0, 0);
    struct mqd_share_run runs[8];
    run_request(o);
    acquire(o, 1, runs);
    acknowledge(o, 0, MQD_SHARE_ACCEPT);
    o->coordinator.error = MQD_KAFKA_NOT_COORDINATOR;
    int64_t waits[] = {100, 200, 400, 800, 1600, 3200, 5000, 5000};
    for (size_t i = 0; i < sizeof waits / sizeof *waits; i++) {
        CHECK_EQUAL(run_request(o), MQD_SHARE_WRITE);
        CHECK_EQUAL(mqd_share_partition_deadline(&o->partition), o->now_ms + waits[i]);
        o->now_ms += waits[i] - 1;
        CHECK_EQUAL(run_request(o), 0);
        o->now_ms++;
    }
    o->coordinator.error = 0;
    CHECK_EQUAL(o->answers, 0);
    CHECK_EQUAL(run_request(o), MQD_SHARE_WRITE);
    CHECK(o->answered[0]);
    owner_end(o);
}

TEST(a_definite_refusal_ends_the_state_with_the_contracts_error)
{
    static const int16_t cases[][2] = {{74, 6}, {124, 124}, {3, 3}, {69, 69}, {42, -1}, {29, -1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct owner *o = owner_of(0, 0);
        struct mqd_share_run runs[8];
        run_request(o);
        acquire(o, 3, runs);
        acknowledge(o, 0, MQD_SHARE_ACCEPT);
        o->coordinator.error = cases[i][0];
        CHECK_EQUAL(run_request(o), MQD_SHARE_WRITE);
        CHECK_EQUAL(o->answers, 1);
        CHECK_EQUAL(o->last_error, cases[i][1]);
        CHECK_EQUAL(o->pool.used, 0);
        CHECK_EQUAL(o->partition.phase, cases[i][0] == 124 ? MQD_SHARE_LOADING : MQD_SHARE_FAILED);
        owner_end(o);
    }
}

static void release_with_backoff(struct owner *o)
{
    struct mqd_share_run runs[8];
    o->partition.state.settings.backoff_ms = o->partition.state.settings.backoff_ms_max = 1000;
    CHECK_EQUAL(acquire(o, 1, runs), 1);
    CHECK_EQUAL(acknowledge(o, runs[0].first, MQD_SHARE_RELEASE), 0);
}

/* Its offsets may have been altered while no session used it. */
TEST(a_state_that_backoffs_kept_is_confirmed_before_it_is_used)
{
    struct owner *o = owner_of(0, 0);
    run_request(o);
    mqd_share_partition_request_verify(&o->partition);
    CHECK(!o->partition.verify_pending); /* no backoff kept it */
    release_with_backoff(o);
    mqd_share_partition_request_verify(&o->partition);
    CHECK_EQUAL(run_request(o), MQD_SHARE_WRITE); /* confirms it as well */
    CHECK(!o->partition.verify_pending && !mqd_share_partition_is_idle(&o->partition));
    mqd_share_partition_request_verify(&o->partition);
    CHECK(mqd_share_partition_deadline(&o->partition) <= o->now_ms);
    CHECK_EQUAL(run_request(o), MQD_SHARE_READ);
    CHECK(!o->partition.verify_pending);
    CHECK_EQUAL(o->partition.state.delayed_count, 1);
    CHECK_EQUAL(run_request(o), 0);
    for (int other_start = 0; other_start < 2; other_start++) {
        o->coordinator.state_epoch += !other_start;
        o->coordinator.start += other_start;
        mqd_share_partition_request_verify(&o->partition);
        CHECK_EQUAL(run_request(o), MQD_SHARE_READ);
        CHECK_EQUAL(o->partition.phase, MQD_SHARE_LOADING);
        CHECK_EQUAL(run_request(o), MQD_SHARE_READ);
        CHECK_EQUAL(o->partition.phase, MQD_SHARE_ACTIVE);
        CHECK_EQUAL(o->partition.state.delayed_count, 0);
        CHECK_EQUAL(o->partition.state.start, o->coordinator.start);
        release_with_backoff(o);
        CHECK_EQUAL(run_request(o), MQD_SHARE_WRITE);
    }
    owner_end(o);
}

/* It is kept, and a new acceptor gets it from a READ, although a WRITE confirms the state
 * too. */
TEST(what_is_archiving_is_reported_by_a_read)
{
    struct owner *o = owner_of(0, 0);
    struct mqd_share_run runs[8];
    run_request(o);
    o->partition.state.settings.dead_letters = 1;
    CHECK_EQUAL(acquire(o, 2, runs), 1);
    CHECK_EQUAL(acknowledge(o, 0, MQD_SHARE_REJECT), 0);
    CHECK_EQUAL(run_request(o), MQD_SHARE_WRITE);
    CHECK_EQUAL(o->coordinator.state[0], MQD_SHARE_ARCHIVING);
    CHECK_EQUAL(acknowledge(o, 1, MQD_SHARE_ACCEPT), 0);
    mqd_share_partition_request_report(&o->partition);
    CHECK_EQUAL(run_request(o), MQD_SHARE_WRITE);
    CHECK(o->partition.verify_pending);
    CHECK_EQUAL(run_request(o), MQD_SHARE_READ);
    CHECK(!o->partition.verify_pending && !mqd_share_partition_is_idle(&o->partition));
    CHECK_EQUAL(run_request(o), 0);
    mqd_share_partition_fail(&o->partition, 6, o->now_ms); /* a failover */
    mqd_share_partition_restart(&o->partition, 1);
    CHECK_EQUAL(run_request(o), MQD_SHARE_READ);
    CHECK_EQUAL(o->partition.state.archiving_count, 1);
    CHECK_EQUAL(mqd_share_archive(&o->partition.state, 0, OFFSETS), 1);
    o->now_ms += MQD_SHARE_LAZY_MS;
    run_request(o);
    o->now_ms += MQD_SHARE_LAZY_MS;
    run_request(o);
    CHECK_EQUAL(o->coordinator.start, 2);
    CHECK(mqd_share_partition_is_idle(&o->partition));
    owner_end(o);
}

TEST(malformed_responses_are_refused)
{
    struct owner *o = owner_of(0, 0);
    struct mqd_share_response answer;
    answer_to(&o->coordinator, MQD_SHARE_READ, NULL, &o->answer);
    const uint8_t *body = o->answer.bytes + MQD_SHARE_SETTINGS_BYTES;
    uint32_t size_bytes = o->answer.size_bytes - MQD_SHARE_SETTINGS_BYTES;
    CHECK_EQUAL(mqd_share_response_parse(body, size_bytes, MQD_SHARE_READ, &partition_id, &answer), 0);
    for (uint32_t cut = 0; cut < size_bytes; cut++) {
        uint8_t *copy = malloc(cut ? cut : 1); /* of exactly its size, so that a read beyond it is detected */
        memcpy(copy, body, cut);
        CHECK_EQUAL(mqd_share_response_parse(copy, cut, MQD_SHARE_READ, &partition_id, &answer), -1);
        free(copy);
    }
    struct mqd_share_partition_id other = partition_id;
    other.partition_index++;
    CHECK_EQUAL(mqd_share_response_parse(body, size_bytes, MQD_SHARE_READ, &other, &answer), -1);
    CHECK_EQUAL(mqd_share_partition_next_request(&o->partition, o->now_ms), MQD_SHARE_READ);
    mqd_share_partition_on_response(&o->partition, o->answer.bytes, 10, o->now_ms);
    CHECK_EQUAL(o->partition.phase, MQD_SHARE_FAILED);
    CHECK_EQUAL(o->partition.error, -1);
    owner_end(o);
}

TEST(settings_that_make_no_sense_are_refused)
{
    struct mqd_share_group_settings settings;
    static const struct {
        int at, value;
    } wrong[] = {{0, 0}, {4, 0}, {8, 0}, {6, 1}, {11, 1}, {13, 3}, {23, 0x80}, {24, 1}, {27, 0x80}};
    CHECK_EQUAL(mqd_share_settings_parse(settings_bytes, sizeof settings_bytes, &settings), MQD_SHARE_SETTINGS_BYTES);
    CHECK_EQUAL(settings.state.fifo, 0);
    uint8_t ordered[MQD_SHARE_SETTINGS_BYTES + 3] = {[0] = 100, [4] = 5, [8] = 40, [14] = 2, [32] = 'o', 'r', 'd'};
    CHECK_EQUAL(mqd_share_settings_parse(ordered, sizeof ordered, &settings), MQD_SHARE_SETTINGS_BYTES);
    uint32_t by_key = settings.state.fifo;
    ordered[15] = 3;
    CHECK_EQUAL(mqd_share_settings_parse(ordered, sizeof ordered, &settings), sizeof ordered);
    CHECK(by_key && settings.state.fifo && settings.state.fifo != by_key);
    CHECK(settings.fifo_header_bytes == 3 && memcmp(settings.fifo_header, "ord", 3) == 0);
    CHECK_EQUAL(mqd_share_settings_parse(ordered, sizeof ordered - 1, &settings), -1);
    ordered[15] = MQD_SHARE_FIFO_HEADER_BYTES_MAX + 1;
    CHECK_EQUAL(mqd_share_settings_parse(ordered, 200, &settings), -1);
    CHECK_EQUAL(mqd_share_settings_parse(settings_bytes, sizeof settings_bytes - 1, &settings), -1);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        uint8_t bytes[MQD_SHARE_SETTINGS_BYTES];
        memcpy(bytes, settings_bytes, sizeof bytes);
        bytes[wrong[i].at] = (uint8_t)wrong[i].value;
        CHECK_EQUAL(mqd_share_settings_parse(bytes, sizeof bytes, &settings), -1);
    }
}

/* ---- histories ---- */

/* One random history. Returns 0, or the number of the violated promise: 2 is S2, 3 is S3. */
static int history(uint64_t seed, uint32_t planted)
{
    struct owner *o = owner_of(0, planted);
    uint64_t random = seed * 0x9e3779b97f4a7c15ull | 1;
    int broken = 0;
    for (int step = 0; step < 300 && !broken; step++) {
        struct mqd_share_run runs[8];
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;
        uint32_t what = (uint32_t)(random >> 8) % 100, which = (uint32_t)(random >> 40);
        if (what < 30 && o->partition.phase == MQD_SHARE_ACTIVE) {
            uint32_t count = acquire(o, 1 + which % 6, runs);
            for (uint32_t i = 0; i < count; i++)
                for (int64_t offset = runs[i].first; offset <= runs[i].last; offset++)
                    broken = o->answered[offset] ? 2 : runs[i].count > 5 ? 3 : broken;
        } else if (what < 60 && o->partition.phase == MQD_SHARE_ACTIVE) {
            acknowledge(o, which % OFFSETS, which % 3 ? MQD_SHARE_ACCEPT : MQD_SHARE_RELEASE);
        } else if (what < 64) { /* the owner dies; what it had sent is lost, or was applied */
            if (o->partition.in_flight == MQD_SHARE_WRITE && which % 2)
                apply(&o->coordinator, &o->partition.body);
            o->partition.respond = on_answer;
            int known[OFFSETS];
            memcpy(known, o->answered, sizeof known);
            mqd_share_partition_free(&o->partition);
            memcpy(o->answered, known, sizeof known);
            owner_load(o, planted);
        } else if (what < 70) { /* the acceptor dies */
            if (o->partition.in_flight == MQD_SHARE_WRITE && which % 2)
                apply(&o->coordinator, &o->partition.body);
            if (o->partition.in_flight)
                mqd_share_partition_on_unsent(&o->partition, o->now_ms);
        } else if (o->partition.in_flight) {
            o->coordinator.error = which % 4 ? 0 : MQD_KAFKA_REQUEST_TIMED_OUT;
            if (o->coordinator.error && which % 8 == 0 && o->partition.in_flight == MQD_SHARE_WRITE)
                apply(&o->coordinator, &o->partition.body); /* its outcome was lost, not its effect */
            answer_to(&o->coordinator, o->partition.in_flight, &o->partition.body, &o->answer);
            mqd_share_partition_on_response(&o->partition, o->answer.bytes, o->answer.size_bytes, o->now_ms);
        } else {
            mqd_share_partition_next_request(&o->partition, o->now_ms);
        }
        o->now_ms += which % 30;
        if (o->partition.phase == MQD_SHARE_ACTIVE) {
            mqd_share_expire(&o->partition.state, o->now_ms, 1000);
            if (step % 8 == 0)
                mqd_share_check(&o->partition.state);
        }
    }
    owner_end(o);
    return broken;
}

static int histories(uint32_t planted)
{
    for (uint64_t seed = 1; seed <= (test_long() ? 5000 : 100); seed++)
        if (history(seed, planted))
            return (int)seed;
    return 0;
}

TEST(no_history_delivers_again_what_was_acknowledged)
{
    CHECK_EQUAL(histories(0), 0);
}

TEST(each_planted_bug_is_found)
{
    CHECK(histories(MQD_PLANTED_EARLY_RESPONSE) > 0);
    CHECK(histories(MQD_PLANTED_RESPOND_WAITING) > 0);
    CHECK(histories(MQD_PLANTED_LOST_WRITE) > 0);
}
