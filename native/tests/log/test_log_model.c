/* A random history of one partition against a very simple model: stages, writes, transactions,
 * syncs, rolls, errors of the disk, and crashes of three kinds. The worst one keeps of each file
 * only what a completed sync that began after the write covered, and of the rest any prefix, zeros
 * or noise.
 *
 * Checked at every restart: what was durable is there, nothing is there that was not written,
 * offsets are contiguous, retries of durable batches are duplicates. Checked all the time: the last
 * stable offset, and that the .txnindex files list the aborted transactions of any range below it.
 * MQD_TEST_SEED=n runs that seed alone. */
#include "mqd_log_model_test.h"

/* ---- what a disk holds ---- */

/* Bytes of each file covered by a completed sync; the file layer's journal has the same data,
 * but this is the model's own account. */
struct durable_file {
    int64_t base, bytes;
    enum mqd_file_kind kind;
};
static struct durable_file durable_files[4096];
static int durable_count;

static int64_t *durable_bytes_of(int64_t base, enum mqd_file_kind kind)
{
    for (int i = 0; i < durable_count; i++)
        if (durable_files[i].base == base && durable_files[i].kind == kind)
            return &durable_files[i].bytes;
    CHECK_OR(durable_count < 4096, return &durable_files[0].bytes);
    durable_files[durable_count] = (struct durable_file){base, 0, kind};
    return &durable_files[durable_count++].bytes;
}

static int64_t *durable_bytes(int64_t base)
{
    return durable_bytes_of(base, MQD_FILE_LOG);
}

/* The base offset in the name of the open file; -1 when it is not of this kind. */
static int64_t base_of_fd(int fd, enum mqd_file_kind kind)
{
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    CHECK_OR(length > 24, return -1);
    path[length] = 0;
    return mqd_segment_offset_of(strrchr(path, '/') + 1, kind);
}

/* With a full queue the roll itself flushes, which the model does not see: files sealed
 * meanwhile count as flushed. */
static void note_flushed_by_rolls(struct model *model)
{
    for (uint32_t i = 0;
         i + 1 < model->partition->segment_count && model->partition->sync_queue_count >= MQD_SYNC_QUEUE_MAX - 1; i++) {
        int64_t size_bytes = log_file_bytes(model->partition->segments[i], ".txnindex");
        *durable_bytes_of(model->partition->segments[i], MQD_FILE_TXN_INDEX) = size_bytes < 0 ? 0 : size_bytes;
    }
}

static struct durable_file covering[4];
static int covering_count;

static void do_sync_begin(struct model *model)
{
    struct mqd_sync_fd fds[4];
    int count = mqd_partition_sync_begin(model->partition, fds);
    CHECK((count > 0) == mqd_partition_syncing(model->partition));
    model->sync_end = model->end;
    covering_count = 0;
    for (int i = 0; i < count; i++) {
        struct stat status;
        enum mqd_file_kind kind = MQD_FILE_LOG;
        int64_t base = fds[i].is_directory ? -1 : base_of_fd(fds[i].fd, kind);
        if (base < 0 && !fds[i].is_directory)
            base = base_of_fd(fds[i].fd, kind = MQD_FILE_TXN_INDEX);
        if (base < 0)
            continue;
        CHECK_EQUAL(fstat(fds[i].fd, &status), 0);
        covering[covering_count++] = (struct durable_file){base, status.st_size, kind};
    }
}

static void do_sync_done(struct model *model)
{
    mqd_partition_sync_done(model->partition, 0);
    for (int i = 0; i < covering_count; i++)
        *durable_bytes_of(covering[i].base, covering[i].kind) = covering[i].bytes;
    struct mqd_positions at = log_positions(model->partition);
    CHECK(at.durable_offset >= model->durable && at.durable_offset <= model->sync_end);
    model->durable = at.durable_offset;
    CHECK_EQUAL(at.high_watermark, model->durable);
    if (at.high_watermark_segment != at.log_end_segment || at.high_watermark_position > 0) /* the position is exact */
        CHECK(log_file_bytes(at.high_watermark_segment, ".log") >= at.high_watermark_position);
}

