package mqd;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Map;
import org.apache.kafka.common.errors.SerializationException;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.Deserializer;
import org.apache.kafka.common.utils.Utils;

/**
 * Opens sealed values before another deserializer reads them.
 *
 * <pre>
 * value.deserializer              mqd.SealedDeserializer
 * encryption.key.provider         file:PATH or env:NAME
 * encryption.value.deserializer   deserializer of the opened bytes; by default ByteArrayDeserializer
 * encryption.topic.names          COPY=ORIGINAL,...: the original names of copied topics
 * encryption.plaintext.allow      true: values that are not sealed are passed to that deserializer
 * </pre>
 *
 * <p>A deserializer does not get the record's key, so it does not check that the value was sealed for this
 * key: {@link SealedValues#open} does.
 */
public class SealedDeserializer<T> implements Deserializer<T> {
    private SealedValues values;
    private Deserializer<T> inner;
    private String[] names;
    private boolean plaintextAllowed;

    @Override
    @SuppressWarnings("unchecked")
    public void configure(Map<String, ?> config, boolean isKey) {
        String provider = text(config, "encryption.key.provider");
        try {
            if (provider.startsWith("file:")) values = new SealedValues(Files.readString(Path.of(provider.substring(5))));
            else if (provider.startsWith("env:")) values = new SealedValues(System.getenv(provider.substring(4)).replace(',', '\n'));
            else throw new IllegalArgumentException("encryption.key.provider is file:PATH or env:NAME");
            String wanted = text(config, "encryption.value.deserializer");
            inner = (Deserializer<T>) (wanted.isEmpty() ? new ByteArrayDeserializer() : Utils.newInstance(wanted, Deserializer.class));
        } catch (IOException | ClassNotFoundException problem) {
            throw new IllegalArgumentException(problem);
        }
        inner.configure(config, isKey);
        names = text(config, "encryption.topic.names").split(",");
        plaintextAllowed = text(config, "encryption.plaintext.allow").equals("true");
    }

    @Override
    public T deserialize(String topic, byte[] data) {
        if (data == null) return inner.deserialize(topic, null);
        if (plaintextAllowed && !SealedValues.isSealed(data)) return inner.deserialize(topic, data);
        try {
            return inner.deserialize(topic, values.openWithoutKey(original(topic), data));
        } catch (SealedValues.SealedException problem) {
            throw new SerializationException("the value of a record of " + topic + " cannot be opened: "
                    + problem.getMessage());
        }
    }

    @Override
    public void close() {
        inner.close();
    }

    private String original(String topic) {
        for (String name : names) {
            String[] pair = name.split("=", 2);
            String copy = pair[0].strip();
            int star = copy.indexOf('*');
            String before = star < 0 ? copy : copy.substring(0, star), after = star < 0 ? "" : copy.substring(star + 1);
            if (pair.length < 2) continue;
            if (topic.equals(copy)) return pair[1].strip();
            if (star >= 0 && topic.length() >= copy.length() - 1 && topic.startsWith(before) && topic.endsWith(after))
                return pair[1].strip().replace("*", topic.substring(before.length(), topic.length() - after.length()));
        }
        return topic;
    }

    private static String text(Map<String, ?> config, String name) {
        Object found = config.get(name);
        return found == null ? "" : found.toString();
    }
}
