/* Connections to leaders: chooses the connection over which each partition is fetched, and
 * receives responses. See server/replication/fetcher.h. Requests:
 * server/replication/fetcher_request.c; handling of responses:
 * server/replication/fetcher_response.c. */
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/assert.h"
#include "server/replication/fetcher_state.h"

/* ---- partitions ---- */

static struct mqd_fetchers *fetchers_of(struct mqd_reactor *r)
{
    if (r->fetchers)
        return r->fetchers;
    r->fetchers = calloc(1, sizeof *r->fetchers);
    if (r->fetchers) {
        mqd_list_init(&r->fetchers->unserved);
        r->fetchers->refilled_ms = r->now_ms;
    }
    return r->fetchers;
}

static struct mqd_followed **bucket_of(struct mqd_fetchers *fetchers, const struct mqd_fetch_key *key)
{
    uint64_t hash; /* topic ids are random */
    memcpy(&hash, key->topic_id + 8, sizeof hash);
    return &fetchers->buckets[(hash ^ (uint64_t)(uint32_t)key->index * 0x9e3779b97f4a7c15ull >> 32) %
                              MQD_FOLLOWED_BUCKET_COUNT];
}

struct mqd_followed *mqd_followed_find(struct mqd_fetchers *fetchers, const struct mqd_fetch_key *key)
{
    struct mqd_followed *followed = *bucket_of(fetchers, key);
    while (followed && (followed->key.index != key->index || memcmp(followed->key.topic_id, key->topic_id, 16) != 0))
        followed = followed->hash_next;
    return followed;
}

static struct mqd_fetcher *fetcher_find(struct mqd_fetchers *fetchers, int32_t leader_node, uint32_t leader_worker,
                                        uint32_t lane)
{
    for (uint32_t i = 0; i < fetchers->count; i++) {
        struct mqd_fetcher *fetcher = fetchers->fetcher[i];
        if (fetcher->options.leader_node == leader_node && fetcher->options.leader_worker == leader_worker &&
            fetcher->options.lane == lane)
            return fetcher;
    }
    return NULL;
}

static uint32_t lane_of(const struct mqd_owned *owned)
{
    const struct mqd_replica *replica = owned->replica;
    for (uint32_t i = 0; i < replica->replica_count; i++)
        if (replica->replicas[i].member.node_id == replica->node_id && replica->replicas[i].member.in_sync)
            return MQD_LANE_IN_SYNC;
    return owned->throttled ? MQD_LANE_THROTTLED : MQD_LANE_CATCH_UP;
}

static struct mqd_fetcher *fetcher_for(struct mqd_fetchers *fetchers, const struct mqd_owned *owned)
{
    const struct mqd_replica *replica = owned->replica;
    struct mqd_fetcher *fetcher = fetcher_find(fetchers, replica->leader, owned->leader_worker, lane_of(owned));
    return fetcher ? fetcher : fetcher_find(fetchers, replica->leader, owned->leader_worker, MQD_LANE_IN_SYNC);
}

void mqd_followed_queue_change(struct mqd_followed *followed)
{
    if (!followed->fetcher || (mqd_list_linked(&followed->change_node) && !followed->is_put_off))
        return;
    mqd_list_remove(&followed->change_node);
    followed->is_put_off = 0;
    mqd_list_append(&followed->fetcher->changes, &followed->change_node);
}

/* Searches for the insertion point from the end of the list, because most of a fetcher's partitions
 * are put off for about the same delay. */
void mqd_followed_put_off(struct mqd_reactor *r, struct mqd_followed *followed, int64_t delay_ms)
{
    followed->put_off_until_ms = r->now_ms + delay_ms;
    if (!followed->fetcher)
        return;
    if (followed->in_session) { /* the next request removes the partition from the session; then it waits */
        mqd_followed_queue_change(followed);
        return;
    }
    mqd_list_remove(&followed->change_node);
    followed->is_put_off = 1;
    struct mqd_node *previous = followed->fetcher->put_off.previous;
    while (previous != &followed->fetcher->put_off &&
           MQD_CONTAINER(previous, struct mqd_followed, change_node)->put_off_until_ms > followed->put_off_until_ms)
        previous = previous->previous;
    mqd_list_append(previous->next, &followed->change_node); /* inserts before previous->next */
}

