/* FIFO: the records of a key are delivered one after the other (F1). See share/state.h.
 *
 * Each open offset that has a key has a slot of 16 bytes. The slots are in blocks of 512, separate
 * from the pages.
 * The first open record of each key is in a hash bucket; later records of the key are Waiting and
 * linked after it. So the cost of a record does not depend on how many records are Waiting, and
 * finishing a record needs no memory.
 *
 * If there are more keys than buckets, one bucket is split (linear hashing). If there is no memory
 * for another bucket, the chains get longer. */
#include <string.h>

#include "base/assert.h"
#include "share/internal.h"

#define NONE UINT32_MAX
#define NOT_FIRST (UINT32_MAX - 1) /* the `tail` of a record that is not the first of its key */
#define PLACE_MASK ((1u << 21) - 1)
#define SLOT_BITS 9    /* a block has 2^SLOT_BITS slots */
#define BUCKET_BITS 11 /* or 2^BUCKET_BITS buckets */
#ifdef MQD_PLANTED
#define INITIAL_BITS 1 /* for tests: short histories also split buckets */
#else
#define INITIAL_BITS BUCKET_BITS
#endif
#define BUCKET_BLOCK_COUNT 512
#define POINTER_BITS 10
#define SLOT_DIRECTORY_COUNT 4

struct slot {       /* places are offsets modulo 2^21 */
    uint32_t hash;  /* 0: no key, or finished */
    uint32_t next;  /* the next record of its key, or NONE */
    uint32_t tail;  /* in the first record of a key: the key's last record; in the others: NOT_FIRST */
    uint32_t chain; /* the first record of the next key in the bucket */
};

struct mqd_share_fifo {
    uint32_t id; /* as in the settings */
    uint32_t key_count;
    /* there are 2^bits + split buckets; those below `split` are already split */
    uint32_t bits, split;
    int64_t next_key_offset; /* the next to add: all open offsets below it have a slot, or no key */
    struct slot **directory[SLOT_DIRECTORY_COUNT]; /* 1,024 blocks each */
    uint32_t *buckets[BUCKET_BLOCK_COUNT];
};
_Static_assert(sizeof(struct slot) << SLOT_BITS == MQD_SHARE_BLOCK_BYTES, "slots fill a block");
_Static_assert(sizeof(struct mqd_share_fifo) <= MQD_SHARE_BLOCK_BYTES, "struct mqd_share_fifo fits into a block");

int64_t mqd_share_next_key_offset(const struct mqd_share *share)
{
    if (!share->fifo)
        return MQD_SHARE_NEVER;
    return share->fifo->next_key_offset > share->start ? share->fifo->next_key_offset : share->start;
}

/* ---- slots ---- */

static uint32_t place_of(int64_t offset)
{
    return (uint32_t)offset & PLACE_MASK;
}

static int64_t offset_of(const struct mqd_share *share, uint32_t place)
{
    return share->start + ((place - (uint32_t)share->start) & PLACE_MASK);
}

static struct slot **block_of(const struct mqd_share_fifo *fifo, uint32_t place)
{
    struct slot **blocks = fifo->directory[place >> (SLOT_BITS + POINTER_BITS)];
    return blocks ? &blocks[place >> SLOT_BITS & ((1u << POINTER_BITS) - 1)] : NULL;
}

/* The slot of a place, which must have one. */
static struct slot *slot_of(const struct mqd_share_fifo *fifo, uint32_t place)
{
    return &(*block_of(fifo, place))[place & ((1u << SLOT_BITS) - 1)];
}

/* NULL: the offset has no slot, and therefore no key. */
static struct slot *slot_find(const struct mqd_share_fifo *fifo, int64_t offset)
{
    struct slot **block = block_of(fifo, place_of(offset));
    struct slot *slot = block && *block ? slot_of(fifo, place_of(offset)) : NULL;
    return slot && slot->hash ? slot : NULL;
}

static void *take_zeroed_block(struct mqd_share *share)
{
    void *block = mqd_share_pool_take(share->pool);
    return block ? memset(block, 0, MQD_SHARE_BLOCK_BYTES) : NULL;
}

static struct slot *slot_make(struct mqd_share *share, uint32_t place)
{
    struct mqd_share_fifo *fifo = share->fifo;
    struct slot ***blocks = &fifo->directory[place >> (SLOT_BITS + POINTER_BITS)];
    if (!*blocks && !(*blocks = take_zeroed_block(share)))
        return NULL;
    struct slot **block = block_of(fifo, place);
    if (!*block && !(*block = take_zeroed_block(share)))
        return NULL;
    return slot_of(fifo, place);
}

