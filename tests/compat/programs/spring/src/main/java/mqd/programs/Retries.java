package mqd.programs;

import java.util.HashMap;
import java.util.Map;
import org.apache.kafka.clients.admin.AdminClientConfig;
import org.apache.kafka.clients.consumer.ConsumerConfig;
import org.apache.kafka.clients.producer.ProducerConfig;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;
import org.springframework.context.annotation.AnnotationConfigApplicationContext;
import org.springframework.context.annotation.Bean;
import org.springframework.context.annotation.Configuration;
import org.springframework.kafka.annotation.BackOff;
import org.springframework.kafka.annotation.DltHandler;
import org.springframework.kafka.annotation.EnableKafka;
import org.springframework.kafka.annotation.EnableKafkaRetryTopic;
import org.springframework.kafka.annotation.KafkaListener;
import org.springframework.kafka.annotation.RetryableTopic;
import org.springframework.kafka.config.ConcurrentKafkaListenerContainerFactory;
import org.springframework.kafka.core.DefaultKafkaConsumerFactory;
import org.springframework.kafka.core.DefaultKafkaProducerFactory;
import org.springframework.kafka.core.KafkaAdmin;
import org.springframework.kafka.core.KafkaTemplate;
import org.springframework.kafka.support.KafkaHeaders;
import org.springframework.messaging.handler.annotation.Header;
import org.springframework.scheduling.TaskScheduler;
import org.springframework.scheduling.concurrent.ThreadPoolTaskScheduler;

/**
 * A Spring program with retry topics: {@code Retries BOOTSTRAP}. Of the numbers in the topic {@code jobs}
 * those that 7 divides never succeed, and those that 5 divides fail twice. What succeeds is written to
 * {@code done} with its attempt, what never does to {@code dead} by the handler of the dead letter topic.
 */
public final class Retries {
    private static final int ATTEMPTS = 4;
    private static String bootstrap;

    private Retries() {
    }

    public static void main(String[] words) throws InterruptedException {
        bootstrap = words[0];
        new AnnotationConfigApplicationContext(Settings.class);
        System.out.println("started");
        Thread.currentThread().join();
    }

    public static class Jobs {
        private final KafkaTemplate<String, String> template;

        Jobs(KafkaTemplate<String, String> template) {
            this.template = template;
        }

        @RetryableTopic(
            attempts = "" + ATTEMPTS,
            backOff = @BackOff(delay = 200, multiplier = 2),
            numPartitions = "2",
            replicationFactor = "1")
        @KafkaListener(topics = "jobs", groupId = "jobs")
        public void job(
                String value, @Header(name = "retry_topic-attempts", required = false) Integer attempt) throws Exception {
            int number = Integer.parseInt(value);
            int now = attempt == null ? 1 : attempt;
            if (number % 7 == 0 || number % 5 == 0 && now < 3) {
                throw new IllegalStateException("attempt " + now + " of " + number);
            }
            template.send("done", value, value + " " + now).get();
        }

        @DltHandler
        public void dead(String value, @Header(KafkaHeaders.ORIGINAL_TOPIC) String topic) throws Exception {
            template.send("dead", value, value + " " + topic).get();
        }
    }

    @Configuration
    @EnableKafka
    @EnableKafkaRetryTopic
    public static class Settings {
        @Bean
        DefaultKafkaProducerFactory<String, String> producers() {
            Map<String, Object> settings = new HashMap<>();
            settings.put(ProducerConfig.BOOTSTRAP_SERVERS_CONFIG, bootstrap);
            settings.put(ProducerConfig.KEY_SERIALIZER_CLASS_CONFIG, StringSerializer.class);
            settings.put(ProducerConfig.VALUE_SERIALIZER_CLASS_CONFIG, StringSerializer.class);
            return new DefaultKafkaProducerFactory<>(settings);
        }

        @Bean
        KafkaTemplate<String, String> kafkaTemplate() {
            return new KafkaTemplate<>(producers());
        }

        @Bean
        ConcurrentKafkaListenerContainerFactory<String, String> kafkaListenerContainerFactory() {
            Map<String, Object> settings = new HashMap<>();
            settings.put(ConsumerConfig.BOOTSTRAP_SERVERS_CONFIG, bootstrap);
            settings.put(ConsumerConfig.KEY_DESERIALIZER_CLASS_CONFIG, StringDeserializer.class);
            settings.put(ConsumerConfig.VALUE_DESERIALIZER_CLASS_CONFIG, StringDeserializer.class);
            settings.put(ConsumerConfig.AUTO_OFFSET_RESET_CONFIG, "earliest");
            settings.put(ConsumerConfig.SESSION_TIMEOUT_MS_CONFIG, 6_000);
            settings.put(ConsumerConfig.HEARTBEAT_INTERVAL_MS_CONFIG, 1_000);
            var factory = new ConcurrentKafkaListenerContainerFactory<String, String>();
            factory.setConsumerFactory(new DefaultKafkaConsumerFactory<>(settings));
            return factory;
        }

        @Bean
        KafkaAdmin admin() {
            return new KafkaAdmin(Map.of(AdminClientConfig.BOOTSTRAP_SERVERS_CONFIG, bootstrap));
        }

        @Bean
        TaskScheduler scheduler() {
            return new ThreadPoolTaskScheduler();
        }

        @Bean
        Jobs jobs() {
            return new Jobs(kafkaTemplate());
        }
    }
}