static void set_storing(struct mqd_followed *followed, bool storing)
{
    if (followed->fetcher && followed->storing != storing)
        followed->fetcher->storing_count += storing ? 1u : -1u;
    followed->storing = storing;
}

void mqd_followed_update_storing(struct mqd_followed *followed)
{
    const struct mqd_replica *replica = followed->owned->replica;
    bool staged = !followed->owned->truncating && mqd_partition_staged_count(followed->owned->partition) > 0;
    set_storing(followed, staged || (!followed->owned->truncating && replica->flush_on_ack &&
                                     replica->durable < replica->log_end));
}

static void append_forgotten(struct mqd_fetcher *fetcher, const struct mqd_fetch_key *key)
{
    if (fetcher->forgotten_count == fetcher->forgotten_capacity) {
        uint32_t capacity = fetcher->forgotten_capacity ? fetcher->forgotten_capacity * 2 : 16;
        struct mqd_fetch_key *grown = realloc(fetcher->forgotten, capacity * sizeof *grown);
        if (!grown) {
            fetcher->starts_session = 1; /* a new session does not include the partition either */
            return;
        }
        fetcher->forgotten = grown;
        fetcher->forgotten_capacity = capacity;
    }
    fetcher->forgotten[fetcher->forgotten_count++] = *key;
}

void mqd_followed_leave_session(struct mqd_followed *followed)
{
    if (!followed->in_session)
        return;
    followed->in_session = 0;
    followed->fetcher->session_count--;
    append_forgotten(followed->fetcher, &followed->key);
}

/* Moves the partition from its fetcher (or none) to `fetcher` (or none). */
static void move_to(struct mqd_fetchers *fetchers, struct mqd_followed *followed, struct mqd_fetcher *fetcher)
{
    if (followed->fetcher == fetcher && mqd_list_linked(&followed->member_node))
        return;
    if (followed->fetcher) {
        mqd_followed_leave_session(followed);
        set_storing(followed, false);
        if (followed->fetcher->receiving == followed)
            followed->fetcher->receiving = NULL;
    }
    mqd_list_remove(&followed->member_node);
    mqd_list_remove(&followed->change_node);
    followed->is_put_off = 0;
    followed->storing = 0;
    /* another leader's log may begin lower: after an unclean election it may have older records.
     * The first response of a new session has that leader's log start */
    followed->reported_log_start = followed->pending_log_start = 0;
    followed->fetcher = fetcher;
    mqd_list_append(fetcher ? &fetcher->members : &fetchers->unserved, &followed->member_node);
    if (fetcher)
        mqd_followed_update_storing(followed);
    mqd_followed_queue_change(followed);
}

static struct mqd_followed *followed_new(struct mqd_reactor *r, struct mqd_fetchers *fetchers, struct mqd_owned *owned)
{
    struct mqd_followed *followed = calloc(1, sizeof *followed);
    if (!followed)
        return NULL;
    const struct mqd_partition_slot *slot = mqd_control_partition(r->options.control, owned->slot);
    memcpy(followed->key.topic_id, slot->topic_id, sizeof followed->key.topic_id);
    followed->key.index = slot->partition_index;
    followed->owned = owned;
    followed->warned_ms = INT64_MIN / 2;
    mqd_list_init(&followed->member_node);
    mqd_list_init(&followed->change_node);
    struct mqd_followed **bucket = bucket_of(fetchers, &followed->key);
    followed->hash_next = *bucket;
    *bucket = followed;
    owned->followed = followed;
    return followed;
}

/* Puts the change into a request that is sent soon, even if the leader has nothing to send for
 * other partitions. */
static void request_urgently(struct mqd_followed *followed)
{
    mqd_followed_queue_change(followed);
    if (followed->fetcher)
        followed->fetcher->urgent = 1;
}

