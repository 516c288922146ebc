package mqd.compat;

import static mqd.compat.Setting.fails;
import static mqd.compat.Setting.part;
import static mqd.compat.Setting.same;
import static mqd.compat.Setting.until;

import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.InvalidRecordException;
import org.apache.kafka.common.TopicPartition;

/** Compacted topics: no record without a key, and the last value of each key stays. */
final class Compaction {
    private static final int KEYS = 10;
    private static final int ROUNDS = 400;

    private Compaction() {
    }

    static void run(Setting setting) throws Exception {
        for (String compression : List.of("none", "gzip", "snappy", "lz4", "zstd")) {
            keys(setting, compression);
        }
        lastValues(setting);
    }

    private static void keys(Setting setting, String compression) throws Exception {
        String topic = setting.topic("keys", 1, Map.of("cleanup.policy", "compact"));
        try (KafkaProducer<String, String> producer = setting.producer(Map.of("compression.type", compression))) {
            ProducerRecord<String, String> without = new ProducerRecord<>(topic, 0, null, "x".repeat(1000));
            fails(InvalidRecordException.class, () -> producer.send(without).get(Setting.PATIENCE_MS, TimeUnit.MILLISECONDS));
            ProducerRecord<String, String> with = new ProducerRecord<>(topic, 0, "key", "x".repeat(1000));
            same(producer.send(with).get(Setting.PATIENCE_MS, TimeUnit.MILLISECONDS).offset(), 0L, "the first record's offset");
        }
        part("no record without a key, " + compression);
    }

    private static void lastValues(Setting setting) throws Exception {
        Map<String, String> configs = Map.of("cleanup.policy", "compact", "segment.bytes", "16384", "min.cleanable.dirty.ratio", "0.01", "delete.retention.ms", "600000");
        String topic = setting.topic("values", 1, configs);
        Map<String, String> last = new HashMap<>();
        try (KafkaProducer<String, String> producer = setting.producer(Map.of("compression.type", "lz4"))) {
            for (int number = 0; number < KEYS * ROUNDS; number++) {
                String key = "key-" + number % KEYS;
                String value = number % 7 == 0 ? null : number + "-" + "x".repeat(50);
                producer.send(new ProducerRecord<>(topic, 0, key, value));
                last.put(key, value);
                if (number % 50 == 0) {
                    producer.flush();
                }
            }
        }
        until("most values are gone", () -> {
            Map<String, String> found = new HashMap<>();
            int count = 0;
            TopicPartition partition = new TopicPartition(topic, 0);
            try (KafkaConsumer<String, String> consumer = setting.consumer(Map.of())) {
                consumer.assign(List.of(partition));
                long end = consumer.endOffsets(List.of(partition)).get(partition);
                while (consumer.position(partition) < end) {
                    for (ConsumerRecord<String, String> record : consumer.poll(Setting.SOON)) {
                        found.put(record.key(), record.value());
                        count++;
                    }
                }
            }
            same(found, last, "the last value of each key");
            return count < KEYS * ROUNDS / 2;
        });
        part("the last value of each key stays");
    }
}
