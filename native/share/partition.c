/* A share-partition at its owner: loads and writes its state, and holds back responses until the
 * state is written. See share/partition.h. */
#include "share/partition.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "share/planted_bugs.h"
#include "share/sessions.h"
#include "wire/kafka_errors.h"

#define RUNS_PER_WRITE 1024
#define RETRY_BACKOFF_MS 100
#define RETRY_BACKOFF_MS_MAX 5000
#define BODY_KEPT_BYTES_MAX 4096

/* Identifies where a record's ordering key comes from: this header, or the Kafka record key (1).
 * When the id changes, the keys known so far are discarded. */
static uint32_t fifo_id(const uint8_t *header, uint32_t header_bytes)
{
    return header_bytes ? (uint32_t)mqd_share_member_hash(header, header_bytes) | 2 : 1;
}

int mqd_share_settings_parse(const uint8_t *bytes, uint32_t size_bytes, struct mqd_share_group_settings *out)
{
    int32_t words[3], backoffs[2];
    if (size_bytes < MQD_SHARE_SETTINGS_BYTES)
        return -1;
    uint8_t header_bytes = bytes[15];
    if (header_bytes > MQD_SHARE_FIFO_HEADER_BYTES_MAX || header_bytes > size_bytes - MQD_SHARE_SETTINGS_BYTES)
        return -1;
    memcpy(words, bytes, sizeof words);
    memcpy(backoffs, bytes + 24, sizeof backoffs);
    *out = (struct mqd_share_group_settings){.state = {.lock_ms = words[0],
                                                       .delivery_limit = words[1],
                                                       .open_max = (uint32_t)words[2],
                                                       .backoff_ms = backoffs[0],
                                                       .backoff_ms_max = backoffs[1],
                                                       .dead_letters = bytes[14] & 1},
                                             .fifo_header_bytes = header_bytes,
                                             .read_committed = bytes[12],
                                             .reset = bytes[13]};
    memcpy(&out->reset_offset, bytes + 16, sizeof out->reset_offset);
    memcpy(out->fifo_header, bytes + MQD_SHARE_SETTINGS_BYTES, header_bytes);
    out->state.fifo = bytes[14] & 2 ? fifo_id(out->fifo_header, header_bytes) : 0;
    bool is_valid = words[0] > 0 && words[1] > 0 && words[1] <= INT16_MAX && words[2] > 0 &&
                    words[2] <= MQD_SHARE_SPAN_MAX && out->reset <= MQD_SHARE_RESET_BY_DURATION &&
                    out->reset_offset >= -1 && backoffs[0] >= 0 && backoffs[1] >= backoffs[0];
    return is_valid ? MQD_SHARE_SETTINGS_BYTES + header_bytes : -1;
}

/* ---- life cycle ---- */

void mqd_share_partition_init(struct mqd_share_partition *partition, struct mqd_share_pool *pool,
                              const struct mqd_share_partition_id *id, int32_t leader_epoch,
                              void (*respond)(void *context, struct mqd_share_waiter *waiter, int16_t error),
                              void *context)
{
    *partition = (struct mqd_share_partition){.id = *id,
                                              .pool = pool,
                                              .phase = MQD_SHARE_LOADING,
                                              .leader_epoch = leader_epoch,
                                              .backoff_ms = RETRY_BACKOFF_MS,
                                              .dirty_since_ms = -1,
                                              .respond = respond,
                                              .context = context};
    mqd_list_init(&partition->waiting);
    mqd_list_init(&partition->covered);
}

static void respond_all(struct mqd_share_partition *partition, struct mqd_node *list, int16_t error)
{
    struct mqd_node *node;
    while ((node = mqd_list_pop(list)))
        partition->respond(partition->context, MQD_CONTAINER(node, struct mqd_share_waiter, node), error);
}

void mqd_share_partition_fail(struct mqd_share_partition *partition, int16_t error, int64_t now_ms)
{
    if (partition->phase == MQD_SHARE_ACTIVE)
        mqd_share_destroy(&partition->state);
    partition->phase = MQD_SHARE_FAILED;
    partition->error = error;
    partition->failed_ms = now_ms;
    partition->in_flight = partition->write_pending = partition->verify_pending = partition->report_pending = 0;
    partition->dirty_since_ms = -1;
    mqd_buffer_free(&partition->body);
    respond_all(partition, &partition->covered, error);
    respond_all(partition, &partition->waiting, error);
}