void mqd_fetcher_on_assignment(struct mqd_reactor *r, struct mqd_owned *owned)
{
    struct mqd_fetchers *fetchers = fetchers_of(r);
    if (owned->replica->leader < 0 || owned->closing || r->log_dirs[owned->log_dir].failed) {
        mqd_fetcher_unfollow(r, owned);
        return;
    }
    struct mqd_followed *followed = owned->followed ? owned->followed
                                    : fetchers      ? followed_new(r, fetchers, owned)
                                                    : NULL;
    if (!followed) {
        mqd_log(r, 3, 0, owned->slot,
                "out of memory for following a partition; will retry when its leader next changes");
        return;
    }
    followed->put_off_until_ms = 0;
    followed->refusal_count = 0;
    move_to(fetchers, followed, fetcher_for(fetchers, owned));
    request_urgently(followed);
}

void mqd_fetcher_unfollow(struct mqd_reactor *r, struct mqd_owned *owned)
{
    struct mqd_followed *followed = owned->followed;
    if (!followed)
        return;
    struct mqd_followed **link = bucket_of(r->fetchers, &followed->key);
    while (*link != followed)
        link = &(*link)->hash_next;
    *link = followed->hash_next;
    move_to(r->fetchers, followed, NULL);
    mqd_list_remove(&followed->member_node);
    owned->followed = NULL;
    free(followed);
}

/* A partition may have been left out of requests even if its `storing` is false: flush.on.ack may
 * have been enabled while the flush was running. */
void mqd_fetcher_on_flush(struct mqd_reactor *r, struct mqd_owned *owned)
{
    struct mqd_followed *followed = owned->followed;
    if (!followed)
        return;
    if (followed->storing) {
        mqd_followed_update_storing(followed);
        mqd_followed_queue_change(followed);
    } else if (!followed->in_session && followed->put_off_until_ms <= r->now_ms) {
        request_urgently(followed);
    }
}

void mqd_fetcher_on_truncation(struct mqd_reactor *r, struct mqd_owned *owned, bool log_changed)
{
    struct mqd_followed *followed = owned->followed;
    if (!followed)
        return;
    mqd_followed_update_storing(followed);
    if (log_changed || !followed->fetcher)
        request_urgently(followed);
    else
        mqd_followed_put_off(r, followed, followed->fetcher->options.backoff_ms);
}

/* ---- connections ---- */

static uint64_t poll_token(const struct mqd_fetcher *fetcher)
{
    return mqd_token(MQD_TOKEN_FETCHER, (uint64_t)fetcher->generation << 16 | fetcher->index);
}

static void fetcher_free(struct mqd_fetcher *fetcher)
{
    mqd_buffer_free(&fetcher->out);
    free(fetcher->forgotten);
    free(fetcher->in);
    free(fetcher);
}

void mqd_fetcher_end(struct mqd_reactor *r, struct mqd_fetcher *fetcher, int error, const char *text)
{
    struct mqd_fetchers *fetchers = r->fetchers;
    mqd_owner_write_all(r); /* staged batches are still in the fetcher's buffer */
    if (r->poll)
        mqd_poll_remove(r->poll, fetcher->socket.fd, poll_token(fetcher));
    mqd_outgoing_close(&fetcher->socket);
    fetchers->fetcher[fetcher->index] = fetchers->fetcher[--fetchers->count];
    if (fetcher->index < fetchers->count) { /* the last fetcher moves to this index, so its events need another token */
        struct mqd_fetcher *moved = fetchers->fetcher[fetcher->index];
        mqd_poll_remove(r->poll, moved->socket.fd, poll_token(moved));
        moved->index = fetcher->index;
        mqd_outgoing_set_token(&moved->socket, poll_token(moved));
        if (mqd_poll_add(r->poll, moved->socket.fd, poll_token(moved)) < 0)
            shutdown(moved->socket.fd, SHUT_RDWR); /* the fetcher ends at its next use */
    }
    fetcher->starts_session = 1; /* a new session is cheaper than removing the partitions one by one */
    while (!mqd_list_empty(&fetcher->members)) {
        struct mqd_followed *followed = MQD_CONTAINER(fetcher->members.next, struct mqd_followed, member_node);
        followed->in_session = 0;
        move_to(fetchers, followed, fetcher_for(fetchers, followed->owned));
    }
    if (error >= 0) {
        struct mqd_event event = {
            .kind = MQD_EVENT_FETCHER_ENDED, .slot = UINT32_MAX, .token = fetcher->token, .error = error};
        snprintf(event.text, sizeof event.text, "%s", text);
        mqd_reactor_emit(r, &event);
    }
    fetcher_free(fetcher);
}

