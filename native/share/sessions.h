/* Share sessions (KIP-932) of one worker: which partitions a member of a group reads here, and the
 * epoch of its next request. Pure, like all of share/.
 *
 * A group and a member identify a session. A request with epoch 0 opens it and replaces an existing
 * one; the next requests have the epochs 1 to 2^31-1, then 1 again; epoch -1 ends it. The session
 * belongs to the connection that opened it, and ends with that connection.
 *
 * Invariants
 *   E1  a session has each share-partition at most once; they are in order of topic id and index.
 *   E2  a request that is refused changes nothing: neither the epoch nor the partitions.
 * Bounds: partition_count_max partitions in a session, bytes_max for all sessions; the owner limits
 * the number of sessions.
 * Concurrency: one thread.
 */
#ifndef MQD_SHARE_SESSIONS_H
#define MQD_SHARE_SESSIONS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/list.h"
#include "wire/wire.h"

#define MQD_SHARE_SESSION_BUCKET_COUNT 1024 /* a power of two */

struct mqd_share_entry {
    uint8_t topic_id[16];
    int32_t partition_index;
    uint32_t slot : 31;           /* slot under which this session was reported to the partition's owner */
    uint32_t unreported : 1;      /* added after the session was opened, and in no response since then */
    uint64_t reported_generation; /* generation of that owner + 1; 0 = it was not reported */
};

struct mqd_share_session {
    struct mqd_share_session *next; /* in its bucket */
    struct mqd_node node;           /* of the connection's sessions */
    uint64_t hash;                  /* of group id and member id */
    uint64_t member;                /* hash of the member id alone: identifies the member to owners */
    uint64_t number;                /* unique among sessions */
    int32_t epoch;                  /* of the next request */
    int32_t lock_ms;                /* last reported by an owner */
    uint32_t entry_count, entry_capacity;
    uint32_t request_number; /* of the next request, which begins with part request_number % part_count */
    struct mqd_share_entry *entries;
    uint32_t group_bytes, member_bytes;
    uint8_t text[]; /* group id, member id */
};

struct mqd_share_sessions {
    struct mqd_share_session *buckets[MQD_SHARE_SESSION_BUCKET_COUNT];
    uint32_t count, partition_count_max;
    uint64_t opened_count; /* sessions opened so far */
    uint64_t bytes, bytes_max;
};

enum mqd_share_session_need { MQD_SHARE_MAY_OPEN, MQD_SHARE_MUST_EXIST };

uint64_t mqd_share_member_hash(const void *bytes, uint32_t size_bytes);
/* NULL: there is none */
struct mqd_share_session *mqd_share_session_find(const struct mqd_share_sessions *sessions, struct mqd_text group,
                                                 struct mqd_text member);
/* The session with this hash and number; NULL: there is none */
struct mqd_share_session *mqd_share_session_find_by_number(const struct mqd_share_sessions *sessions, uint64_t hash,
                                                           uint64_t number);
/* Checks whether a request with this epoch may use `session` (NULL = there is none).
 * MQD_SHARE_MAY_OPEN: a ShareFetch, whose epoch 0 opens a session. Returns 0, 122
 * SHARE_SESSION_NOT_FOUND or 123 INVALID_SHARE_SESSION_EPOCH. After 0, the caller must call
 * mqd_share_session_advance_epoch. */
int16_t mqd_share_session_check(const struct mqd_share_session *session, int32_t epoch,
                                enum mqd_share_session_need need);
void mqd_share_session_advance_epoch(struct mqd_share_session *session);
/* Opens a session whose next epoch is 1; no session of that group and member may exist. It is
 * appended to `connection_sessions`, the connection's list. NULL: out of memory. */
struct mqd_share_session *mqd_share_session_open(struct mqd_share_sessions *sessions, struct mqd_text group,
                                                 struct mqd_text member, struct mqd_node *connection_sessions);
void mqd_share_session_close(struct mqd_share_sessions *sessions, struct mqd_share_session *session);
/* Returns the partition's entry; adds it if there is none. NULL: too many partitions, or no
 * memory. */
struct mqd_share_entry *mqd_share_session_put(struct mqd_share_sessions *sessions, struct mqd_share_session *session,
                                              const uint8_t topic_id[16], int32_t partition_index);
struct mqd_share_entry *mqd_share_session_get(const struct mqd_share_session *session, const uint8_t topic_id[16],
                                              int32_t partition_index);
void mqd_share_session_remove(struct mqd_share_session *session, struct mqd_share_entry *entry);
/* Aborts if an invariant is broken. For tests. */
void mqd_share_sessions_verify(const struct mqd_share_sessions *sessions);

#endif
