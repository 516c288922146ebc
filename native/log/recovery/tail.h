/* One segment under inspection, for recovery.c: walks its batches as far as they are sound and
 * makes its index files match. Rules: log/recovery/recovery.h.
 */
#ifndef MQD_RECOVERY_TAIL_H
#define MQD_RECOVERY_TAIL_H

#include <errno.h>

#include "log/recovery/recovery.h"

enum mode {
    MODE_CLEAN,   /* after a clean shutdown: the whole log is trusted */
    MODE_TRUSTED, /* the log below trusted_end_offset is trusted */
    MODE_CHECKED, /* checksums above the recovery point are verified */
};

struct recovery {
    struct mqd_partition *partition;
    struct mqd_recovery *in_out; /* the caller's parameters; what recovery finds is added */
    struct mqd_listing listing;
    enum mode mode;
    int64_t cut_offset; /* the log is truncated to this offset; INT64_MAX = no truncation */
    /* an open log is being truncated: the data below cut_offset was in use, so it is not checked
     * again */
    bool cutting;
    bool read_only; /* the file system is read-only: nothing is repaired, and the partition is opened fenced */
    bool was_cut;   /* truncated on purpose, perhaps since the last checkpoint: may end below the recovery point */
    bool changed;   /* names or lengths were changed: the directory and the active segment need a flush */
};

/* a segment under inspection; the last one that is kept becomes the active segment */
struct tail {
    int fd;
    int64_t base_offset, file_bytes;
    struct mqd_index index;
    int64_t valid_bytes, next_offset; /* the position and the offset at which the sound part ends */
    int64_t first_timestamp_ms;
    int64_t entry_position; /* the position of the index entry where the walk began; 0 = at the file's start */
    bool sound;             /* sound to the end of the file */
    bool unreadable;        /* damage below the recovery point, and nothing valid after it (C1 in recovery.h) */
    bool sound_after;       /* complete batches follow the damage at which the log will end (C5) */
};

/* which data a walk trusts */
struct bounds {
    int64_t crc_from_offset; /* checksums of batches at or above it are verified */
    int64_t trusted_below;   /* damage below it does not end the log */
    int64_t index_end;       /* index entries below it are trusted */
    int64_t cut_offset;      /* the same as in struct recovery */
    bool indexes_intact;     /* the index files cannot have lost their last entries in a power failure */
};

/* A full or read-only disk that refuses an index write is no reason to refuse to open the
 * partition, which can be read without the index. */
static inline bool is_tolerable(int error)
{
    return error == ENOSPC || error == EDQUOT || error == EROFS;
}

int mqd_tail_open(struct recovery *recovery, struct tail *tail, int64_t base_offset);
void mqd_tail_close(struct tail *tail);
int mqd_tail_walk(struct recovery *recovery, struct tail *tail, struct bounds bounds);
/* Makes the index files match the batches that were walked. */
int mqd_tail_finish_indexes(struct recovery *recovery, struct tail *tail);
/* Handles a sealed segment whose batches are all trusted: only adds missing index entries. */
int mqd_tail_check_sealed(struct recovery *recovery, int64_t base_offset, int64_t next_base);

#endif
