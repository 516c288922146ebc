"""The tables of all configuration properties, for brokers, topics, groups and client metrics: one
entry per property, in the notation of mqd.base.property_notation.

Kafka's names and defaults are used verbatim wherever Kafka has the property (Apache Kafka
documentation, sections 3.1 and 3.2); the texts of mqd's own properties begin with "(mqd)". This file
is one long table of data: parsing, merging and cross-checks are in mqd.base.config, and
docs/configuration.md is generated from here.
"""

from mqd.base import kafka_names
from mqd.base.property_notation import INT_MAX as INT_MAX
from mqd.base.property_notation import LONG_MAX as LONG_MAX
from mqd.base.property_notation import Property as Property
from mqd.base.property_notation import table

_LISTENERS = r"""
node.id: int >=0 = 1
    The id of this broker.
listeners: list = PLAINTEXT://127.0.0.1:9092
    Where the broker listens: NAME://HOST:PORT, separated by commas. Without a host, it listens on
    the loopback address, or on all interfaces if listeners.insecure.allow=true. Port 0: any free
    port.
advertised.listeners: list
    The addresses that the broker returns to clients, by listener name. Not set: the address that the
    client itself used.
listener.security.protocol.map: list = PLAINTEXT:PLAINTEXT
    The security protocol of each listener, as NAME:PROTOCOL: PLAINTEXT, SSL, SASL_PLAINTEXT or
    SASL_SSL. A listener whose name is a protocol needs no entry.
controller.listener.names: list
    Names of listeners that are not for clients. In Kafka's configuration files, listeners and
    advertised.listeners may contain them; mqd ignores those entries. controller.listener says where
    controllers listen.
listeners.insecure.allow: bool = false
    (mqd) Allow listeners without authentication on addresses that other hosts can reach. Any client that reaches them
    can read and write everything.
security.inter.broker.protocol: enum(PLAINTEXT) ignored = PLAINTEXT
    Accepted. Hosts authenticate each other with cluster.key.file; cluster.tls encrypts the traffic between them.
    refused SSL: hosts authenticate by cluster.key.file; cluster.tls=required encrypts their traffic
    refused SASL_PLAINTEXT: hosts authenticate by cluster.key.file; cluster.tls=required encrypts their traffic
    refused SASL_SSL: hosts authenticate by cluster.key.file; cluster.tls=required encrypts their traffic
config.providers: list =
    Names of the providers that resolve references to values stored elsewhere. Each needs config.providers.NAME.class
    (Kafka's FileConfigProvider, EnvVarConfigProvider or DirectoryConfigProvider), and may have
    config.providers.NAME.param.* settings. Empty: ${file:PATH:KEY}, ${env:NAME} and
    ${dir:PATH:FILE} are resolved.
broker.rack: string
    The rack (availability zone) of this broker, as clients see it.
max.connections: int >=1 <=1000000 dynamic per_listener = 10000
    Maximum number of open connections; further ones are closed immediately. One listener can have
    its own limit (listener.name.NAME.max.connections) in addition to the broker's. At run time,
    max.connections can be raised to at most 65536, or to its value at start if that was higher.
max.connections.per.ip: int >=0 dynamic = INT_MAX
    Maximum number of open connections from one address; further ones are closed immediately.
max.connections.per.ip.overrides: string dynamic =
    Limits for individual addresses, which override max.connections.per.ip: ADDRESS:NUMBER,
    separated by commas. Host names are not resolved.
max.connection.creation.rate: int >=1 dynamic per_listener = INT_MAX
    Maximum number of new connections per second; further ones wait. For bursts, see
    quota.window.num. One listener can have its own rate
    (listener.name.NAME.max.connection.creation.rate). Rates for individual addresses are quotas of
    the entity type ips (kafka-configs, mqd quota).
connections.max.idle.ms: long >=-1 <=INT_MAX = 600000
    A connection is closed after this long without a request. -1: never.
connection.inflight.max: int >=1 <=65536 = 256
    (mqd) Maximum number of requests of one connection that have no response yet; above this number,
    the broker stops reading from the connection.
socket.request.max.bytes: int >=65536 <=1073741824 = 104857600
    The largest request, in bytes; a connection that sends a larger one is closed. No topic's max.message.bytes may
    exceed it.
sasl.server.max.receive.size: int >=1024 <=1048576 = 524288
    The largest token that a client may send before it has authenticated.
large.request.memory.bytes: long >=1048576 <=17179869184 = 268435456
    (mqd) Shared memory of one worker for requests larger than half of receive.arena.bytes. It is
    allocated as the bytes of these requests arrive, and released afterwards. While it is in use,
    further large requests wait unread. It must be at least socket.request.max.bytes; the default is
    raised to that value if necessary.
large.request.timeout.ms: int >=1000 <=INT_MAX = 30000
    (mqd) A client that has begun a large request and then sends nothing for this long is
    disconnected. While other requests wait for the memory, it is disconnected after 2 seconds
    without data, or if its request is not complete within large.request.timeout.ms.
queued.max.request.bytes: long >=1048576 = 67108864
    Memory of one worker for requests and connections in addition to its receive arena. When all of
    it is in use, the worker stops reading from connections.
local.attachments.max: int >=0 <=65536 = 1024
    (mqd) Maximum number of clients on this host that the broker serves through shared memory;
    further ones connect over TCP. 0: all clients connect over TCP, and there is no client socket.
local.memory.max.bytes: long >=1048576 <=1099511627776 = 1073741824
    (mqd) Maximum amount of shared memory that all clients on this host use together (a client
    requests 16 MiB by default). Only memory that is used is allocated.
local.socket.permissions: enum(0600|0660|0666) = 0600
    (mqd) File permissions of the client socket, run/client.sock in the data directory. A process that may connect to it
    has the permissions of the user that local.principal.mapping.rules gives it; without an authorizer, it may do
    everything.
admin.port: int >=-1 <=65535 = 0
    (mqd) Port of the metrics page on the loopback address. 0: the clients' port + 552, or any free
    port if that is in use (mqd status shows which). -1: no metrics page.
metrics.listener: string =
    (mqd) The address of the metrics page, instead of admin.port: http://HOST:PORT, or
    https://HOST:PORT with the ssl.* properties (listener.name.metrics.ssl.* for the metrics page
    alone). If other hosts can reach the address, metrics.token.file is required, and so is either
    https:// or listeners.insecure.allow=true. Port 0: any free port.
metrics.partitions: bool = true
    (mqd) Whether the metrics page has series for each partition on this host. Groups' lag is shown in either case.
metrics.token.file: string =
    (mqd) File with the token that scrapers must send (Authorization: Bearer). It must be readable
    only by the user that the broker runs as. A changed file is read again. Empty: any client that
    reaches the page can read it.
"""

