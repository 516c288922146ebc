/* For test_log_*.c: a scratch partition, batches with identifiable bytes, and a reader of the
 * disk's content. */
#ifndef MQD_LOG_TEST_H
#define MQD_LOG_TEST_H

#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/file.h"
#include "base/file_watch.h"
#include "log/partition.h"
#include "log/partition_state.h"
#include "mqd_test.h"

#define NOW 1700000000000ll

static char log_root[64], log_path[96];

static int log_remove_entry(const char *path, const struct stat *status, int kind, struct FTW *where)
{
    return remove(path);
}

static void log_clean(void)
{
    if (log_root[0])
        nftw(log_root, log_remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    log_root[0] = 0;
}

/* A new directory; the previous one is deleted. */
__attribute__((unused)) static void log_fresh(void)
{
    log_clean();
    mqd_file_watch(NULL, NULL);
#ifdef LOG_TEST_IN_MEMORY
    strcpy(log_root, access("/dev/shm", W_OK) == 0 ? "/dev/shm/mqd-log-XXXXXX" : "/tmp/mqd-log-XXXXXX");
#else
    strcpy(log_root, "/tmp/mqd-log-XXXXXX");
#endif
    CHECK(mkdtemp(log_root));
    snprintf(log_path, sizeof log_path, "%s/topic-0", log_root);
}

__attribute__((destructor)) static void log_at_exit(void)
{
    log_clean();
}

__attribute__((unused)) static struct mqd_log_options log_options(void)
{
    return (struct mqd_log_options){.segment_bytes = 1 << 20,
                                    .segment_ms = INT64_MAX,
                                    .index_interval_bytes = 4096,
                                    .max_message_bytes = 1 << 20,
                                    .preallocate_bytes_min = 65536,
                                    .preallocate_bytes_max = 32 << 20,
                                    .timestamp_before_max_ms = INT64_MAX,
                                    .timestamp_after_max_ms = INT64_MAX,
                                    .producer_id_count_max = 100,
                                    .producer_id_expiration_ms = 86400000,
                                    .flush_on_ack = 1};
}

/* Nothing trusted: every CRC is checked. */
__attribute__((unused)) static struct mqd_recovery log_untrusted(void)
{
    return (struct mqd_recovery){.recovery_point_offset = -1, .trusted_end_offset = -1};
}

__attribute__((unused)) static struct mqd_partition *log_open(const struct mqd_log_options *options,
                                                              struct mqd_recovery *recovery)
{
    struct mqd_recovery own = log_untrusted();
    struct mqd_partition *partition = mqd_partition_open(log_path, options, 0, NOW, recovery ? recovery : &own);
    CHECK_OR(partition, fprintf(stderr, "open: %s\n", mqd_error_message()));
    return partition;
}

struct log_batch {        /* what to make */
    int32_t record_count; /* 0 = 1 */
    int32_t body_bytes;   /* 0 = 64 */
    int64_t timestamp_ms; /* 0 = NOW */
    int64_t producer_id;  /* 0 = none */
    int16_t producer_epoch;
    int32_t base_sequence;
    int16_t attributes;
    uint64_t mark; /* fills the body */
    int marker;    /* 0 = none, 1 = abort, 2 = commit: a control batch of this kind */
    int32_t coordinator_epoch;
};

/* Body and attributes of a transaction marker; 17 bytes. */
__attribute__((unused)) static void log_marker(uint8_t body[17], bool commit, int32_t coordinator_epoch)
{
    const uint8_t record[17] = {32,
                                0,
                                0,
                                0,
                                8,
                                0,
                                0,
                                0,
                                commit,
                                12,
                                0,
                                0,
                                (uint8_t)(coordinator_epoch >> 24),
                                (uint8_t)(coordinator_epoch >> 16),
                                (uint8_t)(coordinator_epoch >> 8),
                                (uint8_t)coordinator_epoch,
                                0};
    memcpy(body, record, sizeof record);
}

/* A whole batch with a valid CRC; the body does not contain records, since nothing here parses
 * them. Returns its size. */
__attribute__((unused)) static uint32_t log_encode(uint8_t *out, struct log_batch want)
{
    int32_t count = want.record_count ? want.record_count : 1, body = want.marker       ? 17
                                                                      : want.body_bytes ? want.body_bytes
                                                                                        : 64;
    int64_t timestamp = want.timestamp_ms ? want.timestamp_ms : NOW,
            producer_id = want.producer_id ? want.producer_id : -1;
    memset(out, 0, MQD_BATCH_HEADER_BYTES);
    out[16] = 2;
    uint32_t u32;
    uint64_t u64;
    uint16_t u16;
#define LOG_PUT32(at, value) (u32 = htobe32((uint32_t)(value)), memcpy(out + (at), &u32, 4))
#define LOG_PUT64(at, value) (u64 = htobe64((uint64_t)(value)), memcpy(out + (at), &u64, 8))
#define LOG_PUT16(at, value) (u16 = htobe16((uint16_t)(value)), memcpy(out + (at), &u16, 2))
    LOG_PUT32(8, MQD_BATCH_HEADER_BYTES - 12 + body);
    LOG_PUT32(12, -1);
    LOG_PUT16(21, want.marker ? 0x30 : want.attributes);
    LOG_PUT32(23, count - 1);
    LOG_PUT64(27, timestamp);
    LOG_PUT64(35, timestamp);
    LOG_PUT64(43, producer_id);
    LOG_PUT16(51, producer_id < 0 ? -1 : want.producer_epoch);
    LOG_PUT32(53, producer_id < 0 || want.marker ? -1 : want.base_sequence);
    LOG_PUT32(57, count);
    uint64_t seed = want.mark;
    for (int32_t i = 0; i < body; i++)
        out[MQD_BATCH_HEADER_BYTES + i] = (uint8_t)(i < 8 ? want.mark >> (8 * i) : (uint64_t)i * 31 + seed);
    if (want.marker)
        log_marker(out + MQD_BATCH_HEADER_BYTES, want.marker == 2, want.coordinator_epoch);
    LOG_PUT32(17, mqd_crc32c(0, out + 21, (size_t)(MQD_BATCH_HEADER_BYTES - 21 + body)));
    return (uint32_t)(MQD_BATCH_HEADER_BYTES + body);
}

/* Encodes into `bytes` (which must stay until the write) and stages. */
__attribute__((unused)) static int16_t log_stage(struct mqd_partition *partition, uint8_t *bytes, struct log_batch want,
                                                 struct mqd_stage_result *result)
{
    struct mqd_batch batch;
    struct mqd_stage_result own;
    log_encode(bytes, want);
    mqd_batch_decode(bytes, MQD_BATCH_HEADER_BYTES, &batch);
    return mqd_partition_stage(partition, &batch, bytes, want.mark % 2 == 0,
                               want.marker || (want.attributes & 0x20) ? MQD_STAGE_COORDINATOR : 0, 0, NOW,
                               result ? result : &own);
}

/* One batch, staged and written. Returns the stage's error, or -2 when the write failed. */
__attribute__((unused)) static int log_append(struct mqd_partition *partition, struct log_batch want)
{
    uint8_t *bytes = malloc(MQD_BATCH_HEADER_BYTES + (size_t)(want.body_bytes > 64 ? want.body_bytes : 64));
    bool rolled;
    int error = log_stage(partition, bytes, want, NULL);
    if (error == 0 && mqd_partition_write(partition, NOW, &rolled) < 0)
        error = -2;
    free(bytes);
    return error;
}

/* Flushes with the reactor's steps until the partition is clean. Returns the first error. */
__attribute__((unused)) static int log_sync(struct mqd_partition *partition)
{
    struct mqd_sync_fd fds[4];
    int count, error = 0;
    while (error == 0 && (count = mqd_partition_sync_begin(partition, fds)) > 0) {
        for (int i = 0; i < count && error == 0; i++)
            if (mqd_file_sync(fds[i].fd, fds[i].is_directory) < 0)
                error = errno;
        mqd_partition_sync_done(partition, error);
    }
    return error;
}

__attribute__((unused)) static char *log_file(int64_t base_offset, const char *suffix)
{
    static char path[4][160];
    static int turn;
    turn = (turn + 1) % 4;
    snprintf(path[turn], sizeof path[turn], "%s/%020lld%s", log_path, (long long)base_offset, suffix);
    return path[turn];
}

__attribute__((unused)) static int64_t log_file_bytes(int64_t base_offset, const char *suffix)
{
    struct stat status;
    return stat(log_file(base_offset, suffix), &status) < 0 ? -1 : status.st_size;
}

__attribute__((unused)) static int64_t log_blocks_bytes(int64_t base_offset)
{
    struct stat status;
    return stat(log_file(base_offset, ".log"), &status) < 0 ? -1 : status.st_blocks * 512;
}

/* Changes one byte of a file by xor. */
__attribute__((unused)) static void log_flip(const char *path, int64_t position)
{
    uint8_t byte;
    int fd = open(path, O_RDWR);
    CHECK(fd >= 0 && pread(fd, &byte, 1, position) == 1);
    byte ^= 0x40;
    CHECK(pwrite(fd, &byte, 1, position) == 1);
    close(fd);
}

__attribute__((unused)) static void log_write_file(const char *path, const void *bytes, size_t size_bytes)
{
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0644);
    CHECK(fd >= 0 && write(fd, bytes, size_bytes) == (ssize_t)size_bytes);
    close(fd);
}

