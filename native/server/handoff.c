/* Receives connections from the acceptor, finds connections by the tokens of their events, and ends
 * connections whose client broke the protocol (the log line has the client's address). Reading and
 * closing: server/connection.c. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/authentication.h"
#include "server/local/local.h"
#include "server/reactor.h"
#include "server/rights/subject.h"
#include "server/tls/secure.h"
#include "shm/tally.h"

#define HANDOFF_MAGIC 0x31434e4fu
#define MQD_HANDOFF_PEER 2u /* flag: a connection of another host, from the listener between hosts */
#define MQD_HANDOFF_TLS 4u  /* flag, with MQD_HANDOFF_PEER: TLS begins with the next byte */
struct handoff {
    uint32_t magic;
    uint16_t listener_id, flags;
    uint8_t peer_ip[16];
    uint16_t peer_port, local_port;
    uint8_t local_ip[16];
    int32_t peer_node; /* with MQD_HANDOFF_PEER: the authenticated host */
    /* how many connections the address and the listener may have; 0 = any number */
    uint32_t address_count_max, listener_count_max;
    uint8_t pad[8];
};
_Static_assert(sizeof(struct handoff) == 64, "the acceptor packs 64 bytes");

/* Returns the number of connections on all workers. The connections of a worker that died are not
 * counted: its successor begins with none. */
static uint32_t count_broker_connections(const struct mqd_reactor *r)
{
    uint32_t sum = 0;
    for (uint32_t worker = 0; worker < mqd_control_worker_count(r->options.control); worker++)
        if (mqd_endpoint_state(r->options.control, worker) == MQD_PROCESS_RUNNING)
            sum += mqd_worker_connection_count(r->options.control, worker);
    return sum;
}

static struct mqd_connection *connection_new(struct mqd_reactor *r, int fd)
{
    struct mqd_connection *c = NULL;
    if (r->connection_count >= mqd_load_relaxed(&r->connection_count_max) || !r->free_index_count) {
        mqd_error_set(MQD_E_FULL, "%u connections are open, the limit is %u", r->connection_count,
                      r->connection_count_max);
        return NULL;
    }
    uint32_t sum = count_broker_connections(r), sum_max = mqd_load_relaxed(&r->broker_connection_count_max);
    if (sum >= sum_max) {
        mqd_error_set(MQD_E_FULL, "%u connections are open on all workers, the limit is %u", sum, sum_max);
        return NULL;
    }
    uint32_t index = r->free_indexes[--r->free_index_count];
    c = r->connections[index];
    if (!c) {
        c = calloc(1, sizeof *c);
        if (!c) {
            r->free_index_count++;
            mqd_error_set(ENOMEM, "out of memory");
            return NULL;
        }
        r->connections[index] = c;
        if (index >= r->connection_end)
            r->connection_end = index + 1;
    }
    uint32_t generation = c->generation + 1;
    memset(c, 0, sizeof *c);
    c->generation = generation & 0xffffff;
    c->fd = fd;
    c->index = index;
    c->id = ++r->next_connection_id * MQD_WORKER_COUNT_MAX + r->options.self;
    mqd_list_init(&c->ready_node);
    mqd_list_init(&c->output_node);
    mqd_list_init(&c->stall_node);
    mqd_list_init(&c->response_node);
    mqd_list_init(&c->mute_node);
    mqd_list_init(&c->control_waiting);
    mqd_list_init(&c->control_turn);
    mqd_list_init(&c->share_sessions);
    mqd_list_init(&c->subject_node);
    c->address_tally = c->listener_tally = MQD_TALLY_NONE;
    c->run_offset = -1;
    c->peer_node = -1;
    c->frame_bytes_min = MQD_FRAME_BYTES_MIN;
    c->frame_bytes_max = r->options.request_bytes_max;
    c->authenticate_by_ms = c->session_end_ms = INT64_MAX;
    c->writable = c->readable = 1;
    c->last_active_ms = r->now_ms;
    return c;
}

