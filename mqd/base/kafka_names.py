"""Names of Kafka's broker properties that have no row of their own in mqd.base.properties.

Every property name of Apache Kafka 4.2 either has a row there, or is listed here as accepted
without effect or as refused (tests/compat/administration/test_kafka_names.py compares with Kafka's
jars). Properties that would weaken security, durability or retention if they were ignored are
refused.
"""

# the reason for having no effect -> the names
WITHOUT_EFFECT: dict[str, str] = {
    "Every mqd node is both broker and controller.": "process.roles",
    "See cluster.seeds; the voters are in the metadata log (mqd cluster add-voter, remove-voter).": (
        "controller.quorum.voters controller.quorum.auto.join.enable"
    ),
    "See cluster.seeds.": "controller.quorum.bootstrap.servers",
    "See inter.broker.listener.": "inter.broker.listener.name",
    "See worker.count.": "num.network.threads num.io.threads background.threads",
    "Each worker recovers its own partitions.": "num.recovery.threads.per.data.dir",
    "Each worker moves its own partitions.": "num.replica.alter.log.dirs.threads",
    "Each worker has one connection to every worker of another host whose partitions it follows.": (
        "num.replica.fetchers"
    ),
    "A leader responds as soon as it has a record.": "replica.fetch.min.bytes",
    "See connection.inflight.max and queued.max.request.bytes.": "queued.max.requests",
    "The kernel sizes socket buffers.": (
        "socket.send.buffer.bytes socket.receive.buffer.bytes replica.socket.receive.buffer.bytes"
    ),
    "The kernel's net.core.somaxconn is used.": "socket.listen.backlog.size",
    "A consumer that names its rack is always sent to an in-sync replica in that rack (KIP-392).": (
        "replica.selector.class"
    ),
    "A shutdown is always controlled.": "controlled.shutdown.enable",
    "See default.replication.factor.": (
        "offsets.topic.replication.factor transaction.state.log.replication.factor"
        " share.coordinator.state.topic.replication.factor"
    ),
    "See min.insync.replicas.": "transaction.state.log.min.isr share.coordinator.state.topic.min.isr",
    "Each worker has one cleaner.": "log.cleaner.threads",
    "Each cleaner has buffers of 1 MiB, or of the largest batch.": "log.cleaner.io.buffer.size",
    "Checkpoints are written a few seconds after a change, and after a segment is rolled.": (
        "log.flush.offset.checkpoint.interval.ms replica.high.watermark.checkpoint.interval.ms"
    ),
    "The checkpoint is written whenever a log start moves.": "log.flush.start.offset.checkpoint.interval.ms",
    "Between hosts, these timeouts apply instead: controller.quorum.fetch.timeout.ms, broker.session.timeout.ms.": (
        "request.timeout.ms socket.connection.setup.timeout.ms socket.connection.setup.timeout.max.ms"
        " controller.socket.timeout.ms controller.quorum.election.timeout.ms controller.quorum.election.backoff.max.ms"
        " controller.quorum.append.linger.ms controller.quorum.request.timeout.ms controller.quorum.retry.backoff.ms"
        " initial.broker.registration.timeout.ms server.max.startup.time.ms"
    ),
    "The metadata log is in the data directory, is flushed after every append, and limits its own size.": (
        "metadata.log.dir metadata.log.max.record.bytes.between.snapshots metadata.log.max.snapshot.interval.ms"
        " metadata.log.segment.bytes metadata.log.segment.ms metadata.max.retention.bytes metadata.max.retention.ms"
        " metadata.max.idle.interval.ms internal.metadata.log.segment.bytes internal.metadata.max.batch.size.in.bytes"
        " internal.metadata.max.fetch.size.in.bytes internal.metadata.delete.delay.millis"
    ),
    "mqd has no purgatory for waiting requests.": (
        "fetch.purgatory.purge.interval.requests producer.purgatory.purge.interval.requests"
        " delete.records.purgatory.purge.interval.requests share.fetch.purgatory.purge.interval.requests"
    ),
    "Partitions without a leader are checked every second.": "unclean.leader.election.interval.ms",
    "One process, the acceptor, runs all coordinators and batches their writes.": (
        "group.coordinator.threads group.coordinator.append.linger.ms offsets.load.buffer.size"
        " share.coordinator.threads share.coordinator.append.linger.ms share.coordinator.load.buffer.size"
        " share.coordinator.write.timeout.ms"
        " transaction.state.log.load.buffer.size group.consumer.regex.refresh.interval.ms"
    ),
    "The classic and the consumer protocol are always on.": "group.coordinator.rebalance.protocols",
    "Internal topics are written uncompressed.": (
        "offsets.topic.compression.codec share.coordinator.state.topic.compression.codec"
    ),
    "mqd uses the system's OpenSSL for TLS. For TLS between hosts see cluster.tls.": (
        "ssl.protocol ssl.provider ssl.keymanager.algorithm ssl.trustmanager.algorithm ssl.secure.random.implementation"
        " ssl.endpoint.identification.algorithm ssl.allow.dn.changes ssl.allow.san.changes"
    ),
    "The broker looks for expired producer ids and timed-out transactions continuously.": (
        "producer.id.expiration.check.interval.ms transaction.abort.timed.out.transaction.cleanup.interval.ms"
        " transaction.remove.expired.transaction.cleanup.interval.ms"
    ),
    "The broker retries every 20 ms for 100 ms.": (
        "add.partitions.to.txn.retry.backoff.max.ms add.partitions.to.txn.retry.backoff.ms"
    ),
    "Two-phase commit of transactions (KIP-939) is not available.": "transaction.two.phase.commit.enable",
    "The broker limits the partitions in one DescribeTopicPartitions response.": "max.request.partition.size.limit",
    "A host that loses a log directory continues with the others.": "log.dir.failure.timeout.ms",
    "Background work starts when it is due.": "log.initial.task.delay.ms",
    "Listeners do not have to wait for the authorizer or for authentication.": "early.start.listeners",
    "mqd has no unstable versions of requests and features.": (
        "unstable.api.versions.enable unstable.feature.versions.enable"
    ),
    "See the metrics page (admin.port).": (
        "metrics.num.samples metrics.sample.window.ms metric.reporters metrics.recording.level"
        " kafka.metrics.reporters kafka.metrics.polling.interval.secs controller.performance.sample.period.ms"
        " controller.performance.always.log.threshold.ms"
    ),
    "Only client quotas have a window: quota.window.num, controller.quota.window.num.": (
        "replication.quota.window.num replication.quota.window.size.seconds alter.log.dirs.replication.quota.window.num"
        " alter.log.dirs.replication.quota.window.size.seconds"
    ),
    "The broker does not collect client metrics (KIP-714).": "telemetry.max.bytes",
    "The feature share.version enables share groups.": "group.share.enable",
    "Share groups have one assignor, simple.": "group.share.assignors",
    "Share groups keep their state in __share_group_state.": "group.share.persister.class.name",
}

