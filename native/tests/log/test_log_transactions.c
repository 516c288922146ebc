/* Transactions in one partition: markers, verification guards, the last stable offset, aborted
 * transactions and their state after failures and restarts. Random sequences of these:
 * test_log_model.c. */
#include "mqd_log_test.h"

#include "log/partition_follow.h"

static struct log_batch data(int64_t producer_id, int16_t epoch, int32_t sequence)
{
    return (struct log_batch){.attributes = 0x10,
                              .producer_id = producer_id,
                              .producer_epoch = epoch,
                              .base_sequence = sequence,
                              .mark = (uint64_t)sequence};
}

static struct log_batch marker(int64_t producer_id, int16_t epoch, bool commit, int32_t coordinator_epoch)
{
    return (struct log_batch){.marker = commit ? 2 : 1,
                              .producer_id = producer_id,
                              .producer_epoch = epoch,
                              .coordinator_epoch = coordinator_epoch};
}

static struct mqd_log_options options_verified(void)
{
    struct mqd_log_options options = log_options();
    options.transaction_verification = 1;
    options.flush_on_ack = 0;
    return options;
}

/* As in a worker: with flags and guard. */
static int16_t stage(struct mqd_partition *partition, struct log_batch want, uint32_t flags, int64_t guard,
                     struct mqd_stage_result *result)
{
    static uint8_t bytes[64][256];
    static uint32_t turn;
    struct mqd_batch batch;
    uint8_t *at = bytes[turn++ % 64];
    log_encode(at, want);
    mqd_batch_decode(at, MQD_BATCH_HEADER_BYTES, &batch);
    return mqd_partition_stage(partition, &batch, at, true, flags, guard, NOW, result);
}

static void write_staged(struct mqd_partition *partition)
{
    bool rolled;
    CHECK_EQUAL(mqd_partition_write(partition, NOW, &rolled), 0);
}

TEST(a_transaction_begins_with_the_guard_that_was_verified)
{
    log_fresh();
    struct mqd_log_options options = options_verified();
    struct mqd_partition *partition = log_open(&options, NULL);
    struct mqd_stage_result result, again;
    CHECK_EQUAL(stage(partition, data(7, 0, 0), 0, 0, &result), MQD_STAGE_VERIFY);
    CHECK(result.guard != 0);
    CHECK_EQUAL(mqd_partition_staged_count(partition), 0);
    CHECK_EQUAL(stage(partition, data(7, 0, 1), 0, 0, &again), MQD_STAGE_VERIFY); /* a second one, in flight */
    CHECK_EQUAL(again.guard, result.guard);
    CHECK_EQUAL(stage(partition, data(7, 0, 0), 0, result.guard + 1, &again), 19);
    CHECK_EQUAL(stage(partition, data(8, 0, 0), 0, result.guard, &again), 19); /* another's */
    CHECK_EQUAL(stage(partition, data(7, 0, 1), 0, result.guard, &again), 45); /* not before the lower one */
    CHECK_EQUAL(stage(partition, data(7, 0, 0), 0, result.guard, &again), 0);
    /* the transaction is ongoing: no guard is required */
    CHECK_EQUAL(stage(partition, data(7, 0, 1), 0, result.guard, &again), 0);
    CHECK_EQUAL(stage(partition, data(7, 0, 2), 0, 0, &again), 0);
    write_staged(partition);
    CHECK_EQUAL(stage(partition, data(7, 0, 1), 0, 0, &again), 0);
    CHECK(again.duplicate);
    mqd_partition_close(partition, 0);
}

