"""The tables of all configuration properties: one row per property, for brokers and for topics.

Kafka's names and defaults are used verbatim wherever Kafka has the property (Apache Kafka
documentation, sections 3.1 and 3.2); mqd's own carry "(mqd)" in their text. The rows are data:
parsing, merging and cross-checks are in mqd.base.config, the page docs/configuration.md is
generated from here. It is one long table in one file.
"""

from typing import Any

import msgspec

from mqd.base import kafka_names

INT_MAX = 2**31 - 1
LONG_MAX = 2**63 - 1


class Property(msgspec.Struct, frozen=True):
    """`default` is text, as in a file; None means: not set (`doc` says what happens then). Bounds
    are inclusive.
    """

    name: str
    kind: str  # int | long | double | bool | string | list | enum
    default: str | None
    doc: str
    minimum: int | float | None = None
    maximum: int | float | None = None
    choices: tuple[str, ...] = ()  # of an enum; of each member of a list
    may_be_empty: bool = False  # of a list with choices
    pattern: str = ""  # regular expression for each member of a list; `doc` explains it
    # values that Kafka supports and mqd does not (yet): value -> reason
    refused: dict[str, str] = {}
    dynamic: bool = False  # may be changed while the broker runs (IncrementalAlterConfigs)
    # for a topic's property: the broker's property that supplies the default
    broker_name: str | None = None
    sensitive: bool = False  # never shown
    per_listener: bool = False  # listener.name.NAME.PROPERTY overrides it for one listener
    ignored: bool = False  # accepted for compatibility with existing files; has no effect


_CLEANUP_POLICIES = ("delete", "compact")
_COMPRESSION_TYPES = ("uncompressed", "zstd", "lz4", "snappy", "gzip", "producer")
_TIMESTAMP_TYPES = ("CreateTime", "LogAppendTime")


def _compression_levels() -> list[Property]:
    doc = "Of what the broker compresses itself (compression.type)"
    return [
        Property(
            "compression.gzip.level",
            "int",
            "-1",
            f"{doc}: 1 to 9, -1 = 6.",
            minimum=-1,
            maximum=9,
            dynamic=True,
            refused={"0": "level 0 does not compress; that is compression.type=uncompressed"},
        ),
        Property("compression.lz4.level", "int", "9", f"{doc}: 1 to 17.", minimum=1, maximum=17, dynamic=True),
        Property("compression.zstd.level", "int", "3", f"{doc}.", minimum=-131072, maximum=22, dynamic=True),
    ]


def _listeners() -> list[Property]:
    return [
        Property("node.id", "int", "1", "The id of this broker.", minimum=0),
        Property(
            "listeners",
            "list",
            "PLAINTEXT://127.0.0.1:9092",
            "Where the broker listens: NAME://HOST:PORT, separated by commas. Without a host: the"
            " loopback address, or every address if listeners.insecure.allow=true. Port 0: any free port.",
        ),
        Property(
            "advertised.listeners",
            "list",
            None,
            "The addresses that clients are told to connect to, by listener name. Not set: the address"
            " that the client itself used.",
        ),
        Property(
            "listener.security.protocol.map",
            "list",
            "PLAINTEXT:PLAINTEXT",
            "Listener names and their security protocols, NAME:PROTOCOL: PLAINTEXT, SSL, SASL_PLAINTEXT,"
            " SASL_SSL. A listener whose name is a protocol needs no entry.",
        ),
        Property(
            "controller.listener.names",
            "list",
            None,
            "Names of listeners that are not for clients. listeners and advertised.listeners may contain"
            " them, as files for Kafka do; they are ignored. For where controllers listen, see"
            " controller.listener.",
        ),
        Property(
            "listeners.insecure.allow",
            "bool",
            "false",
            "(mqd) Allow listeners without authentication on addresses that other hosts can reach. Any"
            " client that reaches them can read and write everything.",
        ),
        Property(
            "security.inter.broker.protocol",
            "enum",
            "PLAINTEXT",
            "Accepted. Hosts authenticate each other by cluster.key.file, and encrypt by cluster.tls.",
            choices=("PLAINTEXT",),
            refused={
                name: "hosts prove who they are by cluster.key.file; cluster.tls=required encrypts what they send"
                for name in ("SSL", "SASL_PLAINTEXT", "SASL_SSL")
            },
            ignored=True,
        ),
        Property(
            "config.providers",
            "list",
            "",
            "Names of what resolves references to values that are kept elsewhere, each with"
            " config.providers.NAME.class (Kafka's FileConfigProvider, EnvVarConfigProvider,"
            " DirectoryConfigProvider) and its config.providers.NAME.param. settings. Empty: ${file:PATH:KEY},"
            " ${env:NAME} and ${dir:PATH:FILE} are resolved.",
        ),
        Property("broker.rack", "string", None, "The rack (availability zone) of this broker, as clients see it."),
        Property(
            "max.connections",
            "int",
            "10000",
            "Connections that the broker accepts; further ones are closed at once. For one listener"
            " (listener.name.NAME.max.connections): its own share of them.",
            minimum=1,
            maximum=1_000_000,
            per_listener=True,
        ),
        Property(
            "max.connections.per.ip",
            "int",
            "2147483647",
            "Connections that one address may have; further ones are closed at once.",
            minimum=0,
            dynamic=True,
        ),
        Property(
            "max.connections.per.ip.overrides",
            "string",
            "",
            "For these addresses instead of max.connections.per.ip: ADDRESS:NUMBER, separated by commas. Host names are"
            " not resolved.",
            dynamic=True,
        ),
        Property(
            "max.connection.creation.rate",
            "int",
            "2147483647",
            "Connections per second that the broker accepts, after a burst of quota.window.num - 1 windows; further ones"
            " wait. For one listener (listener.name.NAME.max.connection.creation.rate): that it accepts. Of one address:"
            " quotas of the entity type ips (kafka-configs, mqd quota).",
            minimum=1,
            dynamic=True,
            per_listener=True,
        ),
        Property(
            "connections.max.idle.ms",
            "long",
            "600000",
            "A connection is closed after this time without a request. -1: never.",
            minimum=-1,
            maximum=INT_MAX,
        ),
        Property(
            "connection.inflight.max",
            "int",
            "256",
            "(mqd) Unanswered requests of one connection; above that the broker does not read from it.",
            minimum=1,
            maximum=65536,
        ),
        Property(
            "socket.request.max.bytes",
            "int",
            "104857600",
            "The largest request; a larger one ends its connection. No topic's max.message.bytes may exceed it.",
            minimum=65536,
            maximum=1 << 30,
        ),
        Property(
            "sasl.server.max.receive.size",
            "int",
            "524288",
            "The largest token that a client may send before it has authenticated.",
            minimum=1024,
            maximum=1 << 20,
        ),
        Property(
            "large.request.memory.bytes",
            "long",
            "268435456",
            "(mqd) Shared memory of one worker for requests larger than half of receive.arena.bytes. It"
            " is allocated as their bytes arrive, and released afterwards. Requests that find it in use"
            " wait unread. At least socket.request.max.bytes; unless set, it grows with that.",
            minimum=1 << 20,
            maximum=1 << 34,
        ),
        Property(
            "large.request.timeout.ms",
            "int",
            "30000",
            "(mqd) A client that has begun a large request and sends nothing for this time is"
            " disconnected; after 2 seconds if others wait for the memory, or if its request is not"
            " complete by then.",
            minimum=1000,
            maximum=INT_MAX,
        ),
        Property(
            "queued.max.request.bytes",
            "long",
            "67108864",
            "Memory of one worker for requests and connections in addition to its receive arena; above"
            " that it stops reading from them.",
            minimum=1 << 20,
        ),
        Property(
            "local.attachments.max",
            "int",
            "1024",
            "(mqd) Clients on this host that the broker serves through shared memory; further ones"
            " connect by TCP. 0: none, and no client socket.",
            minimum=0,
            maximum=65536,
        ),
        Property(
            "local.memory.max.bytes",
            "long",
            "1073741824",
            "(mqd) Shared memory of all these clients together (a client requests 16 MiB by default)."
            " Only what is used is allocated.",
            minimum=1 << 20,
            maximum=1 << 40,
        ),
        Property(
            "local.socket.permissions",
            "enum",
            "0600",
            "(mqd) File permissions of the client socket, run/client.sock in the data directory. A"
            " process that may connect to it can read and write everything, like a client that reaches a"
            " listener without authentication.",
            choices=("0600", "0660", "0666"),
        ),
        Property(
            "admin.port",
            "int",
            "0",
            "(mqd) Port of the metrics page on the loopback address. 0: the clients' port + 552, or a"
            " free one if that is in use (mqd status shows it); -1: no metrics page.",
            minimum=-1,
            maximum=65535,
        ),
        Property(
            "metrics.listener",
            "string",
            "",
            "(mqd) Where the metrics page is served, instead of admin.port: http://HOST:PORT, or https://HOST:PORT with"
            " the ssl. properties (listener.name.metrics.ssl. for its own). On addresses that other hosts can reach it"
            " needs metrics.token.file, and https:// or listeners.insecure.allow=true. Port 0: any free port.",
        ),
        Property(
            "metrics.token.file",
            "string",
            "",
            "(mqd) File with the token that a scrape must carry (Authorization: Bearer), readable by the broker's user"
            " alone. A changed file is read again. Empty: everything that reaches the page can read it.",
        ),
    ]


