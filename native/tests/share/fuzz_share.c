/* fuzz: -max_len=1024 */
/* One share-partition at its owner: responses of the share coordinator as bytes (settings, READ,
 * WRITE), and between them requests of members. Bytes 0 and 1: the length of the first response;
 * then the response; then steps of a byte and its operands.
 *
 * Beyond what the sanitizers see: the state's invariants hold (mqd_share_check), every waiter gets one answer, and all
 * memory goes back to the pool. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "share/partition.h"

#define ALWAYS(condition)                                                                                              \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);                                  \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

#define POOL_BYTES (64 * MQD_SHARE_BLOCK_BYTES)
#define OFFSET_MAX (1ll << 60) /* no log is longer */
#define STEPS_MAX 64
#define SPAN_OFTEN 8192 /* larger ones are checked once, at the end */
#define RECORDS_MAX 256
#define RUNS_MAX 16

static const struct mqd_share_partition_id partition_id = {.group_id = {(const uint8_t *)"jobs", 4},
                                                           .partition_index = 3};

struct input {
    const uint8_t *at, *end;
};

static uint8_t byte_of(struct input *in)
{
    return in->at < in->end ? *in->at++ : 0;
}

struct world {
    struct mqd_share_pool pool;
    struct mqd_share_partition partition;
    int64_t now_ms;
    int asked, answered; /* waiters */
};

static void respond(void *context, struct mqd_share_waiter *waiter, int16_t error)
{
    (void)error;
    ((struct world *)context)->answered++;
    free(waiter);
}

/* The response to what is in flight: the next `size_bytes` bytes, in a block of their own. */
static void response(struct world *w, struct input *in, uint32_t size_bytes)
{
    uint32_t left = (uint32_t)(in->end - in->at);
    size_bytes = size_bytes < left ? size_bytes : left;
    uint8_t *bytes = malloc(size_bytes ? size_bytes : 1);
    memcpy(bytes, in->at, size_bytes);
    in->at += size_bytes;
    mqd_share_partition_on_response(&w->partition, bytes, size_bytes, w->now_ms);
    free(bytes);
}

static void acquire(struct world *w, struct input *in)
{
    struct mqd_share *state = &w->partition.state;
    struct mqd_share_batch batches[4];
    struct mqd_share_record records[4][RECORDS_MAX];
    struct mqd_share_run runs[RUNS_MAX];
    struct mqd_share_acquisition acquisition = {
        .member = byte_of(in) % 3, .now_ms = w->now_ms, .records_max = byte_of(in), .strict = byte_of(in) & 1};
    int64_t from = mqd_share_next_offset(state), at = from;
    if (from < 0 || !acquisition.records_max)
        return;
    uint32_t count = 1 + byte_of(in) % 4;
    for (uint32_t i = 0; i < count; i++) {
        uint8_t shape = byte_of(in);
        int64_t first = at + (i ? shape % 3 : 0), last = first + shape * (shape & 1 ? 40 : 1);
        batches[i] = (struct mqd_share_batch){.first = first, .last = last, .skipped = shape % 5 == 0};
        if (shape % 7) { /* where there is FIFO: few keys, and holes */
            batches[i].records = records[i];
            for (int64_t offset = first; offset <= last && batches[i].record_count < RECORDS_MAX;
                 offset += 1 + shape % 2)
                records[i][batches[i].record_count++] =
                    (struct mqd_share_record){(int32_t)(offset - first), (uint32_t)offset * shape % 5};
        }
        at = last + 1;
    }
    uint32_t got = mqd_share_acquire(state, &acquisition, from, batches, count, runs, RUNS_MAX);
    ALWAYS(got <= RUNS_MAX);
    for (uint32_t i = 0; i < got; i++)
        ALWAYS(runs[i].first >= from && runs[i].first <= runs[i].last && runs[i].last < at && runs[i].count > 0);
}

static void acknowledge(struct world *w, struct input *in)
{
    struct mqd_share *state = &w->partition.state;
    struct mqd_share_acknowledgement list[2];
    uint64_t member = byte_of(in) % 3;
    uint32_t count = 1 + byte_of(in) % 2;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t left = (uint32_t)(in->end - in->at), type_count = byte_of(in) % 8;
        list[i].first = state->start + (int8_t)byte_of(in);
        list[i].last = list[i].first + (int8_t)byte_of(in);
        list[i].types = in->at;
        list[i].type_count = left > 3 + type_count ? type_count : 0;
        in->at += list[i].type_count;
    }
    if (mqd_share_acknowledge(state, member, list, count, w->now_ms))
        return;
    struct mqd_share_waiter *waiter = calloc(1, sizeof *waiter);
    mqd_list_init(&waiter->node);
    w->asked++;
    mqd_share_partition_await(&w->partition, waiter);
}

static void step(struct world *w, struct input *in)
{
    struct mqd_share_partition *partition = &w->partition;
    uint8_t what = byte_of(in);
    bool active = partition->phase == MQD_SHARE_ACTIVE;
    switch (what % 9) {
    case 0:
        if (active)
            acquire(w, in);
        break;
    case 1:
        if (active)
            acknowledge(w, in);
        break;
    case 2:
        if (active)
            mqd_share_release_member(&partition->state, byte_of(in) % 3, w->now_ms);
        break;
    case 3:
        w->now_ms += byte_of(in) * 8;
        if (active)
            mqd_share_expire(&partition->state, w->now_ms, 1 + byte_of(in));
        break;
    case 4:
        if (active)
            mqd_share_set_log_start(&partition->state, partition->state.start + byte_of(in) * 30);
        break;
    case 5:
        mqd_share_partition_next_request(partition, w->now_ms);
        break;
    case 6:
        response(w, in, byte_of(in));
        break;
    case 7:
        if (partition->in_flight)
            mqd_share_partition_on_unsent(partition, w->now_ms + byte_of(in));
        break;
    default:
        if (partition->phase == MQD_SHARE_FAILED)
            mqd_share_partition_restart(partition, what);
        break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static void *memory;
    struct input in = {data, data + size};
    struct world w = {0};
    if (!memory)
        memory = aligned_alloc(64, POOL_BYTES);
    mqd_share_pool_init(&w.pool, memory, POOL_BYTES);
    mqd_share_partition_init(&w.partition, &w.pool, &partition_id, 1, respond, &w);
    ALWAYS(mqd_share_partition_next_request(&w.partition, 0) == MQD_SHARE_READ);
    uint32_t first = byte_of(&in);
    first |= (uint32_t)byte_of(&in) << 8;
    response(&w, &in, first);
    for (int i = 0; i < STEPS_MAX && in.at < in.end; i++) {
        if (w.partition.phase == MQD_SHARE_NO_START)
            mqd_share_partition_set_start(&w.partition, byte_of(&in));
        if (w.partition.phase == MQD_SHARE_ACTIVE && w.partition.state.end > OFFSET_MAX)
            break;
        step(&w, &in);
        if (w.partition.phase == MQD_SHARE_ACTIVE && w.partition.state.end - w.partition.state.start < SPAN_OFTEN)
            mqd_share_check(&w.partition.state);
    }
    if (w.partition.phase == MQD_SHARE_ACTIVE)
        mqd_share_check(&w.partition.state);
    mqd_share_partition_free(&w.partition);
    mqd_buffer_free(&w.partition.body);
    ALWAYS(w.asked == w.answered);
    ALWAYS(w.pool.used == 0);
    return 0;
}