TEST(a_transaction_of_version_2_begins_with_sequence_0_where_no_sequence_is_known)
{
    log_fresh();
    struct mqd_log_options options = options_verified();
    struct mqd_partition *partition = log_open(&options, NULL);
    struct mqd_stage_result result, again;
    CHECK_EQUAL(stage(partition, data(7, 0, 5), 0, 0, &result), MQD_STAGE_VERIFY);
    CHECK_EQUAL(stage(partition, data(7, 0, 5), MQD_STAGE_FROM_ZERO, result.guard, &again), 45);
    CHECK_EQUAL(stage(partition, data(7, 0, 0), MQD_STAGE_FROM_ZERO, 0, &result), MQD_STAGE_VERIFY);
    CHECK_EQUAL(stage(partition, data(7, 0, 0), MQD_STAGE_FROM_ZERO, result.guard, &again), 0);
    CHECK_EQUAL(stage(partition, data(7, 0, 1), MQD_STAGE_FROM_ZERO, result.guard, &again), 0);
    /* known from a transaction of version 1; in version 1 any sequence number may begin */
    CHECK_EQUAL(stage(partition, marker(7, 0, true, 0), MQD_STAGE_COORDINATOR, 0, &again), 0);
    CHECK_EQUAL(stage(partition, data(7, 0, 2), 0, 0, &result), MQD_STAGE_VERIFY);
    CHECK_EQUAL(stage(partition, data(7, 0, 2), MQD_STAGE_FROM_ZERO, result.guard, &again), 0);
    CHECK_EQUAL(stage(partition, data(8, 0, 5), 0, 0, &result), MQD_STAGE_VERIFY);
    CHECK_EQUAL(stage(partition, data(8, 0, 5), 0, result.guard, &again), 0);
    write_staged(partition);
    mqd_partition_close(partition, 0);
}

TEST(a_guard_from_before_the_end_begins_no_new_transaction)
{
    log_fresh();
    struct mqd_log_options options = options_verified();
    struct mqd_partition *partition = log_open(&options, NULL);
    struct mqd_stage_result result, end;
    CHECK_EQUAL(stage(partition, data(7, 0, 0), 0, 0, &result), MQD_STAGE_VERIFY);
    /* the coordinator aborts meanwhile */
    CHECK_EQUAL(stage(partition, marker(7, 0, false, 3), MQD_STAGE_COORDINATOR, 0, &end), 0);
    CHECK_EQUAL(stage(partition, data(7, 0, 0), 0, result.guard, &end), 19);
    CHECK_EQUAL(stage(partition, data(7, 0, 0), 0, 0, &end), MQD_STAGE_VERIFY);
    CHECK(end.guard != result.guard);
    write_staged(partition);
    CHECK_EQUAL(log_positions(partition).last_stable_offset, 1);
    CHECK_EQUAL(log_file_bytes(0, ".txnindex"), -1); /* nothing was aborted here */
    mqd_partition_close(partition, 0);
}

TEST(guards_are_bounded_and_expire)
{
    log_fresh();
    struct mqd_log_options options = options_verified();
    struct mqd_partition *partition = log_open(&options, NULL);
    struct mqd_stage_result result;
    int64_t first = 0, last = 0;
    for (int64_t id = 0; id <= MQD_VERIFICATION_COUNT_MAX; id++) {
        CHECK_EQUAL(stage(partition, data(1000 + id, 0, 0), 0, 0, &result), MQD_STAGE_VERIFY);
        first = id == 0 ? result.guard : first;
        last = result.guard;
    }
    CHECK_EQUAL(stage(partition, data(1000, 0, 0), 0, first, &result), 19); /* the oldest was dropped */
    CHECK_EQUAL(mqd_partition_do_periodic_work(partition, NOW + 60000), 0);
    CHECK_EQUAL(stage(partition, data(1000 + MQD_VERIFICATION_COUNT_MAX, 0, 0), 0, last, &result), 0);
    CHECK_EQUAL(stage(partition, data(1500, 0, 0), 0, 0, &result), MQD_STAGE_VERIFY);
    write_staged(partition);
    mqd_partition_do_periodic_work(partition, NOW + 60001);
    CHECK(partition->verifications.entries == NULL);
    CHECK_EQUAL(stage(partition, data(1500, 0, 0), 0, result.guard, &result), 19);
    mqd_partition_close(partition, 0);
}

TEST(without_verification_any_transaction_begins)
{
    log_fresh();
    struct mqd_log_options options = log_options();
    struct mqd_partition *partition = log_open(&options, NULL);
    CHECK_EQUAL(log_append(partition, data(7, 0, 0)), 0);
    struct log_batch plain = data(7, 0, 1);
    plain.attributes = 0;
    CHECK_EQUAL(log_append(partition, plain), 48); /* not part of the transaction */
    plain.producer_id = 0;
    plain.attributes = 0x10;
    CHECK_EQUAL(log_append(partition, plain), 0); /* as in Kafka: without a producer id the flag is ignored */
    mqd_partition_close(partition, 0);
}

