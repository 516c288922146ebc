"""Names of the properties of dead letters (KIP-1191), and which topics may receive them."""

TOPIC = "errors.deadletterqueue.topic.name"  # of a group
COPY = "errors.deadletterqueue.copy.record.enable"  # of a group
ENABLED = "errors.deadletterqueue.group.enable"  # of a topic
TOPIC_PREFIX = "errors.deadletterqueue.topic.name.prefix"  # of brokers
AUTO_CREATE = "errors.deadletterqueue.auto.create.topics.enable"  # of brokers
CREATED_CONFIG = {
    ENABLED: "true",
    "message.timestamp.type": "CreateTime",
}  # of a dead-letter topic that is created automatically


def problem_of_name(name: str, prefix: str) -> str:
    """Why a topic of this name cannot receive dead letters, or "" if it can."""
    if name.startswith("__"):
        return f"{TOPIC}={name} must not begin with __"
    if prefix and not name.startswith(prefix):
        return f"{TOPIC}={name} must begin with {prefix} ({TOPIC_PREFIX} of the brokers)"
    return ""
