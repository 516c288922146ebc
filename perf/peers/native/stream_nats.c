/* NATS JetStream: every PUB has a reply subject that ends in the record's number, where its PubAck comes; reading is by push consumers with flow control and no
 * acknowledgements, as the client libraries' ordered consumers are.
 */
#define _GNU_SOURCE
#include "stream_load.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LINE_BYTES_MAX 512
#define ACK_SID 1
#define ASK_SID 2
#define DELIVERY_SID 3 /* and above: one for each stream */
#define WORDS_MAX 8

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

/* A status of the server's: a flow control request wants an empty answer, a heartbeat nothing. */
static void status(struct link *link, const char *reply)
{
    if (reply)
        buffer_text(&link->out, "PUB %s 0\r\n\r\n", reply);
}

static void message(struct link *link, int sid, const char *subject, const char *reply, const uint8_t *payload, size_t header, size_t size)
{
    if (sid == ASK_SID) {
        snprintf(answer, sizeof answer, "%.*s", (int)size, (const char *)payload);
        answered = true;
    } else if (sid == ACK_SID) {
        if (size && memmem(payload, size, "\"error\"", 7))
            fail("nats: a record was refused: %.*s", (int)size, payload);
        on_acknowledged(strtoll(strrchr(subject, '.') + 1, NULL, 10));
    } else if (header)
        status(link, reply);
    else
        on_received(payload, size);
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
    const char *reply = count == 4 + numbers ? word[3] : NULL;
    message(link, atoi(word[2]), word[1], reply, first + head, header, size);
    link->in.start += head + size + 2;
    return true;
}

static void request(struct link *link, const char *subject, const char *json)
{
    answered = false;
    buffer_text(&link->out, "PUB %s _INBOX.ask %zu\r\n%s\r\n", subject, strlen(json), json);
    while (!answered)
        if (!nats_take(link))
            link_need(link, buffer_held(&link->in) + 1);
    if (strstr(answer, "\"error\""))
        fail("nats: %s: %s", subject, answer);
}

static void nats_open(struct link *link)
{
    buffer_text(&link->out, "CONNECT {\"verbose\":false,\"pedantic\":false,\"lang\":\"c\",\"version\":\"1\",\"protocol\":1,\"headers\":true,\"no_responders\":false}\r\n");
    buffer_text(&link->out, "SUB _INBOX.ask %d\r\n", ASK_SID);
    request(link, "$JS.API.INFO", "");
}

static void nats_make(struct link *link, const char *stream)
{
    char subject[160], json[400];
    snprintf(subject, sizeof subject, "$JS.API.STREAM.CREATE.%s", stream);
    snprintf(json, sizeof json, "{\"name\":\"%s\",\"subjects\":[\"%s\"],\"retention\":\"limits\",\"storage\":\"file\",\"discard\":\"old\",\"max_msgs\":-1,\"max_bytes\":-1,"
             "\"max_age\":0,\"num_replicas\":1}", stream, stream);
    request(link, subject, json);
}

static void nats_drop(struct link *link, const char *stream)
{
    char subject[160];
    snprintf(subject, sizeof subject, "$JS.API.STREAM.DELETE.%s", stream);
    request(link, subject, "");
}

static void nats_publisher(struct link *link) { buffer_text(&link->out, "SUB _INBOX.ack.* %d\r\n", ACK_SID); }

static void nats_publish(struct link *link, int64_t number, int stream, const uint8_t *record, size_t size)
{
    char name[NAME_MAX_BYTES];
    stream_name(name, stream);
    buffer_text(&link->out, "PUB %s _INBOX.ack.%lld %zu\r\n", name, (long long)number, size);
    buffer_add(&link->out, record, size);
    buffer_add(&link->out, "\r\n", 2);
}

static void nats_subscriber(struct link *link)
{
    char name[NAME_MAX_BYTES], subject[160], json[400];
    for (int stream = 0; stream < load.streams; stream++) {
        stream_name(name, stream);
        buffer_text(&link->out, "SUB _INBOX.read.%d.%s %d\r\n", (int)getpid(), name, DELIVERY_SID + stream);
        snprintf(subject, sizeof subject, "$JS.API.CONSUMER.CREATE.%s", name);
        snprintf(json, sizeof json, "{\"stream_name\":\"%s\",\"config\":{\"deliver_policy\":\"all\",\"ack_policy\":\"none\",\"replay_policy\":\"instant\",\"max_deliver\":1,"
                 "\"deliver_subject\":\"_INBOX.read.%d.%s\",\"flow_control\":true,\"idle_heartbeat\":5000000000}}", name, (int)getpid(), name);
        request(link, subject, json);
    }
}

const struct protocol nats = {"nats", nats_open, nats_make, nats_drop, nats_publisher, nats_publish, NULL, nats_subscriber, nats_take};
