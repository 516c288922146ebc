/* Pages, cells and rows of a share-partition's state. See share/state.h. */
#include "share/state.h"

#include <string.h>

#include "base/assert.h"
#include "share/internal.h"

#define DIRECTORY_COUNT 8
#define ROW_COUNT_MAX (1u << 20)

static void rows_reset(struct mqd_share *share)
{
    share->row_count = share->used_row_count = share->backoff_queue_count = 0;
    share->first_free_row = ROW_NONE;
    for (uint32_t queue = 0; queue < MQD_SHARE_QUEUE_COUNT; queue++)
        share->queues[queue] = (struct mqd_share_queue){ROW_NONE, ROW_NONE};
}

void mqd_share_init(struct mqd_share *share, struct mqd_share_pool *pool, const struct mqd_share_settings *settings,
                    int64_t start)
{
    memset(share, 0, sizeof *share);
    share->pool = pool;
    share->settings = *settings;
    share->start = share->end = share->available_from = start;
    share->changed_first = INT64_MAX;
    share->changed_last = -1;
    rows_reset(share);
}

/* ---- pages ---- */

struct mqd_share_page *mqd_share_page_make(struct mqd_share *share, int64_t offset)
{
    uint32_t block = ((uint32_t)(offset >> PAGE_BITS) & 2047) / DIRECTORY_PAGES;
    if (!share->directory[block]) {
        if (!(share->directory[block] = mqd_share_pool_take(share->pool)))
            return NULL;
        memset(share->directory[block], 0, MQD_SHARE_BLOCK_BYTES);
    }
    struct mqd_share_page *page = page_of(share, offset);
    if (!page->in_use) {
        *page = (struct mqd_share_page){.available = MQD_SHARE_PAGE_OFFSETS, .in_use = 1};
        share->used_page_counts[block]++;
    }
    return page;
}

bool mqd_share_page_expand(struct mqd_share *share, struct mqd_share_page *page)
{
    if (page->cells)
        return true;
    if (!(page->cells = mqd_share_pool_take(share->pool)))
        return false;
    for (uint32_t place = 0; place < MQD_SHARE_PAGE_OFFSETS; place++)
        page->cells[place] = page->uniform;
    return true;
}

void mqd_share_page_drop(struct mqd_share *share, int64_t offset)
{
    uint32_t block = ((uint32_t)(offset >> PAGE_BITS) & 2047) / DIRECTORY_PAGES;
    if (!share->directory[block] || !page_of(share, offset)->in_use)
        return;
    struct mqd_share_page *page = page_of(share, offset);
    if (page->cells)
        mqd_share_pool_return(share->pool, page->cells);
    mqd_share_fifo_page_drop(share, offset);
    *page = (struct mqd_share_page){0};
    if (--share->used_page_counts[block] == 0) {
        mqd_share_pool_return(share->pool, share->directory[block]);
        share->directory[block] = NULL;
    }
}

void mqd_share_page_collapse(struct mqd_share *share, int64_t offset)
{
    struct mqd_share_page *page = page_of(share, offset);
    if (!page->cells || page->available || page->acquired || page->delayed || page->archiving || page->waiting)
        return;
    for (uint32_t place = 1; place < MQD_SHARE_PAGE_OFFSETS; place++)
        if (page->cells[place] != page->cells[0])
            return;
    page->uniform = page->cells[0];
    mqd_share_fifo_page_drop(share, offset);
    mqd_share_pool_return(share->pool, page->cells);
    page->cells = NULL;
}

/* ---- cells ---- */

void mqd_share_mark_changed(struct mqd_share *share, int64_t first, int64_t last)
{
    if (first < share->changed_first)
        share->changed_first = first;
    if (last > share->changed_last)
        share->changed_last = last;
}

/* Returns by how much the number of boundaries changes when the cells of a range change from
 * `old_persisted` to `persisted`. */
static uint32_t boundary_change(const struct mqd_share *share, int64_t first, int64_t last, uint64_t old_persisted,
                                uint64_t persisted)
{
    uint32_t change = 0;
    if (first > share->start) {
        uint64_t neighbour = persisted_cell(cell_of(share, first - 1));
        change += (uint32_t)(neighbour != persisted) - (uint32_t)(neighbour != old_persisted);
    }
    if (last + 1 < share->end) {
        uint64_t neighbour = persisted_cell(cell_of(share, last + 1));
        change += (uint32_t)(neighbour != persisted) - (uint32_t)(neighbour != old_persisted);
    }
    return change;
}

