/* See log/reader/files.h. */
#include "log/reader/files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "log/segment.h"

/* ---- open segments ---- */

static void close_fds(struct mqd_reader *reader, struct mqd_segment_ref *segment)
{
    close(segment->fd);
    reader->fd_count--;
    if (segment->index_fd >= 0) {
        close(segment->index_fd);
        reader->fd_count--;
    }
}

/* Frees `segment`, which has no references and is no longer in its slot's list. */
static void destroy(struct mqd_reader *reader, struct mqd_segment_ref *segment)
{
    mqd_list_remove(&segment->node);
    close_fds(reader, segment);
    reader->open_count--;
    free(segment);
}

/* Removes `segment` from its slot; it stays open only while a range refers to it. */
static void detach(struct mqd_reader *reader, struct mqd_reader_segment *entry)
{
    struct mqd_segment_ref *segment = entry->ref;
    entry->ref = NULL;
    segment->slot->open_count--;
    segment->slot = NULL;
    if (segment->references == 0) {
        destroy(reader, segment);
        return;
    }
    mqd_list_remove(&segment->node);
    mqd_list_append(&reader->detached, &segment->node);
}

static void detach_all(struct mqd_reader *reader, struct mqd_reader_slot *slot)
{
    for (uint32_t i = 0; i < slot->segment_count && slot->open_count > 0; i++)
        if (slot->segments[i].ref)
            detach(reader, &slot->segments[i]);
}

/* Closes unreferenced segments, least recently used first, until fd_count <= fd_count_target.
 * `exempt` stays open. */
static void evict(struct mqd_reader *reader, uint32_t fd_count_target, const struct mqd_segment_ref *exempt)
{
    if (reader->fd_count <= fd_count_target)
        return;
    MQD_LIST_EACH(node, next, &reader->recent) {
        struct mqd_segment_ref *segment = MQD_CONTAINER(node, struct mqd_segment_ref, node);
        if (segment->references > 0 || segment == exempt)
            continue;
        int32_t number = mqd_reader_segment_at(segment->slot, segment->base_offset);
        detach(reader, &segment->slot->segments[number]);
        if (reader->fd_count <= fd_count_target)
            return;
    }
}

void mqd_reader_unreference(struct mqd_reader *reader, struct mqd_segment_ref *segment)
{
    if (--segment->references > 0)
        return;
    if (segment->slot == NULL)
        destroy(reader, segment);
    else
        evict(reader, reader->fd_count_max, NULL);
}

/* Calls open(2), within the limit on descriptors; when the process has no descriptor left, closes
 * unused files and tries once more. */
static int open_counted(struct mqd_reader *reader, const char *path, const struct mqd_segment_ref *exempt)
{
    evict(reader, reader->fd_count_max - 1, exempt);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 && (errno == EMFILE || errno == ENFILE)) {
        evict(reader, 0, exempt);
        fd = open(path, O_RDONLY | O_CLOEXEC);
    }
    if (fd >= 0)
        reader->fd_count++;
    return fd;
}

int16_t mqd_reader_report_missing(struct mqd_reader_slot *slot, const char *missing_file, int64_t base_offset)
{
    if (!slot->was_missing || slot->missing_generation != slot->generation || slot->missing_offset != base_offset) {
        slot->was_missing = true;
        slot->missing_offset = base_offset;
        slot->missing_generation = slot->generation;
        slot->listed = false;
        mqd_error_set_static(
            MQD_E_STALE, "the partition's segments have changed in the meantime; read its positions again and retry");
        return MQD_READER_STALE;
    }
    slot->listed = false; /* lists again next time, in case the file comes back */
    mqd_error_set(ENOENT,
                  "%s/%020lld: %s is missing, although the partition table lists it; "
                  "it may have been removed manually; restore it or restart the broker for recovery",
                  slot->path, (long long)base_offset, missing_file);
    return MQD_KAFKA_STORAGE_ERROR;
}

static int16_t storage_error(const char *path, const char *failure)
{
    mqd_error_system(errno, "%s %s; check the disk (dmesg) and the descriptor limit (ulimit -n)", failure, path);
    return MQD_KAFKA_STORAGE_ERROR;
}

