/* A single segment file as the source of a reader: without a broker, for tools and tests. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "client/reader_state.h"

struct file_source {
    int64_t base_offset;
    char path[];
};

static int file_locate(void *context, const struct mqd_local_query *query, struct mqd_segment_mapping *current,
                       struct mqd_local_segment *response, struct mqd_segment_mapping **mapping)
{
    const struct file_source *file = context;
    struct stat status;
    int fd = open(file->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &status) < 0) {
        int code = errno;
        if (fd >= 0)
            close(fd);
        return mqd_error_system(code, "opening %s", file->path);
    }
    int64_t size_bytes = status.st_size < INT32_MAX ? status.st_size : INT32_MAX;
    *response = (struct mqd_local_segment){.kind = query->kind,
                                           .number = query->number,
                                           .base_offset = file->base_offset,
                                           .next_base_offset = INT64_MAX,
                                           .size_bytes = (uint32_t)size_bytes,
                                           .map_bytes = size_bytes ? (uint32_t)size_bytes : 1};
    *mapping = mqd_mapping_of_fd(fd, response->map_bytes);
    close(fd);
    (void)current;
    return *mapping ? 0 : -1;
}

struct mqd_segment_reader *mqd_segment_reader_open_file(const char *path, int64_t base_offset, int64_t offset,
                                                        int8_t isolation_level)
{
    static const uint8_t no_topic[16];
    size_t path_bytes = strlen(path) + 1;
    struct file_source *file = malloc(sizeof *file + path_bytes);
    if (!file) {
        mqd_error_set_static(ENOMEM, "out of memory for a reader");
        return NULL;
    }
    file->base_offset = base_offset;
    memcpy(file->path, path, path_bytes);
    struct mqd_segment_source source = {.context = file, .locate = file_locate, .close = free};
    return mqd_segment_reader_new(&source, no_topic, -1, offset < base_offset ? base_offset : offset, isolation_level);
}
