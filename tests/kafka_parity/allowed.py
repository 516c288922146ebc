"""The allowed differences from Apache Kafka, each with its reason. docs/protocol.md lists them
(`python -m tests.kafka_parity.page`); an entry that the whole run never meets fails it.
"""

from tests.kafka_parity.compare import Allowed

HASHED = (
    "Kafka lists entries in hash-table order, or errors first; mqd lists them in the order of the request, or by name"
)
CRASHED = "where Kafka fails with an internal exception, mqd reports what is wrong with the request"

TEXTS = "texts are mqd's own; the error code is compared"

BESIDE_ERRORS = (
    "with an error such as OFFSET_OUT_OF_RANGE, mqd also returns the offsets of the log, where Kafka returns -1;"
    " and one of the two returns null where the other returns an empty list"
)
NO_PARTITIONS = "mqd's response also contains topics that the request names without partitions; Kafka omits them"

ELR = "with eligible leader replicas, Kafka stores min.insync.replicas for the whole cluster"
OF_NO_TOPIC = (
    "mqd's default depends on the number of replicas: a broker shows -1, and a topic shows the effective number"
)
NO_TIERS = "mqd has no tiered storage"
BETWEEN_BROKERS = "the states of share groups are sent only between brokers, over a listener that clients cannot use"
OWN_PROPERTY = "mqd has properties of its own"
OWN_PROPERTIES = {
    "flush.on.ack": OWN_PROPERTY,
    "record.validation": OWN_PROPERTY,
    "replica.lag.max.messages": OWN_PROPERTY,
    "schedule.to": OWN_PROPERTY,
    "schedule.delay.ms": OWN_PROPERTY,
    "queue.delete.on.ack": OWN_PROPERTY,
    "queue.unflushed.bytes": OWN_PROPERTY,
    "share.priority": OWN_PROPERTY,
    "acks.replicas": OWN_PROPERTY,
    "view.of": OWN_PROPERTY,
    "view.filter": OWN_PROPERTY,
    "dedup.window.ms": OWN_PROPERTY,
    "dedup.header": OWN_PROPERTY,
    "dedup.ids.max": OWN_PROPERTY,
    "errors.deadletterqueue.group.enable": (
        "dead letters of share groups (KIP-1191) exist in Apache Kafka only from 4.4 on"
    ),
}
HOURS = "Kafka reports log.retention.ms as a default even if log.retention.hours sets it"
ANY_NAME = (
    "Kafka accepts unknown broker properties, because plugins may define them; mqd refuses them, and its error names"
    " them"
)
LAST_FETCHED = (
    "only replicas send last_fetched_epoch; a worker that reads for a consumer has no epochs to compare it with"
)
DELETED_NEWEST = (
    "if several records have the largest timestamp, Kafka returns the batch's first, even if DeleteRecords removed"
    " it; mqd returns the first that can be read"
)
ENDED = (
    "a batch of an ended transaction is not a duplicate"
    " (docs/decisions/coordinators/2026-11-22-sequences-of-ended-transactions.md)"
)
SENT_TWICE = (
    "for a batch that was sent twice, Kafka returns its timestamp as the append time, although the topic uses"
    " CreateTime"
)
ONLY_NAMED = (
    "Kafka closes the connection for versions that it advertises only because of old clients; mqd returns an error"
)
VERIFIED_LATER = "mqd checks acks, batches and sequences before it consults the transaction's coordinator"
ONE_PRODUCER = (
    "if a request has batches of two producers, Kafka refuses both producers' batches, mqd only those of the second"
)
BESIDE_FENCED = (
    "with INVALID_PRODUCER_EPOCH, Kafka gives the log's start only if the batch was refused by the log rather than by"
    " the coordinator"
)
EMPTY_ADD = "in mqd, adding an empty list of partitions does not begin a transaction"
FENCED_FIRST = "mqd fences a producer whose epoch does not match; Kafka first aborts the open transaction"
WRITTEN = "mqd returns the time at which the producer's last batch was written, Kafka the batch's timestamp"
OWN_LOG = "each broker has its own metadata log"
SHARE_START = "Kafka stores a share partition's start at the first acknowledgement, mqd at the first fetch"
NO_GROUP = "without a group id, Kafka finds and opens sessions of a group without a name; mqd refuses the request"
NEVER_READ = (
    "if nothing was read from a share partition since its leader started, Kafka says that it does not exist, and"
    " clients retry; mqd says that the member has not acquired these records"
)
ALTERED = (
    "altering offsets raises the group's epoch, so that state that was read earlier cannot overwrite the new offsets"
)
REFUSED_LAST = "partitions whose offsets are refused come last in mqd's list"
NOT_ALTERED = (
    "mqd creates a missing group if it can alter an offset; Kafka creates it even if no offset could be altered"
)
NEGATIVE = "mqd refuses a negative start offset; in Kafka the group begins as if it had never read"
TWO_EPOCHS = "in mqd, aborting an open transaction raises the epoch by two, so that a late EndTxn is recognized"
RESOLVED = (
    "Kafka resolves a regular expression in the background, so the member gets its partitions later; mqd resolves it"
    " immediately"
)

