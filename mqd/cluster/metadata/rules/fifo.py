"""The rule for groups with share.fifo: all hosts must support it."""

from collections.abc import Mapping

from mqd.base.fifo import FIFO
from mqd.cluster.metadata.features import FIFO_LEVEL, MQD_VERSION, levels
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.state import MetadataState
from mqd.protocol.errors import ErrorCode


def check(state: MetadataState, config: Mapping[str, str], current: Mapping[str, str]) -> None:
    """`config`: a group's new configuration; `current`: its current one. Raises Refusal, because leaders
    of earlier versions of mqd do not keep the order.
    """
    level = levels(state.features)[MQD_VERSION]
    if config.get(FIFO) and config.get(FIFO) != current.get(FIFO) and level < FIFO_LEVEL:
        raise Refusal(
            ErrorCode.INVALID_CONFIG,
            f"{FIFO} needs {MQD_VERSION} {FIFO_LEVEL}; the cluster is at {level}. When all hosts run a version of mqd"
            " that supports it, `mqd cluster upgrade` raises the level.",
        )
