package mqd.compat;

import static mqd.compat.Setting.check;
import static mqd.compat.Setting.part;
import static mqd.compat.Setting.same;
import static mqd.compat.Setting.until;

import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import org.apache.kafka.clients.admin.ConsumerGroupDescription;
import org.apache.kafka.clients.consumer.CooperativeStickyAssignor;
import org.apache.kafka.clients.consumer.SubscriptionPattern;
import org.apache.kafka.common.GroupType;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.InvalidRegularExpression;
import org.apache.kafka.common.errors.UnreleasedInstanceIdException;

/** Groups of the consumer protocol (KIP-848): the broker assigns. */
final class ConsumerGroups {
    private static final int PARTITIONS = 6;

    private ConsumerGroups() {
    }

    static void run(Setting setting) throws Exception {
        for (String assignor : List.of("uniform", "range")) {
            sharing(setting, assignor);
        }
        expressions(setting);
        staticMembers(setting);
        migration(setting);
    }

    private static Map<String, Object> options(String group) {
        return new HashMap<>(Map.of("group.id", group, "group.protocol", "consumer"));
    }

    private static void sharing(Setting setting, String assignor) throws Exception {
        String topic = setting.topic("sharing", PARTITIONS);
        String group = Setting.fresh("group");
        Set<TopicPartition> all = Setting.all(topic, PARTITIONS);
        setting.fill(topic, PARTITIONS, 0, 60);
        Map<String, Object> options = options(group);
        options.put("group.remote.assignor", assignor);
        Member first = new Member(setting, options, (consumer, listener) -> consumer.subscribe(List.of(topic), listener));
        Member.share(all, 6, first);
        Member second = new Member(setting, options, (consumer, listener) -> consumer.subscribe(List.of(topic), listener));
        Member.share(all, 3, first, second);
        same(first.revoked.stream().mapToInt(Set::size).sum(), 3, "partitions that the first member had to give up");
        until("the group is stable", () -> describe(setting, group).groupState().toString().equals("Stable"));
        ConsumerGroupDescription described = describe(setting, group);
        same(described.type(), GroupType.CONSUMER, "the type");
        same(described.partitionAssignor(), assignor, "the assignor");
        same(described.members().stream().flatMap(one -> one.assignment().topicPartitions().stream()).collect(Collectors.toSet()), all, "what the members are described with");
        setting.fill(topic, PARTITIONS, 60, 60);
        until("all records are read", () -> first.values.size() + second.values.size() >= 120);
        first.leave();
        Member.share(all, 6, second);
        second.leave();
        same(Stream.concat(first.values.stream(), second.values.stream()).collect(Collectors.toCollection(TreeSet::new)).size(), 120, "different records read");
        same(first.values.size() + second.values.size(), 120, "records read");
        part(assignor + ": two members, one leaves, every record once");
    }

    private static ConsumerGroupDescription describe(Setting setting, String group) throws Exception {
        return Setting.get(setting.admin.describeConsumerGroups(List.of(group)).describedGroups().get(group));
    }

    private static void expressions(Setting setting) throws Exception {
        String prefix = Setting.fresh("expression");
        String first = setting.named(prefix + "-1", 2, Map.of());
        Member member = new Member(setting, options(Setting.fresh("group")), (consumer, listener) -> consumer.subscribe(new SubscriptionPattern(prefix + "-[0-9]+"), listener));
        Member.share(Setting.all(first, 2), 2, member);
        setting.named(prefix + "-x", 2, Map.of());
        String second = setting.named(prefix + "-22", 3, Map.of());
        Set<TopicPartition> both = Setting.all(first, 2);
        both.addAll(Setting.all(second, 3));
        Member.share(both, 5, member);
        member.leave();
        Member wrong = new Member(setting, options(Setting.fresh("group")), (consumer, listener) -> consumer.subscribe(new SubscriptionPattern("a(b"), listener));
        until("a wrong expression is refused", () -> wrong.failure != null);
        check(wrong.failure instanceof InvalidRegularExpression, "refused with " + wrong.failure);
        part("expressions find new topics; wrong ones are refused");
    }

    private static void staticMembers(Setting setting) throws Exception {
        String topic = setting.topic("static", PARTITIONS);
        String group = Setting.fresh("group");
        Set<TopicPartition> all = Setting.all(topic, PARTITIONS);
        Map<String, Object> one = options(group);
        one.put("group.instance.id", "one");
        Map<String, Object> two = new HashMap<>(one);
        two.put("group.instance.id", "two");
        Member first = new Member(setting, one, (consumer, listener) -> consumer.subscribe(List.of(topic), listener));
        Member second = new Member(setting, two, (consumer, listener) -> consumer.subscribe(List.of(topic), listener));
        Member.share(all, 3, first, second);
        Set<TopicPartition> before = first.held;
        Member twin = new Member(setting, one, (consumer, listener) -> consumer.subscribe(List.of(topic), listener));
        until("a twin of who is there is refused", () -> twin.failure != null);
        check(twin.failure instanceof UnreleasedInstanceIdException, "refused with " + twin.failure);
        first.leave();
        Member again = new Member(setting, one, (consumer, listener) -> consumer.subscribe(List.of(topic), listener));
        Member.share(all, 3, again, second);
        same(again.held, before, "what a static member gets back");
        again.leave();
        second.leave();
        part("static members come back; their twins are refused");
    }

    private static void migration(Setting setting) throws Exception {
        String topic = setting.topic("migration", 4);
        String group = Setting.fresh("group");
        Set<TopicPartition> all = Setting.all(topic, 4);
        Member old = new Member(setting, ClassicGroups.options(group, CooperativeStickyAssignor.class), (consumer, listener) -> consumer.subscribe(List.of(topic), listener));
        Member.share(all, 4, old);
        Member young = new Member(setting, options(group), (consumer, listener) -> consumer.subscribe(List.of(topic), listener));
        Member.share(all, 2, old, young);
        same(describe(setting, group).type(), GroupType.CONSUMER, "the type with one of each");
        Set<TopicPartition> given = new HashSet<>(all);
        given.removeAll(young.held);
        same(old.held, given, "what who was there keeps");
        old.leave();
        Member.share(all, 4, young);
        young.leave();
        part("from the classic protocol without a stop");
    }
}
