/* Applies a leader's response to the partitions in it. See server/replication/fetcher.h. */
#include <errno.h>
#include <string.h>

#include "base/big_endian.h"
#include "server/replication/fetcher_state.h"

#define FRAME_BYTES_MIN 16
#define WARN_INTERVAL_MS 10000 /* for one partition, at most one warning in this time */
#define FIRST_PAUSE_MS 5       /* a leader may learn its epoch shortly after its followers */

/* ---- one partition ---- */

static void warn(struct mqd_reactor *r, struct mqd_followed *followed, const char *problem, const char *detail)
{
    if (r->now_ms - followed->warned_ms < WARN_INTERVAL_MS)
        return;
    followed->warned_ms = r->now_ms;
    mqd_log(r, 4, 0, followed->owned->slot, "following leader %d: %s%s%s; retrying", followed->owned->replica->leader,
            problem, detail ? ": " : "", detail ? detail : "");
}

static void put_off(struct mqd_reactor *r, struct mqd_followed *followed)
{
    mqd_followed_put_off(r, followed, followed->fetcher->options.backoff_ms);
}

/* If the leader does not know its leader epoch yet, the next fetch follows soon, because producers
 * wait until the followers have fetched; the pauses grow from fetch to fetch. */
static void put_off_refused(struct mqd_reactor *r, struct mqd_followed *followed, int16_t error)
{
    int64_t ms = (int64_t)FIRST_PAUSE_MS << followed->refusal_count;
    if ((error != MQD_KAFKA_NOT_LEADER_OR_FOLLOWER && error != MQD_KAFKA_UNKNOWN_LEADER_EPOCH) ||
        ms >= followed->fetcher->options.backoff_ms) {
        put_off(r, followed);
        return;
    }
    followed->refusal_count++;
    mqd_followed_put_off(r, followed, ms);
}

/* If the leader's log begins after this log's start, tells Python to move the log start and delete
 * files. The leader states its log start only once, so the offset is remembered and reported later
 * if the event queue is full, or if this replica does not know yet that the offset is committed. */
static void report_log_start(struct mqd_reactor *r, struct mqd_followed *followed, int64_t log_start_offset)
{
    if (log_start_offset <= followed->reported_log_start)
        return;
    struct mqd_positions positions;
    mqd_partition_positions(followed->owned->partition, &positions);
    if (log_start_offset <= positions.log_start_offset)
        return;
    struct mqd_event event = {.kind = MQD_EVENT_LOG_START,
                              .slot = followed->owned->slot,
                              .log_dir = followed->owned->log_dir,
                              .offset = log_start_offset};
    if (log_start_offset <= positions.high_watermark && mqd_reactor_emit(r, &event)) {
        followed->reported_log_start = log_start_offset;
        return;
    }
    followed->pending_log_start = log_start_offset;
    r->fetchers->has_pending_log_start = true;
}

void mqd_fetchers_report_log_starts(struct mqd_reactor *r)
{
    if (!r->fetchers->has_pending_log_start)
        return;
    r->fetchers->has_pending_log_start = false;
    for (uint32_t slot = 0; slot < r->owned_end; slot++) {
        struct mqd_followed *followed = r->owned[slot] ? r->owned[slot]->followed : NULL;
        if (!followed || followed->pending_log_start <= followed->reported_log_start)
            continue;
        if (followed->owned->truncating)
            r->fetchers->has_pending_log_start = true; /* the log is being truncated and must not be used */
        else
            report_log_start(r, followed, followed->pending_log_start);
    }
}

static struct mqd_replica_step next_step_of(const struct mqd_followed *followed,
                                            const struct mqd_parsed_partition *partition)
{
    struct mqd_replica_response response = {.error = partition->error,
                                            .leader_epoch = followed->sent.current_leader_epoch,
                                            .diverging_epoch = partition->diverging_epoch,
                                            .diverging_end = partition->diverging_end,
                                            .high_watermark = partition->high_watermark,
                                            .log_start = partition->log_start_offset,
                                            .read_end = partition->last_stable_offset};
    struct mqd_replica_step step;
    uint32_t count;
    const struct mqd_epoch *epochs = mqd_partition_epochs(followed->owned->partition, &count);
    mqd_replica_next_step(followed->owned->replica, &followed->sent, &response, epochs, count, &step);
    return step;
}

