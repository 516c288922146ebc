"""mqd compared with Apache Kafka, field by field. See README.md."""