def _authentication() -> list[Property]:
    return [
        Property(
            "sasl.enabled.mechanisms",
            "list",
            "SCRAM-SHA-512,SCRAM-SHA-256",
            "How clients of SASL listeners may authenticate. PLAIN takes the passwords of SCRAM users, and shows them to"
            " anything that can read the connection: use it with SASL_SSL.",
            choices=("SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN", "OAUTHBEARER"),
            refused={"GSSAPI": "Kerberos is not available"},
            per_listener=True,
        ),
        Property(
            "connections.max.reauth.ms",
            "long",
            "0",
            "A client must authenticate again within this time, or its connection is closed (KIP-368). 0:"
            " once is enough, except for tokens that expire.",
            minimum=0,
            per_listener=True,
        ),
        Property(
            "connection.failed.authentication.delay.ms",
            "int",
            "100",
            "Delay of the answer to a failed authentication. It doubles with each failure of the same"
            " address and user, up to 5 s.",
            minimum=0,
            maximum=5000,
        ),
        Property(
            "delegation.token.secret.key",
            "string",
            None,
            "The secret from which the passwords of delegation tokens (KIP-48) are computed: the same on all"
            " hosts. Not set: there are no delegation tokens. With another secret all tokens are void.",
            sensitive=True,
        ),
        Property(
            "delegation.token.max.lifetime.ms",
            "long",
            "604800000",
            "How long a delegation token can live, however often it is renewed.",
            minimum=1,
        ),
        Property(
            "delegation.token.expiry.time.ms",
            "long",
            "86400000",
            "How long a delegation token lives unless it is renewed.",
            minimum=1,
        ),
        Property(
            "delegation.token.expiry.check.interval.ms",
            "long",
            "3600000",
            "How often expired delegation tokens are removed from the metadata. They are void before.",
            minimum=1,
        ),
        Property(
            "sasl.oauthbearer.jwks.endpoint.url",
            "string",
            None,
            "OAUTHBEARER: where the issuer publishes its keys, https:// or file://.",
            per_listener=True,
        ),
        Property(
            "sasl.oauthbearer.expected.issuer",
            "string",
            None,
            "OAUTHBEARER: the only issuer (iss) whose tokens are accepted. Required.",
            per_listener=True,
        ),
        Property(
            "sasl.oauthbearer.expected.audience",
            "list",
            None,
            "OAUTHBEARER: tokens must be for one of these audiences (aud). Required.",
            per_listener=True,
        ),
        Property(
            "sasl.oauthbearer.sub.claim.name",
            "string",
            "sub",
            "OAUTHBEARER: the claim that names the user.",
            per_listener=True,
        ),
        Property(
            "sasl.oauthbearer.clock.skew.seconds",
            "int",
            "30",
            "OAUTHBEARER: how much the issuer's clock may differ.",
            minimum=0,
            maximum=3600,
            per_listener=True,
        ),
        Property(
            "sasl.oauthbearer.jwks.endpoint.refresh.ms",
            "long",
            "3600000",
            "OAUTHBEARER: how often the issuer's keys are read; also when a token names an unknown key.",
            minimum=1000,
            maximum=INT_MAX,
            per_listener=True,
        ),
    ]


