/* Opening the two ends of a ring; the frequent operations are inline in shm/ring.h. */
#include "shm/ring.h"

#include "base/error.h"

size_t mqd_ring_size_bytes(uint32_t capacity)
{
    return sizeof(struct mqd_ring) + (size_t)capacity * sizeof(struct mqd_descriptor);
}

static int check_ring(const struct mqd_ring *ring, uint32_t capacity, uint64_t head, uint64_t tail)
{
    if (capacity == 0 || (capacity & (capacity - 1)) != 0 || ((uintptr_t)ring & (MQD_CACHE_LINE - 1)) != 0)
        return mqd_error_set(MQD_E_INVALID,
                             "a ring's capacity must be a power of two and its memory must begin at a cache line; "
                             "got %u at %p",
                             capacity, (const void *)ring);
    if (tail - head > capacity)
        return mqd_error_set(MQD_E_CORRUPT,
                             "ring counters are impossible (head %llu, tail %llu, capacity %u): its shared memory was "
                             "overwritten; restart the whole broker",
                             (unsigned long long)head, (unsigned long long)tail, capacity);
    return 0;
}

/* tail does not move, because this process is its only writer; head may move, but never beyond
 * tail. */
int mqd_ring_writer_open(struct mqd_ring_writer *writer, struct mqd_ring *ring, uint32_t capacity)
{
    uint64_t tail = mqd_load_acquire(&ring->tail);
    uint64_t head = mqd_load_acquire(&ring->head);
    *writer =
        (struct mqd_ring_writer){.ring = ring, .capacity = capacity, .head = head, .tail = tail, .published = tail};
    return check_ring(ring, capacity, head, tail);
}

int mqd_ring_reader_open(struct mqd_ring_reader *reader, struct mqd_ring *ring, uint32_t capacity)
{
    uint64_t head = mqd_load_acquire(&ring->head);
    uint64_t tail = mqd_load_acquire(&ring->tail);
    *reader = (struct mqd_ring_reader){.ring = ring, .capacity = capacity, .head = head, .tail = tail};
    return check_ring(ring, capacity, head, tail);
}
