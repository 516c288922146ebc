/* Connections to leaders: which partition is fetched over which, requests, sending and receiving. See mqd_fetcher.h. What answers do: mqd_fetcher_answer.c. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "mqd_fetcher_state.h"

#define BURST_MS 100 /* the catch-up lanes may use at once what they were granted in so long */

/* ---- partitions --------------------------------------------------------------------------------------------------- */

static struct mqd_fetchers *fetchers_of(struct mqd_reactor *r)
{
    if (r->fetchers)
        return r->fetchers;
    r->fetchers = calloc(1, sizeof *r->fetchers);
    if (r->fetchers) {
        mqd_list_init(&r->fetchers->unserved);
        r->fetchers->allowance_ms = r->now_ms;
    }
    return r->fetchers;
}

static struct mqd_followed **bucket_of(struct mqd_fetchers *fetchers, const struct mqd_fetch_key *key)
{
    uint64_t hash; /* topic ids are random */
    memcpy(&hash, key->topic_id + 8, sizeof hash);
    return &fetchers->buckets[(hash ^ (uint64_t)(uint32_t)key->index * 0x9e3779b97f4a7c15ull >> 32) % MQD_FOLLOWED_BUCKET_COUNT];
}

struct mqd_followed *mqd_followed_find(struct mqd_fetchers *fetchers, const struct mqd_fetch_key *key)
{
    struct mqd_followed *followed = *bucket_of(fetchers, key);
    while (followed && (followed->key.index != key->index || memcmp(followed->key.topic_id, key->topic_id, 16) != 0))
        followed = followed->hash_next;
    return followed;
}

static struct mqd_fetcher *fetcher_find(struct mqd_fetchers *fetchers, int32_t leader_node, uint32_t leader_worker, uint32_t lane)
{
    for (uint32_t i = 0; i < fetchers->count; i++) {
        struct mqd_fetcher *fetcher = fetchers->fetcher[i];
        if (fetcher->options.leader_node == leader_node && fetcher->options.leader_worker == leader_worker && fetcher->options.lane == lane)
            return fetcher;
    }
    return NULL;
}

static uint32_t lane_of(const struct mqd_replica *replica)
{
    for (uint32_t i = 0; i < replica->follower_count; i++)
        if (replica->followers[i].member.node_id == replica->node_id)
            return replica->followers[i].member.in_sync ? MQD_LANE_IN_SYNC : MQD_LANE_CATCH_UP;
    return MQD_LANE_CATCH_UP;
}

static struct mqd_fetcher *fetcher_for(struct mqd_fetchers *fetchers, const struct mqd_owned *owned)
{
    const struct mqd_replica *replica = owned->replica;
    struct mqd_fetcher *fetcher = fetcher_find(fetchers, replica->leader, owned->leader_worker, lane_of(replica));
    return fetcher ? fetcher : fetcher_find(fetchers, replica->leader, owned->leader_worker, MQD_LANE_IN_SYNC);
}

void mqd_followed_changed(struct mqd_followed *followed)
{
    if (!followed->fetcher || (mqd_list_linked(&followed->change) && !followed->putting_off))
        return;
    mqd_list_remove(&followed->change);
    followed->putting_off = 0;
    mqd_list_append(&followed->fetcher->changes, &followed->change);
}

/* All waits of one fetcher are alike, or nearly so: the list is searched from its end. */
void mqd_followed_put_off(struct mqd_reactor *r, struct mqd_followed *followed, int64_t ms)
{
    followed->put_off_ms = r->now_ms + ms;
    if (!followed->fetcher)
        return;
    if (followed->in_session) { /* the next request takes it out of the session; then it waits */
        mqd_followed_changed(followed);
        return;
    }
    mqd_list_remove(&followed->change);
    followed->putting_off = 1;
    struct mqd_node *after = followed->fetcher->put_off.previous;
    while (after != &followed->fetcher->put_off && MQD_CONTAINER(after, struct mqd_followed, change)->put_off_ms > followed->put_off_ms)
        after = after->previous;
    mqd_list_append(after->next, &followed->change); /* append "before next" */
}

static void unsettle(struct mqd_followed *followed, bool unsettled)
{
    if (followed->fetcher && followed->unsettled != unsettled)
        followed->fetcher->unsettled_count += unsettled ? 1 : UINT32_MAX;
    followed->unsettled = unsettled;
}

