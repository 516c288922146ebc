/* Segments whose files are missing: missing offsets are reported, nothing else is lost, and no
 * offset is assigned twice. */
#include "mqd_log_test.h"

enum way { CLEAN, TRUSTED, CHECKED, WAYS };

static struct mqd_recovery known(enum way way, int64_t end, bool replicated)
{
    struct mqd_recovery recovery = log_untrusted();
    recovery.recovery_point_offset = end;
    recovery.clean_shutdown = way == CLEAN;
    recovery.replicated = recovery.has_other_replicas = replicated;
    if (way == TRUSTED)
        recovery.trusted_end_offset = end;
    return recovery;
}

/* Several segments; closed. Their base offsets in `bases`. The log's end. */
static int64_t fill(struct mqd_log_options *options, bool clean, int64_t bases[64], uint32_t *count)
{
    log_fresh();
    *options = log_options();
    options->segment_bytes = 600;
    struct mqd_partition *partition = log_open(options, NULL);
    for (int i = 0; i < 20; i++)
        CHECK_OR(log_append(partition, (struct log_batch){.producer_id = -1, .mark = (uint64_t)i}) == 0, return -1);
    CHECK_OR(log_sync(partition) == 0, return -1);
    *count = partition->segment_count;
    memcpy(bases, partition->segments, *count * sizeof *bases);
    int64_t end = log_positions(partition).log_end_offset;
    CHECK_OR(mqd_partition_close(partition, clean) == 0, return -1);
    return end;
}

static void lose(int64_t base)
{
    CHECK_EQUAL(unlink(log_file(base, ".log")), 0);
}

TEST(a_missing_middle_segment_is_reported)
{
    for (enum way way = CLEAN; way < WAYS; way++) {
        struct mqd_log_options options;
        int64_t bases[64];
        uint32_t count;
        int64_t end = fill(&options, way == CLEAN, bases, &count);
        CHECK(count >= 4);
        lose(bases[1]);
        struct mqd_recovery recovery = known(way, end, false);
        struct mqd_partition *partition = log_open(&options, &recovery);
        CHECK_EQUAL(recovery.missing_from, bases[1]);
        CHECK_EQUAL(recovery.missing_to, bases[2]);
        CHECK_EQUAL(recovery.log_end_offset, end);
        CHECK_EQUAL((int64_t)partition->segment_count, (int64_t)count - 1);
        mqd_partition_close(partition, 0);
    }
}

TEST(the_only_replica_continues_at_its_former_log_end)
{
    for (enum way way = CLEAN; way < WAYS; way++)
        for (int all = 0; all < 2; all++) {
            struct mqd_log_options options;
            int64_t bases[64];
            uint32_t count;
            int64_t end = fill(&options, way == CLEAN, bases, &count);
            for (uint32_t i = all ? 0 : count - 1; i < count; i++)
                lose(bases[i]);
            struct mqd_recovery recovery = known(way, end, false);
            struct mqd_partition *partition = log_open(&options, &recovery);
            CHECK_EQUAL(recovery.missing_from, all ? 0 : bases[count - 1]);
            CHECK_EQUAL(recovery.missing_to, end);
            CHECK_EQUAL(recovery.log_end_offset, end);
            CHECK_EQUAL(log_append(partition, (struct log_batch){.producer_id = -1}), 0);
            CHECK_EQUAL(log_positions(partition).log_end_offset, end + 1);
            mqd_partition_close(partition, 0);
            recovery = known(CHECKED, end, false); /* and the next start finds exactly the same */
            partition = log_open(&options, &recovery);
            CHECK_EQUAL(recovery.log_end_offset, end + 1);
            mqd_partition_close(partition, 0);
        }
}

TEST(one_of_several_replicas_ends_where_its_log_ends)
{
    for (enum way way = CLEAN; way < WAYS; way++) {
        struct mqd_log_options options;
        int64_t bases[64];
        uint32_t count;
        int64_t end = fill(&options, way == CLEAN, bases, &count);
        lose(bases[count - 1]);
        struct mqd_recovery recovery = known(way, end, true);
        struct mqd_partition *partition = log_open(&options, &recovery);
        CHECK_EQUAL(recovery.missing_from, bases[count - 1]);
        CHECK_EQUAL(recovery.missing_to, end);
        CHECK_EQUAL(recovery.log_end_offset, bases[count - 1]);
        mqd_partition_close(partition, 0);
    }
}

TEST(a_complete_log_is_not_reported_as_missing_a_segment)
{
    for (enum way way = CLEAN; way < WAYS; way++) {
        struct mqd_log_options options;
        int64_t bases[64];
        uint32_t count;
        struct mqd_recovery recovery = known(way, fill(&options, way == CLEAN, bases, &count), way != CLEAN);
        struct mqd_partition *partition = log_open(&options, &recovery);
        CHECK_EQUAL(recovery.missing_from, -1);
        mqd_partition_close(partition, 0);
    }
}
