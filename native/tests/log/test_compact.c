/* Compaction of data written by a real partition: records, files, the owner's list; damaged
 * bytes; full disks. Codecs, transactions and random histories are in tests/property. */
#include "mqd_log_test.h"

#include "log/compaction/compact.h"

#define KEY_COUNT 50

static uint32_t put_varint(uint8_t *out, int64_t number)
{
    uint64_t value = (uint64_t)number << 1 ^ (uint64_t)(number >> 63);
    uint32_t count = 0;
    for (; value > 0x7f; value >>= 7)
        out[count++] = (uint8_t)(value | 0x80);
    out[count++] = (uint8_t)value;
    return count;
}

/* key: 4 bytes; value: the mark, or null for 0. */
static uint32_t put_record(uint8_t *out, int32_t delta, uint32_t key, uint64_t mark)
{
    uint8_t body[64];
    uint32_t at = 0;
    body[at++] = 0;
    at += put_varint(body + at, delta);
    at += put_varint(body + at, delta);
    at += put_varint(body + at, 4);
    memcpy(body + at, &key, 4);
    at += 4;
    at += put_varint(body + at, mark ? 8 : -1);
    if (mark) {
        memcpy(body + at, &mark, 8);
        at += 8;
    }
    at += put_varint(body + at, 0);
    uint32_t head = put_varint(out, at);
    memcpy(out + head, body, at);
    return head + at;
}

struct model {
    uint64_t last[KEY_COUNT];
    int64_t end, clean_to;
    uint64_t random, mark;
};

/* One batch of up to 8 records through the partition's own write. */
static void append(struct mqd_partition *partition, struct model *model, bool tombstones)
{
    uint8_t records[512], *bytes = malloc(1024);
    struct mqd_batch batch = {.record_count = 1 + (int32_t)(test_random(&model->random) % 8),
                              .base_timestamp_ms = NOW,
                              .max_timestamp_ms = NOW,
                              .producer_id = -1,
                              .producer_epoch = -1,
                              .base_sequence = -1,
                              .partition_leader_epoch = -1};
    uint32_t size_bytes = 0;
    batch.last_offset_delta = batch.record_count - 1;
    for (int32_t i = 0; i < batch.record_count; i++) {
        uint32_t key = (uint32_t)(test_random(&model->random) % KEY_COUNT);
        uint64_t mark = tombstones && test_random(&model->random) % 5 == 0 ? 0 : ++model->mark;
        size_bytes += put_record(records + size_bytes, i, key, mark);
        model->last[key] = mark;
    }
    mqd_batch_put_header(bytes, &batch, records, size_bytes);
    memcpy(bytes + MQD_BATCH_HEADER_BYTES, records, size_bytes);
    struct mqd_stage_result result;
    bool rolled;
    const char *reason;
    CHECK(mqd_batch_validate(bytes, MQD_BATCH_HEADER_BYTES + size_bytes, &batch, &reason) == 0);
    CHECK(mqd_partition_stage(partition, &batch, bytes, true, 0, 0, NOW, &result) == 0);
    CHECK(mqd_partition_write(partition, NOW, &rolled) == 0);
    free(bytes);
    model->end = partition->log_end_offset;
}

/* The map left in the files; checks that offsets rise. */
static void check_files(struct mqd_partition *partition, const struct model *model)
{
    uint64_t found[KEY_COUNT] = {0};
    int64_t next = 0;
    struct mqd_compact_input input = {.directory = log_path,
                                      .bases = partition->segments,
                                      .segment_count = partition->segment_count,
                                      .end_position = -1,
                                      .fd = -1};
    struct mqd_batch batch;
    CHECK(mqd_compact_input_begin(&input, 0, partition->segment_count) == 0);
    while (mqd_compact_input_next(&input, &batch) == 1) {
        struct mqd_records records;
        struct mqd_record record;
        const uint8_t *bytes = mqd_compact_input_bytes(&input, &batch);
        CHECK_OR(bytes && batch.base_offset >= next, break);
        next = mqd_batch_end_offset(&batch);
        mqd_records_begin(&records, &batch, bytes + MQD_BATCH_HEADER_BYTES,
                          (uint64_t)batch.size_bytes - MQD_BATCH_HEADER_BYTES);
        while (mqd_records_next(&records, &record) == 1) {
            uint32_t key;
            uint64_t mark = 0;
            memcpy(&key, record.key, 4);
            if (!record.tombstone)
                memcpy(&mark, record.key + 5, 8); /* after the value's length */
            found[key] = mark;
        }
    }
    mqd_compact_input_end(&input);
    free(input.buffer);
    CHECK_EQUAL(next, model->end);
    CHECK(memcmp(found, model->last, sizeof found) == 0);
}

