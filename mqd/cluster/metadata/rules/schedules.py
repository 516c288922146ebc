"""The rules for topics with schedule.to, whose records are kept until their scheduled time and
then delivered to another topic.
"""

from collections.abc import Mapping

from mqd.base.views import VIEW_OF
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.rules.configs import RESOURCE_TOPIC, ConfigRules
from mqd.cluster.metadata.state import INTERNAL_TOPICS, MetadataState
from mqd.protocol.errors import ErrorCode

SCHEDULE_TO, CLEANUP = "schedule.to", "cleanup.policy"


def check(
    state: MetadataState,
    name: str,
    config: Mapping[str, str],
    before: Mapping[str, str],
    rules: ConfigRules,
    broker_config: Mapping[str, str],
) -> None:
    """`config`: the new configuration of topic `name`; `before`: the current one. Raises Refusal."""
    target = config.get(SCHEDULE_TO, "")
    if not target or all(config.get(key) == before.get(key) for key in (SCHEDULE_TO, CLEANUP)):
        return
    policy = config.get(CLEANUP, rules.default(RESOURCE_TOPIC, CLEANUP, broker_config) or "")
    if "compact" in policy:
        _refuse(f"{CLEANUP}={policy}: waiting records must not be compacted; set {CLEANUP}=delete with {SCHEDULE_TO}")
    if name in INTERNAL_TOPICS or target in INTERNAL_TOPICS:
        _refuse(f"{SCHEDULE_TO}={target}: internal topics cannot have schedules")
    if target == before.get(SCHEDULE_TO):
        return
    if target == name:
        _refuse(f"{SCHEDULE_TO}={target}: a topic cannot deliver its records to itself")
    if target not in state.topics:
        _refuse(f"{SCHEDULE_TO}={target}: there is no such topic; create it first")
    if state.topics[target].config.get(VIEW_OF):
        _refuse(f"{SCHEDULE_TO}={target}: it is a view, which has no log; name its base topic")
    chain, hop = [name, target], target
    while hop := state.topics[hop].config.get(SCHEDULE_TO, "") if hop in state.topics else "":
        if hop in chain[1:]:
            break
        chain.append(hop)
        if hop == name:
            _refuse(f"{SCHEDULE_TO}={target}: the topics would form a cycle, {' -> '.join(chain)}")


def _refuse(reason: str) -> None:
    raise Refusal(ErrorCode.INVALID_CONFIG, f"Invalid value for configuration {reason}.")