void mqd_share_fifo_page_drop(struct mqd_share *share, int64_t offset)
{
    for (int half = 0; share->fifo && half < 2; half++) {
        uint32_t place = (place_of(offset) & ~(uint32_t)PAGE_MASK) + (half ? 1u << SLOT_BITS : 0);
        struct slot **block = block_of(share->fifo, place);
        if (!block || !*block)
            continue;
        mqd_share_pool_return(share->pool, *block);
        *block = NULL;
    }
}

/* ---- buckets ---- */

static uint32_t bucket_count(const struct mqd_share_fifo *fifo)
{
    return (1u << fifo->bits) + fifo->split;
}

static uint32_t *bucket_at(struct mqd_share_fifo *fifo, uint32_t index)
{
    return &fifo->buckets[index >> BUCKET_BITS][index & ((1u << BUCKET_BITS) - 1)];
}

static uint32_t *bucket_of(struct mqd_share_fifo *fifo, uint32_t hash)
{
    uint32_t index = hash & ((1u << fifo->bits) - 1);
    if (index < fifo->split)
        index = hash & ((2u << fifo->bits) - 1);
    return bucket_at(fifo, index);
}

/* The link to the first record of the key; if the key has no record, the link at the end of its
 * bucket, which is NONE. */
static uint32_t *link_of(struct mqd_share_fifo *fifo, uint32_t hash)
{
    uint32_t *link = bucket_of(fifo, hash);
    while (*link != NONE && slot_of(fifo, *link)->hash != hash)
        link = &slot_of(fifo, *link)->chain;
    return link;
}

static bool ensure_bucket(struct mqd_share *share, uint32_t index)
{
    uint32_t **block = &share->fifo->buckets[index >> BUCKET_BITS];
    if (*block)
        return true;
    if (!(*block = mqd_share_pool_take(share->pool)))
        return false;
    memset(*block, 0xff, MQD_SHARE_BLOCK_BYTES);
    return true;
}

static void split_bucket(struct mqd_share *share)
{
    struct mqd_share_fifo *fifo = share->fifo;
    uint32_t old_index = fifo->split, bit = 1u << fifo->bits, new_index = old_index + bit;
    if (new_index >= BUCKET_BLOCK_COUNT << BUCKET_BITS || !ensure_bucket(share, new_index))
        return;
    for (uint32_t *link = bucket_at(fifo, old_index); *link != NONE;) {
        uint32_t place = *link;
        struct slot *slot = slot_of(fifo, place);
        if (!(slot->hash & bit)) {
            link = &slot->chain;
            continue;
        }
        *link = slot->chain;
        if (PLANTED_BUG(share, LOST_KEY))
            continue;
        slot->chain = *bucket_at(fifo, new_index);
        *bucket_at(fifo, new_index) = place;
    }
    if (++fifo->split == bit) {
        fifo->bits++;
        fifo->split = 0;
    }
}

/* Called when there are no keys, or when all keys are discarded. */
static void buckets_shrink(struct mqd_share *share)
{
    struct mqd_share_fifo *fifo = share->fifo;
    for (uint32_t block = 1; block < BUCKET_BLOCK_COUNT && fifo->buckets[block]; block++) {
        mqd_share_pool_return(share->pool, fifo->buckets[block]);
        fifo->buckets[block] = NULL;
    }
    fifo->bits = INITIAL_BITS;
    fifo->split = 0;
}

/* ---- beginning and ending ---- */

void mqd_share_fifo_free(struct mqd_share *share)
{
    struct mqd_share_fifo *fifo = share->fifo;
    if (!fifo)
        return;
    buckets_shrink(share);
    if (fifo->buckets[0])
        mqd_share_pool_return(share->pool, fifo->buckets[0]);
    for (uint32_t index = 0; index < SLOT_DIRECTORY_COUNT; index++) {
        struct slot **blocks = fifo->directory[index];
        for (uint32_t block = 0; blocks && block < 1u << POINTER_BITS; block++)
            if (blocks[block])
                mqd_share_pool_return(share->pool, blocks[block]);
        if (blocks)
            mqd_share_pool_return(share->pool, blocks);
    }
    mqd_share_pool_return(share->pool, fifo);
    share->fifo = NULL;
}