static int16_t open_new(struct mqd_reader *reader, struct mqd_reader_slot *slot, struct mqd_reader_segment *entry)
{
    char path[PATH_MAX];
    struct stat status;
    if (mqd_segment_path(path, sizeof path, slot->path, entry->base_offset, MQD_FILE_LOG))
        return MQD_KAFKA_STORAGE_ERROR;
    struct mqd_segment_ref *segment = calloc(1, sizeof *segment);
    if (!segment) {
        mqd_error_set_static(ENOMEM, "no memory to open a segment");
        return MQD_KAFKA_STORAGE_ERROR;
    }
    segment->fd = open_counted(reader, path, NULL);
    if (segment->fd < 0) {
        int error = errno;
        free(segment);
        errno = error;
        return error == ENOENT ? mqd_reader_report_missing(slot, "the segment's .log", entry->base_offset)
                               : storage_error(path, "cannot open");
    }
    if (fstat(segment->fd, &status)) {
        int16_t code = storage_error(path, "cannot stat");
        close(segment->fd);
        reader->fd_count--;
        free(segment);
        return code;
    }
    segment->inode = status.st_ino;
    if (entry->sealed_bytes >= 0)
        entry->sealed_bytes = status.st_size; /* compaction may have replaced the file since its size was read */
    segment->index_fd = -1;
    segment->serial = ++reader->last_serial;
    segment->slot = slot;
    segment->base_offset = entry->base_offset;
    mqd_list_append(&reader->recent, &segment->node);
    reader->open_count++;
    slot->open_count++;
    entry->ref = segment;
    return 0;
}

int16_t mqd_reader_open(struct mqd_reader *reader, struct mqd_reader_slot *slot, uint32_t number,
                        struct mqd_segment_ref **out)
{
    struct mqd_reader_segment *entry = &slot->segments[number];
    if (entry->ref) {
        mqd_list_remove(&entry->ref->node);
        mqd_list_append(&reader->recent, &entry->ref->node);
    } else {
        int16_t code = open_new(reader, slot, entry);
        if (code)
            return code;
    }
    *out = entry->ref;
    return 0;
}

/* Whether the segment's file name still refers to the open file. */
static bool same_file(const struct mqd_reader_slot *slot, const struct mqd_segment_ref *segment)
{
    char path[PATH_MAX];
    struct stat status;
    return mqd_segment_path(path, sizeof path, slot->path, segment->base_offset, MQD_FILE_LOG) == 0 &&
           stat(path, &status) == 0 && status.st_ino == segment->inode;
}

/* An index that is opened by name belongs to the .log that has the segment's name now. If that is
 * not the open .log, compaction has replaced both files, the .log first. */
int mqd_reader_open_index(struct mqd_reader *reader, struct mqd_segment_ref *segment)
{
    char path[PATH_MAX];
    if (segment->index_fd >= 0 ||
        mqd_segment_path(path, sizeof path, segment->slot->path, segment->base_offset, MQD_FILE_INDEX) != 0)
        return segment->index_fd;
    segment->index_fd = open_counted(reader, path, segment);
    if (segment->index_fd >= 0 && !same_file(segment->slot, segment)) {
        close(segment->index_fd);
        segment->index_fd = -1;
        reader->fd_count--;
    }
    return segment->index_fd;
}

int64_t mqd_reader_sealed_bytes(struct mqd_reader_slot *slot, uint32_t number)
{
    struct mqd_reader_segment *entry = &slot->segments[number];
    char path[PATH_MAX];
    struct stat status;
    if (entry->sealed_bytes >= 0)
        return entry->sealed_bytes;
    if (mqd_segment_path(path, sizeof path, slot->path, entry->base_offset, MQD_FILE_LOG))
        return -1;
    if (entry->ref ? fstat(entry->ref->fd, &status) : stat(path, &status))
        return mqd_error_system(errno, "cannot stat %s", path);
    return entry->sealed_bytes = status.st_size;
}

/* ---- the list of a slot ---- */