ALLOWED = (
    Allowed("*", "0+", "*.error_message", TEXTS),
    Allowed("ShareFetch", "1-2", "responses[].partitions[].acknowledge_error_message", TEXTS),
    Allowed("*", "0+", "*.error_code", CRASHED, kafka=-1),
    Allowed("Metadata", "0-13", "topics", HASHED, order=True),
    Allowed("Metadata", "0-13", "topics[].partitions", HASHED, order=True),
    Allowed("Fetch", "4-18", "responses", HASHED, order=True),
    Allowed("Fetch", "4-18", "responses[].partitions", HASHED, order=True),
    Allowed("Fetch", "4-18", "responses[].partitions[].aborted_transactions", BESIDE_ERRORS, kafka=None, mqd=[]),
    Allowed("Fetch", "4-18", "responses[].partitions[].aborted_transactions", BESIDE_ERRORS, kafka=[], mqd=None),
    Allowed("Fetch", "4-18", "responses[].partitions[].high_watermark", BESIDE_ERRORS, kafka=-1),
    Allowed("Fetch", "4-18", "responses[].partitions[].last_stable_offset", BESIDE_ERRORS, kafka=-1),
    Allowed("Fetch", "5-18", "responses[].partitions[].log_start_offset", BESIDE_ERRORS, kafka=-1),
    Allowed("ListOffsets", "1-11", "topics", HASHED, order=True),
    Allowed("ListOffsets", "1-11", "topics[].partitions", HASHED, order=True),
    Allowed("ListOffsets", "7-11", "topics[].partitions[].offset", DELETED_NEWEST, kafka=0, mqd=2),
    Allowed("OffsetCommit", "2-10", "topics", HASHED, order=True),
    Allowed("OffsetCommit", "2-10", "topics[].partitions", HASHED, order=True),
    Allowed("OffsetFetch", "8-10", "groups[].topics", HASHED, order=True),
    Allowed("Produce", "0-13", "responses", HASHED, order=True),
    Allowed("Produce", "0-13", "responses[].partition_responses", HASHED, order=True),
    Allowed("TxnOffsetCommit", "0-5", "topics", HASHED, order=True),
    Allowed("DescribeUserScramCredentials", "0", "results", HASHED, order=True),
    Allowed("AlterUserScramCredentials", "0", "results", HASHED, order=True),
    Allowed("TxnOffsetCommit", "0-5", "topics[].partitions", HASHED, order=True),
    Allowed("Produce", "0-13", "responses[] only mqd", NO_PARTITIONS),
    Allowed(
        "Metadata",
        "12-13",
        "topics[] only mqd",
        "if the request identifies any topic by id, Kafka omits the topics that the request identifies by name",
    ),
    Allowed("ListOffsets", "1-11", "topics[] only mqd", NO_PARTITIONS),
    Allowed("OffsetCommit", "2-10", "topics[] only mqd", NO_PARTITIONS),
    Allowed("TxnOffsetCommit", "0-5", "topics[] only mqd", NO_PARTITIONS),
    Allowed("DeleteRecords", "0-2", "topics[] only mqd", NO_PARTITIONS),
    Allowed("OffsetDelete", "0", "topics[] only mqd", NO_PARTITIONS),
    Allowed("Fetch", "12-18", "responses[].partitions[].error_code", LAST_FETCHED, kafka=1, mqd=0),
    Allowed("Fetch", "12-18", "responses[].partitions[].error_code", LAST_FETCHED, kafka=0, mqd=1),
    Allowed("Produce", "0-2", "outcome", ONLY_NAMED, kafka="closed", mqd="answered"),
    *(
        Allowed("Produce", "3-13", f"responses[].partition_responses[].error_code{what}", ENDED, mqd=mqd)
        for what, mqd in (("", 59), (" on resend", 59), (" on resend", 45))
    ),
    Allowed("Produce", "3-13", "outcome", ENDED, kafka="silent", mqd="closed"),
    Allowed("Produce", "3-13", "responses[].partition_responses[].log_append_time_ms", SENT_TWICE, mqd=-1),
    Allowed(
        "Produce",
        "8-13",
        "responses[].partition_responses[].record_errors[] only Kafka",
        "mqd checks only the batch's largest timestamp, and so names no record",
    ),
    Allowed(
        "Produce",
        "8-13",
        "responses[].partition_responses[].record_errors[] only mqd",
        "mqd names the record that cannot be parsed",
    ),
    Allowed("Produce", "3-13", "responses[].partition_responses[].error_code", ONE_PRODUCER, kafka=49),
    Allowed("Produce", "3-13", "responses[].partition_responses[].error_code", VERIFIED_LATER, kafka=47, mqd=21),
    Allowed("Produce", "5-13", "responses[].partition_responses[].log_start_offset", BESIDE_FENCED, kafka=-1),
    Allowed("Produce", "3-13", "responses[].partition_responses[].error_code", VERIFIED_LATER, kafka=48, mqd=45),
    Allowed("Produce", "3-13", "responses[].partition_responses[].error_code", VERIFIED_LATER, kafka=48, mqd=21),
    Allowed("Produce", "3-13", "responses[].partition_responses[].error_code", VERIFIED_LATER, kafka=48, mqd=87),
    Allowed("Produce", "3-13", "responses[].partition_responses[].error_code", VERIFIED_LATER, kafka=47, mqd=87),
    Allowed("Produce", "11-13", "responses[].partition_responses[].error_code", VERIFIED_LATER, kafka=120, mqd=21),
    Allowed("Produce", "11-13", "responses[].partition_responses[].error_code", VERIFIED_LATER, kafka=120, mqd=45),
    Allowed("Produce", "11-13", "responses[].partition_responses[].error_code", VERIFIED_LATER, kafka=120, mqd=87),
    Allowed("AddPartitionsToTxn", "0-3", "results_by_topic_v3_and_below", HASHED, order=True),
    Allowed("AddPartitionsToTxn", "0-3", "results_by_topic_v3_and_below[].results_by_partition", HASHED, order=True),
    Allowed("AddPartitionsToTxn", "4-5", "results_by_transaction[].topic_results", HASHED, order=True),
    Allowed(
        "AddPartitionsToTxn", "4-5", "results_by_transaction[].topic_results[].results_by_partition", HASHED, order=True
    ),
    Allowed(
        "AddPartitionsToTxn",
        "4-5",
        "outcome",
        "Kafka never responds to a request without transactions",
        "waits",
        "answered",
    ),
    Allowed("DescribeTransactions", "0", "transaction_states[].transaction_state", EMPTY_ADD, "Ongoing", "Empty"),
    Allowed(
        "DescribeTransactions", "0", "transaction_states[].transaction_state", EMPTY_ADD, "Ongoing", "CompleteCommit"
    ),
    Allowed(
        "DescribeTransactions", "0", "transaction_states[].transaction_state", EMPTY_ADD, "Ongoing", "CompleteAbort"
    ),
    Allowed("DescribeTransactions", "0", "transaction_states[].transaction_start_time_ms", EMPTY_ADD, "<now>", -1),
    Allowed("DescribeTransactions", "0", "transaction_states[].topics", HASHED, order=True),
    Allowed("DescribeProducers", "0", "topics[].partitions[].active_producers[].last_timestamp", WRITTEN, mqd="<now>"),
    Allowed("DescribeTransactions", "0", "transaction_states[].topics[].partitions", HASHED, order=True),
    Allowed("AddPartitionsToTxn", "0-3", "results_by_topic_v3_and_below[] only mqd", NO_PARTITIONS),
    Allowed("AddPartitionsToTxn", "4-5", "results_by_transaction[].topic_results[] only mqd", NO_PARTITIONS),
    Allowed("CreatePartitions", "0-3", "results", HASHED, order=True),
    Allowed("CreateTopics", "2-7", "topics", HASHED, order=True),
    Allowed("DeleteTopics", "1-6", "responses", HASHED, order=True),
    Allowed("DeleteRecords", "0-2", "topics", HASHED, order=True),
    Allowed("DeleteRecords", "0-2", "topics[].partitions", HASHED, order=True),
    Allowed("DeleteGroups", "0-2", "results", HASHED, order=True),
    Allowed("OffsetDelete", "0", "topics", HASHED, order=True),
    Allowed("OffsetDelete", "0", "topics[].partitions", HASHED, order=True),
    Allowed("ConsumerGroupDescribe", "0-1", "groups", HASHED, order=True),
    Allowed("ShareGroupDescribe", "1", "groups", HASHED, order=True),
    Allowed("StreamsGroupDescribe", "0", "groups", HASHED, order=True),
    *(
        Allowed("ShareGroupDescribe", "1", "groups[].group_epoch", ALTERED, kafka=epoch, mqd=epoch + count)
        for epoch in (0, 3)
        for count in (1, 2, 3)
    ),
    Allowed("ShareGroupDescribe", "1", "groups[].error_code", NOT_ALTERED, kafka=0, mqd=69),
    Allowed("AlterShareGroupOffsets", "0", "responses[].partitions[].error_code", NEGATIVE, kafka=0, mqd=42),
    Allowed("ShareGroupDescribe", "1", "groups[].members[].subscribed_topic_names", HASHED, order=True),
    Allowed("ShareGroupHeartbeat", "1", "assignment.topic_partitions", HASHED, order=True),
    Allowed("ShareGroupDescribe", "1", "groups[].members[].assignment.topic_partitions", HASHED, order=True),
    Allowed("ShareFetch", "1-2", "responses", HASHED, order=True),
    Allowed("ShareFetch", "1-2", "responses[].partitions", HASHED, order=True),
    Allowed("ShareAcknowledge", "1-2", "responses", HASHED, order=True),
    Allowed("ShareAcknowledge", "1-2", "responses[].partitions", HASHED, order=True),
    Allowed("DescribeShareGroupOffsets", "0-1", "groups[].topics", HASHED, order=True),
    Allowed("DescribeShareGroupOffsets", "0-1", "groups[].topics[].partitions", HASHED, order=True),
    Allowed("AlterShareGroupOffsets", "0", "responses", HASHED, order=True),
    Allowed("AlterShareGroupOffsets", "0", "responses[].partitions", REFUSED_LAST, order=True),
    Allowed("DeleteShareGroupOffsets", "0", "responses", HASHED, order=True),
    *(Allowed("ShareFetch", "1-2", "error_code", NO_GROUP, kafka=kafka, mqd=42) for kafka in (0, 122)),
    *(Allowed("ShareAcknowledge", "1-2", "error_code", NO_GROUP, kafka=kafka, mqd=42) for kafka in (122, 123)),
    Allowed("ShareFetch", "1-2", "responses[].partitions[].acknowledge_error_code", NEVER_READ, kafka=3, mqd=121),
    Allowed("ShareAcknowledge", "1-2", "responses[].partitions[].error_code", NEVER_READ, kafka=3, mqd=121),
    Allowed("DescribeShareGroupOffsets", "0-1", "groups[].topics[].partitions[].start_offset", SHARE_START, kafka=-1),
    Allowed("DescribeShareGroupOffsets", "0-1", "groups[].topics[].partitions[].start_offset", SHARE_START, kafka=0),
    Allowed("DescribeShareGroupOffsets", "1", "groups[].topics[].partitions[].lag", SHARE_START, kafka=-1),
    Allowed(
        "DescribeShareGroupOffsets",
        "0-1",
        "outcome",
        "Kafka never responds for a topic without partitions",
        kafka="waits",
        mqd="answered",
    ),
    Allowed("DescribeConfigs", "1-4", "results[].configs", HASHED, order=True),
    Allowed("ListConfigResources", "0-1", "config_resources", HASHED, order=True),
    Allowed("DescribeGroups", "0-6", "groups", HASHED, order=True),
    Allowed("DescribeGroups", "0-6", "groups[].members", HASHED, order=True),
    Allowed("JoinGroup", "2-9", "members", HASHED, order=True),
    Allowed("DescribeLogDirs", "1-4", "results[].topics", HASHED, order=True),
    Allowed("DescribeLogDirs", "1-4", "results[].topics[].partitions", HASHED, order=True),
    Allowed("DescribeLogDirs", "1-4", "results[].log_dir", "each broker has its own directory on the same host"),
    Allowed(
        "DescribeLogDirs",
        "1-4",
        "results[].topics[].partitions[].partition_size",
        "internal topics hold each broker's own records",
    ),
    Allowed("DescribeLogDirs", "4", "results[].usable_bytes", "measured at different moments"),
    *(
        Allowed(api, versions, f"{path} only mqd", reason, mqd=repr(name))
        for api, versions, path in (
            ("CreateTopics", "5-7", "topics[].configs[]"),
            ("DescribeConfigs", "1-4", "results[].configs[]"),
        )
        for name, reason in OWN_PROPERTIES.items()
    ),
    Allowed("CreateTopics", "5-7", "topics[].configs[].config_source", ELR, kafka=3, mqd=5),
    Allowed("DescribeConfigs", "1-4", "results[].configs[].config_source", ELR, kafka=3, mqd=5),
    Allowed("DescribeConfigs", "1-4", "results[].configs[].config_source", HOURS, kafka=5, mqd=4),
    Allowed("DescribeConfigs", "1-4", "results[].configs[].synonyms[] only mqd", HOURS),
    Allowed("DescribeConfigs", "1-4", "results[].configs[].synonyms[].source", ELR, kafka=3, mqd=5),
    Allowed("DescribeConfigs", "1-4", "results[].configs[].value", OF_NO_TOPIC, kafka="1", mqd="-1"),
    Allowed("DescribeConfigs", "1-4", "results[].configs[].synonyms[].value", OF_NO_TOPIC, kafka="1", mqd="-1"),
    Allowed("DescribeConfigs", "1-4", "results[].configs[] only Kafka", ELR, kafka="'min.insync.replicas'"),
    Allowed("DescribeConfigs", "1-4", "results[].configs[].synonyms[] only Kafka", ELR, kafka="'min.insync.replicas'"),
    Allowed(
        "DescribeConfigs",
        "1-4",
        "results[].configs[].synonyms[] only Kafka",
        NO_TIERS,
        kafka="'log.local.retention.ms'",
    ),
    Allowed(
        "DescribeConfigs",
        "1-4",
        "results[].configs[].synonyms[] only Kafka",
        NO_TIERS,
        kafka="'log.local.retention.bytes'",
    ),
    Allowed("AlterConfigs", "0-2", "responses[].error_code", ANY_NAME, kafka=0, mqd=40, said="property"),
    Allowed("IncrementalAlterConfigs", "0-1", "responses[].error_code", ANY_NAME, kafka=0, mqd=40, said="property"),
    Allowed(
        "IncrementalAlterConfigs",
        "0-1",
        "responses[].error_code",
        "if several operations are wrong, Kafka names the first in its hash table, mqd the unknown one",
        kafka=40,
        mqd=42,
    ),
    Allowed("AlterConfigs", "0-2", "responses[].error_code", ELR, kafka=40, mqd=0, said="min.insync.replicas"),
    Allowed(
        "IncrementalAlterConfigs", "0-1", "responses[].error_code", ELR, kafka=40, mqd=0, said="min.insync.replicas"
    ),
    Allowed("AlterClientQuotas", "0-1", "entries[].entity", HASHED, order=True),
    Allowed("DescribeClientQuotas", "0-1", "entries[].values", HASHED, order=True),
    Allowed(
        "ElectLeaders",
        "0-2",
        "replica_election_results[] only Kafka",
        "when all partitions are requested, Kafka lists every topic, but only those partitions that got a new leader",
    ),
    *(
        Allowed("DescribeQuorum", "0-2", f"topics[].partitions[].{field}", OWN_LOG)
        for field in ("leader_epoch", "high_watermark", "current_voters[].log_end_offset")
    ),
    Allowed(
        "DescribeQuorum",
        "2",
        "topics[].partitions[].current_voters[].replica_directory_id",
        "the controller of a single host has no directory id",
        mqd=bytes(16),
    ),
    Allowed("DescribeQuorum", "2", "nodes[].listeners[].port", "Kafka's controllers have listeners of their own"),
    Allowed("InitProducerId", "3", "error_code", FENCED_FIRST, kafka=0, mqd=47),
    Allowed("InitProducerId", "4-5", "error_code", FENCED_FIRST, kafka=0, mqd=90),
    Allowed("InitProducerId", "0-5", "producer_epoch", TWO_EPOCHS),
    Allowed("DescribeTransactions", "0", "transaction_states[].producer_epoch", TWO_EPOCHS),
    Allowed("ListGroups", "0-5", "groups", HASHED, order=True),
    Allowed("ListTransactions", "0-2", "transaction_states", HASHED, order=True),
    *(Allowed("ApiVersions", "0-4", "api_keys[] only Kafka", BETWEEN_BROKERS, kafka=str(key)) for key in range(83, 88)),
    Allowed("ApiVersions", "3-4", "finalized_features[] only mqd", "mqd.version is mqd's own"),
    Allowed("ApiVersions", "3-4", "finalized_features_epoch", "it is a position in each broker's own metadata log"),
    Allowed(
        "ApiVersions",
        "4",
        "supported_features[] only mqd",
        "only in version 3 does Kafka hide features whose minimum is 0; it has no mqd.version",
    ),
    Allowed(
        "ApiVersions",
        "3-4",
        "supported_features[].min_version",
        "mqd's lowest metadata.version is the first in which KRaft has all that mqd needs",
    ),
    Allowed("ConsumerGroupHeartbeat", "1", "assignment.topic_partitions[] only mqd", RESOLVED),
    Allowed(
        "ConsumerGroupHeartbeat",
        "0-1",
        "heartbeat_interval_ms",
        "group.consumer.heartbeat.interval.quick.ms: members of small groups learn of a rebalance sooner",
        kafka=5000,
        mqd=1000,
    ),
    Allowed(
        "ShareGroupHeartbeat",
        "1",
        "heartbeat_interval_ms",
        "a member whose partitions are being initialized learns sooner that they are initialized",
        kafka=5000,
        mqd=1000,
    ),
)
OPEN: tuple[Allowed, ...] = ()
