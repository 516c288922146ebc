/* Relays: chooses the relay for each batch, requests its connection, and queues the batch. See
 * server/relay/relay.h. Sending and receiving: server/relay/io.c. */
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/relay/state.h"
#include "server/rights/subject.h"

#define CONNECT_MS_MAX 5000          /* normally Python reports a failure earlier */
#define AUTHENTICATION_RETRY_MS 1000 /* pause after a failed authentication of either host */

static const char *const not_written_message =
    "the partition's leader, another host, could not be reached; nothing was written";

/* ---- relays ---- */

static struct mqd_relay **bucket_of(struct mqd_relays *relays, int32_t leader_node, uint32_t leader_worker,
                                    uint32_t lane)
{
    return &relays->buckets[(((uint32_t)leader_node * 64 + leader_worker) * MQD_RELAY_LANE_COUNT + lane) %
                            MQD_RELAY_BUCKET_COUNT];
}

static struct mqd_relay *find(struct mqd_relays *relays, int32_t leader_node, uint32_t leader_worker, uint32_t lane)
{
    struct mqd_relay *relay = *bucket_of(relays, leader_node, leader_worker, lane);
    while (relay && (relay->leader_node != leader_node || relay->leader_worker != leader_worker || relay->lane != lane))
        relay = relay->hash_next;
    return relay;
}

/* Removes an unused relay from its bucket, for reuse. Returns NULL if all are in use. The relay's
 * next connection gets a higher generation, so events of former connections find no match. */
static struct mqd_relay *take_unused(struct mqd_relays *relays)
{
    for (uint32_t i = 0; i < relays->count; i++) {
        struct mqd_relay *relay = relays->relay[i];
        if (relay->socket.fd >= 0 || relay->connect_requested || !mqd_list_empty(&relay->entries))
            continue;
        struct mqd_relay **link = bucket_of(relays, relay->leader_node, relay->leader_worker, relay->lane);
        while (*link != relay)
            link = &(*link)->hash_next;
        *link = relay->hash_next;
        mqd_buffer_free(&relay->out); /* memory of a request that could not be queued */
        return relay;
    }
    return NULL;
}

static struct mqd_relay *find_or_create(struct mqd_reactor *r, int32_t leader_node, uint32_t leader_worker,
                                        uint32_t lane)
{
    if (!r->relays && !(r->relays = calloc(1, sizeof *r->relays)))
        return NULL;
    struct mqd_relays *relays = r->relays;
    struct mqd_relay *relay = find(relays, leader_node, leader_worker, lane);
    if (relay)
        return relay;
    bool full = relays->count == MQD_RELAY_COUNT_MAX;
    if (!(relay = full ? take_unused(relays) : calloc(1, sizeof *relay)))
        return NULL;
    *relay = (struct mqd_relay){.leader_node = leader_node,
                                .leader_worker = leader_worker,
                                .lane = lane,
                                .socket = {.fd = -1},
                                .index = full ? relay->index : relays->count,
                                .generation = relay->generation};
    mqd_list_init(&relay->entries);
    if (!full)
        relays->relay[relays->count++] = relay;
    struct mqd_relay **bucket = bucket_of(relays, leader_node, leader_worker, lane);
    relay->hash_next = *bucket;
    *bucket = relay;
    return relay;
}

static uint64_t poll_token(const struct mqd_relay *relay)
{
    return mqd_token(MQD_TOKEN_RELAY, (uint64_t)relay->generation << 16 | relay->index);
}

/* ---- entries ---- */

static struct mqd_relay_entry *entry_new(struct mqd_relays *relays)
{
    struct mqd_relay_entry *entry = relays->free_entries;
    if (entry)
        relays->free_entries = (struct mqd_relay_entry *)entry->node.next;
    else if (!(entry = malloc(sizeof *entry)))
        return NULL;
    memset(entry, 0, sizeof *entry);
    mqd_list_init(&entry->node);
    return entry;
}

static void unblock(struct mqd_reactor *r, struct mqd_relay_entry *entry)
{
    struct mqd_connection *c = entry->blocks && entry->append ? entry->append->request->connection : NULL;
    entry->blocks = 0;
    if (!c)
        return;
    c->block_count--;
    mqd_connection_resume(r, c);
}

