package mqd.compat;

import static mqd.compat.Setting.check;
import static mqd.compat.Setting.part;
import static mqd.compat.Setting.same;
import static mqd.compat.Setting.until;

import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import java.util.regex.Pattern;
import java.util.stream.Stream;
import org.apache.kafka.clients.admin.ClassicGroupDescription;
import org.apache.kafka.clients.consumer.CooperativeStickyAssignor;
import org.apache.kafka.clients.consumer.RangeAssignor;
import org.apache.kafka.clients.consumer.RoundRobinAssignor;
import org.apache.kafka.clients.consumer.StickyAssignor;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.FencedInstanceIdException;

/** Groups of the classic protocol: every assignor, cooperative rebalances, static members, patterns. */
final class ClassicGroups {
    private static final int PARTITIONS = 6;

    private ClassicGroups() {
    }

    static void run(Setting setting) throws Exception {
        cooperative(setting);
        for (Class<?> assignor : List.of(RangeAssignor.class, RoundRobinAssignor.class, StickyAssignor.class)) {
            eager(setting, assignor);
        }
        staticMembers(setting);
        pattern(setting);
    }

    static Map<String, Object> options(String group, Class<?> assignor) {
        return new HashMap<>(Map.of("group.id", group, "group.protocol", "classic", "partition.assignment.strategy", assignor.getName(), "session.timeout.ms", 10_000,
                "heartbeat.interval.ms", 100));
    }

    private static void cooperative(Setting setting) throws Exception {
        String topic = setting.topic("cooperative", PARTITIONS);
        String group = Setting.fresh("group");
        Set<TopicPartition> all = Setting.all(topic, PARTITIONS);
        setting.fill(topic, PARTITIONS, 0, 60);
        Map<String, Object> options = options(group, CooperativeStickyAssignor.class);
        Member first = new Member(setting, options, (consumer, listener) -> consumer.subscribe(List.of(topic), listener));
        Member.share(all, 6, first);
        Member second = new Member(setting, options, (consumer, listener) -> consumer.subscribe(List.of(topic), listener));
        Member.share(all, 3, first, second);
        same(first.revoked.stream().mapToInt(Set::size).sum(), 3, "partitions that the first member had to give up");
        ClassicGroupDescription described = Setting.get(setting.admin.describeClassicGroups(List.of(group)).describedGroups().get(group));
        same(described.protocolData(), "cooperative-sticky", "the protocol");
        same(described.members().size(), 2, "members");
        setting.fill(topic, PARTITIONS, 60, 60);
        until("all records are read", () -> first.values.size() + second.values.size() >= 120);
        second.leave();
        Member.share(all, 6, first);
        setting.fill(topic, PARTITIONS, 120, 60);
        until("all records are read by who stayed", () -> first.values.size() + second.values.size() >= 180);
        first.leave();
        List<Integer> values = new ArrayList<>(Stream.concat(first.values.stream(), second.values.stream()).map(Integer::valueOf).sorted().toList());
        same(values.size(), 180, "records read");
        same(new TreeSet<>(values).size(), 180, "different records read");
        part("cooperative-sticky: two members, one leaves, every record once");
    }

    private static void eager(Setting setting, Class<?> assignor) throws Exception {
        String topic = setting.topic("eager", PARTITIONS);
        Set<TopicPartition> all = Setting.all(topic, PARTITIONS);
        Map<String, Object> options = options(Setting.fresh("group"), assignor);
        Member first = new Member(setting, options, (consumer, listener) -> consumer.subscribe(List.of(topic), listener));
        Member second = new Member(setting, options, (consumer, listener) -> consumer.subscribe(List.of(topic), listener));
        Member.share(all, 3, first, second);
        first.leave();
        Member.share(all, 6, second);
        second.leave();
        part(assignor.getSimpleName());
    }

    private static void staticMembers(Setting setting) throws Exception {
        String topic = setting.topic("static", PARTITIONS);
        String group = Setting.fresh("group");
        Set<TopicPartition> all = Setting.all(topic, PARTITIONS);
        Map<String, Object> one = options(group, CooperativeStickyAssignor.class);
        one.put("group.instance.id", "one");
        one.put("session.timeout.ms", 60_000);
        Map<String, Object> two = new HashMap<>(one);
        two.put("group.instance.id", "two");
        Member first = new Member(setting, one, (consumer, listener) -> consumer.subscribe(List.of(topic), listener));
        Member second = new Member(setting, two, (consumer, listener) -> consumer.subscribe(List.of(topic), listener));
        Member.share(all, 3, first, second);
        Set<TopicPartition> before = first.held;
        int seen = second.assigned.size() + second.revoked.size();
        first.leave();
        Member again = new Member(setting, one, (consumer, listener) -> consumer.subscribe(List.of(topic), listener));
        Member.share(all, 3, again, second);
        same(again.held, before, "what a static member gets back");
        same(second.assigned.size() + second.revoked.size(), seen, "rebalances that the other member saw");
        Member twin = new Member(setting, one, (consumer, listener) -> consumer.subscribe(List.of(topic), listener));
        until("who was there is fenced by its twin", () -> again.failure != null);
        check(again.failure instanceof FencedInstanceIdException, "fenced with " + again.failure);
        Member.share(all, 3, twin, second);
        twin.leave();
        second.leave();
        part("static members come back, and fence their twins");
    }

    private static void pattern(Setting setting) throws Exception {
        String prefix = Setting.fresh("pattern");
        String first = setting.named(prefix + "-1", 2, Map.of());
        Map<String, Object> options = options(Setting.fresh("group"), RangeAssignor.class);
        options.put("metadata.max.age.ms", 200);
        Member member = new Member(setting, options, (consumer, listener) -> consumer.subscribe(Pattern.compile(prefix + "-.*"), listener));
        Member.share(Setting.all(first, 2), 2, member);
        String second = setting.named(prefix + "-2", 3, Map.of());
        Set<TopicPartition> both = Setting.all(first, 2);
        both.addAll(Setting.all(second, 3));
        Member.share(both, 5, member);
        member.leave();
        part("a pattern finds new topics");
    }
}
