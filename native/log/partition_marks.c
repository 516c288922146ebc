/* The high watermark of a partition with several replicas: maps an offset from mqd_replica to a
 * position in the log. See log/partition_follow.h.
 *
 * Followers fetch at most to the end of a write, but may stop before it. The high watermark moves
 * only to ends of writes, because each write records the position of its end. It never exceeds the
 * requested offset, and equals it at the latest when the followers have reached the end of the log.
 */
#include <stdlib.h>

#include "log/partition_follow.h"
#include "log/partition_state.h"

static struct mqd_mark *mark_at(struct mqd_marks *marks, uint32_t i)
{
    return &marks->ring[(marks->head + i) & (marks->capacity - 1)];
}

/* Drops every second mark: the high watermark moves in larger steps while the followers lag that
 * far behind. */
static void thin(struct mqd_marks *marks)
{
    uint32_t kept_count = 0;
    for (uint32_t i = 1; i < marks->count; i += 2)
        *mark_at(marks, kept_count++) = *mark_at(marks, i);
    marks->count = kept_count;
}

/* Makes room for one more mark. Returns false if out of memory for the first ring. */
static bool grow(struct mqd_partition *partition)
{
    struct mqd_marks *old = partition->marks;
    uint32_t capacity = !old ? MQD_MARK_COUNT_MIN : old->capacity * 2;
    struct mqd_marks *marks =
        capacity <= MQD_MARK_COUNT_MAX ? malloc(sizeof *marks + capacity * sizeof *marks->ring) : NULL;
    if (!marks) {
        if (old)
            thin(old);
        return old != NULL;
    }
    *marks = (struct mqd_marks){.capacity = capacity, .count = old ? old->count : 0};
    for (uint32_t i = 0; i < marks->count; i++)
        marks->ring[i] = *mark_at(old, i);
    free(old);
    partition->marks = marks;
    return true;
}

void mqd_partition_note_mark(struct mqd_partition *partition)
{
    struct mqd_marks *marks = partition->marks;
    struct mqd_mark end = mqd_partition_end_mark(partition);
    if (partition->writing || end.offset <= (marks && marks->count ? mark_at(marks, marks->count - 1)->offset
                                                                   : partition->high_watermark.offset))
        return;
    if ((!marks || marks->count == marks->capacity) && !grow(partition))
        return;
    marks = partition->marks;
    *mark_at(marks, marks->count++) = end;
}

void mqd_partition_release_marks(struct mqd_partition *partition)
{
    if (!partition->marks || partition->marks->count)
        return;
    free(partition->marks);
    partition->marks = NULL;
}

static void move_high_watermark(struct mqd_partition *partition, const struct mqd_mark *mark)
{
    partition->high_watermark = *mark;
    mqd_partition_normalise_mark(partition, &partition->high_watermark);
    mqd_partition_settle_transactions(partition);
}

bool mqd_partition_raise_high_watermark(struct mqd_partition *partition, int64_t offset)
{
    struct mqd_marks *marks = partition->marks;
    struct mqd_mark target = partition->high_watermark, end = mqd_partition_end_mark(partition);
    while (marks && marks->count && mark_at(marks, 0)->offset <= offset) {
        target = *mark_at(marks, 0);
        marks->head = (marks->head + 1) & (marks->capacity - 1);
        marks->count--;
    }
    if (offset >= end.offset)
        target = end;
    if (target.offset <= partition->high_watermark.offset)
        return false;
    move_high_watermark(partition, &target);
    mqd_partition_check(partition);
    return true;
}

void mqd_partition_truncate_marks(struct mqd_partition *partition)
{
    struct mqd_marks *marks = partition->marks;
    struct mqd_mark end = mqd_partition_end_mark(partition);
    while (marks && marks->count && mark_at(marks, marks->count - 1)->offset > end.offset)
        marks->count--;
    bool is_empty = partition->log_start_offset == end.offset;
    if (partition->high_watermark.offset > end.offset ||
        (is_empty && partition->high_watermark.offset < partition->log_start_offset))
        partition->high_watermark = end;
    mqd_partition_note_mark(partition);
}

void mqd_partition_set_replicated(struct mqd_partition *partition, bool replicated)
{
    if (replicated == partition->replicated)
        return;
    partition->replicated = replicated;
    if (replicated) {
        mqd_partition_note_mark(partition);
        return;
    }
    free(partition->marks);
    partition->marks = NULL;
    mqd_partition_advance_marks(partition);
}

bool mqd_partition_replicated(const struct mqd_partition *partition)
{
    return partition->replicated;
}

void mqd_partition_reset_high_watermark(struct mqd_partition *partition, const struct mqd_mark *known)
{
    if (partition->marks)
        partition->marks->count = 0;
    partition->high_watermark =
        known ? *known : (struct mqd_mark){partition->log_start_offset, partition->segments[0], 0, 0};
    mqd_partition_note_mark(partition);
}