_AUTHENTICATION = r"""
sasl.enabled.mechanisms: list(SCRAM-SHA-512|SCRAM-SHA-256|PLAIN|OAUTHBEARER) per_listener = SCRAM-SHA-512,SCRAM-SHA-256
    How clients of SASL listeners may authenticate. PLAIN uses the passwords of SCRAM users; clients send them in plain
    text, so use it only with SASL_SSL.
    refused GSSAPI: Kerberos is not available
connections.max.reauth.ms: long >=0 per_listener = 0
    A client must authenticate again within this time, or its connection is closed (KIP-368). 0: it
    must do so only when its token expires.
sasl.scram.decoy.secret: string sensitive dynamic
    (mqd) The secret from which salts for unknown user names are computed. The cluster creates it
    when the first user gets a password, and keeps it.
connection.failed.authentication.delay.ms: int >=0 <=5000 = 100
    Delay of the response to a failed authentication. It doubles with each failure of the same address and user, up to
    5 s.
delegation.token.secret.key: string sensitive
    The secret from which the passwords of delegation tokens (KIP-48) are computed: the same on all hosts. Not set:
    there are no delegation tokens. Changing it invalidates all tokens.
delegation.token.max.lifetime.ms: long >=1 = 604800000
    How long a delegation token can live, however often it is renewed.
delegation.token.expiry.time.ms: long >=1 = 86400000
    How long a delegation token lives unless it is renewed.
delegation.token.expiry.check.interval.ms: long >=1 = 3600000
    How often expired delegation tokens are removed from the metadata. They are invalid as soon as
    they expire.
sasl.oauthbearer.jwks.endpoint.url: string per_listener
    OAUTHBEARER: where the issuer publishes its keys, https:// or file://.
sasl.oauthbearer.expected.issuer: string per_listener
    OAUTHBEARER: the only issuer (iss) whose tokens are accepted. Required.
sasl.oauthbearer.expected.audience: list per_listener
    OAUTHBEARER: tokens must be for one of these audiences (aud). Required.
sasl.oauthbearer.sub.claim.name: string per_listener = sub
    OAUTHBEARER: the claim that names the user.
sasl.oauthbearer.clock.skew.seconds: int >=0 <=3600 per_listener = 30
    OAUTHBEARER: how much the issuer's clock may differ.
sasl.oauthbearer.jwks.endpoint.refresh.ms: long >=1000 <=INT_MAX per_listener = 3600000
    OAUTHBEARER: how often the issuer's keys are read. They are also read when a token names an unknown key.
"""

_SUITES = (
    "TLS_AES_128_GCM_SHA256",
    "TLS_AES_256_GCM_SHA384",
    "TLS_CHACHA20_POLY1305_SHA256",
    *(
        f"TLS_ECDHE_{key}_WITH_{cipher}"
        for cipher in ("AES_128_GCM_SHA256", "AES_256_GCM_SHA384", "CHACHA20_POLY1305_SHA256")
        for key in ("ECDSA", "RSA")
    ),
)
_BROKEN = "it is broken; use TLSv1.2 or TLSv1.3"

_TLS = rf"""
ssl.keystore.location: string per_listener
    File with the certificate chain and the private key of SSL and SASL_SSL listeners, PEM or PKCS12. A PEM file may
    contain several keys, each with its chain: a client gets the one for the host name that it requests (SNI), or else
    the first. Changed files are loaded within seconds; if one is invalid, the previous one remains in use.
ssl.keystore.type: enum(PEM|PKCS12) per_listener
    PEM or PKCS12. Not set: recognised by the file's content.
    refused JKS: only Java reads it; convert the file with keytool -importkeystore ... -deststoretype PKCS12
ssl.keystore.password: string sensitive per_listener
    Password of a PKCS12 keystore.
ssl.key.password: string sensitive per_listener
    Password of an encrypted private key in PEM.
ssl.keystore.certificate.chain: string per_listener
    The certificate chain as PEM text, instead of ssl.keystore.location. Requires ssl.keystore.key.
ssl.keystore.key: string sensitive per_listener
    The private key as PEM text (PKCS#8 or traditional).
ssl.truststore.location: string per_listener
    File with the CAs of clients' certificates, PEM or PKCS12. Required if ssl.client.auth is not none.
ssl.truststore.type: enum(PEM|PKCS12) per_listener
    PEM or PKCS12. Not set: recognised by the file's content.
    refused JKS: only Java reads it; convert the file with keytool -importkeystore ... -deststoretype PKCS12
ssl.truststore.password: string sensitive per_listener
    Password of a PKCS12 trust store.
ssl.truststore.certificates: string per_listener
    The CAs as PEM text, instead of ssl.truststore.location.
ssl.client.auth: enum(none|requested|required) per_listener = none
    Whether clients of SSL listeners must have a certificate that a CA of the trust store has signed.
ssl.principal.mapping.rules: string per_listener = DEFAULT
    Maps the subject of a client's certificate, such as CN=alice,O=Example, to a user: RULE:pattern/replacement/[LU] and
    DEFAULT, separated by commas; the first match decides. DEFAULT: the whole subject is the user's name. A client whose
    subject matches no rule is refused.
ssl.enabled.protocols: list(TLSv1.2|TLSv1.3) per_listener = TLSv1.2,TLSv1.3
    Enabled versions of TLS.
    refused SSLv3: {_BROKEN}
    refused TLSv1: {_BROKEN}
    refused TLSv1.1: {_BROKEN}
ssl.cipher.suites: list pattern={"|".join(_SUITES)} per_listener
    Enabled cipher suites. Not set: all of these: {", ".join(_SUITES)}.
"""

