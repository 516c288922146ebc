/* Shared by the files of this directory: what one Fetch request or session reads, and the position
 * of each of its partitions. Private to the reactor's thread. */
#ifndef MQD_FETCH_H
#define MQD_FETCH_H

#include "base/list.h"
#include "log/reader/reader.h"
#include "log/views/view_cache.h"
#include "server/request.h"
#include "server/topics.h"
#include "wire/api.h"

struct mqd_reactor;

#define MQD_SESSION_TABLE_COUNT 65536

/* The number of bytes from `offset` to `end_offset`, valid while the segments are unchanged.
 * Without it, a fetch that waits for min_bytes would count all bytes again on each append. */
struct mqd_counted_bytes {
    int64_t offset, end_offset;
    uint64_t generation, bytes; /* bytes == 0: not counted */
    uint32_t slot;
};

struct mqd_fetch_entry {
    struct mqd_node waiter; /* in reactor->waiting[slot] */
    struct mqd_node ready;  /* in set->ready */
    struct mqd_fetch_set *set;
    struct mqd_topic *topic; /* referenced; NULL: unknown topic; the response echoes `key` */
    struct mqd_fetch_entry *hash_next;
    uint32_t order; /* index in set->entries */
    int32_t partition_index;
    int64_t fetch_offset;
    /* of a view: it selects nothing from fetch_offset up to, but not including, fetch_offset +
     * skipped (server/fetch/view.c) */
    int64_t skipped;
    int32_t skipped_epoch;
    bool has_skipped_batch; /* skipped_batch holds the header of the last batch that was skipped */
    uint8_t skipped_batch[MQD_BATCH_HEADER_BYTES];
    int32_t bytes_max;
    int32_t current_leader_epoch;
    int32_t last_fetched_epoch;
    int64_t high_watermark; /* for a follower: the leader's high watermark to report */
    struct mqd_cursor cursor;
    struct mqd_counted_bytes counted;
    int64_t sent_high_watermark, sent_log_start, sent_last_stable;
    int16_t sent_error;
    uint8_t sent_once, forgotten;
    uint32_t heap_bytes;
    /* outcome of the running evaluation */
    struct mqd_fetch_outcome outcome;
    struct mqd_range range;
    struct mqd_aborted_list aborted; /* read_committed: transactions that overlap the range */
    struct mqd_filtered filtered;    /* of a view: the selected batches, instead of the range */
    struct mqd_topic_key key;        /* as the client named it; the name is stored in the topic or after the entry */
};

/* Positions of sequential readers without a session: their next request finds its place without a
 * search. Direct-mapped; a collision costs a lookup. */
#define MQD_CURSOR_CACHE_COUNT 1024
struct mqd_cached_cursor {
    uint8_t topic_id[16];
    int32_t partition_index;
    struct mqd_cursor cursor;
};

struct mqd_fetch_set {
    struct mqd_node ready;
    struct mqd_node woken;        /* in reactor->woken */
    struct mqd_node session_node; /* in reactor->sessions, least recently used first */
    struct mqd_fetch_entry **entries;
    uint32_t entry_count, entry_capacity;
    struct mqd_fetch_entry **buckets; /* sessions: by (topic, partition) */
    uint32_t bucket_count;
    struct mqd_request *request; /* the fetch being evaluated or waiting on this set, or NULL */
    uint32_t request_count;      /* requests that refer to the set: it is not freed before they end */
    struct mqd_fetch_entry **included;
    uint32_t included_count, included_capacity;
    uint64_t heap_bytes; /* including its entries */
    int32_t session_id;  /* 0 = for one request only */
    int32_t session_epoch;
    bool by_id;
    /* of a follower: there are no records to send, but there is a high watermark or log start that
     * it does not know yet */
    bool watermarks_changed;
    bool is_local;      /* of a local client, which may use another replica when the one here lacks the data */
    bool leader_only;   /* of a client that cannot read from followers */
    int32_t replica_id; /* of a follower on another host; -1 = of a client */
    int64_t replica_epoch;
    uint64_t rack_hash; /* of the consumer's rack (server/fetch/nearest.c); 0 = none, or the rack of this host */
    int64_t last_used_ms;
    /* of a session: its client's principal; NULL = the client has not authenticated */
    char *principal;
    uint16_t principal_bytes;
};

/* server/fetch/fetch.c, server/fetch/response.c, server/fetch/session.c */
void mqd_fetch_on_request(struct mqd_reactor *r, struct mqd_connection *c, const struct mqd_request_header *header,
                          const uint8_t *body, uint32_t size_bytes);
/* `request` must be the oldest one of its connection */
void mqd_fetch_evaluate(struct mqd_reactor *r, struct mqd_request *request, bool expired);
void mqd_fetch_encode(struct mqd_reactor *r, struct mqd_request *request);
void mqd_fetch_detach(struct mqd_reactor *r, struct mqd_request *request);
/* Appends the range to r->scratch: its bytes, or a chunk that refers to them, whose size is added
 * to *file_bytes. Takes over the range's reference. Returns false if the range cannot be read. */
bool mqd_fetch_put_range(struct mqd_reactor *r, const struct mqd_connection *c, struct mqd_range *range,
                         uint64_t *file_bytes);

/* The offset at which the entry continues to read. */
static inline int64_t mqd_fetch_position(const struct mqd_fetch_entry *entry)
{
    return entry->fetch_offset + entry->skipped;
}

