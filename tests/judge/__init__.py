"""The wire judge: mqd beside Apache Kafka, field by field. See README.md."""
