/* All invariants of a share-partition's state, by looking at everything. See share/state.h. */
#include "base/assert.h"
#include "share/internal.h"

static void check_cells(const struct mqd_share *share)
{
    uint32_t open = 0, acquired = 0, boundaries = 0;
    uint64_t before = 0;
    for (int64_t offset = share->start; offset < share->end; offset++) {
        uint64_t cell = cell_of(share, offset), key = cell_key(cell);
        uint32_t state = cell_state(cell);
        open += !cell_finished(cell);
        boundaries += offset > share->start && key != before;
        before = key;
        MQD_ASSERT(state != MQD_SHARE_AVAILABLE || offset >= share->first_maybe,
                   "%lld is Available below the first that may be, %lld", (long long)offset,
                   (long long)share->first_maybe);
        MQD_ASSERT(!(cell & CELL_CHANGED) || (offset >= share->changed_first && offset <= share->changed_last),
                   "S6: the change of %lld lies outside of %lld to %lld", (long long)offset,
                   (long long)share->changed_first, (long long)share->changed_last);
        if (state != MQD_SHARE_ACQUIRED)
            continue;
        acquired++;
        MQD_ASSERT(cell_row(cell) < share->row_count, "S1: %lld names acquisition %u of %u", (long long)offset,
                   cell_row(cell), share->row_count);
        const struct mqd_share_row *row = row_of(share, cell_row(cell));
        MQD_ASSERT(row->first <= offset && offset <= row->last, "S5: %lld belongs to an acquisition of %lld to %lld",
                   (long long)offset, (long long)row->first, (long long)row->last);
    }
    MQD_ASSERT(open == share->open_count && acquired == share->acquired_count && boundaries == share->boundary_count,
               "S7: %u open, %u acquired, %u boundaries; counted as %u, %u, %u", open, acquired, boundaries,
               share->open_count, share->acquired_count, share->boundary_count);
}

static void check_rows(const struct mqd_share *share)
{
    uint32_t rows = 0, held = 0, before = ROW_NONE;
    int64_t deadline_ms = INT64_MIN;
    for (uint32_t index = share->row_head; index != ROW_NONE; index = row_of(share, index)->next) {
        const struct mqd_share_row *row = row_of(share, index);
        uint32_t mine = 0;
        for (int64_t offset = row->first > share->start ? row->first : share->start; offset <= row->last; offset++) {
            uint64_t cell = cell_of(share, offset);
            mine += cell_state(cell) == MQD_SHARE_ACQUIRED && cell_row(cell) == index;
        }
        MQD_ASSERT(mine == row->held && mine > 0, "S5: an acquisition holds %u offsets, counted as %u", mine,
                   row->held);
        MQD_ASSERT(row->deadline_ms >= deadline_ms && row->previous == before, "S5: the queue is out of order at %u",
                   index);
        deadline_ms = row->deadline_ms;
        before = index;
        rows++;
        held += mine;
    }
    MQD_ASSERT(rows == share->row_used && before == share->row_tail && held == share->acquired_count,
               "S5: %u acquisitions of %u offsets; counted as %u and %u", rows, held, share->row_used,
               share->acquired_count);
}

void mqd_share_check(const struct mqd_share *share)
{
    MQD_ASSERT(share->start <= share->end && share->end - share->start <= MQD_SHARE_SPAN_MAX, "S7: from %lld to %lld",
               (long long)share->start, (long long)share->end);
    MQD_ASSERT(share->start == share->end || !cell_finished(cell_of(share, share->start)),
               "S4: the start %lld is finished", (long long)share->start);
    check_cells(share);
    check_rows(share);
}
