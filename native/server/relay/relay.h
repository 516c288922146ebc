/* Produce requests of local clients for partitions that other hosts lead: they are sent on to the
 * leader's worker and answered as if the batch had been written here.
 *
 * A batch that a local client submitted for such a partition becomes a Produce request of its own
 * on a mutually authenticated connection (plain text, or TLS) that Python has opened. The request
 * keeps the client's version, client id, transactional id, acks, timeout and bytes, and so its
 * producer id, epoch and sequence. The response completes the append.
 *
 *   connection  wanted -> MQD_EVENT_RELAY_REQUESTED -> mqd_reactor_relay_put or
 *               mqd_reactor_relay_refuse
 *   append      copied after the unsent bytes -> one send a turn -> responses, in order ->
 *               mqd_append_done
 *
 * There is one relay for each worker of a leader's host in each lane. Transactional batches have a
 * lane of their own, because the leader reads nothing more from a connection while it verifies the
 * transaction of a batch.
 *
 * Invariants
 *   L1  batches for one partition are sent in the order of their arrival, and their outcomes
 *       arrive in that order.
 *   L2  the outcome is: the leader's response; NOT_LEADER_OR_FOLLOWER if the request was not given
 *       to the socket completely, and therefore not written; REQUEST_TIMED_OUT if it was given to
 *       the socket completely and the connection ended without a response. The client retries both
 *       errors with the same sequence.
 *   L3  when the metadata names another leader, batches that still wait for the old leader's
 *       response are completed with NOT_LEADER_OR_FOLLOWER.
 *   L4  memory: only bytes not yet given to the socket, counted in heap_bytes. While a relay has
 *       more than MQD_RELAY_UNSENT_BYTES of them, each client's connection adds at most one request
 *       and is not read until that request is sent. Sent requests keep no bytes here, except those
 *       that TLS has encrypted (MQD_TLS_SCRATCH_BYTES).
 *   L5  a response is untrusted until checked: anything except a response to the oldest request,
 *       about its partition, ends the connection.
 *   L6  acks=0 is sent as acks=1: on an error the leader would otherwise end the connection, which
 *       other clients use too. The outcome of such a batch is not reported to its client.
 *   L7  a batch that waits for another host does not hold up other responses to its client
 *       (respond_past_relays in server/request.c).
 * Concurrency: the reactor's thread.
 */
#ifndef MQD_RELAY_H
#define MQD_RELAY_H

#include "base/list.h"
#include "native.h"
#include "wire/wire.h"

struct mqd_append;
struct mqd_command;
struct mqd_reactor;
struct mqd_topic;

#define MQD_RELAY_UNSENT_BYTES (1u << 20)
#define MQD_RELAY_RESPONSE_BYTES_MAX (64u << 10) /* for one partition, with its record errors */

/* Takes over an append of a local client if another host leads its partition. False: not taken. */
bool mqd_relay_append(struct mqd_reactor *r, struct mqd_append *append, const struct mqd_topic *topic,
                      const struct mqd_produce_partition *partition);
/* called when the append is done: a response that arrives later is ignored */
void mqd_relay_untrack(struct mqd_reactor *r, struct mqd_append *append);
void mqd_relay_on_topic_changed(struct mqd_reactor *r, const struct mqd_topic *topic); /* L3 */
/* Handles the commands put, refuse and remove; emits MQD_EVENT_DONE. */
void mqd_relay_command(struct mqd_reactor *r, const struct mqd_command *command);
void mqd_relay_on_event(struct mqd_reactor *r, uint64_t value, uint32_t flags); /* from mqd_poll: a socket */
void mqd_relay_on_step(struct mqd_reactor *r, uint64_t value); /* from the pool: a step of the TLS handshake */
void mqd_relays_read(struct mqd_reactor *r);                   /* once a turn: receives responses */
/* called once a turn, after clients' requests were read: sends requests and handles timeouts */
void mqd_relays_run(struct mqd_reactor *r);
int64_t mqd_relays_next_ms(const struct mqd_reactor *r); /* like mqd_fetchers_next_ms */
void mqd_relays_close(struct mqd_reactor *r);            /* when the reactor stops: closes the connections */
void mqd_relays_destroy(struct mqd_reactor *r);

/* ---- server/relay/wire.c ---- */

struct mqd_relay_request {
    int32_t correlation_id;
    int16_t version;
    struct mqd_text client_id, transactional_id;
    int16_t acks;
    int32_t timeout_ms;
    struct mqd_text topic;
    const uint8_t *topic_id;
    int32_t partition_index;
    const uint8_t *records;
    uint32_t records_bytes;
};
/* Appends the complete frame. */
void mqd_relay_encode(struct mqd_buffer *out, const struct mqd_relay_request *request);

struct mqd_relay_response {
    int32_t partition_index;
    int16_t error;
    int64_t base_offset, log_append_time_ms, log_start_offset;
    uint32_t record_error_count; /* at most MQD_RECORD_ERROR_COUNT_MAX are kept */
    int32_t record_errors[MQD_RECORD_ERROR_COUNT_MAX];
    struct mqd_text record_message, message; /* size_bytes -1 = none */
};
/* Parses a Produce response for one partition, without its length word. -1: it is malformed; the
 * reason is in mqd_error_message. */
int mqd_relay_parse(const uint8_t *frame, uint32_t size_bytes, int16_t version, struct mqd_relay_response *out);

#endif
