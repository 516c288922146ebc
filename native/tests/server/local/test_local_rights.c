/* tsan */
/* Rights of local clients: the acceptor says which principal they are, and descriptors need READ. */
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
    struct local local = local_open_as(b, 0, (struct local_wish){1 << 20, 1 << 16, 256}, principal);
    CHECK_OR(!local.welcome.error, fprintf(stderr, "%s\n", local.welcome.reason); abort());
    return local;
}

BOTH(a_descriptor_needs_the_right_to_read)
{
    struct bench *b = local_bench(backend, rights);
    struct local local = local_as(b, "User:alice");
    struct mqd_local_segment answer;
    int fd;
    CHECK(local_ask(&local, 0, 0, 1)); /* before the rights are known: it waits */
    struct mqd_event event = rights_event(b, MQD_EVENT_SUBJECT_WANTED);
    CHECK(strcmp(event.text, "127.0.0.1 User:alice") == 0);
    const uint16_t masks[] = {READ, (uint16_t)~READ, READ};
    for (int i = 0; i < 3; i++) {
        CHECK_EQUAL(rights_give(b, event.token, masks[i], 0), 0);
        if (i)
            CHECK(local_ask(&local, 0, 0, (uint32_t)i + 1));
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

/* An acceptor that names no principal: the client is one that has proven nothing. */
BOTH(a_local_client_without_a_principal_is_anonymous)
{
    struct bench *b = local_bench(backend, rights);
    struct local local = local_as(b, NULL);
    struct mqd_event event = rights_event(b, MQD_EVENT_SUBJECT_WANTED);
    CHECK(strcmp(event.text, "127.0.0.1 User:ANONYMOUS") == 0);
    local_close(&local);
    local_wait_none(b);
    local_bench_stop(b);
}
