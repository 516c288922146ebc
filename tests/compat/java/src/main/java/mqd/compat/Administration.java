package mqd.compat;

import static mqd.compat.Setting.check;
import static mqd.compat.Setting.fails;
import static mqd.compat.Setting.get;
import static mqd.compat.Setting.part;
import static mqd.compat.Setting.same;
import static mqd.compat.Setting.until;

import java.util.Collection;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.TimeUnit;
import java.util.stream.Collectors;
import org.apache.kafka.clients.admin.AbortTransactionSpec;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.ClassicGroupDescription;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.FeatureMetadata;
import org.apache.kafka.clients.admin.GroupListing;
import org.apache.kafka.clients.admin.ListConfigResourcesOptions;
import org.apache.kafka.clients.admin.ListGroupsOptions;
import org.apache.kafka.clients.admin.NewPartitions;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.admin.ProducerState;
import org.apache.kafka.clients.admin.QuorumInfo;
import org.apache.kafka.clients.admin.RecordsToDelete;
import org.apache.kafka.clients.admin.RemoveMembersFromConsumerGroupOptions;
import org.apache.kafka.clients.admin.TransactionDescription;
import org.apache.kafka.clients.admin.TransactionState;
import org.apache.kafka.clients.consumer.CooperativeStickyAssignor;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.ClassicGroupState;
import org.apache.kafka.common.ElectionType;
import org.apache.kafka.common.GroupState;
import org.apache.kafka.common.GroupType;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.errors.ElectionNotNeededException;
import org.apache.kafka.common.errors.GroupIdNotFoundException;
import org.apache.kafka.common.errors.GroupNotEmptyException;
import org.apache.kafka.common.errors.InvalidConfigurationException;
import org.apache.kafka.common.errors.ProducerFencedException;
import org.apache.kafka.common.errors.TransactionalIdNotFoundException;
import org.apache.kafka.common.errors.UnknownTopicOrPartitionException;
import org.apache.kafka.common.quota.ClientQuotaAlteration;
import org.apache.kafka.common.quota.ClientQuotaEntity;
import org.apache.kafka.common.quota.ClientQuotaFilter;
import org.apache.kafka.common.quota.ClientQuotaFilterComponent;

/** What an administrator asks of one broker. */
final class Administration {
    private Administration() {
    }

    static void run(Setting setting) throws Exception {
        groups(setting);
        transactions(setting);
        hangingTransaction(setting);
        quotas(setting.admin);
        configurations(setting);
        topics(setting);
        cluster(setting);
    }

    private static void groups(Setting setting) throws Exception {
        Admin admin = setting.admin;
        String topic = setting.topic("groups", 2);
        setting.fill(topic, 2, 0, 10);
        String group = Setting.fresh("group");
        TopicPartition zero = new TopicPartition(topic, 0);
        TopicPartition one = new TopicPartition(topic, 1);
        Member member = new Member(setting, ClassicGroups.options(group, CooperativeStickyAssignor.class), (consumer, listener) -> consumer.subscribe(List.of(topic), listener));
        Member.share(Set.of(zero, one), 2, member);
        until("everything is committed", () -> {
            Map<TopicPartition, OffsetAndMetadata> found = get(admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata());
            return found.containsKey(zero) && found.containsKey(one) && found.get(zero).offset() == 5 && found.get(one).offset() == 5;
        });
        GroupListing listed = get(admin.listGroups().all()).stream().filter(each -> each.groupId().equals(group)).findAny().orElseThrow();
        same(List.of(listed.type().get(), listed.groupState().get(), listed.protocol()), List.of(GroupType.CLASSIC, GroupState.STABLE, "consumer"), "the group in the list");
        Collection<GroupListing> others = get(admin.listGroups(new ListGroupsOptions().withTypes(Set.of(GroupType.CONSUMER))).all());
        check(others.stream().noneMatch(each -> each.groupId().equals(group)), "a classic group in a list of consumer groups");
        ClassicGroupDescription described = get(admin.describeClassicGroups(List.of(group)).describedGroups().get(group));
        same(described.members().iterator().next().assignment().topicPartitions(), Set.of(zero, one), "what the member holds");
        fails(GroupNotEmptyException.class, () -> get(admin.deleteConsumerGroups(List.of(group)).all()));
        fails(Exception.class, () -> get(admin.alterConsumerGroupOffsets(group, Map.of(zero, new OffsetAndMetadata(1))).all()));
        String before = described.members().iterator().next().consumerId();
        get(admin.removeMembersFromConsumerGroup(group, new RemoveMembersFromConsumerGroupOptions()).all());
        until("who was put out comes again", () -> {
            ClassicGroupDescription now = get(admin.describeClassicGroups(List.of(group)).describedGroups().get(group));
            return now.state() == ClassicGroupState.STABLE && now.members().stream().noneMatch(each -> each.consumerId().equals(before));
        });
        Member.share(Set.of(zero, one), 2, member);
        member.leave();
        get(admin.alterConsumerGroupOffsets(group, Map.of(zero, new OffsetAndMetadata(2, "moved"), one, new OffsetAndMetadata(1))).all());
        same(get(admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata()).get(zero).metadata(), "moved", "the metadata");
        get(admin.deleteConsumerGroupOffsets(group, Set.of(one)).all());
        Map<TopicPartition, OffsetAndMetadata> left = get(admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata());
        check(left.get(zero).offset() == 2 && left.get(one) == null, "offsets: " + left);
        get(admin.deleteConsumerGroups(List.of(group)).all());
        fails(GroupIdNotFoundException.class, () -> get(admin.describeConsumerGroups(List.of(group)).all()));
        fails(GroupIdNotFoundException.class, () -> get(admin.deleteConsumerGroups(List.of(group)).all()));
        part("groups listed, described, moved, deleted");
    }