void mqd_share_cells_set(struct mqd_share *share, struct mqd_share_page *page, int64_t first, uint32_t count,
                         uint64_t cell)
{
    uint64_t *cells = &page->cells[first & PAGE_MASK], old = *cells;
    uint64_t persisted = persisted_cell(cell), old_persisted = persisted_cell(old);
    if (persisted != old_persisted)
        share->boundary_count += boundary_change(share, first, first + count - 1, old_persisted, persisted);
    uint32_t state = cell_state(cell), old_state = cell_state(old);
    page->available +=
        (uint16_t)(((state == MQD_SHARE_AVAILABLE) - (old_state == MQD_SHARE_AVAILABLE)) * (int32_t)count);
    int32_t acquired = ((state == MQD_SHARE_ACQUIRED) - (old_state == MQD_SHARE_ACQUIRED)) * (int32_t)count;
    page->acquired += (uint16_t)acquired;
    share->acquired_count += (uint32_t)acquired;
    int32_t delayed = ((state == MQD_SHARE_DELAYED) - (old_state == MQD_SHARE_DELAYED)) * (int32_t)count;
    page->delayed += (uint16_t)delayed;
    share->delayed_count += (uint32_t)delayed;
    int32_t archiving = ((state == MQD_SHARE_ARCHIVING) - (old_state == MQD_SHARE_ARCHIVING)) * (int32_t)count;
    page->archiving += (uint16_t)archiving;
    share->archiving_count += (uint32_t)archiving;
    int32_t waiting = ((state == MQD_SHARE_WAITING) - (old_state == MQD_SHARE_WAITING)) * (int32_t)count;
    page->waiting += (uint16_t)waiting;
    share->waiting_count += (uint32_t)waiting;
    share->open_count += (uint32_t)((cell_finished(old) - cell_finished(cell)) * (int32_t)count);
    for (uint32_t i = 0; i < count; i++)
        cells[i] = cell;
    if (share->fifo)
        mqd_share_fifo_on_change(share, first, count, old, cell);
}

void mqd_share_page_archive(struct mqd_share *share, struct mqd_share_page *page, int64_t offset, uint64_t cell)
{
    int64_t last = page_end(offset) - 1;
    share->boundary_count += boundary_change(share, offset, last, persisted_cell(page->uniform), persisted_cell(cell));
    page->uniform = cell;
    page->available = 0;
    share->open_count -= MQD_SHARE_PAGE_OFFSETS;
    mqd_share_mark_changed(share, offset, last);
}

void mqd_share_extend(struct mqd_share *share, int64_t new_end)
{
    if (new_end <= share->end)
        return;
    if (share->end > share->start && persisted_cell(cell_of(share, share->end - 1)) != 0)
        share->boundary_count++;
    share->open_count += (uint32_t)(new_end - share->end);
    share->end = new_end;
}

void mqd_share_advance_one(struct mqd_share *share)
{
    int64_t offset = share->start;
    uint64_t cell = cell_of(share, offset);
    if (offset + 1 < share->end && persisted_cell(cell) != persisted_cell(cell_of(share, offset + 1)))
        share->boundary_count--;
    share->open_count -= !cell_finished(cell);
    share->start_moved = 1;
    if ((++share->start & PAGE_MASK) == 0)
        mqd_share_page_drop(share, offset);
}

void mqd_share_advance(struct mqd_share *share)
{
    while (share->start < share->end) {
        struct mqd_share_page *page = page_of(share, share->start);
        uint64_t cell = cell_of(share, share->start);
        if (PLANTED_BUG(share, PASS_ACQUIRED) && cell_state(cell) == MQD_SHARE_ACQUIRED) {
            uint32_t row = cell_row(cell);
            mqd_share_cells_set(share, page, share->start, 1, cell = MQD_SHARE_ACKNOWLEDGED);
            mqd_share_row_release(share, row, 1);
        }
        if (!cell_finished(cell)) /* S4 */
            break;
        if (page->cells || page_end(share->start) > share->end) {
            mqd_share_advance_one(share);
            continue;
        }
        /* the rest of a uniform page */
        int64_t stop = page_end(share->start);
        if (stop < share->end && persisted_cell(cell) != persisted_cell(cell_of(share, stop)))
            share->boundary_count--;
        share->start = stop;
        share->start_moved = 1;
        mqd_share_page_drop(share, stop - 1);
    }
    if (share->available_from < share->start)
        share->available_from = share->start;
    MQD_ASSERT(share->acquired_count <= share->open_count && share->open_count <= share->end - share->start,
               "S7: %u acquired, %u open from %lld to %lld", share->acquired_count, share->open_count,
               (long long)share->start, (long long)share->end);
}

