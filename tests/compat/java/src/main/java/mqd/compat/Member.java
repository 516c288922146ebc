package mqd.compat;

import java.time.Duration;
import java.util.Collection;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Queue;
import java.util.Set;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.function.BiConsumer;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.TopicPartition;

/** A member of a group that polls in a thread of its own, commits what it read before it lets partitions go, and tells what it holds. */
final class Member extends Thread implements ConsumerRebalanceListener {
    private final KafkaConsumer<String, String> consumer;
    private volatile boolean leaving;
    volatile Set<TopicPartition> held = Set.of();
    volatile Throwable failure;
    final Queue<String> values = new ConcurrentLinkedQueue<>();
    final List<Set<TopicPartition>> revoked = new CopyOnWriteArrayList<>();
    final List<Set<TopicPartition>> assigned = new CopyOnWriteArrayList<>();

    Member(Setting setting, Map<String, Object> options, BiConsumer<KafkaConsumer<String, String>, ConsumerRebalanceListener> subscribe) {
        consumer = setting.consumer(options);
        subscribe.accept(consumer, this);
        setDaemon(true);
        start();
    }

    @Override
    public void run() {
        try {
            while (!leaving) {
                ConsumerRecords<String, String> records = consumer.poll(Setting.SOON);
                for (ConsumerRecord<String, String> record : records) {
                    values.add(record.value());
                }
                if (!records.isEmpty()) {
                    consumer.commitSync();
                }
                held = Set.copyOf(consumer.assignment());
            }
        } catch (Throwable caught) {
            failure = caught;
        } finally {
            consumer.close(Duration.ofSeconds(10));
            held = Set.of();
        }
    }

    @Override
    public void onPartitionsAssigned(Collection<TopicPartition> partitions) {
        assigned.add(new HashSet<>(partitions));
    }

    @Override
    public void onPartitionsRevoked(Collection<TopicPartition> partitions) {
        if (!leaving) {
            revoked.add(new HashSet<>(partitions));
        }
    }

    void leave() throws InterruptedException {
        leaving = true;
        join(Setting.PATIENCE_MS);
        Setting.check(!isAlive(), "a member does not end");
        Setting.check(failure == null, "a member failed: " + failure);
    }

    /** Waits until each holds as many partitions, all together all of them, none twice. */
    static void share(Set<TopicPartition> partitions, int each, Member... members) throws Exception {
        Setting.until("each of " + members.length + " members holds " + each, () -> {
            Set<TopicPartition> together = new HashSet<>();
            int count = 0;
            for (Member member : members) {
                Setting.check(member.failure == null, "a member failed: " + member.failure);
                Set<TopicPartition> held = member.held;
                if (held.size() != each) {
                    return false;
                }
                together.addAll(held);
                count += held.size();
            }
            return count == together.size() && together.equals(partitions);
        });
    }
}