    private static void transactions(Setting setting) throws Exception {
        Admin admin = setting.admin;
        String topic = setting.topic("transactions", 1);
        TopicPartition partition = new TopicPartition(topic, 0);
        String name = Setting.fresh("id");
        try (KafkaProducer<String, String> producer = setting.producer(Map.of("transactional.id", name, "transaction.timeout.ms", 50_000))) {
            producer.initTransactions();
            same(described(admin, name).state(), TransactionState.EMPTY, "the state before the first");
            producer.beginTransaction();
            producer.send(new ProducerRecord<>(topic, 0, null, "one")).get(Setting.PATIENCE_MS, TimeUnit.MILLISECONDS);
            TransactionDescription open = described(admin, name);
            same(List.of(open.state(), open.topicPartitions(), open.transactionTimeoutMs()), List.of(TransactionState.ONGOING, Set.of(partition), 50_000L), "an open transaction");
            same(open.coordinatorId(), 1, "its coordinator");
            check(open.transactionStartTimeMs().orElse(0) > 0, "it has begun");
            ProducerState active = producerOf(admin, partition);
            same(List.of(active.producerId(), active.currentTransactionStartOffset().getAsLong()), List.of(open.producerId(), 0L), "its producer at the partition");
            check(listed(admin).contains(name), "it is in the list");
            producer.commitTransaction();
            until("it is complete", () -> described(admin, name).state() == TransactionState.COMPLETE_COMMIT);
            check(producerOf(admin, partition).currentTransactionStartOffset().isEmpty(), "nothing is open at the partition");
        }
        fails(TransactionalIdNotFoundException.class, () -> described(admin, "java-nobody"));
        part("transactions and producers described");
    }

    /** What the tool for hanging transactions does: a marker to one partition. Here the coordinator knows the transaction: it aborts all of it, and fences the producer. */
    private static void hangingTransaction(Setting setting) throws Exception {
        Admin admin = setting.admin;
        String topic = setting.topic("hanging", 1);
        TopicPartition partition = new TopicPartition(topic, 0);
        try (KafkaProducer<String, String> producer = setting.producer(Map.of("transactional.id", Setting.fresh("id")))) {
            producer.initTransactions();
            producer.beginTransaction();
            producer.send(new ProducerRecord<>(topic, 0, null, "hanging")).get(Setting.PATIENCE_MS, TimeUnit.MILLISECONDS);
            ProducerState active = producerOf(admin, partition);
            get(admin.abortTransaction(new AbortTransactionSpec(partition, active.producerId(), (short) active.producerEpoch(), active.coordinatorEpoch().orElse(0))).all());
            check(producerOf(admin, partition).currentTransactionStartOffset().isEmpty(), "nothing is open any more");
            same(setting.read(topic, "read_committed"), Map.of(0, List.of()), "what committed readers see");
            same(setting.read(topic, "read_uncommitted"), Map.of(0, List.of("hanging")), "what all readers see");
            fails(ProducerFencedException.class, () -> {
                producer.commitTransaction();
                return "a commit";
            });
        }
        same(setting.read(topic, "read_committed"), Map.of(0, List.of()), "what committed readers see in the end");
        part("a hanging transaction aborted");
    }