def _cluster() -> list[Property]:
    return [
        Property(
            "cluster.seeds",
            "list",
            None,
            "(mqd) Controller listeners of some hosts, HOST:PORT separated by commas; the same on every"
            " host. On empty directories the hosts named here form a cluster once all of them are up, and"
            " are its first voters; a later host that names them joins. Not set: this host is a cluster of"
            " its own.",
        ),
        Property(
            "controller.listener",
            "string",
            None,
            "(mqd) HOST:PORT where other hosts reach this one's controller (TCP, and UDP for gossip). Not set: with"
            " cluster.seeds or inter.broker.listener the address of the first listener, its port + 2; else no other"
            " host can reach it.",
        ),
        Property(
            "advertised.controller.listener",
            "string",
            None,
            "(mqd) The address that other hosts use instead. Required if controller.listener is on every address.",
        ),
        Property(
            "inter.broker.listener",
            "string",
            None,
            "(mqd) HOST:PORT where other hosts fetch this one's partitions. Not set: with cluster.seeds or"
            " controller.listener the address of the first listener, its port + 1.",
        ),
        Property(
            "advertised.inter.broker.listener",
            "string",
            None,
            "(mqd) The address that other hosts use instead. Required if inter.broker.listener is on every address.",
        ),
        Property(
            "cluster.key.file",
            "string",
            None,
            "(mqd) File with the secret by which hosts of one cluster authenticate each other: the same"
            " on every host, readable by this user only; `mqd cluster key` creates one, and changes it"
            " while the cluster runs. Required if a listener between hosts can be reached from other"
            " machines. A changed file is used without a restart.",
        ),
        Property(
            "cluster.tls",
            "enum",
            "off",
            "(mqd) TLS 1.3 between hosts. Each host proves its node id by a certificate. allowed = with"
            " every host that can; required = hosts that cannot are refused. `mqd up --secure` sets"
            " required.",
            choices=("off", "allowed", "required"),
        ),
        Property(
            "cluster.tls.certificate.file",
            "string",
            None,
            "(mqd) PEM file with this host's certificate and those that lead to the CA. It has the URI"
            " mqd://node/NODE_ID as a subject alternative name. Required unless cluster.tls=off. A"
            " changed file is used without a restart.",
        ),
        Property(
            "cluster.tls.key.file",
            "string",
            None,
            "(mqd) PEM file with the certificate's private key, unencrypted, readable by this user only."
            " Not set: it is in cluster.tls.certificate.file.",
        ),
        Property(
            "cluster.tls.ca.file",
            "string",
            None,
            "(mqd) PEM file with the CAs of the hosts' certificates. Required unless cluster.tls=off.",
        ),
        Property(
            "broker.session.timeout.ms",
            "int",
            "5500",
            "A host that the controller has not heard from for this time loses its leaderships. Hosts"
            " that are cut off stop serving as leaders before that. If the active controller's host is"
            " lost, another controller is elected first (controller.quorum.fetch.timeout.ms).",
            minimum=500,
            maximum=600_000,
        ),
        Property(
            "broker.heartbeat.interval.ms",
            "int",
            "1000",
            "Interval of a host's heartbeats to the controller.",
            minimum=50,
            maximum=60_000,
        ),
        Property(
            "controller.quorum.fetch.timeout.ms",
            "int",
            "2000",
            "How long the controllers wait for their leader before they elect another; the leader's lease is three"
            " quarters of it.",
            minimum=200,
            maximum=60_000,
        ),
        Property(
            "replica.lag.time.max.ms",
            "long",
            "30000",
            "A follower that has not caught up with its leader for this time leaves the in-sync set; it"
            " joins again once it has caught up within half of it. The value on the leader's host applies.",
            minimum=100,
            maximum=INT_MAX,
            dynamic=True,
        ),
        Property(
            "replica.fetch.wait.max.ms",
            "int",
            "500",
            "How long a leader may delay its answer to a follower that has everything.",
            minimum=1,
            maximum=60_000,
        ),
        Property(
            "replica.fetch.max.bytes",
            "int",
            "1048576",
            "Bytes of one partition in a leader's answer; a single batch may be larger.",
            minimum=1024,
            maximum=1 << 30,
        ),
        Property(
            "replica.fetch.response.max.bytes",
            "int",
            "4194304",
            "Bytes of a leader's answer (Kafka: 10485760); a single batch may be larger.",
            minimum=1024,
            maximum=1 << 29,
        ),
        Property(
            "replica.fetch.backoff.ms",
            "int",
            "200",
            "Delay before a partition that its leader refused is fetched again (Kafka: 1000). Where that"
            " host may not know yet that it leads, the delay begins at 5 ms and doubles.",
            minimum=1,
            maximum=60_000,
        ),
        Property(
            "replica.socket.timeout.ms",
            "int",
            "10000",
            "A leader that does not answer for this time beyond replica.fetch.wait.max.ms is reconnected"
            " to (Kafka: 30000).",
            minimum=100,
            maximum=600_000,
        ),
        Property(
            "follower.replication.throttled.rate",
            "long",
            str(LONG_MAX),
            "Bytes per second that replicas of this host fetch while they are not in sync and"
            " follower.replication.throttled.replicas of their topic names them; each worker gets an equal"
            " share. In-sync replicas are never throttled.",
            minimum=1,
            maximum=LONG_MAX,
            dynamic=True,
        ),
        Property(
            "leader.replication.throttled.rate",
            "long",
            str(LONG_MAX),
            "Accepted. Replicas are throttled where they fetch: follower.replication.throttled.rate of their host.",
            minimum=0,
            maximum=LONG_MAX,
            dynamic=True,
            ignored=True,
        ),
        Property(
            "replica.alter.log.dirs.io.max.bytes.per.second",
            "long",
            str(LONG_MAX),
            "Bytes per second that moves between log directories copy; each worker gets an equal share."
            " Records written during the move, which are copied at the end while the partition is closed,"
            " are not limited.",
            minimum=1,
            maximum=LONG_MAX,
            dynamic=True,
        ),
        Property(
            "auto.leader.rebalance.enable", "bool", "true", "Return leaderships to preferred leaders that are back."
        ),
        Property(
            "leader.imbalance.check.interval.seconds",
            "long",
            "300",
            "How often leaderships are checked for that.",
            minimum=1,
            maximum=INT_MAX,
        ),
        Property(
            "leader.imbalance.per.broker.percentage",
            "int",
            "10",
            "Share of a host's preferred leaderships that may be elsewhere before they are returned.",
            minimum=0,
            maximum=100,
        ),
        Property(
            "replication.recovery.delay.ms",
            "long",
            "600000",
            "(mqd) The replicas of a lost host are created on other hosts after this time, unless it"
            " returns. -1: never.",
            minimum=-1,
            maximum=LONG_MAX,
        ),
        Property(
            "replica.moves.max",
            "int",
            "50",
            "(mqd) Partitions whose replicas are moved at a time to drain a host, to even out load, or in place of a"
            " lost host.",
            minimum=1,
            maximum=100_000,
        ),
        Property(
            "controlled.shutdown.moves.max",
            "int",
            "1000",
            "(mqd) Leaderships that a host which shuts down hands over with each heartbeat.",
            minimum=1,
            maximum=1_000_000,
        ),
        Property(
            "controlled.shutdown.wait.ms",
            "int",
            "30000",
            "(mqd) How long a host that shuts down waits for other hosts to take over its leaderships and"
            " to learn of that.",
            minimum=0,
            maximum=INT_MAX,
        ),
        Property(
            "partition.retire.barrier.ms",
            "int",
            "10000",
            "(mqd) How long producers to partitions that are being retired (mqd topic retire-partitions)"
            " wait for consumers to read the existing records, before their records are redirected.",
            minimum=0,
            maximum=INT_MAX,
        ),
        Property(
            "partition.retire.grace.ms",
            "long",
            "600000",
            "(mqd) How long retired partitions that are empty, and no longer shown to clients, still"
            " accept records from producers with old metadata. At least twice the clients'"
            " metadata.max.age.ms.",
            minimum=0,
            maximum=LONG_MAX,
        ),
    ]


