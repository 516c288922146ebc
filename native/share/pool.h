/* Memory for share states: blocks of one size from a region that the owner provides, e.g. a mapping
 * of share.memory.max.bytes. All share-partitions of a worker use one pool.
 *
 * Blocks that were never taken are never touched, so the region costs only what is used.
 * Concurrency: one thread, to which all states that use the pool belong.
 */
#ifndef MQD_SHARE_POOL_H
#define MQD_SHARE_POOL_H
/* MQD_CDEF_OFF */
#include <stdint.h>
/* MQD_CDEF_ON */

#define MQD_SHARE_BLOCK_BYTES 8192

struct mqd_share_pool {
    uint8_t *memory;
    void *free;           /* returned blocks; the first word of each is the address of the next */
    uint32_t block_count; /* in the region */
    uint32_t touched;     /* blocks that were ever taken */
    uint32_t used;        /* blocks in use now */
};

/* `memory`: aligned to a cache line; a remainder smaller than a block is not used. */
void mqd_share_pool_init(struct mqd_share_pool *pool, void *memory, uint64_t size_bytes);
/* Returns a block with undefined content. NULL: the pool is exhausted. */
void *mqd_share_pool_take(struct mqd_share_pool *pool);
void mqd_share_pool_return(struct mqd_share_pool *pool, void *block);

#endif
