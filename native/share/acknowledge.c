/* Ends acquisitions: records are acknowledged, released, expired, or no longer in the log. See
 * share/state.h. */
#include "base/assert.h"
#include "share/internal.h"

/* Returns the length of the run of equal cells that begins at `offset`, within the page and up to
 * `last`. */
static uint32_t count_equal_cells(const struct mqd_share_page *page, int64_t offset, int64_t last)
{
    const uint64_t *cells = &page->cells[offset & PAGE_MASK];
    int64_t count_max = (last < page_end(offset) ? last + 1 : page_end(offset)) - offset;
    uint32_t count = 1;
    while (count < count_max && cells[count] == cells[0])
        count++;
    return count;
}

/* Finishes or releases, according to `type`, `record_count` offsets of one page whose cells are
 * equal. */
static void settle(struct mqd_share *share, struct mqd_share_page *page, int64_t offset, uint32_t record_count,
                   uint8_t type, int64_t now_ms)
{
    uint64_t cell = page->cells[offset & PAGE_MASK];
    uint32_t deliveries = cell_deliveries(cell), state = archived_state(share), row = 0;
    if (type == MQD_SHARE_GAP) {
        state = MQD_SHARE_ARCHIVED; /* the offset is not in the log, or its dead letter has been written */
    } else if (type == MQD_SHARE_ACCEPT) {
        state = MQD_SHARE_ACKNOWLEDGED;
    } else if (type == MQD_SHARE_RETURN) {
        state = MQD_SHARE_AVAILABLE;
        deliveries -= deliveries > 0;
    } else if (type == MQD_SHARE_RELEASE) {
        if (deliveries < (uint32_t)share->settings.delivery_limit || PLANTED_BUG(share, UNLIMITED)) /* S3 */
            state = MQD_SHARE_AVAILABLE;
        if (PLANTED_BUG(share, UNCOUNT) && deliveries > 0)
            deliveries--;
        if (state == MQD_SHARE_AVAILABLE && mqd_share_backoff_ms(share, deliveries) > 0) {
            state = MQD_SHARE_DELAYED;
            row = mqd_share_row_for_backoff(share, deliveries, offset, offset + record_count - 1, now_ms);
            row_of(share, row)->offset_count += record_count;
        }
    }
    mqd_share_cells_set(share, page, offset, record_count, cell_make(state, deliveries, CELL_CHANGED, row));
    mqd_share_mark_changed(share, offset, offset + record_count - 1);
    if (state == MQD_SHARE_AVAILABLE && offset < share->available_from)
        share->available_from = offset;
    if (cell_has_row(cell))
        mqd_share_row_release(share, cell_row(cell), record_count);
}

/* ---- acknowledging ---- */

static bool is_well_formed(const struct mqd_share_acknowledgement *list, uint32_t count)
{
    int64_t previous_last = -1;
    for (uint32_t index = 0; index < count; index++) {
        const struct mqd_share_acknowledgement *range = &list[index];
        if (range->first < previous_last || range->last < range->first)
            return false;
        previous_last = range->last;
        uint64_t offset_count = (uint64_t)(range->last - range->first) + 1;
        if (range->type_count != 1 && range->type_count != offset_count)
            return false;
        for (uint32_t i = 0; i < range->type_count; i++)
            if (range->types[i] > MQD_SHARE_RETURN)
                return false;
    }
    return true;
}

/* Returns the first offset of the range that is still tracked. Offsets below share->start are
 * finished; acknowledging them again has no effect, as in Kafka. */
static int64_t first_tracked(const struct mqd_share *share, const struct mqd_share_acknowledgement *range)
{
    return range->first > share->start ? range->first : share->start;
}

/* Checks that the member holds every offset of the range that is still tracked. Returns 0;
 * MQD_SHARE_INVALID_REQUEST if the range reaches beyond share->end; or
 * MQD_SHARE_INVALID_RECORD_STATE. */
