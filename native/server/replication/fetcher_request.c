/* Requests to leaders: sessions, building the request from the changes, the rate limit of the
 * throttled lanes, sending. See server/replication/fetcher.h. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "server/replication/fetcher_state.h"

#define BURST_MS 100 /* the throttled lanes may receive this many milliseconds' worth of bytes in one burst */

/* Sets *out to the state that the fetch session should have for this partition. Returns false if
 * the partition must not be fetched now. */
static bool next_fetch(struct mqd_reactor *r, const struct mqd_followed *followed, struct mqd_replica_fetch *out)
{
    const struct mqd_owned *owned = followed->owned;
    uint32_t count;
    if (owned->truncating || owned->closing || followed->put_off_until_ms > r->now_ms)
        return false;
    const struct mqd_epoch *epochs = mqd_partition_epochs(owned->partition, &count);
    return mqd_replica_next_fetch(owned->replica, epochs, count, out) == 1;
}

static bool same_fetch(const struct mqd_replica_fetch *left, const struct mqd_replica_fetch *right)
{
    return left->fetch_offset == right->fetch_offset && left->current_leader_epoch == right->current_leader_epoch &&
           left->last_fetched_epoch == right->last_fetched_epoch;
}

/* Makes room for one item after the first used_count. */
static bool reserve_one_more(struct mqd_fetchers *fetchers, uint32_t used_count)
{
    if (used_count < fetchers->item_capacity)
        return true;
    uint32_t capacity = fetchers->item_capacity ? fetchers->item_capacity * 2 : 64;
    struct mqd_fetch_item *grown = realloc(fetchers->items, capacity * sizeof *grown);
    if (!grown)
        return false;
    fetchers->items = grown;
    fetchers->item_capacity = capacity;
    return true;
}

/* Handles one changed partition: adds it to the request, removes it from the session, or puts it
 * off. Returns the new number of items in the request. */
static uint32_t handle_change(struct mqd_reactor *r, struct mqd_fetcher *fetcher, struct mqd_followed *followed,
                              uint32_t count)
{
    struct mqd_replica_fetch fetch;
    if (r->log_dirs[followed->owned->log_dir].full && followed->put_off_until_ms <= r->now_ms)
        /* if the partition were fetched, the leader would consider this replica caught up */
        followed->put_off_until_ms = r->now_ms + MQD_FETCHER_DISK_PAUSE_MS;
    if (!next_fetch(r, followed, &fetch)) {
        mqd_followed_leave_session(followed);
        if (followed->put_off_until_ms > r->now_ms)
            mqd_followed_put_off(r, followed, followed->put_off_until_ms - r->now_ms);
        return count; /* the partition is queued again when it can be fetched */
    }
    if (followed->in_session && same_fetch(&fetch, &followed->sent))
        return count;
    fetcher->session_count += !followed->in_session;
    followed->in_session = 1;
    followed->sent = fetch;
    struct mqd_positions positions;
    mqd_partition_positions(followed->owned->partition, &positions);
    r->fetchers->items[count] = (struct mqd_fetch_item){.key = followed->key,
                                                        .current_leader_epoch = fetch.current_leader_epoch,
                                                        .last_fetched_epoch = fetch.last_fetched_epoch,
                                                        .bytes_max = (int32_t)fetcher->options.partition_bytes_max,
                                                        .fetch_offset = fetch.fetch_offset,
                                                        .log_start_offset = positions.log_start_offset};
    return count + 1;
}

/* Begins a new, empty session. */
static void begin_session(struct mqd_fetcher *fetcher)
{
    fetcher->session_count = fetcher->forgotten_count = 0;
    fetcher->session_epoch = 0;
    MQD_LIST_EACH(node, next, &fetcher->members) {
        struct mqd_followed *followed = MQD_CONTAINER(node, struct mqd_followed, member_node);
        followed->in_session = 0;
        if (!followed->is_put_off)
            mqd_followed_queue_change(followed);
    }
}

/* Removes partitions from `forgotten` that have returned before the leader was informed: they stay
 * in the session. */
static void unforget_returned(struct mqd_fetchers *fetchers, struct mqd_fetcher *fetcher)
{
    uint32_t kept_count = 0;
    for (uint32_t i = 0; i < fetcher->forgotten_count; i++) {
        const struct mqd_followed *followed = mqd_followed_find(fetchers, &fetcher->forgotten[i]);
        if (!followed || followed->fetcher != fetcher || !followed->in_session)
            fetcher->forgotten[kept_count++] = fetcher->forgotten[i];
    }
    fetcher->forgotten_count = kept_count;
}

