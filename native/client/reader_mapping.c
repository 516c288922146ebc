/* Mappings of segment files: reference counted, populated before they are read. See
 * client/reader_state.h.
 *
 * A file that is unlinked, or replaced by compaction, is unchanged as long as it is mapped: a view
 * stays valid as long as it is held. Concurrency: populate by one thread at a time; hold and
 * release by any.
 */
#include "client/reader_state.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/atomic.h"
#include "base/error.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* Linux 5.14 */
#endif
#define WINDOW_BYTES (1u << 20)
#define RESIDENT_BYTES (16u << 20) /* this much of the walked part stays resident, for views still in use */

static struct mqd_segment_mapping *mapping_new(const uint8_t *bytes, uint64_t map_bytes, bool mapped)
{
    struct mqd_segment_mapping *mapping = calloc(1, sizeof *mapping);
    if (!mapping) {
        mqd_error_set_static(ENOMEM, "out of memory for a segment's mapping");
        return NULL;
    }
    mapping->references = 1;
    mapping->bytes = bytes;
    mapping->map_bytes = map_bytes;
    mapping->mapped = mapped;
    return mapping;
}

struct mqd_segment_mapping *mqd_mapping_of_fd(int fd, uint64_t map_bytes)
{
    struct stat status;
    if (fstat(fd, &status) < 0 || !S_ISREG(status.st_mode)) {
        mqd_error_set(MQD_E_CORRUPT, "the descriptor is not of a regular file, so it cannot be a segment file");
        return NULL;
    }
    void *bytes = mmap(NULL, map_bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (bytes == MAP_FAILED) {
        mqd_error_system(errno, "mapping a segment file of %llu bytes", (unsigned long long)map_bytes);
        return NULL;
    }
    struct mqd_segment_mapping *mapping = mapping_new(bytes, map_bytes, true);
    if (!mapping) {
        munmap(bytes, map_bytes);
        return NULL;
    }
    mapping->device = status.st_dev;
    mapping->inode = status.st_ino;
    return mapping;
}

struct mqd_segment_mapping *mqd_mapping_of_memory(const void *bytes, uint64_t size_bytes)
{
    uint8_t *copy = malloc(size_bytes ? size_bytes : 1);
    if (!copy) {
        mqd_error_set(ENOMEM, "out of memory for a copy of %llu bytes", (unsigned long long)size_bytes);
        return NULL;
    }
    memcpy(copy, bytes, size_bytes);
    struct mqd_segment_mapping *mapping = mapping_new(copy, size_bytes, false);
    if (!mapping)
        free(copy);
    return mapping;
}

struct mqd_segment_mapping *mqd_mapping_of_borrowed(const void *bytes, uint64_t size_bytes)
{
    struct mqd_segment_mapping *mapping = mapping_new(bytes, size_bytes, false);
    if (mapping)
        mapping->borrowed = true;
    return mapping;
}

bool mqd_mapping_is_of_fd(const struct mqd_segment_mapping *mapping, int fd, uint64_t map_bytes)
{
    struct stat status;
    return mapping->mapped && mapping->map_bytes >= map_bytes && fstat(fd, &status) == 0 &&
           status.st_dev == mapping->device && status.st_ino == mapping->inode;
}

void mqd_mapping_hold(struct mqd_segment_mapping *mapping)
{
    mqd_fetch_add(&mapping->references, 1);
}

void mqd_mapping_release(struct mqd_segment_mapping *mapping)
{
    if (!mapping || mqd_fetch_add(&mapping->references, (uint64_t)-1) != 1)
        return;
    if (mapping->mapped)
        munmap((void *)mapping->bytes, mapping->map_bytes);
    else if (!mapping->borrowed)
        free((void *)mapping->bytes);
    free(mapping);
}

/* Releases pages in steps at least as large as the part that stays resident: in total this costs
 * about as much as unmapping everything once at the end. */
static void drop_pages(struct mqd_segment_mapping *mapping, uint64_t from)
{
    if (from < mapping->dropped_bytes + 2 * (uint64_t)RESIDENT_BYTES)
        return;
    uint64_t until = (from - RESIDENT_BYTES) & ~(uint64_t)(WINDOW_BYTES - 1);
    madvise((uint8_t *)mapping->bytes + mapping->dropped_bytes, until - mapping->dropped_bytes, MADV_DONTNEED);
    mapping->dropped_bytes = until;
}

int mqd_mapping_populate(struct mqd_segment_mapping *mapping, uint64_t from, uint64_t end, uint64_t limit)
{
    if (!mapping->mapped || end <= mapping->populated_bytes)
        return 0;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE),
             start = (from > mapping->populated_bytes ? from : mapping->populated_bytes) & ~(page - 1);
    uint64_t stop = start + WINDOW_BYTES > end ? start + WINDOW_BYTES : end;
    stop = stop < limit ? stop : limit;
    uint8_t *at = (uint8_t *)mapping->bytes + start;
    /* Other errors: an older kernel, or out of memory at present; the pages are then loaded on
     * first access. */
    if (madvise(at, stop - start, MADV_POPULATE_READ) < 0 && (errno == EFAULT || errno == EIO || errno == EHWPOISON))
        return mqd_error_system(EIO, "reading a segment file at byte %llu", (unsigned long long)start);
    mapping->populated_bytes = stop;
    drop_pages(mapping, start);
    if (stop < limit) /* reads ahead while this part is walked; costs little when it is cached */
        madvise((uint8_t *)mapping->bytes + (stop & ~(page - 1)),
                (limit - stop < WINDOW_BYTES ? limit - stop : WINDOW_BYTES) + (stop & (page - 1)), MADV_WILLNEED);
    return 0;
}
