/* Truncates a log so that after a crash the log has no hole, and recovery does not trust the part
 * that was rewritten after the truncation.
 *
 * Two kinds of marks beside the log:
 *   truncating        "CUT START\n": exists from before anything is changed until everything is on
 *                     disk. START >= 0: the log is emptied and begins there. The next opening of
 *                     the log completes the truncation
 *   truncated.NUMBER  the same text: the log was truncated to CUT, and a checkpoint on disk may
 *                     have a higher recovery point. Recovery trusts no recovery point above the
 *                     lowest CUT. When a new checkpoint is on disk, its writer removes the marks
 *                     that existed before it read the positions
 * Order: truncating (durable) -> delete segments from the end -> truncate -> snapshots, aborted
 * transactions, epochs -> flush all, the directory -> rename to truncated.NUMBER -> flush the
 * directory.
 */
#ifndef MQD_TRUNCATION_H
#define MQD_TRUNCATION_H

#include "native.h"

#define MQD_TRUNCATING_FILE "truncating"
#define MQD_TRUNCATED_PREFIX "truncated."

struct mqd_truncation_marks {
    bool pending;          /* a truncation was interrupted */
    int64_t cut_offset;    /* of the interrupted truncation */
    int64_t start_offset;  /* of the interrupted truncation; -1: no restart */
    int64_t trusted_below; /* recovery points above it are lowered to it; INT64_MAX: all are trusted */
};
int mqd_truncation_load(const char *directory, struct mqd_truncation_marks *out); /* -1: mqd_error set */
int mqd_truncation_begin(const char *directory, int64_t cut_offset, int64_t start_offset);
/* The pending truncation, if any, is on disk: renames its mark to truncated.NUMBER. now_ms: the
 * first NUMBER to try. */
int mqd_truncation_end(const char *directory, int64_t now_ms);

#endif