_CLUSTER = r"""
cluster.seeds: list
    (mqd) Controller listeners of some hosts, HOST:PORT separated by commas; the same on every host.
    If their data directories are empty, the hosts named here form a cluster once all of them are
    up, and are its first voters. A host that is started later with the same seeds joins that
    cluster. Not set: this host is a cluster of its own.
controller.listener: string
    (mqd) HOST:PORT where other hosts reach this one's controller (TCP, and UDP for gossip). The
    default, if cluster.seeds or inter.broker.listener is set, is the address of the first listener,
    with its port + 2. If none of the three is set, other hosts cannot reach the controller.
advertised.controller.listener: string
    (mqd) The address that other hosts use instead of controller.listener. Required if controller.listener binds to all
    addresses.
inter.broker.listener: string
    (mqd) HOST:PORT where other hosts fetch this one's partitions. The default, if cluster.seeds or
    controller.listener is set, is the address of the first listener, with its port + 1.
advertised.inter.broker.listener: string
    (mqd) The address that other hosts use instead of inter.broker.listener. Required if inter.broker.listener binds to
    all addresses.
cluster.key.file: string
    (mqd) File with the secret with which hosts of one cluster authenticate each other. It must be
    the same on every host, and readable only by the user that the broker runs as. `mqd cluster key`
    creates one, and rotates it while the cluster runs. Required if a listener between hosts can be
    reached from other machines. A changed file is used without a restart.
cluster.tls: enum(off|allowed|required) = off
    (mqd) TLS 1.3 between hosts. Each host proves its node id with a certificate. allowed: TLS is used with every host
    that supports it; required: hosts without TLS are refused. `mqd up --secure` sets required.
cluster.tls.certificate.file: string
    (mqd) PEM file with this host's certificate and its chain up to the CA. The certificate has the URI
    mqd://node/NODE_ID as a subject alternative name. Required unless cluster.tls=off. A changed file is used without
    a restart.
cluster.tls.key.file: string
    (mqd) PEM file with the certificate's private key, unencrypted, readable only by the user that
    the broker runs as. Not set: the key is in cluster.tls.certificate.file.
cluster.tls.ca.file: string
    (mqd) PEM file with the CAs of the hosts' certificates. Required unless cluster.tls=off.
broker.session.timeout.ms: int >=500 <=600000 = 5500
    If the controller receives no heartbeat from a host for this long, the host loses the leadership
    of all its partitions. Hosts that are cut off stop serving as leaders before that. If the active
    controller's host is lost, another controller is elected first
    (controller.quorum.fetch.timeout.ms).
broker.heartbeat.interval.ms: int >=50 <=60000 = 1000
    Interval of a host's heartbeats to the controller.
controller.quorum.fetch.timeout.ms: int >=200 <=60000 = 2000
    How long the controllers wait for their leader before they elect another. The leader's lease is
    three quarters of this time.
replica.lag.time.max.ms: long >=100 <=INT_MAX dynamic = 30000
    A follower that has not caught up with its leader for this long leaves the in-sync set. To
    rejoin, it must have been caught up within the last half of this time. The value on the leader's
    host applies.
replica.fetch.wait.max.ms: int >=1 <=60000 = 500
    How long a leader may delay its response to a follower that has all records.
replica.fetch.max.bytes: int >=1024 <=1073741824 = 1048576
    Maximum number of bytes of one partition in a leader's response; a single batch may be larger.
replica.fetch.response.max.bytes: int >=1024 <=536870912 = 4194304
    Maximum size of a leader's response in bytes (Kafka: 10485760); a single batch may be larger.
replica.fetch.backoff.ms: int >=1 <=60000 = 200
    How long a follower waits, after the leader has refused a fetch of a partition, before it
    fetches again (Kafka: 1000). Right after a leader change, when the new leader might not know yet
    that it leads, the delay begins at 5 ms and doubles.
replica.socket.timeout.ms: int >=100 <=600000 = 10000
    A follower reconnects if its leader does not respond within replica.fetch.wait.max.ms plus this
    time (Kafka: 30000).
follower.replication.throttled.rate: long >=1 <=LONG_MAX dynamic = LONG_MAX
    Maximum number of bytes per second that this host's replicas fetch while they are not in sync, if they are listed in
    their topic's follower.replication.throttled.replicas; each worker gets an equal share. In-sync replicas are never
    throttled.
leader.replication.throttled.rate: long >=0 <=LONG_MAX dynamic ignored = LONG_MAX
    Accepted. Replication is throttled at the follower, by follower.replication.throttled.rate of
    the follower's host.
replica.alter.log.dirs.io.max.bytes.per.second: long >=1 <=LONG_MAX dynamic = LONG_MAX
    Maximum number of bytes per second that are copied to move partitions between log directories; each worker gets an
    equal share. The limit does not apply to records written during a move: they are copied at its end, while the
    partition is closed.
auto.leader.rebalance.enable: bool = true
    Return leadership to preferred leaders that are in sync again.
leader.imbalance.check.interval.seconds: long >=1 <=INT_MAX = 300
    With auto.leader.rebalance.enable: how often the active controller checks which partitions are
    not led by their preferred leaders.
leader.imbalance.per.broker.percentage: int >=0 <=100 = 10
    Leadership is returned to a host when other hosts lead more than this percentage of the partitions that prefer it as
    leader.
replication.recovery.delay.ms: long >=-1 <=LONG_MAX = 600000
    (mqd) The replicas of a lost host are created on other hosts after this long, unless the host
    returns. -1: never.
replica.moves.max: int >=1 <=100000 = 50
    (mqd) Maximum number of partitions whose replicas are moved at the same time to drain a host, to balance the load,
    or to replace a lost host.
controlled.shutdown.transfers.max: int >=1 <=1000000 = 1000
    (mqd) Maximum number of partitions whose leadership a host hands over with each heartbeat while
    it shuts down.
controlled.shutdown.wait.ms: int >=0 <=INT_MAX = 30000
    (mqd) How long a host waits, when it shuts down, for other hosts to take over the leadership of
    its partitions and to learn of the change.
partition.retire.barrier.ms: int >=0 <=INT_MAX = 10000
    (mqd) When partitions are retired (mqd topic retire-partitions): how long their producers are
    held back so that consumers can read the existing records. After that, new records are
    redirected.
partition.retire.grace.ms: long >=0 <=LONG_MAX = 600000
    (mqd) How long retired partitions that are empty, and no longer shown to clients, still accept
    records from producers with old metadata. It should be at least twice the clients'
    metadata.max.age.ms.
"""

