"""Creates a consumer's membership core from its configuration, and splits its subscription into names
and a regular expression.
"""

from __future__ import annotations

from mqd.client.group.assignors import ASSIGNORS
from mqd.client.group.classic import ClassicCore, ClassicSettings
from mqd.client.group.consumer_protocol import ConsumerProtocolCore, Settings
from mqd.client.shm.consumer_config import ConsumerConfig


def consumer_protocol_core(config: ConsumerConfig, member_id: str) -> ConsumerProtocolCore:
    """Creates a core for the consumer protocol (KIP-848)."""
    return ConsumerProtocolCore(
        Settings(
            config["group.id"],
            member_id,
            config["group.instance.id"],
            config["client.rack"] or None,
            config["group.remote.assignor"],
            config["max.poll.interval.ms"],
        )
    )


def classic_core(config: ConsumerConfig) -> ClassicCore:
    """Creates a core for the classic protocol."""
    assignors = tuple(
        name for name in str(config["partition.assignment.strategy"]).replace(" ", "").split(",") if name in ASSIGNORS
    )
    return ClassicCore(
        ClassicSettings(
            config["group.id"],
            config["group.instance.id"],
            config["session.timeout.ms"],
            config["heartbeat.interval.ms"],
            config["max.poll.interval.ms"],
            assignors or ("range", "roundrobin"),
            max(config["topic.metadata.refresh.interval.ms"], 1_000),
        )
    )


def split_subscription(config: ConsumerConfig, topics: list[str]) -> tuple[tuple[str, ...], str | None]:
    """Returns (names, regular expression or None). The expression combines all topics that begin with
    ^. In librdkafka an expression matches anywhere in a name; the coordinator
    (group.protocol=consumer) matches whole names.
    """
    names = tuple(sorted({topic for topic in topics if not topic.startswith("^")}))
    expressions = [topic for topic in topics if topic.startswith("^")]
    if not expressions:
        return names, None
    if str(config["group.protocol"]).lower() == "consumer":
        return names, "|".join(expressions)
    return names, "|".join(f".*(?:{expression}).*" for expression in expressions)