/* Returns the partition that is being parsed, or NULL if the response must not change it (G2), or
 * if it already has staged records, because then the response contains it twice. */
static struct mqd_followed *requested_partition(struct mqd_reactor *r, const struct mqd_fetcher *fetcher)
{
    struct mqd_followed *followed = mqd_followed_find(r->fetchers, &fetcher->parser.partition.key);
    if (!followed || followed->fetcher != fetcher || !followed->in_session || followed->owned->truncating ||
        followed->owned->closing)
        return NULL;
    return mqd_partition_staged_count(followed->owned->partition) == 0 ? followed : NULL;
}

static void adopt_high_watermark(struct mqd_reactor *r, struct mqd_followed *followed, int64_t high_watermark)
{
    struct mqd_owned *owned = followed->owned;
    mqd_replication_apply_changes(
        r, owned,
        mqd_replica_adopt_high_watermark(owned->replica, followed->sent.current_leader_epoch, high_watermark));
}

/* Handles a partition without records. */
static void on_empty(struct mqd_reactor *r, struct mqd_followed *followed, const struct mqd_parsed_partition *partition)
{
    struct mqd_owned *owned = followed->owned;
    struct mqd_replica_step step = next_step_of(followed, partition);
    switch (step.action) {
    case MQD_REPLICA_IGNORE:
        mqd_followed_queue_change(followed); /* the session has outdated values, so the next request must update them */
        return;
    case MQD_REPLICA_APPEND:
        adopt_high_watermark(r, followed, partition->high_watermark);
        report_log_start(r, followed, partition->log_start_offset);
        return;
    case MQD_REPLICA_TRUNCATE:
    case MQD_REPLICA_RESTART:
        mqd_log(r, 6, 0, owned->slot, "leader %d of epoch %d: the log must %s offset %lld (its end was %lld)",
                owned->replica->leader, owned->replica->leader_epoch,
                step.action == MQD_REPLICA_RESTART ? "restart at" : "be truncated to", (long long)step.offset,
                (long long)owned->replica->log_end);
        mqd_followed_queue_change(followed);
        mqd_follow_truncate(r, owned, step.offset, step.action == MQD_REPLICA_RESTART ? step.offset : -1);
        return;
    default:
        put_off_refused(r, followed, partition->error);
    }
}

static void on_partition(struct mqd_reactor *r, struct mqd_fetcher *fetcher)
{
    const struct mqd_parsed_partition *partition = &fetcher->parser.partition;
    struct mqd_followed *followed =
        partition->error == 0 && partition->records_bytes ? requested_partition(r, fetcher) : NULL;
    fetcher->receiving = NULL;
    if (!followed)
        return;
    if (next_step_of(followed, partition).action != MQD_REPLICA_APPEND) {
        mqd_followed_queue_change(followed);
        return;
    }
    if (r->log_dirs[followed->owned->log_dir].full) {
        mqd_followed_put_off(r, followed, MQD_FETCHER_DISK_PAUSE_MS);
        return;
    }
    followed->leader_high_watermark = partition->high_watermark;
    fetcher->receiving = followed;
}

/* Called when the records being received cannot be appended. Skips the rest of them, and restarts
 * the log or puts the partition off. */
static void refuse(struct mqd_reactor *r, struct mqd_fetcher *fetcher, int error,
                   const struct mqd_follow_result *follow)
{
    struct mqd_followed *followed = fetcher->receiving;
    fetcher->receiving = NULL;
    if (error == MQD_FOLLOW_BEFORE) {
        mqd_followed_queue_change(followed);
        mqd_follow_truncate(r, followed->owned, followed->sent.fetch_offset, follow->next_offset);
        return;
    }
    warn(r, followed, "its records are refused", follow->reason);
    put_off(r, followed);
}

