/* Produce requests at a rate that is kept whatever the broker does: each has a moment at which it
 * is due, and its time runs from there to its reply, so that a broker which stands still is charged
 * for all that would have been sent meanwhile. Requests go out over the connections in turn;
 * replies come in order.
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

static struct lane *lanes_open(const struct arguments *arguments, int connections)
{
    const char *topic = argument_text(arguments, "topic", NULL);
    struct lane *lanes = allocate(sizeof *lanes * (size_t)connections);
    for (int i = 0; i < connections; i++) {
        struct lane *lane = &lanes[i];
        lane->fd = dial((int)argument_number(arguments, "port", INT64_MIN));
        not_blocking(lane->fd);
        lane->topic_bytes = strlen(topic);
        lane->frame =
            produce_frame(topic, i % (int)argument_number(arguments, "partitions", 1),
                          (size_t)argument_number(arguments, "batch", INT64_MIN),
                          (int)argument_number(arguments, "records", 1), (int)argument_number(arguments, "acks", -1));
    }
    return lanes;
}

int paced_main(const struct arguments *arguments)
{
    int connections = (int)argument_number(arguments, "connections", 1);
    int64_t rate = argument_number(arguments, "rate", INT64_MIN),
            length_ns = argument_number(arguments, "milliseconds", INT64_MIN) * 1000000;
    int64_t warm_ns = argument_number(arguments, "warm_milliseconds", 1000) * 1000000;
    if (rate < 1 || connections < 1)
        fail("rate (requests/s) and connections must be 1 at least");
    struct lane *lanes = lanes_open(arguments, connections);
    uint64_t total = (uint64_t)((double)(warm_ns + length_ns) * (double)rate / 1e9), made = 0, answered = 0;
    struct samples samples = {.max = (int)total};
    samples.replied_ns = allocate(sizeof(int64_t) * (total + 1));
    samples.late_ns = allocate(sizeof(int64_t) * (total + 1));
    int64_t begin = now_ns(), measured_ns = begin + warm_ns,
            give_up_ns = begin + warm_ns + length_ns + 60ll * 1000000000;
    while (answered < total) {
        int64_t now = now_ns(), due_ns;
        if (now > give_up_ns)
            fail("%llu of %llu requests without a reply 60 s after the last was due",
                 (unsigned long long)(total - answered), (unsigned long long)total);
        for (; made < total && (due_ns = begin + (int64_t)((double)made * 1e9 / (double)rate)) <= now; made++) {
            struct lane *lane = &lanes[made % (uint64_t)connections];
            if (lane->due - lane->answered == OWED_MAX)
                fail("%d requests of a connection without a reply: %lld requests/s are not sustained", OWED_MAX,
                     (long long)rate);
            lane->due_ns[lane->due++ % OWED_MAX] = due_ns;
        }
        answered = 0;
        for (int i = 0; i < connections; i++) {
            lane_send(&lanes[i], &samples, measured_ns);
            lane_receive(&lanes[i], &samples, measured_ns);
            answered += lanes[i].answered;
        }
    }
    if (!samples.count || !samples.late_count)
        fail("no request was measured: milliseconds and rate are too small");
    printf("{\"rate\": %lld, ", (long long)rate);
    percentiles("late", samples.late_ns, samples.late_count, ", ");
    percentiles("acknowledged", samples.replied_ns, samples.count, "}\n");
    return 0;
}
