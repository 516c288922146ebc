/* Pages, cells and rows of a share-partition's state. See share/state.h. */
#include "share/state.h"

#include <string.h>

#include "base/assert.h"
#include "share/internal.h"

#define DIRECTORY_COUNT 8
#define ROW_COUNT_MAX (1u << 20)

void mqd_share_init(struct mqd_share *share, struct mqd_share_pool *pool, const struct mqd_share_settings *settings,
                    int64_t start)
{
    memset(share, 0, sizeof *share);
    share->pool = pool;
    share->settings = *settings;
    share->start = share->end = share->first_maybe = start;
    share->changed_first = INT64_MAX;
    share->changed_last = -1;
    share->row_free = share->row_head = share->row_tail = ROW_NONE;
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
        share->directory_used[block]++;
    }
    return page;
}

bool mqd_share_page_split(struct mqd_share *share, struct mqd_share_page *page)
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
    *page = (struct mqd_share_page){0};
    if (--share->directory_used[block] == 0) {
        mqd_share_pool_return(share->pool, share->directory[block]);
        share->directory[block] = NULL;
    }
}

void mqd_share_page_merge(struct mqd_share *share, struct mqd_share_page *page)
{
    if (!page->cells || page->available || page->acquired)
        return;
    for (uint32_t place = 1; place < MQD_SHARE_PAGE_OFFSETS; place++)
        if (page->cells[place] != page->cells[0])
            return;
    page->uniform = page->cells[0];
    mqd_share_pool_return(share->pool, page->cells);
    page->cells = NULL;
}

/* ---- cells ---- */

void mqd_share_note_changed(struct mqd_share *share, int64_t first, int64_t last)
{
    if (first < share->changed_first)
        share->changed_first = first;
    if (last > share->changed_last)
        share->changed_last = last;
}

/* How many more neighbours differ from `key` than from `old_key`, beside a stretch of cells. */
static uint32_t boundaries_more(const struct mqd_share *share, int64_t first, int64_t last, uint64_t key,
                                uint64_t old_key)
{
    uint32_t more = 0;
    if (first > share->start) {
        uint64_t left = cell_key(cell_of(share, first - 1));
        more += (uint32_t)(left != key) - (uint32_t)(left != old_key);
    }
    if (last + 1 < share->end) {
        uint64_t right = cell_key(cell_of(share, last + 1));
        more += (uint32_t)(right != key) - (uint32_t)(right != old_key);
    }
    return more;
}

void mqd_share_cells_set(struct mqd_share *share, struct mqd_share_page *page, int64_t first, uint32_t count,
                         uint64_t cell)
{
    uint64_t *at = &page->cells[first & PAGE_MASK], old = *at;
    uint64_t key = cell_key(cell), old_key = cell_key(old);
    if (key != old_key)
        share->boundary_count += boundaries_more(share, first, first + count - 1, key, old_key);
    uint32_t state = cell_state(cell), old_state = cell_state(old);
    page->available +=
        (uint16_t)(((state == MQD_SHARE_AVAILABLE) - (old_state == MQD_SHARE_AVAILABLE)) * (int32_t)count);
    int32_t acquired = ((state == MQD_SHARE_ACQUIRED) - (old_state == MQD_SHARE_ACQUIRED)) * (int32_t)count;
    page->acquired += (uint16_t)acquired;
    share->acquired_count += (uint32_t)acquired;
    share->open_count += (uint32_t)((cell_finished(old) - cell_finished(cell)) * (int32_t)count);
    for (uint32_t place = 0; place < count; place++)
        at[place] = cell;
}

void mqd_share_page_set(struct mqd_share *share, struct mqd_share_page *page, int64_t offset, uint64_t cell)
{
    int64_t last = page_end(offset) - 1;
    share->boundary_count += boundaries_more(share, offset, last, cell_key(cell), cell_key(page->uniform));
    page->uniform = cell;
    page->available = 0;
    share->open_count -= MQD_SHARE_PAGE_OFFSETS;
    mqd_share_note_changed(share, offset, last);
}

void mqd_share_extend(struct mqd_share *share, int64_t new_end)
{
    if (new_end <= share->end)
        return;
    if (share->end > share->start && cell_key(cell_of(share, share->end - 1)) != 0)
        share->boundary_count++;
    share->open_count += (uint32_t)(new_end - share->end);
    share->end = new_end;
}

void mqd_share_pass(struct mqd_share *share)
{
    int64_t offset = share->start;
    uint64_t cell = cell_of(share, offset);
    if (offset + 1 < share->end && cell_key(cell) != cell_key(cell_of(share, offset + 1)))
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
        if (PLANTED(share, PASS_ACQUIRED) && cell_state(cell) == MQD_SHARE_ACQUIRED) {
            uint32_t row = cell_row(cell);
            mqd_share_cells_set(share, page, share->start, 1, cell = MQD_SHARE_ACKNOWLEDGED);
            mqd_share_row_release(share, row, 1);
        }
        if (!cell_finished(cell)) /* S4 */
            break;
        if (page->cells || page_end(share->start) > share->end) {
            mqd_share_pass(share);
            continue;
        }
        /* the rest of a uniform page */
        int64_t stop = page_end(share->start);
        if (stop < share->end && cell_key(cell) != cell_key(cell_of(share, stop)))
            share->boundary_count--;
        share->start = stop;
        share->start_moved = 1;
        mqd_share_page_drop(share, stop - 1);
    }
    if (share->first_maybe < share->start)
        share->first_maybe = share->start;
    MQD_ASSERT(share->acquired_count <= share->open_count && share->open_count <= share->end - share->start,
               "S7: %u acquired, %u open from %lld to %lld", share->acquired_count, share->open_count,
               (long long)share->start, (long long)share->end);
}

