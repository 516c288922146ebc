/* Large requests of some connections do not delay those of others. */
#include "mqd_counter_test.h"

enum {
    FLOODING = 4,
    MANY = 16,
    TURN_BYTES = 768 << 10,  /* MQD_BYTES_PER_TURN, and the read that exceeds it */
    FLOOD_BYTES = 360 << 10, /* more than one turn takes, less than a socket holds */
    QUIET_BYTES = 100 << 10  /* more than the receive window, so that it needs a second turn */
};

/* Until `serve`, the worker accepts no connections: it then finds all of them in one turn. */
static void not_serving(struct bench *b)
{
    mqd_store_release(&mqd_control_endpoint(b->control, 0)->state, MQD_PROCESS_STARTING);
}

static void serve(struct bench *b)
{
    mqd_store_release(&mqd_control_endpoint(b->control, 0)->state, MQD_PROCESS_RUNNING);
    mqd_reactor_add_log_dir(b->reactors[0], ++b->token, 0, log_root); /* any command ends its sleep */
    bench_done(b, 0, b->token);
}

/* A connection with one Produce in its socket, whole: a local socket holds more than TCP's window. */
static struct client sent(struct bench *b, int32_t body_bytes, int acks)
{
    int ends[2], send_bytes = 2 * FLOOD_BYTES;
    struct frame frame = {0};
    struct part part = {0, {.mark = 1, .record_count = 1, .body_bytes = body_bytes}};
    CHECK_OR(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, abort());
    setsockopt(ends[0], SOL_SOCKET, SO_SNDBUF, &send_bytes, sizeof send_bytes);
    struct client client = {.fd = ends[0]};
    client_limit(&client);
    put_produce(&frame, 1, acks, LIMIT_MS, &part, 1);
    CHECK_OR(send(client.fd, frame.bytes, frame.size_bytes, MSG_DONTWAIT) == (ssize_t)frame.size_bytes, abort());
    free(frame.bytes);
    client_hand_off(b, 0, ends[1], 0, -1, false);
    return client;
}

static int64_t offset_of(struct client *client)
{
    CHECK_OR(client_receive(client) == 1, return -1);
    struct produced out = take_produced(client);
    CHECK_OR(out.count == 1 && out.error[0] == 0, return -1);
    client_close(client);
    return out.base_offset[0];
}

/* Offsets show the order in which requests were complete: without a bound per turn the quiet
 * connection, which is last in each turn, would come after every large request before it. */
BOTH(a_large_request_does_not_hold_up_the_others_of_its_turn)
{
    struct bench *b = bench_start(backend, not_serving);
    struct client flooding[FLOODING];
    for (int i = 0; i < FLOODING; i++)
        flooding[i] = sent(b, FLOOD_BYTES, -1);
    struct client quiet = sent(b, QUIET_BYTES, -1);
    serve(b);
    CHECK_EQUAL(offset_of(&quiet), 0);
    for (int i = 0; i < FLOODING; i++)
        CHECK_EQUAL(offset_of(&flooding[i]), i + 1);
    bench_stop(b);
}

/* Responses are sent at the end of a turn, so a turn must end although more can be read. */
BOTH(a_turn_receives_a_bounded_number_of_bytes)
{
    struct bench *b = bench_start(backend, not_serving);
    struct client flooding[MANY];
    for (int i = 0; i < MANY; i++)
        flooding[i] = sent(b, FLOOD_BYTES, 1);
    uint64_t turns = mqd_counter_read(b->control, 0, MQD_COUNT_LOOPS);
    serve(b);
    for (int i = 0; i < MANY; i++)
        offset_of(&flooding[i]);
    turns = mqd_counter_read(b->control, 0, MQD_COUNT_LOOPS) - turns;
    CHECK(turns >= MANY * FLOOD_BYTES / TURN_BYTES);
    bench_stop(b);
}
