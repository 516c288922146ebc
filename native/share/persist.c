/* Writes a share-partition's state as runs of offsets, and loads it. See share/state.h. */
#include "share/internal.h"

/* Appends an offset with this persisted cell to the runs. false: `out` is full. */
static bool append(struct mqd_share_run *out, uint32_t *count, uint32_t max, int64_t offset, uint64_t persisted)
{
    struct mqd_share_run *run = *count ? &out[*count - 1] : NULL;
    if (run && run->last + 1 == offset && (uint32_t)run->state == cell_state(persisted) &&
        (uint32_t)run->count == cell_deliveries(persisted)) {
        run->last = offset;
        return true;
    }
    if (*count == max)
        return false;
    out[(*count)++] =
        (struct mqd_share_run){offset, offset, (int16_t)cell_state(persisted), (int16_t)cell_deliveries(persisted)};
    return true;
}

/* Lists the changes of one page from `offset` to `last`. Returns the first offset that did
 * not fit, or `last` + 1. */
static int64_t list_page_changes(struct mqd_share *share, struct mqd_share_page *page, int64_t offset, int64_t last,
                                 struct mqd_share_run *out, uint32_t *count, uint32_t max)
{
    if (!page->cells) {
        if (!(page->uniform & CELL_CHANGED))
            return last + 1;
        if (!append(out, count, max, offset, persisted_cell(page->uniform)))
            return offset;
        out[*count - 1].last = last;
        page->uniform &= ~CELL_CHANGED;
        return last + 1;
    }
    for (; offset <= last; offset++) {
        uint64_t *cell = &page->cells[offset & PAGE_MASK];
        if (!(*cell & CELL_CHANGED))
            continue;
        bool omit = PLANTED_BUG(share, OMIT_ACQUIRED) && cell_state(*cell) == MQD_SHARE_ACQUIRED;
        if (!omit && !append(out, count, max, offset, persisted_cell(*cell)) &&
            !PLANTED_BUG(share, LOSE_CHANGES)) /* S6 */
            return offset;
        *cell &= ~CELL_CHANGED;
    }
    return offset;
}

void mqd_share_take_difference(struct mqd_share *share, struct mqd_share_run *out, uint32_t out_max,
                               struct mqd_share_difference *difference)
{
    int64_t offset = share->changed_first > share->start ? share->changed_first : share->start;
    int64_t last = share->changed_last < share->end ? share->changed_last : share->end - 1;
    uint32_t count = 0;
    while (offset <= last) {
        struct mqd_share_page *page = page_of(share, offset);
        int64_t stop = page_end(offset) - 1 < last ? page_end(offset) - 1 : last;
        offset = list_page_changes(share, page, offset, stop, out, &count, out_max);
        if (offset <= stop)
            break;
        mqd_share_page_collapse(share, stop);
    }
    *difference = (struct mqd_share_difference){
        .start = share->start_moved ? share->start : -1,
        .run_count = count,
        .finished_count = (uint32_t)(share->end - share->start) - share->open_count,
        .is_whole = offset > last,
        .is_empty = !share->start_moved && !count,
    };
    share->start_moved = 0;
    share->changed_first = offset > last ? INT64_MAX : offset;
    share->changed_last = offset > last ? -1 : last;
}

uint32_t mqd_share_snapshot(const struct mqd_share *share, int64_t first, struct mqd_share_run *out, uint32_t out_max,
                            int64_t *next)
{
    uint32_t count = 0;
    *next = -1;
    for (int64_t offset = first > share->start ? first : share->start; offset < share->end; offset++) {
        uint64_t persisted = persisted_cell(cell_of(share, offset));
        if (persisted && !append(out, &count, out_max, offset, persisted)) {
            *next = offset;
            break;
        }
    }
    return count;
}

/* ---- loading ---- */

static bool is_loadable(const struct mqd_share *share, const struct mqd_share_run *runs, uint32_t count)
{
    int64_t previous = -1;
    for (uint32_t index = 0; index < count; index++) {
        const struct mqd_share_run *run = &runs[index];
        if (run->first <= previous || run->last < run->first || run->count < 0 ||
            (run->state != MQD_SHARE_AVAILABLE && run->state != MQD_SHARE_ACKNOWLEDGED &&
             run->state != MQD_SHARE_ARCHIVING && run->state != MQD_SHARE_ARCHIVED))
            return false;
        previous = run->last;
    }
    return previous < share->start || previous - share->start < MQD_SHARE_SPAN_MAX;
}

static bool load_run(struct mqd_share *share, const struct mqd_share_run *run)
{
    bool is_archiving = run->state == MQD_SHARE_ARCHIVING;
    bool is_retried = is_archiving && PLANTED_BUG(share, LETTER_RETRIED);
    uint32_t state = is_retried ? MQD_SHARE_AVAILABLE : (uint32_t)run->state;
    uint64_t cell = cell_make(state, (uint32_t)run->count, 0, 0);
    for (int64_t offset = run->first > share->start ? run->first : share->start; offset <= run->last;) {
        struct mqd_share_page *page = page_of(share, offset);
        if ((offset & PAGE_MASK) == 0 && run->last >= page_end(offset) - 1 && !is_archiving) {
            page->uniform = cell;
            page->available = run->state == MQD_SHARE_AVAILABLE ? MQD_SHARE_PAGE_OFFSETS : 0;
            offset = page_end(offset);
            continue;
        }
        if (!mqd_share_page_expand(share, page))
            return false;
        page->cells[offset & PAGE_MASK] = cell;
        page->available -= state != MQD_SHARE_AVAILABLE;
        page->archiving += state == MQD_SHARE_ARCHIVING;
        share->archiving_count += state == MQD_SHARE_ARCHIVING;
        offset++;
    }
    return true;
}

/* Computes the counts, which mqd_share_cells_set then keeps up to date. */
static void count_all(struct mqd_share *share)
{
    uint64_t previous = 0;
    share->open_count = share->boundary_count = 0;
    for (int64_t offset = share->start; offset < share->end; offset++) {
        uint64_t cell = cell_of(share, offset);
        share->open_count += !cell_finished(cell);
        share->boundary_count += offset > share->start && cell != previous;
        previous = cell;
    }
}

int mqd_share_load(struct mqd_share *share, const struct mqd_share_run *runs, uint32_t count)
{
    share->pool_exhausted = 0;
    if (!is_loadable(share, runs, count))
        return -1;
    if (!count || runs[count - 1].last < share->start)
        return 0;
    share->pool_exhausted = 1; /* the reason for every -1 below */
    int64_t end = runs[count - 1].last + 1;
    for (int64_t offset = share->start; offset < end; offset = page_end(offset))
        if (!mqd_share_page_make(share, offset))
            return -1;
    for (uint32_t index = 0; index < count; index++)
        if (!load_run(share, &runs[index]))
            return -1;
    share->pool_exhausted = 0;
    share->end = end;
    count_all(share);
    mqd_share_advance(share);
    return 0;
}
