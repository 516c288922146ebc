"""Subscriptions to metrics of clients in the metadata: they outlive snapshots, and older hosts."""

from __future__ import annotations

from mqd.cluster.metadata import features
from mqd.cluster.metadata.records import ClientMetricsConfigured, decode_record, encode_record
from mqd.cluster.metadata.state import MetadataState

SET, AGAIN, GONE = (
    ClientMetricsConfigured("s", {"metrics": "*"}),
    ClientMetricsConfigured("s", {"interval.ms": "500"}),
    ClientMetricsConfigured("s", {}),
)


def test_a_subscription_is_replaced_removed_and_in_snapshots() -> None:
    state = MetadataState()
    for record, expected in ((SET, {"s": SET.config}), (AGAIN, {"s": AGAIN.config}), (GONE, {})):
        state.apply(decode_record(encode_record(record)))
        assert state.client_metrics == expected
        assert MetadataState.from_snapshot(state.snapshot()).client_metrics == expected


def test_its_record_needs_the_level_that_brought_it() -> None:
    assert features.RECORD_LEVELS[ClientMetricsConfigured] == 2
