/* Page cache contents, and the reactor's behaviour where the kernel does not report them:
 * kernels before 6.5, and containers that refuse cachestat or mincore. */
#include "mqd_reader_test.h"
#include "mqd_seccomp_test.h"

#define WARM 1
#define COLD 0

static int cached(int64_t offset)
{
    struct mqd_reader *reader = mqd_reader_create(6);
    struct mqd_cursor cursor = {0};
    struct mqd_range range;
    mqd_reader_set_path(reader, 3, shared.path);
    CHECK_OR(mqd_reader_find(reader, 3, &shared.positions, 1, offset, 20000, true, &cursor, &range) == 0 &&
                 range.size_bytes > 4096,
             return -1);
    int found = mqd_range_cached(&range);
    mqd_range_release(reader, &range);
    CHECK_OR(mqd_range_cached(&range) == 1, return -1); /* an empty range needs nothing */
    mqd_reader_destroy(reader);
    return found;
}

static void is(int expected)
{
    CHECK_EQUAL(cached(30), expected);
}

TEST(written_bytes_are_in_the_page_cache)
{
    mqd_reader_destroy(plain_partition(1, 10));
    is(WARM);
    where_refused(ENOSYS, 0, is, WARM); /* mincore reports it */
    where_refused(EPERM, 0, is, WARM);
    model_end(&shared);
}

TEST(unknown_pages_count_as_cold)
{
    mqd_reader_destroy(plain_partition(1, 10));
    where_refused(ENOSYS, EPERM, is, COLD);
    where_refused(EPERM, ENOSYS, is, COLD);
    where_refused(0, EPERM, is, WARM); /* not needed */
    model_end(&shared);
}

TEST(evicted_pages_are_cold_with_either_call)
{
    char path[PATH_MAX];
    mqd_reader_destroy(plain_partition(2, 10));
    name_of(path, &shared, 0, ".log");
    int fd = open(path, O_RDONLY);
    CHECK(fd >= 0 && fsync(fd) == 0 && posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
    close(fd);
    if (cached(30) == WARM) {
        test_message("left out: the file system of /tmp gives no pages back");
    } else {
        where_refused(ENOSYS, 0, is, COLD);
        is(COLD);
    }
    model_end(&shared);
}