def _topics() -> list[Property]:
    return [
        Property(
            "num.partitions",
            "int",
            "1",
            "Partitions of a topic that is created without a partition count.",
            minimum=1,
            maximum=16384,
        ),
        Property(
            "default.replication.factor",
            "int",
            "-1",
            "Replicas of a topic that is created without a replication factor. -1: one on each host, at most 3.",
            minimum=-1,
            maximum=32767,
        ),
        Property(
            "min.insync.replicas",
            "int",
            "-1",
            "Replicas that must have a record before acks=all is answered (Kafka: 1). -1: 2 for new"
            " topics of three replicas or more, else 1. DescribeConfigs shows the effective number for a"
            " topic, and -1 for a broker. A host without a cluster keeps one replica and refuses a larger"
            " number.",
            minimum=-1,
            dynamic=True,
        ),
        Property(
            "auto.create.topics.enable",
            "bool",
            "true",
            "Create a topic when a client requests one that does not exist.",
        ),
        Property("delete.topic.enable", "bool", "true", "Allow topics to be deleted."),
        Property(
            "unclean.leader.election.enable",
            "bool",
            "false",
            "true: if no in-sync replica is alive, one that lacks records leads after a second; the"
            " missing records are lost, acknowledged ones included. false: the partition waits; an"
            " operator can elect such a leader by kafka-leader-election.sh --election-type unclean. Of"
            " values in files, the active controller's applies.",
            dynamic=True,
        ),
        Property(
            "message.max.bytes",
            "int",
            "1048588",
            "The largest record batch (max.message.bytes of a topic).",
            minimum=0,
            dynamic=True,
        ),
        Property(
            "compression.type",
            "enum",
            "producer",
            "What batches are stored in: as the producer compressed them, or all in one codec. The acceptor compresses"
            " those that come in another, which costs its CPU; `uncompressed` refuses (MESSAGE_TOO_LARGE) what becomes"
            " larger than message.max.bytes. Of internal topics always producer.",
            choices=_COMPRESSION_TYPES,
            dynamic=True,
        ),
        *_compression_levels(),
        Property("fetch.max.bytes", "int", "57671680", "Bytes of the response to one Fetch.", minimum=1024),
        Property(
            "max.incremental.fetch.session.cache.slots",
            "int",
            "1000",
            "Fetch sessions (KIP-227) that one worker keeps.",
            minimum=0,
            maximum=1_000_000,
        ),
        Property(
            "producer.id.expiration.ms",
            "int",
            "86400000",
            "A producer's sequence numbers are dropped after this time without a batch.",
            minimum=1,
        ),
        Property(
            "producer.id.count.max",
            "int",
            "4096",
            "(mqd) Idempotent producers that one partition remembers; the ones idle for longest are dropped first.",
            minimum=16,
            maximum=1_000_000,
        ),
    ]


def _log() -> list[Property]:
    return [
        Property(
            "log.dirs",
            "list",
            None,
            "Directories that hold the partitions, separated by commas. Not set: DATA_DIR/log.",
        ),
        Property(
            "log.segment.bytes",
            "int",
            "1073741824",
            "Size at which a segment is rolled (segment.bytes of a topic).",
            minimum=4096,
            dynamic=True,
        ),
        Property(
            "log.roll.ms",
            "long",
            None,
            "Age at which a segment is rolled. Not set: log.roll.hours.",
            minimum=1,
            dynamic=True,
        ),
        Property("log.roll.hours", "int", "168", "As log.roll.ms, in hours.", minimum=1),
        Property(
            "log.roll.jitter.ms",
            "long",
            None,
            "Roll up to this much earlier, at random, so that not all segments roll at once. Not set:"
            " log.roll.jitter.hours.",
            minimum=0,
            dynamic=True,
        ),
        Property("log.roll.jitter.hours", "int", "0", "As log.roll.jitter.ms, in hours.", minimum=0),
        Property(
            "log.retention.ms",
            "long",
            None,
            "Age at which records are deleted; -1: never. Not set: log.retention.minutes.",
            minimum=-1,
            dynamic=True,
        ),
        Property(
            "log.retention.minutes",
            "int",
            None,
            "As log.retention.ms, in minutes. Not set: log.retention.hours.",
            minimum=-1,
        ),
        Property("log.retention.hours", "int", "168", "As log.retention.ms, in hours.", minimum=-1),
        Property(
            "log.retention.bytes",
            "long",
            "-1",
            "Size of a partition above which its oldest segments are deleted; -1: no limit.",
            minimum=-1,
            dynamic=True,
        ),
        Property("log.retention.check.interval.ms", "long", "300000", "How often retention is checked.", minimum=1),
        Property(
            "log.scrub.interval.ms",
            "long",
            "604800000",
            "(mqd) How often every closed segment is read and its checksums are checked; a new one within the hour. At"
            " least 1000; -1: never.",
            minimum=-1,
        ),
        Property(
            "log.scrub.bytes.per.second",
            "long",
            "52428800",
            "(mqd) How fast one worker reads for log.scrub.interval.ms.",
            minimum=65536,
        ),
        Property(
            "retention.free.bytes",
            "long",
            "-1",
            "(mqd) Retention by free space: while a directory's file system has less than this free, its oldest closed"
            " segments are deleted. -1: off.",
            minimum=-1,
            dynamic=True,
        ),
        Property(
            "log.dirs.free.bytes.min",
            "long",
            "67108864",
            "(mqd) The reserve: with less free space than this, Produce to the directory is refused with"
            " a retriable error; everything else continues.",
            minimum=0,
            dynamic=True,
        ),
        Property(
            "log.cleanup.policy",
            "list",
            "delete",
            "What is done with old segments: delete by age and size, compact to the last value of each key, both"
            " (compact,delete), or nothing (empty).",
            choices=_CLEANUP_POLICIES,
            may_be_empty=True,
            dynamic=True,
        ),
        Property(
            "log.segment.delete.delay.ms",
            "long",
            "60000",
            "Accepted. A deleted segment's files are removed at once; a reader that has one open can read to its end.",
            minimum=0,
            dynamic=True,
            ignored=True,
        ),
        Property(
            "log.index.interval.bytes",
            "int",
            "4096",
            "Bytes of log between two index entries.",
            minimum=0,
            dynamic=True,
        ),
        Property(
            "log.index.size.max.bytes",
            "int",
            "10485760",
            "Accepted (segment.index.bytes of a topic); indexes grow as needed.",
            minimum=4,
            dynamic=True,
            ignored=True,
        ),
        Property(
            "log.message.timestamp.type",
            "enum",
            "CreateTime",
            "Whether a record's timestamp is the producer's or the broker's.",
            choices=_TIMESTAMP_TYPES,
            dynamic=True,
        ),
        Property(
            "log.message.timestamp.before.max.ms",
            "long",
            str(LONG_MAX),
            "How far a record's timestamp may lie in the past.",
            minimum=0,
            dynamic=True,
        ),
        Property(
            "log.message.timestamp.after.max.ms",
            "long",
            "3600000",
            "How far a record's timestamp may lie in the future.",
            minimum=0,
            dynamic=True,
        ),
        Property(
            "log.preallocate",
            "bool",
            "false",
            "Accepted. mqd always preallocates, in steps (log.preallocate.bytes.min and max).",
            dynamic=True,
            ignored=True,
        ),
        Property(
            "log.preallocate.bytes.min",
            "long",
            "65536",
            "(mqd) First step of preallocation; it doubles with the write rate.",
            minimum=4096,
            maximum=1 << 30,
        ),
        Property(
            "log.preallocate.bytes.max",
            "long",
            "33554432",
            "(mqd) Largest step of preallocation.",
            minimum=4096,
            maximum=1 << 31,
        ),
        Property(
            "log.stripe.bytes",
            "long",
            "0",
            "(mqd) Stripe width of the RAID below log.dirs; preallocation is rounded to it. 0: none.",
            minimum=0,
            maximum=1 << 30,
        ),
        Property(
            "log.flush.on.ack",
            "bool",
            "true",
            "(mqd) Answer acks=all only after the records are on disk (fsync, by group commit). false: Kafka's own"
            " semantics, the page cache (flush.on.ack of a topic).",
            dynamic=True,
        ),
        Property(
            "log.flush.interval.messages",
            "long",
            str(LONG_MAX),
            "Accepted. Records are not counted: with log.flush.on.ack acks=all waits for the flush"
            " itself, and other records are flushed after log.flush.interval.ms.",
            minimum=1,
            dynamic=True,
            ignored=True,
        ),
        Property(
            "log.flush.interval.ms",
            "long",
            None,
            "Flush a partition's records at least this often; checked once a second, and values above 5 s"
            " count as 5 s. Not set: log.flush.scheduler.interval.ms.",
            minimum=0,
            dynamic=True,
        ),
        Property("log.flush.scheduler.interval.ms", "long", str(LONG_MAX), "See log.flush.interval.ms.", minimum=1),
        Property(
            "log.cleaner.delete.retention.ms",
            "long",
            "86400000",
            "How long a tombstone (a record without a value), or the end of a transaction, can still be read after a"
            " compaction first met it. A consumer that starts from the beginning must reach the end within that time to"
            " see every deletion.",
            minimum=0,
            dynamic=True,
        ),
        Property(
            "log.cleaner.min.compaction.lag.ms",
            "long",
            "0",
            "Age below which a record is not compacted.",
            minimum=0,
            dynamic=True,
        ),
        Property(
            "log.cleaner.max.compaction.lag.ms",
            "long",
            str(LONG_MAX),
            "Age at which a record must be compacted; the active segment is closed in time.",
            minimum=1,
            dynamic=True,
        ),
        Property(
            "log.cleaner.min.cleanable.ratio",
            "double",
            "0.5",
            "Share of a log that must be dirty (not compacted yet) before it is compacted.",
            minimum=0,
            maximum=1,
            dynamic=True,
        ),
    ]