uint32_t mqd_share_run_count(const struct mqd_share *share)
{
    return share->start < share->end ? share->boundary_count + 1 : 0;
}

struct mqd_share_run mqd_share_state_at(const struct mqd_share *share, int64_t offset)
{
    uint64_t cell = offset >= share->start && offset < share->end ? cell_of(share, offset) : 0;
    return (struct mqd_share_run){offset, offset, (int16_t)cell_state(cell), (int16_t)cell_deliveries(cell)};
}

/* ---- rows ---- */

/* Adds memory for more rows, which are unused at first. False: the pool is exhausted. */
static bool rows_grow(struct mqd_share *share)
{
    uint32_t index = share->row_count;
    if (index == ROW_COUNT_MAX)
        return false;
    void ***directory = &share->row_directory[index >> 17];
    if (!*directory) {
        if (!(*directory = mqd_share_pool_take(share->pool)))
            return false;
        memset(*directory, 0, MQD_SHARE_BLOCK_BYTES);
    }
    void **block = &(*directory)[index >> 7 & 1023];
    if (!(*block = mqd_share_pool_take(share->pool)))
        return false;
    share->row_count += ROWS_PER_BLOCK;
    for (uint32_t next = share->row_count; next > index; next--) {
        row_of(share, next - 1)->next = share->first_free_row;
        share->first_free_row = next - 1;
    }
    return true;
}

/* Takes an unused row. One row is reserved for each empty backoff queue (S9). is_first: the row is
 * for an empty backoff queue, so it may be a reserved one. ROW_NONE: the pool is exhausted. */
static uint32_t row_take(struct mqd_share *share, bool is_first)
{
    uint32_t reserved = is_first ? 0 : MQD_SHARE_QUEUE_COUNT - 1 - share->backoff_queue_count;
    if (share->row_count - share->used_row_count <= reserved && !rows_grow(share))
        return ROW_NONE;
    uint32_t index = share->first_free_row;
    share->first_free_row = row_of(share, index)->next;
    share->used_row_count++;
    return index;
}

static void rows_drop(struct mqd_share *share)
{
    for (uint32_t index = 0; index < share->row_count; index += ROWS_PER_BLOCK)
        mqd_share_pool_return(share->pool, share->row_directory[index >> 17][index >> 7 & 1023]);
    for (uint32_t directory = 0; directory < DIRECTORY_COUNT; directory++) {
        if (share->row_directory[directory])
            mqd_share_pool_return(share->pool, share->row_directory[directory]);
        share->row_directory[directory] = NULL;
    }
    rows_reset(share);
}

static void row_append(struct mqd_share *share, uint32_t index, uint32_t queue_index, int64_t deadline_ms)
{
    struct mqd_share_row *row = row_of(share, index);
    struct mqd_share_queue *queue = &share->queues[queue_index];
    row->queue = queue_index;
    row->deadline_ms = deadline_ms;
    row->next = ROW_NONE;
    row->previous = queue->tail;
    if (queue->tail == ROW_NONE) {
        queue->head = index;
        share->backoff_queue_count += queue_index != LOCK_QUEUE;
    } else {
        struct mqd_share_row *tail = row_of(share, queue->tail);
        tail->next = index;
        if (row->deadline_ms < tail->deadline_ms) /* the duration was reduced: S5 */
            row->deadline_ms = tail->deadline_ms;
    }
    queue->tail = index;
}

static void row_unlink(struct mqd_share *share, const struct mqd_share_row *row)
{
    struct mqd_share_queue *queue = &share->queues[row->queue];
    if (row->previous == ROW_NONE)
        queue->head = row->next;
    else
        row_of(share, row->previous)->next = row->next;
    if (row->next == ROW_NONE)
        queue->tail = row->previous;
    else
        row_of(share, row->next)->previous = row->previous;
    share->backoff_queue_count -= row->queue != LOCK_QUEUE && queue->head == ROW_NONE;
}

