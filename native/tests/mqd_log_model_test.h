/* For test_log_model.c: a model of one partition, its transactions, and writes applied to
 * both. */
#ifndef MQD_LOG_MODEL_TEST_H
#define MQD_LOG_MODEL_TEST_H

#define LOG_TEST_IN_MEMORY /* thousands of flushes: the model tracks what the disk keeps */
#include "mqd_log_test.h"

#define OFFSETS_MAX 60000
#define PRODUCER_COUNT 4
#define TXN_COUNT 5 /* transactional producers, ids from 200 */
#define STAGED_BYTES 1400

/* Transactional state of the batch at a base offset. */
struct event {
    uint8_t kind;
    int8_t producer;
};
enum { EVENT_NONE, EVENT_DATA, EVENT_ABORT, EVENT_COMMIT };

struct model {
    struct event events[OFFSETS_MAX];
    /* first offset of the ongoing transaction, -1 = none; possibly known to the partition after
     * a restart without a snapshot */
    int64_t begun[TXN_COUNT];
    int32_t next_txn_sequence[TXN_COUNT];
    struct mqd_aborted aborted[OFFSETS_MAX / 4]; /* by marker */
    struct {
        int64_t first, last;
    } ended[OFFSETS_MAX / 4];
    uint32_t aborted_count, ended_count;
    uint64_t random, seed;
    struct mqd_log_options options;
    struct mqd_partition *partition;
    uint64_t marks[OFFSETS_MAX]; /* by base offset, of what is written; 0 = inside a batch or nothing */
    int64_t end, durable, start;
    int64_t sync_end; /* the most that the current sync covers */
    uint64_t next_mark;
    int32_t next_sequence[PRODUCER_COUNT];
    bool synced_once;
};

static uint64_t pick(struct model *model, uint64_t below)
{
    return test_random(&model->random) % below;
}

static uint8_t staged_bytes[64][STAGED_BYTES + 64];

/* ---- transactions ---- */

static void want_transactional(struct model *model, int t, struct log_batch *want, bool open[TXN_COUNT],
                               struct event *event)
{
    want->producer_id = 200 + t;
    if (pick(model, open[t] ? 4 : 12) == 0) { /* now and then a marker without a transaction */
        want->marker = 1 + (int)pick(model, 2);
        want->record_count = 1;
        want->mark = UINT64_MAX; /* its body is a marker's */
        *event = (struct event){want->marker == 1 ? EVENT_ABORT : EVENT_COMMIT, (int8_t)t};
        open[t] = false;
        return;
    }
    want->attributes = 0x10;
    want->base_sequence = model->next_txn_sequence[t];
    model->next_txn_sequence[t] += want->record_count;
    *event = (struct event){EVENT_DATA, (int8_t)t};
    open[t] = true;
}

/* Updates the transactions with the batch at an offset. */
static void note_event(struct model *model, int64_t offset, struct event event)
{
    model->events[offset] = event;
    if (event.kind == EVENT_NONE)
        return;
    int64_t *begun = &model->begun[event.producer];
    if (event.kind == EVENT_DATA) {
        if (*begun < 0)
            *begun = offset;
        return;
    }
    if (*begun < 0)
        return;
    model->ended[model->ended_count].first = *begun;
    model->ended[model->ended_count++].last = offset;
    if (event.kind == EVENT_ABORT)
        model->aborted[model->aborted_count++] = (struct mqd_aborted){200 + event.producer, *begun, offset, 0};
    *begun = -1;
}

/* Rebuilds the model from what a crash has left; earlier events are unchanged. */
static void recount(struct model *model)
{
    model->aborted_count = model->ended_count = 0;
    for (int i = 0; i < TXN_COUNT; i++)
        model->begun[i] = -1;
    for (int64_t offset = 0; offset < model->end; offset++)
        note_event(model, offset, model->events[offset]);
}

