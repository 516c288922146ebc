/* Replaces the original segments with compacted ones; safe against a crash at any point.
 *
 *   1  BASE.log.cleaned, .index.cleaned, .timeindex.cleaned (and .txnindex.cleaned,
 *      .txnsum.cleaned) are written and flushed, with their directory entries
 *   2  BASE.swap names the segments to delete. From here on recovery completes the swap; before
 *      that, it undoes the swap, because .cleaned files without a .swap file may be incomplete
 *   3  install: BASE's old .index and .timeindex are deleted, BASE.log.cleaned becomes BASE.log,
 *      then the new indexes follow
 *   4  the owner shortens its segment list (mqd_reactor_segments_replaced), and readers list the
 *      segments again
 *   5  finish: the other segments are deleted in ascending order; when that is durable, BASE.swap
 *      is deleted, durably too
 *
 * Recovery performs 3 and 5 where it finds a BASE.swap; parts of both may already have been done.
 *
 * Why in this order: a reader that lists the directory at any moment sees every record that is
 * kept: the new BASE.log has all of them, and the remaining old segments have second copies. A
 * reader that has the old BASE.log open continues to read it. The old index is deleted before the
 * log is replaced, so that no reader finds the old index beside the new log.
 *
 * BASE.swap, big endian:
 *   0   u32  "MQDS"
 *   4   u32  version 1
 *   8   u32  CRC32C of the rest
 *   12  u32  one bit per kind of new file (.log .index .timeindex .txnindex .txnsum)
 *   16  u32  count
 *   20  u32  0
 *   24  i64  BASE
 *   32  i64[count]  the other segments, ascending
 *
 * The file `compacted` in the directory records permanently that the log's offsets have gaps.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/big_endian.h"
#include "base/error.h"
#include "base/file.h"
#include "log/compaction/compact.h"
#include "log/partition_state.h"
#include "log/planted_bugs.h"
#include "log/recovery/recovery.h"

#define SWAP_MAGIC 0x4d514453u
#define SWAP_HEAD_BYTES 32
#define SWAP_COUNT_MAX (1u << 20)
#define GAPS_FILE "compacted"

enum { KIND_LOG, KIND_INDEX, KIND_TIME_INDEX, KIND_TRANSACTIONS, KIND_TRANSACTION_CHECKSUMS, KIND_COUNT };
static const char *const suffixes[KIND_COUNT] = {".log", ".index", ".timeindex", ".txnindex", ".txnsum"};

struct swap {
    int64_t base_offset;
    uint32_t kinds; /* bits, as in BASE.swap */
    uint32_t count; /* of `others` */
    int64_t *others;
};

static int make_path(char path[PATH_MAX], const char *directory, int64_t offset, const char *suffix, const char *ending)
{
    int length = snprintf(path, PATH_MAX, "%s/%020lld%s%s", directory, (long long)offset, suffix, ending);
    return length < PATH_MAX ? 0 : mqd_error_set(ENAMETOOLONG, "path too long: %s", directory);
}

static bool exists(const char *path)
{
    return access(path, F_OK) == 0;
}

/* ---- BASE.swap ---- */

static int write_swap(const char *directory, const struct swap *swap)
{
    char path[PATH_MAX];
    size_t size_bytes = SWAP_HEAD_BYTES + 8 * (size_t)swap->count;
    uint8_t *bytes = calloc(1, size_bytes);
    if (!bytes)
        return mqd_error_set(ENOMEM, "out of memory for a list of %u segments", swap->count);
    mqd_put_be32(bytes, SWAP_MAGIC);
    mqd_put_be32(bytes + 4, 1);
    mqd_put_be32(bytes + 12, swap->kinds);
    mqd_put_be32(bytes + 16, swap->count);
    mqd_put_be64(bytes + 24, (uint64_t)swap->base_offset);
    for (uint32_t i = 0; i < swap->count; i++)
        mqd_put_be64(bytes + SWAP_HEAD_BYTES + 8 * (size_t)i, (uint64_t)swap->others[i]);
    mqd_put_be32(bytes + 8, mqd_crc32c(0, bytes + 12, size_bytes - 12));
    int result = make_path(path, directory, swap->base_offset, ".swap", "");
    if (result == 0)
        result = mqd_file_replace(path, bytes, size_bytes);
    free(bytes);
    return result;
}