void mqd_share_partition_restart(struct mqd_share_partition *partition, int32_t leader_epoch)
{
    MQD_ASSERT(partition->phase == MQD_SHARE_FAILED, "P3: a share-partition in phase %d is loaded again",
               partition->phase);
    partition->phase = MQD_SHARE_LOADING;
    partition->error = 0;
    partition->leader_epoch = leader_epoch;
    partition->backoff_ms = RETRY_BACKOFF_MS;
    partition->due_ms = 0;
}

void mqd_share_partition_free(struct mqd_share_partition *partition)
{
    mqd_share_partition_fail(partition, MQD_KAFKA_NOT_LEADER_OR_FOLLOWER, 0);
}

static void activate(struct mqd_share_partition *partition, int64_t start)
{
    mqd_share_init(&partition->state, partition->pool, &partition->settings.state, start);
    partition->phase = MQD_SHARE_ACTIVE;
}

void mqd_share_partition_set_start(struct mqd_share_partition *partition, int64_t start)
{
    MQD_ASSERT(partition->phase == MQD_SHARE_NO_START, "P3: a share-partition in phase %d gets a start",
               partition->phase);
    activate(partition, start);
    partition->state.start_moved = 1;
}

/* ---- requests ---- */

static bool is_dirty(const struct mqd_share_partition *partition)
{
    const struct mqd_share *state = &partition->state;
    return partition->phase == MQD_SHARE_ACTIVE && (state->start_moved || state->changed_first <= state->changed_last);
}

/* Encodes the next WRITE into `body`. If the WRITE contains all changes, the waiters are answered
 * with its outcome. Returns false if there is nothing to write. */
static bool prepare_write(struct mqd_share_partition *partition)
{
    struct mqd_share_run runs[RUNS_PER_WRITE];
    struct mqd_share_difference difference;
    mqd_share_take_difference(&partition->state, runs, RUNS_PER_WRITE, &difference);
    partition->dirty_since_ms = -1;
    if (difference.is_empty) {
        respond_all(partition, &partition->waiting, 0);
        return false;
    }
    struct mqd_share_write write = {.state_epoch = partition->state_epoch,
                                    .leader_epoch = partition->leader_epoch,
                                    .start = difference.start,
                                    .complete_count = (int32_t)difference.finished_count,
                                    .run_count = difference.run_count};
    partition->body.size_bytes = 0;
    mqd_share_write_begin(&partition->body, &partition->id, &write);
    for (uint32_t i = 0; i < difference.run_count; i++) {
        struct mqd_share_state_run run = {runs[i].first, runs[i].last, runs[i].state, runs[i].count};
        mqd_share_write_run(&partition->body, &run);
    }
    mqd_share_write_end(&partition->body);
    MQD_ASSERT(!partition->body.failed, "P2: out of memory for a write of %u runs", difference.run_count);
    if (difference.is_whole)
        mqd_list_move_all(&partition->covered, &partition->waiting); /* P2 */
    partition->write_pending = 1;
    return true;
}

static bool write_is_due(struct mqd_share_partition *partition, int64_t now_ms)
{
    if (partition->write_pending || !mqd_list_empty(&partition->waiting))
        return true;
    if (!is_dirty(partition))
        return false;
    if (partition->dirty_since_ms < 0)
        partition->dirty_since_ms = now_ms;
    return now_ms - partition->dirty_since_ms >= MQD_SHARE_LAZY_MS;
}

/* Encodes a READ into `body`. The coordinator uses the epochs and the log's end to tell which
 * records the log has lost since the last leader epoch; it discards the state of their offsets. */
static void prepare_read(struct mqd_share_partition *partition)
{
    struct mqd_share_epoch epochs[MQD_SHARE_EPOCH_COUNT_MAX];
    uint32_t count = partition->get_log_epochs ? partition->get_log_epochs(partition->context, partition, epochs) : 0;
    partition->body.size_bytes = 0;
    mqd_share_encode_read(&partition->body, &partition->id, partition->leader_epoch, epochs, count);
    partition->in_flight = MQD_SHARE_READ;
}