/* server/fetch/view.c */
#define MQD_VIEW_SKIP_COUNT 1024
struct mqd_view_skip {
    uint64_t topic_serial;
    int32_t partition_index, leader_epoch;
    int64_t offset, skipped;
    bool has_batch; /* like has_skipped_batch */
    uint8_t batch[MQD_BATCH_HEADER_BYTES];
};
struct mqd_views {
    struct mqd_view_skip skips[MQD_VIEW_SKIP_COUNT];
    struct mqd_view_cache *cache;        /* NULL: no view has been read yet */
    struct mqd_view_cache_stats counted; /* already added to the worker's counters */
};
/* Sets `skipped` to what this worker remembers for the entry's offset in this leader epoch. Called
 * before the entry is evaluated. */
void mqd_view_restore_skipped(struct mqd_reactor *r, struct mqd_fetch_entry *entry, int32_t leader_epoch);
/* Passes the entry's range to a thread of the pool; this job counts in request->pending until it is
 * done. Returns false if the pool is full now, or there is no memory. */
bool mqd_view_begin(struct mqd_reactor *r, struct mqd_request *request, struct mqd_fetch_entry *entry);
void mqd_view_on_done(struct mqd_reactor *r, uint64_t id);
/* Called when the view selected no records: adds an empty batch, which moves the client's position
 * past the records that were not selected, if the client skips batches without records. */
void mqd_view_add_empty(const struct mqd_request *request, struct mqd_fetch_entry *entry);
/* Appends the batches that the view selected to r->scratch. */
void mqd_view_put(struct mqd_reactor *r, struct mqd_fetch_entry *entry);

/* server/fetch/range.c */
static inline int64_t mqd_fetch_readable_end(const struct mqd_request *request, const struct mqd_positions *positions)
{
    return request->isolation_level ? positions->last_stable_offset : positions->high_watermark;
}
/* Fills in the entry's range, outcome.error and *positions, and deducts what it found from the
 * budget. *no_range_yet: no range has been found for this response yet, so one batch may exceed the
 * budget. */
void mqd_fetch_find_range(struct mqd_reactor *r, struct mqd_request *request, struct mqd_fetch_entry *entry,
                          uint32_t slot, struct mqd_positions *positions, int64_t *budget, bool *no_range_yet);
void mqd_fetch_find_aborted(struct mqd_reactor *r, struct mqd_request *request, struct mqd_fetch_entry *entry,
                            uint32_t slot, struct mqd_positions *positions);
/* Without a session: keeps the entry's cursor for the next fetch at this position. */
void mqd_fetch_keep_cursor(struct mqd_reactor *r, const struct mqd_fetch_entry *entry);
/* releases the range and its references */
void mqd_fetch_entry_release(struct mqd_reactor *r, struct mqd_fetch_entry *entry);
/* the memory that the request holds for the entry's aborted transactions (mqd_request_charge) */
static inline uint64_t mqd_fetch_aborted_bytes(const struct mqd_fetch_entry *entry)
{
    return entry->aborted.count * sizeof *entry->aborted.entries;
}
/* Makes the partition's directory known to this worker's reader. */
void mqd_fetch_ensure_path(struct mqd_reactor *r, const struct mqd_topic *topic, int32_t partition_index,
                           uint32_t slot);

/* server/fetch/fetch.c again */
void mqd_fetch_wake_slot(struct mqd_reactor *r, uint32_t slot);
/* every partition of the set is evaluated again */
void mqd_fetch_wake_set(struct mqd_reactor *r, struct mqd_fetch_set *set);
void mqd_fetch_run_woken(struct mqd_reactor *r);
struct mqd_owned;
/* wakes the followers' fetches that wait for a partition of this worker */
void mqd_fetch_wake_followers(struct mqd_reactor *r, struct mqd_owned *owned);
/* Returns the entry's error or 0, its slot, and its partition's current positions. Also records a
 * follower's position. */
int16_t mqd_fetch_entry_check_and_record(struct mqd_reactor *r, struct mqd_fetch_entry *entry, uint32_t *slot_index,
                                         struct mqd_positions *positions);
void mqd_fetch_on_read_ahead(struct mqd_reactor *r, uint64_t id, int result);
struct mqd_fetch_set *mqd_fetch_set_new(struct mqd_reactor *r);
void mqd_fetch_set_free(struct mqd_reactor *r, struct mqd_fetch_set *set);
struct mqd_fetch_entry *mqd_fetch_set_put(struct mqd_reactor *r, struct mqd_fetch_set *set,
                                          const struct mqd_topic_key *key, const struct mqd_fetch_partition *partition);
bool mqd_fetch_entry_resolve(struct mqd_reactor *r, struct mqd_fetch_entry *entry);
void mqd_fetch_set_remove(struct mqd_fetch_set *set, const struct mqd_topic_key *key, int32_t partition_index);
void mqd_fetch_set_compact(struct mqd_reactor *r, struct mqd_fetch_set *set);
/* Stores the session that the request names in *set, with its epoch advanced. Otherwise stores NULL
 * and *full = true: the caller makes a new fetch set and, if *create is true, a session from it. An
 * epoch of 0 or -1 ends the session that the request names. Returns 0 or a Kafka error code. */
int16_t mqd_session_begin_request(struct mqd_reactor *r, const struct mqd_connection *c,
                                  const struct mqd_fetch_request *fetch, struct mqd_fetch_set **set, bool *full,
                                  bool *create);
void mqd_session_create(struct mqd_reactor *r, const struct mqd_connection *c, struct mqd_fetch_set *set);
/* whether the set is a session that the connection's principal may use */
bool mqd_session_is_usable_by(const struct mqd_fetch_set *set, const struct mqd_connection *c);
void mqd_session_remove(struct mqd_reactor *r, struct mqd_fetch_set *set);

#endif
