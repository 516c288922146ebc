"""The protocol and metrics pages, compared with a running broker."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

from mqd.acceptor.dispatch import HANDLERS
from mqd.protocol.messages import ApiVersionsRequest
from tests.broker import Broker
from tests.kafka_connection import KafkaConnection
from tests.kafka_parity import page

DOCS = Path(__file__).resolve().parents[3] / "docs"
API_VERSIONS = 18

# only present when worker.loop.profile is set
WITH_LOOP_PROFILE = {
    f"mqd_loop_{cause}_seconds" for cause in ("write", "allocation", "flush", "other", "fault", "scheduling")
}


def test_the_protocol_page_is_current() -> None:
    assert (DOCS / "protocol.md").read_text() == page.page(), (
        "run: python -m tests.kafka_parity.page > docs/protocol.md"
    )


def test_the_protocol_page_says_what_a_broker_advertises(shared_broker: Broker) -> None:
    rows = re.findall(r"^\| (\d+) \| (\w+) \| (\d+)(?:-(\d+))? \| [\d-]+ \|$", (DOCS / "protocol.md").read_text(), re.M)
    reported = {int(key): (int(first), int(last or first)) for key, _, first, last in rows}
    with KafkaConnection(port=shared_broker.port) as kafka:
        response = kafka.call(
            API_VERSIONS, 3, ApiVersionsRequest(client_software_name="test", client_software_version="1")
        )
    assert reported == {api.api_key: (api.min_version, api.max_version) for api in response.api_keys}
    assert reported.keys() == HANDLERS.keys()


def test_operations_names_every_metric_of_a_broker(shared_broker: Broker) -> None:
    with urllib.request.urlopen(
        f"http://127.0.0.1:{shared_broker.status()['metrics_port']}/metrics", timeout=60
    ) as response:
        text = response.read().decode()
    measured = {
        name.removesuffix("_total").removesuffix("_created")
        for name in re.findall(r"^# TYPE ((?:mqd|kafka)_\w+)", text, re.M)
    }
    named = set(re.findall(r"`((?:mqd|kafka)_\w+)`", (DOCS / "operations.md").read_text()))
    assert measured - named == set(), "not on the page"
    assert {name.removesuffix("_total") for name in named} - measured == WITH_LOOP_PROFILE, "on the page only"
