/* Cells, pages and rows of share/state.h, for its files. */
#ifndef MQD_SHARE_INTERNAL_H
#define MQD_SHARE_INTERNAL_H

#include <stddef.h>

#include "share/planted_bugs.h"
#include "share/state.h"

#define PAGE_BITS 10
#define PAGE_MASK (MQD_SHARE_PAGE_OFFSETS - 1)
#define DIRECTORY_PAGES 256 /* in one block of the directory */
#define ROW_NONE UINT32_MAX
#define ROWS_PER_BLOCK 128
/* Rows may have holes, but a longer hole begins another row, so that few cells that belong to other
 * rows are visited when a row is walked. */
#define ROW_HOLE_MAX 256
#define LOCK_QUEUE 0 /* index of the queue of acquisitions; the others are for backoffs */

#define CELL_STATE_MASK 7ull
#define CELL_CHANGED 8ull
#define CELL_DELIVERIES_SHIFT 4
#define CELL_DELIVERIES_MAX 0x7fff /* an int16 on the wire */

struct mqd_share_page {
    uint64_t *cells;  /* NULL: all are `uniform` */
    uint64_t uniform; /* the cell of all offsets; neither acquired nor Archiving */
    /* the number of its 1,024 offsets in each state, including offsets outside start..end */
    uint16_t available, acquired, delayed;
    uint16_t archiving, waiting;
    uint8_t in_use;
};

struct mqd_share_row {
    int64_t first, last;
    uint64_t member;
    int64_t deadline_ms;
    uint32_t offset_count; /* offsets that belong to this row */
    uint32_t next, previous, queue;
} __attribute__((aligned(64)));
_Static_assert(sizeof(struct mqd_share_row) * ROWS_PER_BLOCK == MQD_SHARE_BLOCK_BYTES, "rows fill a block");
_Static_assert(sizeof(struct mqd_share_page) * DIRECTORY_PAGES <= MQD_SHARE_BLOCK_BYTES, "pages fit into a block");

static inline uint64_t cell_make(uint32_t state, uint32_t deliveries, uint64_t changed, uint32_t row)
{
    return state | changed | (uint64_t)deliveries << CELL_DELIVERIES_SHIFT | (uint64_t)row << 32;
}
static inline uint32_t cell_state(uint64_t cell)
{
    return (uint32_t)(cell & CELL_STATE_MASK);
}
static inline uint32_t cell_deliveries(uint64_t cell)
{
    return (uint32_t)(cell >> CELL_DELIVERIES_SHIFT) & 0xffff;
}
static inline uint32_t cell_row(uint64_t cell)
{
    return (uint32_t)(cell >> 32);
}
static inline bool cell_finished(uint64_t cell)
{
    return (cell & CELL_STATE_MASK) == MQD_SHARE_ACKNOWLEDGED || (cell & CELL_STATE_MASK) == MQD_SHARE_ARCHIVED;
}
/* The next state of a record that is archived without having been accepted: Archived, or, if a dead
 * letter must be written first, Archiving (L1). */
static inline uint32_t archived_state(const struct mqd_share *share)
{
    return share->settings.dead_letters && !PLANTED_BUG(share, NO_LETTER) ? MQD_SHARE_ARCHIVING : MQD_SHARE_ARCHIVED;
}
/* Acquired, or waiting for the end of its backoff. */
static inline bool cell_has_row(uint64_t cell)
{
    return cell_state(cell) == MQD_SHARE_ACQUIRED || cell_state(cell) == MQD_SHARE_DELAYED;
}
/* Returns the cell as it is persisted: only state and count. For an acquired offset these are the
 * values before its acquisition. */
static inline uint64_t persisted_cell(uint64_t cell)
{
    switch (cell_state(cell)) {
    case MQD_SHARE_ACQUIRED:
        return cell_make(MQD_SHARE_AVAILABLE, cell_deliveries(cell) - 1, 0, 0);
    case MQD_SHARE_DELAYED:
    case MQD_SHARE_WAITING:
        return cell_make(MQD_SHARE_AVAILABLE, cell_deliveries(cell), 0, 0);
    default:
        return cell & (CELL_STATE_MASK | 0xffffull << CELL_DELIVERIES_SHIFT);
    }
}

