/* Commands that other threads queue to the reactor. Together with the events that answer them, they
 * are the only state of the reactor that threads share.
 */
#ifndef MQD_COMMANDS_H
#define MQD_COMMANDS_H

#include "log/partition.h"
#include "server/api.h"

enum mqd_command_kind {
    MQD_COMMAND_LOG_DIR,
    MQD_COMMAND_LOG_DIR_FULL,
    MQD_COMMAND_TOPIC_PUT,
    MQD_COMMAND_TOPIC_REMOVE,
    MQD_COMMAND_BROKERS_PUT,
    MQD_COMMAND_PARTITION_OPEN,
    MQD_COMMAND_PARTITION_CLOSE,
    MQD_COMMAND_SET_OPTIONS,
    MQD_COMMAND_ADVANCE_START,
    MQD_COMMAND_ROLL,
    MQD_COMMAND_SET_LEADER_EPOCH,
    MQD_COMMAND_ENDPOINT_DIED,
    MQD_COMMAND_SEGMENTS_REPLACED,
    MQD_COMMAND_SEGMENTS_HOLD,
    MQD_COMMAND_REPLICA_SET,
    MQD_COMMAND_IN_SYNC_RESPONSE,
    MQD_COMMAND_FETCHER_PUT,
    MQD_COMMAND_FETCHER_REMOVE,
    MQD_COMMAND_FETCHER_RATE,
    MQD_COMMAND_RELAY_PUT,
    MQD_COMMAND_RELAY_REFUSE,
    MQD_COMMAND_RELAY_REMOVE,
    MQD_COMMAND_LISTENER_TLS,
    MQD_COMMAND_TLS_PRINCIPAL,
    MQD_COMMAND_SUBJECT_PUT,
    MQD_COMMAND_REVOKE
};
struct mqd_command {
    uint32_t kind;
    uint64_t token;
    uint32_t slot;
    uint32_t number;             /* depends on the kind: an index, a count or a file descriptor */
    int64_t offset, last_offset; /* offsets, or other numbers that depend on the kind */
    uint64_t subject_id;
    uint8_t topic_id[16];
    char *text;
    /* malloc'd: `number` entries of struct mqd_topic_partition or mqd_broker_address, or slots; or
     * the rights of a subject: the sizes of three tables, then the tables */
    void *list;
    struct mqd_partition *partition;
    struct mqd_log_options options;
    struct mqd_replica_assignment *assignment; /* malloc'd, like text and list */
    struct mqd_fetcher_options *fetcher;
    struct mqd_relay_options *relay;
    struct mqd_tls_context *tls_context;
    struct mqd_view *view; /* malloc'd */
    struct mqd_command *next;
};

#endif