    private static TransactionDescription described(Admin admin, String name) throws Exception {
        return get(admin.describeTransactions(List.of(name)).description(name));
    }

    private static Set<String> listed(Admin admin) throws Exception {
        return get(admin.listTransactions().all()).stream().map(one -> one.transactionalId()).collect(Collectors.toSet());
    }

    private static ProducerState producerOf(Admin admin, TopicPartition partition) throws Exception {
        return get(admin.describeProducers(List.of(partition)).partitionResult(partition)).activeProducers().get(0);
    }

    private static void quotas(Admin admin) throws Exception {
        String client = Setting.fresh("client");
        ClientQuotaEntity entity = new ClientQuotaEntity(Map.of(ClientQuotaEntity.CLIENT_ID, client));
        ClientQuotaFilter filter = ClientQuotaFilter.containsOnly(List.of(ClientQuotaFilterComponent.ofEntity(ClientQuotaEntity.CLIENT_ID, client)));
        same(get(admin.describeClientQuotas(filter).entities()), Map.of(), "quotas before");
        get(admin.alterClientQuotas(List.of(new ClientQuotaAlteration(entity, List.of(new ClientQuotaAlteration.Op("producer_byte_rate", 1e8),
                new ClientQuotaAlteration.Op("consumer_byte_rate", 2e8), new ClientQuotaAlteration.Op("request_percentage", 50.0))))).all());
        same(get(admin.describeClientQuotas(filter).entities()), Map.of(entity, Map.of("producer_byte_rate", 1e8, "consumer_byte_rate", 2e8, "request_percentage", 50.0)), "quotas");
        get(admin.alterClientQuotas(List.of(new ClientQuotaAlteration(entity, List.of(new ClientQuotaAlteration.Op("producer_byte_rate", null),
                new ClientQuotaAlteration.Op("request_percentage", null))))).all());
        same(get(admin.describeClientQuotas(filter).entities()), Map.of(entity, Map.of("consumer_byte_rate", 2e8)), "quotas left");
        get(admin.alterClientQuotas(List.of(new ClientQuotaAlteration(entity, List.of(new ClientQuotaAlteration.Op("consumer_byte_rate", null))))).all());
        fails(Exception.class, () -> get(admin.alterClientQuotas(List.of(new ClientQuotaAlteration(entity, List.of(new ClientQuotaAlteration.Op("no such rate", 1.0))))).all()));
        part("quotas");
    }

    private static String valueOf(Admin admin, ConfigResource resource, String name) throws Exception {
        return get(admin.describeConfigs(List.of(resource)).all()).get(resource).get(name).value();
    }

    private static void alter(Admin admin, ConfigResource resource, String name, String value, AlterConfigOp.OpType how) throws Exception {
        get(admin.incrementalAlterConfigs(Map.of(resource, List.of(new AlterConfigOp(new ConfigEntry(name, value), how)))).all());
    }

