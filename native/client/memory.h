/* The producer's part of an attachment's data area: runs of chunks, one run per batch.
 *
 *   M1  a chunk is free or belongs to one run, as recorded in the bitmap. A run is allocated whole
 *       and freed whole, or its end is freed (when a batch is closed before it is full). A run
 *       has no header of its own: it contains only its batch's frame.
 *   M2  bounded: the bitmap is allocated when the producer is opened; nothing is allocated
 *       afterwards.
 *
 * Why allocation cannot deadlock. It is first fit from the low end; free neighbours merge
 * automatically, because there is no metadata between them. A run is freed when its batch is
 * answered, dropped or moved, and none of these needs memory: a batch is sent again from where it
 * is. So a caller that finds no run of the required length only has to stop allocating: every open
 * batch is closed by its linger time (or immediately, when all batches are open); every sent batch
 * is answered or its attachment ends; every failed batch is retried or dropped by its caller. When
 * all batches have ended, the whole area is one free run, and no batch may be larger than that. A
 * large record waits longer than small ones, but not forever, unless its caller keeps inserting
 * small records before it. Measures against fragmentation: a batch requests at most half of its
 * partition's share, so many partitions fit in a small area; it takes at least half of what it
 * requests, so a full area is not filled with small batches; low chunks are reused first, so a fast
 * worker's batches stay in the caches.
 *
 * Concurrency: the attachment's one thread.
 */
#ifndef MQD_CLIENT_MEMORY_H
#define MQD_CLIENT_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

struct mqd_client_memory {
    uint64_t *used_bits;  /* one per chunk; all bits beyond the last chunk are set */
    uint32_t chunk_bytes; /* a power of two */
    uint32_t chunk_count, free_count;
    uint32_t lowest; /* no chunk below this is free */
};

int mqd_client_memory_open(struct mqd_client_memory *memory, uint64_t size_bytes); /* -1 ENOMEM */
void mqd_client_memory_close(struct mqd_client_memory *memory);
/* Takes the first run of `preferred` chunks, otherwise the longest with at least `needed`. Returns
 * its first chunk and sets *got to its length, or returns UINT32_MAX if there is none. */
uint32_t mqd_client_memory_take(struct mqd_client_memory *memory, uint32_t preferred, uint32_t needed, uint32_t *got);
void mqd_client_memory_release(struct mqd_client_memory *memory, uint32_t first, uint32_t count);

static inline uint32_t mqd_client_memory_chunks_needed(const struct mqd_client_memory *memory, uint64_t size_bytes)
{
    return (uint32_t)((size_bytes + memory->chunk_bytes - 1) / memory->chunk_bytes);
}

#endif
