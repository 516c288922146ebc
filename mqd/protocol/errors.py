"""ProtocolError, and the table of Kafka's error codes.

The table is taken from the public protocol guide (Kafka 4.2): code, name, whether the client may
retry, and the meaning. Never return UNKNOWN_SERVER_ERROR where a retriable code exists: some
clients have bugs that then duplicate records. ErrorCode and the codes of the C core are generated
from the table: `python -m mqd.protocol.generate`.
"""

from __future__ import annotations

from mqd.protocol.error_codes import ErrorCode as ErrorCode


class ProtocolError(Exception):
    """An invalid frame. When decoding, the peer is at fault: its connection is closed, and the
    broker continues.

    `message` names the request or response and its version, `field` the path in it
    ("topics[].name"), `position` the byte counted from the frame's start (None when encoding).
    """

    def __init__(self, problem: str, message: str = "", field: str = "", position: int | None = None) -> None:
        self.problem, self.message, self.field, self.position = problem, message, field, position
        location = ", ".join(
            part
            for part in (message, f"field {field}" if field else "", f"byte {position}" if position is not None else "")
            if part
        )
        super().__init__(f"{location}: {problem}" if location else problem)


class TrailingBytes(ProtocolError):
    """Bytes after a complete message: `position` is where the message ends."""


