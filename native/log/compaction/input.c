/* The reading side of a compaction; see log/compaction/compact.h. Reads only with pread, and leaves
 * the page cache unchanged where the kernel supports it (6.14 and later). */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/error.h"
#include "log/compaction/compact.h"
#include "log/segment.h"

#define RWF_DONTCACHE_FLAG 0x80 /* Linux 6.14 */
#define CRC_END 21              /* the CRC covers the bytes after its own field */

static int open_segment(struct mqd_compact_input *input)
{
    char path[PATH_MAX];
    struct stat status;
    int64_t base = input->bases[input->number];
    if (mqd_segment_path(path, sizeof path, input->directory, base, MQD_FILE_LOG) < 0)
        return -1;
    input->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (input->fd < 0 || fstat(input->fd, &status) < 0)
        return mqd_error_system(errno, "cannot read %s", path);
    bool is_last = input->number + 1 == input->segment_count;
    input->file_end = is_last && input->end_position >= 0 && input->end_position < status.st_size ? input->end_position
                                                                                                  : status.st_size;
    input->position = input->buffer_position = input->buffer_bytes = 0;
    if (input->next_offset < base)
        input->next_offset = base;
    return 0;
}

int mqd_compact_input_begin(struct mqd_compact_input *input, uint32_t number, uint32_t end_number)
{
    mqd_compact_input_end(input);
    input->number = number;
    input->end_number = end_number;
    input->next_offset = input->bases[number];
    input->reads_uncached = true;
    if (!input->buffer) {
        input->buffer = malloc(MQD_COMPACT_IO_BYTES);
        if (!input->buffer)
            return mqd_error_set(ENOMEM, "no memory to read a segment");
        input->capacity = MQD_COMPACT_IO_BYTES;
    }
    return number < end_number ? open_segment(input) : 0;
}

void mqd_compact_input_end(struct mqd_compact_input *input)
{
    if (input->fd >= 0)
        close(input->fd);
    input->fd = -1;
}

static ssize_t read_some(struct mqd_compact_input *input, uint8_t *target, size_t size_bytes, int64_t position)
{
    struct iovec iov = {target, size_bytes};
    for (;;) {
        ssize_t got = input->reads_uncached ? preadv2(input->fd, &iov, 1, position, RWF_DONTCACHE_FLAG)
                                            : pread(input->fd, target, size_bytes, position);
        if (got < 0 && errno == EINTR)
            continue;
        if (got >= 0 || !input->reads_uncached || (errno != EOPNOTSUPP && errno != EINVAL))
            return got;
        input->reads_uncached = false;
    }
}

/* Makes `need` bytes from input->position readable, and as many after them as the buffer holds. */
static const uint8_t *make_readable(struct mqd_compact_input *input, int64_t need)
{
    int64_t have = input->buffer_position + input->buffer_bytes - input->position;
    if (have >= need && input->position >= input->buffer_position)
        return input->buffer + (input->position - input->buffer_position);
    if (need > input->capacity) {
        uint8_t *grown = realloc(input->buffer, (size_t)need);
        if (!grown) {
            mqd_error_set(ENOMEM, "out of memory for a batch of %lld bytes", (long long)need);
            return NULL;
        }
        input->buffer = grown;
        input->capacity = need;
    }
    if (have > 0 && input->position >= input->buffer_position)
        memmove(input->buffer, input->buffer + (input->position - input->buffer_position), (size_t)have);
    else
        have = 0;
    input->buffer_position = input->position;
    input->buffer_bytes = have;
    int64_t fill_bytes =
        input->file_end - input->position < input->capacity ? input->file_end - input->position : input->capacity;
    while (input->buffer_bytes < need) {
        ssize_t got = read_some(input, input->buffer + input->buffer_bytes, (size_t)(fill_bytes - input->buffer_bytes),
                                input->position + input->buffer_bytes);
        if (got <= 0) {
            mqd_error_system(got < 0 ? errno : EIO, "cannot read %s/%020lld.log at position %lld", input->directory,
                             (long long)input->bases[input->number],
                             (long long)(input->position + input->buffer_bytes));
            return NULL;
        }
        input->buffer_bytes += got;
        input->read_bytes += got;
    }
    return input->buffer;
}

int mqd_compact_report_corrupt(const struct mqd_compact_input *input, const struct mqd_batch *batch, const char *reason)
{
    int64_t position = batch ? input->position - batch->size_bytes : input->position;
    return mqd_error_set(MQD_E_CORRUPT, "%s/%020lld.log at position %lld: %s", input->directory,
                         (long long)input->bases[input->number], (long long)position, reason);
}

int mqd_compact_input_next(struct mqd_compact_input *input, struct mqd_batch *batch)
{
    while (input->fd >= 0 && input->position >= input->file_end) {
        mqd_compact_input_end(input);
        input->number++;
        if (input->number < input->end_number && open_segment(input) < 0)
            return -1;
    }
    if (input->fd < 0)
        return 0;
    int64_t bytes_left = input->file_end - input->position, base = input->bases[input->number];
    if (bytes_left < MQD_BATCH_HEADER_BYTES)
        return mqd_compact_report_corrupt(input, NULL, "the file ends inside a batch header");
    const uint8_t *bytes = make_readable(input, MQD_BATCH_HEADER_BYTES);
    if (!bytes)
        return -1;
    if (mqd_batch_decode(bytes, MQD_BATCH_HEADER_BYTES, batch) < 0)
        return mqd_compact_report_corrupt(input, NULL, "not a record batch header with magic 2");
    if (batch->size_bytes > bytes_left)
        return mqd_compact_report_corrupt(input, NULL, "the file ends inside a batch");
    int64_t end_offset = mqd_batch_end_offset(batch);
    bool has_next_segment = input->number + 1 < input->segment_count;
    if (batch->base_offset < input->next_offset || (has_next_segment && end_offset > input->bases[input->number + 1]) ||
        end_offset - 1 - base > INT32_MAX)
        return mqd_compact_report_corrupt(input, NULL, "a batch's offsets are out of order");
    input->position += batch->size_bytes;
    input->next_offset = end_offset;
    return 1;
}

const uint8_t *mqd_compact_input_bytes(struct mqd_compact_input *input, const struct mqd_batch *batch)
{
    input->position -= batch->size_bytes;
    const uint8_t *bytes = make_readable(input, batch->size_bytes);
    input->position += batch->size_bytes;
    if (bytes && mqd_crc32c(0, bytes + CRC_END, (size_t)batch->size_bytes - CRC_END) != batch->crc) {
        mqd_compact_report_corrupt(input, batch, "a batch's CRC is wrong");
        return NULL;
    }
    return bytes;
}