/* Called when all bytes of the entry are in the socket: it no longer uses memory or blocks its
 * connection. */
void mqd_relay_on_entry_sent(struct mqd_reactor *r, struct mqd_relay_entry *entry)
{
    struct mqd_relay *relay = entry->relay;
    mqd_heap_release(r, entry->frame_bytes);
    unblock(r, entry);
    relay->unsent =
        entry->node.next == &relay->entries ? NULL : MQD_CONTAINER(entry->node.next, struct mqd_relay_entry, node);
}

void mqd_relay_untrack(struct mqd_reactor *r, struct mqd_append *append)
{
    struct mqd_relay_entry *entry = append->relay_entry;
    append->relay_entry = NULL;
    unblock(r, entry);
    entry->append = NULL;
    append->request->relaying_count--;
    if (append->request->connection)
        append->request->connection->relaying_count--;
}

/* Removes the oldest entry; if its append still waits, the caller must complete it. */
struct mqd_append *mqd_relay_entry_take(struct mqd_reactor *r, struct mqd_relay *relay)
{
    struct mqd_relay_entry *entry = MQD_CONTAINER(relay->entries.next, struct mqd_relay_entry, node);
    struct mqd_append *append = entry->append;
    if (append)
        mqd_relay_untrack(r, append);
    if (relay->unsent == entry)
        mqd_relay_on_entry_sent(r, entry);
    mqd_list_remove(&entry->node);
    entry->node.next = (struct mqd_node *)r->relays->free_entries;
    r->relays->free_entries = entry;
    return append;
}

/* L6: with acks=0 there is no response. */
void mqd_relay_complete_append(struct mqd_reactor *r, struct mqd_append *append, int16_t error, const char *message)
{
    if (!append)
        return;
    if (append->request->no_reply)
        error = 0;
    if (message)
        append->message = message;
    mqd_append_done(r, append, error);
}

/* Fails all requests. Those that end after stream position `sent` were not sent completely, so
 * their batches were not written. */
static void fail_all(struct mqd_reactor *r, struct mqd_relay *relay, uint64_t sent)
{
    uint32_t count = 0;
    while (!mqd_list_empty(&relay->entries)) {
        bool unsent = MQD_CONTAINER(relay->entries.next, struct mqd_relay_entry, node)->end > sent;
        struct mqd_append *append = mqd_relay_entry_take(r, relay);
        count += append != NULL;
        mqd_relay_complete_append(
            r, append, unsent ? MQD_KAFKA_NOT_LEADER_OR_FOLLOWER : MQD_KAFKA_REQUEST_TIMED_OUT,
            unsent ? not_written_message
                   : "the connection to the partition's leader, another host, ended; whether the batch was "
                     "written is unknown");
    }
    mqd_stat(r, MQD_COUNT_RELAY_FAILURES, count);
}

void mqd_relay_end(struct mqd_reactor *r, struct mqd_relay *relay, int error, const char *text)
{
    /* without a connection, nothing was sent: 0 is below the end of every entry */
    uint64_t sent = relay->socket.fd >= 0 ? relay->out_sent : 0;
    if (relay->socket.fd >= 0) {
        if (r->poll)
            mqd_poll_remove(r->poll, relay->socket.fd, poll_token(relay));
        mqd_outgoing_close(&relay->socket);
    }
    relay->connect_requested = 0;
    fail_all(r, relay, sent);
    mqd_buffer_free(&relay->out);
    free(relay->in);
    relay->in = NULL;
    relay->in_bytes = 0;
    relay->out_base = relay->out_sent = 0;
    if (error < 0)
        return;
    struct mqd_event event = {.kind = MQD_EVENT_RELAY_ENDED, .slot = UINT32_MAX, .token = relay->token, .error = error};
    snprintf(event.text, sizeof event.text, "%s", text);
    mqd_reactor_emit(r, &event);
}

/* If the other host could not prove its identity, or did not accept this host's, a new connection
 * is not tried immediately. */
