/* Whether bytes of a file are in the page cache: by cachestat(2) where available (Linux 6.5; some
 * container runtimes refuse it), otherwise by mincore(2), which needs a mapping and costs a few
 * microseconds more per MiB. mincore reports correctly only to processes that may write the file,
 * which the broker may. */
#include <errno.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/atomic.h"
#include "log/reader/files.h"

#define STEP_PAGES 4096u
#define TAIL_BYTES (16u << 20) /* this much of the most recently written data is assumed to be cached */

/* Missing from the headers of some supported systems. */
#ifndef SYS_cachestat
#define SYS_cachestat 451
#endif
struct cachestat_range {
    uint64_t offset, size_bytes;
};
struct cachestat_result { /* in pages */
    uint64_t cached, dirty, writeback, evicted, recently_evicted;
};

/* Returns 1 if all pages are cached, 0 if not, -1 if the kernel cannot tell. */
static int check_by_cachestat(int fd, uint64_t first, uint64_t pages, uint64_t page_bytes)
{
    static uint32_t unavailable; /* set once by any thread; relaxed: a late read costs one more call */
    if (mqd_load_relaxed(&unavailable))
        return -1;
    struct cachestat_range bytes_range = {.offset = first * page_bytes, .size_bytes = pages * page_bytes};
    struct cachestat_result result = {0};
    if (syscall(SYS_cachestat, fd, &bytes_range, &result, 0) == 0)
        return result.cached >= pages;
    if (errno == ENOSYS || errno == EPERM || errno == EOPNOTSUPP)
        mqd_store_relaxed(&unavailable, 1);
    return -1;
}

static int check_by_mincore(int fd, uint64_t first, uint64_t pages, uint64_t page_bytes)
{
    unsigned char resident[STEP_PAGES];
    for (uint64_t done = 0; done < pages;) {
        uint64_t step = pages - done < STEP_PAGES ? pages - done : STEP_PAGES;
        void *memory = mmap(NULL, step * page_bytes, PROT_READ, MAP_SHARED, fd, (off_t)((first + done) * page_bytes));
        if (memory == MAP_FAILED)
            return 0;
        int succeeded = mincore(memory, step * page_bytes, resident) == 0;
        munmap(memory, step * page_bytes);
        for (uint64_t i = 0; i < step; i++)
            if (!succeeded || !(resident[i] & 1))
                return 0;
        done += step;
    }
    return 1;
}

int mqd_range_cached(const struct mqd_range *range)
{
    static uint32_t known_page_bytes; /* set by any thread, always to the same value */
    if (range->size_bytes == 0)
        return 1;
    if (mqd_load_relaxed(&known_page_bytes) == 0)
        mqd_store_relaxed(&known_page_bytes, (uint32_t)sysconf(_SC_PAGESIZE));
    uint64_t page_bytes = mqd_load_relaxed(&known_page_bytes);
    uint64_t first = range->position / page_bytes,
             pages = ((uint64_t)range->position + range->size_bytes - 1) / page_bytes - first + 1;
    int fd = mqd_segment_ref_fd(range->segment), cached = check_by_cachestat(fd, first, pages, page_bytes);
    return cached >= 0 ? cached : check_by_mincore(fd, first, pages, page_bytes);
}

bool mqd_range_just_written(struct mqd_reader *reader, uint32_t slot_number, const struct mqd_positions *positions,
                            const struct mqd_range *range)
{
    struct mqd_reader_slot *slot = slot_number < MQD_PARTITION_SLOT_COUNT ? reader->slots[slot_number] : NULL;
    if (!slot)
        return false;
    if (!slot->has_first_use) {
        slot->has_first_use = true;
        slot->first_use_segment = positions->high_watermark_segment;
        slot->first_use_position = positions->high_watermark_position;
    }
    int64_t segment = range->segment->base_offset;
    bool written_since = segment > slot->first_use_segment ||
                         (segment == slot->first_use_segment && range->position >= slot->first_use_position);
    return written_since && segment == positions->high_watermark_segment &&
           positions->high_watermark_position - range->position < TAIL_BYTES;
}