static int run(struct mqd_compact *compact)
{
    struct mqd_compact_step_result result;
    int state;
    while ((state = mqd_compact_step(compact, 1000, &result)) == MQD_COMPACT_MORE)
        ;
    return state;
}

/* Compacts all sealed segments into one. 0, or -1 with mqd_error. */
static int compact_all(struct mqd_partition *partition, struct model *model, struct mqd_compact_figures *figures)
{
    uint32_t sealed = partition->segment_count - 1;
    int64_t first = partition->segments[0], last = partition->segments[sealed - 1];
    struct mqd_compact_options options = {.first_dirty_offset = model->clean_to,
                                          .snapshot_offset = -1,
                                          .now_ms = NOW,
                                          .delete_retention_ms = 1000,
                                          .end_position = -1,
                                          .map_bytes = 1 << 16,
                                          .map_load_percent = 90,
                                          .to_clean_count = sealed,
                                          .segment_count = partition->segment_count,
                                          .index_interval_bytes = 512};
    struct mqd_compact *compact = mqd_compact_open(log_path, partition->segments, &options);
    struct mqd_compact_group group;
    if (!compact || run(compact) != MQD_COMPACT_DONE || mqd_compact_group_begin(compact, 0, sealed) < 0 ||
        run(compact) != MQD_COMPACT_DONE || mqd_compact_group_end(compact, &group) < 0) {
        mqd_compact_close(compact);
        return -1;
    }
    mqd_compact_read_figures(compact, figures);
    mqd_compact_close(compact);
    if (!group.changed)
        return 0;
    if (mqd_compact_swap_prepare(log_path, first, partition->segments + 1, sealed - 1, group.has_transactions) < 0 ||
        mqd_partition_replace_segments(partition, first, last) != (int)sealed - 1 ||
        mqd_compact_swap_install(log_path, first) < 0 || mqd_compact_swap_finish(log_path, first) < 0)
        return -1;
    model->clean_to = figures->mapped_end;
    return 0;
}

static struct mqd_partition *open_compacted(int64_t segment_bytes)
{
    struct mqd_log_options options = log_options();
    options.segment_bytes = segment_bytes;
    options.index_interval_bytes = 256;
    options.compacted = 1;
    return log_open(&options, NULL);
}

/* A compacted partition with 200 flushed batches in segments of 4096 bytes. */
static void open_with_batches(struct model *model, struct mqd_partition **partition)
{
    log_fresh();
    *partition = open_compacted(4096);
    for (int i = 0; i < 200; i++)
        append(*partition, model, false);
    CHECK_EQUAL(log_sync(*partition), 0);
}

TEST(the_last_value_of_each_key_survives_compactions_and_restarts)
{
    struct model model = {.random = 5};
    struct mqd_compact_figures figures;
    log_fresh();
    struct mqd_partition *partition = open_compacted(4096);
    for (int round = 0; round < 12; round++) {
        for (int i = 0; i < 100; i++)
            append(partition, &model, true);
        CHECK_EQUAL(log_sync(partition), 0);
        CHECK_OR(compact_all(partition, &model, &figures) == 0, fprintf(stderr, "%s\n", mqd_error_message()));
        check_files(partition, &model);
        if (round % 3)
            continue;
        CHECK_EQUAL(mqd_partition_close(partition, round % 2), 0);
        partition = open_compacted(4096);
        CHECK(partition);
        CHECK_EQUAL(partition->log_end_offset, model.end);
        check_files(partition, &model);
    }
    CHECK(log_file_bytes(0, ".log") < 8192);
    mqd_partition_close(partition, 0);
}

/* Recovery of gaps must not depend on the current policy. */
TEST(gaps_are_known_though_the_policy_changed)
{
    struct model model = {.random = 6};
    struct mqd_compact_figures figures;
    struct mqd_partition *partition;
    open_with_batches(&model, &partition);
    CHECK_EQUAL(compact_all(partition, &model, &figures), 0);
    CHECK_EQUAL(mqd_partition_close(partition, 0), 0);
    struct mqd_log_options options = log_options();
    options.segment_bytes = 4096;
    partition = log_open(&options, NULL);
    CHECK_EQUAL(partition->log_end_offset, model.end);
    check_files(partition, &model);
    mqd_partition_close(partition, 0);
}

