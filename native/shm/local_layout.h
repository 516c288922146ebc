/* What a local client and its broker share: the messages on the Unix socket, and one sealed memfd.
 *
 * A client connects to the broker's client socket (SOCK_SEQPACKET), says hello and gets, from the
 * worker that will serve it, a welcome with four descriptors: the memfd, `to_worker` (an eventfd,
 * to be written), `to_client` (to be read), the control segment (opened read-only). From then on
 * Kafka requests go through the memfd, and the socket is the proof of life in both directions: its
 * end is the end of the attachment.
 *
 *   memfd (sealed: SHRINK, GROW, SEAL; so nobody can take a page away from the other)
 *     0                    struct mqd_local_header           4 KiB
 *     submissions_offset   struct mqd_local_submission[]     client -> worker: which bytes of `data` are a request.
 * Ring of submission_count, a power of two replies_offset       bytes                             worker -> client:
 * responses as on a TCP connection (length word first). Ring of reply_bytes, a power of two data_offset          bytes
 * the client's own, to arrange as it likes; the worker only reads
 *
 * Invariants
 *   A1  the worker believes nothing in the memfd: it reads each word once, checks its own copy,
 *       copies a request into its own memory before it looks at it, and never writes anything but
 *       its own words and the reply ring.
 *   A2  counters (tails and heads) only grow; index = counter & (count - 1). A counter that is
 *       further from its counterpart than the ring is long ends the attachment.
 *   A3  submission_head passes a submission after its bytes were copied: from then on the client
 *       may overwrite them.
 *   A4  sleep: the client publishes, full fence, then looks at the worker's `sleeping` word in the
 *       control segment and writes `to_worker` if it is set; the worker stores `sleeping`, full
 *       fence, looks at all its attachments again, blocks. The other way round by `client_sleeping`
 *       (the worker exchanges it to 0, then writes `to_client`): the worker looks at it after it
 *       moved reply_tail (wakes when it is not 0) and after it moved submission_head (wakes when it
 *       is MQD_LOCAL_SLEEP_ROOM).
 *   A5  `to_client` is the read end of a pipe: eight bytes for each wake-up, of no meaning; read it
 *       until it is empty. No eventfd, for O_NONBLOCK of that would be the client's to take away,
 *       and the worker would block in a write. `to_worker` the worker only polls. A client's
 *       threads wake each other by a descriptor of their own.
 *   A6  a Fetch whose max_bytes is 0 asks for positions only: it parks and answers as any other
 *       (leave the partitions' max_bytes as usual), but without records. With read_committed the
 *       aborted transactions are those from the fetch offset to the answer's last_stable_offset,
 *       which is lower than the partition's when they are many.
 *   A7  answers may overtake those to a Produce whose partition another host leads; which request
 *       they are of, the correlation id says.
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
#define MQD_LOCAL_FD_COUNT 4 /* of a welcome: memfd, to_worker, to_client, control segment */

#define MQD_LOCAL_SLEEP_REPLY 1u /* client_sleeping: until reply_tail moves */
#define MQD_LOCAL_SLEEP_ROOM 2u  /* until reply_tail or submission_head moves */

struct mqd_local_header {
    /* lines 0 and 1: the worker, before the client sees them */
    uint64_t magic;
    uint32_t layout_version;
    uint32_t worker;
    uint64_t abi_hash; /* mqd_local_abi_hash() */
    uint64_t total_bytes;
    uint64_t submissions_offset, replies_offset, data_offset, data_bytes;
    uint32_t submission_count, reply_bytes;
    uint32_t request_bytes_max; /* socket.request.max.bytes: a larger submission ends the attachment */
    uint8_t pad0[128 - 76];
    /* line 2: the client */
    uint64_t submission_tail;
    uint8_t pad1[56];
    /* line 3: the client; client_sleeping is also exchanged by the worker */
    uint64_t reply_head;
    uint32_t client_sleeping;
    uint8_t pad2[52];
    /* line 4: the worker */
    uint64_t submission_head;
    uint8_t pad3[56];
    /* line 5: the worker */
    uint64_t reply_tail;
    /* a reply did not fit: the client, having moved reply_head, full fence, writes `to_worker` if
     * this is set */
    uint32_t worker_wants_room;
    uint8_t pad4[52];
    uint8_t pad5[4096 - 384];
};

struct mqd_local_submission {
    uint64_t offset;     /* in `data` */
    uint32_t size_bytes; /* of a whole request frame, without its length word */
    uint32_t reserved;   /* 0 */
};

_Static_assert(sizeof(struct mqd_local_header) == 4096, "one page");
_Static_assert(sizeof(struct mqd_local_submission) == 16, "four to a cache line");

/* ---- on the socket, one struct a packet, host byte order ---- */

/* client -> acceptor */
struct mqd_local_hello {
    uint64_t magic;
    uint32_t layout_version;
    uint32_t submission_count; /* wanted; the broker may give less than wanted of each */
    uint64_t abi_hash;
    uint64_t data_bytes;
    uint32_t reply_bytes;
    uint32_t reserved;
    char client_id[64]; /* NUL-terminated; for logs */
    /* NUL-terminated; "ADDRESS@PORT.net-NAMESPACE": a broker that does not listen there refuses.
     * Empty: the user has named the socket. */
    char server[72];
};

/* worker -> client, with MQD_LOCAL_FD_COUNT descriptors */
struct mqd_local_welcome {
    uint64_t magic;
    uint64_t total_bytes; /* of the memfd; everything else stands in its header */
    uint32_t worker;
    int32_t error;    /* 0, or a MQD_E_ code or errno: refused, no descriptors, and the socket ends */
    char reason[232]; /* of the refusal, with the way out; NUL-terminated */
};

enum mqd_local_ask_kind { MQD_LOCAL_ASK_SEGMENT = 1 };
/* client -> worker: where is this offset? Answered in order. At most 16 unanswered. */
struct mqd_local_ask {
    uint32_t kind;
    uint32_t number; /* echoed */
    uint8_t topic_id[16];
    int32_t partition_index;
    uint32_t reserved;
    int64_t offset; /* below the high watermark, or at it in the active segment */
};

/* worker -> client; with one descriptor (the .log file, read-only) when error is 0 */
struct mqd_local_segment {
    uint32_t kind; /* of the question */
    uint32_t number;
    /* a Kafka error code: 1 OFFSET_OUT_OF_RANGE, 3 UNKNOWN_TOPIC_OR_PARTITION, 56
     * KAFKA_STORAGE_ERROR, 100 UNKNOWN_TOPIC_ID... */
    int32_t error;
    uint32_t slot;       /* of the partition in the control segment */
    int64_t base_offset; /* of the segment: its name */
    /* of the segment after it, INT64_MAX = it is the active one, or more of it will become readable */
    int64_t next_base_offset;
    /* of the slot; positions in this file are good as long as it is open, whatever becomes of the
     * name */
    uint64_t segments_generation;
    /* of the batch that holds `offset`, or of the end of what is readable when offset is the high
     * watermark */
    uint32_t position;
    uint32_t size_bytes; /* readable bytes of the file now */
    uint32_t map_bytes;  /* the file never grows beyond */
    uint32_t reserved[3];
};

_Static_assert(sizeof(struct mqd_local_hello) == 176, "packet");
_Static_assert(sizeof(struct mqd_local_welcome) == 256, "packet");
_Static_assert(sizeof(struct mqd_local_ask) == 40, "packet");
_Static_assert(sizeof(struct mqd_local_segment) == 64, "packet");

/* Of everything here and of the control segment's layout: a client of another build is refused. */
uint64_t mqd_local_abi_hash(void);

#endif