/* Returns NULL on failure, with the reason in mqd_error_message; the caller then still owns fd. */
struct mqd_connection *mqd_connection_open(struct mqd_reactor *r, int fd, uint16_t listener_id)
{
    struct mqd_connection *c = connection_new(r, fd);
    if (!c) {
        mqd_stat(r, MQD_COUNT_CONNECTIONS_REFUSED, 1);
        return NULL;
    }
    c->listener_id = listener_id;
    if (mqd_poll_add(r->poll, fd, mqd_token(MQD_TOKEN_CONNECTION, (uint64_t)c->generation << 24 | c->index)) < 0) {
        r->free_indexes[r->free_index_count++] = c->index;
        c->fd = -1;
        return NULL;
    }
    r->connection_count++;
    mqd_store_relaxed(&r->slot->connection_count, r->connection_count);
    mqd_stat(r, MQD_COUNT_CONNECTIONS_ACCEPTED, 1);
    mqd_log(r, 7, c->id, UINT32_MAX, "connection opened");
    mqd_list_append(&r->ready, &c->ready_node); /* bytes may have arrived before the edge was armed */
    return c;
}

static const uint8_t ipv4_mapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

/* Writes " (client ADDRESS:PORT)", or "" for a shared-memory client. The address comes from the
 * hand-off, because the socket no longer knows its peer once the peer has reset the connection. */
static void describe_peer(const struct mqd_connection *c, char *text, size_t size_bytes)
{
    char host[INET6_ADDRSTRLEN];
    text[0] = 0;
    if (!c->peer_port)
        return;
    if (memcmp(c->peer_ip, ipv4_mapped, sizeof ipv4_mapped) == 0 &&
        inet_ntop(AF_INET, c->peer_ip + sizeof ipv4_mapped, host, sizeof host))
        snprintf(text, size_bytes, " (client %s:%u)", host, c->peer_port);
    else if (inet_ntop(AF_INET6, c->peer_ip, host, sizeof host))
        snprintf(text, size_bytes, " (client [%s]:%u)", host, c->peer_port);
}

static void copy_addresses(struct mqd_connection *c, const struct handoff *handoff)
{
    c->local_port = handoff->local_port;
    c->peer_port = handoff->peer_port;
    memcpy(c->peer_ip, handoff->peer_ip, sizeof c->peer_ip);
    if (memcmp(handoff->local_ip, ipv4_mapped, sizeof ipv4_mapped) == 0)
        memcpy(&c->local_ipv4, handoff->local_ip + sizeof ipv4_mapped, 4);
    if (memcmp(handoff->peer_ip, ipv4_mapped, sizeof ipv4_mapped) == 0)
        memcpy(&c->peer_ipv4, handoff->peer_ip + sizeof ipv4_mapped, 4);
}

/* Counts the connection in the key's tally. Returns false if the tally now exceeds `count_max`. */
static bool count_in_tally(struct mqd_reactor *r, int32_t *tally, const void *key, uint32_t key_bytes,
                           uint32_t count_max)
{
    uint32_t sum;
    *tally =
        mqd_tally_enter(r->options.control, mqd_quota_key(r->options.control, key, key_bytes), r->options.self, &sum);
    return !count_max || sum <= count_max;
}

/* Counts the connection. Returns the name of the limit that it exceeds, or NULL. */
static const char *count_connection(struct mqd_reactor *r, struct mqd_connection *c, const struct handoff *handoff)
{
    if (!count_in_tally(r, &c->address_tally, handoff->peer_ip, sizeof handoff->peer_ip, handoff->address_count_max))
        return "max.connections.per.ip";
    /* connections are also counted when there is no limit, because a limit may be set later */
    if (!count_in_tally(r, &c->listener_tally, &handoff->listener_id, sizeof handoff->listener_id,
                        handoff->listener_count_max))
        return "max.connections of its listener";
    return NULL;
}

static void adopt(struct mqd_reactor *r, int fd, const struct handoff *handoff)
{
    int flags = fcntl(fd, F_GETFL);
    /* otherwise sendfile would block on a client that does not read */
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0) {
        mqd_log(r, 3, 0, UINT32_MAX, "connection refused: it cannot be made non-blocking: %s", strerror(errno));
        close(fd);
        return;
    }
    bool is_client = !(handoff->flags & MQD_HANDOFF_PEER && handoff->peer_node >= 0);
    if (is_client && handoff->listener_id >= MQD_LISTENER_COUNT_MAX) {
        mqd_log(r, 3, 0, UINT32_MAX, "connection refused: a broker has at most %d listeners", MQD_LISTENER_COUNT_MAX);
        close(fd);
        return;
    }
    struct mqd_connection *c = mqd_connection_open(r, fd, handoff->listener_id);
    if (!c) {
        mqd_log(r, 4, 0, UINT32_MAX, "connection refused (max.connections): %s", mqd_error_message());
        close(fd);
        return;
    }
    copy_addresses(c, handoff);
    const char *exceeded = is_client ? count_connection(r, c, handoff) : NULL;
    if (exceeded) {
        mqd_stat(r, MQD_COUNT_CONNECTIONS_REFUSED, 1);
        char peer[INET6_ADDRSTRLEN + 24];
        describe_peer(c, peer, sizeof peer);
        mqd_log(r, 4, c->id, UINT32_MAX, "connection refused (%s)%s", exceeded, peer);
        mqd_connection_close(r, c, exceeded);
        return;
    }
    if (!is_client)
        c->peer_node = handoff->peer_node;
    bool uses_tls = is_client ? r->options.listener_flags[handoff->listener_id] & MQD_LISTENER_FLAG_TLS
                              : handoff->flags & MQD_HANDOFF_TLS;
    if (uses_tls && !mqd_secure_begin(r, c))
        return;
    if (is_client && r->options.listener_flags[handoff->listener_id] & MQD_LISTENER_FLAG_SASL)
        mqd_authentication_begin(r, c);
    if (!c->tls) /* early, so that the rights are looked up before the first request arrives */
        mqd_subject_attach(r, c);
}