# Alternative names that Kafka also accepts.
ALIASES = {"broker.id": "node.id", "log.dir": "log.dirs"}

_USERS = "users and their passwords are kept in the cluster's metadata (kafka-configs --entity-type users)"
_MECHANISMS = "GSSAPI is not available; SCRAM-SHA-512, SCRAM-SHA-256, PLAIN and OAUTHBEARER are"
_TIERED = "tiered storage is not available"
_REMOVED = "Kafka 4 removed it; delete the line"
_POLICY = "its restrictions would not be enforced: the broker loads no Java classes"

# Prefix of the name -> error text. Ignoring these would break a guarantee.
REFUSED: dict[str, str] = {
    "ssl.engine.factory.class": "the broker loads no Java classes",
    "sasl.jaas.config": _USERS,
    "plain.sasl.jaas.config": _USERS,
    "scram-sha-256.sasl.jaas.config": _USERS,
    "scram-sha-512.sasl.jaas.config": _USERS,
    "oauthbearer.sasl.jaas.config": "see sasl.oauthbearer.jwks.endpoint.url",
    "sasl.kerberos.": _MECHANISMS,
    "sasl.": "it belongs to a mechanism that the broker does not support: see sasl.enabled.mechanisms",
    "principal.builder.class": "the broker loads no Java classes",
    "security.providers": "the broker loads no Java classes; the system's OpenSSL does TLS",
    "create.topic.policy.class.name": _POLICY,
    "alter.config.policy.class.name": _POLICY,
    "client.quota.callback.class": _POLICY + "; quotas are set by kafka-configs, or `mqd quota set`",
    "inter.broker.protocol.version": _REMOVED,
    "log.message.format.version": _REMOVED,
    "message.format.version": _REMOVED,
    "zookeeper.": "mqd has no ZooKeeper",
    "remote.": _TIERED,
    "local.retention.": _TIERED,
    "log.local.retention.": _TIERED,
}

# A refused property with this value is harmless: it is what Kafka does by default.
HARMLESS = {
    "log.local.retention.bytes": "-2",
    "log.local.retention.ms": "-2",
    "remote.log.storage.system.enable": "false",
}