_TOPICS = r"""
num.partitions: int >=1 <=16384 = 1
    Number of partitions of a topic that is created without a partition count.
default.replication.factor: int >=-1 <=32767 = -1
    Number of replicas of a topic that is created without a replication factor. -1: one on each host,
    at most 3. Hosts that are down count; hosts being drained do not.
min.insync.replicas: int >=-1 dynamic = -1
    Number of replicas that must have a record before an acks=all request is acknowledged (Kafka:
    1). -1: 2 for new topics of three replicas or more, else 1. DescribeConfigs shows the effective
    number for a topic, and -1 for a broker. On a single host, which keeps one replica, values above
    1 are refused.
auto.create.topics.enable: bool = true
    Create a topic when a client requests one that does not exist.
delete.topic.enable: bool = true
    Allow topics to be deleted.
unclean.leader.election.enable: bool dynamic = false
    true: if no in-sync replica is alive, a replica that lacks records becomes leader after a second; the missing
    records are lost, including acknowledged ones. false: the partition waits; an operator can elect such a leader with
    kafka-leader-election.sh --election-type unclean. If configuration files set it, the value on the active
    controller's host applies.
message.max.bytes: int >=0 dynamic = 1048588
    The largest record batch (max.message.bytes of a topic).
compression.type: enum(uncompressed|zstd|lz4|snappy|gzip|producer) dynamic = producer
    The codec in which batches are stored: the producer's (producer), or the given one. The broker compresses batches
    that arrive in another codec (in its acceptor process, not in the workers), which costs CPU
    time; with `uncompressed`, a batch that becomes larger than message.max.bytes gets
    MESSAGE_TOO_LARGE. Internal topics always use producer.
compression.gzip.level: int >=-1 <=9 dynamic = -1
    Level at which the broker itself compresses (compression.type): 1 to 9; -1 means 6.
    refused 0: level 0 does not compress; that is compression.type=uncompressed
compression.lz4.level: int >=1 <=17 dynamic = 9
    Level at which the broker itself compresses (compression.type): 1 to 17.
compression.zstd.level: int >=-131072 <=22 dynamic = 3
    Level at which the broker itself compresses (compression.type).
fetch.max.bytes: int >=1024 = 57671680
    The largest response to a Fetch, in bytes.
max.incremental.fetch.session.cache.slots: int >=0 <=1000000 = 1000
    Maximum number of fetch sessions (KIP-227) that one worker keeps.
producer.id.expiration.ms: int >=1 = 86400000
    A producer's sequence numbers are dropped after this long without a batch.
producer.id.count.max: int >=16 <=1000000 = 4096
    (mqd) Maximum number of idempotent producers that one partition remembers. Those that have been
    idle the longest are dropped first.
"""

_LOG = r"""
log.dirs: list
    Directories that hold the partitions, separated by commas. Not set: DATA_DIR/log.
log.segment.bytes: int >=4096 dynamic = 1073741824
    Size at which a segment is rolled (segment.bytes of a topic).
log.roll.ms: long >=1 dynamic
    Age at which a segment is rolled. Not set: log.roll.hours.
log.roll.hours: int >=1 = 168
    Like log.roll.ms, but in hours.
log.roll.jitter.ms: long >=0 dynamic
    Each segment is rolled earlier by a random amount, at most this long, so that segments do not
    all roll at the same time. Not set: log.roll.jitter.hours.
log.roll.jitter.hours: int >=0 = 0
    Like log.roll.jitter.ms, but in hours.
log.retention.ms: long >=-1 dynamic
    Age at which records are deleted; -1: never. Not set: log.retention.minutes.
log.retention.minutes: int >=-1
    Like log.retention.ms, but in minutes. Not set: log.retention.hours.
log.retention.hours: int >=-1 = 168
    Like log.retention.ms, but in hours.
log.retention.bytes: long >=-1 dynamic = -1
    Size of a partition above which its oldest segments are deleted; -1: no limit.
log.retention.check.interval.ms: long >=1 = 300000
    How often retention is checked.
log.scrub.interval.ms: long >=-1 = 604800000
    (mqd) How often every closed segment is read and its checksums are checked. A newly closed
    segment is checked within an hour. The value must be at least 1000. -1: never.
log.scrub.bytes.per.second: long >=65536 = 52428800
    (mqd) Maximum rate at which one worker reads while it scrubs (see log.scrub.interval.ms).
retention.free.bytes: long >=-1 dynamic = -1
    (mqd) Retention by free space: while a directory's file system has less than this free, its oldest closed segments
    are deleted. -1: off.
log.dirs.free.bytes.min: long >=0 dynamic = 67108864
    (mqd) The reserve: while less space than this is free, Produce to the directory is refused with
    a retriable error; everything else continues.
log.cleanup.policy: list(delete|compact) dynamic may_be_empty = delete
    The policy for old segments: delete by age and size, compact to the last value of each key, both
    (compact,delete), or nothing (empty).
log.segment.delete.delay.ms: long >=0 dynamic ignored = 60000
    Accepted without effect. A deleted segment's files are removed immediately; a reader that has one open can read to
    its end.
log.index.interval.bytes: int >=0 dynamic = 4096
    Bytes of log between two index entries.
log.index.size.max.bytes: int >=4 dynamic ignored = 10485760
    Accepted (segment.index.bytes of a topic); indexes grow as needed.
log.message.timestamp.type: enum(CreateTime|LogAppendTime) dynamic = CreateTime
    CreateTime: a record has the producer's timestamp. LogAppendTime: the broker sets it.
log.message.timestamp.before.max.ms: long >=0 dynamic = LONG_MAX
    How far in the past a record's timestamp may be.
log.message.timestamp.after.max.ms: long >=0 dynamic = 3600000
    How far in the future a record's timestamp may be.
log.preallocate: bool dynamic ignored = false
    Accepted. mqd always preallocates, in steps (log.preallocate.bytes.min and max).
log.preallocate.bytes.min: long >=4096 <=1073741824 = 65536
    (mqd) Initial step of preallocation. The step is doubled while writes use it up within a second, and halved again
    when they slow down.
log.preallocate.bytes.max: long >=4096 <=2147483648 = 33554432
    (mqd) Largest step of preallocation.
log.stripe.bytes: long >=0 <=1073741824 = 0
    (mqd) Stripe width of the RAID on which log.dirs are stored; preallocation is rounded to it. 0:
    none.
log.flush.on.ack: bool dynamic = true
    (mqd) Acknowledge acks=all requests only after their records are on disk (fsync, by group
    commit). false: as in Kafka, as soon as the records are in the page cache (flush.on.ack of a
    topic).
log.flush.linger.us: int >=0 <=1000000 = 0
    (mqd) How long a flush waits for more acks=all requests to join it: a longer time gives higher throughput and
    latency. 0: a flush starts as soon as the previous one has ended.
log.flush.interval.messages: long >=1 dynamic ignored = LONG_MAX
    Accepted. Records are not counted. With log.flush.on.ack, acks=all requests wait for the flush
    itself; other records are flushed after log.flush.interval.ms.
log.flush.interval.ms: long >=0 dynamic
    Flush a partition's records at least this often. This is checked once a second; values above 5 s
    are treated as 5 s. Not set: log.flush.scheduler.interval.ms.
log.flush.scheduler.interval.ms: long >=1 = LONG_MAX
    See log.flush.interval.ms.
log.cleaner.delete.retention.ms: long >=0 dynamic = 86400000
    How long a tombstone (a record without a value), or the marker of a transaction, can still be
    read after a compaction first found it. A consumer that starts from the beginning must reach the
    end within that time to see every deletion.
log.cleaner.min.compaction.lag.ms: long >=0 dynamic = 0
    Age below which a record is not compacted.
log.cleaner.max.compaction.lag.ms: long >=1 dynamic = LONG_MAX
    Age at which a record must be compacted; the active segment is closed in time.
log.cleaner.min.cleanable.ratio: double >=0 <=1 dynamic = 0.5
    Share of a log that must be dirty (not compacted yet) before it is compacted.
"""