static bool is_throttled(const struct mqd_fetchers *fetchers, const struct mqd_fetcher *fetcher)
{
    return fetcher->options.lane == MQD_LANE_THROTTLED && fetchers->bytes_per_second_max > 0;
}

static int32_t bytes_max_of(const struct mqd_fetchers *fetchers, const struct mqd_fetcher *fetcher)
{
    int64_t bytes = fetcher->options.response_bytes_max;
    if (is_throttled(fetchers, fetcher) && fetchers->allowance_bytes < bytes)
        bytes = fetchers->allowance_bytes < 4096 ? 4096 : fetchers->allowance_bytes;
    return (int32_t)bytes;
}

static void send_some(struct mqd_reactor *r, struct mqd_fetcher *fetcher)
{
    while (fetcher->out_sent < fetcher->out.size_bytes) {
        ssize_t sent = mqd_outgoing_send(r, &fetcher->socket, fetcher->out.bytes + fetcher->out_sent,
                                         fetcher->out.size_bytes - fetcher->out_sent);
        if (sent < 0 && errno == EAGAIN)
            return;
        if (sent < 0) {
            mqd_fetcher_end_with_error(r, fetcher);
            return;
        }
        fetcher->out_sent += (uint32_t)sent;
    }
    fetcher->out.size_bytes = fetcher->out_sent = 0;
    if (fetcher->out.capacity_bytes > (1u << 20))
        mqd_buffer_free(&fetcher->out);
}

/* Sends the request in fetcher->out; one more response is due. */
static void send_request(struct mqd_reactor *r, struct mqd_fetcher *fetcher)
{
    if (fetcher->out.failed) {
        mqd_fetcher_end(r, fetcher, ENOMEM, "out of memory for a request");
        return;
    }
    fetcher->outstanding++;
    fetcher->deadline_ms = r->now_ms + fetcher->options.wait_ms + fetcher->options.timeout_ms;
    send_some(r, fetcher);
}

static struct mqd_fetch_request_head next_request_head(struct mqd_reactor *r, struct mqd_fetcher *fetcher)
{
    return (struct mqd_fetch_request_head){.correlation_id = (int32_t)++fetcher->correlation_id,
                                           .wait_ms = (int32_t)fetcher->options.wait_ms,
                                           .bytes_max = bytes_max_of(r->fetchers, fetcher),
                                           .node_id = fetcher->options.node_id,
                                           .broker_epoch = mqd_load_relaxed(&r->header->broker_epoch)};
}

/* The leader delays its response until it has something to send. A second request, which is empty
 * and has no session, makes it respond to the first one now. */
static void hurry_leader(struct mqd_reactor *r, struct mqd_fetcher *fetcher)
{
    struct mqd_fetch_request_head head = next_request_head(r, fetcher);
    head.wait_ms = 0;
    head.session_epoch = -1;
    mqd_fetch_request_encode(&fetcher->out, &head, NULL, 0, NULL, 0);
    send_request(r, fetcher);
}

static void send_fetch(struct mqd_reactor *r, struct mqd_fetcher *fetcher)
{
    struct mqd_fetchers *fetchers = r->fetchers;
    struct mqd_node *node;
    uint32_t count = 0;
    bool starts_session = fetcher->starts_session;
    fetcher->urgent = 0;
    if (starts_session)
        begin_session(fetcher);
    fetcher->starts_session = 0; /* handle_change() may set it for the request after this one */
    while (reserve_one_more(fetchers, count) && (node = mqd_list_pop(&fetcher->changes)))
        count = handle_change(r, fetcher, MQD_CONTAINER(node, struct mqd_followed, change_node), count);
    unforget_returned(fetchers, fetcher);
    if (starts_session ? count == 0 : fetcher->session_count == 0 && fetcher->forgotten_count == 0) {
        fetcher->starts_session |= starts_session;
        return; /* nothing to fetch */
    }
    struct mqd_fetch_request_head head = next_request_head(r, fetcher);
    head.session_id = fetcher->session_id;
    head.session_epoch = fetcher->session_epoch;
    mqd_fetch_request_encode(&fetcher->out, &head, fetchers->items, count, fetcher->forgotten,
                             fetcher->forgotten_count);
    fetcher->forgotten_count = 0;
    send_request(r, fetcher);
}

