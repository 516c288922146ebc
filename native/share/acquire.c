/* Acquires records, and archives those that must not be delivered. See share/state.h. */
#include "base/assert.h"
#include "share/internal.h"

/* The progress of a call of mqd_share_acquire. */
struct progress {
    struct mqd_share *share;
    const struct mqd_share_acquisition *acquisition;
    struct mqd_share_run *out;
    uint32_t out_count, out_max;
    uint32_t acquired, acquired_max;
    uint32_t row; /* of the last acquired offset; ROW_NONE: the next offset begins a row */
};

static bool has_room(const struct mqd_share *share)
{
    return share->end - share->start < MQD_SHARE_SPAN_MAX && mqd_share_run_count(share) < MQD_SHARE_RUN_COUNT_MAX;
}

static bool may_open_another(const struct mqd_share *share)
{
    return (share->open_count < share->settings.open_max || PLANTED_BUG(share, WINDOW)) && has_room(share); /* S7 */
}

int64_t mqd_share_next_offset(struct mqd_share *share)
{
    if (!mqd_share_fifo_apply_settings(share))
        return -1;
    int64_t offset = share->available_from;
    while (offset < share->end) {
        const struct mqd_share_page *page = page_of(share, offset);
        int64_t stop = page_end(offset) < share->end ? page_end(offset) : share->end;
        if (!page->available)
            offset = stop;
        while (offset < stop && cell_state(cell_of(share, offset)) != MQD_SHARE_AVAILABLE)
            offset++;
        if (offset < stop)
            break;
    }
    share->available_from = offset;
    if (offset > mqd_share_next_key_offset(share) && !PLANTED_BUG(share, UNSEEN)) /* F1 */
        offset = mqd_share_next_key_offset(share);
    return offset < share->end || may_open_another(share) ? offset : -1;
}

int64_t mqd_share_read_until(const struct mqd_share *share, uint32_t records_max)
{
    int64_t room = (int64_t)share->settings.open_max - share->open_count;
    if (room > records_max && !share->fifo) /* with FIFO new records may have to wait */
        room = records_max;
    return share->end + (room > 0 ? room : 0);
}

static struct mqd_share_page *make_expanded_page(struct mqd_share *share, int64_t offset)
{
    struct mqd_share_page *page = mqd_share_page_make(share, offset);
    if (page && mqd_share_page_expand(share, page))
        return page;
    share->pool_exhausted = 1;
    return NULL;
}

/* ---- archiving ---- */

/* Moves start and end to `offset`. No offset is open, so the skipped offsets need no cells. */
static void jump_to(struct mqd_share *share, int64_t offset)
{
    mqd_share_page_drop(share, share->start);
    share->start = share->end = share->available_from = offset;
    share->start_moved = 1;
}

/* Archives the Available offsets from first to last. false: there is no room, or no memory. */
static bool archive(struct mqd_share *share, int64_t first, int64_t last)
{
    mqd_share_advance(share);
    for (int64_t offset = first > share->start ? first : share->start; offset <= last;) {
        if (share->start == share->end) {
            jump_to(share, last + 1);
            return true;
        }
        if (offset >= share->end && !has_room(share))
            return false;
        struct mqd_share_page *page = mqd_share_page_make(share, offset);
        if (!page) {
            share->pool_exhausted = 1;
            return false;
        }
        int64_t stop = page_end(offset);
        if (!page->cells && !page->available) { /* finished */
            offset = stop;
            continue;
        }
        if (!page->cells && (offset & PAGE_MASK) == 0 && last >= stop - 1 &&
            stop - share->start <= MQD_SHARE_SPAN_MAX) {
            mqd_share_extend(share, stop);
            mqd_share_page_archive(share, page, offset,
                                   cell_make(MQD_SHARE_ARCHIVED, cell_deliveries(page->uniform), CELL_CHANGED, 0));
            offset = stop;
            continue;
        }
        if (!(page = make_expanded_page(share, offset)))
            return false;
        mqd_share_extend(share, offset + 1);
        uint64_t cell = page->cells[offset & PAGE_MASK];
        if (cell_state(cell) == MQD_SHARE_AVAILABLE) {
            mqd_share_cells_set(share, page, offset, 1,
                                cell_make(MQD_SHARE_ARCHIVED, cell_deliveries(cell), CELL_CHANGED, 0));
            mqd_share_mark_changed(share, offset, offset);
        }
        offset++;
    }
    return true;
}

/* Archives offsets without a record to deliver; with FIFO, their keys need not be read. Returns
 * what archive returns. */
static bool skip(struct mqd_share *share, int64_t first, int64_t last)
{
    if (!archive(share, first, last))
        return false;
    mqd_share_fifo_advance(share, last + 1);
    return true;
}

/* ---- acquiring ---- */

