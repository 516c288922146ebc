"""The laboratory: mqd beside Apache Kafka, NATS JetStream, RabbitMQ streams and Redis Streams, the
same load on the same machine. See perf/peers/README.md.
"""
