package mqd.compat;

import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.TreeMap;
import java.util.UUID;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.KafkaFuture;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

/** The broker, an administrator, and what every behaviour needs: clients, names of its own, waiting, complaints. */
final class Setting implements AutoCloseable {
    static final long PATIENCE_MS = 60_000;
    static final Duration SOON = Duration.ofMillis(50);

    final String bootstrap;
    final Admin admin;

    Setting(String bootstrap) {
        this.bootstrap = bootstrap;
        this.admin = Admin.create(Map.of("bootstrap.servers", bootstrap));
    }

    static String fresh(String what) {
        return "java-" + what + "-" + UUID.randomUUID().toString().substring(0, 8);
    }

    String topic(String what, int partitions, Map<String, String> configs) throws Exception {
        return named(fresh(what), partitions, configs);
    }

    String topic(String what, int partitions) throws Exception {
        return topic(what, partitions, Map.of());
    }

    String named(String name, int partitions, Map<String, String> configs) throws Exception {
        get(admin.createTopics(List.of(new NewTopic(name, Optional.of(partitions), Optional.empty()).configs(configs))).all());
        return name;
    }

    KafkaProducer<String, String> producer(Map<String, Object> options) {
        Map<String, Object> settings = new HashMap<>(Map.of("bootstrap.servers", bootstrap, "linger.ms", 1, "max.block.ms", (int) PATIENCE_MS));
        settings.putAll(options);
        return new KafkaProducer<>(settings, new StringSerializer(), new StringSerializer());
    }

    KafkaConsumer<String, String> consumer(Map<String, Object> options) {
        Map<String, Object> settings = new HashMap<>(Map.of("bootstrap.servers", bootstrap, "auto.offset.reset", "earliest", "enable.auto.commit", false, "fetch.max.wait.ms", 100));
        settings.putAll(options);
        return new KafkaConsumer<>(settings, new StringDeserializer(), new StringDeserializer());
    }

    /** Values 0, 1, 2... spread over the partitions in turn. */
    void fill(String topic, int partitions, int first, int count) throws Exception {
        try (KafkaProducer<String, String> producer = producer(Map.of())) {
            for (int number = first; number < first + count; number++) {
                producer.send(new ProducerRecord<>(topic, number % partitions, "key", Integer.toString(number)));
            }
            producer.flush();
        }
    }

    /** Everything up to the end that this isolation level sees, by partition, in order. */
    Map<Integer, List<String>> read(String topic, String isolation) {
        Map<Integer, List<String>> found = new TreeMap<>();
        try (KafkaConsumer<String, String> consumer = consumer(Map.of("isolation.level", isolation))) {
            List<TopicPartition> partitions = consumer.partitionsFor(topic).stream().map(one -> new TopicPartition(topic, one.partition())).toList();
            consumer.assign(partitions);
            consumer.seekToBeginning(partitions);
            Map<TopicPartition, Long> ends = consumer.endOffsets(partitions);
            partitions.forEach(one -> found.put(one.partition(), new ArrayList<>()));
            long deadline = System.currentTimeMillis() + PATIENCE_MS;
            while (partitions.stream().anyMatch(one -> consumer.position(one) < ends.get(one))) {
                check(System.currentTimeMillis() < deadline, "the end of " + topic + " was not reached");
                for (ConsumerRecord<String, String> record : consumer.poll(SOON)) {
                    found.get(record.partition()).add(record.value());
                }
            }
        }
        return found;
    }

    static <T> T get(KafkaFuture<T> future) throws Exception {
        return future.get(PATIENCE_MS, TimeUnit.MILLISECONDS);
    }

    /** The failure of a future, which must be of this kind. */
    static <F extends Throwable> F fails(Class<F> kind, Callable<?> call) {
        Object answer;
        try {
            answer = call.call();
        } catch (Throwable failure) {
            Throwable cause = failure instanceof ExecutionException && failure.getCause() != null ? failure.getCause() : failure;
            check(kind.isInstance(cause), kind.getSimpleName() + " was expected: " + cause);
            return kind.cast(cause);
        }
        throw new AssertionError(kind.getSimpleName() + " was expected, not " + answer);
    }

    static void until(String what, Callable<Boolean> look) throws Exception {
        long deadline = System.currentTimeMillis() + PATIENCE_MS;
        while (!look.call()) {
            check(System.currentTimeMillis() < deadline, "not in time: " + what);
            Thread.sleep(20);
        }
    }

    static void check(boolean held, String otherwise) {
        if (!held) {
            throw new AssertionError(otherwise);
        }
    }

    static void same(Object found, Object expected, String what) {
        check(expected.equals(found), what + ": " + found + ", not " + expected);
    }

    static void part(String name) {
        System.out.println("held: " + name);
    }

    static Set<TopicPartition> all(String topic, int partitions) {
        Set<TopicPartition> found = new java.util.HashSet<>();
        for (int partition = 0; partition < partitions; partition++) {
            found.add(new TopicPartition(topic, partition));
        }
        return found;
    }

    @Override
    public void close() {
        admin.close(Duration.ofSeconds(5));
    }
}