TEST(markers_are_fenced_by_both_epochs)
{
    log_fresh();
    struct mqd_log_options options = options_verified();
    options.transaction_verification = 0;
    struct mqd_partition *partition = log_open(&options, NULL);
    struct mqd_stage_result result;
    CHECK_EQUAL(log_append(partition, data(7, 3, 0)), 0);
    CHECK_EQUAL(log_append(partition, marker(7, 2, true, 0)), 47);
    CHECK_EQUAL(log_append(partition, marker(7, 3, true, 5)), 0);
    CHECK_EQUAL(log_append(partition, marker(7, 3, true, 4)), 52);
    CHECK_EQUAL(log_append(partition, data(7, 3, 1)), 0);
    /* a repeated one of version 2 */
    CHECK_EQUAL(stage(partition, marker(7, 3, false, 5), MQD_STAGE_COORDINATOR | MQD_STAGE_MARKER_BUMPED, 0, &result),
                47);
    CHECK_EQUAL(stage(partition, marker(7, 4, false, 5), MQD_STAGE_COORDINATOR | MQD_STAGE_MARKER_BUMPED, 0, &result),
                0);
    write_staged(partition);
    CHECK_EQUAL(log_append(partition, data(7, 3, 2)), 47);
    CHECK_EQUAL(log_append(partition, data(7, 4, 2)), 45); /* the new epoch begins at 0 */
    CHECK_EQUAL(log_append(partition, data(7, 4, 0)), 0);
    CHECK_EQUAL(log_append(partition, marker(99, 1, true, 0)), 0); /* of an unknown producer: known from now on */
    CHECK_EQUAL(log_append(partition, data(99, 0, 0)), 47);
    CHECK_EQUAL(log_append(partition, data(99, 1, 17)), 0); /* its state may have expired: any sequence number */
    struct log_batch other = marker(7, 4, true, 9);
    uint8_t bytes[256];
    struct mqd_batch batch;
    log_encode(bytes, other);
    bytes[MQD_BATCH_HEADER_BYTES + 8] = 2; /* a leader change */
    mqd_batch_decode(bytes, sizeof bytes, &batch);
    CHECK_EQUAL(mqd_partition_stage(partition, &batch, bytes, true, MQD_STAGE_COORDINATOR, 0, NOW, &result), 87);
    CHECK_EQUAL(stage(partition, marker(7, 4, true, 9), 0, 0, &result), 87); /* from a client */
    mqd_partition_close(partition, 0);
}

/* Truncated anywhere or with any byte changed: nothing is read beyond the end. Under ASan. */
TEST(a_damaged_marker_is_not_read_beyond_its_end)
{
    uint8_t whole[256];
    struct mqd_batch batch;
    struct mqd_marker out;
    uint32_t size_bytes = log_encode(whole, marker(7, 0, true, 0x01020304));
    mqd_batch_decode(whole, size_bytes, &batch);
    CHECK_EQUAL(mqd_marker_parse(whole, &batch, &out), 0);
    CHECK(out.commit);
    CHECK_EQUAL(out.coordinator_epoch, 0x01020304);
    for (uint32_t cut = MQD_BATCH_HEADER_BYTES; cut < size_bytes; cut++) {
        uint8_t *bytes = malloc(cut);
        memcpy(bytes, whole, cut);
        batch.size_bytes = (int32_t)cut;
        CHECK_EQUAL(mqd_marker_parse(bytes, &batch, &out), -1);
        free(bytes);
    }
    uint64_t random = 1;
    for (int i = 0; i < 20000; i++) {
        uint8_t *bytes = malloc(size_bytes);
        memcpy(bytes, whole, size_bytes);
        for (int flips = 0; flips < 3; flips++)
            bytes[MQD_BATCH_HEADER_BYTES + test_random(&random) % (size_bytes - MQD_BATCH_HEADER_BYTES)] =
                (uint8_t)test_random(&random);
        batch.size_bytes = (int32_t)size_bytes;
        mqd_marker_parse(bytes, &batch, &out);
        free(bytes);
    }
}