void mqd_followed_settle(struct mqd_followed *followed)
{
    const struct mqd_replica *replica = followed->owned->replica;
    bool staged = !followed->owned->resting && mqd_partition_staged_count(followed->owned->partition) > 0;
    unsettle(followed, staged || (!followed->owned->resting && replica->flush_on_ack && replica->durable < replica->log_end));
}

static void forget(struct mqd_fetcher *fetcher, const struct mqd_fetch_key *key)
{
    if (fetcher->forgotten_count == fetcher->forgotten_capacity) {
        uint32_t capacity = fetcher->forgotten_capacity ? fetcher->forgotten_capacity * 2 : 16;
        struct mqd_fetch_key *grown = realloc(fetcher->forgotten, capacity * sizeof *grown);
        if (!grown) {
            fetcher->full = 1; /* a new session forgets too */
            return;
        }
        fetcher->forgotten = grown;
        fetcher->forgotten_capacity = capacity;
    }
    fetcher->forgotten[fetcher->forgotten_count++] = *key;
}

static void leave_session(struct mqd_followed *followed)
{
    if (!followed->in_session)
        return;
    followed->in_session = 0;
    followed->fetcher->session_count--;
    forget(followed->fetcher, &followed->key);
}

/* From its fetcher (or from none) to `fetcher` (or to none). */
static void move_to(struct mqd_fetchers *fetchers, struct mqd_followed *followed, struct mqd_fetcher *fetcher)
{
    if (followed->fetcher == fetcher && mqd_list_linked(&followed->member))
        return;
    if (followed->fetcher) {
        leave_session(followed);
        unsettle(followed, false);
        if (followed->fetcher->filling == followed)
            followed->fetcher->filling = NULL;
    }
    mqd_list_remove(&followed->member);
    mqd_list_remove(&followed->change);
    followed->putting_off = 0;
    followed->unsettled = 0;
    followed->fetcher = fetcher;
    mqd_list_append(fetcher ? &fetcher->members : &fetchers->unserved, &followed->member);
    if (fetcher)
        mqd_followed_settle(followed);
    mqd_followed_changed(followed);
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
    followed->complained_ms = INT64_MIN / 2;
    mqd_list_init(&followed->member);
    mqd_list_init(&followed->change);
    struct mqd_followed **bucket = bucket_of(fetchers, &followed->key);
    followed->hash_next = *bucket;
    *bucket = followed;
    owned->followed = followed;
    return followed;
}

/* Not when the leader next has news of other partitions. */
static void want_soon(struct mqd_followed *followed)
{
    mqd_followed_changed(followed);
    if (followed->fetcher)
        followed->fetcher->urgent = 1;
}

void mqd_fetcher_assigned(struct mqd_reactor *r, struct mqd_owned *owned)
{
    struct mqd_fetchers *fetchers = fetchers_of(r);
    if (owned->replica->leader < 0 || owned->closing || r->log_dirs[owned->log_dir].failed) {
        mqd_fetcher_leave(r, owned);
        return;
    }
    struct mqd_followed *followed = owned->followed ? owned->followed : fetchers ? followed_new(r, fetchers, owned) : NULL;
    if (!followed) {
        mqd_log(r, 3, 0, owned->slot, "no memory to follow a partition; its next change of leader tries again");
        return;
    }
    followed->put_off_ms = 0;
    move_to(fetchers, followed, fetcher_for(fetchers, owned));
    want_soon(followed);
}

void mqd_fetcher_leave(struct mqd_reactor *r, struct mqd_owned *owned)
{
    struct mqd_followed *followed = owned->followed;
    if (!followed)
        return;
    struct mqd_followed **link = bucket_of(r->fetchers, &followed->key);
    while (*link != followed)
        link = &(*link)->hash_next;
    *link = followed->hash_next;
    move_to(r->fetchers, followed, NULL);
    mqd_list_remove(&followed->member);
    owned->followed = NULL;
    free(followed);
}

void mqd_fetcher_flushed(struct mqd_reactor *r, struct mqd_owned *owned)
{
    if (owned->followed && owned->followed->unsettled) {
        mqd_followed_settle(owned->followed);
        mqd_followed_changed(owned->followed);
    }
}

