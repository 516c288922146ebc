"""The Kafka messages this project speaks, written down once: field names, types, versions, tags and defaults. Compiled by mqd.protocol.codec."""

from mqd.protocol.schema import cluster, hot, topics
from mqd.protocol.schema.language import Api

# Every API written down, by key.
APIS: dict[int, Api] = {api.key: api for api in sorted((*hot.APIS, *cluster.APIS, *topics.APIS), key=lambda api: api.key)}