/* Returns 1 if the bytes are valid, 0 if they are damaged, -1 if out of memory. */
static int parse_swap(const uint8_t *bytes, size_t size_bytes, int64_t base_offset, struct swap *out)
{
    if (size_bytes < SWAP_HEAD_BYTES || mqd_get_be32(bytes) != SWAP_MAGIC || mqd_get_be32(bytes + 4) != 1 ||
        mqd_get_be32(bytes + 8) != mqd_crc32c(0, bytes + 12, size_bytes - 12))
        return 0;
    *out = (struct swap){.base_offset = (int64_t)mqd_get_be64(bytes + 24),
                         .kinds = mqd_get_be32(bytes + 12),
                         .count = mqd_get_be32(bytes + 16)};
    if (out->base_offset != base_offset || out->count > SWAP_COUNT_MAX ||
        size_bytes != SWAP_HEAD_BYTES + 8 * (size_t)out->count)
        return 0;
    out->others = malloc(8 * (size_t)out->count + 1);
    if (!out->others)
        return -1;
    for (uint32_t i = 0; i < out->count; i++) {
        out->others[i] = (int64_t)mqd_get_be64(bytes + SWAP_HEAD_BYTES + 8 * (size_t)i);
        if (out->others[i] <= (i ? out->others[i - 1] : base_offset)) {
            free(out->others);
            out->others = NULL;
            return 0;
        }
    }
    return 1;
}

/* Returns 1 if the file was read, 0 if there is none, -1 on error. A damaged file is an error,
 * because the swap may be half done. (The file is written by replacement, so only the disk can
 * damage it.) */
static int read_swap(const char *directory, int64_t base_offset, struct swap *out)
{
    char path[PATH_MAX];
    size_t capacity = SWAP_HEAD_BYTES + 8 * (size_t)SWAP_COUNT_MAX, have = 0;
    if (make_path(path, directory, base_offset, ".swap", "") < 0)
        return -1;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return errno == ENOENT ? 0 : mqd_error_system(errno, "cannot open %s", path);
    uint8_t *bytes = malloc(capacity + 1);
    ssize_t got = bytes ? 1 : -1;
    while (got > 0 && have <= capacity) {
        got = read(fd, bytes + have, capacity + 1 - have);
        have += got > 0 ? (size_t)got : 0;
    }
    int error = got < 0 ? errno : 0;
    close(fd);
    int parsed = error ? 0 : parse_swap(bytes, have, base_offset, out);
    free(bytes);
    if (parsed < 0)
        error = ENOMEM;
    if (error)
        return mqd_error_system(error, "cannot read %s", path);
    return parsed ? 1
                  : mqd_error_set(MQD_E_CORRUPT,
                                  "%s is damaged: it lists the segments that a compaction has replaced; restore it, or "
                                  "delete it if the segments are intact",
                                  path);
}

/* ---- the steps ---- */

int mqd_compact_note_gaps(const char *directory)
{
    char path[PATH_MAX];
    if (mqd_compact_has_gaps(directory))
        return 0;
    if (snprintf(path, sizeof path, "%s/" GAPS_FILE, directory) >= (int)sizeof path)
        return mqd_error_set(ENAMETOOLONG, "path too long: %s", directory);
    return mqd_file_replace(path, (const uint8_t *)"1\n", 2);
}

bool mqd_compact_has_gaps(const char *directory)
{
    char path[PATH_MAX];
    return snprintf(path, sizeof path, "%s/" GAPS_FILE, directory) < (int)sizeof path && exists(path);
}