/* Handles the records received so far. Returns the number of bytes consumed. */
static uint32_t on_records(struct mqd_reactor *r, struct mqd_fetcher *fetcher, const uint8_t *bytes,
                           uint32_t size_bytes)
{
    uint32_t taken = 0;
    while (fetcher->receiving) {
        struct mqd_followed *followed = fetcher->receiving;
        struct mqd_owned *owned = followed->owned;
        struct mqd_follow_result follow;
        int error = mqd_partition_follow(owned->partition, bytes + taken, size_bytes - taken,
                                         followed->sent.current_leader_epoch, followed->leader_high_watermark,
                                         r->wall_ms, &follow);
        taken += (uint32_t)follow.taken_bytes;
        if (follow.batch_count) {
            mqd_stat(r, MQD_COUNT_REPLICA_BYTES, follow.taken_bytes);
            mqd_followed_update_storing(followed);
            if (!mqd_list_linked(&owned->write_node))
                mqd_list_append(&r->to_write, &owned->write_node);
        }
        if (error == MQD_FOLLOW_OK)
            break;
        if (error == MQD_FOLLOW_FULL)
            mqd_owner_write_all(r); /* a failed write sets `receiving` to NULL */
        else
            refuse(r, fetcher, error, &follow);
    }
    /* consumes all bytes if they are skipped, or if the records end with an incomplete batch */
    return fetcher->receiving && size_bytes < fetcher->parser.records_left ? taken : size_bytes;
}

void mqd_fetcher_on_written(struct mqd_reactor *r, struct mqd_owned *owned, int error)
{
    struct mqd_followed *followed = owned->followed;
    if (error) {
        if (followed->fetcher && followed->fetcher->receiving == followed)
            followed->fetcher->receiving = NULL;
        mqd_followed_update_storing(followed);
        mqd_followed_put_off(r, followed, MQD_FETCHER_DISK_PAUSE_MS);
        return;
    }
    mqd_replication_update(r, owned);
    if (mqd_replica_adopt_high_watermark(owned->replica, followed->sent.current_leader_epoch,
                                         followed->leader_high_watermark) &
        MQD_REPLICA_CHANGED_HIGH_WATERMARK)
        /* the high watermark is published together with the log's end */
        mqd_partition_raise_high_watermark(owned->partition, owned->replica->high_watermark);
    mqd_followed_update_storing(followed);
    mqd_followed_queue_change(followed);
}

static bool on_partition_end(struct mqd_reactor *r, struct mqd_fetcher *fetcher)
{
    const struct mqd_parsed_partition *partition = &fetcher->parser.partition;
    struct mqd_followed *followed = fetcher->receiving;
    fetcher->receiving = NULL;
    if (partition->records_bytes && partition->error == 0) {
        if (partition->diverging_epoch >= 0) {
            mqd_fetcher_end(r, fetcher, EPROTO,
                            "a response has records of a partition, but says that its log has diverged");
            return false;
        }
        if (followed)
            report_log_start(r, followed, partition->log_start_offset);
        return true;
    }
    if ((followed = requested_partition(r, fetcher)))
        on_empty(r, followed, partition);
    return true;
}

/* ---- the response ---- */