def _coordinators() -> list[Property]:
    return [
        Property(
            "offsets.topic.num.partitions",
            "int",
            "50",
            "Partitions of __consumer_offsets. Used when the topic is created; must not change afterwards.",
            minimum=1,
            maximum=16384,
        ),
        Property(
            "offsets.topic.segment.bytes",
            "int",
            "104857600",
            "Segment size of __consumer_offsets, used when it is created.",
            minimum=4096,
        ),
        Property(
            "offsets.retention.minutes",
            "int",
            "10080",
            "Committed offsets of a group are deleted this long after the group lost its last member, or"
            " after the commit if it never had one.",
            minimum=1,
        ),
        Property(
            "offsets.retention.check.interval.ms",
            "long",
            "600000",
            "How often a group's offsets are checked for offsets.retention.minutes.",
            minimum=1,
        ),
        Property(
            "offset.metadata.max.bytes",
            "int",
            "4096",
            "The longest text that a client may store with a committed offset.",
            minimum=0,
            maximum=32767,
        ),
        Property(
            "offsets.commit.timeout.ms",
            "int",
            "5000",
            "How long a commit of offsets waits for the disk before it is answered with a retriable error.",
            minimum=1,
        ),
        Property(
            "group.initial.rebalance.delay.ms",
            "int",
            "300",
            "How long the first rebalance of a group waits for more members, counted from the last one"
            " that joined (Kafka: 3000, in steps); at most the rebalance timeout in total.",
            minimum=0,
        ),
        Property(
            "group.min.session.timeout.ms",
            "int",
            "6000",
            "The shortest session.timeout.ms that a consumer of the classic protocol may request.",
            minimum=1,
        ),
        Property(
            "group.max.session.timeout.ms",
            "int",
            "1800000",
            "The longest session.timeout.ms that a consumer of the classic protocol may request.",
            minimum=1,
        ),
        Property(
            "group.max.size", "int", str(INT_MAX), "Members that a group of the classic protocol may have.", minimum=1
        ),
        Property(
            "group.coordinator.memory.bytes",
            "long",
            "268435456",
            "(mqd) Memory of all groups that this host coordinates: members with their metadata and"
            " assignments, offsets with theirs. New groups are refused from three quarters on, new members"
            " from seven eighths, with an error that clients retry (COORDINATOR_LOAD_IN_PROGRESS);"
            " existing groups continue.",
            minimum=64 << 20,
        ),
        Property(
            "group.consumer.session.timeout.ms",
            "int",
            "45000",
            "A member of a consumer group (KIP-848) is removed after this time without a heartbeat. Per"
            " group: consumer.session.timeout.ms.",
            minimum=1,
        ),
        Property(
            "group.consumer.min.session.timeout.ms",
            "int",
            "45000",
            "The shortest consumer.session.timeout.ms that a group may have.",
            minimum=1,
        ),
        Property(
            "group.consumer.max.session.timeout.ms",
            "int",
            "60000",
            "The longest consumer.session.timeout.ms that a group may have.",
            minimum=1,
        ),
        Property(
            "group.consumer.heartbeat.interval.ms",
            "int",
            "5000",
            "How often members of consumer groups send heartbeats; a member that waits for partitions is"
            " asked for shorter intervals.",
            minimum=1,
        ),
        Property(
            "group.consumer.heartbeat.interval.quick.ms",
            "int",
            "1000",
            "(mqd) While all consumer groups together have few members, members send heartbeats this"
            " often, so that they learn of a rebalance sooner; with more members the interval is a"
            " millisecond for each, up to group.consumer.heartbeat.interval.ms. A group that sets"
            " consumer.heartbeat.interval.ms keeps that. librdkafka waits for an answer as long as the"
            " interval, so a shorter one would time out while the broker is busy.",
            minimum=1000,
        ),
        Property(
            "group.consumer.min.heartbeat.interval.ms",
            "int",
            "5000",
            "The shortest consumer.heartbeat.interval.ms that a group may have.",
            minimum=1,
        ),
        Property(
            "group.consumer.max.heartbeat.interval.ms",
            "int",
            "15000",
            "The longest consumer.heartbeat.interval.ms that a group may have.",
            minimum=1,
        ),
        Property("group.consumer.max.size", "int", str(INT_MAX), "Members that a consumer group may have.", minimum=1),
        Property(
            "group.consumer.assignors",
            "list",
            "uniform,range",
            "Server-side assignors that members of consumer groups may request; the first one is the default.",
            choices=("uniform", "range"),
        ),
        Property(
            "group.consumer.migration.policy",
            "enum",
            "bidirectional",
            "Whether a group with members may change its protocol: from classic to consumer (upgrade), back"
            " (downgrade), both, or never.",
            choices=("bidirectional", "upgrade", "downgrade", "disabled"),
        ),
        Property(
            "transaction.state.log.num.partitions",
            "int",
            "50",
            "Partitions of __transaction_state. Used when the topic is created; must not change afterwards.",
            minimum=1,
            maximum=16384,
        ),
        Property(
            "transaction.partition.verification.enable",
            "bool",
            "true",
            "A transaction begins in a partition only after its coordinator has confirmed it (KIP-890)."
            " Without that, a late batch of an older client may leave a transaction that nothing ends. For"
            " clients of version 2 the coordinator is always consulted.",
            dynamic=True,
        ),
        Property(
            "transaction.max.timeout.ms",
            "int",
            "900000",
            "The longest transaction.timeout.ms that a producer may request.",
            minimum=1,
        ),
        Property(
            "transactional.id.expiration.ms",
            "int",
            "604800000",
            "A transactional id that has not been used for this time is dropped.",
            minimum=1,
        ),
        Property(
            "transaction.state.log.segment.bytes",
            "int",
            "104857600",
            "Segment size of __transaction_state, used when it is created.",
            minimum=4096,
        ),
        Property("log.cleaner.enable", "bool", "true", "Compact the topics whose cleanup.policy includes compact."),
        Property(
            "log.cleaner.backoff.ms",
            "long",
            "15000",
            "How long the cleaner waits when there is nothing to compact.",
            minimum=0,
            dynamic=True,
        ),
        Property(
            "log.cleaner.dedupe.buffer.size",
            "long",
            "134217728",
            "Memory for the keys of what is compacted, of all workers together: 24 bytes a key. Logs with"
            " more keys are compacted in several runs.",
            minimum=1 << 20,
            dynamic=True,
        ),
        Property(
            "log.cleaner.io.buffer.load.factor",
            "double",
            "0.9",
            "How full log.cleaner.dedupe.buffer.size may become.",
            minimum=0.01,
            maximum=0.95,
            dynamic=True,
        ),
        Property(
            "log.cleaner.io.max.bytes.per.second",
            "double",
            "1.7976931348623157E308",
            "How fast all workers together read and write for compaction.",
            minimum=65536,
            dynamic=True,
        ),
    ]


