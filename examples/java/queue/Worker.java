import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Properties;
import org.apache.kafka.clients.consumer.AcknowledgeType;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaShareConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicIdPartition;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

/**
 * The sender and worker of docs/queues.md with Apache Kafka's client (4.1 or later): a hundred jobs, of
 * which one fails once and another always.
 *
 * <pre>java -cp 'kafka-clients.jar:...' Worker.java 127.0.0.1:9092 jobs workers</pre>
 */
public final class Worker {
    private static final int JOBS = 100;

    private Worker() {}

    public static void main(String[] arguments) {
        String bootstrap = arguments[0], topic = arguments[1], group = arguments[2];
        send(bootstrap, topic);
        System.out.println(work(bootstrap, topic, group));
    }

    private static void send(String bootstrap, String topic) {
        Properties settings = new Properties();
        settings.putAll(Map.of("bootstrap.servers", bootstrap, "acks", "all"));
        try (var producer = new KafkaProducer<>(settings, new StringSerializer(), new StringSerializer())) {
            for (int number = 0; number < JOBS; number++) {
                producer.send(new ProducerRecord<>(topic, "job-" + number), (metadata, error) -> {
                    if (error != null) {
                        throw new KafkaException("a job was not sent", error);
                    }
                });
            }
        }
    }

    private static String work(String bootstrap, String topic, String group) {
        Properties settings = new Properties();
        settings.putAll(Map.of(
                "bootstrap.servers", bootstrap, "group.id", group, "share.acknowledgement.mode", "explicit"));
        int accepted = 0, rejected = 0, released = 0;
        try (var consumer = new KafkaShareConsumer<>(settings, new StringDeserializer(), new StringDeserializer())) {
            consumer.subscribe(List.of(topic));
            while (accepted + rejected < JOBS) { // a real worker would not end
                ConsumerRecords<String, String> records = consumer.poll(Duration.ofSeconds(1));
                for (ConsumerRecord<String, String> job : records) {
                    if (job.value().equals("job-13")) { // will never succeed
                        consumer.acknowledge(job, AcknowledgeType.REJECT);
                        rejected++;
                    } else if (job.value().equals("job-7") && job.deliveryCount().orElse((short) 1) == 1) { // fails once
                        consumer.acknowledge(job, AcknowledgeType.RELEASE);
                        released++;
                    } else {
                        consumer.acknowledge(job, AcknowledgeType.ACCEPT);
                        accepted++;
                    }
                }
                for (Map.Entry<TopicIdPartition, Optional<KafkaException>> outcome : consumer.commitSync().entrySet()) {
                    outcome.getValue().ifPresent(error -> System.out.println(
                            outcome.getKey() + ": " + error.getMessage() + "; these jobs are delivered again"));
                }
            }
        }
        return accepted + " accepted, " + rejected + " rejected, " + released + " released";
    }
}