void mqd_fetcher_end_with_error(struct mqd_reactor *r, struct mqd_fetcher *fetcher)
{
    char reason[MQD_ERROR_MESSAGE_BYTES];
    snprintf(reason, sizeof reason, "%s", mqd_error_message());
    mqd_fetcher_end(r, fetcher, mqd_error_code(), reason);
}

static const char *check_options(const struct mqd_fetcher_options *options)
{
    if (options->leader_node < 0 || options->leader_node == options->node_id || options->lane >= MQD_LANE_COUNT)
        return "a fetcher's leader or lane is invalid";
    if (options->response_bytes_max < 1024 || options->response_bytes_limit < options->response_bytes_max ||
        options->response_bytes_limit > (1u << 30) || options->partition_bytes_max < 1024 ||
        options->partition_bytes_max > (1u << 30))
        return "a fetcher's sizes are invalid: response_bytes_limit must be at least response_bytes_max, and each size "
               "from 1 KiB to 1 GiB";
    return NULL;
}

static struct mqd_fetcher *fetcher_new(struct mqd_reactor *r, struct mqd_fetchers *fetchers,
                                       const struct mqd_command *command)
{
    struct mqd_fetcher *fetcher = calloc(1, sizeof *fetcher);
    if (!fetcher || !(fetcher->in = malloc(MQD_FETCHER_BUFFER_BYTES))) {
        free(fetcher);
        return NULL;
    }
    fetcher->options = *command->fetcher;
    fetcher->token = command->token;
    fetcher->socket.fd = (int)command->number;
    fetcher->in_capacity = MQD_FETCHER_BUFFER_BYTES;
    fetcher->index = fetchers->count;
    fetcher->generation = ++fetchers->generation;
    fetcher->socket.readable = fetcher->socket.writable = fetcher->starts_session = 1;
    mqd_list_init(&fetcher->members);
    mqd_list_init(&fetcher->changes);
    mqd_list_init(&fetcher->put_off);
    return fetcher;
}

/* Takes over partitions of this leader that have no connection, or use another lane because their
 * own had no connection. */
static void gather_members(struct mqd_fetchers *fetchers, struct mqd_fetcher *fetcher)
{
    struct mqd_fetcher *other =
        fetcher->options.lane != MQD_LANE_IN_SYNC
            ? fetcher_find(fetchers, fetcher->options.leader_node, fetcher->options.leader_worker, MQD_LANE_IN_SYNC)
            : NULL;
    MQD_LIST_EACH(node, next, &fetchers->unserved) {
        struct mqd_followed *followed = MQD_CONTAINER(node, struct mqd_followed, member_node);
        move_to(fetchers, followed, fetcher_for(fetchers, followed->owned));
    }
    if (other)
        MQD_LIST_EACH(node, next, &other->members) {
            struct mqd_followed *followed = MQD_CONTAINER(node, struct mqd_followed, member_node);
            move_to(fetchers, followed, fetcher_for(fetchers, followed->owned));
        }
}

/* Sets the rate limit of the throttled lanes. Also clears the debt, so that no connection waits for
 * it: it was incurred at the old rate, which may have been set by mistake. */
static void set_rate(struct mqd_fetchers *fetchers, int64_t bytes_per_second_max)
{
    if (fetchers->bytes_per_second_max == bytes_per_second_max)
        return;
    fetchers->bytes_per_second_max = bytes_per_second_max;
    if (fetchers->allowance_bytes < 0)
        fetchers->allowance_bytes = 0;
    for (uint32_t i = 0; i < fetchers->count; i++)
        if (fetchers->fetcher[i]->options.lane == MQD_LANE_THROTTLED)
            fetchers->fetcher[i]->not_before_ms = 0;
}

