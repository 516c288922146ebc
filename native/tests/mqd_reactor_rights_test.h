/* A worker's main thread that supplies the rights of subjects (server/rights/subject.h). */
#ifndef MQD_REACTOR_RIGHTS_TEST_H
#define MQD_REACTOR_RIGHTS_TEST_H

#include "mqd_reactor_test.h"
#include "mqd_rights_test.h"

/* The next event of `kind` of worker 0; other events are dropped. */
static struct mqd_event rights_event(struct bench *b, uint32_t kind)
{
    struct mqd_event event;
    for (;;) {
        while (mqd_reactor_next_event(b->reactors[0], &event)) {
            if (event.kind == kind)
                return event;
            mqd_proposal_free(event.proposal);
        }
        struct pollfd wait = {mqd_reactor_event_fd(b->reactors[0]), POLLIN, 0};
        CHECK_OR(poll(&wait, 1, LIMIT_MS) == 1, abort());
    }
}

static struct mqd_rights_tables rights_tables(const struct table *topics, const struct table *ids,
                                              const struct table *groups)
{
    return (struct mqd_rights_tables){.table = {topics->bytes, ids->bytes, groups->bytes},
                                      .size_bytes = {topics->size_bytes, ids->size_bytes, groups->size_bytes}};
}

/* Gives a subject its rights on topic "quick", on every transactional id and group, and `otherwise` on
 * other topics. Returns the command's error. */
__attribute__((unused)) static int rights_grant(struct bench *b, uint64_t subject, uint16_t quick, uint16_t otherwise)
{
    struct right right = {.name = "quick", .mask = quick};
    struct table topics = table_of(&right, 1, NULL, 0, otherwise), ids = table_of(NULL, 0, NULL, 0, quick);
    struct mqd_rights_tables tables = rights_tables(&topics, &ids, &ids);
    CHECK_OR(mqd_reactor_subject_put(b->reactors[0], ++b->token, subject, &tables) == 0, abort());
    free(topics.bytes);
    free(ids.bytes);
    return bench_done(b, 0, b->token).error;
}

#endif