static bool on_head(struct mqd_reactor *r, struct mqd_fetcher *fetcher)
{
    const struct mqd_response_parser *parser = &fetcher->parser;
    if ((uint32_t)parser->correlation_id != fetcher->correlation_id - (uint32_t)(fetcher->outstanding - 1)) {
        mqd_fetcher_end(r, fetcher, EPROTO, "the correlation id of a response is not that of the request");
        return false;
    }
    if (fetcher->awaits_urgent) { /* this is the response to the urgent request, which was empty */
        bool is_empty = parser->error == 0 && parser->topics_left == 0;
        if (!is_empty)
            mqd_fetcher_end(r, fetcher, EPROTO, "the response to an empty request has partitions or an error");
        return is_empty;
    }
    if (parser->error == MQD_KAFKA_FETCH_SESSION_ID_NOT_FOUND ||
        parser->error == MQD_KAFKA_INVALID_FETCH_SESSION_EPOCH ||
        parser->error == MQD_KAFKA_FETCH_SESSION_TOPIC_ID_ERROR) {
        fetcher->starts_session = 1;
        fetcher->not_before_ms = r->now_ms + (fetcher->session_epoch == 0 ? fetcher->options.backoff_ms : 0);
        fetcher->session_id = 0;
        return true;
    }
    if (parser->error) {
        char text[80];
        snprintf(text, sizeof text, "the leader refuses the fetch with error %d", parser->error);
        mqd_fetcher_end(r, fetcher, EPROTO, text);
        return false;
    }
    fetcher->session_id = parser->session_id;
    fetcher->session_epoch = fetcher->session_epoch == INT32_MAX ? 1 : fetcher->session_epoch + 1;
    if (parser->session_id == 0)
        fetcher->starts_session = 1; /* the leader has no room for a session: every request must be a full one */
    return true;
}

static void on_end(struct mqd_reactor *r, struct mqd_fetcher *fetcher)
{
    fetcher->in_frame = 0;
    fetcher->outstanding--;
    fetcher->awaits_urgent = fetcher->outstanding > 0;
}

static bool begin_frame(struct mqd_reactor *r, struct mqd_fetcher *fetcher)
{
    uint32_t size_bytes = mqd_get_be32(fetcher->in + fetcher->in_begin);
    if (!fetcher->outstanding || size_bytes < FRAME_BYTES_MIN || size_bytes > fetcher->options.response_bytes_limit) {
        char text[120];
        snprintf(text, sizeof text,
                 fetcher->outstanding ? "a response of %u bytes; %d to %u are allowed"
                                      : "a response of %u bytes (%d to %u are allowed) that was not requested",
                 size_bytes, FRAME_BYTES_MIN, fetcher->options.response_bytes_limit);
        mqd_fetcher_end(r, fetcher, EPROTO, text);
        return false;
    }
    fetcher->in_begin += 4;
    fetcher->in_frame = 1;
    mqd_response_parser_begin(&fetcher->parser, size_bytes);
    if (fetcher->options.lane == MQD_LANE_THROTTLED && r->fetchers->bytes_per_second_max > 0)
        r->fetchers->allowance_bytes -= size_bytes;
    return true;
}

bool mqd_fetcher_process_received(struct mqd_reactor *r, struct mqd_fetcher *fetcher)
{
    for (;;) {
        uint32_t taken, available = fetcher->in_end - fetcher->in_begin;
        if (!fetcher->in_frame) {
            if (available < 4)
                return true;
            if (!begin_frame(r, fetcher))
                return false;
            continue;
        }
        enum mqd_parsed_step step =
            mqd_response_parser_next(&fetcher->parser, fetcher->in + fetcher->in_begin, available, &taken);
        fetcher->in_begin += taken;
        available -= taken;
        switch (step) {
        case MQD_PARSED_MORE:
            return true;
        case MQD_PARSED_HEAD:
            if (!on_head(r, fetcher))
                return false;
            break;
        case MQD_PARSED_PARTITION:
            on_partition(r, fetcher);
            break;
        case MQD_PARSED_RECORDS:
            available = available < fetcher->parser.records_left ? available : fetcher->parser.records_left;
            taken = on_records(r, fetcher, fetcher->in + fetcher->in_begin, available);
            fetcher->in_begin += taken;
            mqd_response_parser_records_taken(&fetcher->parser, taken);
            if (taken < available)
                return true; /* waits for the rest of a batch */
            break;
        case MQD_PARSED_PARTITION_END:
            if (!on_partition_end(r, fetcher))
                return false;
            break;
        case MQD_PARSED_END:
            on_end(r, fetcher);
            break;
        case MQD_PARSED_INVALID:
            mqd_fetcher_end(r, fetcher, EPROTO, mqd_error_message());
            return false;
        }
    }
}