static void fetcher_put(struct mqd_reactor *r, struct mqd_fetchers *fetchers, const struct mqd_command *command)
{
    const struct mqd_fetcher_options *options = command->fetcher;
    const char *problem = check_options(options);
    int fd = (int)command->number, flags = fcntl(fd, F_GETFL), one = 1;
    struct mqd_fetcher *old = problem
                                  ? NULL
                                  : fetcher_find(fetchers, options->leader_node, options->leader_worker, options->lane),
                       *fetcher = NULL;
    if (old)
        mqd_fetcher_end(r, old, -1, "");
    if (!problem && fetchers->count == MQD_FETCHER_COUNT_MAX)
        problem = "too many connections to other hosts for one worker";
    if (!problem && (!r->poll || flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ||
                     !(fetcher = fetcher_new(r, fetchers, command))))
        problem = r->poll ? "the socket cannot be used, or out of memory for a connection to another host"
                          : "the reactor is not running";
    if (!problem && mqd_poll_add(r->poll, fd, poll_token(fetcher)) < 0)
        problem = "the connection cannot be watched";
    if (!problem && options->tls &&
        mqd_outgoing_begin_tls(r, &fetcher->socket, options->leader_node, poll_token(fetcher)) < 0) {
        mqd_poll_remove(r->poll, fd, poll_token(fetcher));
        problem = mqd_error_message();
    }
    if (problem) {
        if (fetcher)
            fetcher_free(fetcher);
        close(fd);
        mqd_command_done(r, command->token, MQD_E_INVALID, UINT32_MAX, 0, NULL, problem);
        return;
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fetchers->fetcher[fetchers->count++] = fetcher;
    if (options->lane == MQD_LANE_THROTTLED)
        set_rate(fetchers, options->bytes_per_second_max);
    gather_members(fetchers, fetcher);
    mqd_command_done(r, command->token, 0, UINT32_MAX, 0, NULL, "");
}

void mqd_fetcher_command(struct mqd_reactor *r, const struct mqd_command *command)
{
    struct mqd_fetchers *fetchers = fetchers_of(r);
    struct mqd_fetcher *fetcher;
    if (!fetchers) {
        if (command->kind == MQD_COMMAND_FETCHER_PUT)
            close((int)command->number);
        mqd_command_done(r, command->token, ENOMEM, UINT32_MAX, 0, NULL, "out of memory for fetchers");
        return;
    }
    if (command->kind == MQD_COMMAND_FETCHER_PUT) {
        fetcher_put(r, fetchers, command);
        return;
    }
    if (command->kind == MQD_COMMAND_FETCHER_RATE)
        set_rate(fetchers, command->offset);
    else if ((fetcher =
                  fetcher_find(fetchers, (int32_t)command->offset, (uint32_t)command->last_offset, command->number)))
        mqd_fetcher_end(r, fetcher, -1, "");
    mqd_command_done(r, command->token, 0, UINT32_MAX, 0, NULL, "");
}

void mqd_fetchers_close(struct mqd_reactor *r)
{
    while (r->fetchers && r->fetchers->count)
        mqd_fetcher_end(r, r->fetchers->fetcher[0], -1, "");
}

void mqd_fetchers_destroy(struct mqd_reactor *r)
{
    if (!r->fetchers)
        return;
    free(r->fetchers->items);
    free(r->fetchers);
    r->fetchers = NULL;
}

/* ---- receiving ---- */

static struct mqd_fetcher *fetcher_by_token(const struct mqd_reactor *r, uint64_t value)
{
    uint32_t index = value & 0xffff;
    struct mqd_fetcher *fetcher = r->fetchers && index < r->fetchers->count ? r->fetchers->fetcher[index] : NULL;
    return fetcher && fetcher->generation == (uint32_t)(value >> 16) ? fetcher : NULL;
}

void mqd_fetcher_on_event(struct mqd_reactor *r, uint64_t value, uint32_t flags)
{
    struct mqd_fetcher *fetcher = fetcher_by_token(r, value);
    if (fetcher)
        mqd_outgoing_on_event(&fetcher->socket, flags);
}

void mqd_fetcher_on_step(struct mqd_reactor *r, uint64_t value)
{
    struct mqd_fetcher *fetcher = fetcher_by_token(r, value);
    MQD_ASSERT(fetcher, "T2: the TLS session of a fetcher that has ended was not released");
    if (mqd_outgoing_on_step(r, &fetcher->socket) < 0)
        mqd_fetcher_end_with_error(r, fetcher);
}

/* Makes room at the end of the buffer: bytes not parsed yet move to its beginning; if they are part
 * of a batch larger than the buffer, the buffer grows. No batch may be staged now, because staged
 * batches are still in the buffer. */
static bool make_room(struct mqd_fetcher *fetcher)
{
    uint32_t unparsed_bytes = fetcher->in_end - fetcher->in_begin;
    if (fetcher->in_begin &&
        (unparsed_bytes == 0 || fetcher->in_capacity - fetcher->in_end < MQD_FETCHER_RECEIVE_BYTES)) {
        memmove(fetcher->in, fetcher->in + fetcher->in_begin, unparsed_bytes);
        fetcher->in_begin = 0;
        fetcher->in_end = unparsed_bytes;
    }
    /* a very large batch is complete: shrink the buffer */
    if (unparsed_bytes == 0 && fetcher->in_capacity > MQD_FETCHER_BUFFER_BYTES * 16) {
        uint8_t *smaller = realloc(fetcher->in, MQD_FETCHER_BUFFER_BYTES);
        fetcher->in = smaller ? smaller : fetcher->in;
        fetcher->in_capacity = smaller ? MQD_FETCHER_BUFFER_BYTES : fetcher->in_capacity;
    }
    if (fetcher->in_capacity - fetcher->in_end >= MQD_FETCHER_RECEIVE_BYTES / 2)
        return true;
    /* at most 2 GiB: no frame is longer than 1 GiB, and all earlier frames are consumed */
    uint32_t capacity = fetcher->in_capacity * 2;
    uint8_t *grown = realloc(fetcher->in, capacity);
    if (!grown)
        return false;
    fetcher->in = grown;
    fetcher->in_capacity = capacity;
    return true;
}

/* Returns false if the fetcher has ended, or if no more is read from it in this turn. */
static bool receive(struct mqd_reactor *r, struct mqd_fetcher *fetcher, uint32_t *budget)
{
    if (!make_room(fetcher)) {
        mqd_fetcher_end(r, fetcher, ENOMEM, "out of memory for a batch");
        return false;
    }
    uint32_t room = fetcher->in_capacity - fetcher->in_end,
             size_max = room < MQD_FETCHER_RECEIVE_BYTES ? room : MQD_FETCHER_RECEIVE_BYTES;
    ssize_t got = mqd_outgoing_receive(&fetcher->socket, fetcher->in + fetcher->in_end, size_max);
    if (got < 0 && errno == EAGAIN)
        return false;
    if (got < 0) {
        mqd_fetcher_end_with_error(r, fetcher);
        return false;
    }
    if (got == 0) {
        mqd_fetcher_end(r, fetcher, ECONNRESET, "the leader closed the connection");
        return false;
    }
    fetcher->in_end += (uint32_t)got;
    fetcher->deadline_ms = r->now_ms + fetcher->options.timeout_ms;
    *budget -= (uint32_t)got < *budget ? (uint32_t)got : *budget;
    if (!mqd_fetcher_process_received(r, fetcher))
        return false;
    /* writes now, while the bytes are in the cache, and because the next call may move the buffer */
    mqd_owner_write_all(r);
    return *budget > 0;
}

void mqd_fetchers_read(struct mqd_reactor *r)
{
    for (uint32_t i = r->fetchers->count; i-- > 0;) {
        struct mqd_fetcher *fetcher = r->fetchers->fetcher[i];
        uint32_t budget = MQD_FETCHER_TURN_BYTES;
        while (fetcher->socket.readable && mqd_outgoing_ready(&fetcher->socket) && receive(r, fetcher, &budget))
            ;
    }
}