uint32_t mqd_share_row_make(struct mqd_share *share, uint64_t member, int64_t offset, int64_t now_ms)
{
    uint32_t index = row_take(share, false);
    if (index == ROW_NONE)
        return ROW_NONE;
    *row_of(share, index) = (struct mqd_share_row){.first = offset, .last = offset, .member = member};
    row_append(share, index, LOCK_QUEUE, now_ms + share->settings.lock_ms);
    return index;
}

int64_t mqd_share_backoff_ms(const struct mqd_share *share, uint32_t deliveries)
{
    int64_t first_ms = share->settings.backoff_ms, max_ms = share->settings.backoff_ms_max;
    uint32_t doublings = deliveries > 1 && !PLANTED_BUG(share, SAME_BACKOFF) ? deliveries - 1 : 0;
    int64_t backoff_ms = doublings < 31 ? first_ms << doublings : first_ms ? max_ms : 0;
    return backoff_ms < max_ms ? backoff_ms : max_ms;
}

uint32_t mqd_share_row_for_backoff(struct mqd_share *share, uint32_t deliveries, int64_t first, int64_t last,
                                   int64_t now_ms)
{
    uint32_t queue_index = queue_of(share, deliveries);
    int64_t deadline_ms = now_ms + mqd_share_backoff_ms(share, deliveries);
    uint32_t tail = share->queues[queue_index].tail;
    struct mqd_share_row *row = tail == ROW_NONE ? NULL : row_of(share, tail);
    bool fits_tail = row && deadline_ms <= row->deadline_ms && first - row->last <= ROW_HOLE_MAX &&
                     row->first - last <= ROW_HOLE_MAX;
    uint32_t index = fits_tail ? ROW_NONE : row_take(share, !row);
    if (index != ROW_NONE) {
        *row_of(share, index) = (struct mqd_share_row){.first = first, .last = last};
        row_append(share, index, queue_index, deadline_ms);
        return index;
    }
    MQD_ASSERT(row, "S9: no row is left for a backoff after %u deliveries", deliveries);
    if (first < row->first)
        row->first = first;
    if (last > row->last)
        row->last = last;
    if (row->deadline_ms < deadline_ms) /* out of memory for a new row: the offsets in this row wait longer */
        row->deadline_ms = deadline_ms;
    return tail;
}

void mqd_share_row_release(struct mqd_share *share, uint32_t index, uint32_t count)
{
    struct mqd_share_row *row = row_of(share, index);
    MQD_ASSERT(row->offset_count >= count, "S5: a row of %lld to %lld is released twice", (long long)row->first,
               (long long)row->last);
    if (row->offset_count -= count)
        return;
    row_unlink(share, row);
    row->next = share->first_free_row;
    share->first_free_row = index;
    if (--share->used_row_count == 0 && share->row_count > ROWS_PER_BLOCK)
        rows_drop(share);
}

void mqd_share_row_renew(struct mqd_share *share, uint32_t index, int64_t now_ms)
{
    row_unlink(share, row_of(share, index));
    row_append(share, index, LOCK_QUEUE, now_ms + share->settings.lock_ms);
}

int64_t mqd_share_deadline(const struct mqd_share *share)
{
    int64_t deadline_ms = MQD_SHARE_NEVER;
    uint32_t queue_count = share->delayed_count ? MQD_SHARE_QUEUE_COUNT : 1;
    for (uint32_t queue = 0; queue < queue_count; queue++) {
        uint32_t head = share->queues[queue].head;
        if (head != ROW_NONE && row_of(share, head)->deadline_ms < deadline_ms)
            deadline_ms = row_of(share, head)->deadline_ms;
    }
    return deadline_ms;
}

void mqd_share_destroy(struct mqd_share *share)
{
    mqd_share_fifo_free(share);
    for (uint32_t block = 0; block < DIRECTORY_COUNT; block++) {
        struct mqd_share_page *pages = share->directory[block];
        if (!pages)
            continue;
        for (uint32_t place = 0; place < DIRECTORY_PAGES; place++)
            if (pages[place].cells)
                mqd_share_pool_return(share->pool, pages[place].cells);
        mqd_share_pool_return(share->pool, pages);
        share->directory[block] = NULL;
        share->used_page_counts[block] = 0;
    }
    rows_drop(share);
    share->open_count = share->acquired_count = share->delayed_count = share->archiving_count = 0;
    share->boundary_count = share->waiting_count = 0;
    share->end = share->start;
}