/* Aborted transactions that no completed sync covered: any prefix, then zeros or noise. */
static void lose_aborted(struct model *model)
{
    for (uint32_t i = 0; i < model->partition->segment_count; i++) {
        int64_t base = model->partition->segments[i], size_bytes = log_file_bytes(base, ".txnindex"),
                kept = *durable_bytes_of(base, MQD_FILE_TXN_INDEX);
        if (size_bytes <= kept)
            continue;
        int64_t length = kept + (int64_t)pick(model, (uint64_t)(size_bytes - kept) + 1),
                from = kept + (int64_t)pick(model, (uint64_t)(length - kept) + 1);
        CHECK_EQUAL(truncate(log_file(base, ".txnindex"), length), 0);
        int fd = open(log_file(base, ".txnindex"), O_RDWR), kind = (int)pick(model, 3);
        for (int64_t at = from; at < length && kind > 0; at++) {
            uint8_t byte = kind == 1 ? 0 : (uint8_t)pick(model, 256);
            CHECK_EQUAL(pwrite(fd, &byte, 1, at), 1);
        }
        close(fd);
        if (length == 0 && pick(model, 2))
            CHECK_EQUAL(unlink(log_file(base, ".txnindex")), 0);
        /* no sync covers the checksums: as many as entries are lost, or any number */
        int64_t sum_bytes = log_file_bytes(base, ".txnsum"),
                sum_kept = length / MQD_TXN_INDEX_ENTRY_BYTES * MQD_TXN_SUM_BYTES;
        if (pick(model, 2))
            sum_kept = (int64_t)pick(model, (uint64_t)sum_bytes + 1);
        if (sum_kept < sum_bytes)
            CHECK_EQUAL(truncate(log_file(base, ".txnsum"), sum_kept), 0);
    }
}

/* Bytes of sealed segments were all flushed inline when the queue was full: then durable covers
 * them. */
static void lose_power(struct model *model)
{
    for (uint32_t i = 0; i < model->partition->segment_count; i++) {
        int64_t base = model->partition->segments[i];
        int64_t end = i + 1 < model->partition->segment_count ? model->partition->segments[i + 1] : model->end;
        int64_t size_bytes = log_file_bytes(base, ".log"), kept = *durable_bytes(base);
        if (end <= model->durable || size_bytes <= kept)
            continue;
        int64_t length = kept + (int64_t)pick(model, (uint64_t)(size_bytes - kept) + 1),
                from = kept + (int64_t)pick(model, (uint64_t)(length - kept) + 1);
        CHECK_EQUAL(truncate(log_file(base, ".log"), length), 0);
        int fd = open(log_file(base, ".log"), O_RDWR), kind = (int)pick(model, 3);
        static uint8_t lost[2 << 20]; /* blocks that never reached the disk */
        for (int64_t i = 0; i < length - from; i++)
            lost[i] = kind == 1 ? 0 : (uint8_t)pick(model, 256);
        if (kind > 0 && length > from)
            CHECK_EQUAL(pwrite(fd, lost, (size_t)(length - from), from), length - from);
        close(fd);
        /* index files of undurable data: any prefix */
        for (int k = 0; k < 2; k++) {
            const char *suffix = k ? ".timeindex" : ".index";
            int64_t index_bytes = log_file_bytes(base, suffix);
            if (index_bytes > 0)
                CHECK_EQUAL(truncate(log_file(base, suffix), (off_t)pick(model, (uint64_t)index_bytes + 1)), 0);
        }
    }
}

/* ---- restart ---- */

static void check_contents(struct model *model, int64_t end)
{
    static uint64_t found[OFFSETS_MAX];
    memset(found, 0, sizeof found);
    CHECK_EQUAL(log_verify(model->partition, found), end);
    for (int64_t offset = model->partition->segments[0]; offset < end; offset++)
        if (model->marks[offset] != UINT64_MAX) /* a marker */
            CHECK_EQUAL(found[offset], model->marks[offset]);
}

