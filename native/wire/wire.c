/* Request headers and the error messages of the wire cursor. See wire/wire.h and wire/cursor.h. */
#include <errno.h>

#include "base/error.h"
#include "wire/cursor.h"
#include "wire/wire.h"

/* First flexible version of every API; NEVER where no version is flexible; UNKNOWN where the number
 * is not an API that a broker serves today. Applies to request headers (v2) and, except for
 * ApiVersions, to response headers (v1). */
#define NEVER INT16_MAX
#define UNKNOWN (-1)
#define API_KEY_COUNT 93
static const int16_t flexible_from[API_KEY_COUNT] = {
    [0] = 9,                                                    /* Produce */
    [1] = 12,                                                   /* Fetch */
    [2] = 6,                                                    /* ListOffsets */
    [3] = 9,                                                    /* Metadata */
    [4] = UNKNOWN, [5] = UNKNOWN, [6] = UNKNOWN, [7] = UNKNOWN, /* removed with ZooKeeper */
    [8] = 8,                                                    /* OffsetCommit */
    [9] = 6,                                                    /* OffsetFetch */
    [10] = 3,                                                   /* FindCoordinator */
    [11] = 6,                                                   /* JoinGroup */
    [12] = 4,                                                   /* Heartbeat */
    [13] = 4,                                                   /* LeaveGroup */
    [14] = 4,                                                   /* SyncGroup */
    [15] = 5,                                                   /* DescribeGroups */
    [16] = 3,                                                   /* ListGroups */
    [17] = NEVER,                                               /* SaslHandshake */
    [18] = 3,                                                   /* ApiVersions */
    [19] = 5,                                                   /* CreateTopics */
    [20] = 4,                                                   /* DeleteTopics */
    [21] = 2,                                                   /* DeleteRecords */
    [22] = 2,                                                   /* InitProducerId */
    [23] = 4,                                                   /* OffsetForLeaderEpoch */
    [24] = 3,                                                   /* AddPartitionsToTxn */
    [25] = 3,                                                   /* AddOffsetsToTxn */
    [26] = 3,                                                   /* EndTxn */
    [27] = 1,                                                   /* WriteTxnMarkers */
    [28] = 3,                                                   /* TxnOffsetCommit */
    [29] = 2,                                                   /* DescribeAcls */
    [30] = 2,                                                   /* CreateAcls */
    [31] = 2,                                                   /* DeleteAcls */
    [32] = 4,                                                   /* DescribeConfigs */
    [33] = 2,                                                   /* AlterConfigs */
    [34] = 2,                                                   /* AlterReplicaLogDirs */
    [35] = 2,                                                   /* DescribeLogDirs */
    [36] = 2,                                                   /* SaslAuthenticate */
    [37] = 2,                                                   /* CreatePartitions */
    [38] = 2,                                                   /* CreateDelegationToken */
    [39] = 2,                                                   /* RenewDelegationToken */
    [40] = 2,                                                   /* ExpireDelegationToken */
    [41] = 2,                                                   /* DescribeDelegationToken */
    [42] = 2,                                                   /* DeleteGroups */
    [43] = 2,                                                   /* ElectLeaders */
    [44] = 1,                                                   /* IncrementalAlterConfigs */
    [45] = 0,                                                   /* AlterPartitionReassignments */
    [46] = 0,                                                   /* ListPartitionReassignments */
    [47] = NEVER,                                               /* OffsetDelete */
    [48] = 1,                                                   /* DescribeClientQuotas */
    [49] = 1,                                                   /* AlterClientQuotas */
    [50] = 0,                                                   /* DescribeUserScramCredentials */
    [51] = 0,                                                   /* AlterUserScramCredentials */
    [52] = 0,                                                   /* Vote */
    [53] = 1,                                                   /* BeginQuorumEpoch */
    [54] = 1,                                                   /* EndQuorumEpoch */
    [55] = 0,                                                   /* DescribeQuorum */
    [56] = 0,                                                   /* AlterPartition */
    [57] = 0,                                                   /* UpdateFeatures */
    [58] = 0,                                                   /* Envelope */
    [59] = 0,                                                   /* FetchSnapshot */
    [60] = 0,                                                   /* DescribeCluster */
    [61] = 0,                                                   /* DescribeProducers */
    [62] = 0,                                                   /* BrokerRegistration */
    [63] = 0,                                                   /* BrokerHeartbeat */
    [64] = 0,                                                   /* UnregisterBroker */
    [65] = 0,                                                   /* DescribeTransactions */
    [66] = 0,                                                   /* ListTransactions */
    [67] = 0,                                                   /* AllocateProducerIds */
    [68] = 0,                                                   /* ConsumerGroupHeartbeat */
    [69] = 0,                                                   /* ConsumerGroupDescribe */
    [70] = 0,                                                   /* ControllerRegistration */
    [71] = 0,                                                   /* GetTelemetrySubscriptions */
    [72] = 0,                                                   /* PushTelemetry */
    [73] = 0,                                                   /* AssignReplicasToDirs */
    [74] = 0,                                                   /* ListConfigResources */
    [75] = 0,                                                   /* DescribeTopicPartitions */
    [76] = 0,                                                   /* ShareGroupHeartbeat */
    [77] = 0,                                                   /* ShareGroupDescribe */
    [78] = 0,                                                   /* ShareFetch */
    [79] = 0,                                                   /* ShareAcknowledge */
    [80] = 0,                                                   /* AddRaftVoter */
    [81] = 0,                                                   /* RemoveRaftVoter */
    [82] = 0,                                                   /* UpdateRaftVoter */
    [83] = 0,                                                   /* InitializeShareGroupState */
    [84] = 0,                                                   /* ReadShareGroupState */
    [85] = 0,                                                   /* WriteShareGroupState */
    [86] = 0,                                                   /* DeleteShareGroupState */
    [87] = 0,                                                   /* ReadShareGroupStateSummary */
    [88] = 0,                                                   /* StreamsGroupHeartbeat */
    [89] = 0,                                                   /* StreamsGroupDescribe */
    [90] = 0,                                                   /* DescribeShareGroupOffsets */
    [91] = 0,                                                   /* AlterShareGroupOffsets */
    [92] = 0,                                                   /* DeleteShareGroupOffsets */
};

