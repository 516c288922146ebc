/* Data shared by a local client and its broker: the messages on the Unix socket, and one sealed
 * memfd.
 *
 * A client connects to the broker's client socket (SOCK_SEQPACKET) and sends hello. The worker that
 * will serve it sends a welcome with four descriptors: the memfd, `to_worker` (an eventfd, which
 * the client writes), `to_client` (which the client reads), the control segment (opened read-only).
 * From then on Kafka requests go through the memfd, and the socket shows that the other side is
 * alive: when it closes, the attachment ends.
 *
 * The memfd (sealed: SHRINK, GROW, SEAL, so neither side can take pages away from the other):
 *   0                   struct mqd_local_header, 4 KiB
 *   submissions_offset  struct mqd_local_submission[], client -> worker: which bytes of `data` are
 *                       a request. Ring of submission_count, a power of two
 *   replies_offset      bytes, worker -> client: responses as on a TCP connection (length word
 *                       first). Ring of reply_bytes, a power of two
 *   data_offset         bytes, which the client arranges as it chooses; the worker only reads them
 *
 * Invariants
 *   A1  the worker trusts nothing in the memfd: it reads each word once, checks its own copy,
 *       copies a request into its own memory before it parses it, and writes nothing but its own
 *       words and the reply ring.
 *   A2  counters (tails and heads) only increase; index = counter & (count - 1). If the distance
 *       between two counters exceeds the length of the ring, the attachment ends.
 *   A3  the worker moves submission_head past a submission only after it has copied the bytes; from
 *       then on the client may overwrite them.
 *   A4  sleep: the client publishes, full fence, then reads the worker's `sleeping` word in the
 *       control segment and writes `to_worker` if it is set; the worker stores `sleeping`, full
 *       fence, checks all its attachments again, blocks. In the other direction the word is
 *       `client_sleeping`. After moving reply_tail the worker wakes the client if the word is not
 *       0; after moving submission_head it wakes the client if the word is MQD_LOCAL_SLEEP_ROOM. To
 *       wake the client, the worker exchanges the word to 0, then writes `to_client`.
 *   A5  `to_client` is the read end of a pipe: eight bytes for each wake-up, without meaning; read
 *       it until it is empty. It is not an eventfd, because the client could clear its O_NONBLOCK
 *       flag and the worker would block in a write. The worker only polls `to_worker`. A client's
 *       threads wake each other by a descriptor of their own.
 *   A6  a Fetch whose max_bytes is 0 requests positions only: it waits and is answered like any
 *       other (leave the partitions' max_bytes as usual), but without records. With read_committed
 *       the response lists the aborted transactions from the fetch offset to its
 *       last_stable_offset, which is lower than the partition's if there are too many of them.
 *   A7  if another host leads the partition of a Produce request, the response may come after those
 *       to later requests; the correlation id identifies the request.
 */
#ifndef MQD_LOCAL_LAYOUT_H
#define MQD_LOCAL_LAYOUT_H

#include <stdint.h>

#define MQD_LOCAL_MAGIC 0x314c434f4c44514dull /* "MQDLOCL1" */
#define MQD_LOCAL_LAYOUT_VERSION 2u
#define MQD_LOCAL_SUBMISSION_COUNT_MAX 65536u
#define MQD_LOCAL_DATA_BYTES_MIN (1ull << 16)
#define MQD_LOCAL_DATA_BYTES_MAX (1ull << 30)
#define MQD_LOCAL_REPLY_BYTES_MIN (1u << 12)
#define MQD_LOCAL_REPLY_BYTES_MAX (16u << 20)
#define MQD_LOCAL_FD_COUNT 4 /* sent with a welcome: memfd, to_worker, to_client, control segment */

/* Values of client_sleeping: what wakes the client. 0 = it is awake. */
#define MQD_LOCAL_SLEEP_REPLY 1u /* reply_tail moves */
#define MQD_LOCAL_SLEEP_ROOM 2u  /* reply_tail or submission_head moves */

