/* Tagged fields by which a response names the current leader and its address (KIP-951):
 *   CurrentLeader   leader_id INT32 | leader_epoch INT32 | tags
 *   NodeEndpoints   [ node_id INT32 | host COMPACT_STRING | port INT32 | rack
 *                   COMPACT_NULLABLE_STRING | tags ]
 */
#include <string.h>

#include "wire/buffer.h"

#define TEXT_BYTES_MAX 255 /* limit for a host name; a longer name is truncated and unusable */

static uint32_t varint_bytes(uint32_t value)
{
    uint32_t size_bytes = 1;
    for (; value >= 0x80; value >>= 7)
        size_bytes++;
    return size_bytes;
}

static struct mqd_text text_of(const char *bytes)
{
    return (struct mqd_text){(const uint8_t *)bytes, bytes ? (int32_t)strnlen(bytes, TEXT_BYTES_MAX) : -1};
}

static uint32_t text_size(const char *bytes)
{
    struct mqd_text text = text_of(bytes);
    return varint_bytes((uint32_t)(text.size_bytes + 1)) + (uint32_t)(text.size_bytes > 0 ? text.size_bytes : 0);
}

void mqd_put_current_leader(struct mqd_buffer *buffer, uint32_t tag, const struct mqd_current_leader *current)
{
    mqd_put_varint(buffer, tag);
    mqd_put_varint(buffer, 4 + 4 + 1);
    mqd_put_i32(buffer, current->leader);
    mqd_put_i32(buffer, current->leader_epoch);
    mqd_put_no_tags(buffer, true);
}

void mqd_put_node_list(struct mqd_buffer *buffer, const struct mqd_node_endpoint *nodes, uint32_t node_count)
{
    mqd_put_count(buffer, true, (int32_t)node_count);
    for (uint32_t i = 0; i < node_count; i++) {
        mqd_put_i32(buffer, nodes[i].node_id);
        mqd_put_text(buffer, true, text_of(nodes[i].host));
        mqd_put_i32(buffer, nodes[i].port);
        mqd_put_text(buffer, true, text_of(nodes[i].rack));
        mqd_put_no_tags(buffer, true);
    }
}

void mqd_put_nodes(struct mqd_buffer *buffer, uint32_t tag, const struct mqd_node_endpoint *nodes, uint32_t node_count)
{
    uint32_t size_bytes = varint_bytes(node_count + 1);
    for (uint32_t i = 0; i < node_count; i++)
        size_bytes += 4 + text_size(nodes[i].host) + 4 + text_size(nodes[i].rack) + 1;
    mqd_put_varint(buffer, tag);
    mqd_put_varint(buffer, size_bytes);
    mqd_put_node_list(buffer, nodes, node_count);
}