static int64_t expected_stable(const struct model *model, const struct mqd_positions *at)
{
    int64_t stable = at->high_watermark;
    for (int i = 0; i < TXN_COUNT; i++)
        if (model->begun[i] >= 0 && model->begun[i] < stable)
            stable = model->begun[i];
    for (uint32_t i = model->ended_count; i-- > 0 && model->ended[i].last >= at->high_watermark;)
        if (model->ended[i].first < stable)
            stable = model->ended[i].first;
    return stable < at->log_start_offset ? at->log_start_offset : stable;
}

/* A transaction whose first batches were deleted with their segments may be known from its first
 * remaining one, if there was no snapshot. */
static int64_t first_left(const struct model *model, int producer, int64_t first, int64_t end)
{
    for (int64_t offset = first < model->partition->segments[0] ? model->partition->segments[0] : first; offset < end;
         offset++)
        if (model->events[offset].kind == EVENT_DATA && model->events[offset].producer == producer)
            return offset;
    return -1;
}

static void adopt_begun(struct model *model)
{
    const struct mqd_transactions *known = &model->partition->producers.transactions;
    for (int i = 0; i < TXN_COUNT; i++) {
        int64_t first = -1;
        for (uint32_t link = known->oldest; link; link = known->entries[link - 1].newer)
            if (known->entries[link - 1].producer_id == 200 + i && known->entries[link - 1].last_offset < 0)
                first = known->entries[link - 1].first_offset;
        if (first != model->begun[i])
            CHECK(model->begun[i] >= 0 && model->begun[i] < model->partition->segments[0] &&
                  first == first_left(model, i, model->begun[i], model->end));
        for (int64_t offset = model->begun[i]; offset >= 0 && offset < (first < 0 ? model->end : first); offset++)
            if (model->events[offset].producer == i) /* forgotten permanently */
                model->events[offset] = (struct event){EVENT_NONE, -1};
        model->begun[i] = first;
    }
}

/* What a reader of [from, to) collects, segment by segment until there are no more. */
static void collect(struct model *model, int64_t from, int64_t to, struct mqd_aborted_list *out)
{
    out->count = 0;
    for (uint32_t i = 0; i < model->partition->segment_count; i++) {
        if (i + 1 < model->partition->segment_count && model->partition->segments[i + 1] <= from)
            continue;
        int complete = mqd_txn_index_collect(log_path, model->partition->segments[i], from, to,
                                             model->partition->log_end_offset, out);
        CHECK(complete >= 0);
        if (complete == 1)
            return;
    }
}

/* The last stable offset; with `ranges` also the result of a random range's reader. */
static void check_transactions(struct model *model, bool ranges)
{
    static struct mqd_aborted_list found;
    struct mqd_positions at = log_positions(model->partition);
    CHECK_EQUAL(at.last_stable_offset, expected_stable(model, &at));
    if (!ranges || at.last_stable_offset <= at.log_start_offset)
        return;
    int64_t from = at.log_start_offset + (int64_t)pick(model, (uint64_t)(at.last_stable_offset - at.log_start_offset));
    int64_t to = from + 1 + (int64_t)pick(model, (uint64_t)(at.last_stable_offset - from));
    if (pick(model, 3) == 0)
        from = at.log_start_offset, to = at.last_stable_offset;
    collect(model, from, to, &found);
    uint32_t next = 0;
    for (uint32_t i = 0; i < model->aborted_count; i++) {
        const struct mqd_aborted *expected_abort = &model->aborted[i];
        if (expected_abort->last_offset < from || expected_abort->first_offset >= to)
            continue;
        int64_t left = first_left(model, (int)expected_abort->producer_id - 200, expected_abort->first_offset,
                                  expected_abort->last_offset);
        const struct mqd_aborted *got = next < found.count ? &found.entries[next] : NULL;
        bool same = got && got->producer_id == expected_abort->producer_id &&
                    got->last_offset == expected_abort->last_offset &&
                    (got->first_offset == expected_abort->first_offset ||
                     (expected_abort->first_offset < model->partition->segments[0] &&
                      got->first_offset > expected_abort->first_offset && (left < 0 || got->first_offset <= left)));
        if (!same && expected_abort->first_offset < model->partition->segments[0] && (left < 0 || left >= to))
            continue; /* nothing of it is left in this range */
        CHECK_OR(same, test_message("[%lld, %lld): transaction %lld..%lld of %lld is not listed", (long long)from,
                                    (long long)to, (long long)expected_abort->first_offset,
                                    (long long)expected_abort->last_offset, (long long)expected_abort->producer_id);
                 return);
        next++;
    }
    CHECK_EQUAL(next, found.count);
}