def _rights() -> list[Property]:
    return [
        Property(
            "authorizer.class.name",
            "enum",
            "",
            "`standard`, or the name of Kafka's StandardAuthorizer: access control lists (kafka-acls, `mqd acl`)"
            " decide. Empty: every client may do everything. The same on all hosts.",
            choices=("", "standard", "org.apache.kafka.metadata.authorizer.StandardAuthorizer"),
        ),
        Property(
            "super.users",
            "string",
            "",
            "Principals that may do everything, separated by semicolons: User:admin;User:ops.",
        ),
        Property(
            "allow.everyone.if.no.acl.found",
            "bool",
            "false",
            "A resource that no access control list names is open to every client.",
        ),
        Property(
            "local.principal.mapping.rules",
            "string",
            "DEFAULT",
            "(mqd) Which user a local process stands for, by its login name: RULE:pattern/replacement/[LU] and DEFAULT,"
            " separated by commas; the first that matches decides. A process that stands for none goes over TCP; one of"
            " the broker's own user may do everything.",
        ),
        Property(
            "authorizer.log.only",
            "bool",
            "false",
            "(mqd) Operations that access control lists deny are logged and carried out: shows what the clients of a"
            " running cluster need before the lists are enforced. Denials are in logs/audit.log.",
        ),
    ]


def _quotas() -> list[Property]:
    return [
        Property(
            "quota.window.num",
            "int",
            "11",
            "After a pause, a client may use up to (quota.window.num - 1) * quota.window.size.seconds of"
            " its quota at once.",
            minimum=2,
            maximum=1000,
        ),
        Property("quota.window.size.seconds", "int", "1", "See quota.window.num.", minimum=1, maximum=3600),
        Property(
            "controller.quota.window.num",
            "int",
            "11",
            "After a pause, a client may make controller.quota.window.num * controller.quota.window.size.seconds of its"
            " controller_mutation_rate in changes of topics at once.",
            minimum=1,
            maximum=1000,
        ),
        Property(
            "controller.quota.window.size.seconds",
            "int",
            "1",
            "See controller.quota.window.num.",
            minimum=1,
            maximum=3600,
        ),
    ]