void mqd_relay_end_with_error(struct mqd_reactor *r, struct mqd_relay *relay)
{
    char reason[MQD_ERROR_MESSAGE_BYTES];
    bool unauthenticated = !mqd_outgoing_ready(&relay->socket) || mqd_error_code() == EPROTO;
    snprintf(reason, sizeof reason, "%s", mqd_error_message());
    mqd_relay_end(r, relay, mqd_error_code(), reason);
    if (unauthenticated)
        relay->refuse_until_ms = r->now_ms + AUTHENTICATION_RETRY_MS;
}

/* ---- appends ---- */

static void request_connection(struct mqd_reactor *r, struct mqd_relay *relay)
{
    if (relay->socket.fd >= 0 || relay->connect_requested)
        return;
    struct mqd_event event = {.kind = MQD_EVENT_RELAY_REQUESTED,
                              .slot = UINT32_MAX,
                              .node_id = relay->leader_node,
                              .worker = relay->leader_worker,
                              .lane = relay->lane};
    relay->connect_requested = 1;
    relay->connect_by_ms = r->now_ms + CONNECT_MS_MAX;
    mqd_reactor_emit(r, &event);
}

static bool encode(struct mqd_relay *relay, struct mqd_append *append, const struct mqd_topic *topic,
                   const struct mqd_produce_partition *partition, const struct mqd_produce_request *produce,
                   struct mqd_text client_id)
{
    struct mqd_relay_request request = {.correlation_id = (int32_t)(relay->correlation_id + 1),
                                        .version = append->request->version,
                                        .client_id = client_id,
                                        .transactional_id = produce->transactional_id,
                                        .acks = produce->required_acks ? produce->required_acks : 1,
                                        .timeout_ms = produce->timeout_ms,
                                        .topic = {(const uint8_t *)topic->name, (int32_t)topic->name_bytes},
                                        .topic_id = topic->topic_id,
                                        .partition_index = append->partition_index,
                                        .records = partition->records,
                                        .records_bytes =
                                            partition->size_bytes > 0 ? (uint32_t)partition->size_bytes : 0};
    uint32_t old_size_bytes = relay->out.size_bytes;
    mqd_relay_encode(&relay->out, &request);
    if (!relay->out.failed)
        return true;
    relay->out.failed = false;
    relay->out.size_bytes = old_size_bytes;
    return false;
}

static void refuse(struct mqd_reactor *r, struct mqd_append *append, const char *message)
{
    mqd_stat(r, MQD_COUNT_RELAY_FAILURES, 1);
    mqd_relay_complete_append(r, append, MQD_KAFKA_NOT_LEADER_OR_FOLLOWER,
                              message); /* retriable; nothing was written */
}

static void queue_append(struct mqd_reactor *r, struct mqd_relay *relay, struct mqd_append *append,
                         const struct mqd_topic *topic, struct mqd_relay_entry *entry, uint32_t frame_bytes)
{
    struct mqd_connection *c = append->request->connection;
    const struct mqd_produce_request *produce = r->producing;
    entry->append = append;
    entry->relay = relay;
    entry->frame_bytes = frame_bytes;
    entry->end = relay->out_base + relay->out.size_bytes;
    entry->correlation_id = (int32_t)++relay->correlation_id;
    entry->version = append->request->version;
    entry->partition_index = append->partition_index;
    memcpy(entry->topic_id, topic->topic_id, sizeof entry->topic_id);
    entry->expected_ms =
        r->now_ms + (produce->required_acks == -1 && produce->timeout_ms > 0 ? produce->timeout_ms : 0);
    append->relay_entry = entry;
    append->request->relaying_count++;
    c->relaying_count++;
    mqd_list_append(&relay->entries, &entry->node);
    if (!relay->unsent)
        relay->unsent = entry;
    if (relay->out_base + relay->out.size_bytes - relay->out_sent > MQD_RELAY_UNSENT_BYTES) {
        entry->blocks = 1;
        c->block_count++;
    }
    mqd_stat(r, MQD_COUNT_RELAYED_BATCHES, 1);
    mqd_stat(r, MQD_COUNT_RELAYED_BYTES, frame_bytes);
    request_connection(r, relay);
}