static void restart(struct model *model)
{
    struct mqd_recovery recovery = log_untrusted();
    enum { CLEAN, PROCESS, POWER } kind = (int)pick(model, 3);
    int64_t published = model->durable + (int64_t)pick(model, (uint64_t)(model->end - model->durable) + 1);
    recovery.log_start_offset = model->start;
    if (pick(model, 2))
        recovery.recovery_point_offset = model->durable;
    if (mqd_partition_syncing(model->partition))
        mqd_partition_sync_done(model->partition, EIO); /* its completion never arrives */
    if (kind == CLEAN && model->partition->fenced)
        kind = PROCESS;
    if (kind == POWER) {
        lose_power(model);
        lose_aborted(model);
    }
    CHECK_EQUAL(mqd_partition_close(model->partition, kind == CLEAN), 0);
    recovery.clean_shutdown = kind == CLEAN;
    while (published > model->durable && published < model->end && model->marks[published] == 0)
        published--; /* a batch's boundary */
    if (kind == PROCESS && pick(model, 2))
        recovery.trusted_end_offset = published;
    model->partition = log_open(&model->options, &recovery);
    CHECK(model->partition);
    if (kind == CLEAN || (kind == PROCESS && recovery.trusted_end_offset < 0))
        CHECK_EQUAL(recovery.log_end_offset, model->end);
    if (recovery.trusted_end_offset >= 0)
        CHECK_EQUAL(recovery.log_end_offset, published);
    CHECK(recovery.log_end_offset >= model->durable && recovery.log_end_offset <= model->end);
    memset(model->marks + recovery.log_end_offset, 0,
           (size_t)(model->end - recovery.log_end_offset) * sizeof model->marks[0]);
    memset(model->events + recovery.log_end_offset, 0,
           (size_t)(model->end - recovery.log_end_offset) * sizeof model->events[0]);
    model->end = model->durable = recovery.log_end_offset;
    recount(model);
    adopt_begun(model);
    durable_count = 0;
    for (uint32_t i = 0; i < model->partition->segment_count; i++) {
        *durable_bytes(model->partition->segments[i]) = log_file_bytes(model->partition->segments[i], ".log");
        int64_t aborted_bytes = log_file_bytes(model->partition->segments[i], ".txnindex");
        *durable_bytes_of(model->partition->segments[i], MQD_FILE_TXN_INDEX) = aborted_bytes < 0 ? 0 : aborted_bytes;
    }
    CHECK_EQUAL(log_positions(model->partition).high_watermark, model->end);
    check_contents(model, model->end);
}

/* The last sequence numbers of the log after a crash: each producer's last surviving batch is a
 * duplicate or, after its marker, a reused sequence number (59); a gap after it is refused (45). */
static void check_producers(struct model *model)
{
    for (int i = 0; i < PRODUCER_COUNT + TXN_COUNT; i++) {
        int64_t id = i < PRODUCER_COUNT ? 100 + i : 200 + i - PRODUCER_COUNT;
        int32_t *next_sequence =
            i < PRODUCER_COUNT ? &model->next_sequence[i] : &model->next_txn_sequence[i - PRODUCER_COUNT];
        int32_t last_end = 0;
        bool ended = false;
        struct mqd_batch last = {.producer_id = -1};
        for (uint32_t s = 0; s < model->partition->segment_count; s++) {
            struct mqd_walk walk;
            struct mqd_batch batch;
            int64_t position;
            int fd = open(log_file(model->partition->segments[s], ".log"), O_RDONLY);
            CHECK_EQUAL(mqd_walk_begin(&walk, fd, model->partition->segments[s], 0, model->partition->segments[s],
                                       log_file_bytes(model->partition->segments[s], ".log"), INT64_MAX),
                        0);
            while (mqd_walk_next(&walk, &batch, &position) == 1)
                if (batch.producer_id == id && batch.attributes & 0x20) {
                    ended = true;
                } else if (batch.producer_id == id) {
                    last = batch;
                    last_end = batch.base_sequence + batch.record_count;
                    ended = false;
                }
            mqd_walk_end(&walk);
            close(fd);
        }
        *next_sequence = last_end;
        bool duplicate;
        int64_t base_offset = -1;
        if (last.producer_id < 0) { /* its batches were deleted with their segments; a snapshot may still have it */
            const struct mqd_producers *known = &model->partition->producers;
            uint32_t index = mqd_producers_find(known, id);
            if (index != MQD_PRODUCER_NONE && known->entries[index].count > 0)
                *next_sequence = known->entries[index].batches[(known->entries[index].head + 4) % 5].last_sequence + 1;
            continue;
        }
        CHECK_EQUAL(mqd_producers_check(&model->partition->producers, &last, (struct mqd_producer_batch_kind){0},
                                        &duplicate, &base_offset),
                    ended ? 59 : 0);
        CHECK(duplicate == !ended);
        if (duplicate)
            CHECK_EQUAL(base_offset, last.base_offset);
        last.base_sequence = last_end + 1;
        CHECK_EQUAL(mqd_producers_check(&model->partition->producers, &last, (struct mqd_producer_batch_kind){0},
                                        &duplicate, &base_offset),
                    45);
    }
}

