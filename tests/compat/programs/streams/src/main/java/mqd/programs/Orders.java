package mqd.programs;

import java.time.Duration;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.KeyValue;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.Grouped;
import org.apache.kafka.streams.kstream.JoinWindows;
import org.apache.kafka.streams.kstream.KStream;
import org.apache.kafka.streams.kstream.KTable;
import org.apache.kafka.streams.kstream.TimeWindows;

/**
 * Orders of customers: {@code Orders BOOTSTRAP STATE_DIRECTORY GROUP_PROTOCOL REPLICAS}. Each order is enriched from a table of
 * customers, counted by customer and minute, and joined with its payment, which is another stream. All
 * state is in RocksDB. Without a cache every change is written, so that a repetition shows.
 */
public final class Orders {
    private static final Duration GRACE = Duration.ofHours(6);

    private Orders() {
    }

    public static void main(String[] words) throws InterruptedException {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", words[0]);
        settings.put("state.dir", words[1]);
        settings.put("application.id", "orders");
        settings.put("processing.guarantee", "exactly_once_v2");
        settings.put("replication.factor", words[3]);
        settings.put("num.stream.threads", "2");
        settings.put("commit.interval.ms", "200");
        settings.put("statestore.cache.max.bytes", "0");
        settings.put("max.task.idle.ms", "2000");
        settings.put("default.key.serde", Serdes.StringSerde.class);
        settings.put("default.value.serde", Serdes.StringSerde.class);
        settings.put("consumer.auto.offset.reset", "earliest");
        settings.put("group.protocol", words[2]);
        if (words[2].equals("classic")) { // with "streams" both are settings of the broker
            settings.put("consumer.session.timeout.ms", "6000");
            settings.put("consumer.heartbeat.interval.ms", "500");
        }
        settings.put("producer.transaction.timeout.ms", "10000");
        settings.put("producer.linger.ms", "5");
        KafkaStreams streams = new KafkaStreams(topology(), settings);
        CountDownLatch ended = new CountDownLatch(1);
        streams.setStateListener((now, before) -> {
            System.out.println("state " + now);
            if (now == KafkaStreams.State.ERROR || now == KafkaStreams.State.NOT_RUNNING) {
                ended.countDown();
            }
        });
        streams.start();
        ended.await();
        System.exit(1);
    }

    private static org.apache.kafka.streams.Topology topology() {
        StreamsBuilder builder = new StreamsBuilder();
        KTable<String, String> customers = builder.table("customers");
        KStream<String, String> orders = builder.stream("orders");
        orders.join(customers, (order, country) -> order + " " + country).to("enriched");
        orders.groupByKey(Grouped.with(Serdes.String(), Serdes.String()))
            .windowedBy(TimeWindows.ofSizeAndGrace(Duration.ofMinutes(1), GRACE))
            .count()
            .toStream()
            .map((window, count) -> KeyValue.pair(window.key() + " " + window.window().start(), Long.toString(count)))
            .to("counts");
        KStream<String, String> byNumber = orders.map((customer, number) -> KeyValue.pair(number, customer));
        KStream<String, String> payments = builder.stream("payments", Consumed.with(Serdes.String(), Serdes.String()));
        byNumber.join(payments, (customer, sum) -> customer + " " + sum, JoinWindows.ofTimeDifferenceAndGrace(Duration.ofMinutes(5), GRACE)).to("paid");
        return builder.build();
    }
}
