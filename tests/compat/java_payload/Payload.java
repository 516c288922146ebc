import java.time.Duration;
import java.util.Arrays;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.Scanner;
import mqd.SealedDeserializer;
import mqd.SealedValues;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.RecordDeserializationException;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

/** What test_java_payload.py runs: `vectors KEYFILE` opens lines of stdin, `consume` reads a topic. */
public class Payload {
    private static final HexFormat HEX = HexFormat.of();

    public static void main(String[] arguments) throws Exception {
        if (arguments[0].equals("vectors")) vectors(arguments[1]);
        else consume(arguments[1], arguments[2], Integer.parseInt(arguments[3]), Arrays.copyOfRange(arguments, 4, arguments.length));
    }

    /** Lines of topic, record key (- where there is none) and envelope, in hexadecimal. */
    private static void vectors(String keyFile) throws Exception {
        SealedValues values = new SealedValues(java.nio.file.Files.readString(java.nio.file.Path.of(keyFile)));
        Scanner lines = new Scanner(System.in, "UTF-8");
        while (lines.hasNextLine()) {
            String[] part = lines.nextLine().split(" ", -1);
            String topic = new String(HEX.parseHex(part[0]), "UTF-8");
            try {
                byte[] key = part[1].equals("-") ? null : HEX.parseHex(part[1]), data = HEX.parseHex(part[2]);
                byte[] opened = values.open(topic, key, data);
                if (!Arrays.equals(opened, values.openWithoutKey(topic, data))) throw new AssertionError("two values");
                System.out.println("ok " + HEX.formatHex(opened));
            } catch (SealedValues.SealedException problem) {
                System.out.println("no " + problem.getMessage());
            }
        }
    }

    private static void consume(String bootstrap, String topic, int count, String[] settings) {
        Map<String, Object> config = new java.util.HashMap<>(Map.of(
                "bootstrap.servers", bootstrap,
                "auto.offset.reset", "earliest",
                "key.deserializer", ByteArrayDeserializer.class.getName(),
                "value.deserializer", SealedDeserializer.class.getName()));
        for (String setting : settings) config.put(setting.split("=", 2)[0], setting.split("=", 2)[1]);
        TopicPartition partition = new TopicPartition(topic, 0);
        try (KafkaConsumer<byte[], Object> consumer = new KafkaConsumer<>(config)) {
            consumer.assign(List.of(partition));
            consumer.seek(partition, 0);
            while (count > 0) {
                try {
                    for (ConsumerRecord<byte[], Object> record : consumer.poll(Duration.ofSeconds(10))) {
                        Object value = record.value();
                        System.out.println("value " + (value instanceof byte[] bytes ? HEX.formatHex(bytes) : value));
                        count--;
                    }
                } catch (RecordDeserializationException problem) {
                    System.out.println("error " + problem.offset() + " " + problem.getCause().getMessage());
                    consumer.seek(partition, problem.offset() + 1);
                    count--;
                }
            }
        }
    }
}