static void do_snapshot(struct model *model)
{
    size_t size_bytes;
    int64_t offset;
    uint8_t *bytes = mqd_partition_snapshot(model->partition, &size_bytes, &offset);
    if (bytes)
        CHECK_EQUAL(mqd_file_replace(log_file(offset, ".snapshot"), bytes, size_bytes), 0);
    free(bytes);
}

static void do_advance_start(struct model *model)
{
    int64_t high_watermark = log_positions(model->partition).high_watermark,
            *old = malloc(model->partition->segment_count * sizeof *old);
    memcpy(old, model->partition->segments, model->partition->segment_count * sizeof *old);
    int64_t offset = model->start + (int64_t)pick(model, (uint64_t)(high_watermark - model->start) + 1);
    mqd_partition_advance_start(model->partition, offset);
    model->start = log_positions(model->partition).log_start_offset;
    for (int i = 0; old[i] < model->partition->segments[0]; i++) /* what the worker does after the event */
        for (int k = 0; k < 5; k++)
            unlink(log_file(old[i], (const char *[]){".log", ".index", ".timeindex", ".txnindex", ".txnsum"}[k]));
    free(old);
}

static void step(struct model *model)
{
    struct mqd_preallocation job;
    switch (pick(model, 20)) {
    case 0:
    case 1:
    case 2:
        if (!mqd_partition_syncing(model->partition))
            do_sync_begin(model);
        break;
    case 3:
    case 4:
    case 5:
        if (mqd_partition_syncing(model->partition))
            do_sync_done(model);
        break;
    case 6:
        if (pick(model, 4) == 0)
            CHECK_EQUAL(mqd_partition_roll(model->partition, NOW), 0);
        break;
    case 7:
        if (mqd_partition_preallocate_begin(model->partition, &job))
            mqd_partition_preallocate_done(
                model->partition,
                mqd_file_fallocate(job.fd, FALLOC_FL_KEEP_SIZE, job.offset, job.size_bytes) < 0 ? errno : 0);
        break;
    case 8:
        do_snapshot(model);
        break;
    case 9:
        if (pick(model, 8) == 0)
            do_advance_start(model);
        break;
    case 10:
        mqd_partition_do_periodic_work(model->partition, NOW + 20000);
        if (mqd_partition_release_due(model->partition, NOW + 20000))
            mqd_partition_release_idle(model->partition, NOW + 20000);
        break;
    case 11:
        if (pick(model, 4) == 0) {
            restart(model);
            check_producers(model);
        }
        break;
    default:
        if (model->end < OFFSETS_MAX - 400)
            do_write(model);
        note_flushed_by_rolls(model);
    }
}

static void run_history(uint64_t seed, int step_count)
{
    static struct model model;
    memset(&model, 0, sizeof model);
    model.seed = model.random = seed;
    log_fresh();
    model.options = log_options();
    model.options.segment_bytes = (int64_t[]){3000, 20000, 200000, 1 << 20}[pick(&model, 4)];
    model.options.index_interval_bytes = (int32_t[]){0, 500, 4096}[pick(&model, 3)];
    model.partition = log_open(&model.options, NULL);
    durable_count = 0;
    recount(&model);
    for (int i = 0; i < step_count && !test_failed; i++) {
        step(&model);
        if (model.partition && !test_failed)
            check_transactions(&model, pick(&model, 4) == 0);
    }
    if (!test_failed && mqd_partition_syncing(model.partition))
        do_sync_done(&model);
    if (!test_failed) {
        CHECK_EQUAL(log_sync(model.partition), 0);
        check_contents(&model, model.end);
        CHECK_EQUAL(log_positions(model.partition).durable_offset, model.end);
    }
    mqd_partition_close(model.partition, 0);
    if (test_failed)
        test_message("MQD_TEST_SEED=%llu", (unsigned long long)seed);
}

TEST(no_sequence_of_failures_loses_durable_records)
{
    const char *chosen = getenv("MQD_TEST_SEED");
    uint64_t first = chosen ? strtoull(chosen, NULL, 10) : 1, count = chosen ? 1 : test_long() ? 1000 : 16;
    for (uint64_t seed = first; seed < first + count && !test_failed; seed++)
        run_history(seed, 600);
}