def _engine() -> list[Property]:
    return [
        Property(
            "process.sandbox",
            "enum",
            "on",
            "(mqd) The broker's processes give up system calls that they do not need (seccomp), new privileges, and,"
            " except for the keeper, files outside the data directory, log.dirs and what the configuration names"
            " (Landlock), where the kernel offers it; `mqd status` shows what is in force.",
            choices=("on", "off"),
        ),
        Property(
            "core.files.allow",
            "bool",
            "false",
            "(mqd) The broker's processes may write core files, and other processes of their user may read their"
            " memory (debuggers): it holds records, passwords and keys.",
        ),
        Property(
            "worker.count",
            "int",
            "0",
            "(mqd) Worker processes. 0: one for each CPU the broker may use (affinity and cgroup quota), as far as"
            " their shared memory fits in /dev/shm.",
            minimum=0,
            maximum=64,
        ),
        Property(
            "worker.cpus", "list", "", "(mqd) CPUs to pin the workers to, in order, such as 0,2-3. Empty: not pinned."
        ),
        Property(
            "worker.spin.us",
            "int",
            "0",
            "(mqd) How long an idle worker polls before it sleeps: lower latency for more CPU.",
            minimum=0,
            maximum=1_000_000,
        ),
        Property(
            "io.backend",
            "enum",
            "auto",
            "(mqd) How workers do input and output. auto: io_uring where the kernel allows it.",
            choices=("auto", "io_uring", "epoll"),
        ),
        Property(
            "group.commit.window.us",
            "int",
            "0",
            "(mqd) How long a flush waits for more acks=all requests to join it: higher throughput for"
            " more latency. 0: a flush starts as soon as the previous one has ended.",
            minimum=0,
            maximum=1_000_000,
        ),
        Property(
            "receive.arena.bytes",
            "long",
            "16777216",
            "(mqd) Shared memory of one worker for received requests; those larger than half of it use"
            " large.request.memory.bytes.",
            minimum=1 << 20,
            maximum=1 << 32,
        ),
        Property(
            "sendfile.bytes.min",
            "int",
            "8192",
            "(mqd) Ranges of at least this size are sent to consumers by sendfile, smaller ones are copied.",
            minimum=0,
        ),
        Property(
            "read.fd.count.max",
            "int",
            "512",
            "(mqd) Open segment files that one worker keeps for reading.",
            minimum=16,
            maximum=65536,
        ),
        Property(
            "log.format", "enum", "human", "(mqd) Format of the broker's own log lines.", choices=("human", "json")
        ),
        Property(
            "log.level",
            "enum",
            "info",
            "(mqd) Lowest level of the broker's own log lines; mqd log-level changes it at run time.",
            choices=("error", "warning", "info", "debug"),
        ),
    ]


def _topic_table() -> list[Property]:
    rows = [
        ("cleanup.policy", "log.cleanup.policy", "What is done with old segments."),
        ("retention.ms", "log.retention.ms", "Age at which records are deleted; -1: never."),
        (
            "retention.bytes",
            "log.retention.bytes",
            "Size of a partition above which its oldest segments are deleted; -1: no limit.",
        ),
        ("segment.bytes", "log.segment.bytes", "Size at which a segment is rolled."),
        ("segment.ms", "log.roll.ms", "Age at which a segment is rolled."),
        ("segment.jitter.ms", "log.roll.jitter.ms", "Roll up to this much earlier, at random."),
        ("segment.index.bytes", "log.index.size.max.bytes", "Accepted; indexes grow as needed."),
        ("max.message.bytes", "message.max.bytes", "The largest record batch."),
        (
            "message.timestamp.type",
            "log.message.timestamp.type",
            "Whether a record's timestamp is the producer's or the broker's.",
        ),
        (
            "message.timestamp.before.max.ms",
            "log.message.timestamp.before.max.ms",
            "How far a record's timestamp may lie in the past.",
        ),
        (
            "message.timestamp.after.max.ms",
            "log.message.timestamp.after.max.ms",
            "How far a record's timestamp may lie in the future.",
        ),
        (
            "min.insync.replicas",
            "min.insync.replicas",
            (
                "Replicas that must have a record before acks=all is answered (Kafka: 1). -1: 2 of three"
                " replicas or more; a topic that is created with two gets 1. DescribeConfigs shows the"
                " effective number."
            ),
        ),
        (
            "flush.on.ack",
            "log.flush.on.ack",
            "(mqd) Answer acks=all only after the records are on disk. Always true for internal topics.",
        ),
        (
            "flush.messages",
            "log.flush.interval.messages",
            "Accepted. Records are not counted; see flush.on.ack and flush.ms.",
        ),
        (
            "flush.ms",
            "log.flush.interval.ms",
            "Flush at least this often; checked once a second, and values above 5 s count as 5 s.",
        ),
        ("index.interval.bytes", "log.index.interval.bytes", "Bytes of log between two index entries."),
        (
            "compression.type",
            "compression.type",
            "What batches are stored in: as the producer compressed them (producer), or all in one codec.",
        ),
        *((prop.name, prop.name, prop.doc) for prop in _compression_levels()),
        (
            "file.delete.delay.ms",
            "log.segment.delete.delay.ms",
            "Accepted. A deleted segment's files are removed at once; a reader that has one open can read to its end.",
        ),
        ("preallocate", "log.preallocate", "Accepted. mqd always preallocates, in steps."),
        (
            "unclean.leader.election.enable",
            "unclean.leader.election.enable",
            "true: if no in-sync replica is alive, one that lacks records leads; the missing records are"
            " lost, acknowledged ones included.",
        ),
        (
            "delete.retention.ms",
            "log.cleaner.delete.retention.ms",
            (
                "How long a tombstone (a record without a value), or the end of a transaction, can still be read after"
                " a compaction first met it. A consumer that starts from the beginning must reach the end within that"
                " time to see every deletion."
            ),
        ),
        ("min.compaction.lag.ms", "log.cleaner.min.compaction.lag.ms", "Age below which a record is not compacted."),
        (
            "max.compaction.lag.ms",
            "log.cleaner.max.compaction.lag.ms",
            "Age at which a record must be compacted; the active segment is closed in time.",
        ),
        (
            "min.cleanable.dirty.ratio",
            "log.cleaner.min.cleanable.ratio",
            "Share of a log that must be dirty (not compacted yet) before it is compacted.",
        ),
    ]
    defaults = {
        "retention.ms": "604800000",
        "segment.ms": "604800000",
        "segment.jitter.ms": "0",
        "flush.ms": str(LONG_MAX),
    }
    table = []
    for name, broker_name, doc in rows:
        of_broker = BROKER[broker_name]
        default = of_broker.default if of_broker.default is not None else defaults[name]
        table.append(
            msgspec.structs.replace(
                of_broker, name=name, default=default, doc=doc, dynamic=True, broker_name=broker_name
            )
        )
    table.append(
        Property(
            "replica.lag.max.messages",
            "long",
            "-1",
            "(mqd) A follower that is more than this many records behind its leader for half a second"
            " leaves the in-sync set before replica.lag.time.max.ms is over. Set it well above what is"
            " written while a follower fetches and flushes. For a follower that a new leader has not heard"
            " from yet, only the time counts. -1: no limit.",
            minimum=-1,
            dynamic=True,
        )
    )
    table.append(
        Property(
            "record.validation",
            "enum",
            "all",
            "(mqd) Which batches are parsed before they are accepted (INVALID_RECORD otherwise), so that"
            " no invalid record stops consumers: `all`, as Kafka; `uncompressed`: compressed ones are"
            " stored as they were sent; `none`. Batches for compacted topics are always parsed.",
            choices=("none", "uncompressed", "all"),
            dynamic=True,
        )
    )
    tiered = "Accepted as Kafka's default: tiered storage is not available."
    for name in ("remote.storage.enable", "remote.log.copy.disable", "remote.log.delete.on.disable"):
        no = {"true": "tiered storage is not available"}
        table.append(Property(name, "bool", "false", tiered, refused=no, dynamic=True, ignored=True))
    for name in ("local.retention.ms", "local.retention.bytes"):
        table.append(Property(name, "long", "-2", tiered, minimum=-2, maximum=-2, dynamic=True, ignored=True))
    replicas: dict[str, Any] = {"kind": "list", "default": "", "dynamic": True, "pattern": r"\*|[0-9]+:[0-9]+"}
    followers = (
        "Replicas that are throttled while they are not in sync (follower.replication.throttled.rate of their host):"
        " PARTITION:BROKER, separated by commas, or * for all."
    )
    table.append(Property(name="follower.replication.throttled.replicas", doc=followers, **replicas))
    leaders = (
        "Accepted: PARTITION:BROKER, separated by commas, or *. Replicas are throttled where they fetch; see"
        " follower.replication.throttled.replicas."
    )
    table.append(Property(name="leader.replication.throttled.replicas", doc=leaders, ignored=True, **replicas))
    return table