int mqd_share_partition_next_request(struct mqd_share_partition *partition, int64_t now_ms)
{
    if (partition->in_flight || now_ms < partition->due_ms)
        return 0; /* P1 */
    bool verify_now = partition->verify_pending && !partition->write_pending && !is_dirty(partition);
    if (partition->phase == MQD_SHARE_LOADING || verify_now) {
        prepare_read(partition);
    } else if (partition->phase == MQD_SHARE_ACTIVE && (write_is_due(partition, now_ms) || partition->verify_pending)) {
        if (!partition->write_pending && !prepare_write(partition))
            return 0;
        partition->in_flight = MQD_SHARE_WRITE;
        if (PLANTED_PARTITION_BUG(partition, EARLY_RESPONSE))
            respond_all(partition, &partition->covered, 0);
    }
    return partition->in_flight;
}

void mqd_share_partition_request_verify(struct mqd_share_partition *partition)
{
    partition->verify_pending =
        partition->phase == MQD_SHARE_ACTIVE && (partition->state.delayed_count || partition->state.archiving_count);
}

void mqd_share_partition_request_report(struct mqd_share_partition *partition)
{
    partition->verify_pending = partition->report_pending = partition->phase == MQD_SHARE_ACTIVE;
}

void mqd_share_partition_on_unsent(struct mqd_share_partition *partition, int64_t due_ms)
{
    partition->in_flight = 0;
    partition->due_ms = due_ms;
    if (PLANTED_PARTITION_BUG(partition, LOST_WRITE))
        partition->write_pending = 0;
}

/* ---- responses ---- */

static bool is_retriable(int16_t error)
{
    return error == MQD_KAFKA_COORDINATOR_LOAD_IN_PROGRESS || error == MQD_KAFKA_COORDINATOR_NOT_AVAILABLE ||
           error == MQD_KAFKA_NOT_COORDINATOR || error == MQD_KAFKA_REQUEST_TIMED_OUT ||
           error == MQD_KAFKA_STORAGE_ERROR;
}

/* The error that clients get if the coordinator has responded with an error that is not
 * retriable. */
static int16_t error_for_clients(int16_t error)
{
    switch (error) {
    case MQD_KAFKA_FENCED_LEADER_EPOCH:
        return MQD_KAFKA_NOT_LEADER_OR_FOLLOWER;
    case MQD_KAFKA_FENCED_STATE_EPOCH:
    case MQD_KAFKA_UNKNOWN_TOPIC_OR_PARTITION:
    case MQD_KAFKA_GROUP_ID_NOT_FOUND:
        return error;
    default:
        return MQD_KAFKA_UNKNOWN_SERVER_ERROR;
    }
}

static void on_read(struct mqd_share_partition *partition, struct mqd_share_response *response, int64_t now_ms)
{
    partition->state_epoch = response->state_epoch;
    if (response->start < 0) {
        partition->phase = MQD_SHARE_NO_START;
        return;
    }
    uint32_t count = (uint32_t)response->run_count;
    struct mqd_share_run *runs = malloc(sizeof *runs * (count ? count : 1));
    struct mqd_share_state_run run;
    for (uint32_t i = 0; runs && i < count && mqd_share_response_run(response, &run) == 0; i++)
        runs[i] = (struct mqd_share_run){run.first, run.last, run.state, run.count};
    activate(partition, response->start);
    if (!runs || mqd_share_load(&partition->state, runs, count) < 0)
        mqd_share_partition_fail(partition,
                                 !runs || partition->state.pool_exhausted ? MQD_KAFKA_STORAGE_ERROR
                                                                          : MQD_KAFKA_UNKNOWN_SERVER_ERROR,
                                 now_ms);
    free(runs);
}

static void on_verified(struct mqd_share_partition *partition, const struct mqd_share_response *response,
                        int64_t now_ms)
{
    struct mqd_share *state = &partition->state;
    partition->verify_pending = partition->report_pending = 0;
    state->settings = partition->settings.state;
    if (response->state_epoch == partition->state_epoch && (response->start == state->start || state->start_moved))
        return;
    mqd_share_partition_fail(partition, MQD_KAFKA_FENCED_STATE_EPOCH, now_ms);
    mqd_share_partition_restart(partition, partition->leader_epoch);
}

