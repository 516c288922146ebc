/* The aborted transactions that overlap a range of a log, from the .txnindex files that the
 * partition's owner writes; see log/reader/reader.h.
 *
 * The entry of a transaction is in the segment of its marker, which may lie several segments after
 * the range; the last_stable_offset of an entry shows when no later entry can overlap. Files are
 * not kept open: few segments have one, and that of the active segment grows. A range that extends
 * to the end of its segment is taken to end at the next segment's base offset. During the swap of
 * files by a compaction (log/compaction/swap.c) this end may be too early, so callers check
 * mqd_reader_is_swapping. Readers ignore transactions beyond their range.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/error.h"
#include "log/reader/files.h"
#include "log/segment.h"

static int by_first_offset(const void *left, const void *right)
{
    int64_t a = ((const struct mqd_aborted *)left)->first_offset, b = ((const struct mqd_aborted *)right)->first_offset;
    return a < b ? -1 : a > b;
}

/* Returns 0, and sets *complete if no later segment can overlap; or an error code of
 * mqd_reader_find_aborted. */
static int16_t collect(struct mqd_reader_slot *slot, int64_t base_offset, int64_t from_offset, int64_t to_offset,
                       int64_t stable_offset, struct mqd_aborted_list *out, bool *complete)
{
    int result = mqd_txn_index_collect(slot->path, base_offset, from_offset, to_offset, stable_offset, out);
    if (result < 0 && errno == EBADMSG) /* EBADMSG is also returned while a compaction is replacing the file */
        return mqd_reader_report_missing(slot, "a .txnindex that agrees with its .txnsum", base_offset);
    if (result < 0) {
        mqd_error_system(errno, "%s: cannot read the aborted transactions of segment %lld", slot->path,
                         (long long)base_offset);
        return MQD_KAFKA_STORAGE_ERROR;
    }
    *complete = result == 1;
    return 0;
}

bool mqd_reader_is_swapping(struct mqd_reader *reader, uint32_t slot_number)
{
    struct mqd_reader_slot *slot = slot_number < MQD_PARTITION_SLOT_COUNT ? reader->slots[slot_number] : NULL;
    if (!slot || !slot->swapping)
        return false;
    slot->listed = false; /* an undone swap does not raise the generation: list again */
    return true;
}

int16_t mqd_reader_find_aborted(struct mqd_reader *reader, uint32_t slot_number, const struct mqd_positions *positions,
                                uint64_t segments_generation, int64_t from_offset, int64_t to_offset,
                                struct mqd_aborted_list *out)
{
    struct mqd_reader_slot *slot = slot_number < MQD_PARTITION_SLOT_COUNT ? reader->slots[slot_number] : NULL;
    bool complete = false;
    out->count = 0;
    if (!slot) {
        mqd_error_set(MQD_E_INVALID, "partition slot %u has no directory here yet; retry when its topic is known",
                      slot_number);
        return MQD_UNKNOWN_TOPIC_OR_PARTITION;
    }
    if (!slot->listed || slot->generation != segments_generation) {
        int16_t code = mqd_reader_list(reader, slot, segments_generation);
        if (code)
            return code;
    }
    int32_t first = mqd_reader_segment_at(slot, from_offset);
    for (uint32_t number = first < 0 ? 0 : (uint32_t)first;
         !complete && number < slot->segment_count &&
         slot->segments[number].base_offset <= positions->high_watermark_segment;
         number++) {
        int16_t code = slot->segments[number].has_txn_index
                           ? collect(slot, slot->segments[number].base_offset, from_offset, to_offset,
                                     positions->last_stable_offset, out, &complete)
                           : 0;
        if (code)
            return code;
    }
    if (out->count > 1)
        qsort(out->entries, out->count, sizeof *out->entries, by_first_offset);
    return 0;
}