/* Stages some batches, writes them, with or without a disk that refuses. */
static void do_write(struct model *model)
{
    struct {
        uint64_t mark;
        int64_t base;
        int32_t count;
        struct event event;
    } staged[64];
    uint32_t count = 1 + (uint32_t)pick(model, pick(model, 4) ? 6 : 60);
    int32_t before[PRODUCER_COUNT], before_txn[TXN_COUNT];
    bool open[TXN_COUNT];
    memcpy(before, model->next_sequence, sizeof before);
    memcpy(before_txn, model->next_txn_sequence, sizeof before_txn);
    for (int i = 0; i < TXN_COUNT; i++)
        open[i] = model->begun[i] >= 0;
    int64_t expected = model->end;
    for (uint32_t i = 0; i < count; i++) {
        struct log_batch want = {.record_count = 1 + (int32_t)pick(model, 5),
                                 .body_bytes = 16 + (int32_t)pick(model, STAGED_BYTES - 100),
                                 .mark = ++model->next_mark,
                                 .timestamp_ms = NOW + (int64_t)pick(model, 100000)};
        int producer = (int)pick(model, PRODUCER_COUNT * 2 + TXN_COUNT);
        staged[i].event = (struct event){EVENT_NONE, -1};
        if (producer >= PRODUCER_COUNT * 2)
            want_transactional(model, producer - PRODUCER_COUNT * 2, &want, open, &staged[i].event);
        else if (producer < PRODUCER_COUNT) {
            want.producer_id = 100 + producer;
            want.base_sequence = model->next_sequence[producer];
            model->next_sequence[producer] += want.record_count;
        }
        struct mqd_stage_result result;
        CHECK_EQUAL(log_stage(model->partition, staged_bytes[i], want, &result), 0);
        CHECK(!result.duplicate);
        CHECK_EQUAL(result.base_offset, expected);
        staged[i].mark = want.mark, staged[i].base = expected, staged[i].count = want.record_count;
        expected += want.record_count;
    }
    bool rolled, refuse = pick(model, 6) == 0;
    if (refuse) {
        char rule[100];
        snprintf(rule, sizeof rule, "%s:ENOSPC::after=%d:count=1,write:SHORT:.log:bytes=%d:count=3",
                 pick(model, 3) ? "write" : "open", (int)pick(model, 6), 1 + (int)pick(model, 500));
        CHECK_EQUAL(mqd_file_watch(NULL, rule), 0);
    }
    int result = mqd_partition_write(model->partition, NOW, &rolled), error = errno;
    if (refuse)
        mqd_file_watch(NULL, NULL);
    if (result < 0) {
        CHECK(refuse);
        CHECK_EQUAL(error, ENOSPC);
        memcpy(model->next_sequence, before, sizeof before);
        memcpy(model->next_txn_sequence, before_txn, sizeof before_txn);
    } else {
        for (uint32_t i = 0; i < count; i++) {
            model->marks[staged[i].base] = staged[i].mark;
            note_event(model, staged[i].base, staged[i].event);
        }
        model->end = expected;
    }
    CHECK_EQUAL(mqd_partition_log_end_offset(model->partition), model->end);
}

#endif
