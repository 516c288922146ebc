/* An attachment on its worker's side: a connection of the reactor whose bytes arrive through shared
 * memory. Layout of that memory: shm/local_layout.h.
 *
 * The connection's `fd` is the Unix socket: it carries the welcome and queries
 * (server/local/query.c), and when it closes, the client has disconnected. Requests are copied from
 * the client's memory into the receive window and are then handled exactly as if they had arrived
 * over TCP; responses are written to the reply ring instead of a socket (server/local/ring.c).
 *
 *   adopt -> welcome -> poll ... read ... send -> hung up: submitted requests are taken, responses
 *   are discarded -> closed
 *
 * Invariants, in addition to those of the layout
 *   B1  an attachment is in reactor->locals as long as its connection is open; its bytes count
 *       towards local_bytes until the memory is freed, whichever process keeps it
 *       (server/local/memory.c).
 *   B2  `readable` of its connection is false only when the submission ring was seen empty up to
 *       submission_head; `writable` is false only when the reply ring was seen full while
 *       reply_head was reply_head_seen. mqd_locals_poll detects changes, each turn and before each
 *       sleep; no other notification is needed.
 *   B3  the worker never blocks on a client: the socket is used with MSG_DONTWAIT, and to_client_fd
 *       is a pipe whose write end only the worker has.
 *   B4  the attachment belongs to the process that connected and ends with it, even if a forked
 *       child keeps the socket open.
 *   B5  an attachment that has hung up is closed within two housekeeping periods, whatever it still
 *       waits for.
 * Bounds: local_count_max attachments, local_bytes_max of memory for all of them; each may send
 * QUERIES_PER_TURN queries in a turn. When the socket does not take a response, no more queries are
 * read until it does.
 * Concurrency: the reactor's thread.
 */
#ifndef MQD_LOCAL_H
#define MQD_LOCAL_H

#include "base/list.h"
#include "log/reader/reader.h"
#include "server/request.h"
#include "shm/local_layout.h"

struct mqd_reactor;

#define MQD_LOCAL_COUNT_MAX 1024   /* attachments per worker */
#define MQD_LISTENER_LOCAL 0xffffu /* listener id of connections from the client socket */
#define MQD_HANDOFF_LOCAL 1u       /* flag of a hand-off */

/* the 64 bytes of a hand-off with MQD_HANDOFF_LOCAL, from the acceptor */
struct mqd_local_handoff {
    uint32_t magic;
    uint16_t listener_id, flags;
    uint64_t data_bytes; /* a requested size, like the next two */
    uint32_t reply_bytes, submission_count;
    uint32_t uid;
    int32_t pid;
    char client_id[32]; /* truncated; NUL-terminated; for logs */
};
_Static_assert(sizeof(struct mqd_local_handoff) == 64, "the acceptor packs 64 bytes");

struct mqd_local {
    struct mqd_local_header *header; /* the memory; its contents are not trusted */
    uint64_t submission_head;        /* our own copy of the shared word, like reply_tail */
    uint64_t reply_head_seen;
    struct mqd_connection *connection;
    uint64_t reply_tail, reply_tail_published;
    const struct mqd_local_submission *submissions;
    const uint8_t *data;
    uint8_t *replies;
    uint64_t data_bytes, total_bytes;
    uint32_t submission_count, reply_bytes; /* powers of two */
    uint32_t index;                         /* in reactor->locals */
    uint8_t needs_room;                     /* worker_needs_room as last stored in the header */
    bool watched;                           /* server/local/memory.c returns the bytes to the budget */
    uint8_t periods_since_hangup;           /* housekeeping periods */
    int to_worker_fd, to_client_fd, pidfd;  /* pidfd -1: this kernel has no pidfds for sockets */
    uint64_t drain_bytes;                   /* after a hang-up: how many bytes may still be taken */
    uint32_t uid;
    int32_t pid;
    /* queries */
    struct mqd_node query_node; /* in reactor->queries or query_later */
    bool response_waits;        /* the socket has no room for the response */
    /* the socket has room, but refused the response for another reason: no edge will follow */
    bool response_refused;
    int response_fd; /* -1 = none */
    struct mqd_local_segment response;
};

/* server/local/local.c */
/* principal: the bytes that follow the hand-off; none if the broker has no authorizer */
void mqd_local_adopt(struct mqd_reactor *r, int fd, const struct mqd_local_handoff *handoff, const void *principal,
                     uint16_t principal_bytes);
void mqd_local_close(struct mqd_reactor *r, struct mqd_connection *c);
void mqd_local_on_event(struct mqd_reactor *r, struct mqd_connection *c, uint32_t flags); /* event of the socket */
/* the client has hung up, or its process has ended */
void mqd_local_on_end(struct mqd_reactor *r, struct mqd_connection *c);
/* Called once per housekeeping period. Counts the periods since the client hung up; returns whether
 * the attachment has not ended in time. */
bool mqd_local_count_period(struct mqd_local *local);

/* returns the bytes of freed memory to the budget local_bytes_max */
void mqd_local_return_bytes(struct mqd_reactor *r, uint64_t size_bytes);

/* server/local/memory.c. mqd_local_memory_watch returns false if the memory cannot be watched.
 * mqd_local_memory_on_event: some memory was freed. */
bool mqd_local_memory_watch(struct mqd_reactor *r, int memory_fd, uint64_t size_bytes);
void mqd_local_memory_on_event(struct mqd_reactor *r);
void mqd_local_memory_destroy(struct mqd_reactor *r);

/* server/local/ring.c */
void mqd_locals_poll(struct mqd_reactor *r);          /* finds clients that have submitted requests or made room */
bool mqd_locals_waiting(const struct mqd_reactor *r); /* whether mqd_locals_poll would find such a client */
void mqd_local_read(struct mqd_reactor *r, struct mqd_connection *c);
/* Like send() and sendfile(), these return the number of bytes taken; 0 if the ring is full and the
 * client will notify the worker of room (or, with *file_end set, if the file is shorter than its
 * range); -1 if the connection is broken. */
int64_t mqd_local_send(struct mqd_reactor *r, struct mqd_connection *c, const uint8_t *bytes, uint64_t size_bytes);
int64_t mqd_local_send_file(struct mqd_reactor *r, struct mqd_connection *c, const struct mqd_range *range,
                            bool *file_end);
void mqd_local_publish(struct mqd_local *local); /* makes what was sent visible and wakes the client */

/* server/local/query.c */
/* the socket has queries, or room for a response */
void mqd_local_query_schedule(struct mqd_reactor *r, struct mqd_local *local);
void mqd_locals_respond(struct mqd_reactor *r);
void mqd_local_query_close(struct mqd_local *local);

#endif
