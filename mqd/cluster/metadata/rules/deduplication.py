"""The rule for topics with dedup.window.ms: all hosts must support it."""

from collections.abc import Mapping

from mqd.cluster.metadata.features import DEDUPLICATION_LEVEL, MQD_VERSION, levels
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.state import MetadataState
from mqd.protocol.errors import ErrorCode


def check(state: MetadataState, config: Mapping[str, str]) -> None:
    """`config`: the new configuration of a topic. Raises Refusal, because a leader of an earlier version
    would write duplicates.
    """
    if config.get("dedup.window.ms", "0") != "0" and levels(state.features)[MQD_VERSION] < DEDUPLICATION_LEVEL:
        raise Refusal(
            ErrorCode.INVALID_CONFIG,
            f"Invalid value for configuration dedup.window.ms: it needs level {DEDUPLICATION_LEVEL} of {MQD_VERSION},"
            " which all hosts must support; run `mqd cluster upgrade` once they do.",
        )