TEST(the_last_stable_offset_waits_for_markers_below_the_high_watermark)
{
    log_fresh();
    struct mqd_log_options options = log_options(); /* flush_on_ack */
    struct mqd_partition *partition = log_open(&options, NULL);
    CHECK_EQUAL(log_append(partition, data(7, 0, 0)), 0);
    CHECK_EQUAL(log_append(partition, data(8, 0, 0)), 0);
    CHECK_EQUAL(log_sync(partition), 0);
    CHECK_EQUAL(log_positions(partition).high_watermark, 2);
    CHECK_EQUAL(log_positions(partition).last_stable_offset, 0);
    CHECK_EQUAL(log_append(partition, marker(7, 0, false, 0)), 0);
    CHECK_EQUAL(log_file_bytes(0, ".txnindex"), MQD_TXN_INDEX_ENTRY_BYTES);
    CHECK(mqd_partition_take_txn_index_created(partition));
    CHECK(!mqd_partition_take_txn_index_created(partition));
    CHECK_EQUAL(log_positions(partition).last_stable_offset, 0); /* its marker is not flushed */
    CHECK_EQUAL(log_sync(partition), 0);
    CHECK_EQUAL(log_positions(partition).last_stable_offset, 1);
    CHECK_EQUAL(log_append(partition, marker(8, 0, true, 0)), 0);
    CHECK_EQUAL(log_sync(partition), 0);
    CHECK_EQUAL(log_positions(partition).last_stable_offset, 4);
    CHECK_EQUAL(log_file_bytes(0, ".txnindex"), MQD_TXN_INDEX_ENTRY_BYTES);
    mqd_partition_close(partition, 0);
}

/* A follower that is truncated between a marker and the end of its log: the marker is not
 * committed. */
TEST(a_truncation_keeps_transactions_that_end_above_the_high_watermark)
{
    log_fresh();
    struct mqd_log_options options = log_options();
    struct mqd_partition *partition = log_open(&options, NULL);
    struct mqd_truncation cut;
    mqd_partition_set_replicated(partition, true);
    CHECK_EQUAL(log_append(partition, data(7, 0, 0)), 0);
    CHECK_EQUAL(log_append(partition, data(7, 0, 1)), 0);
    CHECK_EQUAL(log_append(partition, marker(7, 0, true, 0)), 0);
    CHECK_EQUAL(log_append(partition, (struct log_batch){.mark = 9}), 0);
    CHECK_EQUAL(log_append(partition, (struct log_batch){.mark = 10}), 0);
    CHECK_EQUAL(log_sync(partition), 0);
    CHECK(mqd_partition_raise_high_watermark(partition, 2));
    CHECK_EQUAL(log_positions(partition).last_stable_offset, 0);
    CHECK_EQUAL(mqd_partition_truncate(partition, 4, NOW, &cut), 0);
    CHECK_EQUAL(log_positions(partition).log_end_offset, 4);
    CHECK_EQUAL(log_positions(partition).high_watermark, 2);
    CHECK_EQUAL(log_positions(partition).last_stable_offset, 0);
    CHECK(mqd_partition_raise_high_watermark(partition, 3));
    CHECK_EQUAL(log_positions(partition).last_stable_offset, 3);
    mqd_partition_close(partition, 0);
}

TEST(a_failed_write_is_undone_as_a_whole)
{
    for (int step = 0; step < 12; step++) {
        log_fresh();
        struct mqd_log_options options = options_verified();
        options.transaction_verification = 0;
        options.segment_bytes = step % 2 ? 300 : 1 << 20; /* with a roll inside the write */
        struct mqd_partition *partition = log_open(&options, NULL);
        struct mqd_stage_result result;
        CHECK_EQUAL(log_append(partition, data(7, 0, 0)), 0);
        CHECK_EQUAL(log_append(partition, data(8, 0, 0)), 0);
        char rule[80];
        snprintf(rule, sizeof rule, "write:ENOSPC::after=%d:count=1", step / 2);
        CHECK_EQUAL(stage(partition, marker(7, 0, false, 0), MQD_STAGE_COORDINATOR, 0, &result), 0);
        CHECK_EQUAL(stage(partition, data(7, 0, 1), 0, 0, &result), 0);
        CHECK_EQUAL(stage(partition, marker(8, 1, false, 0), MQD_STAGE_COORDINATOR, 0, &result), 0);
        CHECK_EQUAL(stage(partition, marker(7, 0, false, 0), MQD_STAGE_COORDINATOR, 0, &result), 0);
        bool rolled;
        CHECK_EQUAL(mqd_file_watch(NULL, rule), 0);
        int failed = mqd_partition_write(partition, NOW, &rolled);
        mqd_file_watch(NULL, NULL);
        if (failed) {
            CHECK_EQUAL(log_positions(partition).log_end_offset, 2);
            CHECK_EQUAL(log_positions(partition).last_stable_offset, 0);
            CHECK(log_file_bytes(partition->active.base_offset, ".txnindex") <= 0);
            /* its epoch was not bumped, and it is still in its transaction */
            CHECK_EQUAL(log_append(partition, data(8, 0, 1)), 0);
            CHECK_EQUAL(log_append(partition, marker(7, 0, true, 0)), 0);
            CHECK_EQUAL(log_append(partition, marker(8, 0, true, 0)), 0);
            for (uint32_t i = 0; i < partition->segment_count; i++)
                CHECK(log_file_bytes(partition->segments[i], ".txnindex") <= 0);
        } else {
            int64_t bytes = 0;
            for (uint32_t i = 0; i < partition->segment_count; i++)
                bytes += log_file_bytes(partition->segments[i], ".txnindex") > 0
                             ? log_file_bytes(partition->segments[i], ".txnindex")
                             : 0;
            CHECK_EQUAL(bytes, 3 * MQD_TXN_INDEX_ENTRY_BYTES);
        }
        CHECK_EQUAL(log_positions(partition).last_stable_offset, log_positions(partition).log_end_offset);
        mqd_partition_close(partition, 0);
    }
}

