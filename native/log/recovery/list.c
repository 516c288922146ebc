/* Lists the files in a partition's directory; see log/recovery/recovery.h. */
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/error.h"
#include "base/file.h"
#include "log/recovery/recovery.h"

static int append(int64_t **values, uint32_t *count, int64_t value)
{
    if ((*count & (*count - 1)) == 0) { /* the array is full at every power of two */
        int64_t *grown = realloc(*values, (*count ? *count * 2 : 1) * sizeof **values);
        if (!grown)
            return mqd_error_set(ENOMEM, "no memory to list a directory");
        *values = grown;
    }
    (*values)[(*count)++] = value;
    return 0;
}

static int ascending(const void *a, const void *b)
{
    int64_t left = *(const int64_t *)a, right = *(const int64_t *)b;
    return (left > right) - (left < right);
}

static bool ends_with(const char *name, const char *suffix)
{
    size_t length = strlen(name), suffix_length = strlen(suffix);
    return length >= suffix_length && strcmp(name + length - suffix_length, suffix) == 0;
}

static int unlink_in(const char *directory, const char *name)
{
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%s/%s", directory, name) >= (int)sizeof path)
        return mqd_error_set(ENAMETOOLONG, "path too long: %s", directory);
    return mqd_file_unlink(path);
}

/* Adds a segment or a snapshot to the listing. Deletes temporary files that a crash left behind. */
static int list_name(struct mqd_listing *listing, const char *directory, const char *name)
{
    int64_t offset;
    if (ends_with(name, ".tmp") || ends_with(name, ".cleaned") || ends_with(name, ".deleted"))
        return unlink_in(directory, name);
    if (strlen(name) < 20) /* the number of digits of an offset */
        return 0;
    if ((offset = mqd_segment_offset_of(name, MQD_FILE_LOG)) >= 0)
        return append(&listing->logs, &listing->log_count, offset);
    if ((offset = mqd_segment_offset_of(name, MQD_FILE_SNAPSHOT)) >= 0)
        return append(&listing->snapshots, &listing->snapshot_count, offset);
    return 0;
}

/* Deletes the file if it belongs to a segment whose .log is missing: an interrupted deletion may
 * have removed the .log first. */
static int delete_orphan(const struct mqd_listing *listing, const char *directory, const char *name)
{
    int64_t offset = -1;
    for (int kind = MQD_FILE_INDEX; kind <= MQD_FILE_TXN_SUM && offset < 0 && strlen(name) >= 20; kind++)
        offset = mqd_segment_offset_of(name, (enum mqd_file_kind)kind);
    if (offset < 0 ||
        (listing->log_count && bsearch(&offset, listing->logs, listing->log_count, sizeof offset, ascending)))
        return 0;
    return unlink_in(directory, name);
}

static int for_each_name(struct mqd_listing *listing, const char *directory, bool delete_orphans)
{
    DIR *stream = opendir(directory);
    if (!stream)
        return mqd_error_system(errno, "cannot list %s", directory);
    int result = 0;
    struct dirent *entry;
    errno = 0;
    while (result == 0 && (entry = readdir(stream))) {
        if (entry->d_name[0] != '.')
            result = delete_orphans ? delete_orphan(listing, directory, entry->d_name)
                                    : list_name(listing, directory, entry->d_name);
        errno = 0;
    }
    if (result == 0 && errno)
        result = mqd_error_system(errno, "cannot list %s", directory);
    closedir(stream);
    return result;
}

int mqd_listing_clean_and_read(struct mqd_listing *listing, const char *directory)
{
    memset(listing, 0, sizeof *listing);
    if (for_each_name(listing, directory, false) < 0)
        return -1;
    if (listing->log_count)
        qsort(listing->logs, listing->log_count, sizeof *listing->logs, ascending);
    if (listing->snapshot_count)
        qsort(listing->snapshots, listing->snapshot_count, sizeof *listing->snapshots, ascending);
    return for_each_name(listing, directory, true);
}

void mqd_listing_free(struct mqd_listing *listing)
{
    free(listing->logs);
    free(listing->snapshots);
    memset(listing, 0, sizeof *listing);
}

int mqd_segment_delete(const char *directory, int64_t base_offset, int64_t *deleted_bytes)
{
    char path[PATH_MAX];
    struct stat status;
    /* Deletes the .log last: as long as it exists, the next recovery repeats the deletion. */
    for (int kind = MQD_FILE_TXN_SUM; kind >= MQD_FILE_LOG; kind--) {
        if (mqd_segment_path(path, sizeof path, directory, base_offset, (enum mqd_file_kind)kind) < 0)
            return -1;
        if (stat(path, &status) < 0) {
            if (errno == ENOENT)
                continue;
            return mqd_error_system(errno, "cannot stat %s", path);
        }
        if (kind == MQD_FILE_LOG)
            *deleted_bytes += status.st_size;
        if (mqd_file_unlink(path) < 0)
            return -1;
    }
    return 0;
}
