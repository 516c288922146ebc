/* Produce requests at a fixed rate (open loop): a request's time runs from when it is due to its reply,
 * so that a broker that stalls is charged for all requests that were due meanwhile. Requests go out
 * over the connections in turn; replies come in order.
 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "load.h"

#define OWED_MAX 16384 /* requests of one connection without a reply: beyond it the rate is not sustained */

struct lane {
    int fd;
    struct bytes frame;
    size_t topic_bytes, sent; /* bytes of the frame that is on its way */
    int64_t due_ns[OWED_MAX]; /* rings over these three counts, which only grow */
    uint64_t due, begun, answered;
    uint8_t room[65536];
    size_t got;
};

struct samples {
    int64_t *replied_ns, *late_ns;
    int count, late_count, max;
};

static void lane_send(struct lane *lane, struct samples *samples, int64_t measured_ns)
{
    while (lane->begun < lane->due) {
        ssize_t n = send(lane->fd, lane->frame.at + lane->sent, lane->frame.size - lane->sent, MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN && errno != EINTR)
            die("send");
        if (n <= 0)
            return;
        int64_t due_ns = lane->due_ns[lane->begun % OWED_MAX];
        if (lane->sent == 0 && due_ns >= measured_ns && samples->late_count < samples->max)
            samples->late_ns[samples->late_count++] = now_ns() - due_ns;
        lane->sent += (size_t)n;
        if (lane->sent == lane->frame.size) {
            lane->sent = 0;
            lane->begun++;
        }
    }
}

static void lane_receive(struct lane *lane, struct samples *samples, int64_t measured_ns)
{
    ssize_t n = recv(lane->fd, lane->room + lane->got, sizeof lane->room - lane->got, 0);
    if (n == 0)
        fail("the broker closed the connection");
    if (n < 0 && errno != EAGAIN && errno != EINTR)
        die("receive");
    if (n <= 0)
        return;
    lane->got += (size_t)n;
    size_t at = 0, reply;
    int64_t now = now_ns();
    while (lane->got - at >= 4 && lane->got - at >= (reply = 4 + (size_t)get32(lane->room + at))) {
        int error = produce_reply_error(lane->room + at + 4, reply - 4, lane->topic_bytes);
        if (error)
            fail("Produce was answered error %d", error);
        int64_t due_ns = lane->due_ns[lane->answered++ % OWED_MAX];
        if (due_ns >= measured_ns && samples->count < samples->max)
            samples->replied_ns[samples->count++] = now - due_ns;
        at += reply;
    }
    memmove(lane->room, lane->room + at, lane->got - at);
    lane->got -= at;
}

/* Clients that send at one rate together, over as many connections. */
struct pace {
    struct lane *lanes;
    int count, first; /* of its partitions */
    int64_t rate;     /* requests/s of all */
    uint64_t total, made, answered;
    struct samples samples;
};

static void pace_open(struct pace *pace, const struct arguments *arguments, int64_t length_ns)
{
    const char *topic = argument_text(arguments, "topic", NULL);
    pace->lanes = allocate(sizeof *pace->lanes * (size_t)pace->count);
    for (int i = 0; i < pace->count; i++) {
        struct lane *lane = &pace->lanes[i];
        lane->fd = dial((int)argument_number(arguments, "port", INT64_MIN));
        not_blocking(lane->fd);
        lane->topic_bytes = strlen(topic);
        lane->frame =
            produce_frame(topic, (pace->first + i) % (int)argument_number(arguments, "partitions", 1),
                          (size_t)argument_number(arguments, "batch", INT64_MIN),
                          (int)argument_number(arguments, "records", 1), (int)argument_number(arguments, "acks", -1));
    }
    pace->total = (uint64_t)((double)length_ns * (double)pace->rate / 1e9);
    pace->samples.max = (int)pace->total;
    pace->samples.replied_ns = allocate(sizeof(int64_t) * (pace->total + 1));
    pace->samples.late_ns = allocate(sizeof(int64_t) * (pace->total + 1));
}

static void pace_turn(struct pace *pace, int64_t begin, int64_t measured_ns)
{
    int64_t now = now_ns(), due_ns;
    for (;
         pace->made < pace->total && (due_ns = begin + (int64_t)((double)pace->made * 1e9 / (double)pace->rate)) <= now;
         pace->made++) {
        struct lane *lane = &pace->lanes[pace->made % (uint64_t)pace->count];
        if (lane->due - lane->answered == OWED_MAX)
            fail("%d requests of a connection without a reply: %lld requests/s are not sustained", OWED_MAX,
                 (long long)pace->rate);
        lane->due_ns[lane->due++ % OWED_MAX] = due_ns;
    }
    pace->answered = 0;
    for (int i = 0; i < pace->count; i++) {
        lane_send(&pace->lanes[i], &pace->samples, measured_ns);
        lane_receive(&pace->lanes[i], &pace->samples, measured_ns);
        pace->answered += pace->lanes[i].answered;
    }
}

/* `rate` is that of all `connections` together. With surge=N one more connection sends N times as much
 * as one of them, in the same thread, since two threads that spin on one CPU would wait for each other. */
int paced_main(const struct arguments *arguments)
{
    struct pace pace = {.count = (int)argument_number(arguments, "connections", 1),
                        .rate = argument_number(arguments, "rate", INT64_MIN)},
                surge = {.count = 1, .first = pace.count};
    int64_t length_ns = argument_number(arguments, "milliseconds", INT64_MIN) * 1000000;
    int64_t warm_ns = argument_number(arguments, "warm_milliseconds", 1000) * 1000000;
    if (pace.rate < 1 || pace.count < 1)
        fail("rate (requests/s) and connections must be 1 at least");
    surge.rate = argument_number(arguments, "surge", 0) * pace.rate / pace.count;
    pace_open(&pace, arguments, warm_ns + length_ns);
    if (surge.rate)
        pace_open(&surge, arguments, warm_ns + length_ns);
    int64_t begin = now_ns(), measured_ns = begin + warm_ns,
            give_up_ns = begin + warm_ns + length_ns + 60ll * 1000000000;
    while (pace.answered < pace.total || surge.answered < surge.total) {
        if (now_ns() > give_up_ns)
            fail("%llu of %llu requests without a reply 60 s after the last was due",
                 (unsigned long long)(pace.total - pace.answered), (unsigned long long)pace.total);
        pace_turn(&pace, begin, measured_ns);
        if (surge.rate)
            pace_turn(&surge, begin, measured_ns);
    }
    if (!pace.samples.count || !pace.samples.late_count)
        fail("no request was measured: milliseconds and rate are too small");
    printf("{\"rate\": %lld, \"seconds\": %.3f, ", (long long)pace.rate, (double)(now_ns() - begin) / 1e9);
    percentiles("late", pace.samples.late_ns, pace.samples.late_count, ", ");
    if (surge.samples.count)
        percentiles("surge", surge.samples.replied_ns, surge.samples.count, ", ");
    percentiles("acknowledged", pace.samples.replied_ns, pace.samples.count, "}\n");
    return 0;
}