static void make_available(struct mqd_share *share, int64_t offset)
{
    uint64_t cell = cell_of(share, offset);
    mqd_share_cells_set(share, page_of(share, offset), offset, 1,
                        cell_make(MQD_SHARE_AVAILABLE, cell_deliveries(cell), cell & CELL_CHANGED, 0));
    if (offset < share->available_from)
        share->available_from = offset;
}

bool mqd_share_fifo_apply_settings(struct mqd_share *share)
{
    if ((share->fifo ? share->fifo->id : 0) == share->settings.fifo)
        return true;
    if (share->fifo && share->settings.fifo && PLANTED_BUG(share, OLD_KEYS))
        return true;
    mqd_share_fifo_free(share);
    for (int64_t offset = share->start; share->waiting_count && offset < share->end; offset++) {
        if (!page_of(share, offset)->waiting)
            offset = page_end(offset) - 1;
        else if (cell_state(cell_of(share, offset)) == MQD_SHARE_WAITING)
            make_available(share, offset);
    }
    if (!share->settings.fifo)
        return true;
    if (!(share->fifo = take_zeroed_block(share)))
        return false;
    share->fifo->id = share->settings.fifo;
    share->fifo->next_key_offset = share->start;
    share->fifo->bits = INITIAL_BITS;
    return true;
}

/* ---- keys ---- */

void mqd_share_fifo_advance(struct mqd_share *share, int64_t offset)
{
    if (share->fifo && offset > share->fifo->next_key_offset)
        share->fifo->next_key_offset = offset;
}

/* Links the slot after the open records of its key. */
static void append_to_key(struct mqd_share *share, struct slot *first, struct slot *slot, int64_t offset)
{
    uint64_t cell = cell_of(share, offset);
    struct slot *previous = PLANTED_BUG(share, NOT_LAST) ? first : slot_of(share->fifo, first->tail);
    slot->tail = NOT_FIRST;
    slot->next = previous->next;
    previous->next = place_of(offset);
    if (slot->next == NONE)
        first->tail = place_of(offset);
    if (cell_state(cell) == MQD_SHARE_AVAILABLE)
        mqd_share_cells_set(share, page_of(share, offset), offset, 1,
                            cell_make(MQD_SHARE_WAITING, cell_deliveries(cell), cell & CELL_CHANGED, 0));
}

bool mqd_share_fifo_add(struct mqd_share *share, int64_t offset, uint32_t hash)
{
    struct mqd_share_fifo *fifo = share->fifo;
    uint32_t place = place_of(offset);
    MQD_ASSERT(offset >= mqd_share_next_key_offset(share),
               "F1: the key of %lld is added, but those below %lld are known already", (long long)offset,
               (long long)mqd_share_next_key_offset(share));
    if (hash && !cell_finished(cell_of(share, offset))) {
        struct slot *slot = ensure_bucket(share, 0) ? slot_make(share, place) : NULL;
        if (!slot)
            return false;
        uint32_t *link = link_of(fifo, hash);
        slot->hash = hash;
        if (*link != NONE) {
            append_to_key(share, slot_of(fifo, *link), slot, offset);
        } else {
            slot->next = slot->chain = NONE;
            slot->tail = *link = place;
            if (++fifo->key_count > bucket_count(fifo))
                split_bucket(share);
        }
    }
    fifo->next_key_offset = offset + 1;
    return true;
}

/* Replaces the first record of a key in the bucket's chain with the next record of the key. */
static void promote_next(struct mqd_share *share, const struct slot *first, uint32_t *link)
{
    struct slot *next = slot_of(share->fifo, first->next);
    int64_t offset = offset_of(share, first->next);
    *link = first->next;
    next->tail = first->tail;
    next->chain = first->chain;
    if (cell_state(cell_of(share, offset)) == MQD_SHARE_WAITING && !PLANTED_BUG(share, FORGOTTEN))
        make_available(share, offset);
}

/* Unlinks a record that is not the first of its key: records that were acquired before FIFO was
 * enabled may be finished in any order. */
static void unlink_not_first(struct mqd_share *share, uint32_t first, uint32_t place)
{
    struct mqd_share_fifo *fifo = share->fifo;
    uint32_t previous = first;
    while (slot_of(fifo, previous)->next != place) {
        previous = slot_of(fifo, previous)->next;
        if (previous == NONE && PLANTED_BUG(share, LOST_KEY))
            return;
        MQD_ASSERT(previous != NONE, "F1: %lld is not linked", (long long)offset_of(share, place));
    }
    if ((slot_of(fifo, previous)->next = slot_of(fifo, place)->next) == NONE)
        slot_of(fifo, first)->tail = previous;
}

