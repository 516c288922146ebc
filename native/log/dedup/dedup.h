/* Deduplication by an id, for topics with dedup.window.ms: a record is not written if an earlier
 * record of the partition within the window has the same id. The id is the value of the record's
 * header that dedup.header names.
 *
 * The ids are a function of the log: leader, follower and recovery read them from the same batches
 * (log/recovery/load_dedup_ids.c), so a new leader knows the same ids as the old one. For this, the
 * configuration requires uncompressed batches with the broker's time (LogAppendTime).
 *
 * Invariants
 *   D1  two committed records with the same id in a partition were appended more than
 *       dedup.window.ms apart.
 *   D2  a record is left out only if a committed record, or an earlier one of its own transaction,
 *       has its id. If a record of another, undecided transaction has the id, the batch is refused
 *       with a retriable error.
 *   D3  a batch keeps its offsets and sequence numbers, whatever records are left out: their
 *       offsets are missing, as after compaction.
 */
#ifndef MQD_DEDUP_H
#define MQD_DEDUP_H

#include "log/dedup/ids.h"

#define MQD_DEDUP_HEADER_BYTES_MAX 64 /* with its NUL */

struct mqd_dedup {
    struct mqd_ids ids;
    int64_t window_ms;
    int64_t last_ms; /* the latest time seen; the clock may jump back */
    char header[MQD_DEDUP_HEADER_BYTES_MAX];
    uint32_t header_bytes;
};

struct mqd_dedup_taken {
    uint32_t duplicate_count;      /* records whose ids are known; they are left out */
    int64_t first_original_offset; /* offset of the record that the first duplicate repeats */
    int64_t original_end_offset;   /* highest offset of a record that a duplicate repeats, plus 1 */
    /* the batch without those records (malloc'd; the caller frees); NULL: the batch is unchanged */
    uint8_t *bytes;
    int32_t size_bytes;  /* of `bytes` */
    const char *message; /* with an error; static */
};

/* NULL: no memory (mqd_error set). */
struct mqd_dedup *mqd_dedup_new(const struct mqd_log_options *options);
void mqd_dedup_free(struct mqd_dedup *dedup);
/* Whether these options name the header from which `dedup` takes the ids. */
bool mqd_dedup_matches(const struct mqd_dedup *dedup, const struct mqd_log_options *options);

/* Takes a client's batch that would begin at base_offset: adds the ids of its records and finds
 * those that are known. Returns 0; 19 NOT_ENOUGH_REPLICAS (retriable: an id belongs to an undecided
 * transaction, there are too many ids in the window, or no memory); 87 INVALID_RECORD (a record has
 * no id). With an error nothing is added. */
int16_t mqd_dedup_take(struct mqd_dedup *dedup, const struct mqd_batch *batch, const uint8_t *bytes,
                       int64_t base_offset, int64_t now_ms, struct mqd_dedup_taken *taken);
/* Adds the ids, with their time, of a batch that is in the log or comes from the leader. Records
 * without an id are skipped; if there are too many ids, the oldest are dropped. */
void mqd_dedup_learn(struct mqd_dedup *dedup, const struct mqd_batch *batch, const uint8_t *bytes);

#endif