_COORDINATORS = r"""
offsets.topic.num.partitions: int >=1 <=16384 = 50
    Number of partitions of __consumer_offsets. Used when the topic is created; must not change afterwards.
offsets.topic.segment.bytes: int >=4096 = 104857600
    Segment size of __consumer_offsets, used when the topic is created.
offsets.retention.minutes: int >=1 = 10080
    Committed offsets of a group are deleted this long after the group lost its last member, or after the commit if it
    never had one.
offsets.retention.check.interval.ms: long >=1 = 600000
    How often the broker looks for committed offsets that have expired (offsets.retention.minutes).
offset.metadata.max.bytes: int >=0 <=32767 = 4096
    The longest text that a client may store with a committed offset.
offsets.commit.timeout.ms: int >=1 = 5000
    How long a commit of offsets waits for the disk before it gets a retriable error.
group.initial.rebalance.delay.ms: int >=0 = 300
    How long the first rebalance of a group waits for more members, counted from the last one that
    joined (Kafka: 3000). In total, it waits at most the rebalance timeout.
group.min.session.timeout.ms: int >=1 = 6000
    The shortest session.timeout.ms that a consumer of the classic protocol may request.
group.max.session.timeout.ms: int >=1 = 1800000
    The longest session.timeout.ms that a consumer of the classic protocol may request.
group.max.size: int >=1 = INT_MAX
    Maximum number of members of a group of the classic protocol.
group.coordinator.memory.bytes: long >=67108864 = 268435456
    (mqd) Memory of all groups that this host coordinates: members with their metadata and
    assignments, offsets with their metadata. When three quarters are in use, new groups are
    refused; at seven eighths, new members are refused too. Both get an error that clients retry
    (COORDINATOR_LOAD_IN_PROGRESS). Existing groups continue.
group.consumer.session.timeout.ms: int >=1 = 45000
    A member of a consumer group (KIP-848) is removed after this long without a heartbeat. Per
    group: consumer.session.timeout.ms.
group.consumer.min.session.timeout.ms: int >=1 = 45000
    The shortest consumer.session.timeout.ms that a group may have.
group.consumer.max.session.timeout.ms: int >=1 = 60000
    The longest consumer.session.timeout.ms that a group may have.
group.consumer.heartbeat.interval.ms: int >=1 = 5000
    How often members of consumer groups send heartbeats; a member that waits for partitions gets a
    shorter interval.
group.consumer.heartbeat.interval.quick.ms: int >=1000 = 1000
    (mqd) While all consumer groups together have few members, members send heartbeats this often,
    so that they learn of a rebalance sooner. With more members, the interval is one millisecond per
    member, up to group.consumer.heartbeat.interval.ms. A group that sets
    consumer.heartbeat.interval.ms keeps its own value. The minimum is 1000, because librdkafka uses
    the interval as the timeout of the response: with less, heartbeats would time out while the
    broker is busy.
group.consumer.min.heartbeat.interval.ms: int >=1 = 5000
    The shortest consumer.heartbeat.interval.ms that a group may have.
group.consumer.max.heartbeat.interval.ms: int >=1 = 15000
    The longest consumer.heartbeat.interval.ms that a group may have.
group.consumer.max.size: int >=1 = INT_MAX
    Maximum number of members of a consumer group.
group.consumer.assignors: list(uniform|range) = uniform,range
    Server-side assignors that members of consumer groups may request; the first one is the default.
group.consumer.migration.policy: enum(bidirectional|upgrade|downgrade|disabled) = bidirectional
    Whether a group with members may change its protocol: from classic to consumer (upgrade), back (downgrade), both
    (bidirectional), or never (disabled).
group.streams.session.timeout.ms: int >=1 = 45000
    A member of a streams group (KIP-1071) is removed after this long without a heartbeat. Per
    group: streams.session.timeout.ms.
group.streams.min.session.timeout.ms: int >=1 = 45000
    The shortest streams.session.timeout.ms that a group may have.
group.streams.max.session.timeout.ms: int >=1 = 60000
    The longest streams.session.timeout.ms that a group may have.
group.streams.heartbeat.interval.ms: int >=1 = 5000
    How often members of streams groups send heartbeats. Per group: streams.heartbeat.interval.ms.
group.streams.min.heartbeat.interval.ms: int >=1 = 5000
    The shortest streams.heartbeat.interval.ms that a group may have.
group.streams.max.heartbeat.interval.ms: int >=1 = 15000
    The longest streams.heartbeat.interval.ms that a group may have.
group.streams.max.size: int >=1 = INT_MAX
    Maximum number of members of a streams group.
group.streams.num.standby.replicas: int >=0 = 0
    Number of standby tasks for each stateful task. Per group: streams.num.standby.replicas.
group.streams.max.standby.replicas: int >=0 = 2
    The largest streams.num.standby.replicas that a group may have.
group.streams.initial.rebalance.delay.ms: int >=0 = 3000
    How long the first assignment of an empty streams group waits for further members. Per group:
    streams.initial.rebalance.delay.ms.
group.share.session.timeout.ms: int >=1 = 45000
    A member of a share group (KIP-932) is removed after this long without a heartbeat. Per group:
    share.session.timeout.ms.
group.share.min.session.timeout.ms: int >=1 = 45000
    The shortest share.session.timeout.ms that a group may have.
group.share.max.session.timeout.ms: int >=1 = 60000
    The longest share.session.timeout.ms that a group may have.
group.share.heartbeat.interval.ms: int >=1 = 5000
    How often members of share groups send heartbeats; a member whose partitions are being
    initialized gets a shorter interval.
group.share.min.heartbeat.interval.ms: int >=1 = 5000
    The shortest share.heartbeat.interval.ms that a group may have.
group.share.max.heartbeat.interval.ms: int >=1 = 15000
    The longest share.heartbeat.interval.ms that a group may have.
group.share.max.size: int >=1 <=1000 = 200
    Maximum number of members of a share group.
group.share.delivery.count.limit: int >=2 <=10 = 5
    A record that has been delivered this many times to a share group without being accepted is not
    delivered again.
errors.deadletterqueue.topic.name.prefix: string dynamic = dlq.
    The prefix of the names of dead-letter topics (errors.deadletterqueue.topic.name of a group). Empty: any name.
errors.deadletterqueue.auto.create.topics.enable: bool dynamic = false
    Create a group's dead-letter topic if it does not exist.
group.share.record.lock.duration.ms: int >=1000 <=3600000 = 30000
    How long a record is locked for the member of a share group that acquired it. After that, other
    members may acquire it. Per group: share.record.lock.duration.ms.
group.share.min.record.lock.duration.ms: int >=1000 <=30000 = 15000
    The shortest share.record.lock.duration.ms that a group may have.
group.share.max.record.lock.duration.ms: int >=30000 <=3600000 = 60000
    The longest share.record.lock.duration.ms that a group may have.
group.share.partition.max.record.locks: int >=100 <=10000 = 2000
    Maximum number of records per partition that are acquired, or that have been released and await
    redelivery. A slow record does not block others: accepted records after it do not count.
group.share.max.share.sessions: int >=1 = 2000
    Maximum number of share sessions on a broker. Each member of a share group that reads from the broker has one.
share.memory.max.bytes: int >=1048576 = 67108864
    (mqd) Memory of one worker for the states of share groups. When all of it is in use, no further
    records are delivered.
group.share.initialize.retry.interval.ms: int >=1 = 30000
    How long the initialization of a share-partition may take before it is retried.
share.coordinator.state.topic.num.partitions: int >=1 <=16384 = 50
    Number of partitions of __share_group_state. Used when the topic is created; must not change afterwards.
share.coordinator.state.topic.segment.bytes: int >=1048576 <=1073741824 = 104857600
    Segment size of __share_group_state, used when the topic is created.
share.coordinator.snapshot.update.records.per.snapshot: int >=0 <=500 = 500
    Number of updates of a share-partition that are written to __share_group_state between two snapshots.
share.coordinator.state.topic.prune.interval.ms: int >=1 = 300000
    How often records of __share_group_state that no share-partition needs are deleted.
share.coordinator.cold.partition.snapshot.interval.ms: int >=1 = 300000
    A share-partition with updates since its last snapshot gets a new snapshot after this long.
queue.delete.on.ack.interval.ms: int >=100 dynamic = 30000
    (mqd) How often the broker deletes, in topics with queue.delete.on.ack, the records that every share group has
    finished.
transaction.state.log.num.partitions: int >=1 <=16384 = 50
    Number of partitions of __transaction_state. Used when the topic is created; must not change afterwards.
transaction.partition.verification.enable: bool dynamic = true
    A partition accepts a transaction's first batch only after the transaction's coordinator has confirmed that the
    partition is part of the transaction (KIP-890). Without this check, a late batch of an older client may leave a
    transaction open forever. For clients that use transaction.version 2 the coordinator is always consulted.
transaction.max.timeout.ms: int >=1 = 900000
    The longest transaction.timeout.ms that a producer may request.
transactional.id.expiration.ms: int >=1 = 604800000
    A transactional id that has not been used for this long is dropped.
transaction.state.log.segment.bytes: int >=4096 = 104857600
    Segment size of __transaction_state, used when the topic is created.
log.cleaner.enable: bool = true
    Compact the topics whose cleanup.policy includes compact.
log.cleaner.backoff.ms: long >=0 dynamic = 15000
    How long the cleaner waits when there is nothing to compact.
log.cleaner.dedupe.buffer.size: long >=1048576 dynamic = 134217728
    Memory of all workers together for the keys of the logs being compacted: 24 bytes per key. Logs with more keys are
    compacted in several runs.
log.cleaner.io.buffer.load.factor: double >=0.01 <=0.95 dynamic = 0.9
    How full log.cleaner.dedupe.buffer.size may become.
log.cleaner.io.max.bytes.per.second: double >=65536 dynamic = 1.7976931348623157E308
    Maximum number of bytes per second that all workers together read and write for compaction.
"""