static int check_held(const struct mqd_share *share, uint64_t member, const struct mqd_share_acknowledgement *range,
                      int64_t now_ms)
{
    int64_t first = first_tracked(share, range);
    if (first > range->last)
        return 0;
    if (share->start == share->end)
        return MQD_SHARE_INVALID_RECORD_STATE;
    if (range->last >= share->end)
        return MQD_SHARE_INVALID_REQUEST;
    uint64_t checked_cell = CELL_STATE_MASK; /* no cell has this value */
    for (int64_t offset = first; offset <= range->last; offset++) {
        uint64_t cell = cell_of(share, offset);
        if (cell == checked_cell)
            continue;
        checked_cell = cell;
        if (cell_state(cell) != MQD_SHARE_ACQUIRED)
            return MQD_SHARE_INVALID_RECORD_STATE;
        const struct mqd_share_row *row = row_of(share, cell_row(cell));
        if (row->member != member && !PLANTED_BUG(share, ANY_MEMBER)) /* S1 */
            return MQD_SHARE_INVALID_RECORD_STATE;
        if (row->deadline_ms <= now_ms && !PLANTED_BUG(share, LATE))
            return MQD_SHARE_INVALID_RECORD_STATE;
    }
    return 0;
}

/* Moves one offset to the renewed row `*row`, or to a new one. */
static void renew(struct mqd_share *share, struct mqd_share_page *page, int64_t offset, uint32_t *row, int64_t now_ms)
{
    uint64_t cell = page->cells[offset & PAGE_MASK];
    uint32_t old = cell_row(cell);
    if (PLANTED_BUG(share, KEEP_PLACE))
        return;
    if (*row != ROW_NONE && offset - row_of(share, *row)->last > ROW_HOLE_MAX)
        *row = ROW_NONE;
    if (*row == ROW_NONE)
        *row = mqd_share_row_make(share, row_of(share, old)->member, offset, now_ms);
    if (*row == ROW_NONE) { /* no memory: renews all offsets of the acquisition */
        mqd_share_row_renew(share, old, now_ms);
        return;
    }
    row_of(share, *row)->offset_count++;
    row_of(share, *row)->last = offset;
    mqd_share_cells_set(share, page, offset, 1,
                        cell_make(MQD_SHARE_ACQUIRED, cell_deliveries(cell), cell & CELL_CHANGED, *row));
    mqd_share_row_release(share, old, 1);
}

static void apply(struct mqd_share *share, const struct mqd_share_acknowledgement *range, int64_t now_ms)
{
    uint32_t renewed_row = ROW_NONE, record_count;
    for (int64_t offset = first_tracked(share, range); offset <= range->last; offset += record_count) {
        struct mqd_share_page *page = page_of(share, offset);
        uint8_t type = range->types[range->type_count == 1 ? 0 : offset - range->first];
        record_count =
            type != MQD_SHARE_RENEW && range->type_count == 1 ? count_equal_cells(page, offset, range->last) : 1;
        if (type == MQD_SHARE_RENEW)
            renew(share, page, offset, &renewed_row, now_ms);
        else
            settle(share, page, offset, record_count,
                   type == MQD_SHARE_GAP && PLANTED_BUG(share, GAP_LETTER) ? MQD_SHARE_REJECT : type, now_ms);
    }
}

int mqd_share_acknowledge(struct mqd_share *share, uint64_t member, const struct mqd_share_acknowledgement *list,
                          uint32_t count, int64_t now_ms)
{
    if (!is_well_formed(list, count))
        return MQD_SHARE_INVALID_REQUEST;
    for (uint32_t index = 0; index < count; index++) {
        /* the previous range has acknowledged this offset, so it is no longer acquired */
        bool is_repeated = index && list[index].first == list[index - 1].last && list[index].first >= share->start;
        int error = is_repeated ? MQD_SHARE_INVALID_RECORD_STATE : check_held(share, member, &list[index], now_ms);
        if (error)
            return error;
        if (PLANTED_BUG(share, PARTLY) && index + 1 < count)
            apply(share, &list[index], now_ms);
    }
    for (uint32_t index = PLANTED_BUG(share, PARTLY) && count ? count - 1 : 0; index < count; index++)
        apply(share, &list[index], now_ms);
    mqd_share_advance(share);
    return 0;
}

uint32_t mqd_share_archive(struct mqd_share *share, int64_t first, int64_t last)
{
    uint32_t archived = 0, record_count;
    if (last >= share->end)
        last = share->end - 1;
    for (int64_t offset = first > share->start ? first : share->start; offset <= last; offset += record_count) {
        struct mqd_share_page *page = page_of(share, offset);
        if (!page->archiving) {
            record_count = (uint32_t)(page_end(offset) - offset);
            continue;
        }
        uint64_t cell = page->cells[offset & PAGE_MASK];
        record_count = count_equal_cells(page, offset, last);
        if (cell_state(cell) != MQD_SHARE_ARCHIVING)
            continue;
        settle(share, page, offset, record_count, MQD_SHARE_GAP, 0);
        archived += record_count;
    }
    mqd_share_advance(share);
    return archived;
}

