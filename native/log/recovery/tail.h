/* One segment under inspection, for recovery.c: walks its batches as far as they are sound and
 * makes its index files match. Rules: log/recovery/recovery.h.
 */
#ifndef MQD_RECOVERY_TAIL_H
#define MQD_RECOVERY_TAIL_H

#include <errno.h>

#include "log/recovery/recovery.h"

enum mode { MODE_CLEAN, MODE_TRUSTED, MODE_CHECKED };

struct recovery {
    struct mqd_partition *partition;
    struct mqd_recovery *parameters;
    struct mqd_listing listing;
    enum mode mode;
    int64_t cut_offset; /* of a truncation; INT64_MAX = none */
    /* a log that was open is truncated: data below cut_offset are known to be correct and are not
     * checked */
    bool cutting;
    bool read_only; /* the file system is read-only: nothing is repaired, and the partition is opened fenced */
    bool was_cut;   /* truncated on purpose, perhaps after the recovery point was saved: the log may end below it */
    bool changed;   /* names or lengths were changed: the directory and the active segment need a flush */
};

/* a segment under inspection */
struct tail {
    int fd;
    int64_t base_offset, file_bytes;
    struct mqd_index index;
    int64_t valid_bytes, next_offset; /* end of its sound part */
    int64_t first_timestamp_ms;
    int64_t entry_position; /* of the batch at which the walk began, if it has an index entry; 0 = it has none */
    bool sound;             /* sound to the end of the file */
    bool unreadable;        /* C1: damage below the recovery point, and nothing valid after it */
    bool sound_after;       /* C5: whole batches follow the damage at which the log will end */
};

struct bounds {
    int64_t crc_from_offset, trusted_below, index_end, cut_offset;
    bool intact;
};

/* A full or read-only disk that refuses an index write is no reason to refuse the partition: it can
 * be read without the index. */
static inline bool is_tolerable(int error)
{
    return error == ENOSPC || error == EDQUOT || error == EROFS;
}

int mqd_tail_open(struct recovery *recovery, struct tail *tail, int64_t base_offset);
void mqd_tail_close(struct tail *tail);
int mqd_tail_walk(struct recovery *recovery, struct tail *tail, struct bounds bounds);
/* Makes the index files match the batches that were walked. */
int mqd_tail_finish_indexes(struct recovery *recovery, struct tail *tail);
/* Handles a sealed segment below the boundary: its bytes are trusted; missing index entries are
 * added. */
int mqd_tail_check_sealed(struct recovery *recovery, int64_t base_offset, int64_t next_base);

#endif