TEST(ongoing_transactions_outlive_idle_producers_and_restarts)
{
    for (int way = 0; way < 4; way++) {
        log_fresh();
        struct mqd_log_options options = log_options();
        options.producer_id_count_max = 5;
        options.segment_bytes = 600;
        struct mqd_partition *partition = log_open(&options, NULL);
        CHECK_EQUAL(log_append(partition, data(7, 4, 0)), 0);
        CHECK_EQUAL(log_append(partition, data(6, 0, 0)), 0);
        CHECK_EQUAL(log_append(partition, marker(6, 0, false, 12)), 0);
        for (int64_t id = 100; id < 120; id++)
            CHECK_EQUAL(log_append(partition, (struct log_batch){.producer_id = id, .mark = (uint64_t)id}), 0);
        if (way == 3) { /* a snapshot, then a crash */
            size_t size_bytes;
            int64_t offset;
            uint8_t *bytes = mqd_partition_snapshot(partition, &size_bytes, &offset);
            CHECK_EQUAL(mqd_file_replace(log_file(offset, ".snapshot"), bytes, size_bytes), 0);
            free(bytes);
        }
        CHECK_EQUAL(log_sync(partition), 0);
        if (way < 3)
            CHECK_EQUAL(mqd_partition_do_periodic_work(partition, NOW + 86400001), 1);
        struct mqd_recovery recovery = log_untrusted();
        recovery.clean_shutdown = way == 0;
        if (way == 1)
            recovery.trusted_end_offset = 23;
        CHECK_EQUAL(mqd_partition_close(partition, way == 0), 0);
        if (way >= 2) /* the index is rebuilt, completely or where it is damaged */
            CHECK_EQUAL(way == 2 ? unlink(log_file(0, ".txnindex")) : truncate(log_file(0, ".txnindex"), 17), 0);
        partition = log_open(&options, &recovery);
        struct mqd_producer_view views[64];
        uint32_t count = mqd_partition_producers(partition, views, 64), open = 0;
        for (uint32_t i = 0; i < count; i++) {
            if (views[i].producer_id == 7) {
                CHECK_EQUAL(views[i].transaction_first_offset, 0);
                CHECK_EQUAL(views[i].producer_epoch, 4);
                CHECK_EQUAL(views[i].last_sequence, 0);
                CHECK_EQUAL(views[i].last_offset, 0);
                CHECK_EQUAL(views[i].coordinator_epoch, -1);
            }
            open += views[i].transaction_first_offset >= 0;
        }
        CHECK_EQUAL(open, 1);
        CHECK_EQUAL(log_positions(partition).last_stable_offset, 0);
        struct mqd_aborted_list aborted = {NULL, 0, 0};
        CHECK_EQUAL(mqd_txn_index_load(log_path, 0, INT64_MAX, &aborted), 0);
        CHECK_OR(aborted.count == 1, test_message("way %d: %u entries", way, aborted.count); return);
        CHECK(aborted.entries[0].producer_id == 6 && aborted.entries[0].first_offset == 1 &&
              aborted.entries[0].last_offset == 2);
        CHECK(aborted.entries[0].last_stable_offset == 0);
        free(aborted.entries);
        CHECK_EQUAL(log_append(partition, data(7, 4, 1)), 0);
        CHECK_EQUAL(log_append(partition, marker(7, 4, false, 0)), 0);
        CHECK_EQUAL(log_sync(partition), 0);
        CHECK_EQUAL(log_positions(partition).last_stable_offset, 25);
        mqd_partition_close(partition, 0);
    }
}

