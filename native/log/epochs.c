/* See log/epochs.h. */
#include "log/epochs.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/file.h"

#define FILE_BYTES_MAX (4 << 20)
#define LINE_BYTES_MAX 40

void mqd_epochs_free(struct mqd_epochs *epochs)
{
    free(epochs->entries);
    memset(epochs, 0, sizeof *epochs);
}

int32_t mqd_epochs_last(const struct mqd_epochs *epochs)
{
    return epochs->count ? epochs->entries[epochs->count - 1].epoch : -1;
}

/* Returns 1, or -1 if out of memory. */
static int push(struct mqd_epochs *epochs, int32_t epoch, int64_t start_offset)
{
    if (epochs->count == epochs->capacity) {
        uint32_t capacity = epochs->capacity ? epochs->capacity * 2 : 4;
        struct mqd_epoch *entries = realloc(epochs->entries, capacity * sizeof *entries);
        if (!entries)
            return mqd_error_set(ENOMEM, "out of memory for %u leader epochs", capacity);
        epochs->entries = entries;
        epochs->capacity = capacity;
    }
    epochs->entries[epochs->count++] = (struct mqd_epoch){epoch, start_offset};
    return 1;
}

int mqd_epochs_add(struct mqd_epochs *epochs, int32_t epoch, int64_t start_offset)
{
    if (epoch <= mqd_epochs_last(epochs))
        return 0;
    while (epochs->count && epochs->entries[epochs->count - 1].start_offset >= start_offset)
        epochs->count--;
    return push(epochs, epoch, start_offset);
}

bool mqd_epochs_cut(struct mqd_epochs *epochs, int64_t log_start_offset, int64_t log_end_offset)
{
    uint32_t count = epochs->count, first = 0;
    while (epochs->count && epochs->entries[epochs->count - 1].start_offset >= log_end_offset)
        epochs->count--;
    while (first + 1 < epochs->count && epochs->entries[first + 1].start_offset <= log_start_offset)
        first++;
    epochs->count -= first;
    if (first)
        memmove(epochs->entries, epochs->entries + first, epochs->count * sizeof epochs->entries[0]);
    bool changed = epochs->count != count;
    if (epochs->count && epochs->entries[0].start_offset < log_start_offset) {
        epochs->entries[0].start_offset = log_start_offset;
        changed = true;
    }
    return changed;
}

/* Parses a decimal number and the byte that must follow it. */
static bool parse_number(const char **at, char terminator, int64_t max, int64_t *out)
{
    char *end;
    errno = 0;
    long long value = strtoll(*at, &end, 10);
    if (end == *at || **at < '0' || **at > '9' || errno || value > max || *end != terminator)
        return false;
    *at = end + 1;
    *out = value;
    return true;
}

/* Returns 1 on success, 0 if the text is malformed, -1 if out of memory. */
static int parse(struct mqd_epochs *epochs, const char *text)
{
    int64_t version, count, epoch, start_offset;
    if (!parse_number(&text, '\n', 0, &version) || !parse_number(&text, '\n', INT32_MAX, &count))
        return 0;
    for (int64_t i = 0; i < count; i++) {
        if (!parse_number(&text, ' ', INT32_MAX, &epoch) || !parse_number(&text, '\n', INT64_MAX, &start_offset))
            return 0;
        if (epochs->count &&
            (epoch <= mqd_epochs_last(epochs) || start_offset <= epochs->entries[epochs->count - 1].start_offset))
            return 0;
        if (push(epochs, (int32_t)epoch, start_offset) < 0)
            return -1;
    }
    return *text == 0;
}

/* Reads the file as text. Returns NULL with errno on failure (ENOENT: missing or too large). */
static char *read_text(const char *path)
{
    struct stat status;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    char *text = NULL;
    ssize_t size_bytes = -1;
    if (fstat(fd, &status) == 0 && status.st_size <= FILE_BYTES_MAX && (text = malloc((size_t)status.st_size + 1)))
        size_bytes = read(fd, text, (size_t)status.st_size);
    int error = size_bytes < 0 ? errno : 0;
    close(fd);
    if (size_bytes >= 0) {
        text[size_bytes] = 0;
        return text;
    }
    free(text);
    errno = error ? error : ENOENT;
    return NULL;
}

int mqd_epochs_load(struct mqd_epochs *epochs, const char *directory)
{
    char path[PATH_MAX];
    mqd_epochs_free(epochs);
    if (snprintf(path, sizeof path, "%s/%s", directory, MQD_EPOCHS_FILE) >= (int)sizeof path)
        return mqd_error_set(ENAMETOOLONG, "path too long: %s", directory);
    errno = 0;
    char *text = read_text(path);
    if (!text)
        return errno == ENOENT ? 0 : mqd_error_system(errno, "cannot read %s", path);
    int result = parse(epochs, text);
    free(text);
    if (result == 0)
        mqd_epochs_free(epochs);
    return result;
}

static int write_text(int fd, const char *text, size_t size_bytes)
{
    ssize_t written = mqd_file_pwrite(fd, text, size_bytes, 0);
    if (written >= 0 && (size_t)written < size_bytes)
        errno = ENOSPC;
    return written == (ssize_t)size_bytes ? 0 : -1;
}

int mqd_epochs_write_open(const struct mqd_epochs *epochs, const char *directory)
{
    char path[PATH_MAX], temporary[PATH_MAX];
    if (snprintf(path, sizeof path, "%s/%s", directory, MQD_EPOCHS_FILE) >= (int)sizeof path - 8) {
        errno = ENAMETOOLONG;
        return -1;
    }
    snprintf(temporary, sizeof temporary, "%.4080s.tmp", path);
    size_t capacity = (epochs->count + 2u) * (size_t)LINE_BYTES_MAX;
    char *text = malloc(capacity);
    if (!text)
        return -1;
    int length = snprintf(text, capacity, "0\n%u\n", epochs->count);
    for (uint32_t i = 0; i < epochs->count; i++)
        length += snprintf(text + length, capacity - (size_t)length, "%d %lld\n", epochs->entries[i].epoch,
                           (long long)epochs->entries[i].start_offset);
    int fd = mqd_file_open(temporary, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    int error = fd < 0 || write_text(fd, text, (size_t)length) < 0 || mqd_file_rename(temporary, path) < 0 ? errno : 0;
    free(text);
    if (!error)
        return fd;
    if (fd >= 0)
        close(fd);
    mqd_file_unlink(temporary);
    errno = error;
    return -1;
}
