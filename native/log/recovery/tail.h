/* One segment under inspection, for recovery.c: its batches are walked as far as they are sound, and
 * its index files made as they must be for that. Rules: log/recovery/recovery.h.
 */
#ifndef MQD_RECOVERY_TAIL_H
#define MQD_RECOVERY_TAIL_H

#include <errno.h>

#include "log/recovery/recovery.h"

enum mode { MODE_CLEAN, MODE_TRUSTED, MODE_CHECKED };

struct recovery {
    struct mqd_partition *partition;
    struct mqd_recovery *io;
    struct mqd_listing listing;
    enum mode mode;
    int64_t cut_offset; /* of a truncation; INT64_MAX = none */
    /* it is carried out on a log that was open: what is below is as it should be, nothing else is
     * looked at */
    bool cutting;
    bool read_only; /* the file system is: nothing is repaired, the partition is opened fenced */
    bool was_cut;   /* on purpose, and the recovery point may be older: it does not say where the log must reach */
    bool changed;   /* names or lengths were changed: the directory and the active segment want a flush */
};

/* a segment under inspection */
struct tail {
    int fd;
    int64_t base_offset, file_bytes;
    struct mqd_index index;
    int64_t valid_bytes, next_offset; /* where its sound part ends */
    int64_t first_timestamp_ms;
    int64_t entry_position; /* of the batch at which the walk began: it has an index entry; 0 = it has none */
    bool sound;             /* sound to the end of the file */
    bool unreadable;        /* C1: damage below the recovery point, and nothing whole behind it */
    bool sound_behind;      /* C5: something whole lies behind the damage at which the log is to end */
};

struct bounds {
    int64_t crc_from_offset, trusted_below, index_end, cut_offset;
    bool intact;
};

/* What a disk without space, or one that is read-only, refuses to an index is no reason to refuse
 * the partition: it can be read without. */
static inline bool tolerable(int error)
{
    return error == ENOSPC || error == EDQUOT || error == EROFS;
}

int mqd_tail_open(struct recovery *recovery, struct tail *tail, int64_t base_offset);
void mqd_tail_close(struct tail *tail);
int mqd_tail_walk(struct recovery *recovery, struct tail *tail, struct bounds bounds);
/* The index files as they must be for what was walked. */
int mqd_tail_settle(struct recovery *recovery, struct tail *tail);
/* A sealed segment below the boundary: its bytes are believed, its index is completed where
 * something is missing. */
int mqd_tail_check_sealed(struct recovery *recovery, int64_t base_offset, int64_t next_base);

#endif