int mqd_compact_swap_prepare(const char *directory, int64_t base_offset, const int64_t *old_bases, uint32_t old_count,
                             int has_transactions)
{
    struct swap swap = {base_offset,
                        1u << KIND_LOG | 1u << KIND_INDEX | 1u << KIND_TIME_INDEX |
                            (has_transactions ? 1u << KIND_TRANSACTIONS | 1u << KIND_TRANSACTION_CHECKSUMS : 0),
                        old_count, (int64_t *)old_bases};
    if (old_count > SWAP_COUNT_MAX)
        return mqd_error_set(MQD_E_INVALID, "cannot merge %u segments into one", old_count);
    if (mqd_compact_note_gaps(directory) < 0 || mqd_file_sync_directory(directory) < 0)
        return -1;
    return write_swap(directory, &swap);
}

static int unlink_if_exists(const char *directory, int64_t offset, const char *suffix)
{
    char path[PATH_MAX];
    if (make_path(path, directory, offset, suffix, "") < 0)
        return -1;
    return exists(path) ? mqd_file_unlink(path) : 0;
}

static int install_kind(const char *directory, const struct swap *swap, int kind)
{
    char from[PATH_MAX], to[PATH_MAX];
    if (make_path(from, directory, swap->base_offset, suffixes[kind], ".cleaned") < 0 ||
        make_path(to, directory, swap->base_offset, suffixes[kind], "") < 0)
        return -1;
    if (!exists(from))
        return 0; /* already done */
    return mqd_file_rename(from, to) < 0 ? mqd_error_system(errno, "cannot rename %s", from) : 0;
}

static int install(const char *directory, const struct swap *swap)
{
    char log[PATH_MAX];
    if (make_path(log, directory, swap->base_offset, ".log", ".cleaned") < 0)
        return -1;
    if (exists(log) && !PLANTED_LOG_BUG(OLD_INDEX) &&
        (unlink_if_exists(directory, swap->base_offset, ".index") < 0 ||
         unlink_if_exists(directory, swap->base_offset, ".timeindex") < 0))
        return -1;
    for (int kind = 0; kind < KIND_COUNT; kind++)
        if ((swap->kinds >> kind & 1) && install_kind(directory, swap, kind) < 0)
            return -1;
    for (int kind = KIND_TRANSACTIONS; kind < KIND_COUNT; kind++)
        if (!(swap->kinds >> kind & 1) && unlink_if_exists(directory, swap->base_offset, suffixes[kind]) < 0)
            return -1;
    return 0;
}

/* Deletes the .log first: a reader that found it without its .txnindex would return aborted records
 * as committed ones. If this is interrupted, the next call deletes the remaining files. */
static int finish(const char *directory, const struct swap *swap)
{
    for (uint32_t i = 0; i < swap->count; i++)
        for (int kind = 0; kind < KIND_COUNT; kind++) {
            const char *suffix = suffixes[PLANTED_LOG_BUG(LOG_LAST) ? KIND_COUNT - 1 - kind : kind];
            if (unlink_if_exists(directory, swap->others[i], suffix) < 0)
                return -1;
        }
    if ((!PLANTED_LOG_BUG(SWAP_EARLY) && mqd_file_sync_directory(directory) < 0) ||
        unlink_if_exists(directory, swap->base_offset, ".swap") < 0)
        return -1;
    /* Durable, because a later compaction writes .cleaned files of the same name, to which this
     * list must not be applied. */
    return mqd_file_sync_directory(directory);
}

static int with_swap(const char *directory, int64_t base_offset, int (*step)(const char *, const struct swap *))
{
    struct swap swap;
    int result = read_swap(directory, base_offset, &swap);
    if (result <= 0)
        return result < 0 ? -1
                          : mqd_error_set(MQD_E_INVALID, "%s: no swap of segment %lld was prepared", directory,
                                          (long long)base_offset);
    result = step(directory, &swap);
    free(swap.others);
    return result;
}