TEST(deletion_passes_an_ongoing_transaction)
{
    log_fresh();
    struct mqd_log_options options = options_verified();
    options.transaction_verification = 0;
    options.segment_bytes = 300;
    struct mqd_partition *partition = log_open(&options, NULL);
    for (int32_t i = 0; i < 10; i++)
        CHECK_EQUAL(log_append(partition, data(7, 0, i)), 0);
    CHECK_EQUAL(mqd_partition_advance_start(partition, 5), 1);
    CHECK_EQUAL(log_positions(partition).last_stable_offset, 5); /* the rest of it is still unstable */
    CHECK_EQUAL(mqd_partition_advance_start(partition, 10), 1);
    CHECK_EQUAL(log_positions(partition).last_stable_offset, 10);
    CHECK_EQUAL(log_append(partition, marker(7, 0, false, 0)), 0);
    CHECK_EQUAL(log_positions(partition).last_stable_offset, 11);
    mqd_partition_close(partition, 0);
}

/* Version 1, as written before there were transactions. */
TEST(snapshots_of_version_1_are_read)
{
    uint8_t bytes[24 + 24 + 16] = {0x4d, 0x51, 0x44, 0x50, 0, 1};
    uint32_t crc;
    int64_t offset;
    bytes[15] = 1;  /* producers */
    bytes[23] = 42; /* offset */
    bytes[24 + 7] = 9;
    bytes[24 + 17] = 3; /* epoch */
    bytes[24 + 18] = 1; /* batches */
    bytes[48 + 3] = 10, bytes[48 + 7] = 12, bytes[48 + 15] = 33;
    crc = htobe32(mqd_crc32c(0, bytes + 12, sizeof bytes - 12));
    memcpy(bytes + 8, &crc, sizeof crc);
    struct mqd_producers producers = {0};
    CHECK_EQUAL(mqd_producers_decode(&producers, bytes, sizeof bytes, &offset), 0);
    CHECK_EQUAL(offset, 42);
    struct mqd_producer_view view;
    CHECK_EQUAL(mqd_producers_view(&producers, &view, 1), 1);
    CHECK(view.producer_id == 9 && view.producer_epoch == 3 && view.last_sequence == 12 && view.last_offset == 35 &&
          view.transaction_first_offset == -1 && view.coordinator_epoch == -1);
    mqd_producers_free(&producers);
}

/* Transactions begin and end in random order: the lists are compared with a simple model. */
TEST(transactions_in_any_order)
{
    for (uint64_t seed = 1; seed <= 50; seed++) {
        uint64_t random = seed;
        struct mqd_transactions transactions = {0};
        struct {
            uint32_t link;
            int64_t first, last;
        } account[400];
        uint32_t count = 0;
        int64_t offset = 0, high_watermark = 0;
        for (int step = 0; step < 400; step++) {
            uint64_t choice = test_random(&random) % 4;
            if (choice < 2) {
                account[count].link = mqd_transactions_begin(&transactions, 1, offset);
                account[count].first = offset++;
                account[count++].last = -1;
            } else if (choice == 2) {
                for (uint32_t i = 0; i < count; i++) {
                    uint32_t at = (uint32_t)(i + test_random(&random) % count) % count;
                    if (account[at].last >= 0)
                        continue;
                    mqd_transactions_end(&transactions, account[at].link, offset);
                    account[at].last = offset++;
                    if (test_random(&random) % 3 == 0) { /* undone */
                        mqd_transactions_resume(&transactions, account[at].link);
                        account[at].last = -1;
                    }
                    break;
                }
            } else {
                high_watermark += (int64_t)(test_random(&random) % (uint64_t)(offset - high_watermark + 1));
                mqd_transactions_forget_decided(&transactions, high_watermark);
                uint32_t kept = 0;
                for (uint32_t i = 0; i < count; i++)
                    if (account[i].last < 0 || account[i].last >= high_watermark)
                        account[kept++] = account[i];
                count = kept;
            }
            int64_t unstable = INT64_MAX, ongoing = INT64_MAX;
            for (uint32_t i = 0; i < count; i++) {
                unstable = account[i].first < unstable ? account[i].first : unstable;
                ongoing = account[i].last < 0 && account[i].first < ongoing ? account[i].first : ongoing;
            }
            CHECK_EQUAL(mqd_transactions_first_unstable(&transactions), unstable);
            CHECK_EQUAL(mqd_transactions_first_ongoing(&transactions), ongoing);
        }
        mqd_transactions_free(&transactions);
    }
}