_AUTHORIZATION = r"""
authorizer.class.name: enum(|standard|org.apache.kafka.metadata.authorizer.StandardAuthorizer) =
    `standard`, or the name of Kafka's StandardAuthorizer: access control lists decide (kafka-acls,
    `mqd acl`). Empty: every client may do everything. The value must be the same on all hosts.
super.users: string =
    Principals that may do everything, separated by semicolons: User:admin;User:ops.
allow.everyone.if.no.acl.found: bool = false
    A resource without any matching access control list is open to every client.
local.principal.mapping.rules: string = DEFAULT
    (mqd) Maps the login name of a local process to a user: RULE:pattern/replacement/[LU] and DEFAULT, separated by
    commas; the first that matches decides. A process that maps to no user connects over TCP; a process that runs as the
    broker's own user may do everything.
authorizer.log.only: bool = false
    (mqd) Operations that access control lists deny are logged, but carried out. This shows which permissions the
    clients of a running cluster need before the lists are enforced. Denials are in logs/audit.log.
"""

_QUOTAS = r"""
quota.window.num: int >=2 <=1000 = 11
    Allows bursts: a client that has been idle may use, in one go, as much as its quota allows in
    (quota.window.num - 1) * quota.window.size.seconds seconds.
quota.window.size.seconds: int >=1 <=3600 = 1
    See quota.window.num.
controller.quota.window.num: int >=1 <=1000 = 11
    Allows bursts: a client that has been idle may use, in one go, as much as its
    controller_mutation_rate allows in controller.quota.window.num *
    controller.quota.window.size.seconds seconds.
controller.quota.window.size.seconds: int >=1 <=3600 = 1
    See controller.quota.window.num.
"""

