/* Internal to the files of server/relay. */
#ifndef MQD_RELAY_STATE_H
#define MQD_RELAY_STATE_H

#include "server/reactor.h"
#include "server/relay/relay.h"
#include "server/tls/outgoing.h"
#include "wire/buffer.h"

#define MQD_RELAY_BUCKET_COUNT 256

/* A request in flight: in relay->entries from its encoding to its response. */
struct mqd_relay_entry {
    struct mqd_node node;
    struct mqd_append *append; /* NULL: the outcome is no longer awaited */
    struct mqd_relay *relay;
    uint64_t end; /* stream position after the request's frame */
    /* the end of the client's timeout (acks=all), otherwise the time when the request was created.
     * The connection ends if its oldest request has no response timeout_ms after this */
    int64_t expected_ms;
    uint32_t frame_bytes;
    int32_t correlation_id;
    int32_t partition_index;
    uint8_t topic_id[16];
    int16_t version;
    uint8_t blocks; /* counted in its connection's `block_count` (L4) */
};

struct mqd_relay {
    int32_t leader_node;
    uint32_t leader_worker, lane;
    struct mqd_relay *hash_next;
    uint32_t index, generation; /* the generation counts its connections */
    struct mqd_outgoing socket;
    uint64_t token; /* of the connection */
    uint32_t timeout_ms;
    uint8_t connect_requested; /* a connection was requested from Python */
    int64_t connect_by_ms;     /* valid while `connect_requested` */
    /* the leader's host could not be reached: until this time batches are refused immediately */
    int64_t refuse_until_ms;
    uint32_t correlation_id;        /* of the last request; may wrap during the lifetime of a relay */
    struct mqd_node entries;        /* oldest first */
    struct mqd_relay_entry *unsent; /* the oldest entry not yet given to the socket completely; NULL = none */
    struct mqd_buffer out;          /* stream positions start at out_base */
    uint64_t out_base, out_sent;
    uint8_t *in;
    uint32_t in_bytes;
};

struct mqd_relays {
    struct mqd_relay *relay[MQD_RELAY_COUNT_MAX];
    uint32_t count;
    struct mqd_relay *buckets[MQD_RELAY_BUCKET_COUNT];
    struct mqd_relay_entry *free_entries;
};

/* the whole request was given to the socket */
void mqd_relay_on_entry_sent(struct mqd_reactor *r, struct mqd_relay_entry *entry);
/* removes the oldest entry; the caller completes the returned append; NULL: the outcome is not
 * awaited */
struct mqd_append *mqd_relay_entry_take(struct mqd_reactor *r, struct mqd_relay *relay);
void mqd_relay_complete_append(struct mqd_reactor *r, struct mqd_append *append, int16_t error, const char *message);
/* ends the connection and notifies Python; error < 0: no notification */
void mqd_relay_end(struct mqd_reactor *r, struct mqd_relay *relay, int error, const char *text);
/* the same, with mqd_error_code and mqd_error_message as the reason */
void mqd_relay_end_with_error(struct mqd_reactor *r, struct mqd_relay *relay);

#endif