void mqd_fetcher_rested(struct mqd_reactor *r, struct mqd_owned *owned)
{
    if (owned->followed) {
        mqd_followed_settle(owned->followed);
        want_soon(owned->followed);
    }
}

/* ---- connections -------------------------------------------------------------------------------------------------- */

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
    mqd_owner_write_all(r); /* what is staged lies in its buffer */
    if (r->poll)
        mqd_poll_remove(r->poll, fetcher->fd, poll_token(fetcher));
    close(fetcher->fd);
    fetchers->fetcher[fetcher->index] = fetchers->fetcher[--fetchers->count];
    if (fetcher->index < fetchers->count) { /* the last one takes its place, and events about it the new name */
        struct mqd_fetcher *moved = fetchers->fetcher[fetcher->index];
        mqd_poll_remove(r->poll, moved->fd, poll_token(moved));
        moved->index = fetcher->index;
        moved->readable = moved->writable = 1;
        if (mqd_poll_add(r->poll, moved->fd, poll_token(moved)) < 0)
            shutdown(moved->fd, SHUT_RDWR); /* its next use ends it */
    }
    fetcher->full = 1; /* nothing is forgotten one by one */
    while (!mqd_list_empty(&fetcher->members)) {
        struct mqd_followed *followed = MQD_CONTAINER(fetcher->members.next, struct mqd_followed, member);
        followed->in_session = 0;
        move_to(fetchers, followed, fetcher_for(fetchers, followed->owned));
    }
    if (error >= 0) {
        struct mqd_event event = {.kind = MQD_EVENT_FETCHER_ENDED, .slot = UINT32_MAX, .token = fetcher->token, .error = error};
        snprintf(event.text, sizeof event.text, "%s", text);
        mqd_reactor_emit(r, &event);
    }
    fetcher_free(fetcher);
}

static const char *options_wrong(const struct mqd_fetcher_options *options)
{
    if (options->leader_node < 0 || options->leader_node == options->node_id || options->lane >= MQD_LANE_COUNT)
        return "a fetcher's leader or lane is impossible";
    if (options->response_bytes_max < 1024 || options->response_bytes_limit < options->response_bytes_max || options->response_bytes_limit > (1u << 30) ||
        options->partition_bytes_max < 1024 || options->partition_bytes_max > (1u << 30))
        return "a fetcher's sizes are impossible: response_bytes_limit must be response_bytes_max or more, none below 1 KiB or above 1 GiB";
    return NULL;
}

static struct mqd_fetcher *fetcher_new(struct mqd_reactor *r, struct mqd_fetchers *fetchers, const struct mqd_command *command)
{
    struct mqd_fetcher *fetcher = calloc(1, sizeof *fetcher);
    if (!fetcher || !(fetcher->in = malloc(MQD_FETCHER_BUFFER_BYTES))) {
        free(fetcher);
        return NULL;
    }
    fetcher->options = *command->fetcher;
    fetcher->token = command->token;
    fetcher->fd = (int)command->number;
    fetcher->in_capacity = MQD_FETCHER_BUFFER_BYTES;
    fetcher->index = fetchers->count;
    fetcher->generation = ++fetchers->generation;
    fetcher->readable = fetcher->writable = fetcher->full = 1;
    mqd_list_init(&fetcher->members);
    mqd_list_init(&fetcher->changes);
    mqd_list_init(&fetcher->put_off);
    return fetcher;
}

/* Partitions of this leader that have no connection, or use another lane's for want of their own. */
static void gather_members(struct mqd_fetchers *fetchers, struct mqd_fetcher *fetcher)
{
    struct mqd_fetcher *other = fetcher->options.lane == MQD_LANE_CATCH_UP ? fetcher_find(fetchers, fetcher->options.leader_node, fetcher->options.leader_worker, MQD_LANE_IN_SYNC) : NULL;
    MQD_LIST_EACH(node, spare, &fetchers->unserved) {
        struct mqd_followed *followed = MQD_CONTAINER(node, struct mqd_followed, member);
        move_to(fetchers, followed, fetcher_for(fetchers, followed->owned));
    }
    if (other)
        MQD_LIST_EACH(node, spare, &other->members) {
            struct mqd_followed *followed = MQD_CONTAINER(node, struct mqd_followed, member);
            move_to(fetchers, followed, fetcher_for(fetchers, followed->owned));
        }
}