/* Unlinks a record that is no longer open. */
static void unlink_record(struct mqd_share *share, struct slot *slot, uint32_t place)
{
    struct mqd_share_fifo *fifo = share->fifo;
    uint32_t *link = link_of(fifo, slot->hash);
    if (*link == NONE && PLANTED_BUG(share, LOST_KEY))
        return;
    MQD_ASSERT(*link != NONE, "F1: the key of %lld is not found", (long long)offset_of(share, place));
    slot->hash = 0;
    if (*link != place) {
        unlink_not_first(share, *link, place);
    } else if (slot->next != NONE) {
        promote_next(share, slot, link);
    } else {
        *link = slot->chain;
        if (--fifo->key_count == 0)
            buckets_shrink(share);
    }
}

void mqd_share_fifo_on_change(struct mqd_share *share, int64_t first, uint32_t count, uint64_t old, uint64_t cell)
{
    uint32_t state = cell_state(cell), old_state = cell_state(old);
    bool is_finished = (cell_finished(cell) && !cell_finished(old)) ||
                       (PLANTED_BUG(share, LETTER_PASSED) && state == MQD_SHARE_ARCHIVING) ||
                       (PLANTED_BUG(share, OVERTAKE) && old_state == MQD_SHARE_ACQUIRED);
    bool is_released = state == MQD_SHARE_AVAILABLE &&
                       (old_state == MQD_SHARE_ACQUIRED || old_state == MQD_SHARE_DELAYED) &&
                       !PLANTED_BUG(share, LATER_FREED);
    for (int64_t offset = first; (is_finished || is_released) && offset < first + count; offset++) {
        struct slot *slot = slot_find(share->fifo, offset);
        if (slot && is_finished)
            unlink_record(share, slot, place_of(offset));
        else if (slot && slot->tail == NOT_FIRST)
            mqd_share_cells_set(share, page_of(share, offset), offset, 1,
                                cell_make(MQD_SHARE_WAITING, cell_deliveries(cell), cell & CELL_CHANGED, 0));
    }
}

/* ---- for tests ---- */

/* Returns the number of open records of the key whose first record is at `place`. */
static uint32_t check_key(const struct mqd_share *share, uint32_t place)
{
    const struct mqd_share_fifo *fifo = share->fifo;
    uint32_t hash = slot_of(fifo, place)->hash, tail = slot_of(fifo, place)->tail, last = place, count = 0;
    for (uint32_t at = place; at != NONE; last = at, at = slot_of(fifo, at)->next, count++) {
        int64_t offset = offset_of(share, at);
        const struct slot *slot = slot_of(fifo, at);
        MQD_ASSERT(slot->hash == hash && offset < fifo->next_key_offset &&
                       (at == place || offset > offset_of(share, last)),
                   "F1: %lld is linked out of order", (long long)offset);
        MQD_ASSERT((slot->tail == NOT_FIRST) == (at != place), "F1: %lld has the wrong tail", (long long)offset);
        uint32_t state = cell_state(cell_of(share, offset));
        MQD_ASSERT(state != (at == place ? MQD_SHARE_WAITING : MQD_SHARE_AVAILABLE) &&
                       !cell_finished(cell_of(share, offset)),
                   "F1: %lld is in state %u", (long long)offset, state);
    }
    MQD_ASSERT(last == tail, "F1: the last record of a key is %lld", (long long)offset_of(share, last));
    return count;
}

void mqd_share_fifo_check(const struct mqd_share *share)
{
    struct mqd_share_fifo *fifo = share->fifo;
    uint32_t keys = 0, linked = 0, open = 0;
    if (!fifo || PLANTED_ANY_BUG(share))
        return;
    for (uint32_t index = 0; fifo->buckets[0] && index < bucket_count(fifo); index++)
        for (uint32_t place = *bucket_at(fifo, index); place != NONE; place = slot_of(fifo, place)->chain, keys++) {
            MQD_ASSERT(bucket_of(fifo, slot_of(fifo, place)->hash) == bucket_at(fifo, index),
                       "F1: the key of %lld is in bucket %u", (long long)offset_of(share, place), index);
            linked += check_key(share, place);
        }
    for (int64_t offset = share->start; offset < share->end; offset++)
        open += slot_find(fifo, offset) != NULL;
    MQD_ASSERT(keys == fifo->key_count && linked == open,
               "F1: %u keys, the counter says %u; %u of %u offsets are linked", keys, fifo->key_count, linked, open);
}