/* Compaction keeps the last batch of a producer for its sequence number, and in the end without
 * its marker. */
TEST(a_batch_without_records_begins_no_transaction)
{
    for (int unclean = 0; unclean < 2; unclean++) {
        log_fresh();
        struct mqd_log_options options = log_options();
        options.compacted = 1;
        struct mqd_partition *partition = log_open(&options, NULL);
        CHECK_EQUAL(log_append(partition, data(7, 0, 5)), 0);
        CHECK_EQUAL(log_append(partition, data(8, 0, 0)), 0);
        CHECK_EQUAL(mqd_partition_close(partition, 0), 0);
        uint8_t header[MQD_BATCH_HEADER_BYTES] = {0};
        int fd = open(log_file(0, ".log"), O_RDWR);
        CHECK(fd >= 0 && pread(fd, header, sizeof header, 0) == (ssize_t)sizeof header);
        uint8_t rest[512];
        ssize_t rest_bytes = pread(fd, rest, sizeof rest, MQD_BATCH_HEADER_BYTES + 64);
        uint32_t word = htobe32(MQD_BATCH_HEADER_BYTES - 12);
        memcpy(header + 8, &word, 4);
        memset(header + 57, 0, 4); /* no records */
        word = htobe32(mqd_crc32c(0, header + 21, sizeof header - 21));
        memcpy(header + 17, &word, 4);
        CHECK(pwrite(fd, header, sizeof header, 0) == (ssize_t)sizeof header &&
              pwrite(fd, rest, (size_t)rest_bytes, sizeof header) == rest_bytes);
        CHECK(ftruncate(fd, (off_t)sizeof header + rest_bytes) == 0);
        close(fd);
        struct mqd_recovery recovery = {.recovery_point_offset = unclean ? 2 : -1,
                                        .trusted_end_offset = unclean ? 2 : -1};
        partition = log_open(&options, &recovery);
        CHECK_EQUAL(log_positions(partition).high_watermark, 2);
        CHECK_EQUAL(log_positions(partition).last_stable_offset, 1); /* where the other one begins */
        struct log_batch again = data(7, 0, 6);
        CHECK_EQUAL(log_append(partition, again), 0); /* its sequence number is known */
        mqd_partition_close(partition, 0);
    }
}

/* A batch longer than any marker, or without the transactional flag: if it were accepted as a
 * marker now, recovery would not treat it as one. */
TEST(a_marker_that_recovery_would_not_accept_is_refused)
{
    log_fresh();
    struct mqd_log_options options = log_options();
    struct mqd_partition *partition = log_open(&options, NULL);
    struct mqd_stage_result result;
    struct mqd_batch batch;
    uint8_t bytes[256];
    CHECK_EQUAL(log_append(partition, data(7, 0, 0)), 0);
    uint32_t size_bytes = log_encode(bytes, marker(7, 0, true, 0));
    bytes[22] = 0x20;
    mqd_batch_decode(bytes, size_bytes, &batch);
    CHECK_EQUAL(mqd_partition_stage(partition, &batch, bytes, true, MQD_STAGE_COORDINATOR, 0, NOW, &result), 87);
    uint8_t large[MQD_MARKER_BYTES_MAX + 1] = {0};
    size_bytes = log_encode(large, marker(7, 0, true, 0));
    mqd_batch_decode(large, size_bytes, &batch);
    batch.size_bytes = sizeof large;
    CHECK_EQUAL(mqd_partition_stage(partition, &batch, large, true, MQD_STAGE_COORDINATOR, 0, NOW, &result), 87);
    CHECK_EQUAL(log_positions(partition).last_stable_offset, 0);
    mqd_partition_close(partition, 0);
}
