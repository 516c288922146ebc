/* The start of each leader epoch of a partition: the file leader-epoch-checkpoint, in Kafka's text
 * format.
 *
 *     0\n                 version
 *     COUNT\n
 *     EPOCH START_OFFSET\n ...      both strictly increase
 *
 * The file is replaced by rename and flushed with the partition's next sync, before any record of
 * the new epoch is treated as durable. A file that does not parse (after a power failure on a file
 * system without ordered rename) is not an error: recovery reads the epochs from the batches.
 * Concurrency: the partition's owner alone.
 */
#ifndef MQD_EPOCHS_H
#define MQD_EPOCHS_H

#include "native.h"
#include "replica/rules.h" /* struct mqd_epoch */

#define MQD_EPOCHS_FILE "leader-epoch-checkpoint"

struct mqd_epochs {
    struct mqd_epoch *entries;
    uint32_t count, capacity;
}; /* zeroed = empty */

void mqd_epochs_free(struct mqd_epochs *epochs);
/* Returns 1 if the file was read, 0 if it is missing or malformed (then there are no entries), -1
 * on a disk failure or if out of memory. */
int mqd_epochs_load(struct mqd_epochs *epochs, const char *directory);
int32_t mqd_epochs_last(const struct mqd_epochs *epochs); /* -1 = none */
/* Records that `epoch` begins at start_offset and removes entries at or after that offset. Does
 * nothing unless the epoch is higher than the last. Returns 1 if it changed the entries, 0 if not,
 * -1 if out of memory. */
int mqd_epochs_add(struct mqd_epochs *epochs, int32_t epoch, int64_t start_offset);
/* Keeps only the entries for [log_start_offset, log_end_offset). Returns whether anything
 * changed. */
bool mqd_epochs_cut(struct mqd_epochs *epochs, int64_t log_start_offset, int64_t log_end_offset);
/* Replaces the file; returns an fd that the caller flushes (with the directory) and closes; -1 with
 * errno. */
int mqd_epochs_write_open(const struct mqd_epochs *epochs, const char *directory);

#endif
