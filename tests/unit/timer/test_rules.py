"""Which topics may be schedules."""

import pytest

from mqd.base.config import load_broker
from mqd.cluster.host import messages
from mqd.cluster.metadata.records import TopicConfigured
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.rules import topics as metadata_rules
from mqd.cluster.metadata.rules.configs import ConfigRules
from mqd.cluster.metadata.rules.placement import Directories
from mqd.cluster.metadata.state import MetadataState
from mqd.cluster.metadata.view import View
from mqd.protocol.errors import ErrorCode as E
from tests.unit.cluster.test_rules import cluster, topic


def made() -> MetadataState:
    state = cluster()
    for number, (name, config) in enumerate(
        {"orders": {}, "later": {"schedule.to": "orders"}, "much-later": {"schedule.to": "later"}}.items()
    ):
        topic(state, name=name, config=config, topic_id=bytes([number]) * 16)
    return state


def alter(state: MetadataState, name: str, **config: str) -> list[object]:
    rules = ConfigRules(load_broker(None, {}, {"cluster.seeds": "127.0.0.1:9094"}))
    place = metadata_rules.PlacementContext(1, View(state), Directories(state, {}), 100)
    operations = [messages.ConfigOperation(key.replace("_", "."), "set", value) for key, value in config.items()]
    return metadata_rules.alter_config(state, messages.AlterConfig(2, name, operations, False), place, rules)


@pytest.mark.parametrize(
    ("name", "config", "reason"),
    [
        ("orders", {"schedule_to": "orders"}, "to itself"),
        ("orders", {"schedule_to": "later"}, "orders -> later -> orders"),
        ("orders", {"schedule_to": "much-later"}, "orders -> much-later -> later -> orders"),
        ("orders", {"schedule_to": "missing"}, "no such topic"),
        ("later", {"schedule_to": "missing"}, "no such topic"),
        ("orders", {"schedule_to": "__consumer_offsets"}, "internal"),
        ("later", {"cleanup_policy": "compact"}, "must not be compacted"),
        ("later", {"cleanup_policy": "delete,compact"}, "must not be compacted"),
    ],
)
def test_refused(name: str, config: dict[str, str], reason: str) -> None:
    with pytest.raises(Refusal) as refused:
        alter(made(), name, **config)
    assert refused.value.error == E.INVALID_CONFIG and reason in refused.value.message


def test_accepted() -> None:
    state = made()
    assert isinstance(alter(state, "much-later", schedule_to="orders")[0], TopicConfigured)
    assert isinstance(alter(state, "later", schedule_to="")[0], TopicConfigured)
    # the target was deleted since: no reason to refuse another change
    del state.topics["orders"]
    assert isinstance(alter(state, "later", schedule_delay_ms="5")[0], TopicConfigured)