static void on_written(struct mqd_share_partition *partition)
{
    partition->write_pending = 0;
    partition->verify_pending = partition->report_pending;
    if (partition->body.capacity_bytes > BODY_KEPT_BYTES_MAX)
        mqd_buffer_free(&partition->body);
    if (PLANTED_PARTITION_BUG(partition, RESPOND_WAITING))
        respond_all(partition, &partition->waiting, 0);
    respond_all(partition, &partition->covered, 0);
}

void mqd_share_partition_on_response(struct mqd_share_partition *partition, const uint8_t *bytes, uint32_t size_bytes,
                                     int64_t now_ms)
{
    struct mqd_share_group_settings settings;
    struct mqd_share_response response;
    int api_key = partition->in_flight;
    if (!api_key)
        return;
    int settings_bytes = mqd_share_settings_parse(bytes, size_bytes, &settings);
    bool is_valid =
        settings_bytes > 0 && mqd_share_response_parse(bytes + settings_bytes, size_bytes - (uint32_t)settings_bytes,
                                                       api_key, &partition->id, &response) == 0;
    partition->in_flight = 0;
    if (is_valid && is_retriable(response.error)) {
        partition->due_ms = now_ms + partition->backoff_ms;
        partition->backoff_ms =
            partition->backoff_ms * 2 < RETRY_BACKOFF_MS_MAX ? partition->backoff_ms * 2 : RETRY_BACKOFF_MS_MAX;
        if (PLANTED_PARTITION_BUG(partition, LOST_WRITE))
            partition->write_pending = 0;
        return;
    }
    if (!is_valid || response.error) { /* P3 */
        bool should_reload = is_valid && response.error == MQD_KAFKA_FENCED_STATE_EPOCH;
        mqd_share_partition_fail(partition,
                                 is_valid ? error_for_clients(response.error) : MQD_KAFKA_UNKNOWN_SERVER_ERROR, now_ms);
        if (should_reload)
            mqd_share_partition_restart(partition, partition->leader_epoch);
        return;
    }
    partition->backoff_ms = RETRY_BACKOFF_MS;
    partition->due_ms = 0;
    partition->settings = settings;
    if (api_key == MQD_SHARE_READ && partition->phase == MQD_SHARE_ACTIVE) {
        on_verified(partition, &response, now_ms);
        return;
    }
    if (api_key == MQD_SHARE_READ) {
        on_read(partition, &response, now_ms);
        return;
    }
    partition->state.settings = settings.state;
    on_written(partition);
}

/* ---- waiters ---- */

void mqd_share_partition_await(struct mqd_share_partition *partition, struct mqd_share_waiter *waiter)
{
    if (partition->phase != MQD_SHARE_ACTIVE)
        partition->respond(partition->context, waiter, MQD_KAFKA_NOT_LEADER_OR_FOLLOWER);
    else
        mqd_list_append(&partition->waiting, &waiter->node);
}

int64_t mqd_share_partition_deadline(const struct mqd_share_partition *partition)
{
    int64_t request_ms = MQD_SHARE_NEVER, expires_ms = MQD_SHARE_NEVER;
    if (partition->phase == MQD_SHARE_ACTIVE)
        expires_ms = mqd_share_deadline(&partition->state);
    if (!partition->in_flight && (partition->phase == MQD_SHARE_LOADING || partition->write_pending ||
                                  partition->verify_pending || !mqd_list_empty(&partition->waiting)))
        request_ms = partition->due_ms;
    else if (!partition->in_flight && is_dirty(partition))
        request_ms = partition->dirty_since_ms < 0 ? partition->due_ms : partition->dirty_since_ms + MQD_SHARE_LAZY_MS;
    return request_ms < expires_ms ? request_ms : expires_ms;
}

bool mqd_share_partition_is_idle(const struct mqd_share_partition *partition)
{
    return !partition->in_flight && !partition->write_pending && mqd_list_empty(&partition->waiting) &&
           mqd_list_empty(&partition->covered) &&
           (partition->phase != MQD_SHARE_ACTIVE ||
            (!is_dirty(partition) && !partition->state.acquired_count && !partition->state.delayed_count &&
             !partition->state.archiving_count));
}