static bool is_known_api(int16_t api_key)
{
    return api_key >= 0 && api_key < API_KEY_COUNT && flexible_from[api_key] != UNKNOWN;
}

bool mqd_api_flexible(int16_t api_key, int16_t api_version)
{
    return is_known_api(api_key) && flexible_from[api_key] != NEVER && api_version >= flexible_from[api_key];
}

int mqd_request_header_parse(const uint8_t *frame, uint32_t size_bytes, struct mqd_request_header *out, bool *is_known)
{
    struct mqd_byte_cursor cursor = mqd_cursor_over(frame, size_bytes);
    struct mqd_text client_id;
    *is_known = false;
    out->client_id = NULL;
    out->client_id_bytes = -1;
    if (mqd_take_i16(&cursor, "api_key", &out->api_key) || mqd_take_i16(&cursor, "api_version", &out->api_version) ||
        mqd_take_i32(&cursor, "correlation_id", &out->correlation_id))
        return -1;
    out->header_bytes = (uint32_t)(cursor.at - cursor.begin);
    if (!is_known_api(out->api_key))
        return 0;
    *is_known = true;
    /* client_id keeps its INT16 length in header v2, so that a broker can read it before it knows
     * whether the version is flexible (KIP-482). */
    if (mqd_take_text(&cursor, false, true, "client_id", &client_id) ||
        mqd_skip_tags(&cursor, mqd_api_flexible(out->api_key, out->api_version)))
        return -1;
    out->client_id = client_id.bytes;
    out->client_id_bytes = client_id.size_bytes;
    out->header_bytes = (uint32_t)(cursor.at - cursor.begin);
    return 0;
}

__attribute__((cold, noinline)) void mqd_wire_report_short(const struct mqd_byte_cursor *cursor, const char *field,
                                                           size_t needed_bytes)
{
    mqd_error_set(EBADMSG,
                  "the message is truncated or has a wrong length: %s at byte %zu needs %zu more bytes, %zu remain; "
                  "its sender must send whole frames",
                  field, (size_t)(cursor->at - cursor->begin), needed_bytes, mqd_cursor_left(cursor));
}

__attribute__((cold, noinline)) void mqd_wire_report_wrong(const struct mqd_byte_cursor *cursor, const char *field,
                                                           const char *what, int64_t value)
{
    mqd_error_set(
        EBADMSG,
        "malformed message: %s before byte %zu is %s %lld; its sender must follow the schema of the version it names",
        field, (size_t)(cursor->at - cursor->begin), what, (long long)value);
}

__attribute__((cold, noinline)) int mqd_wire_misused(const char *what)
{
    return mqd_error_set(MQD_E_INVALID, "%s; the caller's loop must follow the counts that the parser gave", what);
}

int mqd_skip_tags_many(struct mqd_byte_cursor *cursor, uint32_t tag_count)
{
    uint32_t tag;
    struct mqd_byte_cursor value;
    /* each tagged field takes at least two bytes, so a wrong count fails at the end of the frame */
    for (uint32_t i = 0; i < tag_count; i++)
        if (mqd_take_tag(cursor, &tag, &value))
            return -1;
    return 0;
}