TEST(segments_that_must_not_be_replaced_are_refused)
{
    struct model model = {.random = 7};
    log_fresh();
    struct mqd_partition *partition = open_compacted(4096);
    for (int i = 0; i < 200; i++)
        append(partition, &model, false);
    uint32_t count = partition->segment_count;
    CHECK(count > 4);
    /* nothing is flushed */
    CHECK_EQUAL(mqd_partition_replace_segments(partition, partition->segments[0], partition->segments[1]), -1);
    CHECK_EQUAL(mqd_error_code(), MQD_E_STALE);
    CHECK_EQUAL(log_sync(partition), 0);
    /* the active one */
    CHECK_EQUAL(mqd_partition_replace_segments(partition, partition->segments[0], partition->segments[count - 1]), -1);
    CHECK_EQUAL(mqd_partition_replace_segments(partition, partition->segments[0], partition->segments[1] + 1), -1);
    CHECK_EQUAL(mqd_partition_replace_segments(partition, partition->segments[2], partition->segments[1]), -1);
    int64_t third = partition->segments[2];
    CHECK_EQUAL(mqd_partition_advance_start(partition, third), 1);
    CHECK_EQUAL(mqd_partition_replace_segments(partition, 0, third), -1); /* the first ones are deleted by now */
    CHECK_EQUAL(mqd_partition_replace_segments(partition, third, partition->segments[1]), 1);
    CHECK_EQUAL(partition->segment_count, count - 3);
    CHECK_EQUAL(partition->segments[0], third);
    mqd_partition_close(partition, 0);
}

/* Whatever a disk does with the bytes: an error or a readable log, and no .cleaned file is
 * left. */
TEST(damaged_bytes_are_an_error_and_change_nothing)
{
    uint64_t random = 8;
    for (int round = 0; round < (test_long() ? 2000 : 25); round++) {
        struct model model = {.random = 9 + (uint64_t)round};
        struct mqd_compact_figures figures;
        log_fresh();
        struct mqd_partition *partition = open_compacted(2048);
        for (int i = 0; i < 60; i++)
            append(partition, &model, true);
        CHECK_EQUAL(log_sync(partition), 0);
        int64_t base = partition->segments[test_random(&random) % (partition->segment_count - 1)];
        log_flip(log_file(base, ".log"), (int64_t)(test_random(&random) % (uint64_t)log_file_bytes(base, ".log")));
        int result = compact_all(partition, &model, &figures);
        CHECK(result == 0 || mqd_error_code() == MQD_E_CORRUPT || mqd_error_code() == EIO);
        char cleaned[200];
        snprintf(cleaned, sizeof cleaned, "%s.cleaned", log_file(0, ".log"));
        CHECK(access(cleaned, F_OK) < 0);
        mqd_partition_close(partition, 0);
    }
}

TEST(a_full_disk_is_an_error_and_changes_nothing)
{
    struct model model = {.random = 10};
    struct mqd_compact_figures figures;
    struct mqd_partition *partition;
    open_with_batches(&model, &partition);
    mqd_file_watch(NULL, "write:ENOSPC:.cleaned");
    int result = compact_all(partition, &model, &figures);
    int error = mqd_error_code();
    mqd_file_watch(NULL, NULL);
    CHECK(result == -1 && error == ENOSPC);
    check_files(partition, &model);
    CHECK_EQUAL(compact_all(partition, &model, &figures), 0);
    check_files(partition, &model);
    mqd_partition_close(partition, 0);
}

TEST(a_compacted_segment_replaces_nothing_before_it_is_flushed)
{
    static const char *const rules[] = {"sync:EIO:.log.cleaned", "sync:EIO:.index.cleaned",
                                        "sync:EIO:.timeindex.cleaned"};
    struct model model = {.random = 11};
    struct mqd_compact_figures figures;
    struct mqd_partition *partition;
    open_with_batches(&model, &partition);
    uint32_t count = partition->segment_count;
    for (int i = 0; i < 3; i++) {
        CHECK_EQUAL(mqd_file_watch(NULL, rules[i]), 0);
        CHECK_EQUAL(compact_all(partition, &model, &figures), -1);
        mqd_file_watch(NULL, NULL);
        CHECK_EQUAL(partition->segment_count, count);
        check_files(partition, &model);
    }
    mqd_partition_close(partition, 0);
}

static bool exists(const char *suffix, const char *ending)
{
    char path[200];
    snprintf(path, sizeof path, "%s%s", log_file(0, suffix), ending);
    return access(path, F_OK) == 0;
}

