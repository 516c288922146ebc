/* Routes a complete frame: frequent requests are handled by the worker, others go to the
 * acceptor. */
#include <string.h>

#include "server/authentication.h"
#include "server/reactor.h"
#include "server/share/share.h"
#include "server/slow/slow.h"
#include "wire/cursor.h"

static void respond_immediately(struct mqd_reactor *r, struct mqd_connection *c,
                                const struct mqd_request_header *header, const uint8_t *body, uint32_t size_bytes)
{
    struct mqd_request *request = mqd_request_new(r, c, header, MQD_REQUEST_READY);
    if (!request) {
        mqd_connection_close(r, c, "out of memory");
        return;
    }
    uint32_t id = (uint32_t)header->correlation_id;
    uint8_t correlation_id[4] = {(uint8_t)(id >> 24), (uint8_t)(id >> 16), (uint8_t)(id >> 8), (uint8_t)id};
    if (!mqd_request_reply_append(r, request, correlation_id, 4) ||
        !mqd_request_reply_append(r, request, body, size_bytes)) {
        mqd_connection_fail(r, c, "no memory for another response (queued.max.request.bytes)");
        return;
    }
    mqd_request_complete(r, request);
}

static bool is_alphanumeric(uint8_t byte)
{
    return (byte >= '0' && byte <= '9') || (byte >= 'A' && byte <= 'Z') || (byte >= 'a' && byte <= 'z');
}

/* The form of a client's name and version in KIP-511: [a-zA-Z0-9]([a-zA-Z0-9.-]*[a-zA-Z0-9])? */
static bool is_client_name(struct mqd_text name)
{
    if (name.size_bytes < 1 || !is_alphanumeric(name.bytes[0]) || !is_alphanumeric(name.bytes[name.size_bytes - 1]))
        return false;
    for (int32_t i = 1; i < name.size_bytes - 1; i++)
        if (!is_alphanumeric(name.bytes[i]) && name.bytes[i] != '.' && name.bytes[i] != '-')
            return false;
    return true;
}

/* Whether the client skips batches without records (compaction, too, leaves such batches): Kafka's
 * client, clients based on librdkafka, and mqd's reader for Spark. */
static bool skips_empty_batches(struct mqd_text name)
{
    static const char *const prefixes[] = {"apache-kafka-java", "librdkafka", "confluent-kafka", "mqd-spark"};
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++) {
        size_t size_bytes = strlen(prefixes[i]);
        if (name.size_bytes >= (int32_t)size_bytes && memcmp(name.bytes, prefixes[i], size_bytes) == 0)
            return true;
    }
    return false;
}

/* Returns whether the request is valid. Sets c->skips_empty_batches. */
static bool check_api_versions(struct mqd_connection *c, const uint8_t *body, uint32_t body_bytes)
{
    struct mqd_byte_cursor cursor = mqd_cursor_over(body, body_bytes);
    struct mqd_text name, version;
    bool valid = !mqd_take_text(&cursor, true, false, "client_software_name", &name) &&
                 !mqd_take_text(&cursor, true, false, "client_software_version", &version) &&
                 !mqd_skip_tags(&cursor, true) && is_client_name(name) && is_client_name(version);
    c->skips_empty_batches = valid && skips_empty_batches(name);
    return valid;
}

/* Sends the response that the acceptor has prepared in the control segment, so that a client can
 * connect while the acceptor is down. Version slot 7 holds the response to unsupported versions. An
 * invalid request goes to the acceptor, which refuses it. */
static bool respond_api_versions(struct mqd_reactor *r, struct mqd_connection *c,
                                 const struct mqd_request_header *header, const uint8_t *request,
                                 uint32_t request_bytes)
{
    if ((header->api_version == 3 || header->api_version == 4) && !check_api_versions(c, request, request_bytes))
        return false;
    uint8_t body[MQD_BLOB_BYTES_MAX];
    uint32_t version = header->api_version >= 0 && header->api_version <= 4 ? (uint32_t)header->api_version : 7;
    int size_bytes = mqd_blob_read(mqd_control_api_versions(r->options.control, version), body, sizeof body);
    if (size_bytes < 0)
        return false;
    respond_immediately(r, c, header, body, (uint32_t)size_bytes);
    return true;
}

void mqd_dispatch_frame(struct mqd_reactor *r, struct mqd_connection *c, uint8_t *frame, uint32_t size_bytes,
                        int64_t arena_offset)
{
    struct mqd_request_header header;
    bool is_known_api;
    if (c->authentication && !mqd_authentication_admit(r, c, frame, size_bytes))
        return;
    if (mqd_request_header_parse(frame, size_bytes, &header, &is_known_api) < 0) {
        mqd_connection_fail(r, c, mqd_error_message());
        return;
    }
    if (mqd_slow_enabled(r))
        mqd_slow_copy_client(c, &header);
    const uint8_t *body = frame + header.header_bytes;
    uint32_t body_bytes = size_bytes - header.header_bytes;
    switch (header.api_key) {
    case MQD_API_PRODUCE:
        if (header.api_version < 3 || header.api_version > 13)
            break;
        mqd_stat(r, MQD_COUNT_REQUESTS_PRODUCE, 1);
        mqd_produce_on_request(r, c, &header, frame, size_bytes, arena_offset);
        return;
    case MQD_API_FETCH:
        if (header.api_version < 4 || header.api_version > 18)
            break;
        mqd_stat(r, MQD_COUNT_REQUESTS_FETCH, 1);
        mqd_fetch_on_request(r, c, &header, body, body_bytes);
        return;
    case MQD_API_SHARE_FETCH:
    case MQD_API_SHARE_ACKNOWLEDGE:
        if (header.api_version < 1 || header.api_version > 2 || !mqd_shares_enabled(r))
            break;
        mqd_stat(r, MQD_COUNT_REQUESTS_FETCH, 1);
        mqd_share_on_request(r, c, &header, body, body_bytes);
        return;
    case MQD_API_LIST_OFFSETS:
        if (header.api_version >= 1 && header.api_version <= 11 &&
            mqd_list_offsets_on_request(r, c, &header, body, body_bytes))
            return;
        break;
    case MQD_API_METADATA:
        if (mqd_reply_cache_find(r, c, &header, frame, size_bytes))
            return;
        break;
    case MQD_API_API_VERSIONS:
        if (respond_api_versions(r, c, &header, body, body_bytes))
            return;
        break;
    default:
        break;
    }
    if (c->fd >= 0)
        mqd_control_on_request(r, c, &header, frame, size_bytes);
}