/* Does nothing until the process is ready, because before that it would answer that no topic
 * exists; meanwhile connections wait in the hand-off socket. */
void mqd_handoff_accept(struct mqd_reactor *r)
{
    if (!r->serving && mqd_load_acquire(&r->slot->state) != MQD_PROCESS_RUNNING)
        return;
    r->serving = true;
    for (;;) { /* until empty: the socket is edge-triggered; its buffer bounds how many can wait */
        union {
            struct handoff tcp;
            struct mqd_local_handoff local;
            uint8_t bytes[sizeof(struct mqd_local_handoff) + MQD_PRINCIPAL_BYTES_MAX];
        } handoff;
        union {
            struct cmsghdr header;
            char bytes[CMSG_SPACE(sizeof(int))];
        } control;
        struct iovec iov = {&handoff, sizeof handoff};
        struct msghdr message = {
            .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
        ssize_t n = recvmsg(r->options.handoff_fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        if (n < 0) {
            /* no edge will signal the remaining connections, so the next turn accepts again */
            r->serving = errno == EAGAIN;
            return;
        }
        int fd = -1;
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        if (header && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS &&
            header->cmsg_len == CMSG_LEN(sizeof(int)))
            memcpy(&fd, CMSG_DATA(header), sizeof fd);
        if (n == 0 && fd < 0)
            return; /* the keeper has ended; its pidfd notifies the main thread */
        bool is_complete = n >= (ssize_t)sizeof handoff.tcp && !(message.msg_flags & MSG_TRUNC);
        bool is_local = is_complete && handoff.tcp.flags & MQD_HANDOFF_LOCAL;
        if (fd >= 0 && (!is_complete || handoff.tcp.magic != HANDOFF_MAGIC || (n != sizeof handoff.tcp && !is_local))) {
            close(fd);
            mqd_log(r, 3, 0, UINT32_MAX,
                    "hand-off message of %zd bytes is from another version; restart acceptor and workers together", n);
        } else if (fd >= 0 && is_local) {
            mqd_local_adopt(r, fd, &handoff.local, handoff.bytes + sizeof handoff.local,
                            (uint16_t)((size_t)n - sizeof handoff.local));
        } else if (fd >= 0) {
            adopt(r, fd, &handoff.tcp);
        } else if (message.msg_flags & MSG_CTRUNC) {
            mqd_stat(r, MQD_COUNT_CONNECTIONS_REFUSED, 1);
            mqd_log(r, 4, 0, UINT32_MAX, "connection refused: this process has no file descriptor left (ulimit -n)");
        }
    }
}

struct mqd_connection *mqd_connection_by_token(struct mqd_reactor *r, uint64_t value)
{
    uint32_t index = value & 0xffffff, generation = (uint32_t)(value >> 24);
    if (index >= r->connection_capacity)
        return NULL;
    struct mqd_connection *c = r->connections[index];
    return c && c->fd >= 0 && c->generation == generation ? c : NULL;
}

void mqd_connection_fail(struct mqd_reactor *r, struct mqd_connection *c, const char *reason)
{
    mqd_stat(r, MQD_COUNT_PROTOCOL_ERRORS, 1);
    char peer[INET6_ADDRSTRLEN + 24];
    describe_peer(c, peer, sizeof peer);
    mqd_log(r, 4, c->id, UINT32_MAX, "closing the connection: %s%s", reason, peer);
    mqd_connection_close(r, c, reason);
}
