package mqd.compat;

import java.io.BufferedReader;
import java.io.FileReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.Properties;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

/** Produces each line of its input to a topic and reads them in a group: {@code Lines PROPERTIES TOPIC}. Prints "acked LINE" and "read LINE" until the input ends. */
public final class Lines {
    private static volatile boolean ended;

    private Lines() {
    }

    public static void main(String[] arguments) throws Exception {
        Properties settings = new Properties();
        try (FileReader reader = new FileReader(arguments[0], StandardCharsets.UTF_8)) {
            settings.load(reader);
        }
        String topic = arguments[1];
        Thread reading = new Thread(() -> read(settings, topic));
        reading.start();
        try (KafkaProducer<String, String> producer = new KafkaProducer<>(settings, new StringSerializer(), new StringSerializer())) {
            BufferedReader input = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
            for (String line = input.readLine(); line != null; line = input.readLine()) {
                String value = line;
                producer.send(new ProducerRecord<>(topic, value), (place, failure) -> {
                    if (failure == null) {
                        print("acked " + value);
                    } else {
                        System.err.println(value + " " + failure);
                    }
                });
            }
            producer.flush();
        }
        ended = true;
        reading.join();
    }

    private static void read(Properties common, String topic) {
        Properties settings = new Properties();
        settings.putAll(common);
        settings.put("group.id", topic + "-group");
        settings.put("auto.offset.reset", "earliest");
        try (KafkaConsumer<String, String> consumer = new KafkaConsumer<>(settings, new StringDeserializer(), new StringDeserializer())) {
            consumer.subscribe(List.of(topic));
            while (!ended) {
                for (ConsumerRecord<String, String> record : consumer.poll(Setting.SOON)) {
                    print("read " + record.value());
                }
            }
        } catch (Throwable failure) {
            failure.printStackTrace();
            System.exit(1); // while the main thread waits for input
        }
    }

    private static synchronized void print(String line) {
        System.out.println(line);
        System.out.flush();
    }
}