int mqd_compact_swap_install(const char *directory, int64_t base_offset)
{
    return with_swap(directory, base_offset, install);
}

int mqd_compact_swap_finish(const char *directory, int64_t base_offset)
{
    return with_swap(directory, base_offset, finish);
}

int mqd_compact_swap_undo(const char *directory, int64_t base_offset)
{
    char path[PATH_MAX];
    if (make_path(path, directory, base_offset, ".swap", "") < 0)
        return -1;
    /* The list is deleted first, and durably: recovery would mistake a list without its files for
     * an unfinished swap. */
    if (exists(path) &&
        (mqd_file_unlink(path) < 0 || (!PLANTED_LOG_BUG(UNDO_EARLY) && mqd_file_sync_directory(directory) < 0)))
        return -1;
    for (int kind = 0; kind < KIND_COUNT; kind++) {
        if (make_path(path, directory, base_offset, suffixes[kind], ".cleaned") < 0)
            return -1;
        if (exists(path) && mqd_file_unlink(path) < 0)
            return -1;
    }
    return 0;
}

/* ---- after a crash ---- */

static int64_t swap_offset_of(const char *name)
{
    int64_t offset = 0;
    for (int i = 0; i < 20; i++)
        if (name[i] < '0' || name[i] > '9' || __builtin_mul_overflow(offset, 10, &offset) ||
            __builtin_add_overflow(offset, name[i] - '0', &offset))
            return -1;
    return strcmp(name + 20, ".swap") == 0 ? offset : -1;
}

/* Returns the BASE of the first .swap file found, -1 if there is none, or -2 with mqd_error set.
 * There is at most one, except in a directory assembled manually. */
static int64_t find_swap(const char *directory)
{
    DIR *stream = opendir(directory);
    if (!stream) {
        mqd_error_system(errno, "cannot list %s", directory);
        return -2;
    }
    int64_t base_offset = -1;
    struct dirent *entry;
    while (base_offset < 0 && (entry = readdir(stream)))
        if (strlen(entry->d_name) > 20)
            base_offset = swap_offset_of(entry->d_name);
    closedir(stream);
    return base_offset;
}

int mqd_compact_recover(const char *directory)
{
    int64_t base_offset;
    while ((base_offset = find_swap(directory)) >= 0)
        if (mqd_compact_swap_install(directory, base_offset) < 0 || mqd_compact_swap_finish(directory, base_offset) < 0)
            return -1;
    return base_offset == -1 ? 0 : -1;
}

/* ---- the owner's list ---- */

/* Only a flushed segment before the active one may be replaced. It must also be before the segment
 * of the high watermark: published byte positions refer to that segment and to later ones. */
static bool may_be_replaced(const struct mqd_partition *partition, int64_t last)
{
    return last < partition->active.base_offset && last < partition->high_watermark.segment &&
           last < partition->durable.segment;
}

int mqd_partition_count_replaceable(const struct mqd_partition *partition, int64_t first, int64_t last)
{
    uint32_t i = 0, j;
    while (i < partition->segment_count && partition->segments[i] < first)
        i++;
    for (j = i; j < partition->segment_count && partition->segments[j] < last; j++)
        ;
    bool same_segments =
        j < partition->segment_count && partition->segments[i] == first && partition->segments[j] == last;
    return same_segments && may_be_replaced(partition, last)
               ? (int)(j - i)
               : mqd_error_set_static(MQD_E_STALE, "the partition's segments are not those that were compacted");
}

int mqd_partition_replace_segments(struct mqd_partition *partition, int64_t first, int64_t last)
{
    int removed = mqd_partition_count_replaceable(partition, first, last);
    if (removed <= 0)
        return removed;
    uint32_t i = 0;
    while (partition->segments[i] < first)
        i++;
    memmove(partition->segments + i + 1, partition->segments + i + 1 + removed,
            (partition->segment_count - i - 1 - (uint32_t)removed) * sizeof partition->segments[0]);
    partition->segment_count -= (uint32_t)removed;
    return removed;
}