bool mqd_relay_append(struct mqd_reactor *r, struct mqd_append *append, const struct mqd_topic *topic,
                      const struct mqd_produce_partition *partition)
{
    const struct mqd_topic_partition *metadata = &topic->partitions[append->partition_index];
    const struct mqd_produce_request *produce = r->producing;
    if (!mqd_topics_is_led_elsewhere(&r->topics, metadata) || metadata->leader < 0)
        return false;
    if (__builtin_expect(mqd_subject_is_stale(r), 0)) { /* the leader checks no rights (S5) */
        mqd_relay_complete_append(
            r, append, MQD_KAFKA_NOT_LEADER_OR_FOLLOWER,
            "this broker has not reached the controller for the length of its lease, so it does not know "
            "whether its client may still write");
        return true;
    }
    if (partition->size_bytes > 0 && (uint64_t)partition->size_bytes > r->options.heap_bytes_max) {
        mqd_relay_complete_append(r, append, MQD_KAFKA_MESSAGE_TOO_LARGE,
                                  "a batch of a local client for a leader on another host is larger than "
                                  "queued.max.request.bytes: raise it, or let the client use TCP");
        return true;
    }
    uint32_t lane = produce->transactional_id.size_bytes >= 0 ? MQD_RELAY_LANE_TRANSACTIONS : MQD_RELAY_LANE_PLAIN;
    struct mqd_relay *relay = find_or_create(r, metadata->leader, metadata->leader_worker, lane);
    struct mqd_relay_entry *entry = relay && r->now_ms >= relay->refuse_until_ms ? entry_new(r->relays) : NULL;
    uint32_t old_size_bytes = relay ? relay->out.size_bytes : 0;
    if (!entry) {
        refuse(r, append,
               relay && r->now_ms < relay->refuse_until_ms
                   ? not_written_message
                   : "no memory, or no free entry, for another connection to a leader on another host");
        return true;
    }
    bool encoded = encode(relay, append, topic, partition, produce, r->producing_client);
    uint32_t frame_bytes = relay->out.size_bytes - old_size_bytes;
    if (!encoded || !mqd_heap_take(r, frame_bytes)) {
        relay->out.size_bytes = old_size_bytes;
        entry->node.next = (struct mqd_node *)r->relays->free_entries;
        r->relays->free_entries = entry;
        refuse(r, append, "no memory for another batch on its way to another host (queued.max.request.bytes)");
        return true;
    }
    queue_append(r, relay, append, topic, entry, frame_bytes);
    return true;
}

/* L3: the former leader may be unreachable, so its response may never arrive. */
void mqd_relay_on_topic_changed(struct mqd_reactor *r, const struct mqd_topic *topic)
{
    for (uint32_t i = 0; r->relays && i < r->relays->count; i++)
        MQD_LIST_EACH(node, next, &r->relays->relay[i]->entries) {
            struct mqd_relay_entry *entry = MQD_CONTAINER(node, struct mqd_relay_entry, node);
            struct mqd_append *append = entry->append;
            if (!append || memcmp(entry->topic_id, topic->topic_id, sizeof entry->topic_id) != 0)
                continue;
            bool exists = (uint32_t)entry->partition_index < topic->partition_count;
            if (exists && topic->partitions[entry->partition_index].leader == entry->relay->leader_node)
                continue;
            mqd_relay_untrack(r, append);
            mqd_relay_complete_append(r, append, MQD_KAFKA_NOT_LEADER_OR_FOLLOWER,
                                      "another host leads the partition now");
        }
}

/* ---- commands ---- */

