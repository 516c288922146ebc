/* The segment reader of a local client while a compaction replaces files: the aborted
 * transactions are those of the version that is read. */
#include "mqd_client_reader_test.h"

/* Compaction drops an ABORT marker, and with it the entry of its transaction, while a reader is
 * at work: see S5. */
TEST(aborted_transactions_are_of_the_files_that_are_read)
{
    static struct test_view v;
    struct log log;
    struct mqd_read_state state;
    int64_t producers[] = {1}, firsts[] = {5};
    log_open(&log);
    log_append(&log, 5, 0, -1, 0, 0);
    log_append(&log, 1, MQD_ATTRIBUTE_TRANSACTIONAL, 1, 0, 0); /* 5: aborted */
    log_append(&log, 3, 0, -1, 0, 0);
    log_roll(&log);
    log_append_marker(&log, 1, false);                         /* 9 */
    log_append(&log, 2, MQD_ATTRIBUTE_TRANSACTIONAL, 1, 0, 0); /* 10, 11: committed */
    log_append_marker(&log, 1, true);
    log_roll(&log);
    log_append(&log, 1, 0, -1, 0, 0); /* 13 */
    log_expose(&log);
    struct mqd_segment_reader *early = log_reader(&log, 0, 1), *late = log_reader(&log, 0, 1);

    CHECK_EQUAL(next(early, &v, 100, &state), 5);
    CHECK_EQUAL(next(early, &v, 100, &state), 0);
    CHECK_EQUAL(state.stop, MQD_READ_ABORTED);
    CHECK_EQUAL(mqd_segment_reader_set_aborted(early, producers, firsts, 1, 14), 0);
    CHECK_EQUAL(next(early, &v, 1, &state), 1);
    CHECK_EQUAL(v.offsets[0], 6);
    CHECK_EQUAL(next(late, &v, 5, &state), 5); /* it has the old file of segment 0, and no list yet */

    struct log rest = log_replace(&log, 0, 0);
    log_append(&log, 5, 0, -1, 0, 0);
    log.end_offset++;
    log_append(&log, 3, 0, -1, 0, 0);
    log_replaced(&log, &rest);
    rest = log_replace(&log, 1, 1);
    log_append(&log, 2, MQD_ATTRIBUTE_TRANSACTIONAL, 1, 0, 0);
    log_append_marker(&log, 1, true);
    log_replaced(&log, &rest);

    /* with the old list the transaction at 10 would be a part of the aborted one */
    CHECK_EQUAL(next(early, &v, 100, &state), 2);
    CHECK_EQUAL(next(early, &v, 100, &state), 0);
    CHECK_EQUAL(state.stop, MQD_READ_ABORTED);
    CHECK_EQUAL(mqd_segment_reader_set_aborted(early, producers, firsts, 0, 14), 0);
    CHECK_EQUAL(drain(early, 100, &state), 3);
    CHECK_EQUAL(mqd_segment_reader_position(early), 14);

    /* with the new list the record at 5 of the old file would be committed */
    CHECK_EQUAL(next(late, &v, 100, &state), 3);
    CHECK_EQUAL(v.offsets[0], 6);
    mqd_segment_reader_close(early);
    mqd_segment_reader_close(late);
    log_close(&log);
}

TEST(a_list_is_not_taken_if_files_changed_after_the_query)
{
    struct log log;
    struct mqd_read_state state;
    log_open(&log);
    log_append(&log, 2, MQD_ATTRIBUTE_TRANSACTIONAL, 1, 0, 0);
    log_append_marker(&log, 1, true);
    log_expose(&log);
    struct mqd_segment_reader *reader = log_reader(&log, 0, 1);
    CHECK_EQUAL(drain(reader, 100, &state), 0);
    CHECK_EQUAL(state.stop, MQD_READ_ABORTED);
    mqd_control_partition(log.control, LOG_SLOT)->segments_generation++;
    CHECK_EQUAL(mqd_segment_reader_set_aborted(reader, NULL, NULL, 0, 3), 0);
    CHECK_EQUAL(drain(reader, 100, &state), 0);
    CHECK_EQUAL(state.stop, MQD_READ_ABORTED);
    log.changing = true; /* for an unknown version, none is accepted */
    mqd_control_partition(log.control, LOG_SLOT)->segments_generation++;
    for (int i = 0; i < 2; i++) {
        CHECK_EQUAL(drain(reader, 100, &state), 0);
        CHECK_EQUAL(state.stop, MQD_READ_ABORTED);
        CHECK_EQUAL(mqd_segment_reader_set_aborted(reader, NULL, NULL, 0, 3), 0);
    }
    log.changing = false;
    CHECK_EQUAL(drain(reader, 100, &state), 0);
    CHECK_EQUAL(state.stop, MQD_READ_ABORTED);
    CHECK_EQUAL(mqd_segment_reader_set_aborted(reader, NULL, NULL, 0, 3), 0);
    CHECK_EQUAL(drain(reader, 100, &state), 2);
    mqd_segment_reader_close(reader);
    log_close(&log);
}