static void refill(struct mqd_reactor *r, struct mqd_fetchers *fetchers)
{
    int64_t elapsed_ms = r->now_ms - fetchers->refilled_ms;
    if (fetchers->bytes_per_second_max <= 0 || elapsed_ms <= 0)
        return;
    int64_t thousandths = fetchers->bytes_per_second_max % 1000 * elapsed_ms + fetchers->allowance_thousandths;
    int64_t bytes_max = fetchers->bytes_per_second_max / (1000 / BURST_MS) + 1,
            added_bytes = elapsed_ms < 10000 ? fetchers->bytes_per_second_max / 1000 * elapsed_ms + thousandths / 1000
                                             : bytes_max;
    fetchers->refilled_ms = r->now_ms;
    fetchers->allowance_thousandths = thousandths % 1000;
    fetchers->allowance_bytes =
        fetchers->allowance_bytes + added_bytes > bytes_max ? bytes_max : fetchers->allowance_bytes + added_bytes;
}

/* Whether a request may be sent now. If only the rate limit prevents it, sets not_before_ms. */
static bool may_fetch(struct mqd_reactor *r, struct mqd_fetchers *fetchers, struct mqd_fetcher *fetcher)
{
    if (fetcher->outstanding || fetcher->storing_count || fetcher->not_before_ms > r->now_ms)
        return false;
    if (!is_throttled(fetchers, fetcher) || fetchers->allowance_bytes > 0)
        return true;
    fetcher->not_before_ms = r->now_ms + 1 + (1 - fetchers->allowance_bytes) * 1000 / fetchers->bytes_per_second_max;
    return false;
}

/* Runs the TLS connection for this turn. Returns false if its handshake has not finished, or the
 * fetcher has ended. */
static bool run_tls(struct mqd_reactor *r, struct mqd_fetcher *fetcher)
{
    if (mqd_outgoing_run(r, &fetcher->socket) == 0)
        return mqd_outgoing_established(&fetcher->socket);
    mqd_fetcher_end_with_error(r, fetcher);
    return false;
}

void mqd_fetchers_run(struct mqd_reactor *r)
{
    struct mqd_fetchers *fetchers = r->fetchers;
    refill(r, fetchers);
    /* when a fetcher ends, the last fetcher, which has been processed already, takes its index */
    for (uint32_t i = fetchers->count; i-- > 0;) {
        struct mqd_fetcher *fetcher = fetchers->fetcher[i];
        if (fetcher->socket.tls && !run_tls(r, fetcher))
            continue;
        MQD_LIST_EACH(node, next, &fetcher->put_off) {
            struct mqd_followed *followed = MQD_CONTAINER(node, struct mqd_followed, change_node);
            if (followed->put_off_until_ms > r->now_ms)
                break;
            mqd_followed_queue_change(followed);
            fetcher->urgent = 1;
        }
        if (fetcher->outstanding && r->now_ms > fetcher->deadline_ms)
            mqd_fetcher_end(r, fetcher, ETIMEDOUT, "the leader did not respond in time");
        else if (fetcher->out.size_bytes && fetcher->socket.writable)
            send_some(r, fetcher);
        else if (!r->stop && may_fetch(r, fetchers, fetcher))
            send_fetch(r, fetcher);
        else if (fetcher->urgent && fetcher->outstanding == 1 && !fetcher->awaits_urgent && !fetcher->in_frame &&
                 !fetcher->out.size_bytes)
            hurry_leader(r, fetcher);
    }
}

int64_t mqd_fetchers_next_ms(const struct mqd_reactor *r)
{
    int64_t next_ms = INT64_MAX;
    for (uint32_t i = 0; i < r->fetchers->count; i++) {
        const struct mqd_fetcher *fetcher = r->fetchers->fetcher[i];
        if (!mqd_outgoing_ready(&fetcher->socket)) {
            if (fetcher->socket.established_by_ms + 1 < next_ms)
                next_ms = fetcher->socket.established_by_ms + 1;
            continue;
        }
        if (fetcher->socket.readable && !r->stop) /* nothing is read while the reactor stops */
            return 0;
        if (fetcher->outstanding && fetcher->deadline_ms + 1 < next_ms)
            next_ms = fetcher->deadline_ms + 1;
        if (!fetcher->outstanding && fetcher->not_before_ms > r->now_ms && fetcher->not_before_ms < next_ms)
            next_ms = fetcher->not_before_ms;
        if (!mqd_list_empty(&fetcher->put_off)) {
            int64_t put_off_until_ms =
                MQD_CONTAINER(fetcher->put_off.next, struct mqd_followed, change_node)->put_off_until_ms;
            next_ms = put_off_until_ms < next_ms ? put_off_until_ms : next_ms;
        }
    }
    return next_ms == INT64_MAX ? -1 : next_ms;
}
