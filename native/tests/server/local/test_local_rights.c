/* tsan: long */
/* Rights of local clients: the acceptor names their principal, and descriptors need READ. */
#include "mqd_local_test.h"
#include "mqd_reactor_rights_test.h"

enum { DENIED = 29 };

static void rights(struct bench *b)
{
    local_options(b);
    b->options[0].rights = MQD_RIGHTS_ON;
}

static struct local local_as(struct bench *b, const char *principal)
{
    struct local local = local_open_as(b, 0, (struct local_sizes){1 << 20, 1 << 16, 256}, principal);
    CHECK_OR(!local.welcome.error, fprintf(stderr, "%s\n", local.welcome.reason); abort());
    return local;
}

BOTH(a_descriptor_needs_the_right_to_read)
{
    struct bench *b = local_bench(backend, rights);
    struct local local = local_as(b, "User:alice");
    struct mqd_local_segment answer;
    int fd;
    CHECK(local_query(&local, 0, 0, 1)); /* before the rights are known: it waits */
    struct mqd_event event = rights_event(b, MQD_EVENT_SUBJECT_REQUESTED);
    CHECK(strcmp(event.text, "127.0.0.1 User:alice") == 0);
    const uint16_t masks[] = {READ, (uint16_t)~READ, READ};
    for (int i = 0; i < 3; i++) {
        CHECK_EQUAL(rights_grant(b, event.token, masks[i], 0), 0);
        if (i)
            CHECK(local_query(&local, 0, 0, (uint32_t)i + 1));
        CHECK(local_answer(&local, &answer, &fd));
        CHECK_EQUAL(answer.error, masks[i] & READ ? 0 : DENIED);
        CHECK_EQUAL(fd >= 0, (masks[i] & READ) != 0);
        if (fd >= 0)
            close(fd);
    }
    local_close(&local);
    local_wait_none(b);
    local_bench_stop(b);
}

/* An acceptor that names no principal: the client is anonymous. */
BOTH(a_local_client_without_a_principal_is_anonymous)
{
    struct bench *b = local_bench(backend, rights);
    struct local local = local_as(b, NULL);
    struct mqd_event event = rights_event(b, MQD_EVENT_SUBJECT_REQUESTED);
    CHECK(strcmp(event.text, "127.0.0.1 User:ANONYMOUS") == 0);
    local_close(&local);
    local_wait_none(b);
    local_bench_stop(b);
}

static uint64_t rolls(struct bench *b, uint32_t worker)
{
    return local_counter(b, worker, MQD_COUNT_ROLLS);
}

/* Queries the segment of `partition`. Returns whether it is the active one. */
static bool has_active(struct local *local, int32_t partition, uint32_t number)
{
    struct mqd_local_segment answer;
    int fd;
    CHECK_OR(local_query(local, partition, 1, number) && local_answer(local, &answer, &fd), abort());
    CHECK_OR(answer.error == 0 && fd >= 0, abort());
    close(fd);
    return answer.next_base_offset == INT64_MAX;
}

/* Records appended to a partition after its segments were revoked are in another file, whichever
 * worker owns it; an empty file rolls with its first batch. Segments that no client has are
 * kept. */
BOTH(a_handed_out_segment_is_rolled)
{
    struct bench *b = local_bench(backend, NULL);
    struct local local = local_as(b, NULL);
    struct client writer = client_open(b, 0);
    const uint32_t all[] = {0, 1, 2, 3};
    CHECK_EQUAL(mqd_reactor_revoke(b->reactors[0], ++b->token, all, 4), 0); /* a predecessor's */
    CHECK_EQUAL(bench_done(b, 0, b->token).error, 0);
    for (uint64_t round = 0; round < 2; round++)
        for (int32_t partition = 0; partition < 3; partition++) {
            struct part part = {partition, {.mark = round + 1, .record_count = 1}};
            CHECK_EQUAL(client_produce(&writer, -1, &part, 1).error[0], 0);
        }
    uint64_t before[2] = {rolls(b, 0), rolls(b, 1)};
    for (int32_t partition = 0; partition < 2; partition++) /* of worker 0, of worker 1; not 2 */
        CHECK(has_active(&local, partition, (uint32_t)partition + 1));
    CHECK_EQUAL(mqd_reactor_revoke(b->reactors[0], ++b->token, all, 4), 0);
    CHECK_EQUAL(bench_done(b, 0, b->token).error, 0);
    int64_t end_ns = test_now_ns() + LIMIT_MS * 1000000ll;
    for (uint32_t worker = 0; worker < 2; worker++)
        while (rolls(b, worker) == before[worker] && test_now_ns() < end_ns)
            poll(NULL, 0, 1);
    CHECK_EQUAL(rolls(b, 0), before[0] + 1);
    CHECK_EQUAL(rolls(b, 1), before[1] + 1);
    CHECK(!has_active(&local, 0, 8) && !has_active(&local, 1, 9));
    client_close(&writer);
    local_close(&local);
    local_wait_none(b);
    local_bench_stop(b);
}