static const char *take_socket(struct mqd_reactor *r, struct mqd_relay *relay, const struct mqd_command *command)
{
    int fd = (int)command->number, flags = fcntl(fd, F_GETFL), one = 1;
    if (!r->poll || flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0)
        return "the connection cannot be used, or the reactor is not running";
    if (!(relay->in = malloc(MQD_RELAY_RESPONSE_BYTES_MAX)))
        return "out of memory for a connection to another host";
    relay->generation++;
    relay->socket = (struct mqd_outgoing){.fd = fd, .readable = 1, .writable = 1};
    bool watched = mqd_poll_add(r->poll, fd, poll_token(relay)) == 0;
    if (!watched ||
        (command->relay->tls && mqd_outgoing_begin_tls(r, &relay->socket, relay->leader_node, poll_token(relay)) < 0)) {
        if (watched)
            mqd_poll_remove(r->poll, fd, poll_token(relay));
        relay->socket = (struct mqd_outgoing){.fd = -1};
        free(relay->in);
        relay->in = NULL;
        return watched ? mqd_error_message() : "the connection cannot be watched";
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    relay->token = command->token;
    relay->timeout_ms = command->relay->timeout_ms;
    relay->connect_requested = 0;
    relay->refuse_until_ms = 0;
    return NULL;
}

static void put_connection(struct mqd_reactor *r, const struct mqd_command *command)
{
    const struct mqd_relay_options *options = command->relay;
    bool valid = options->leader_node >= 0 && options->leader_worker < MQD_WORKER_COUNT_MAX &&
                 options->lane < MQD_RELAY_LANE_COUNT && options->timeout_ms;
    struct mqd_relay *relay =
        valid ? find_or_create(r, options->leader_node, options->leader_worker, options->lane) : NULL;
    if (relay && relay->socket.fd >= 0)
        mqd_relay_end(r, relay, -1, "");
    const char *problem = !valid   ? "a relay's leader, lane or timeout is invalid"
                          : !relay ? "too many connections to leaders on other hosts for one worker"
                                   : take_socket(r, relay, command);
    if (problem)
        close((int)command->number);
    mqd_command_done(r, command->token, problem ? MQD_E_INVALID : 0, UINT32_MAX, 0, NULL, problem ? problem : "");
}

void mqd_relay_command(struct mqd_reactor *r, const struct mqd_command *command)
{
    if (command->kind == MQD_COMMAND_RELAY_PUT) {
        put_connection(r, command);
        return;
    }
    const struct mqd_relay_options *options = command->relay;
    for (uint32_t i = 0; r->relays && i < r->relays->count; i++) {
        struct mqd_relay *relay = r->relays->relay[i];
        bool removes_all = command->kind == MQD_COMMAND_RELAY_REMOVE;
        if (relay->leader_node != options->leader_node ||
            (!removes_all &&
             (relay->leader_worker != options->leader_worker || relay->lane != options->lane || relay->socket.fd >= 0)))
            continue;
        mqd_relay_end(r, relay, -1, "");
        if (!removes_all)
            relay->refuse_until_ms = r->now_ms + options->timeout_ms;
    }
    mqd_command_done(r, command->token, 0, UINT32_MAX, 0, NULL, "");
}

static int post(struct mqd_reactor *r, uint64_t token, uint32_t kind, int fd, const struct mqd_relay_options *options)
{
    struct mqd_command command = {
        .kind = kind, .token = token, .number = (uint32_t)fd, .relay = malloc(sizeof *options)};
    if (command.relay) {
        *command.relay = *options;
        if (mqd_command_post(r, &command) == 0)
            return 0;
    } else {
        mqd_error_set(ENOMEM, "out of memory for a connection to another host");
    }
    if (fd >= 0)
        close(fd);
    return -1;
}

int mqd_reactor_relay_put(struct mqd_reactor *r, uint64_t token, int fd, const struct mqd_relay_options *options)
{
    return post(r, token, MQD_COMMAND_RELAY_PUT, fd, options);
}

int mqd_reactor_relay_refuse(struct mqd_reactor *r, uint64_t token, const struct mqd_relay_options *options)
{
    return post(r, token, MQD_COMMAND_RELAY_REFUSE, -1, options);
}

int mqd_reactor_relay_remove(struct mqd_reactor *r, uint64_t token, int32_t leader_node)
{
    struct mqd_relay_options options = {.leader_node = leader_node};
    return post(r, token, MQD_COMMAND_RELAY_REMOVE, -1, &options);
}

/* ---- closing and destruction ---- */

void mqd_relays_close(struct mqd_reactor *r)
{
    for (uint32_t i = 0; r->relays && i < r->relays->count; i++)
        mqd_relay_end(r, r->relays->relay[i], -1, "");
}

void mqd_relays_destroy(struct mqd_reactor *r)
{
    if (!r->relays)
        return;
    mqd_relays_close(r);
    while (r->relays->free_entries) {
        struct mqd_relay_entry *entry = r->relays->free_entries;
        r->relays->free_entries = (struct mqd_relay_entry *)entry->node.next;
        free(entry);
    }
    for (uint32_t i = 0; i < r->relays->count; i++)
        free(r->relays->relay[i]);
    free(r->relays);
    r->relays = NULL;
}