static void fetcher_put(struct mqd_reactor *r, struct mqd_fetchers *fetchers, const struct mqd_command *command)
{
    const struct mqd_fetcher_options *options = command->fetcher;
    const char *wrong = options_wrong(options);
    int fd = (int)command->number, flags = fcntl(fd, F_GETFL), one = 1;
    struct mqd_fetcher *old = wrong ? NULL : fetcher_find(fetchers, options->leader_node, options->leader_worker, options->lane), *fetcher = NULL;
    if (old)
        mqd_fetcher_end(r, old, -1, "");
    if (!wrong && fetchers->count == MQD_FETCHER_COUNT_MAX)
        wrong = "more connections to other hosts than a worker holds";
    if (!wrong && (!r->poll || flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 || !(fetcher = fetcher_new(r, fetchers, command))))
        wrong = r->poll ? "no socket, or no memory, for a connection to another host" : "the reactor does not run";
    if (!wrong && mqd_poll_add(r->poll, fd, poll_token(fetcher)) < 0)
        wrong = "the connection cannot be watched";
    if (wrong) {
        if (fetcher)
            fetcher_free(fetcher);
        close(fd);
        mqd_command_done(r, command->token, MQD_E_INVALID, UINT32_MAX, 0, NULL, wrong);
        return;
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fetchers->fetcher[fetchers->count++] = fetcher;
    if (options->lane == MQD_LANE_CATCH_UP)
        fetchers->rate = options->bytes_per_second_max;
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
        fetchers->rate = command->offset;
    else if ((fetcher = fetcher_find(fetchers, (int32_t)command->offset, (uint32_t)command->last_offset, command->number)))
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

/* ---- requests ----------------------------------------------------------------------------------------------------- */

/* What the session is to know of this partition. false: nothing now. */
static bool wanted(struct mqd_reactor *r, const struct mqd_followed *followed, struct mqd_replica_fetch *out)
{
    const struct mqd_owned *owned = followed->owned;
    uint32_t count;
    if (owned->resting || owned->closing || followed->put_off_ms > r->now_ms)
        return false;
    const struct mqd_epoch *epochs = mqd_partition_epochs(owned->partition, &count);
    return mqd_replica_next_fetch(owned->replica, epochs, count, out) == 1;
}

static bool same_fetch(const struct mqd_replica_fetch *left, const struct mqd_replica_fetch *right)
{
    return left->fetch_offset == right->fetch_offset && left->current_leader_epoch == right->current_leader_epoch && left->last_fetched_epoch == right->last_fetched_epoch;
}

static bool items_room(struct mqd_fetchers *fetchers, uint32_t count)
{
    if (count < fetchers->item_capacity)
        return true;
    uint32_t capacity = fetchers->item_capacity ? fetchers->item_capacity * 2 : 64;
    struct mqd_fetch_item *grown = realloc(fetchers->items, capacity * sizeof *grown);
    if (!grown)
        return false;
    fetchers->items = grown;
    fetchers->item_capacity = capacity;
    return true;
}

/* One partition that has changed: into the request, out of the session, or put off. Returns how many items there are. */
static uint32_t look_at(struct mqd_reactor *r, struct mqd_fetcher *fetcher, struct mqd_followed *followed, uint32_t count)
{
    struct mqd_replica_fetch fetch;
    if (!wanted(r, followed, &fetch)) {
        leave_session(followed);
        if (followed->put_off_ms > r->now_ms)
            mqd_followed_put_off(r, followed, followed->put_off_ms - r->now_ms);
        return count; /* else who makes it wanted again says so */
    }
    if (followed->in_session && same_fetch(&fetch, &followed->told))
        return count;
    fetcher->session_count += !followed->in_session;
    followed->in_session = 1;
    followed->told = fetch;
    struct mqd_positions positions;
    mqd_partition_positions(followed->owned->partition, &positions);
    r->fetchers->items[count] = (struct mqd_fetch_item){.key = followed->key, .current_leader_epoch = fetch.current_leader_epoch, .last_fetched_epoch = fetch.last_fetched_epoch,
                                                        .bytes_max = (int32_t)fetcher->options.partition_bytes_max, .fetch_offset = fetch.fetch_offset,
                                                        .log_start_offset = positions.log_start_offset};
    return count + 1;
}

/* A new session: nothing is known of any. */
static void begin_anew(struct mqd_fetcher *fetcher)
{
    fetcher->session_count = fetcher->forgotten_count = 0;
    fetcher->session_epoch = 0;
    MQD_LIST_EACH(node, spare, &fetcher->members) {
        struct mqd_followed *followed = MQD_CONTAINER(node, struct mqd_followed, member);
        followed->in_session = 0;
        if (!followed->putting_off)
            mqd_followed_changed(followed);
    }
}

/* Those that left and came back before the leader heard of it stay. */
static void drop_returned(struct mqd_fetchers *fetchers, struct mqd_fetcher *fetcher)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < fetcher->forgotten_count; i++) {
        const struct mqd_followed *followed = mqd_followed_find(fetchers, &fetcher->forgotten[i]);
        if (!followed || followed->fetcher != fetcher || !followed->in_session)
            fetcher->forgotten[kept++] = fetcher->forgotten[i];
    }
    fetcher->forgotten_count = kept;
}