int32_t mqd_reader_segment_at(const struct mqd_reader_slot *slot, int64_t offset)
{
    uint32_t count = slot->segment_count;
    if (count > 0 && slot->segments[count - 1].base_offset <= offset)
        return (int32_t)count - 1;  /* the active one, which nearly every reader reads */
    uint32_t low = 0, high = count; /* segments[low - 1] <= offset < segments[high] */
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (slot->segments[middle].base_offset <= offset)
            low = middle + 1;
        else
            high = middle;
    }
    return (int32_t)low - 1;
}

static int by_base_offset(const void *left, const void *right)
{
    int64_t a = ((const struct mqd_reader_segment *)left)->base_offset,
            b = ((const struct mqd_reader_segment *)right)->base_offset;
    return a < b ? -1 : a > b;
}

struct names {
    struct mqd_reader_segment *segments;
    uint32_t count, capacity;
    int64_t *txn_indexes; /* base offsets of the segments with a .txnindex or .txnsum */
    uint32_t txn_index_count, txn_index_capacity;
    bool swapping;
};

/* Makes room for one more element; returns -1 with errno on failure. */
static int grow_array(void **array, uint32_t count, uint32_t *capacity, size_t element_bytes)
{
    if (count < *capacity)
        return 0;
    uint32_t new_capacity = *capacity ? *capacity * 2 : 16;
    void *grown = realloc(*array, new_capacity * element_bytes);
    if (!grown) {
        errno = ENOMEM;
        return -1;
    }
    *array = grown;
    *capacity = new_capacity;
    return 0;
}

static int add_name(struct names *names, const char *name)
{
    int64_t base_offset;
    if (strlen(name) <= 20)
        return 0;
    if ((base_offset = mqd_segment_offset_of(name, MQD_FILE_LOG)) >= 0) {
        if (grow_array((void **)&names->segments, names->count, &names->capacity, sizeof *names->segments))
            return -1;
        names->segments[names->count++] = (struct mqd_reader_segment){.base_offset = base_offset, .sealed_bytes = -1};
    } else if ((base_offset = mqd_segment_offset_of(name, MQD_FILE_TXN_INDEX)) >= 0 ||
               (base_offset = mqd_segment_offset_of(name, MQD_FILE_TXN_SUM)) >= 0) {
        if (grow_array((void **)&names->txn_indexes, names->txn_index_count, &names->txn_index_capacity,
                       sizeof *names->txn_indexes))
            return -1;
        names->txn_indexes[names->txn_index_count++] = base_offset;
    } else if (strcmp(name + 20, ".swap") == 0) {
        names->swapping = true;
    }
    return 0;
}

/* Lists the directory and sorts its segments; returns -1 with errno on failure. The caller frees
 * out->segments in either case. */
static int read_names(const char *path, struct names *out)
{
    DIR *directory = opendir(path);
    struct dirent *name;
    *out = (struct names){.segments = NULL};
    if (!directory)
        return -1;
    for (errno = 0; (name = readdir(directory)) && add_name(out, name->d_name) == 0; errno = 0)
        ;
    int error = errno;
    closedir(directory);
    if (out->count > 0)
        qsort(out->segments, out->count, sizeof *out->segments, by_base_offset);
    for (uint32_t i = 0; i < out->txn_index_count; i++) {
        const struct mqd_reader_segment key = {.base_offset = out->txn_indexes[i]};
        struct mqd_reader_segment *segment =
            out->count ? bsearch(&key, out->segments, out->count, sizeof key, by_base_offset) : NULL;
        if (segment)
            segment->has_txn_index = true;
    }
    free(out->txn_indexes);
    errno = error;
    return error ? -1 : 0;
}

