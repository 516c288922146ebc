package mqd.compat;

import static mqd.compat.Setting.check;
import static mqd.compat.Setting.fails;
import static mqd.compat.Setting.part;
import static mqd.compat.Setting.same;

import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeSet;
import java.util.concurrent.TimeUnit;
import java.util.stream.IntStream;
import org.apache.kafka.clients.admin.ListOffsetsOptions;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.consumer.CommitFailedException;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.IsolationLevel;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.InvalidProducerEpochException;
import org.apache.kafka.common.errors.ProducerFencedException;

/** Transactions as this client does them by itself: of version 2, where the broker adds partitions by what is produced. */
final class Transactions {
    private Transactions() {
    }

    static void run(Setting setting) throws Exception {
        same((int) Setting.get(setting.admin.describeFeatures().featureMetadata()).finalizedFeatures().get("transaction.version").maxVersionLevel(), 2, "transaction.version");
        commitAndAbort(setting);
        fencing(setting);
        for (String protocol : List.of("consumer", "classic")) {
            copy(setting, protocol);
        }
        staleGroup(setting);
    }

    private static KafkaProducer<String, String> transactional(Setting setting, String name) {
        return setting.producer(Map.of("transactional.id", name, "transaction.timeout.ms", 60_000));
    }

    /**
     * Commits what was sent. kafka-clients 4.2.0 looks whether records wait to be sent and takes the request for the end off its queue in two steps; records that
     * are sent between the two are overtaken by the end, which a broker that does not know of them yet refuses (INVALID_TXN_STATE). After a flush none wait.
     */
    private static void commit(KafkaProducer<String, String> producer) {
        producer.flush();
        producer.commitTransaction();
    }

    /** Aborts what was sent; the same race as in commit() would let the next transaction lose its records. */
    private static void abort(KafkaProducer<String, String> producer) {
        producer.flush();
        producer.abortTransaction();
    }

    private static void commitAndAbort(Setting setting) throws Exception {
        String topic = setting.topic("transactions", 2);
        TopicPartition zero = new TopicPartition(topic, 0);
        ListOffsetsOptions committed = new ListOffsetsOptions(IsolationLevel.READ_COMMITTED);
        try (KafkaProducer<String, String> producer = transactional(setting, Setting.fresh("id"))) {
            producer.initTransactions();
            for (int number = 0; number < 10; number++) {
                producer.beginTransaction();
                for (int partition = 0; partition < 2; partition++) {
                    producer.send(new ProducerRecord<>(topic, partition, null, number + (number % 2 == 0 ? " kept" : " dropped")));
                }
                if (number % 2 == 0) {
                    commit(producer);
                } else {
                    abort(producer);
                }
            }
            producer.beginTransaction(); // neither sent nor asked of the broker
            commit(producer);
            producer.beginTransaction();
            producer.send(new ProducerRecord<>(topic, 0, null, "open")).get(Setting.PATIENCE_MS, TimeUnit.MILLISECONDS);
            long stable = Setting.get(setting.admin.listOffsets(Map.of(zero, OffsetSpec.latest()), committed).partitionResult(zero)).offset();
            same(stable, 20L, "the last stable offset below an open transaction"); // ten records and ten markers
            List<String> kept = IntStream.range(0, 10).filter(one -> one % 2 == 0).mapToObj(one -> one + " kept").toList();
            same(setting.read(topic, "read_committed"), Map.of(0, kept, 1, kept), "what committed readers see");
            Map<Integer, List<String>> everything = setting.read(topic, "read_uncommitted");
            same(List.of(everything.get(0).size(), everything.get(1).size()), List.of(11, 10), "records that all readers see");
            producer.abortTransaction();
        }
        part("commit and abort");
    }

    private static void fencing(Setting setting) throws Exception {
        String topic = setting.topic("fencing", 1);
        String name = Setting.fresh("id");
        KafkaProducer<String, String> old = transactional(setting, name);
        old.initTransactions();
        old.beginTransaction();
        old.send(new ProducerRecord<>(topic, 0, null, "of who is fenced")).get(Setting.PATIENCE_MS, TimeUnit.MILLISECONDS);
        try (KafkaProducer<String, String> young = transactional(setting, name)) {
            young.initTransactions(); // aborts what was open
            young.beginTransaction();
            young.send(new ProducerRecord<>(topic, 0, null, "of who fenced"));
            Throwable late = fails(Exception.class, () -> old.send(new ProducerRecord<>(topic, 0, null, "late")).get(Setting.PATIENCE_MS, TimeUnit.MILLISECONDS));
            check(late instanceof InvalidProducerEpochException || late instanceof ProducerFencedException, "a late record was refused with " + late);
            Throwable refused = fails(Exception.class, () -> {
                old.commitTransaction();
                return "a commit";
            });
            for (Throwable cause = refused; cause != null && !(cause instanceof ProducerFencedException) && !(cause instanceof InvalidProducerEpochException); cause = cause.getCause()) {
                check(cause.getCause() != null, "a late commit was refused with " + refused);
            }
            commit(young);
            old.close();
            same(setting.read(topic, "read_committed"), Map.of(0, List.of("of who fenced")), "what committed readers see");
            String other = Setting.fresh("id");
            try (KafkaProducer<String, String> third = transactional(setting, other)) {
                third.initTransactions();
                Setting.get(setting.admin.fenceProducers(List.of(other)).all());
                third.beginTransaction();
                third.send(new ProducerRecord<>(topic, 0, null, "fenced by an administrator"));
                fails(Exception.class, () -> {
                    third.commitTransaction();
                    return "a commit";
                });
            }
        }
        same(setting.read(topic, "read_committed"), Map.of(0, List.of("of who fenced")), "what committed readers see in the end");
        part("fencing");
    }

