package mqd.compat;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import org.apache.kafka.clients.consumer.AcknowledgeType;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaShareConsumer;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicIdPartition;
import org.apache.kafka.common.serialization.StringDeserializer;

/**
 * A member of a share group that goes on until it is ended: {@code Main BOOTSTRAP share GROUP TOPIC}. Of the numbers that are the records' values it releases those that end in 3 at their first
 * delivery, rejects those that end in 7, and accepts all others. It prints each delivery, and each acknowledgement with what the broker answered.
 */
final class ShareJob {
    private ShareJob() {
    }

    static void run(String bootstrap, String group, String topic) {
        Map<String, Object> settings = Map.of("bootstrap.servers", bootstrap, "group.id", group, "share.acknowledgement.mode", "explicit", "fetch.max.wait.ms", 100);
        try (KafkaShareConsumer<String, String> consumer = new KafkaShareConsumer<>(settings, new StringDeserializer(), new StringDeserializer())) {
            consumer.subscribe(List.of(topic));
            while (true) {
                List<ConsumerRecord<String, String>> records = new ArrayList<>();
                for (ConsumerRecord<String, String> record : consumer.poll(Setting.SOON)) {
                    System.out.println("delivered " + record.value() + " " + record.deliveryCount().orElseThrow());
                    consumer.acknowledge(record, kind(record));
                    records.add(record);
                }
                if (!records.isEmpty()) {
                    report(records, consumer.commitSync());
                }
            }
        }
    }

    private static AcknowledgeType kind(ConsumerRecord<String, String> record) {
        return switch (record.value().charAt(record.value().length() - 1)) {
            case '3' -> record.deliveryCount().orElseThrow() == 1 ? AcknowledgeType.RELEASE : AcknowledgeType.ACCEPT;
            case '7' -> AcknowledgeType.REJECT;
            default -> AcknowledgeType.ACCEPT;
        };
    }

    private static void report(List<ConsumerRecord<String, String>> records, Map<TopicIdPartition, Optional<KafkaException>> outcome) {
        for (ConsumerRecord<String, String> record : records) {
            String answer = outcome.entrySet().stream().filter(one -> one.getKey().partition() == record.partition()).findFirst()
                .map(one -> one.getValue().map(failure -> failure.getClass().getSimpleName()).orElse("ok")).orElse("none");
            System.out.println("answered " + record.value() + " " + kind(record) + " " + answer);
        }
    }
}
