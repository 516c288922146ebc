/* Allocates runs of chunks by means of a bitmap; see client/memory.h. */
#include "client/memory.h"

#include <errno.h>
#include <stdlib.h>

#include "base/error.h"

#define CHUNK_BYTES_MIN 1024u
#define CHUNK_COUNT_MAX 16384u

int mqd_client_memory_open(struct mqd_client_memory *memory, uint64_t size_bytes)
{
    uint32_t chunk_bytes = CHUNK_BYTES_MIN;
    while (size_bytes / chunk_bytes > CHUNK_COUNT_MAX)
        chunk_bytes *= 2;
    uint32_t count = (uint32_t)(size_bytes / chunk_bytes), words = (count + 63) / 64;
    *memory = (struct mqd_client_memory){.used_bits = calloc(words ? words : 1, 8),
                                         .chunk_bytes = chunk_bytes,
                                         .chunk_count = count,
                                         .free_count = count};
    if (!memory->used_bits)
        return mqd_error_set_static(ENOMEM, "out of memory for a producer's map of its batches");
    if (count % 64)
        memory->used_bits[words - 1] = ~0ull << count % 64;
    return 0;
}

void mqd_client_memory_close(struct mqd_client_memory *memory)
{
    free(memory->used_bits);
    memory->used_bits = NULL;
}

/* Returns the first chunk at or after `at` that is used (if find_used) or free (otherwise), or
 * chunk_count if there is none. */
static uint32_t next_chunk(const struct mqd_client_memory *memory, uint32_t at, bool find_used)
{
    while (at < memory->chunk_count) {
        uint64_t word = memory->used_bits[at / 64];
        word = (find_used ? word : ~word) >> at % 64;
        if (word) {
            at += (uint32_t)__builtin_ctzll(word);
            break;
        }
        at = (at / 64 + 1) * 64;
    }
    return at < memory->chunk_count ? at : memory->chunk_count;
}

/* Returns the end of the free run that begins at `at`, of at most `limit` chunks. */
static uint32_t run_end(const struct mqd_client_memory *memory, uint32_t at, uint32_t limit)
{
    uint32_t end = next_chunk(memory, at, true);
    return end - at > limit ? at + limit : end;
}

static void set_used(struct mqd_client_memory *memory, uint32_t first, uint32_t count, bool is_used)
{
    for (uint32_t at = first, end = first + count; at < end;) {
        uint32_t bits = 64 - at % 64;
        if (bits > end - at)
            bits = end - at;
        uint64_t mask = (bits == 64 ? ~0ull : (1ull << bits) - 1) << at % 64;
        if (is_used)
            memory->used_bits[at / 64] |= mask;
        else
            memory->used_bits[at / 64] &= ~mask;
        at += bits;
    }
}

uint32_t mqd_client_memory_take(struct mqd_client_memory *memory, uint32_t preferred, uint32_t needed, uint32_t *got)
{
    if (memory->free_count < needed || needed == 0)
        return UINT32_MAX;
    uint32_t best = UINT32_MAX, best_count = needed - 1;
    uint32_t at = memory->lowest = next_chunk(memory, memory->lowest, false);
    for (uint32_t end; at < memory->chunk_count && best_count < preferred; at = next_chunk(memory, end, false)) {
        end = run_end(memory, at, preferred);
        if (end - at > best_count) {
            best = at;
            best_count = end - at;
        }
    }
    if (best == UINT32_MAX)
        return UINT32_MAX;
    set_used(memory, best, best_count, true);
    memory->free_count -= best_count;
    *got = best_count;
    return best;
}

void mqd_client_memory_release(struct mqd_client_memory *memory, uint32_t first, uint32_t count)
{
    set_used(memory, first, count, false);
    memory->free_count += count;
    if (first < memory->lowest)
        memory->lowest = first;
}
