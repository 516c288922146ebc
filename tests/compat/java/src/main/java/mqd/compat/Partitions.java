package mqd.compat;

import static mqd.compat.Setting.check;
import static mqd.compat.Setting.part;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Future;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;

/** Keys into the topic java-partitions, where the default partitioner puts them; others compare. The topic may be there already. */
final class Partitions {
    static final String TOPIC = "java-partitions";
    static final int PARTITIONS = 7;
    static final int KEYS = 300;

    private Partitions() {
    }

    static void run(Setting setting) throws Exception {
        setting.named(TOPIC, PARTITIONS, Map.of());
        try (KafkaProducer<String, String> producer = setting.producer(Map.of())) {
            List<Future<RecordMetadata>> sent = new ArrayList<>();
            for (int number = 0; number < KEYS; number++) {
                sent.add(producer.send(new ProducerRecord<>(TOPIC, key(number), "java")));
            }
            producer.flush();
            boolean[] used = new boolean[PARTITIONS];
            for (Future<RecordMetadata> one : sent) {
                used[one.get().partition()] = true;
            }
            for (boolean one : used) {
                check(one, "the keys leave a partition out: they compare nothing");
            }
        }
        part("partitions");
    }

    /** Of every length from 0 to 299: each rest of a division by four. */
    private static String key(int number) {
        return "k\u00e9y".repeat(number / 3) + "abc".substring(0, number % 3);
    }
}
