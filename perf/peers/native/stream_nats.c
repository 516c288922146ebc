/* NATS JetStream: every PUB has a reply subject that ends in the record's number, where its PubAck
 * arrives; reading is by pull consumers without acknowledgements, which request the next records when
 * half of the requested ones have arrived, like nats.go's Consume.
 */
#define _GNU_SOURCE
#include "stream_load.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LINE_BYTES_MAX 512
#define ACK_SID 1
#define REQUEST_SID 2
#define DELIVERY_SID 3 /* and above: one for each stream */
#define WORDS_MAX 8
#define PULL_RECORDS 500
/* requested from one stream at a time: the server drops a reader that has 64 MB pending */
#define PULL_BYTES_MAX (2 << 20)

static int wanted[STREAMS_MAX], pull_records; /* requested and not received yet; how many are requested at a time */

static bool answered;
static char answer[2048];

static void copy_line(char line[LINE_BYTES_MAX], const uint8_t *from, size_t size)
{
    if (size >= LINE_BYTES_MAX)
        fail("nats: a line of %zu bytes", size);
    memcpy(line, from, size);
    line[size] = 0;
}

static int split(char *line, char *word[WORDS_MAX])
{
    int count = 0;
    for (char *at = strtok(line, " \r\n"); at && count < WORDS_MAX; at = strtok(NULL, " \r\n"))
        word[count++] = at;
    return count;
}

static void pull(struct link *link, int stream)
{
    char name[NAME_MAX_BYTES], json[64];
    int more = pull_records - wanted[stream];
    stream_name(name, stream);
    snprintf(json, sizeof json, "{\"batch\":%d,\"expires\":%lld}", more, 30000000000ll);
    buffer_text(&link->out, "PUB $JS.API.CONSUMER.MSG.NEXT.%s.reader%d _INBOX.read.%d.%s %zu\r\n%s\r\n", name,
                (int)getpid(), (int)getpid(), name, strlen(json), json);
    wanted[stream] += more;
}

/* The server has ended a request before it was filled ("Status: 408" or the like, with the number of
 * missing records): they are requested again. */
static void status(struct link *link, int stream, const uint8_t *header, size_t size)
{
    if (size > 12 && !memcmp(header + 9, "100", 3))
        return;
    wanted[stream] = 0;
    pull(link, stream);
}

static void message(struct link *link, int sid, const char *subject, const uint8_t *payload, size_t header, size_t size)
{
    if (sid == REQUEST_SID) {
        snprintf(answer, sizeof answer, "%.*s", (int)size, (const char *)payload);
        answered = true;
    } else if (sid == ACK_SID) {
        if (size && memmem(payload, size, "\"error\"", 7))
            fail("nats: a record was refused: %.*s", (int)size, payload);
        on_acknowledged(strtoll(strrchr(subject, '.') + 1, NULL, 10));
    } else if (header)
        status(link, sid - DELIVERY_SID, payload, header);
    else {
        on_received(payload, size);
        if (--wanted[sid - DELIVERY_SID] <= pull_records / 2)
            pull(link, sid - DELIVERY_SID);
    }
}

static bool nats_take(struct link *link)
{
    const uint8_t *first = buffer_first(&link->in), *end = memchr(first, '\n', buffer_held(&link->in));
    if (!end)
        return false;
    size_t head = (size_t)(end - first) + 1;
    char line[LINE_BYTES_MAX], *word[WORDS_MAX];
    bool with_header = !memcmp(first, "HMSG ", head > 5 ? 5 : head);
    if (!with_header && memcmp(first, "MSG ", head > 4 ? 4 : head)) {
        if (!memcmp(first, "PING", head > 4 ? 4 : head))
            buffer_text(&link->out, "PONG\r\n");
        else if (!memcmp(first, "-ERR", head > 4 ? 4 : head))
            fail("nats: %.*s", (int)head - 2, first);
        link->in.start += head; /* +OK, PONG, INFO */
        return true;
    }
    copy_line(line, first, head);
    int count = split(line, word), numbers = with_header ? 2 : 1;
    if (count < 3 + numbers)
        fail("nats: a message of %d words", count);
    size_t size = strtoull(word[count - 1], NULL, 10), header = with_header ? strtoull(word[count - 2], NULL, 10) : 0;
    if (size > RECORD_BYTES_MAX * 2 || header > size)
        fail("nats: a message of %zu bytes, %zu of them headers", size, header);
    if (buffer_held(&link->in) < head + size + 2)
        return false;
    int sid = atoi(word[2]);
    if (sid < ACK_SID || sid >= DELIVERY_SID + load.streams)
        fail("nats: a message for subscription %d", sid);
    message(link, sid, word[1], first + head, header, size);
    link->in.start += head + size + 2;
    return true;
}

