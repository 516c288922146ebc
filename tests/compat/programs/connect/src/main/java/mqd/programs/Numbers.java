package mqd.programs;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import org.apache.kafka.common.config.ConfigDef;
import org.apache.kafka.connect.connector.Task;
import org.apache.kafka.connect.data.Schema;
import org.apache.kafka.connect.source.ExactlyOnceSupport;
import org.apache.kafka.connect.source.SourceConnector;
import org.apache.kafka.connect.source.SourceRecord;
import org.apache.kafka.connect.source.SourceTask;

/**
 * A source that remembers nothing: each task counts in a partition of its own, from the offset that
 * Connect kept for it, up to the number in the file {@code limit}.
 */
public final class Numbers extends SourceConnector {
    private Map<String, String> settings;

    @Override
    public void start(Map<String, String> given) {
        settings = given;
    }

    @Override
    public Class<? extends Task> taskClass() {
        return Counting.class;
    }

    @Override
    public List<Map<String, String>> taskConfigs(int count) {
        List<Map<String, String>> tasks = new ArrayList<>();
        for (int task = 0; task < count; task++) {
            tasks.add(Map.of("topic", settings.get("topic"), "limit", settings.get("limit"), "task", Integer.toString(task)));
        }
        return tasks;
    }

    @Override
    public void stop() {
    }

    @Override
    public ConfigDef config() {
        return new ConfigDef()
            .define("topic", ConfigDef.Type.STRING, ConfigDef.Importance.HIGH, "where the numbers go")
            .define("limit", ConfigDef.Type.STRING, ConfigDef.Importance.HIGH, "a file with the number to stop at");
    }

    @Override
    public ExactlyOnceSupport exactlyOnceSupport(Map<String, String> given) {
        return ExactlyOnceSupport.SUPPORTED;
    }

    @Override
    public String version() {
        return "1";
    }

    public static final class Counting extends SourceTask {
        private static final int BATCH = 10;
        private static final long PAUSE_MS = 50;
        private String topic;
        private Path limit;
        private int task;
        private long next;

        @Override
        public void start(Map<String, String> settings) {
            topic = settings.get("topic");
            limit = Path.of(settings.get("limit"));
            task = Integer.parseInt(settings.get("task"));
            Map<String, Object> kept = context.offsetStorageReader().offset(partition());
            next = kept == null ? 0 : (Long) kept.get("next");
            System.out.println("task " + task + " counts from " + next);
        }

        @Override
        public List<SourceRecord> poll() throws InterruptedException {
            Thread.sleep(PAUSE_MS);
            List<SourceRecord> records = new ArrayList<>();
            long end = Math.min(next + BATCH, limit());
            for (; next < end; next++) {
                records.add(new SourceRecord(
                    partition(), Map.of("next", next + 1), topic, task,
                    Schema.STRING_SCHEMA, Integer.toString(task), Schema.STRING_SCHEMA, task + " " + next));
            }
            return records.isEmpty() ? null : records;
        }

        private long limit() {
            try {
                return Long.parseLong(Files.readString(limit).strip());
            } catch (IOException missing) {
                return 0;
            }
        }

        private Map<String, Object> partition() {
            return Map.of("task", task);
        }

        @Override
        public void stop() {
        }

        @Override
        public String version() {
            return "1";
        }
    }
}