    /** Reads what was committed, writes it elsewhere, with the offsets in the same transaction; every third round is thrown away and done again. */
    private static void copy(Setting setting, String protocol) throws Exception {
        String from = setting.topic("from", 2);
        String to = setting.topic("to", 2);
        String group = Setting.fresh("copiers");
        try (KafkaProducer<String, String> source = transactional(setting, Setting.fresh("id"))) {
            source.initTransactions();
            for (int number = 0; number < 100; number++) {
                source.beginTransaction();
                source.send(new ProducerRecord<>(from, number % 2, null, Integer.toString(number)));
                if (number % 5 == 4) {
                    abort(source);
                } else {
                    commit(source);
                }
            }
        }
        Map<String, Object> options = new HashMap<>(Map.of("group.id", group, "group.protocol", protocol, "isolation.level", "read_committed", "max.poll.records", 7));
        try (KafkaProducer<String, String> producer = transactional(setting, Setting.fresh("id")); KafkaConsumer<String, String> consumer = setting.consumer(options)) {
            producer.initTransactions();
            consumer.subscribe(List.of(from));
            long deadline = System.currentTimeMillis() + Setting.PATIENCE_MS;
            for (int copied = 0, round = 0; copied < 80;) {
                check(System.currentTimeMillis() < deadline, "only " + copied + " were copied");
                ConsumerRecords<String, String> records = consumer.poll(Setting.SOON);
                if (records.isEmpty()) {
                    continue;
                }
                producer.beginTransaction();
                Map<TopicPartition, OffsetAndMetadata> offsets = new HashMap<>();
                for (ConsumerRecord<String, String> record : records) {
                    producer.send(new ProducerRecord<>(to, record.partition(), null, record.value()));
                    offsets.put(new TopicPartition(from, record.partition()), new OffsetAndMetadata(record.offset() + 1));
                }
                producer.sendOffsetsToTransaction(offsets, consumer.groupMetadata());
                if (round++ % 3 == 2) {
                    abort(producer);
                    Map<TopicPartition, OffsetAndMetadata> committed = consumer.committed(consumer.assignment());
                    committed.forEach((partition, offset) -> consumer.seek(partition, offset == null ? 0 : offset.offset()));
                } else {
                    commit(producer);
                    copied += records.count();
                }
            }
        }
        List<String> found = new ArrayList<>();
        setting.read(to, "read_committed").values().forEach(found::addAll);
        same(found.size(), 80, "records copied");
        TreeSet<Integer> expected = new TreeSet<>(IntStream.range(0, 100).filter(one -> one % 5 != 4).boxed().toList());
        same(new TreeSet<>(found.stream().map(Integer::valueOf).toList()), expected, "what was copied");
        part("exactly once copy by a " + protocol + " group");
    }

    /** A member that is not one does not commit offsets, and its transaction can only be aborted. */
    private static void staleGroup(Setting setting) throws Exception {
        String topic = setting.topic("stale", 1);
        String group = Setting.fresh("stale");
        setting.fill(topic, 1, 0, 1);
        try (KafkaProducer<String, String> producer = transactional(setting, Setting.fresh("id"))) {
            producer.initTransactions();
            KafkaConsumer<String, String> gone = setting.consumer(Map.of("group.id", group, "group.protocol", "classic"));
            gone.subscribe(List.of(topic));
            Setting.until("the member has read", () -> !gone.poll(Setting.SOON).isEmpty());
            var metadata = gone.groupMetadata();
            gone.close();
            producer.beginTransaction();
            Map<TopicPartition, OffsetAndMetadata> offsets = Map.of(new TopicPartition(topic, 0), new OffsetAndMetadata(1));
            Throwable refused = fails(Exception.class, () -> {
                producer.sendOffsetsToTransaction(offsets, metadata);
                commit(producer);
                return "a commit";
            });
            check(refused instanceof CommitFailedException, "refused with " + refused);
            producer.abortTransaction();
            producer.beginTransaction();
            producer.send(new ProducerRecord<>(topic, 0, null, "afterwards"));
            commit(producer);
        }
        same(Setting.get(setting.admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata()).isEmpty(), true, "no offset is committed");
        part("offsets of who is no member");
    }
}