_TABLE = """
-1  UNKNOWN_SERVER_ERROR                    no   an unexpected error occurred in the server
0   NONE                                    no
1   OFFSET_OUT_OF_RANGE                     no   the offset is outside the partition's log
2   CORRUPT_MESSAGE                         yes  the records fail their checksum or are malformed
3   UNKNOWN_TOPIC_OR_PARTITION              yes  this server does not host the topic or partition
4   INVALID_FETCH_SIZE                      no   the fetch size is invalid
5   LEADER_NOT_AVAILABLE                    yes  the partition has no leader at the moment
6   NOT_LEADER_OR_FOLLOWER                  yes  this broker does not lead (or does not replicate) the partition
7   REQUEST_TIMED_OUT                       yes  the request timed out
8   BROKER_NOT_AVAILABLE                    no   the broker is not available
9   REPLICA_NOT_AVAILABLE                   yes  the replica is not available for this partition
10  MESSAGE_TOO_LARGE                       no   the record batch is larger than the server accepts
11  STALE_CONTROLLER_EPOCH                  no   the controller has moved to another broker
12  OFFSET_METADATA_TOO_LARGE               no   the metadata of the offset commit is too large
13  NETWORK_EXCEPTION                       yes  the server disconnected before it responded
14  COORDINATOR_LOAD_IN_PROGRESS            yes  the coordinator is loading its state
15  COORDINATOR_NOT_AVAILABLE               yes  the coordinator is not available
16  NOT_COORDINATOR                         yes  this broker is not the coordinator
17  INVALID_TOPIC_EXCEPTION                 no   the topic's name or the operation on it is invalid
18  RECORD_LIST_TOO_LARGE                   no   the record batch is larger than a segment
19  NOT_ENOUGH_REPLICAS                     yes  fewer replicas are in sync than required; nothing was written
20  NOT_ENOUGH_REPLICAS_AFTER_APPEND        yes  written, but to fewer in-sync replicas than required
21  INVALID_REQUIRED_ACKS                   no   required acks is neither 0, 1 nor -1
22  ILLEGAL_GENERATION                      no   the group generation is not valid
23  INCONSISTENT_GROUP_PROTOCOL             no   the member's protocols do not fit the group's
24  INVALID_GROUP_ID                        no   the group id is invalid
25  UNKNOWN_MEMBER_ID                       no   the coordinator does not know this member
26  INVALID_SESSION_TIMEOUT                 no   the session timeout is outside the allowed range
27  REBALANCE_IN_PROGRESS                   no   the group is rebalancing: rejoin
28  INVALID_COMMIT_OFFSET_SIZE              no   the offset commit does not fit into a record
29  TOPIC_AUTHORIZATION_FAILED              no   not authorized for the topic
30  GROUP_AUTHORIZATION_FAILED              no   not authorized for the group
31  CLUSTER_AUTHORIZATION_FAILED            no   not authorized for the cluster
32  INVALID_TIMESTAMP                       no   the record's timestamp is out of the accepted range
33  UNSUPPORTED_SASL_MECHANISM              no   the broker does not offer this SASL mechanism
34  ILLEGAL_SASL_STATE                      no   the request does not fit the SASL state
35  UNSUPPORTED_VERSION                     no   the version of the API is not supported
36  TOPIC_ALREADY_EXISTS                    no   a topic of this name exists
37  INVALID_PARTITIONS                      no   the number of partitions is invalid
38  INVALID_REPLICATION_FACTOR              no   the replication factor is below 1 or above the number of brokers
39  INVALID_REPLICA_ASSIGNMENT              no   the replica assignment is invalid
40  INVALID_CONFIG                          no   the configuration is invalid
41  NOT_CONTROLLER                          yes  this broker is not the controller
42  INVALID_REQUEST                         no   the request is malformed or contradicts itself
43  UNSUPPORTED_FOR_MESSAGE_FORMAT          no   the message format on the broker does not support this
44  POLICY_VIOLATION                        no   a configured policy refuses the request
45  OUT_OF_ORDER_SEQUENCE_NUMBER            no   the producer's sequence number is out of order
46  DUPLICATE_SEQUENCE_NUMBER               no   the producer's sequence number was seen before
47  INVALID_PRODUCER_EPOCH                  no   the producer's epoch is old
48  INVALID_TXN_STATE                       no   the transaction's state does not allow this
49  INVALID_PRODUCER_ID_MAPPING             no   the producer id does not belong to this transactional id
50  INVALID_TRANSACTION_TIMEOUT             no   the transaction timeout is above transaction.max.timeout.ms
51  CONCURRENT_TRANSACTIONS                 yes  another operation on the same transaction is running
52  TRANSACTION_COORDINATOR_FENCED          no   the transaction coordinator has been replaced
53  TRANSACTIONAL_ID_AUTHORIZATION_FAILED   no   not authorized for the transactional id
54  SECURITY_DISABLED                       no   security features are disabled
55  OPERATION_NOT_ATTEMPTED                 no   not attempted, because another part of the request failed
56  KAFKA_STORAGE_ERROR                     yes  the log directory failed or is full
57  LOG_DIR_NOT_FOUND                       no   the log directory is not configured
58  SASL_AUTHENTICATION_FAILED              no   SASL authentication failed
59  UNKNOWN_PRODUCER_ID                     no   the partition does not know this producer id
60  REASSIGNMENT_IN_PROGRESS                no   the partitions are being reassigned
61  DELEGATION_TOKEN_AUTH_DISABLED          no   delegation tokens are not enabled
62  DELEGATION_TOKEN_NOT_FOUND              no   no such delegation token
63  DELEGATION_TOKEN_OWNER_MISMATCH         no   the principal is neither owner nor renewer of the token
64  DELEGATION_TOKEN_REQUEST_NOT_ALLOWED    no   delegation tokens need a secure channel
65  DELEGATION_TOKEN_AUTHORIZATION_FAILED   no   not authorized for the delegation token
66  DELEGATION_TOKEN_EXPIRED                no   the delegation token has expired
67  INVALID_PRINCIPAL_TYPE                  no   the principal type is not supported
68  NON_EMPTY_GROUP                         no   the group has members
69  GROUP_ID_NOT_FOUND                      no   no such group
70  FETCH_SESSION_ID_NOT_FOUND              yes  no such fetch session
71  INVALID_FETCH_SESSION_EPOCH             yes  the epoch of the fetch session is not the expected one
72  LISTENER_NOT_FOUND                      yes  the leader has no listener of the same name
73  TOPIC_DELETION_DISABLED                 no   topic deletion is disabled
74  FENCED_LEADER_EPOCH                     yes  the request's leader epoch is older than the broker's
75  UNKNOWN_LEADER_EPOCH                    yes  the request's leader epoch is newer than the broker's
76  UNSUPPORTED_COMPRESSION_TYPE            no   the compression type cannot be used with this version
77  STALE_BROKER_EPOCH                      no   the broker's epoch is old
78  OFFSET_NOT_AVAILABLE                    yes  the new leader's high watermark has not caught up yet
79  MEMBER_ID_REQUIRED                      no   join again with the member id of this response
80  PREFERRED_LEADER_NOT_AVAILABLE          yes  the preferred leader is not available
81  GROUP_MAX_SIZE_REACHED                  no   the group is full
82  FENCED_INSTANCE_ID                      no   another member has taken this group.instance.id
83  ELIGIBLE_LEADERS_NOT_AVAILABLE          yes  no replica may become leader at the moment
84  ELECTION_NOT_NEEDED                     yes  the leader is already the requested one
85  NO_REASSIGNMENT_IN_PROGRESS             no   no reassignment is in progress
86  GROUP_SUBSCRIBED_TO_TOPIC               no   the group is subscribed to the topic
87  INVALID_RECORD                          no   a record breaks a rule of the topic; the batch is refused
88  UNSTABLE_OFFSET_COMMIT                  yes  offsets of an open transaction are pending
89  THROTTLING_QUOTA_EXCEEDED               yes  a quota is exceeded
90  PRODUCER_FENCED                         no   a newer producer uses the same transactional id
91  RESOURCE_NOT_FOUND                      no   the resource named in the request does not exist
92  DUPLICATE_RESOURCE                      no   the request names the same thing twice
93  UNACCEPTABLE_CREDENTIAL                 no   the credential breaks the rules
94  INCONSISTENT_VOTER_SET                  no   the voters in the request differ from the configured ones
95  INVALID_UPDATE_VERSION                  no   the feature version cannot be set
96  FEATURE_UPDATE_FAILED                   no   the features could not be updated
97  PRINCIPAL_DESERIALIZATION_FAILURE       no   the forwarded principal cannot be read
98  SNAPSHOT_NOT_FOUND                      no   no such snapshot
99  POSITION_OUT_OF_RANGE                   no   the position is outside the snapshot
100 UNKNOWN_TOPIC_ID                        yes  this server does not host a topic of this id
101 DUPLICATE_BROKER_REGISTRATION           no   the broker id is in use
102 BROKER_ID_NOT_REGISTERED                no   the broker id is not registered
103 INCONSISTENT_TOPIC_ID                   yes  the topic id of the log is not the one of the request
104 INCONSISTENT_CLUSTER_ID                 no   the cluster id is not this cluster's
105 TRANSACTIONAL_ID_NOT_FOUND              no   no such transactional id
106 FETCH_SESSION_TOPIC_ID_ERROR            yes  the fetch session found inconsistent topic ids
107 INELIGIBLE_REPLICA                      no   the replica may not join the in-sync set
108 NEW_LEADER_ELECTED                      no   the change made another replica leader: fetch the metadata again
109 OFFSET_MOVED_TO_TIERED_STORAGE          no   the offset is in tiered storage
110 FENCED_MEMBER_EPOCH                     no   the member's epoch is old: rejoin
111 UNRELEASED_INSTANCE_ID                  no   another member still holds this group.instance.id
112 UNSUPPORTED_ASSIGNOR                    no   the group does not support the assignor
113 STALE_MEMBER_EPOCH                      no   the member's epoch is old: wait for the next heartbeat
114 MISMATCHED_ENDPOINT_TYPE                no   the request went to the wrong kind of endpoint
115 UNSUPPORTED_ENDPOINT_TYPE               no   this kind of endpoint is not supported
116 UNKNOWN_CONTROLLER_ID                   no   no such controller
117 UNKNOWN_SUBSCRIPTION_ID                 no   the telemetry subscription is unknown or old
118 TELEMETRY_TOO_LARGE                     no   the telemetry push is larger than allowed
119 INVALID_REGISTRATION                    no   the controller finds the broker's registration invalid
120 TRANSACTION_ABORTABLE                   no   the transaction must be aborted; then continue
121 INVALID_RECORD_STATE                    no   the record's state does not allow this acknowledgement
122 SHARE_SESSION_NOT_FOUND                 yes  no such share session
123 INVALID_SHARE_SESSION_EPOCH             yes  the epoch of the share session is not the expected one
124 FENCED_STATE_EPOCH                      no   the share partition's state epoch is old
125 INVALID_VOTER_KEY                       no   the voter's key is not that of the receiving replica
126 DUPLICATE_VOTER                         no   the voter is in the set already
127 VOTER_NOT_FOUND                         no   the voter is not in the set
128 INVALID_REGULAR_EXPRESSION              no   the regular expression is invalid
129 REBOOTSTRAP_REQUIRED                    no   the client's metadata is stale: bootstrap again
130 STREAMS_INVALID_TOPOLOGY                no   the topology is invalid
131 STREAMS_INVALID_TOPOLOGY_EPOCH          no   the topology's epoch is invalid
132 STREAMS_TOPOLOGY_FENCED                 no   the topology's epoch is old
133 SHARE_SESSION_LIMIT_REACHED             yes  the broker has reached its limit of share sessions
"""


class KafkaError:
    """One row of the table."""

    __slots__ = ("code", "message", "name", "retriable")

    def __init__(self, code: int, name: str, retriable: bool, message: str) -> None:
        self.code, self.name, self.retriable, self.message = code, name, retriable, message

    def __repr__(self) -> str:
        return f"{self.name}({self.code})"


def _read_table() -> dict[int, KafkaError]:
    rows = (line.split(None, 3) for line in _TABLE.strip().splitlines())
    return {
        int(row[0]): KafkaError(int(row[0]), row[1], row[2] == "yes", row[3] if len(row) > 3 else "no error")
        for row in rows
    }


ERRORS: dict[int, KafkaError] = _read_table()


def error_name(code: int) -> str:
    """`UNKNOWN_TOPIC_OR_PARTITION` for 3; `ERROR_999` for a code the table lacks (a newer
    broker's).
    """
    return ERRORS[code].name if code in ERRORS else f"ERROR_{code}"


def is_retriable(code: int) -> bool:
    return code in ERRORS and ERRORS[code].retriable


def error_message(code: int) -> str:
    return ERRORS[code].message if code in ERRORS else "an error code newer than this table"