/* ---- releasing ---- */

/* Ends the backoff of `record_count` offsets. The persisted state does not change. */
static void make_available(struct mqd_share *share, struct mqd_share_page *page, int64_t offset, uint32_t record_count)
{
    uint64_t cell = page->cells[offset & PAGE_MASK];
    mqd_share_cells_set(share, page, offset, record_count,
                        cell_make(MQD_SHARE_AVAILABLE, cell_deliveries(cell), cell & CELL_CHANGED, 0));
    if (offset < share->available_from)
        share->available_from = offset;
    mqd_share_row_release(share, cell_row(cell), record_count);
}

/* Ends the lock or the backoff of all offsets of a row and frees the row. Returns the number of
 * offsets. */
static uint32_t release_row(struct mqd_share *share, uint32_t index, int64_t now_ms)
{
    bool is_lock = row_of(share, index)->queue == LOCK_QUEUE;
    uint32_t state = is_lock ? MQD_SHARE_ACQUIRED : MQD_SHARE_DELAYED;
    int64_t first = row_of(share, index)->first, last = row_of(share, index)->last;
    uint32_t offset_count = row_of(share, index)->offset_count, released = 0;
    for (int64_t offset = first > share->start ? first : share->start; offset <= last && released < offset_count;) {
        struct mqd_share_page *page = page_of(share, offset);
        if (!(is_lock ? page->acquired : page->delayed)) {
            offset = page_end(offset);
            continue;
        }
        uint64_t cell = page->cells[offset & PAGE_MASK];
        bool belongs_to_row = cell_state(cell) == state && cell_row(cell) == index;
        uint32_t record_count = count_equal_cells(page, offset, last);
        if (belongs_to_row && !is_lock)
            make_available(share, page, offset, record_count);
        else if (belongs_to_row || (PLANTED_BUG(share, ANY_ROW) && cell_state(cell) != MQD_SHARE_AVAILABLE))
            settle(share, page, offset, record_count, MQD_SHARE_RELEASE, now_ms);
        released += belongs_to_row ? record_count : 0;
        offset += record_count;
    }
    MQD_ASSERT(released == offset_count, "S5: %u of %u offsets from %lld to %lld are released", released, offset_count,
               (long long)first, (long long)last);
    return released;
}

uint32_t mqd_share_release_member(struct mqd_share *share, uint64_t member, int64_t now_ms)
{
    uint32_t released = 0;
    for (uint32_t index = share->queues[LOCK_QUEUE].head, next; index != ROW_NONE; index = next) {
        const struct mqd_share_row *row = row_of(share, index);
        next = row->next;
        if (row->member == member)
            released += release_row(share, index, now_ms);
    }
    mqd_share_advance(share);
    return released;
}

/* A planted bug: a backoff ends whenever the queues are checked. */
static bool is_early(const struct mqd_share *share, uint32_t queue_index)
{
    (void)share;
    return queue_index != LOCK_QUEUE && PLANTED_BUG(share, EARLY_RETRY);
}

uint32_t mqd_share_expire(struct mqd_share *share, int64_t now_ms, uint32_t offsets_max)
{
    uint32_t released = 0;
    for (uint32_t queue_index = 0; queue_index < MQD_SHARE_QUEUE_COUNT; queue_index++) {
        const struct mqd_share_queue *queue = &share->queues[queue_index];
        while (released < offsets_max && queue->head != ROW_NONE &&
               (row_of(share, queue->head)->deadline_ms <= now_ms || is_early(share, queue_index)))
            released += release_row(share, queue->head, now_ms);
        if (!share->delayed_count)
            break;
    }
    mqd_share_advance(share);
    return released;
}

void mqd_share_set_log_start(struct mqd_share *share, int64_t log_start)
{
    if (log_start <= share->log_start)
        return;
    share->log_start = log_start;
    while (share->start < log_start && share->start < share->end) {
        struct mqd_share_page *page = page_of(share, share->start);
        if (page->cells && !cell_finished(page->cells[share->start & PAGE_MASK]))
            settle(share, page, share->start, 1, MQD_SHARE_GAP, 0);
        mqd_share_advance_one(share);
    }
    if (share->end < log_start) {
        mqd_share_page_drop(share, share->end);
        share->start = share->end = log_start;
        share->start_moved = 1;
    }
    mqd_share_advance(share);
}
