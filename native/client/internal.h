/* Internal to the local client's files: the attachment as the producer and the readers see it.
 *
 *   C1  every word of the memfd that the worker writes is loaded once per use and checked against
 *       the ring before use: the worker is trusted, but it may have died at any point. An
 *       inconsistent value ends the attachment (MQD_E_CORRUPT), never the process.
 *   C2  geometry (offsets, sizes) is this struct's copy, made when the welcome arrives; the header
 *       in the memfd is not read again.
 *   C3  `data` has two parts: a ring of request frames (mqd_client_submit), freed in order as
 *       submission_head advances, and the producer's memory (client/memory.h). So a full producer
 *       cannot block the Metadata request that it waits for.
 *   C4  mqd_client_wait runs concurrently with everything else: of the fields that change, it uses
 *       only those marked "wait".
 *   C5  a forked child has the struct, but neither the descriptors nor the mapping of the memfd:
 *       client/fork.c closes them, so that the worker notices the end of the client even while a
 *       forked child runs. `failure` makes every call in the child fail.
 */
#ifndef MQD_CLIENT_INTERNAL_H
#define MQD_CLIENT_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "client/client.h"
#include "shm/local_layout.h"

/* correlation ids from this one up are the producer's */
#define MQD_CLIENT_PRODUCER_CORRELATION_MIN (1u << 30)

struct mqd_endpoint_slot;
struct mqd_producer;

enum mqd_submitted_kind {
    MQD_SUBMITTED_NONE,
    MQD_SUBMITTED_REQUEST,
    MQD_SUBMITTED_BATCH,
    MQD_SUBMITTED_BATCH_ACKS_0 /* gets no response; done once the worker has read it */
};
/* the client's own record of a submission, at the submission's index */
struct mqd_submitted {
    uint8_t kind;
    uint32_t batch; /* index in the producer's table */
    uint32_t bytes; /* REQUEST: bytes in the ring of requests, including the skipped rest at its end */
};

struct mqd_response {
    struct mqd_response *next;
    uint32_t size_bytes; /* from the correlation id on */
    uint8_t bytes[];
};

struct mqd_client {
    struct mqd_client *next, **link; /* all clients of the process: client/fork.c */
    /* wait. 0, or the code with which every call fails: MQD_E_INVALID (in a forked child), EPIPE,
     * MQD_E_CORRUPT, ENOMEM */
    int failure;
    const char *failure_message;
    bool in_fork_child; /* this process was forked from the one that attached */
    uint32_t idle_polls;
    uint32_t worker, spin_us;
    int socket_fd, to_worker_fd, to_client_fd, wake_fd;
    void *control; /* read-only */
    size_t control_bytes;
    const struct mqd_endpoint_slot *worker_slot;
    uint64_t worker_generation;

    uint8_t *memory; /* the memfd */
    uint64_t memory_bytes;
    struct mqd_local_header *header;
    struct mqd_local_submission *submissions;
    uint8_t *replies, *data;
    uint32_t submission_count, reply_bytes;
    uint64_t data_bytes, request_bytes; /* request_bytes: the part of data_bytes for requests, C3 */
    uint32_t request_bytes_max;         /* the broker accepts no larger request */

    uint64_t tail; /* including unpublished submissions */
    uint64_t published;
    uint64_t head; /* wait: the value of submission_head that was handled last */
    uint64_t reply_head;
    uint32_t unread_acks_0_count; /* submissions with acks=0 that the worker has not read yet */
    uint32_t needs_room;          /* wait: a waiter must also return when submission_head moves */
    /* wait: to_client or wake_fd was written, or a call other than mqd_client_poll has taken
     * replies */
    uint32_t signalled;
    uint32_t waiting; /* wait: the number of threads inside mqd_client_wait */
    bool polling;
    struct mqd_submitted *submitted;     /* submission_count of them */
    uint64_t request_tail, request_head; /* byte counters of the ring of requests; both 0 again when it is empty */

    uint8_t length[4]; /* the length word of the next response; `length_arrived` of its bytes have arrived */
    uint32_t length_arrived;
    struct mqd_response *arriving; /* partly received from the reply ring: `arrived` of its bytes */
    uint32_t arrived;
    struct mqd_response *first_response, **last_response;
    struct mqd_response *returned_response; /* the one that mqd_client_response returned last */

    struct mqd_producer *producer; /* one at a time */
    uint32_t producer_serial;

    /* owned by the readers: mappings and queries on the socket */
    void *reader_state;
    void (*reader_state_close)(struct mqd_client *client); /* called by mqd_client_close, also in a forked child */
    char client_id[64];
};

/* 0, or -1 with the error that ended the attachment. */
int mqd_client_check(const struct mqd_client *client);
/* Ends the attachment: EPIPE, or MQD_E_CORRUPT or ENOMEM with a message. Returns -1. */
int mqd_client_fail(struct mqd_client *client, int code, const char *message);
/* Handles the replies that have arrived and the submissions that the worker has consumed. Frees no
 * response that the caller may hold. */
int mqd_client_take_replies(struct mqd_client *client);
/* Queues a submission of bytes in `data`; returns false if the ring is full. The worker does not
 * see it before mqd_client_flush. */
bool mqd_client_push(struct mqd_client *client, uint64_t offset, uint32_t size_bytes, struct mqd_submitted submitted);

/* client/fork.c: the list of all clients of this process. */
void mqd_client_enlist(struct mqd_client *client);
void mqd_client_delist(struct mqd_client *client);

/* client/producer.c: called by the attachment */
/* `bytes` begin with the correlation id; returns -1 if they are not a valid response */
int mqd_producer_on_response(struct mqd_producer *producer, const uint8_t *bytes, uint32_t size_bytes);
void mqd_producer_on_consumed(struct mqd_producer *producer, uint32_t batch); /* acks=0 */
/* sends the batches that had to wait for a response to earlier ones */
void mqd_producer_pump(struct mqd_producer *producer);
/* called when the attachment is closed: the producer has none until it is moved */
void mqd_producer_detach(struct mqd_producer *producer);

#endif
