/* Commands that update topics and brokers. Before an entry is replaced, waiters on partitions that
 * moved to another slot or another leader are notified. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "server/reactor.h"
#include "server/redirect.h"
#include "wire/api.h"

#define BROKER_COUNT_MAX 65536

/* ---- execution ---- */

static void clear_path(struct mqd_reactor *r, uint32_t slot)
{
    if (slot >= MQD_PARTITION_SLOT_COUNT || !r->path_log_dir[slot])
        return;
    r->path_log_dir[slot] = 0;
    mqd_reader_set_path(r->reader, slot, NULL);
}

static void wake(struct mqd_reactor *r, uint32_t slot)
{
    if (slot < MQD_PARTITION_SLOT_COUNT)
        mqd_fetch_wake_slot(r, slot); /* the fetches are evaluated later in this turn */
}

/* Removes the topic and wakes waiters on its partitions, which then find it removed. */
static void drop_topic(struct mqd_reactor *r, struct mqd_topic *topic)
{
    for (uint32_t i = 0; i < topic->partition_count; i++) {
        clear_path(r, topic->slots[i]);
        wake(r, topic->slots[i]);
    }
    mqd_topics_remove(&r->topics, topic);
}

/* Called before a new description replaces the old one: drops another topic with the same name;
 * wakes waiters on a slot that no longer belongs to the partition, so that they find the new slot,
 * and waiters on a partition with a new leader. */
static void prepare_topic_change(struct mqd_reactor *r, const struct mqd_command *command)
{
    struct mqd_topic_key key = {.name = {(const uint8_t *)command->text, (int32_t)strlen(command->text)}};
    struct mqd_topic *topic = mqd_topics_find_by_id(&r->topics, command->topic_id),
                     *namesake = mqd_topics_find(&r->topics, &key);
    const struct mqd_topic_partition *partitions = command->list;
    if (namesake && namesake != topic)
        drop_topic(r, namesake);
    for (uint32_t i = 0; topic && i < topic->partition_count; i++) {
        bool same_slot = i < command->number && partitions[i].slot == topic->slots[i];
        if (same_slot && partitions[i].leader == topic->partitions[i].leader &&
            partitions[i].leader_epoch == topic->partitions[i].leader_epoch)
            continue;
        if (!same_slot) {
            memset(r->cursors, 0, sizeof r->cursors);
            clear_path(r, topic->slots[i]);
            if (i < command->number)
                clear_path(r, partitions[i].slot); /* the slot may have been another partition's */
        }
        wake(r, topic->slots[i]);
    }
}

void mqd_topic_command_put(struct mqd_reactor *r, struct mqd_command *command)
{
    const struct mqd_topic *existing = mqd_topics_find_by_id(&r->topics, command->topic_id);
    const struct mqd_topic_partition *partitions = command->list;
    for (uint32_t i = existing ? existing->partition_count : 0; i < command->number; i++)
        clear_path(r, partitions[i].slot); /* the slot may have been another partition's */
    prepare_topic_change(r, command);
    struct mqd_topic *topic =
        mqd_topics_put(&r->topics, command->topic_id, command->text, command->list, command->number);
    if (topic && command->view) {
        free(topic->view);
        topic->view = command->view;
        command->view = NULL;
    }
    if (topic && r->relays && !topic->view)
        mqd_relay_on_topic_changed(r, topic);
    if (topic && !topic->view)
        mqd_redirect_on_topic(r, topic);
    mqd_command_done(r, command->token, topic ? 0 : ENOMEM, UINT32_MAX, 0, NULL,
                     topic ? "" : "out of memory for another topic");
}

void mqd_topic_command_remove(struct mqd_reactor *r, const struct mqd_command *command)
{
    struct mqd_topic *topic = mqd_topics_find_by_id(&r->topics, command->topic_id);
    if (topic)
        drop_topic(r, topic);
    mqd_command_done(r, command->token, 0, UINT32_MAX, 0, NULL, "");
}

void mqd_topic_command_brokers(struct mqd_reactor *r, struct mqd_command *command)
{
    mqd_topics_put_brokers(&r->topics, (int32_t)command->offset, command->list, command->number);
    command->list = NULL;
    mqd_command_done(r, command->token, 0, UINT32_MAX, 0, NULL, "");
}

/* ---- posting ---- */

static int post_topic(struct mqd_reactor *r, uint64_t token, const uint8_t topic_id[16], const char *name,
                      struct mqd_topic_partition *partitions, uint32_t partition_count, struct mqd_view *view)
{
    struct mqd_command command = {
        .kind = MQD_COMMAND_TOPIC_PUT, .token = token, .number = partition_count, .list = partitions, .view = view};
    memcpy(command.topic_id, topic_id, 16);
    command.text = strdup(name);
    if (!command.text || !partitions) {
        free(command.text);
        free(partitions);
        free(view);
        return mqd_error_set(ENOMEM, "out of memory for another topic");
    }
    return mqd_command_post(r, &command);
}