_RUNTIME = r"""
process.sandbox: enum(on|off) = on
    (mqd) The broker's processes give up system calls that they do not need (seccomp), the ability to gain privileges,
    and, except for the keeper, access to files outside the data directory, log.dirs and the paths in the configuration
    (Landlock), as far as the kernel supports it; `mqd status` shows what is in force.
core.files.allow: bool = false
    (mqd) The broker's processes may write core files, and other processes of their user (debuggers) may read their
    memory, which contains records, passwords and keys.
worker.count: int >=0 <=64 = 0
    (mqd) Number of worker processes. 0: one for each CPU that the broker may use (affinity and
    cgroup quota), or fewer if the shared memory of that many workers does not fit in /dev/shm.
worker.cpus: list =
    (mqd) CPUs to pin the workers to, in order, such as 0,2-3. Empty: not pinned.
worker.spin.us: int >=0 <=1000000 = 0
    (mqd) How long an idle worker polls before it sleeps: a longer time gives lower latency and uses more CPU.
worker.loop.profile: bool = false
    (mqd) Measure how the iterations of a worker's event loop spend their time: writing, allocating, flushing, locks,
    page faults, waiting for a CPU (docs/operations.md). This costs a few microseconds per iteration.
io.backend: enum(auto|io_uring|epoll) = auto
    (mqd) How workers do I/O. auto: io_uring where the kernel allows it.
receive.arena.bytes: long >=1048576 <=4294967296 = 16777216
    (mqd) Shared memory of one worker for received requests. Requests larger than half of it use
    large.request.memory.bytes.
sendfile.bytes.min: int >=0 = 8192
    (mqd) Ranges of at least this size are sent to consumers by sendfile; smaller ones are copied.
read.fd.count.max: int >=16 <=65536 = 512
    (mqd) Maximum number of segment files that one worker keeps open for reading.
slow.request.ms: int >=0 <=2147483647 = 0
    (mqd) Requests that take longer than this are logged by the worker that handles them, with the
    time of each stage; at most 20 are logged a second (docs/operations.md). 0: none.
logging.format: enum(human|json) = human
    (mqd) Format of the broker's own log lines.
logging.level: enum(error|warning|info|debug) = info
    (mqd) Lowest level of the broker's own log lines; mqd log-level changes it at run time.
"""

BROKER: dict[str, Property] = table(
    _LISTENERS
    + _AUTHENTICATION
    + _TLS
    + _CLUSTER
    + _TOPICS
    + _LOG
    + _COORDINATORS
    + _AUTHORIZATION
    + _QUOTAS
    + _RUNTIME
    + "".join(
        f"{name}: string ignored\n    {doc}\n"
        for doc, names in kafka_names.WITHOUT_EFFECT.items()
        for name in names.split()
    )
)

TOPIC: dict[str, Property] = table(
    r"""
cleanup.policy: as log.cleanup.policy
    The policy for old segments: delete, compact, or both.
retention.ms: as log.retention.ms = 604800000
    Age at which records are deleted; -1: never.
retention.bytes: as log.retention.bytes
segment.bytes: as log.segment.bytes
    Size at which a segment is rolled.
segment.ms: as log.roll.ms = 604800000
    Age at which a segment is rolled.
segment.jitter.ms: as log.roll.jitter.ms = 0
    Each segment is rolled earlier by a random amount, at most this long.
segment.index.bytes: as log.index.size.max.bytes
    Accepted without effect: indexes grow as needed.
max.message.bytes: as message.max.bytes
    The largest record batch.
message.timestamp.type: as log.message.timestamp.type
message.timestamp.before.max.ms: as log.message.timestamp.before.max.ms
message.timestamp.after.max.ms: as log.message.timestamp.after.max.ms
min.insync.replicas: as min.insync.replicas
    Number of replicas that must have a record before an acks=all request is acknowledged (Kafka:
    1). -1: 2 for a topic created with three replicas or more, else 1. DescribeConfigs shows the
    effective number.
flush.on.ack: as log.flush.on.ack
    (mqd) Acknowledge acks=all requests only after their records are on disk. Always true for
    internal topics.
flush.messages: as log.flush.interval.messages
    Accepted without effect. Records are not counted; see flush.on.ack and flush.ms.
flush.ms: as log.flush.interval.ms = LONG_MAX
    Flush at least this often. This is checked once a second; values above 5 s are treated as 5 s.
index.interval.bytes: as log.index.interval.bytes
compression.type: as compression.type
    The codec in which batches are stored: the producer's (producer), or the given one.
compression.gzip.level: as compression.gzip.level
compression.lz4.level: as compression.lz4.level
compression.zstd.level: as compression.zstd.level
file.delete.delay.ms: as log.segment.delete.delay.ms
preallocate: as log.preallocate
    Accepted without effect. mqd always preallocates, in steps.
unclean.leader.election.enable: as unclean.leader.election.enable
    true: if no in-sync replica is alive, a replica that lacks records becomes leader; the missing records are lost,
    including acknowledged ones.
delete.retention.ms: as log.cleaner.delete.retention.ms
min.compaction.lag.ms: as log.cleaner.min.compaction.lag.ms
max.compaction.lag.ms: as log.cleaner.max.compaction.lag.ms
min.cleanable.dirty.ratio: as log.cleaner.min.cleanable.ratio
replica.lag.max.messages: long >=-1 dynamic = -1
    (mqd) A follower that is more than this many records behind its leader for half a second leaves
    the in-sync set before replica.lag.time.max.ms is over. Set it well above the number of records
    that are written while a follower fetches and flushes. For a follower that has not fetched from
    a new leader yet, only replica.lag.time.max.ms applies. -1: no limit.
record.validation: enum(none|uncompressed|all) dynamic = all
    (mqd) Which batches are parsed before they are accepted, so that no invalid record stops
    consumers. An invalid batch is refused with INVALID_RECORD. `all`: every batch, as in Kafka.
    `uncompressed`: compressed batches are stored without this check. `none`: no batch is checked.
    Batches for compacted topics are always parsed.
schedule.to: string dynamic =
    (mqd) The topic to which this topic's records are delivered at the time that their header mqd-deliver-at or
    mqd-delay-ms specifies (docs/schedules.md). Retention by age and size does not apply: records are deleted when they
    have been delivered. Empty: none.
schedule.delay.ms: long >=0 <=31622400000 dynamic = 0
    (mqd) With schedule.to: how long after its timestamp a record without such a header is delivered. A
    change applies to the records that mqd-timer has not read yet; earlier ones keep their delay.
queue.delete.on.ack: bool dynamic = false
    (mqd) Records are deleted as soon as every share group of the topic has finished with them: they
    were accepted, rejected, or delivered group.share.delivery.count.limit times. A group without
    members keeps the records that it has not finished with, until retention deletes them or the
    group is deleted; consumer groups do not prevent deletion. Whole segment files are deleted, so
    set segment.bytes as well. Cannot be used with cleanup.policy=compact.
queue.unflushed.bytes: long >=0 dynamic = 0
    (mqd) With flush.on.ack=false: a partition's records are flushed when this many bytes are
    unflushed, or after flush.ms where that is set, instead of after 5 s or 8 MiB. Records that
    queue.delete.on.ack deletes before the flush never reach the disk; a power cut loses unflushed
    records (docs/queues.md). At most about three closed segments stay unflushed; further ones cause
    a flush. So segment.bytes should be at least a third of this size. 0: the records are flushed
    like those of other topics.
share.priority: int >=0 <=9 dynamic = 0
    (mqd) A member of a share group that reads several topics gets records of topics with a higher priority first. This
    applies only among partitions that the same host leads. One record in ten is reserved for lower priorities, so that
    they do not wait forever.
dedup.window.ms: long >=0 <=604800000 dynamic = 0
    (mqd) Deduplication: a record is not written if an earlier record with the same id was appended
    to the same partition at most this long ago, whichever producer sent it. It is then acknowledged
    with the offset of the earlier record. Needs message.timestamp.type=LogAppendTime,
    compression.type=uncompressed and mqd.version 6 (docs/deduplication.md). 0: records have no ids.
dedup.header: string dynamic = dedup-id
    (mqd) With dedup.window.ms: the header with a record's id, at most 63 bytes. A record without it is refused
    (INVALID_RECORD).
dedup.ids.max: int >=1 <=100000000 dynamic = 3000000
    (mqd) With dedup.window.ms: how many ids a partition keeps, at about 20 bytes each. While the window contains
    that many, further records are refused with a retriable error.
acks.replicas: int >=0 <=16 dynamic = 0
    (mqd) An acks=all request waits for this many replicas, including the leader, and not for the
    others: the in-sync set is kept at this many members. The other replicas are spares. If a record
    has waited for a member for 100 ms, that member is swapped for a spare that is ahead of it.
    The value must be at least 2, and at most the number of replicas. While fewer are in sync,
    acks=all requests are refused. If acks.replicas is set, min.insync.replicas has no effect, but
    must not exceed acks.replicas. Needs mqd.version 10 (docs/delivery.md). 0: all replicas that are
    in sync.
view.of: string dynamic =
    (mqd) The base topic. If it is set, this topic is a view: it has no log of its own, and shows those records of the
    base that view.filter selects, in the same partitions and at the same offsets. It is set when the view is created,
    with view.filter as the only other property, and never changes. Needs mqd.version 9 (docs/views.md). Empty: the
    topic has a log.
view.filter: string dynamic =
    (mqd) With view.of: a condition on the headers of records, such as tag IN ('a', 'b') AND NOT EXISTS test; at most 64
    comparisons and operators. It never changes.
errors.deadletterqueue.group.enable: bool dynamic = false
    The topic may receive dead letters of share groups.
remote.storage.enable: bool dynamic ignored = false
    Only Kafka's default is accepted: tiered storage is not available.
    refused true: tiered storage is not available
remote.log.copy.disable: bool dynamic ignored = false
    Only Kafka's default is accepted: tiered storage is not available.
    refused true: tiered storage is not available
remote.log.delete.on.disable: bool dynamic ignored = false
    Only Kafka's default is accepted: tiered storage is not available.
    refused true: tiered storage is not available
local.retention.ms: long >=-2 <=-2 dynamic ignored = -2
    Only Kafka's default is accepted: tiered storage is not available.
local.retention.bytes: long >=-2 <=-2 dynamic ignored = -2
    Only Kafka's default is accepted: tiered storage is not available.
follower.replication.throttled.replicas: list pattern=\*|[0-9]+:[0-9]+ dynamic =
    Replicas that are throttled while they are not in sync (follower.replication.throttled.rate of their host):
    PARTITION:BROKER, separated by commas, or * for all.
leader.replication.throttled.replicas: list pattern=\*|[0-9]+:[0-9]+ dynamic ignored =
    Accepted without effect: PARTITION:BROKER, separated by commas, or *. Replication is throttled at the follower; see
    follower.replication.throttled.replicas.
""",
    BROKER,
)

