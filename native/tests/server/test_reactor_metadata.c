/* tsan: long */
/* Metadata responses that a worker caches from the acceptor, and sends again. */
#include "mqd_leading_test.h"

#define PASSED_NS 1 /* CLOCK_BOOTTIME is beyond */

/* Metadata v1 of all topics. `b`: it is forwarded to the acceptor; NULL: it is not forwarded. */
static struct mqd_descriptor request_metadata(struct bench *b, struct client *client)
{
    struct frame frame = {0};
    uint32_t from, begin = frame_begin(&frame, 3, 1, 5);
    put(&frame, 4, UINT32_MAX);
    frame_end(&frame, begin);
    CHECK_OR(client_send(client, &frame), abort());
    frame_free(&frame);
    return b ? bench_expect(b, ACCEPTOR, MQD_LINK_REQUEST, &from) : (struct mqd_descriptor){0};
}

static void expect_metadata(struct client *client, const char *body)
{
    CHECK_EQUAL(client_receive(client), 1);
    CHECK_EQUAL(client->reply_bytes, 4 + strlen(body));
    CHECK(memcmp(client->reply + 4, body, strlen(body)) == 0);
}

static int64_t later_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    return (now.tv_sec + 3600) * INT64_C(1000000000);
}

/* A request sent after it is read in a later turn, and so with this deadline. */
static void set_lease(struct bench *b, struct client *client, int64_t deadline_ns)
{
    int64_t offset;
    mqd_control_set_broker(b->control, EPOCH_OF(1), 1, deadline_ns);
    CHECK_EQUAL(list_offset(client, -2, &offset), 0);
}

/* The acceptor, which checks the lease too, marks no response with an error as cacheable: "it
 * leads" is, "it does not lead" is not. */
BOTH(metadata_that_is_known_without_the_lease)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0);
    set_lease(b, &client, later_ns());
    struct mqd_descriptor request = request_metadata(b, &client);
    bench_respond(b, 0, &request, "it leads", MQD_RESPONSE_CACHEABLE, true, 0);
    expect_metadata(&client, "it leads");
    request_metadata(NULL, &client);
    expect_metadata(&client, "it leads"); /* it was not forwarded */
    set_lease(b, &client, PASSED_NS);
    for (int i = 0; i < 2; i++) {
        request = request_metadata(b, &client);
        bench_respond(b, 0, &request, "it does not lead", 0, true, 64);
        expect_metadata(&client, "it does not lead");
    }
    set_lease(b, &client, later_ns());
    request_metadata(NULL, &client);
    expect_metadata(&client, "it leads"); /* of the same version, so it is right again */
    set_lease(b, &client, INT64_MAX);     /* its quorum is this host alone */
    request_metadata(NULL, &client);
    expect_metadata(&client, "it leads");
    mqd_control_set_metadata_version(b->control, mqd_control_metadata_version(b->control) + 1);
    request = request_metadata(b, &client);
    bench_respond(b, 0, &request, "another does", MQD_RESPONSE_CACHEABLE, true, 128);
    expect_metadata(&client, "another does");
    client_close(&client);
    bench_stop(b);
}

BOTH(metadata_that_arrives_when_the_lease_is_lost)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0), other = client_open(b, 0);
    set_lease(b, &other, later_ns());
    struct mqd_descriptor request = request_metadata(b, &client);
    set_lease(b, &other, PASSED_NS);
    bench_respond(b, 0, &request, "it leads", MQD_RESPONSE_CACHEABLE, true, 0); /* made before */
    expect_metadata(&client, "it leads");
    request = request_metadata(b, &client);
    set_lease(b, &other, later_ns());
    bench_respond(b, 0, &request, "it does not lead", 0, true, 64); /* made before, too */
    expect_metadata(&client, "it does not lead");
    request_metadata(NULL, &client);
    expect_metadata(&client, "it leads");
    client_close(&client), client_close(&other);
    bench_stop(b);
}