static int check_topic(const char *name, uint32_t slot_max)
{
    if (strlen(name) > MQD_TOPIC_NAME_BYTES_MAX)
        return mqd_error_set(MQD_E_INVALID, "the topic name has %zu bytes; at most %d are allowed", strlen(name),
                             MQD_TOPIC_NAME_BYTES_MAX);
    if (slot_max >= MQD_PARTITION_SLOT_COUNT)
        return mqd_error_set(MQD_E_INVALID, "partition slot %u is out of range; there are %d slots", slot_max,
                             MQD_PARTITION_SLOT_COUNT);
    return 0;
}

int mqd_reactor_topic_put(struct mqd_reactor *r, uint64_t token, const uint8_t topic_id[16], const char *name,
                          const uint32_t *slots, uint32_t partition_count)
{
    uint32_t slot_max = 0;
    for (uint32_t i = 0; i < partition_count; i++)
        slot_max = slots[i] > slot_max ? slots[i] : slot_max;
    if (check_topic(name, slot_max) < 0)
        return -1;
    struct mqd_topic_partition *partitions = malloc(sizeof *partitions * (partition_count ? partition_count : 1));
    for (uint32_t i = 0; partitions && i < partition_count; i++)
        partitions[i] = (struct mqd_topic_partition){
            .slot = slots[i], .leader = MQD_LEADER_HERE, .leader_epoch = -1, .redirect = -1};
    return post_topic(r, token, topic_id, name, partitions, partition_count, NULL);
}

static int post_with_partitions(struct mqd_reactor *r, uint64_t token, const uint8_t topic_id[16], const char *name,
                                const struct mqd_topic_partition *partitions, uint32_t partition_count,
                                struct mqd_view *view)
{
    uint32_t slot_max = 0;
    for (uint32_t i = 0; i < partition_count; i++)
        slot_max = partitions[i].slot != MQD_SLOT_NONE && partitions[i].slot > slot_max ? partitions[i].slot : slot_max;
    if (check_topic(name, slot_max) < 0) {
        free(view);
        return -1;
    }
    struct mqd_topic_partition *copy = malloc(sizeof *copy * (partition_count ? partition_count : 1));
    if (copy)
        memcpy(copy, partitions, sizeof *copy * partition_count);
    return post_topic(r, token, topic_id, name, copy, partition_count, view);
}

int mqd_reactor_topic_put_partitions(struct mqd_reactor *r, uint64_t token, const uint8_t topic_id[16],
                                     const char *name, const struct mqd_topic_partition *partitions,
                                     uint32_t partition_count)
{
    return post_with_partitions(r, token, topic_id, name, partitions, partition_count, NULL);
}

int mqd_reactor_view_put(struct mqd_reactor *r, uint64_t token, const uint8_t topic_id[16], const char *name,
                         const struct mqd_topic_partition *partitions, uint32_t partition_count, const char *base,
                         const uint8_t *filter, uint32_t filter_bytes)
{
    if (strlen(base) > MQD_TOPIC_NAME_BYTES_MAX)
        return mqd_error_set(MQD_E_INVALID, "the name of the base topic of the view %s is longer than %d bytes", name,
                             MQD_TOPIC_NAME_BYTES_MAX);
    if (!mqd_filter_check(filter, filter_bytes))
        return mqd_error_set(MQD_E_INVALID, "the filter of the view %s cannot be used", name);
    struct mqd_view *view = calloc(1, sizeof *view + filter_bytes);
    if (!view)
        return mqd_error_set(ENOMEM, "out of memory for another topic");
    memcpy(view->base, base, strlen(base) + 1);
    view->filter_bytes = filter_bytes;
    memcpy(view->filter, filter, filter_bytes);
    return post_with_partitions(r, token, topic_id, name, partitions, partition_count, view);
}

int mqd_reactor_topic_remove(struct mqd_reactor *r, uint64_t token, const uint8_t topic_id[16])
{
    struct mqd_command command = {.kind = MQD_COMMAND_TOPIC_REMOVE, .token = token};
    memcpy(command.topic_id, topic_id, 16);
    return mqd_command_post(r, &command);
}

int mqd_reactor_brokers_put(struct mqd_reactor *r, uint64_t token, int32_t node_id,
                            const struct mqd_broker_address *brokers, uint32_t broker_count)
{
    if (broker_count > BROKER_COUNT_MAX)
        return mqd_error_set(MQD_E_INVALID, "%u brokers; at most %d are allowed", broker_count, BROKER_COUNT_MAX);
    struct mqd_command command = {
        .kind = MQD_COMMAND_BROKERS_PUT, .token = token, .number = broker_count, .offset = node_id};
    if (broker_count) {
        struct mqd_broker_address *copy = malloc(sizeof *copy * broker_count);
        if (!copy)
            return mqd_error_set(ENOMEM, "out of memory for the brokers");
        memcpy(copy, brokers, sizeof *copy * broker_count);
        for (uint32_t i = 0; i < broker_count; i++) {
            copy[i].host[sizeof copy[i].host - 1] = '\0';
            copy[i].rack[sizeof copy[i].rack - 1] = '\0';
        }
        command.list = copy;
    }
    return mqd_command_post(r, &command);
}