/* Returns how many records an acquisition may have if one of them was delivered `deliveries` times
 * before. */
static uint32_t acquisition_records_max(const struct mqd_share *share, uint32_t deliveries, uint32_t records_max)
{
    uint32_t limit = (uint32_t)share->settings.delivery_limit, threshold = (limit + 1) / 2;
    if (threshold < 2)
        threshold = 2;
    if (deliveries > 0 && deliveries + 1 >= limit)
        return PLANTED_BUG(share, NOT_ALONE) ? UINT32_MAX : 1;
    if (deliveries < threshold)
        return UINT32_MAX;
    uint32_t shift = deliveries - threshold + 1;
    uint32_t limited_max = shift < 32 ? records_max >> shift : 0;
    return limited_max ? limited_max : 1;
}

/* Adds offsets that have been delivered `deliveries` times, including this delivery. False: `out`
 * is full. */
static bool append_run(struct progress *progress, int64_t first, uint32_t record_count, uint32_t deliveries)
{
    struct mqd_share_run *run = progress->out_count ? &progress->out[progress->out_count - 1] : NULL;
    if (run && run->last + 1 == first && (uint32_t)run->count == deliveries) {
        run->last += record_count;
        return true;
    }
    if (progress->out_count == progress->out_max)
        return false;
    progress->out[progress->out_count++] =
        (struct mqd_share_run){first, first + record_count - 1, MQD_SHARE_ACQUIRED, (int16_t)deliveries};
    return true;
}

/* Acquires offsets of a page whose cells are equal. False: no memory, or no room in `out`. */
static bool acquire_equal_cells(struct progress *progress, struct mqd_share_page *page, int64_t first,
                                uint32_t record_count)
{
    struct mqd_share *share = progress->share;
    uint64_t cell = page->cells[first & PAGE_MASK];
    if (progress->row != ROW_NONE && first - row_of(share, progress->row)->last > ROW_HOLE_MAX)
        progress->row = ROW_NONE;
    if (progress->row == ROW_NONE) {
        progress->row = mqd_share_row_make(share, progress->acquisition->member, first, progress->acquisition->now_ms);
        if (progress->row == ROW_NONE) {
            share->pool_exhausted = 1;
            return false;
        }
    }
    row_of(share, progress->row)->offset_count += record_count;
    if (!append_run(progress, first, record_count, cell_deliveries(cell) + 1)) {
        mqd_share_row_release(share, progress->row, record_count);
        return false;
    }
    row_of(share, progress->row)->last = first + record_count - 1;
    mqd_share_cells_set(share, page, first, record_count,
                        cell_make(MQD_SHARE_ACQUIRED, cell_deliveries(cell) + 1, cell & CELL_CHANGED, progress->row));
    progress->acquired += record_count;
    return true;
}

/* Acquires an Available offset below the end. False: nothing more can be acquired. */
static bool acquire_offset(struct progress *progress, struct mqd_share_page *page, int64_t offset)
{
    struct mqd_share *share = progress->share;
    uint32_t count = cell_deliveries(page->cells[offset & PAGE_MASK]);
    if (count >= (uint32_t)share->settings.delivery_limit) { /* S3: the limit was reduced */
        mqd_share_cells_set(share, page, offset, 1, cell_make(archived_state(share), count, CELL_CHANGED, 0));
        mqd_share_mark_changed(share, offset, offset);
        return true;
    }
    uint32_t limited_max = acquisition_records_max(share, count, progress->acquisition->records_max);
    if (limited_max < progress->acquired_max)
        progress->acquired_max = limited_max;
    return progress->acquired < progress->acquired_max && acquire_equal_cells(progress, page, offset, 1);
}

/* Returns how many of a page's new offsets, up to `last`, may be opened and acquired together. */
static uint32_t new_offsets_max(const struct progress *progress, int64_t last)
{
    const struct mqd_share *share = progress->share;
    int64_t count = last - share->end + 1, span_left = MQD_SHARE_SPAN_MAX - (share->end - share->start);
    int64_t open_left = (int64_t)share->settings.open_max - share->open_count;
    if (count > open_left && !PLANTED_BUG(share, WINDOW)) /* S7 */
        count = open_left;
    if (count > span_left)
        count = span_left;
    if (count > progress->acquired_max - progress->acquired)
        count = progress->acquired_max - progress->acquired;
    return (uint32_t)count;
}