static bool throttled(const struct mqd_fetchers *fetchers, const struct mqd_fetcher *fetcher)
{
    return fetcher->options.lane == MQD_LANE_CATCH_UP && fetchers->rate > 0;
}

static int32_t bytes_max_of(const struct mqd_fetchers *fetchers, const struct mqd_fetcher *fetcher)
{
    int64_t bytes = fetcher->options.response_bytes_max;
    if (throttled(fetchers, fetcher) && fetchers->allowance_bytes < bytes)
        bytes = fetchers->allowance_bytes < 4096 ? 4096 : fetchers->allowance_bytes;
    return (int32_t)bytes;
}

static void send_some(struct mqd_reactor *r, struct mqd_fetcher *fetcher)
{
    while (fetcher->out_sent < fetcher->out.size_bytes) {
        ssize_t sent = send(fetcher->fd, fetcher->out.bytes + fetcher->out_sent, fetcher->out.size_bytes - fetcher->out_sent, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            fetcher->writable = 0;
            return;
        }
        if (sent < 0) {
            mqd_fetcher_end(r, fetcher, errno, strerror(errno));
            return;
        }
        fetcher->out_sent += (uint32_t)sent;
    }
    fetcher->out.size_bytes = fetcher->out_sent = 0;
    if (fetcher->out.capacity_bytes > (1u << 20))
        mqd_buffer_free(&fetcher->out);
}

/* One more answer is due. */
static void send_request(struct mqd_reactor *r, struct mqd_fetcher *fetcher)
{
    if (fetcher->out.failed) {
        mqd_fetcher_end(r, fetcher, ENOMEM, "no memory for a request");
        return;
    }
    fetcher->outstanding++;
    fetcher->deadline_ms = r->now_ms + fetcher->options.wait_ms + fetcher->options.timeout_ms;
    send_some(r, fetcher);
}

static struct mqd_fetch_ask ask_head(struct mqd_reactor *r, struct mqd_fetcher *fetcher)
{
    return (struct mqd_fetch_ask){.correlation_id = ++fetcher->correlation_id, .wait_ms = (int32_t)fetcher->options.wait_ms, .bytes_max = bytes_max_of(r->fetchers, fetcher),
                                  .node_id = fetcher->options.node_id, .broker_epoch = mqd_load_relaxed(&r->header->broker_epoch)};
}

/* The leader holds back its answer until it has news; a second request, for nothing and of no session, makes it answer the first one now. */
static void urge(struct mqd_reactor *r, struct mqd_fetcher *fetcher)
{
    struct mqd_fetch_ask head = ask_head(r, fetcher);
    head.wait_ms = 0;
    head.session_epoch = -1;
    mqd_fetch_ask_encode(&fetcher->out, &head, NULL, 0, NULL, 0);
    send_request(r, fetcher);
}

