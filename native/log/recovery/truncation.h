/* Cutting a log back so that no crash leaves a log with a hole, or one that is believed where it
 * was written anew.
 *
 * Two kinds of marks beside the log:
 *   truncating        "CUT START\n": from before anything is touched until all of it is on disk.
 *                     START >= 0: the log is emptied and begins there. Whoever opens the log
 *                     carries it out
 *   truncated.NUMBER  "CUT\n": what lies beyond was written after a recovery point was checkpointed
 *                     that may be higher. Recovery trusts none above the lowest of them. They are
 *                     removed by whoever writes checkpoints: those that were there before he took
 *                     the positions, after the checkpoint is on disk
 * Order: truncating (durable) -> delete segments from the end -> cut -> snapshots, aborted
 * transactions, epochs -> flush all, the directory -> rename to truncated -> the directory.
 */
#ifndef MQD_TRUNCATION_H
#define MQD_TRUNCATION_H

#include "native.h"

#define MQD_TRUNCATING_FILE "truncating"
#define MQD_TRUNCATED_PREFIX "truncated."

struct mqd_truncation_marks {
    bool pending;          /* one was interrupted */
    int64_t cut_offset;    /* of it */
    int64_t start_offset;  /* of it; -1: only a cut */
    int64_t trusted_below; /* no recovery point above counts; INT64_MAX = any */
};
int mqd_truncation_load(const char *directory, struct mqd_truncation_marks *out); /* -1: mqd_error set */
int mqd_truncation_begin(const char *directory, int64_t cut_offset, int64_t start_offset);
/* What was pending, if anything was, is done and on disk. now_ms: names the mark. */
int mqd_truncation_end(const char *directory, int64_t now_ms);

#endif
