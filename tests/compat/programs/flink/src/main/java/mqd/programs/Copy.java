package mqd.programs;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.Comparator;
import java.util.Optional;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import java.util.stream.Stream;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.functions.MapFunction;
import org.apache.flink.api.common.serialization.SimpleStringSchema;
import org.apache.flink.configuration.CheckpointingOptions;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.configuration.ExternalizedCheckpointRetention;
import org.apache.flink.configuration.MemorySize;
import org.apache.flink.configuration.RestOptions;
import org.apache.flink.configuration.RestartStrategyOptions;
import org.apache.flink.configuration.StateRecoveryOptions;
import org.apache.flink.configuration.TaskManagerOptions;
import org.apache.flink.connector.base.DeliveryGuarantee;
import org.apache.flink.connector.kafka.sink.KafkaRecordSerializationSchema;
import org.apache.flink.connector.kafka.sink.KafkaSink;
import org.apache.flink.connector.kafka.sink.TransactionNamingStrategy;
import org.apache.flink.connector.kafka.source.KafkaSource;
import org.apache.flink.connector.kafka.source.enumerator.initializer.OffsetsInitializer;
import org.apache.flink.runtime.minicluster.MiniCluster;
import org.apache.flink.runtime.minicluster.MiniClusterConfiguration;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;

/**
 * A Flink job in a cluster of one process: {@code Copy BOOTSTRAP DIRECTORY GUARANTEE NAMING}. It copies
 * the topic {@code in} to {@code out}, and begins from the last checkpoint in the directory. A record
 * "fail ..." lets its task fail the first time; "lose ..." ends the task manager that runs everything,
 * and another takes its place.
 */
public final class Copy {
    private static final int PARALLELISM = 2;
    private static final AtomicLong FAILURES = new AtomicLong();
    private static final AtomicInteger LOST = new AtomicInteger();
    private static MiniCluster cluster;

    private Copy() {
    }

    public static void main(String[] words) throws Exception {
        Path checkpoints = Path.of(words[1]);
        Configuration settings = new Configuration();
        settings.set(CheckpointingOptions.CHECKPOINTING_INTERVAL, Duration.ofMillis(300));
        settings.set(CheckpointingOptions.CHECKPOINTS_DIRECTORY, checkpoints.toUri().toString());
        settings.set(CheckpointingOptions.CHECKPOINT_STORAGE, "filesystem");
        settings.set(CheckpointingOptions.MAX_RETAINED_CHECKPOINTS, 3);
        settings.set(CheckpointingOptions.TOLERABLE_FAILURE_NUMBER, 1_000);
        settings.set(
            CheckpointingOptions.EXTERNALIZED_CHECKPOINT_RETENTION, ExternalizedCheckpointRetention.RETAIN_ON_CANCELLATION);
        settings.set(RestartStrategyOptions.RESTART_STRATEGY, "fixed-delay");
        settings.set(RestartStrategyOptions.RESTART_STRATEGY_FIXED_DELAY_ATTEMPTS, 1_000);
        settings.set(RestartStrategyOptions.RESTART_STRATEGY_FIXED_DELAY_DELAY, Duration.ofMillis(500));
        settings.set(RestOptions.BIND_PORT, "0");
        settings.set(RestOptions.ADDRESS, "127.0.0.1");
        settings.set(RestOptions.BIND_ADDRESS, "127.0.0.1");
        settings.set(TaskManagerOptions.NETWORK_MEMORY_MIN, MemorySize.ofMebiBytes(16));
        settings.set(TaskManagerOptions.NETWORK_MEMORY_MAX, MemorySize.ofMebiBytes(16));
        settings.set(TaskManagerOptions.MANAGED_MEMORY_SIZE, MemorySize.ofMebiBytes(16));
        Optional<Path> last = lastCheckpoint(checkpoints);
        System.out.println("begins from " + last.map(Path::toString).orElse("nothing"));
        last.ifPresent(path -> settings.set(StateRecoveryOptions.SAVEPOINT_PATH, path.toUri().toString()));

        StreamExecutionEnvironment environment = StreamExecutionEnvironment.getExecutionEnvironment(settings);
        environment.setParallelism(PARALLELISM);
        KafkaSource<String> source = KafkaSource.<String>builder()
            .setBootstrapServers(words[0])
            .setTopics("in")
            .setGroupId("copy")
            .setStartingOffsets(OffsetsInitializer.earliest())
            .setValueOnlyDeserializer(new SimpleStringSchema())
            .build();
        KafkaSink<String> sink = KafkaSink.<String>builder()
            .setBootstrapServers(words[0])
            .setRecordSerializer(KafkaRecordSerializationSchema.<String>builder()
                .setTopic("out")
                .setValueSerializationSchema(new SimpleStringSchema())
                .build())
            .setDeliveryGuarantee(DeliveryGuarantee.valueOf(words[2]))
            .setTransactionNamingStrategy(TransactionNamingStrategy.valueOf(words[3]))
            .setTransactionalIdPrefix("copy")
            .setProperty("transaction.timeout.ms", "60000")
            .build();
        environment.fromSource(source, WatermarkStrategy.noWatermarks(), "in")
            .setParallelism(1)
            .map(new FailOnce())
            .sinkTo(sink);

        cluster = new MiniCluster(new MiniClusterConfiguration.Builder()
            .setConfiguration(settings)
            .setNumTaskManagers(1)
            .setNumSlotsPerTaskManager(PARALLELISM)
            .build());
        cluster.start();
        cluster.executeJobBlocking(environment.getStreamGraph().getJobGraph());
        System.exit(1);
    }

    private static Optional<Path> lastCheckpoint(Path directory) throws IOException {
        if (!Files.exists(directory)) {
            return Optional.empty();
        }
        try (Stream<Path> paths = Files.walk(directory)) {
            return paths.filter(path -> path.endsWith("_metadata"))
                .map(Path::getParent)
                .max(Comparator.comparingLong(path -> path.toFile().lastModified()));
        }
    }

    private static final class FailOnce implements MapFunction<String, String> {
        @Override
        public String map(String value) {
            if (!value.startsWith("fail ") && !value.startsWith("lose ")) {
                return value;
            }
            long number = Long.parseLong(value.substring(5));
            if (FAILURES.getAndAccumulate(number, Math::max) >= number) {
                return value;
            }
            System.out.println(value);
            if (value.startsWith("lose ")) {
                Thread losing = new Thread(Copy::loseTaskManager);
                losing.setContextClassLoader(Copy.class.getClassLoader()); // the task's own ends with the task
                losing.start();
                return value;
            }
            throw new IllegalStateException(value);
        }
    }

    private static void loseTaskManager() {
        try {
            cluster.terminateTaskManager(LOST.getAndIncrement()).join();
            cluster.startTaskManager();
        } catch (Exception failure) {
            failure.printStackTrace();
            System.exit(1);
        }
    }
}