int16_t mqd_reader_list(struct mqd_reader *reader, struct mqd_reader_slot *slot, uint64_t generation)
{
    struct names names;
    slot->generation = generation;
    if (read_names(slot->path, &names)) {
        int error = errno;
        free(names.segments);
        detach_all(reader, slot);
        slot->segment_count = 0;
        slot->listed = false;
        errno = error;
        return error == ENOENT ? mqd_reader_report_missing(slot, "the partition's directory", 0)
                               : storage_error(slot->path, "cannot list");
    }
    struct mqd_reader_segment *segments = names.segments;
    struct mqd_reader_slot fresh = {.segments = segments, .segment_count = names.count};
    for (uint32_t i = 0; i < slot->segment_count && slot->open_count > 0; i++) {
        struct mqd_segment_ref *segment = slot->segments[i].ref;
        if (!segment)
            continue;
        int32_t number = mqd_reader_segment_at(&fresh, segment->base_offset);
        if (number < 0 || segments[number].base_offset != segment->base_offset || !same_file(slot, segment)) {
            detach(reader, &slot->segments[i]);
            continue;
        }
        segments[number].ref = segment;
        /* an index may have been rebuilt under the same name; it is reopened when needed */
        if (segment->index_fd >= 0) {
            close(segment->index_fd);
            segment->index_fd = -1;
            reader->fd_count--;
        }
    }
    free(slot->segments);
    slot->segments = segments;
    slot->segment_count = names.count;
    slot->swapping = names.swapping;
    slot->listed = true;
    return 0;
}

/* ---- creating and destroying ---- */

struct mqd_reader *mqd_reader_create(uint32_t fd_count_max)
{
    struct mqd_reader *reader = calloc(1, sizeof *reader);
    if (!reader) {
        mqd_error_set_static(ENOMEM, "out of memory for a reader");
        return NULL;
    }
    reader->fd_count_max = fd_count_max > MQD_READER_FD_COUNT_MIN ? fd_count_max : MQD_READER_FD_COUNT_MIN;
    mqd_list_init(&reader->recent);
    mqd_list_init(&reader->detached);
    mqd_list_init(&reader->slot_list);
    return reader;
}

static void drop_slot(struct mqd_reader *reader, struct mqd_reader_slot *slot)
{
    detach_all(reader, slot);
    mqd_list_remove(&slot->node);
    reader->slots[slot->number] = NULL;
    free(slot->segments);
    free(slot->path);
    free(slot);
}

int mqd_reader_set_path(struct mqd_reader *reader, uint32_t number, const char *path)
{
    if (number >= MQD_PARTITION_SLOT_COUNT)
        return mqd_error_set(MQD_E_INVALID, "partition slot %u does not exist, there are %u", number,
                             MQD_PARTITION_SLOT_COUNT);
    struct mqd_reader_slot *slot = reader->slots[number];
    if (slot && path && strcmp(slot->path, path) == 0)
        return 0;
    if (slot)
        drop_slot(reader, slot);
    if (!path)
        return 0;
    slot = calloc(1, sizeof *slot);
    char *copy = strdup(path);
    if (!slot || !copy) {
        free(slot);
        free(copy);
        return mqd_error_set_static(ENOMEM, "out of memory for a partition's path");
    }
    slot->path = copy;
    slot->number = number;
    mqd_list_append(&reader->slot_list, &slot->node);
    reader->slots[number] = slot;
    return 0;
}

void mqd_reader_destroy(struct mqd_reader *reader)
{
    if (!reader)
        return;
    MQD_LIST_EACH(node, next, &reader->slot_list)
        drop_slot(reader, MQD_CONTAINER(node, struct mqd_reader_slot, node));
    /* segments of ranges that were never released: their users no longer exist */
    MQD_LIST_EACH(node, next, &reader->detached)
        destroy(reader, MQD_CONTAINER(node, struct mqd_segment_ref, node));
    free(reader);
}

void mqd_reader_sweep(struct mqd_reader *reader, uint64_t (*generation_of)(void *context, uint32_t slot), void *context)
{
    MQD_LIST_EACH(node, next, &reader->slot_list) {
        struct mqd_reader_slot *slot = MQD_CONTAINER(node, struct mqd_reader_slot, node);
        if (slot->open_count == 0)
            continue;
        uint64_t generation = generation_of(context, slot->number);
        if (generation != slot->generation)
            /* on failure all files of the slot are closed, as intended here */
            mqd_reader_list(reader, slot, generation);
    }
}

uint32_t mqd_reader_segment_count(const struct mqd_reader *reader)
{
    return reader->open_count;
}

uint32_t mqd_reader_fd_count(const struct mqd_reader *reader)
{
    return reader->fd_count;
}
