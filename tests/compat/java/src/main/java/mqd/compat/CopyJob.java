package mqd.compat;

import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.kafka.clients.consumer.CommitFailedException;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.TransactionAbortableException;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * An exactly-once copy that goes on until it is ended: {@code Main BOOTSTRAP copy TRANSACTIONAL_ID GROUP FROM TO PROTOCOL}. What the producer cannot get over ends the process with 1; whoever runs
 * it starts it again, and it goes on from the last commit.
 */
final class CopyJob {
    private CopyJob() {
    }

    static void run(String bootstrap, String name, String group, String from, String to, String protocol) {
        Map<String, Object> producing = Map.of("bootstrap.servers", bootstrap, "transactional.id", name, "linger.ms", 1, "transaction.timeout.ms", 8_000);
        Map<String, Object> consuming = new HashMap<>(Map.of(
            "bootstrap.servers", bootstrap, "group.id", group, "group.protocol", protocol, "isolation.level", "read_committed", "auto.offset.reset", "earliest",
            "enable.auto.commit", false, "fetch.max.wait.ms", 100, "max.poll.records", 200));
        if (protocol.equals("classic")) {
            consuming.putAll(Map.of("session.timeout.ms", 2_000, "heartbeat.interval.ms", 200));
        }
        try (KafkaProducer<byte[], byte[]> producer = new KafkaProducer<>(producing, new ByteArraySerializer(), new ByteArraySerializer());
            KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(consuming, new ByteArrayDeserializer(), new ByteArrayDeserializer())) {
            producer.initTransactions();
            consumer.subscribe(List.of(from));
            while (true) {
                ConsumerRecords<byte[], byte[]> records = consumer.poll(Setting.SOON);
                if (!records.isEmpty()) {
                    copy(producer, consumer, records, from, to);
                }
            }
        }
    }

    private static void copy(
        KafkaProducer<byte[], byte[]> producer, KafkaConsumer<byte[], byte[]> consumer, ConsumerRecords<byte[], byte[]> records, String from, String to) {
        try {
            producer.beginTransaction();
            Map<TopicPartition, OffsetAndMetadata> offsets = new HashMap<>();
            for (ConsumerRecord<byte[], byte[]> record : records) {
                producer.send(new ProducerRecord<>(to, record.partition(), record.key(), record.value()));
                offsets.put(new TopicPartition(from, record.partition()), new OffsetAndMetadata(record.offset() + 1));
            }
            producer.sendOffsetsToTransaction(offsets, consumer.groupMetadata());
            producer.commitTransaction();
            System.out.println("committed " + offsets);
        } catch (CommitFailedException | TransactionAbortableException refused) {
            System.out.println("refused: " + refused);
            producer.abortTransaction();
            consumer.committed(consumer.assignment()).forEach((partition, offset) -> consumer.seek(partition, offset == null ? 0 : offset.offset()));
        }
    }
}