GROUP: dict[str, Property] = table(  # of groups (ConfigResource type 32)
    """
consumer.session.timeout.ms: as group.consumer.session.timeout.ms
    A member is removed after this long without a heartbeat.
consumer.heartbeat.interval.ms: as group.consumer.heartbeat.interval.ms
    How often the group's members send heartbeats.
streams.session.timeout.ms: as group.streams.session.timeout.ms
    A member of a streams group is removed after this long without a heartbeat.
streams.heartbeat.interval.ms: as group.streams.heartbeat.interval.ms
    How often members of a streams group send heartbeats.
streams.num.standby.replicas: as group.streams.num.standby.replicas
    Number of standby tasks for each stateful task.
streams.initial.rebalance.delay.ms: as group.streams.initial.rebalance.delay.ms
    How long the first assignment of the empty group waits for further members.
share.session.timeout.ms: as group.share.session.timeout.ms
    A member of a share group is removed after this long without a heartbeat.
share.heartbeat.interval.ms: as group.share.heartbeat.interval.ms
    How often members of a share group send heartbeats.
share.record.lock.duration.ms: as group.share.record.lock.duration.ms
    How long a record is locked for the member that acquired it. After that, other members may
    acquire it.
share.auto.offset.reset: string dynamic = latest
    Where a share group begins in a partition that it has never read: earliest, latest, or
    by_duration:PnDTnHnMn.nS (that long before now).
share.isolation.level: enum(read_committed|read_uncommitted) dynamic = read_uncommitted
    read_committed: records of transactions are delivered when they are committed, and never if they are aborted.
errors.deadletterqueue.topic.name: string dynamic =
    The dead-letter topic for records that were rejected, or delivered group.share.delivery.count.limit times. The topic
    needs errors.deadletterqueue.group.enable=true. Empty: there are no dead letters. Needs mqd.version 5.
errors.deadletterqueue.copy.record.enable: bool dynamic = false
    Dead letters have the key, the value and the headers of their records. false: they have only
    headers that identify the records.
share.fifo: string dynamic =
    (mqd) key: records of a partition with the same key are delivered one after the other. Each is
    delivered only when the previous one has been accepted, rejected, or delivered for the last
    time. header:NAME: the same for records with the same value of the header NAME. Records without
    a key, or without the header, have no order. Empty: records have no order. Needs mqd.version 7.
share.retry.backoff.ms: int >=0 <=60000 dynamic = 0
    (mqd) A record that was delivered and not accepted is not redelivered until this much time has
    passed. The time doubles with each delivery, up to share.retry.backoff.max.ms. 0: it is
    redelivered immediately.
share.retry.backoff.max.ms: int >=0 <=60000 dynamic = 60000
    (mqd) The longest time before a further delivery. A waiting record counts as locked
    (group.share.partition.max.record.locks).
""",
    BROKER,
)

CLIENT_METRICS: dict[str, Property] = table(  # of subscriptions (KIP-714, ConfigResource type 16)
    """
metrics: list dynamic =
    Prefixes of the metrics that clients push; * for all.
interval.ms: int dynamic = 300000
    How often they push.
match: list dynamic =
    Which clients push: PARAMETER=REGULAR EXPRESSION.
"""
)
CLIENT_METRICS_MATCHED = (
    "client_instance_id",
    "client_id",
    "client_software_name",
    "client_software_version",
    "client_source_address",
    "client_source_port",
)