__attribute__((unused)) static struct mqd_positions log_positions(struct mqd_partition *partition)
{
    struct mqd_positions positions;
    mqd_partition_positions(partition, &positions);
    return positions;
}

/* Checks every segment file of the partition against its index files: contiguous offsets, right
 * CRCs, index entries that name batches, and that the walk from any entry to the next is not longer
 * than interval_bytes + the largest batch. Returns the end offset, -1 on a finding. marks (may be
 * NULL): gets body marks by offset. */
__attribute__((unused)) static int64_t log_verify(struct mqd_partition *partition, uint64_t *marks)
{
    int64_t end_offset = partition->segments[0];
    for (uint32_t i = 0; i < partition->segment_count; i++) {
        int64_t base = partition->segments[i];
        CHECK_OR(base == end_offset, return -1);
        struct mqd_scan_result scan;
        CHECK_OR(mqd_segment_scan(log_file(base, ".log"), base, 0, 1, &scan) == 0, return -1);
        CHECK_OR(scan.reason == NULL, fprintf(stderr, "%s\n", scan.reason); return -1);
        end_offset = scan.next_offset;
        int fd = open(log_file(base, ".log"), O_RDONLY);
        struct mqd_walk walk;
        struct mqd_batch batch;
        int64_t position, next = base, batches = 0;
        CHECK_OR(mqd_walk_begin(&walk, fd, base, 0, base, scan.valid_bytes, INT64_MAX) == 0, return -1);
        while (mqd_walk_next(&walk, &batch, &position) == 1) {
            CHECK_OR(batch.base_offset == next, mqd_walk_end(&walk); close(fd); return -1);
            if (marks && batch.size_bytes >= MQD_BATCH_HEADER_BYTES + 8 &&
                pread(fd, &marks[next], 8, position + MQD_BATCH_HEADER_BYTES) != 8)
                CHECK_OR(false, break);
            next = mqd_batch_end_offset(&batch);
            struct mqd_index_entry entry;
            if (++batches % 8)
                continue;
            int found = mqd_index_lookup(log_path, base, batch.base_offset, &entry);
            CHECK_OR(found >= 0 && (found == 0 || entry.position <= position), break);
            if (found == 1 && base + entry.relative_offset == batch.base_offset)
                CHECK_OR(entry.position == position, break);
        }
        mqd_walk_end(&walk);
        close(fd);
        CHECK_OR(log_file_bytes(base, ".index") % 8 <= 0 && log_file_bytes(base, ".timeindex") % 12 <= 0, return -1);
    }
    return end_offset;
}

#endif