def _tls() -> list[Property]:
    suites = (
        "TLS_AES_128_GCM_SHA256",
        "TLS_AES_256_GCM_SHA384",
        "TLS_CHACHA20_POLY1305_SHA256",
        *(
            f"TLS_ECDHE_{key}_WITH_{cipher}"
            for cipher in ("AES_128_GCM_SHA256", "AES_256_GCM_SHA384", "CHACHA20_POLY1305_SHA256")
            for key in ("ECDSA", "RSA")
        ),
    )
    old = "it is broken; use TLSv1.2 or TLSv1.3"
    rows = [
        Property(
            "ssl.keystore.location",
            "string",
            None,
            "File with the certificate chain and the private key of SSL and SASL_SSL listeners, PEM or"
            " PKCS12. A PEM file may contain several keys, each with its chain: a client gets the one for"
            " the host that it names (SNI), else the first. Changed files are loaded within seconds; if"
            " one is invalid, the previous one remains in use.",
        ),
        Property(
            "ssl.keystore.type",
            "enum",
            None,
            "PEM or PKCS12. Not set: recognised by the file's content.",
            choices=("PEM", "PKCS12"),
            refused={
                "JKS": "only Java reads it; convert the file by keytool -importkeystore ... -deststoretype PKCS12"
            },
        ),
        Property("ssl.keystore.password", "string", None, "Password of a PKCS12 keystore.", sensitive=True),
        Property("ssl.key.password", "string", None, "Password of an encrypted private key in PEM.", sensitive=True),
        Property(
            "ssl.keystore.certificate.chain",
            "string",
            None,
            "The certificate chain as PEM text, instead of ssl.keystore.location; with ssl.keystore.key.",
        ),
        Property(
            "ssl.keystore.key", "string", None, "The private key as PEM text (PKCS#8 or traditional).", sensitive=True
        ),
        Property(
            "ssl.truststore.location",
            "string",
            None,
            "File with the CAs of clients' certificates, PEM or PKCS12. Required if ssl.client.auth is not none.",
        ),
        Property(
            "ssl.truststore.type",
            "enum",
            None,
            "PEM or PKCS12. Not set: recognised by the file's content.",
            choices=("PEM", "PKCS12"),
            refused={
                "JKS": "only Java reads it; convert the file by keytool -importkeystore ... -deststoretype PKCS12"
            },
        ),
        Property("ssl.truststore.password", "string", None, "Password of a PKCS12 trust store.", sensitive=True),
        Property(
            "ssl.truststore.certificates", "string", None, "The CAs as PEM text, instead of ssl.truststore.location."
        ),
        Property(
            "ssl.client.auth",
            "enum",
            "none",
            "Whether clients of SSL listeners must have a certificate that a CA of the trust store has signed.",
            choices=("none", "requested", "required"),
        ),
        Property(
            "ssl.principal.mapping.rules",
            "string",
            "DEFAULT",
            "Maps the subject of a client's certificate, such as CN=alice,O=Example, to a user:"
            " RULE:pattern/replacement/[LU] and DEFAULT, separated by commas; the first match decides."
            " DEFAULT: the whole subject is the user's name. A client whose subject matches no rule is"
            " refused.",
        ),
        Property(
            "ssl.enabled.protocols",
            "list",
            "TLSv1.2,TLSv1.3",
            "Enabled versions of TLS.",
            choices=("TLSv1.2", "TLSv1.3"),
            refused={"SSLv3": old, "TLSv1": old, "TLSv1.1": old},
        ),
        Property(
            "ssl.cipher.suites",
            "list",
            None,
            "Cipher suites, if not all of these: " + ", ".join(suites) + ".",
            pattern="|".join(suites),
        ),
    ]
    return [msgspec.structs.replace(row, per_listener=True) for row in rows]


def _by_name(rows: list[Property]) -> dict[str, Property]:
    table = {row.name: row for row in rows}
    assert len(table) == len(rows), "a property is listed twice"
    return table


BROKER: dict[str, Property] = _by_name(
    _listeners()
    + _authentication()
    + _tls()
    + _cluster()
    + _topics()
    + _log()
    + _coordinators()
    + _rights()
    + _quotas()
    + _engine()
    + [
        Property(name, "string", None, doc, ignored=True)
        for doc, names in kafka_names.WITHOUT_EFFECT.items()
        for name in names.split()
    ]
)
TOPIC: dict[str, Property] = _by_name(_topic_table())


def _group_table() -> list[Property]:
    rows = [
        (
            "consumer.session.timeout.ms",
            "group.consumer.session.timeout.ms",
            "A member is removed after this time without a heartbeat.",
        ),
        (
            "consumer.heartbeat.interval.ms",
            "group.consumer.heartbeat.interval.ms",
            "How often its members send heartbeats.",
        ),
    ]
    return [
        msgspec.structs.replace(BROKER[broker_name], name=name, doc=doc, dynamic=True, broker_name=broker_name)
        for name, broker_name, doc in rows
    ]


GROUP: dict[str, Property] = _by_name(_group_table())  # of consumer groups (ConfigResource type 32)


CLIENT_METRICS: dict[str, Property] = _by_name(  # of subscriptions (KIP-714, ConfigResource type 16)
    [
        Property("metrics", "list", "", "Prefixes of the metrics that clients push; * for all.", dynamic=True),
        Property("interval.ms", "int", "300000", "How often they push.", dynamic=True),
        Property("match", "list", "", "Which clients: PARAMETER=REGULAR EXPRESSION.", dynamic=True),
    ]
)
CLIENT_METRICS_MATCHED = (
    "client_instance_id",
    "client_id",
    "client_software_name",
    "client_software_version",
    "client_source_address",
    "client_source_port",
)