static void ask(struct mqd_reactor *r, struct mqd_fetcher *fetcher)
{
    struct mqd_fetchers *fetchers = r->fetchers;
    struct mqd_node *node;
    uint32_t count = 0;
    fetcher->urgent = 0;
    if (fetcher->full)
        begin_anew(fetcher);
    while (items_room(fetchers, count) && (node = mqd_list_pop(&fetcher->changes)))
        count = look_at(r, fetcher, MQD_CONTAINER(node, struct mqd_followed, change), count);
    drop_returned(fetchers, fetcher);
    if (fetcher->full ? count == 0 : fetcher->session_count == 0 && fetcher->forgotten_count == 0)
        return; /* nobody wants anything */
    struct mqd_fetch_ask head = ask_head(r, fetcher);
    head.session_id = fetcher->session_id;
    head.session_epoch = fetcher->session_epoch;
    mqd_fetch_ask_encode(&fetcher->out, &head, fetchers->items, count, fetcher->forgotten, fetcher->forgotten_count);
    fetcher->forgotten_count = 0;
    fetcher->full = 0;
    send_request(r, fetcher);
}

static void refill(struct mqd_reactor *r, struct mqd_fetchers *fetchers)
{
    int64_t elapsed_ms = r->now_ms - fetchers->allowance_ms;
    if (fetchers->rate <= 0 || elapsed_ms <= 0)
        return;
    int64_t most = fetchers->rate / (1000 / BURST_MS) + 1, more = elapsed_ms < 10000 ? fetchers->rate / 1000 * elapsed_ms + fetchers->rate % 1000 * elapsed_ms / 1000 : most;
    fetchers->allowance_ms = r->now_ms;
    fetchers->allowance_bytes = fetchers->allowance_bytes + more > most ? most : fetchers->allowance_bytes + more;
}

/* May it ask now? If time alone stands against it, not_before_ms says when. */
static bool may_ask(struct mqd_reactor *r, struct mqd_fetchers *fetchers, struct mqd_fetcher *fetcher)
{
    if (fetcher->outstanding || fetcher->unsettled_count || fetcher->not_before_ms > r->now_ms)
        return false;
    if (!throttled(fetchers, fetcher) || fetchers->allowance_bytes > 0)
        return true;
    fetcher->not_before_ms = r->now_ms + 1 - fetchers->allowance_bytes * 1000 / fetchers->rate;
    return false;
}

void mqd_fetchers_run(struct mqd_reactor *r)
{
    struct mqd_fetchers *fetchers = r->fetchers;
    refill(r, fetchers);
    for (uint32_t i = fetchers->count; i-- > 0;) { /* one that ends gives its place to the last, which was looked at */
        struct mqd_fetcher *fetcher = fetchers->fetcher[i];
        MQD_LIST_EACH(node, spare, &fetcher->put_off) {
            struct mqd_followed *followed = MQD_CONTAINER(node, struct mqd_followed, change);
            if (followed->put_off_ms > r->now_ms)
                break;
            mqd_followed_changed(followed);
            fetcher->urgent = 1;
        }
        if (fetcher->outstanding && r->now_ms > fetcher->deadline_ms)
            mqd_fetcher_end(r, fetcher, ETIMEDOUT, "the leader does not answer");
        else if (fetcher->out.size_bytes && fetcher->writable)
            send_some(r, fetcher);
        else if (!r->stop && may_ask(r, fetchers, fetcher))
            ask(r, fetcher);
        else if (fetcher->urgent && fetcher->outstanding == 1 && !fetcher->urging && !fetcher->in_frame && !fetcher->out.size_bytes)
            urge(r, fetcher);
    }
}

int64_t mqd_fetchers_next_ms(const struct mqd_reactor *r)
{
    int64_t next_ms = INT64_MAX;
    for (uint32_t i = 0; i < r->fetchers->count; i++) {
        const struct mqd_fetcher *fetcher = r->fetchers->fetcher[i];
        if (fetcher->readable)
            return 0;
        if (fetcher->outstanding && fetcher->deadline_ms + 1 < next_ms)
            next_ms = fetcher->deadline_ms + 1;
        if (!fetcher->outstanding && fetcher->not_before_ms > r->now_ms && fetcher->not_before_ms < next_ms)
            next_ms = fetcher->not_before_ms;
        if (!mqd_list_empty(&fetcher->put_off)) {
            int64_t put_off_ms = MQD_CONTAINER(fetcher->put_off.next, struct mqd_followed, change)->put_off_ms;
            next_ms = put_off_ms < next_ms ? put_off_ms : next_ms;
        }
    }
    return next_ms == INT64_MAX ? -1 : next_ms;
}