/* Acquires the Available offsets of a range. False: nothing more can be acquired. */
static bool acquire_range(struct progress *progress, int64_t first, int64_t last)
{
    struct mqd_share *share = progress->share;
    for (int64_t offset = first > share->start ? first : share->start; offset <= last;) {
        if (progress->acquired >= progress->acquired_max || (offset >= share->end && !may_open_another(share)))
            return false;
        struct mqd_share_page *page = mqd_share_page_make(share, offset);
        if (!page) {
            share->pool_exhausted = 1;
            return false;
        }
        if (!page->available) {
            offset = page_end(offset);
            continue;
        }
        if (!mqd_share_page_expand(share, page)) {
            share->pool_exhausted = 1;
            return false;
        }
        if (offset >= share->end) {
            uint32_t record_count = new_offsets_max(progress, last < page_end(offset) ? last : page_end(offset) - 1);
            mqd_share_extend(share, offset + record_count);
            if (!acquire_equal_cells(progress, page, offset, record_count))
                return false;
            offset += record_count;
            continue;
        }
        if (cell_state(page->cells[offset & PAGE_MASK]) == MQD_SHARE_AVAILABLE &&
            !acquire_offset(progress, page, offset))
            return false;
        offset++;
    }
    return true;
}

/* With FIFO: opens the offset with its key, and acquires it unless it must wait. False: nothing
 * more can be acquired. */
static bool acquire_with_key(struct progress *progress, int64_t offset, uint32_t hash)
{
    struct mqd_share *share = progress->share;
    if (progress->acquired >= progress->acquired_max || (offset >= share->end && !may_open_another(share)))
        return false;
    struct mqd_share_page *page = make_expanded_page(share, offset);
    if (!page)
        return false;
    mqd_share_extend(share, offset + 1);
    if (!mqd_share_fifo_add(share, offset, hash)) {
        share->pool_exhausted = 1;
        return false;
    }
    return cell_state(page->cells[offset & PAGE_MASK]) != MQD_SHARE_AVAILABLE || acquire_offset(progress, page, offset);
}

/* Returns the index of the first record at or above `offset`. */
static uint32_t record_at(const struct mqd_share_batch *batch, int64_t offset)
{
    uint32_t low = 0, high = batch->record_count;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (batch->first + batch->records[middle].delta < offset)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Like acquire_range, but with FIFO: the records of a key are acquired in order. */
static bool acquire_in_order(struct progress *progress, const struct mqd_share_batch *batch, int64_t position)
{
    struct mqd_share *share = progress->share;
    int64_t next_key_offset = mqd_share_next_key_offset(share);
    if (position < next_key_offset) {
        int64_t last = batch->last < next_key_offset ? batch->last : next_key_offset - 1;
        if (!acquire_range(progress, position, last))
            return false;
        position = last + 1;
    }
    if (position <= batch->last && !batch->records) /* the keys have not been read yet */
        return false;
    uint32_t index = record_at(batch, position);
    for (; index < batch->record_count && position <= batch->last; index++) {
        int64_t offset = batch->first + batch->records[index].delta;
        if (position < offset && !skip(share, position, offset - 1))
            return false;
        position = offset + 1;
        if (offset >= share->start && !acquire_with_key(progress, offset, batch->records[index].hash))
            return false;
    }
    return position > batch->last || skip(share, position, batch->last);
}

uint32_t mqd_share_acquire(struct mqd_share *share, const struct mqd_share_acquisition *acquisition,
                           int64_t next_offset, const struct mqd_share_batch *batches, uint32_t batch_count,
                           struct mqd_share_run *out, uint32_t out_max)
{
    struct progress progress = {.share = share,
                                .acquisition = acquisition,
                                .out = out,
                                .out_max = out_max,
                                .acquired_max = acquisition->strict ? acquisition->records_max : UINT32_MAX,
                                .row = ROW_NONE};
    share->pool_exhausted = 0;
    MQD_ASSERT(share->settings.delivery_limit > 0 && share->settings.delivery_limit <= CELL_DELIVERIES_MAX,
               "S3: a limit of %d deliveries", share->settings.delivery_limit);
    MQD_ASSERT(next_offset <= share->end, "S4: read from %lld, beyond the end %lld", (long long)next_offset,
               (long long)share->end);
    int64_t position = next_offset > share->start ? next_offset : share->start;
    if (!mqd_share_fifo_apply_settings(share))
        return 0;
    for (uint32_t index = 0; index < batch_count; index++) {
        const struct mqd_share_batch *batch = &batches[index];
        if (progress.acquired >= acquisition->records_max || batch->last < batch->first)
            break;
        if (batch->last < position) /* finished in the meantime */
            continue;
        int64_t first = batch->first > position ? batch->first : position;
        if (position < first && !skip(share, position, first - 1))
            break;
        bool is_skipped = batch->skipped && !PLANTED_BUG(share, DELIVER_SKIPPED); /* S8 */
        if (is_skipped ? !skip(share, first, batch->last)
                       : !(share->fifo ? acquire_in_order(&progress, batch, first)
                                       : acquire_range(&progress, first, batch->last)))
            break;
        position = batch->last + 1;
    }
    mqd_share_advance(share);
    return progress.out_count;
}
