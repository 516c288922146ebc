/* Extents of a process's shared receive memory, reference counted. The bookkeeping is private to
 * the owner.
 *
 * A run is one or more neighbouring extents that were allocated together; any offset inside a run
 * identifies the run.
 *
 *   one extent   popped from a free list, last freed first: a reactor that repeatedly allocates and
 *                frees receive windows uses the same few hundred kilobytes, which stay in its L2
 *                cache. O(1).
 *   longer runs  found in a bitmap from the high end, so that they and the hot low extents do not
 *                fragment each other.
 *
 * Invariants
 *   A1  an extent is in the free list exactly when its bit in `free_bits` is set. It then belongs
 *       to no run, and its reference count is 0.
 *   A2  a run's reference count and length are stored in its first extent; in every extent of the
 *       run, `first` is the index of that first extent.
 * Concurrency: one thread.
 */
#include <errno.h>
#include <stdlib.h>

#include "base/assert.h"
#include "base/error.h"

#define NO_EXTENT UINT32_MAX

struct extent {
    uint32_t next; /* free list */
    uint32_t previous;
    uint32_t first; /* A2; NO_EXTENT when free */
    uint32_t length;
    uint32_t references;
};

struct mqd_arena {
    uint8_t *bytes;
    uint32_t extent_bytes;
    uint32_t extent_count;
    uint32_t used_count;
    uint32_t free_head;
    uint64_t *free_bits;
    struct extent extent[];
};

static void free_list_push(struct mqd_arena *arena, uint32_t index)
{
    struct extent *extent = &arena->extent[index];
    *extent = (struct extent){.next = arena->free_head, .previous = NO_EXTENT, .first = NO_EXTENT};
    if (arena->free_head != NO_EXTENT)
        arena->extent[arena->free_head].previous = index;
    arena->free_head = index;
    arena->free_bits[index >> 6] |= 1ull << (index & 63);
}

static void free_list_remove(struct mqd_arena *arena, uint32_t index)
{
    struct extent *extent = &arena->extent[index];
    if (extent->previous == NO_EXTENT)
        arena->free_head = extent->next;
    else
        arena->extent[extent->previous].next = extent->next;
    if (extent->next != NO_EXTENT)
        arena->extent[extent->next].previous = extent->previous;
    arena->free_bits[index >> 6] &= ~(1ull << (index & 63));
}

struct mqd_arena *mqd_arena_open(uint8_t *bytes, size_t size_bytes, uint32_t extent_bytes)
{
    if (extent_bytes == 0 || size_bytes / extent_bytes == 0 || size_bytes / extent_bytes >= NO_EXTENT) {
        mqd_error_set(MQD_E_INVALID, "an arena of %zu bytes cannot be cut into extents of %u", size_bytes,
                      extent_bytes);
        return NULL;
    }
    uint32_t count = (uint32_t)(size_bytes / extent_bytes);
    struct mqd_arena *arena = calloc(1, sizeof *arena + count * sizeof arena->extent[0]);
    uint64_t *free_bits = calloc((count + 63) / 64, sizeof *free_bits);
    if (!arena || !free_bits) {
        free(arena);
        free(free_bits);
        mqd_error_system(ENOMEM, "out of memory for the table of %u extents", count);
        return NULL;
    }
    arena->bytes = bytes;
    arena->extent_bytes = extent_bytes;
    arena->extent_count = count;
    arena->free_bits = free_bits;
    arena->free_head = NO_EXTENT;
    for (uint32_t index = count; index-- > 0;) /* so that the lowest index ends up at the head of the list */
        free_list_push(arena, index);
    return arena;
}

void mqd_arena_close(struct mqd_arena *arena)
{
    if (!arena)
        return;
    free(arena->free_bits);
    free(arena);
}

/* Returns the first extent of the highest run of `length` free extents, or NO_EXTENT. */
static uint32_t find_free_run(const struct mqd_arena *arena, uint32_t length)
{
    uint32_t free_count = 0; /* consecutive free extents that begin at `index` */
    for (uint32_t index = arena->extent_count; index-- > 0;) {
        uint64_t word = arena->free_bits[index >> 6];
        if (word == 0) { /* no free extent among these 64 */
            free_count = 0;
            index &= ~63u;
            continue;
        }
        free_count = word >> (index & 63) & 1 ? free_count + 1 : 0;
        if (free_count == length)
            return index;
    }
    return NO_EXTENT;
}