/* ---- receiving ---------------------------------------------------------------------------------------------------- */

void mqd_fetcher_on_event(struct mqd_reactor *r, uint64_t value, uint32_t flags)
{
    uint32_t index = value & 0xffff;
    struct mqd_fetcher *fetcher = r->fetchers && index < r->fetchers->count ? r->fetchers->fetcher[index] : NULL;
    if (!fetcher || fetcher->generation != (uint32_t)(value >> 16))
        return;
    if (flags & (MQD_POLL_READABLE | MQD_POLL_HANGUP))
        fetcher->readable = 1;
    if (flags & MQD_POLL_WRITABLE)
        fetcher->writable = 1;
}

/* Room at the end of the buffer: what is not taken moves to its beginning; when that is a batch larger than the buffer, it grows. Nothing is staged. */
static bool make_room(struct mqd_fetcher *fetcher)
{
    uint32_t left = fetcher->in_end - fetcher->in_begin;
    if (fetcher->in_begin && (left == 0 || fetcher->in_capacity - fetcher->in_end < MQD_FETCHER_RECEIVE_BYTES)) {
        memmove(fetcher->in, fetcher->in + fetcher->in_begin, left);
        fetcher->in_begin = 0;
        fetcher->in_end = left;
    }
    if (left == 0 && fetcher->in_capacity > MQD_FETCHER_BUFFER_BYTES * 16) { /* a huge batch has passed */
        uint8_t *smaller = realloc(fetcher->in, MQD_FETCHER_BUFFER_BYTES);
        fetcher->in = smaller ? smaller : fetcher->in;
        fetcher->in_capacity = smaller ? MQD_FETCHER_BUFFER_BYTES : fetcher->in_capacity;
    }
    if (fetcher->in_capacity - fetcher->in_end >= MQD_FETCHER_RECEIVE_BYTES / 2)
        return true;
    uint32_t capacity = fetcher->in_capacity * 2; /* at most 1 GiB: no frame is longer, and all before it was taken */
    uint8_t *grown = realloc(fetcher->in, capacity);
    if (!grown)
        return false;
    fetcher->in = grown;
    fetcher->in_capacity = capacity;
    return true;
}

/* false: it has ended, or has nothing more now. */
static bool receive(struct mqd_reactor *r, struct mqd_fetcher *fetcher, uint32_t *budget)
{
    if (!make_room(fetcher)) {
        mqd_fetcher_end(r, fetcher, ENOMEM, "no memory for a batch");
        return false;
    }
    uint32_t room = fetcher->in_capacity - fetcher->in_end, most = room < MQD_FETCHER_RECEIVE_BYTES ? room : MQD_FETCHER_RECEIVE_BYTES;
    ssize_t got = recv(fetcher->fd, fetcher->in + fetcher->in_end, most, 0);
    if (got < 0 && errno == EINTR)
        return true;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        fetcher->readable = 0;
        return false;
    }
    if (got <= 0) {
        mqd_fetcher_end(r, fetcher, got < 0 ? errno : ECONNRESET, got < 0 ? strerror(errno) : "the leader closed the connection");
        return false;
    }
    fetcher->in_end += (uint32_t)got;
    fetcher->deadline_ms = r->now_ms + fetcher->options.timeout_ms;
    *budget -= (uint32_t)got < *budget ? (uint32_t)got : *budget;
    if (!mqd_fetcher_take(r, fetcher))
        return false;
    mqd_owner_write_all(r); /* while it is in the cache; and what is staged lies in the buffer */
    return *budget > 0;
}

void mqd_fetchers_read(struct mqd_reactor *r)
{
    for (uint32_t i = r->fetchers->count; i-- > 0;) {
        struct mqd_fetcher *fetcher = r->fetchers->fetcher[i];
        uint32_t budget = MQD_FETCHER_TURN_BYTES;
        while (fetcher->readable && receive(r, fetcher, &budget))
            ;
    }
}