struct mqd_local_header {
    /* lines 0 and 1: written by the worker before the client sees them */
    uint64_t magic;
    uint32_t layout_version;
    uint32_t worker;
    uint64_t abi_hash; /* mqd_local_abi_hash() */
    uint64_t total_bytes;
    uint64_t submissions_offset, replies_offset, data_offset, data_bytes;
    uint32_t submission_count, reply_bytes;
    uint32_t request_bytes_max; /* socket.request.max.bytes: a larger submission ends the attachment */
    uint8_t pad0[128 - 76];
    /* line 2: written by the client */
    uint64_t submission_tail;
    uint8_t pad1[56];
    /* line 3: written by the client; client_sleeping is also exchanged by the worker */
    uint64_t reply_head;
    uint32_t client_sleeping;
    uint8_t pad2[52];
    /* line 4: written by the worker */
    uint64_t submission_head;
    uint8_t pad3[56];
    /* line 5: written by the worker */
    uint64_t reply_tail;
    /* set when a reply did not fit. The client reads it after moving reply_head and a full fence;
     * if it is set, the client writes `to_worker` */
    uint32_t worker_needs_room;
    uint8_t pad4[52];
    uint8_t pad5[4096 - 384];
};

struct mqd_local_submission {
    uint64_t offset;     /* in `data` */
    uint32_t size_bytes; /* of a complete request frame, without its length word */
    uint32_t reserved;   /* 0 */
};

_Static_assert(sizeof(struct mqd_local_header) == 4096, "one page");
_Static_assert(sizeof(struct mqd_local_submission) == 16, "four to a cache line");

/* ---- on the socket, one struct a packet, host byte order ---- */

/* client -> acceptor */
struct mqd_local_hello {
    uint64_t magic;
    uint32_t layout_version;
    uint32_t submission_count; /* requested sizes; the broker may grant less of each */
    uint64_t abi_hash;
    uint64_t data_bytes;
    uint32_t reply_bytes;
    uint32_t reserved;
    char client_id[64]; /* NUL-terminated; for logs */
    /* NUL-terminated; "ADDRESS@PORT.net-NAMESPACE": a broker that does not listen there refuses
     * the client. Empty: the user gave the socket's path. */
    char server[72];
};

/* worker -> client, with MQD_LOCAL_FD_COUNT descriptors */
struct mqd_local_welcome {
    uint64_t magic;
    uint64_t total_bytes; /* of the memfd; everything else is in its header */
    uint32_t worker;
    /* 0; or an MQD_E_ code or errno: the client is refused, gets no descriptors, and the socket is
     * closed */
    int32_t error;
    char reason[232]; /* the reason of the refusal, and a remedy; NUL-terminated */
};

enum mqd_local_query_kind { MQD_LOCAL_QUERY_SEGMENT = 1 };
/* client -> worker: asks where an offset is stored. Queries are answered in order; at most 16 may
 * be unanswered. */
struct mqd_local_query {
    uint32_t kind;
    uint32_t number; /* returned in the response */
    uint8_t topic_id[16];
    int32_t partition_index;
    uint32_t reserved;
    int64_t offset; /* below the high watermark, or at it in the active segment */
};

/* value of segments_generation: a compaction is replacing files, so it is not known to which
 * generation the opened file belongs */
#define MQD_LOCAL_CHANGING UINT64_MAX
/* worker -> client; with one descriptor (the .log file, read-only) when error is 0 */
struct mqd_local_segment {
    uint32_t kind; /* of the query */
    uint32_t number;
    /* a Kafka error code: 1 OFFSET_OUT_OF_RANGE, 3 UNKNOWN_TOPIC_OR_PARTITION, 56
     * KAFKA_STORAGE_ERROR, 100 UNKNOWN_TOPIC_ID... */
    int32_t error;
    uint32_t slot;       /* of the partition in the control segment */
    int64_t base_offset; /* of the segment: the file's name */
    /* of the next segment; INT64_MAX = this segment is active, or more of it will become
     * readable */
    int64_t next_base_offset;
    /* of the slot when the file was opened, or MQD_LOCAL_CHANGING. Positions in this file stay
     * valid as long as it is open, even when it is unlinked */
    uint64_t segments_generation;
    /* of the batch that holds `offset`, or the end of the readable bytes when offset is the
     * high watermark */
    uint32_t position;
    uint32_t size_bytes; /* readable bytes of the file now */
    uint32_t map_bytes;  /* the file never grows beyond this */
    uint32_t reserved[3];
};

_Static_assert(sizeof(struct mqd_local_hello) == 176, "packet");
_Static_assert(sizeof(struct mqd_local_welcome) == 256, "packet");
_Static_assert(sizeof(struct mqd_local_query) == 40, "packet");
_Static_assert(sizeof(struct mqd_local_segment) == 64, "packet");

/* Hash of everything here and of the control segment's layout: a client from another build is
 * refused. */
uint64_t mqd_local_abi_hash(void);

#endif