    private static void configurations(Setting setting) throws Exception {
        Admin admin = setting.admin;
        ConfigResource topic = new ConfigResource(ConfigResource.Type.TOPIC, setting.topic("configured", 1));
        alter(admin, topic, "retention.ms", "12345678", AlterConfigOp.OpType.SET);
        alter(admin, topic, "cleanup.policy", "compact", AlterConfigOp.OpType.APPEND);
        same(valueOf(admin, topic, "retention.ms"), "12345678", "retention.ms");
        same(new TreeSet<>(List.of(valueOf(admin, topic, "cleanup.policy").split(","))), new TreeSet<>(List.of("compact", "delete")), "cleanup.policy");
        alter(admin, topic, "retention.ms", null, AlterConfigOp.OpType.DELETE);
        same(valueOf(admin, topic, "retention.ms"), "604800000", "retention.ms");
        fails(InvalidConfigurationException.class, () -> {
            alter(admin, topic, "retention.ms", "soon", AlterConfigOp.OpType.SET);
            return "taken";
        });
        String group = Setting.fresh("configured");
        ConfigResource ofGroup = new ConfigResource(ConfigResource.Type.GROUP, group);
        alter(admin, ofGroup, "consumer.session.timeout.ms", "50000", AlterConfigOp.OpType.SET);
        same(valueOf(admin, ofGroup, "consumer.session.timeout.ms"), "50000", "a group's session timeout");
        Collection<ConfigResource> resources = get(admin.listConfigResources().all());
        check(resources.containsAll(List.of(topic, ofGroup, new ConfigResource(ConfigResource.Type.BROKER, "1"))), "resources: " + resources);
        Collection<ConfigResource> groups = get(admin.listConfigResources(Set.of(ConfigResource.Type.GROUP), new ListConfigResourcesOptions()).all());
        check(groups.contains(ofGroup) && groups.stream().allMatch(one -> one.type() == ConfigResource.Type.GROUP), "groups: " + groups);
        ConfigResource broker = new ConfigResource(ConfigResource.Type.BROKER, "1");
        check(valueOf(admin, broker, "num.partitions") != null, "the broker's configuration");
        part("configurations of topics, groups and the broker");
    }

    private static void topics(Setting setting) throws Exception {
        Admin admin = setting.admin;
        String topic = setting.topic("grown", 1);
        setting.fill(topic, 1, 0, 10);
        get(admin.createPartitions(Map.of(topic, NewPartitions.increaseTo(3))).all());
        until("three partitions are seen", () -> get(admin.describeTopics(List.of(topic)).allTopicNames()).get(topic).partitions().size() == 3);
        TopicPartition zero = new TopicPartition(topic, 0);
        same(get(admin.deleteRecords(Map.of(zero, RecordsToDelete.beforeOffset(4))).lowWatermarks().get(zero)).lowWatermark(), 4L, "the first offset left");
        same(get(admin.listOffsets(Map.of(zero, OffsetSpec.earliest())).partitionResult(zero)).offset(), 4L, "the earliest offset");
        same(get(admin.listOffsets(Map.of(zero, OffsetSpec.latest())).partitionResult(zero)).offset(), 10L, "the latest offset");
        same(get(admin.listOffsets(Map.of(zero, OffsetSpec.maxTimestamp())).partitionResult(zero)).offset() >= 4, true, "the offset of the largest timestamp");
        var reassignments = get(admin.listPartitionReassignments().reassignments());
        same(reassignments, Map.of(), "reassignments");
        var elected = get(admin.electLeaders(ElectionType.PREFERRED, Set.of(zero)).partitions());
        check(elected.get(zero).orElseThrow() instanceof ElectionNotNeededException, "elections: " + elected);
        get(admin.deleteTopics(List.of(topic)).all());
        fails(UnknownTopicOrPartitionException.class, () -> get(admin.describeTopics(List.of(topic)).allTopicNames()));
        part("topics grown, shortened, deleted; leaders elected");
    }

    private static void cluster(Setting setting) throws Exception {
        Admin admin = setting.admin;
        same(get(admin.describeCluster().nodes()).stream().map(one -> one.id()).toList(), List.of(1), "brokers");
        FeatureMetadata features = get(admin.describeFeatures().featureMetadata());
        same((int) features.finalizedFeatures().get("group.version").maxVersionLevel(), 1, "group.version");
        check(features.supportedFeatures().keySet().containsAll(Set.of("metadata.version", "transaction.version", "group.version")), "features: " + features);
        QuorumInfo quorum = get(admin.describeMetadataQuorum().quorumInfo());
        same(quorum.leaderId(), 1, "the quorum's leader");
        same(quorum.voters().size(), 1, "voters");
        check(!get(admin.describeLogDirs(List.of(1)).allDescriptions()).get(1).isEmpty(), "directories");
        same(get(admin.describeUserScramCredentials().all()), Map.of(), "credentials");
        part("the cluster, its features, its quorum and its disks");
    }
}
