/* Checks all invariants of a share-partition's state, over all pages and rows; for tests. See
 * share/state.h. */
#include "base/assert.h"
#include "share/internal.h"

static void check_cells(const struct mqd_share *share)
{
    uint32_t open = 0, acquired = 0, delayed = 0, archiving = 0, boundaries = 0, waiting = 0;
    uint64_t previous = 0;
    for (int64_t offset = share->start; offset < share->end; offset++) {
        uint64_t cell = cell_of(share, offset), persisted = persisted_cell(cell);
        uint32_t state = cell_state(cell);
        open += !cell_finished(cell);
        boundaries += offset > share->start && persisted != previous;
        previous = persisted;
        MQD_ASSERT(state != MQD_SHARE_AVAILABLE || offset >= share->available_from,
                   "%lld is Available, but below available_from, %lld", (long long)offset,
                   (long long)share->available_from);
        MQD_ASSERT(!(cell & CELL_CHANGED) || (offset >= share->changed_first && offset <= share->changed_last),
                   "S6: changed offset %lld is outside the changed range, %lld to %lld", (long long)offset,
                   (long long)share->changed_first, (long long)share->changed_last);
        archiving += state == MQD_SHARE_ARCHIVING;
        waiting += state == MQD_SHARE_WAITING;
        MQD_ASSERT(state != MQD_SHARE_ARCHIVING || page_of(share, offset)->cells,
                   "S7: offset %lld is Archiving, but its page has no cells", (long long)offset);
        if (!cell_has_row(cell))
            continue;
        acquired += state == MQD_SHARE_ACQUIRED;
        delayed += state == MQD_SHARE_DELAYED;
        MQD_ASSERT(cell_row(cell) < share->row_count, "S1: %lld names row %u of %u", (long long)offset, cell_row(cell),
                   share->row_count);
        const struct mqd_share_row *row = row_of(share, cell_row(cell));
        MQD_ASSERT(row->first <= offset && offset <= row->last, "S5: %lld belongs to a row of %lld to %lld",
                   (long long)offset, (long long)row->first, (long long)row->last);
        uint32_t count = cell_deliveries(cell);
        uint32_t queue = state == MQD_SHARE_ACQUIRED ? LOCK_QUEUE : queue_of(share, count);
        MQD_ASSERT(row->queue == queue, "S9: %lld, delivered %u times, waits in queue %u", (long long)offset, count,
                   row->queue);
    }
    MQD_ASSERT(open == share->open_count && acquired == share->acquired_count && delayed == share->delayed_count &&
                   archiving == share->archiving_count && boundaries == share->boundary_count,
               "S7: %u open, %u acquired, %u delayed, %u archiving, %u boundaries; the counters say %u, %u, %u, %u, %u",
               open, acquired, delayed, archiving, boundaries, share->open_count, share->acquired_count,
               share->delayed_count, share->archiving_count, share->boundary_count);
    MQD_ASSERT(waiting == share->waiting_count && (share->fifo || !waiting), "F1: %u waiting, the counter says %u",
               waiting, share->waiting_count);
}

/* Returns the number of rows in the queue, and adds the number of their offsets to `held`. */
static uint32_t check_queue(const struct mqd_share *share, uint32_t queue, uint32_t *held)
{
    uint32_t row_count = 0, previous = ROW_NONE;
    int64_t deadline_ms = INT64_MIN;
    for (uint32_t index = share->queues[queue].head; index != ROW_NONE; index = row_of(share, index)->next) {
        const struct mqd_share_row *row = row_of(share, index);
        uint32_t held_count = 0;
        for (int64_t offset = row->first > share->start ? row->first : share->start; offset <= row->last; offset++) {
            uint64_t cell = cell_of(share, offset);
            held_count += cell_has_row(cell) && cell_row(cell) == index;
        }
        MQD_ASSERT(held_count == row->offset_count && held_count > 0, "S5: a row holds %u offsets, its counter says %u",
                   held_count, row->offset_count);
        MQD_ASSERT(row->deadline_ms >= deadline_ms && row->previous == previous && row->queue == queue,
                   "S5: queue %u is out of order at %u", queue, index);
        deadline_ms = row->deadline_ms;
        previous = index;
        row_count++;
        *held += held_count;
    }
    MQD_ASSERT(previous == share->queues[queue].tail, "S5: queue %u ends at %u", queue, previous);
    return row_count;
}

static void check_rows(const struct mqd_share *share)
{
    uint32_t held = 0, delayed = 0, used_queues = 0, row_count = check_queue(share, LOCK_QUEUE, &held);
    for (uint32_t queue = 1; queue < MQD_SHARE_QUEUE_COUNT; queue++) {
        row_count += check_queue(share, queue, &delayed);
        used_queues += share->queues[queue].head != ROW_NONE;
    }
    MQD_ASSERT(row_count == share->used_row_count && held == share->acquired_count && delayed == share->delayed_count,
               "S5: %u rows, %u acquired and %u delayed offsets; the counters say %u, %u and %u", row_count, held,
               delayed, share->used_row_count, share->acquired_count, share->delayed_count);
    MQD_ASSERT(used_queues == share->backoff_queue_count &&
                   (!row_count || share->row_count - row_count + used_queues >= MQD_SHARE_QUEUE_COUNT - 1),
               "S9: %u free rows; %u queues of backoffs are not empty", share->row_count - row_count, used_queues);
}

void mqd_share_check(const struct mqd_share *share)
{
    MQD_ASSERT(share->start <= share->end && share->end - share->start <= MQD_SHARE_SPAN_MAX, "S7: from %lld to %lld",
               (long long)share->start, (long long)share->end);
    MQD_ASSERT(share->start == share->end || !cell_finished(cell_of(share, share->start)),
               "S4: the start %lld is finished", (long long)share->start);
    check_cells(share);
    check_rows(share);
    mqd_share_fifo_check(share);
}