uint32_t mqd_share_run_count(const struct mqd_share *share)
{
    return share->start < share->end ? share->boundary_count + 1 : 0;
}

struct mqd_share_run mqd_share_at(const struct mqd_share *share, int64_t offset)
{
    uint64_t cell = offset >= share->start && offset < share->end ? cell_of(share, offset) : 0;
    return (struct mqd_share_run){offset, offset, (int16_t)cell_state(cell), (int16_t)cell_count(cell)};
}

/* ---- rows ---- */

static uint32_t row_take(struct mqd_share *share)
{
    uint32_t index = share->row_free;
    if (index != ROW_NONE) {
        share->row_free = row_of(share, index)->next;
        return index;
    }
    index = share->row_count;
    if (index == ROW_COUNT_MAX)
        return ROW_NONE;
    void ***directory = &share->row_directory[index >> 17];
    if (!*directory) {
        if (!(*directory = mqd_share_pool_take(share->pool)))
            return ROW_NONE;
        memset(*directory, 0, MQD_SHARE_BLOCK_BYTES);
    }
    void **block = &(*directory)[index >> 7 & 1023];
    if (!*block && !(*block = mqd_share_pool_take(share->pool)))
        return ROW_NONE;
    share->row_count++;
    return index;
}

static void rows_drop(struct mqd_share *share)
{
    for (uint32_t index = 0; index < share->row_count; index += ROWS_A_BLOCK)
        mqd_share_pool_return(share->pool, share->row_directory[index >> 17][index >> 7 & 1023]);
    for (uint32_t directory = 0; directory < DIRECTORY_COUNT; directory++) {
        if (share->row_directory[directory])
            mqd_share_pool_return(share->pool, share->row_directory[directory]);
        share->row_directory[directory] = NULL;
    }
    share->row_count = share->row_used = 0;
    share->row_free = share->row_head = share->row_tail = ROW_NONE;
}

static void row_append(struct mqd_share *share, uint32_t index, int64_t now_ms)
{
    struct mqd_share_row *row = row_of(share, index);
    row->deadline_ms = now_ms + share->settings.lock_ms;
    row->next = ROW_NONE;
    row->previous = share->row_tail;
    if (share->row_tail == ROW_NONE) {
        share->row_head = index;
    } else {
        struct mqd_share_row *tail = row_of(share, share->row_tail);
        tail->next = index;
        if (row->deadline_ms < tail->deadline_ms) /* the lock's duration was reduced: S5 */
            row->deadline_ms = tail->deadline_ms;
    }
    share->row_tail = index;
}

static void row_unlink(struct mqd_share *share, const struct mqd_share_row *row)
{
    if (row->previous == ROW_NONE)
        share->row_head = row->next;
    else
        row_of(share, row->previous)->next = row->next;
    if (row->next == ROW_NONE)
        share->row_tail = row->previous;
    else
        row_of(share, row->next)->previous = row->previous;
}

uint32_t mqd_share_row_make(struct mqd_share *share, uint64_t member, int64_t offset, int64_t now_ms)
{
    uint32_t index = row_take(share);
    if (index == ROW_NONE)
        return ROW_NONE;
    *row_of(share, index) = (struct mqd_share_row){.first = offset, .last = offset, .member = member};
    share->row_used++;
    row_append(share, index, now_ms);
    return index;
}

void mqd_share_row_release(struct mqd_share *share, uint32_t index, uint32_t count)
{
    struct mqd_share_row *row = row_of(share, index);
    MQD_ASSERT(row->held >= count, "S5: an acquisition of %lld to %lld is released twice", (long long)row->first,
               (long long)row->last);
    if (row->held -= count)
        return;
    row_unlink(share, row);
    row->next = share->row_free;
    share->row_free = index;
    if (--share->row_used == 0 && share->row_count > ROWS_A_BLOCK)
        rows_drop(share);
}

void mqd_share_row_renew(struct mqd_share *share, uint32_t index, int64_t now_ms)
{
    row_unlink(share, row_of(share, index));
    row_append(share, index, now_ms);
}

int64_t mqd_share_deadline(const struct mqd_share *share)
{
    return share->row_head == ROW_NONE ? MQD_SHARE_NEVER : row_of(share, share->row_head)->deadline_ms;
}

void mqd_share_destroy(struct mqd_share *share)
{
    for (uint32_t block = 0; block < DIRECTORY_COUNT; block++) {
        struct mqd_share_page *pages = share->directory[block];
        if (!pages)
            continue;
        for (uint32_t place = 0; place < DIRECTORY_PAGES; place++)
            if (pages[place].cells)
                mqd_share_pool_return(share->pool, pages[place].cells);
        mqd_share_pool_return(share->pool, pages);
        share->directory[block] = NULL;
        share->directory_used[block] = 0;
    }
    rows_drop(share);
    share->open_count = share->acquired_count = share->boundary_count = 0;
    share->end = share->start;
}