int64_t mqd_arena_allocate(struct mqd_arena *arena, uint64_t size_bytes)
{
    uint64_t needed = size_bytes / arena->extent_bytes + (size_bytes % arena->extent_bytes != 0);
    if (needed > arena->extent_count)
        return mqd_error_set(MQD_E_INVALID, "%llu bytes are more than the arena has", (unsigned long long)size_bytes);
    uint32_t length = needed ? (uint32_t)needed : 1;
    uint32_t first = length == 1 ? arena->free_head : find_free_run(arena, length);
    if (first == NO_EXTENT)
        return mqd_error_set_static(MQD_E_FULL, "the arena has no free run that is long enough");
    for (uint32_t index = first; index < first + length; index++) {
        MQD_ASSERT(arena->extent[index].first == NO_EXTENT && arena->extent[index].references == 0,
                   "A1: extent %u is allocated twice", index);
        free_list_remove(arena, index);
        arena->extent[index].first = first;
    }
    arena->extent[first].length = length;
    arena->extent[first].references = 1;
    arena->used_count += length;
    return (int64_t)first * arena->extent_bytes;
}

/* Returns the first extent of the run at `offset`, or NULL when nothing is allocated there. */
static struct extent *run_at(struct mqd_arena *arena, uint64_t offset)
{
    uint64_t index = offset / arena->extent_bytes;
    if (index >= arena->extent_count || arena->extent[index].first == NO_EXTENT)
        return NULL;
    return &arena->extent[arena->extent[index].first];
}

uint64_t mqd_arena_find_run(struct mqd_arena *arena, uint64_t offset, uint64_t *start)
{
    const struct extent *run = run_at(arena, offset);
    *start = run ? (uint64_t)(run - arena->extent) * arena->extent_bytes : 0;
    return run ? (uint64_t)run->length * arena->extent_bytes : 0;
}

void mqd_arena_hold(struct mqd_arena *arena, uint64_t offset)
{
    struct extent *run = run_at(arena, offset);
    MQD_ASSERT(run && run->references < UINT32_MAX, "A2: arena offset %llu is held but %s", (unsigned long long)offset,
               run ? "has too many references" : "is not allocated");
    run->references++;
}

/* Returns 1 if this was the last reference, 0 if others remain, or -1 MQD_E_INVALID when nothing is
 * allocated at `offset` (a peer released it twice). */
int mqd_arena_release(struct mqd_arena *arena, uint64_t offset)
{
    struct extent *run = run_at(arena, offset);
    if (!run)
        return mqd_error_set(MQD_E_INVALID, "nothing is allocated at arena offset %llu", (unsigned long long)offset);
    MQD_ASSERT(run->references > 0 && run->length <= arena->used_count,
               "A2: arena offset %llu is released: its run has %u references and %u extents; %u extents are in use",
               (unsigned long long)offset, run->references, run->length, arena->used_count);
    if (--run->references)
        return 0;
    uint32_t first = (uint32_t)(run - arena->extent);
    uint32_t length = run->length;
    for (uint32_t index = first + length; index-- > first;)
        free_list_push(arena, index);
    arena->used_count -= length;
    return 1;
}

/* Sorts the free list, the lowest extent first: otherwise, after many allocations and releases,
 * single extents would be taken from places that long runs need. */
void mqd_arena_sort_free_extents(struct mqd_arena *arena)
{
    arena->free_head = NO_EXTENT;
    for (uint32_t index = arena->extent_count; index-- > 0;)
        if (arena->free_bits[index >> 6] >> (index & 63) & 1)
            free_list_push(arena, index);
}

uint32_t mqd_arena_extents_used(struct mqd_arena *arena)
{
    return arena->used_count;
}

uint32_t mqd_arena_extents_total(struct mqd_arena *arena)
{
    return arena->extent_count;
}
