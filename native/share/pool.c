/* See share/pool.h. */
#include "share/pool.h"

#include <stddef.h>

#include "base/assert.h"

void mqd_share_pool_init(struct mqd_share_pool *pool, void *memory, uint64_t size_bytes)
{
    uint64_t count = size_bytes / MQD_SHARE_BLOCK_BYTES;
    *pool = (struct mqd_share_pool){.memory = memory, .block_count = count > UINT32_MAX ? UINT32_MAX : (uint32_t)count};
}

void *mqd_share_pool_take(struct mqd_share_pool *pool)
{
    void *block = pool->free;
    if (block)
        pool->free = *(void **)block;
    else if (pool->touched < pool->block_count)
        block = pool->memory + (uint64_t)pool->touched++ * MQD_SHARE_BLOCK_BYTES;
    else
        return NULL;
    pool->used++;
    return block;
}

void mqd_share_pool_return(struct mqd_share_pool *pool, void *block)
{
    MQD_ASSERT(pool->used > 0, "S7: a block is returned to a pool that has none of its %u blocks in use",
               pool->block_count);
    *(void **)block = pool->free;
    pool->free = block;
    pool->used--;
}
