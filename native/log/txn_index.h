/* The aborted transactions of one segment: BASEOFFSET.txnindex, beside the .log that holds their
 * abort markers. The file has Kafka's own format, so that Kafka's tools can read it. The checksums
 * in a second file, BASEOFFSET.txnsum, show whether the first is complete.
 *
 * 34 bytes per entry, big endian, in the order of the markers:
 *    0  i16  version 0
 *    2  i64  producer_id
 *   10  i64  first_offset: of the transaction in this partition; may be in an earlier segment
 *   18  i64  last_offset: of the abort marker; in this segment
 *   26  i64  last_stable_offset: the lowest first offset of the transactions still ongoing after
 *       the marker; if there are none, the offset after the marker. No transaction of a later entry
 *       begins below it
 *
 * A missing file means no aborted transaction. Entries are never changed; the file grows with the
 * active segment and is truncated with it.
 *
 * .txnsum: a chain of checksums, one for each entry in the same order, u32 big endian: CRC32C,
 * seeded with the previous checksum (0 for the first), of the segment's base offset (i64 big
 * endian) and the entry. Any run of entries can thus be verified with its checksums, and the count
 * of checksums is the count of entries. A checksum is written after its entry and truncated before
 * it.
 *
 * Invariants
 *   X1  last_offset increases strictly; last_stable_offset never decreases and is at most
 *       last_offset + 1.
 *   X2  an entry is in the file before the last stable offset passes its transaction (so that
 *       readers in other processes find it), and on disk before durable_offset passes its marker.
 *       Entries that a crash leaves beyond durable_offset are truncated and rebuilt from the log
 *       (log/recovery/replay.c).
 *   X3  the checksum of an entry is in .txnsum before the last stable offset passes its
 *       transaction. It is not flushed with the log: where it is missing or wrong, recovery
 *       rebuilds both files from the log.
 * A last_stable_offset that is too low costs time, never correctness. Concurrency: writers are the
 * partition's owner, recovery, or the compaction of a sealed segment. Readers: any process, by
 * pread, whole entries.
 */
#ifndef MQD_TXN_INDEX_H
#define MQD_TXN_INDEX_H

#include "native.h"
#include "wire/aborted.h"

#define MQD_TXN_INDEX_ENTRY_BYTES 34
#define MQD_TXN_SUM_BYTES 4

struct mqd_txn_index {   /* of the active segment */
    int fd, sum_fd;      /* -1 = not open; both or neither */
    uint32_t file_bytes; /* whole entries in the file */
    uint32_t sum;        /* checksum of the last entry, while open */
};
#define MQD_TXN_INDEX_CLOSED {.fd = -1, .sum_fd = -1}

struct mqd_aborted_list {
    struct mqd_aborted *entries;
    uint32_t count, capacity;
}; /* zeroed = empty; free(entries) */
int mqd_aborted_add(struct mqd_aborted_list *list, const struct mqd_aborted *entry); /* -1 ENOMEM, mqd_error set */
/* Writes the entry in its file format: MQD_TXN_INDEX_ENTRY_BYTES. */
void mqd_aborted_encode(uint8_t *at, const struct mqd_aborted *entry);

/* The checksum of an encoded entry. previous: that of the entry before it; 0 for the first. */
uint32_t mqd_txn_index_checksum(uint32_t previous, int64_t segment_base, const uint8_t *entry);

/* Appends all entries or none. Returns 0, or -1 with errno: the file is unchanged (for EIO and
 * other errors the caller fences the partition). */
int mqd_txn_index_append(struct mqd_txn_index *index, const char *directory, int64_t segment_base,
                         const struct mqd_aborted *entries, uint32_t count);
/* Truncates the file to the size in `index`, and the checksums to match. */
int mqd_txn_index_cut(struct mqd_txn_index *index, const char *directory, int64_t segment_base);
void mqd_txn_index_close(struct mqd_txn_index *index);

/* Whether the file passes verification: returns 1, 0, or -1 on disk failure. Entries without a
 * checksum are accepted if their markers are at or after complete_below: a crash leaves such
 * entries. */
int mqd_txn_index_verify(const char *directory, int64_t segment_base, int64_t complete_below);
/* Loads the verified entries of a file, up to the first that violates X1 or is torn, or whose
 * marker is outside [segment_base, offset_end). If there is no file, there are no entries. Returns
 * -1 on disk failure. */
int mqd_txn_index_load(const char *directory, int64_t segment_base, int64_t offset_end, struct mqd_aborted_list *out);
/* Makes the file hold exactly these entries; flushed when `sync` is set; the caller syncs the
 * directory. An empty list removes the file. -1: mqd_error set. */
int mqd_txn_index_replace(const char *directory, int64_t segment_base, const struct mqd_aborted_list *entries,
                          bool sync);
/* Flushes the file, if it exists. rewrite: rewrites its bytes first, because an earlier flush has
 * failed. */
int mqd_txn_index_flush(const char *directory, int64_t segment_base, bool rewrite);
/* Adds the entries whose transaction overlaps [from_offset, to_offset). stable_offset: a last
 * stable offset that was read before this call. Returns 1 if no later segment has more, 0 if later
 * segments may have more, -1 with errno on failure (EBADMSG: the file fails verification). */
int mqd_txn_index_collect(const char *directory, int64_t segment_base, int64_t from_offset, int64_t to_offset,
                          int64_t stable_offset, struct mqd_aborted_list *out);

#endif
