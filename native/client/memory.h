/* The producer's part of an attachment's data area: runs of chunks, one run a batch.
 *
 *   M1  a chunk is free or belongs to one run; the bitmap says which. A run is given whole and
 *       given back whole, or its end is given back (a batch that was closed before it was full). No
 *       headers in the memory itself: what lies there is the frame alone.
 *   M2  bounded: the bitmap is made when the producer is opened; nothing is allocated afterwards.
 *
 * Why it cannot wedge. First fit from the low end; neighbours join by themselves, for there is
 * nothing between them. A run ends when its batch is answered, dropped or moved, and none of these
 * needs memory: a batch that is sent again is sent from where it lies. So whoever finds no run of
 * the length he needs only has to take no new ones: every open batch is closed by its linger (or by
 * whoever finds none when open ones are all there are), every sent one is answered or its
 * attachment ends, every failed one is decided by its caller. At the latest when all have ended,
 * the whole area is one run, and nothing larger than that is accepted. A large record waits longer
 * than small ones would, never forever, unless its caller keeps putting small ones before it. How
 * it stays good before that: a batch asks for no more than half its partition's share, so many
 * partitions have room in a small area, and takes no less than half of what it asks for, so that a
 * full area is not filled up with small batches; low chunks are used again first, so a fast
 * worker's batches stay in the caches.
 *
 * Concurrency: the attachment's one thread.
 */
#ifndef MQD_CLIENT_MEMORY_H
#define MQD_CLIENT_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

struct mqd_client_memory {
    uint64_t *used;       /* a bit a chunk; beyond the last chunk all set */
    uint32_t chunk_bytes; /* a power of two */
    uint32_t chunk_count, free_count;
    uint32_t lowest; /* no chunk below is free */
};

int mqd_client_memory_open(struct mqd_client_memory *memory, uint64_t size_bytes); /* -1 ENOMEM */
void mqd_client_memory_close(struct mqd_client_memory *memory);
/* The first run of `wanted` chunks, else the longest that has at least `needed`. *got: how many.
 * UINT32_MAX = none. */
uint32_t mqd_client_memory_take(struct mqd_client_memory *memory, uint32_t wanted, uint32_t needed, uint32_t *got);
void mqd_client_memory_give(struct mqd_client_memory *memory, uint32_t first, uint32_t count);

static inline uint32_t mqd_client_memory_chunks(const struct mqd_client_memory *memory, uint64_t size_bytes)
{
    return (uint32_t)((size_bytes + memory->chunk_bytes - 1) / memory->chunk_bytes);
}

#endif