static inline struct mqd_share_page *page_of(const struct mqd_share *share, int64_t offset)
{
    uint32_t place = (uint32_t)(offset >> PAGE_BITS) & 2047;
    return &share->directory[place / DIRECTORY_PAGES][place % DIRECTORY_PAGES];
}
/* The offset's page must not be before the page of start, nor after the page of end - 1. */
static inline uint64_t cell_of(const struct mqd_share *share, int64_t offset)
{
    const struct mqd_share_page *page = page_of(share, offset);
    return page->cells ? page->cells[offset & PAGE_MASK] : page->uniform;
}
static inline struct mqd_share_row *row_of(const struct mqd_share *share, uint32_t index)
{
    struct mqd_share_row *rows = share->row_directory[index >> 17][index >> 7 & 1023];
    return &rows[index & (ROWS_PER_BLOCK - 1)];
}
static inline int64_t page_end(int64_t offset)
{
    return (offset | PAGE_MASK) + 1;
}

/* Returns the page of an offset; creates it if there is none. NULL: the pool is exhausted. */
struct mqd_share_page *mqd_share_page_make(struct mqd_share *share, int64_t offset);
/* Gives each offset of the page its own cell. false: the pool is exhausted. */
bool mqd_share_page_expand(struct mqd_share *share, struct mqd_share_page *page);
void mqd_share_page_drop(struct mqd_share *share, int64_t offset);
/* Makes an expanded page uniform again if its offsets are finished in the same way. */
void mqd_share_page_collapse(struct mqd_share *share, int64_t offset);
/* Replaces `count` equal cells; the offsets are between start and end, in one expanded page. */
void mqd_share_cells_set(struct mqd_share *share, struct mqd_share_page *page, int64_t first, uint32_t count,
                         uint64_t cell);
/* Archives a uniform page, all of whose offsets are Available and between start and end. */
void mqd_share_page_archive(struct mqd_share *share, struct mqd_share_page *page, int64_t offset, uint64_t cell);
/* Adds the offsets up to new_end to the state, as Available. Their pages must exist. */
void mqd_share_extend(struct mqd_share *share, int64_t new_end);
/* Moves the start over finished offsets. */
void mqd_share_advance(struct mqd_share *share);
/* Moves the start by one, whatever the state of the offset. */
void mqd_share_advance_one(struct mqd_share *share);
void mqd_share_mark_changed(struct mqd_share *share, int64_t first, int64_t last);

/* ---- fifo.c ---- */
/* Begins or ends FIFO according to the current settings. false: the pool is exhausted, and nothing
 * may be acquired. */
bool mqd_share_fifo_apply_settings(struct mqd_share *share);
/* Adds the key of the next open offset, which is in an expanded page. false: the pool is
 * exhausted. */
bool mqd_share_fifo_add(struct mqd_share *share, int64_t offset, uint32_t hash);
/* Called when all keys below `offset` are known: moves mqd_share_next_key_offset there. */
void mqd_share_fifo_advance(struct mqd_share *share, int64_t offset);
/* Called after cells were replaced. If an offset is finished, the next record of its key becomes
 * Available; if an offset was released, it becomes Waiting unless it is the first of its key. */
void mqd_share_fifo_on_change(struct mqd_share *share, int64_t first, uint32_t count, uint64_t old, uint64_t cell);
/* Called when no offset of the page is still open. */
void mqd_share_fifo_page_drop(struct mqd_share *share, int64_t offset);
void mqd_share_fifo_check(const struct mqd_share *share);
/* Returns the memory to the pool; the cells stay unchanged. */
void mqd_share_fifo_free(struct mqd_share *share);

/* Appends an acquisition without offsets to the queue of locks. ROW_NONE: the pool is exhausted. */
uint32_t mqd_share_row_make(struct mqd_share *share, uint64_t member, int64_t offset, int64_t now_ms);
/* Returns the queue for the backoffs of offsets that were delivered `deliveries` times. */
static inline uint32_t queue_of(const struct mqd_share *share, uint32_t deliveries)
{
    (void)share;
    return deliveries < MQD_SHARE_QUEUE_COUNT && !PLANTED_BUG(share, ONE_QUEUE) ? deliveries
                                                                                : MQD_SHARE_QUEUE_COUNT - 1;
}
/* Returns a row for the offsets from first to last, which are released after `deliveries`
 * deliveries: the last row of the queue for that number, or a new row. The caller adds the offsets
 * to its offset_count. */
uint32_t mqd_share_row_for_backoff(struct mqd_share *share, uint32_t deliveries, int64_t first, int64_t last,
                                   int64_t now_ms);
/* Returns how long an offset that was delivered `deliveries` times waits before the next
 * delivery. */
int64_t mqd_share_backoff_ms(const struct mqd_share *share, uint32_t deliveries);
/* Removes offsets from a row, which is freed with its last offset. */
void mqd_share_row_release(struct mqd_share *share, uint32_t index, uint32_t count);
/* Moves the row to the end of its queue, with a new deadline. */
void mqd_share_row_renew(struct mqd_share *share, uint32_t index, int64_t now_ms);

#endif