/* After a power cut the old segments would be back, without the list of what replaced them. */
TEST(a_swap_ends_when_its_deletions_are_durable)
{
    log_fresh();
    CHECK(mkdir(log_path, 0755) == 0);
    CHECK_EQUAL(mqd_compact_swap_prepare(log_path, 0, (int64_t[]){10}, 1, 0), 0);
    CHECK_EQUAL(mqd_file_watch(NULL, "sync:EIO"), 0);
    CHECK_EQUAL(mqd_compact_swap_finish(log_path, 0), -1);
    mqd_file_watch(NULL, NULL);
    CHECK(exists(".swap", ""));
    CHECK_EQUAL(mqd_compact_swap_finish(log_path, 0), 0);
    CHECK(!exists(".swap", ""));
}

/* ... and a list would be back without its files. */
TEST(an_undone_swap_keeps_its_files_until_the_list_is_gone)
{
    log_fresh();
    CHECK(mkdir(log_path, 0755) == 0);
    log_write_file(log_file(0, ".log.cleaned"), "x", 1);
    CHECK_EQUAL(mqd_compact_swap_prepare(log_path, 0, (int64_t[]){10}, 1, 0), 0);
    CHECK_EQUAL(mqd_file_watch(NULL, "sync:EIO"), 0);
    CHECK_EQUAL(mqd_compact_swap_undo(log_path, 0), -1);
    mqd_file_watch(NULL, NULL);
    CHECK(exists(".log", ".cleaned"));
    CHECK_EQUAL(mqd_compact_swap_undo(log_path, 0), 0);
    CHECK(!exists(".log", ".cleaned") && !exists(".swap", ""));
}

/* A reader, or the next start, must not look up positions of the old .log in the new one. */
TEST(an_interrupted_swap_leaves_no_old_index_beside_the_new_log)
{
    static const char *const kinds[] = {".log", ".index", ".timeindex"};
    enum { OLD_BYTES = 3, NEW_BYTES = 4 };
    log_fresh();
    CHECK(mkdir(log_path, 0755) == 0);
    for (int kind = 0; kind < 3; kind++) {
        char cleaned[200];
        snprintf(cleaned, sizeof cleaned, "%s.cleaned", log_file(0, kinds[kind]));
        log_write_file(log_file(0, kinds[kind]), "old", OLD_BYTES);
        log_write_file(cleaned, "new!", NEW_BYTES);
    }
    CHECK_EQUAL(mqd_compact_swap_prepare(log_path, 0, (int64_t[]){10}, 1, 0), 0);
    int result = -1;
    for (int round = 0; result < 0; round++) { /* each succeeds in one call more */
        CHECK(round < 10 && mqd_file_watch(NULL, "any:EIO:after=1") == 0);
        result = mqd_compact_swap_install(log_path, 0);
        mqd_file_watch(NULL, NULL);
        bool is_replaced = log_file_bytes(0, ".log") == NEW_BYTES;
        for (int kind = 1; kind < 3; kind++)
            CHECK(!is_replaced || log_file_bytes(0, kinds[kind]) != OLD_BYTES);
    }
    for (int kind = 0; kind < 3; kind++)
        CHECK_EQUAL(log_file_bytes(0, kinds[kind]), NEW_BYTES);
}

/* A directory listing in between must not find records of aborted transactions without their
 * index entries. */
TEST(a_segment_is_deleted_before_its_aborted_transactions)
{
    log_fresh();
    CHECK(mkdir(log_path, 0755) == 0);
    const int64_t others[] = {10, 20};
    static const char *const kinds[] = {".log", ".index", ".timeindex", ".txnindex", ".txnsum"};
    for (int kind = 0; kind < 5; kind++) {
        for (int i = 0; i < 2; i++)
            log_write_file(log_file(others[i], kinds[kind]), "x", 1);
        log_write_file(log_file(0, kinds[kind]), "x", 1);
    }
    CHECK_EQUAL(mqd_compact_swap_prepare(log_path, 0, others, 2, 1), 0);
    CHECK_EQUAL(mqd_compact_swap_install(log_path, 0), 0);
    for (int stop = 0; stop < 11; stop++) {
        char rule[64];
        snprintf(rule, sizeof rule, "unlink:EIO:after=1:count=1");
        CHECK(mqd_file_watch(NULL, rule) == 0);
        int result = mqd_compact_swap_finish(log_path, 0);
        mqd_file_watch(NULL, NULL);
        for (int i = 0; i < 2; i++)
            CHECK(log_file_bytes(others[i], ".log") < 0 || log_file_bytes(others[i], ".txnindex") >= 0);
        if (result == 0)
            break;
    }
    CHECK_EQUAL(mqd_compact_swap_finish(log_path, 0), -1); /* done */
    CHECK_EQUAL(log_file_bytes(20, ".txnindex"), -1);
    CHECK_EQUAL(log_file_bytes(20, ".txnsum"), -1);
}
