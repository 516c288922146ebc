"""Partitioners by librdkafka's names. Shared memory, librdkafka and (with murmur2) the Java client
send a key to the same partition.

    consistent_random (default)   CRC-32 of the key; without a key or with an empty one: random
    consistent                    CRC-32 of the key; without a key: of the empty string
    murmur2_random                Java's default: murmur2 of the key; without a key: random
    murmur2                       murmur2 of the key; without a key: of the empty string
    fnv1a_random, fnv1a           FNV-1a of the key, as above
    random                        random
"Random" means: one partition until a batch is full, then another (KIP-480).
"""

from __future__ import annotations

from mqd.client.messages import KafkaError, failure

# in the order of enum mqd_partitioner
NAMES = ("random", "consistent", "consistent_random", "murmur2", "murmur2_random", "fnv1a", "fnv1a_random")


def number_of(name: str) -> int:
    """Raises KafkaException (_INVALID_ARG) for a name that librdkafka lacks."""
    if name not in NAMES:
        raise failure(
            KafkaError._INVALID_ARG,
            f'Invalid value "{name}" for configuration property "partitioner": {", ".join(NAMES)}',
        )
    return NAMES.index(name)
