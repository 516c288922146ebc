"""The comparison of mqd with Apache Kafka, NATS JetStream, RabbitMQ streams and Redis Streams: the same
load on the same machine. See perf/peers/README.md.
"""