static void request(struct link *link, const char *subject, const char *json)
{
    answered = false;
    buffer_text(&link->out, "PUB %s _INBOX.ask.%d %zu\r\n%s\r\n", subject, (int)getpid(), strlen(json), json);
    while (!answered)
        if (!nats_take(link))
            link_need(link, buffer_held(&link->in) + 1);
    if (strstr(answer, "\"error\""))
        fail("nats: %s: %s", subject, answer);
}

static void nats_open(struct link *link)
{
    buffer_text(&link->out, "CONNECT "
                            "{\"verbose\":false,\"pedantic\":false,\"lang\":\"c\",\"version\":\"1\",\"protocol\":1,"
                            "\"headers\":true,\"no_responders\":false}\r\n");
    buffer_text(&link->out, "SUB _INBOX.ask.%d %d\r\n", (int)getpid(), REQUEST_SID);
    request(link, "$JS.API.INFO", "");
}

static void nats_make(struct link *link, const char *stream)
{
    char subject[160], json[400];
    snprintf(subject, sizeof subject, "$JS.API.STREAM.CREATE.%s", stream);
    snprintf(json, sizeof json,
             "{\"name\":\"%s\",\"subjects\":[\"%s\"],\"retention\":\"limits\",\"storage\":\"file\",\"discard\":\"old\","
             "\"max_msgs\":-1,\"max_bytes\":-1,"
             "\"max_age\":0,\"num_replicas\":1}",
             stream, stream);
    request(link, subject, json);
}

static void nats_drop(struct link *link, const char *stream)
{
    char subject[160];
    snprintf(subject, sizeof subject, "$JS.API.STREAM.DELETE.%s", stream);
    request(link, subject, "");
}

static void nats_publisher(struct link *link)
{
    buffer_text(&link->out, "SUB _INBOX.ack.%d.* %d\r\n", (int)getpid(), ACK_SID);
}

static void nats_publish(struct link *link, int64_t number, int stream, const uint8_t *record, size_t size)
{
    char name[NAME_MAX_BYTES];
    stream_name(name, stream);
    buffer_text(&link->out, "PUB %s _INBOX.ack.%d.%lld %zu\r\n", name, (int)getpid(), (long long)number, size);
    buffer_add(&link->out, record, size);
    buffer_add(&link->out, "\r\n", 2);
}

static void nats_subscriber(struct link *link)
{
    char name[NAME_MAX_BYTES], subject[160], json[400];
    int64_t fitting = PULL_BYTES_MAX / load.record_bytes;
    pull_records = fitting < 2 ? 2 : fitting < PULL_RECORDS ? (int)fitting : PULL_RECORDS;
    for (int stream = 0; stream < load.streams; stream++) {
        stream_name(name, stream);
        buffer_text(&link->out, "SUB _INBOX.read.%d.%s %d\r\n", (int)getpid(), name, DELIVERY_SID + stream);
        snprintf(subject, sizeof subject, "$JS.API.CONSUMER.DURABLE.CREATE.%s.reader%d", name, (int)getpid());
        snprintf(json, sizeof json,
                 "{\"stream_name\":\"%s\",\"config\":{\"durable_name\":\"reader%d\",\"deliver_policy\":\"all\",\"ack_"
                 "policy\":\"none\",\"replay_policy\":\"instant\"}}",
                 name, (int)getpid());
        request(link, subject, json);
        pull(link, stream);
    }
}

const struct protocol nats = {"nats",       nats_open, nats_make,       nats_drop, nats_publisher,
                              nats_publish, NULL,      nats_subscriber, nats_take};
