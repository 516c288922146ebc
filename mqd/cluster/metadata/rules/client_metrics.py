"""Subscriptions to clients' metrics (KIP-714, ConfigResource type 16). A subscription names the
metrics, their interval and the clients. Like a Kafka broker without a metrics receiver, mqd stores
the subscriptions but requests no metrics from clients: it does not implement GetTelemetrySubscriptions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from mqd.cluster.metadata.records import ClientMetricsConfigured, Record
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.rules.configs import RESOURCE_CLIENT_METRICS, ConfigRules
from mqd.cluster.metadata.state import MetadataState
from mqd.protocol.errors import ErrorCode

SUBSCRIPTIONS_MAX = 1_000
INTERVAL = "interval.ms"
INTERVAL_MS_MIN, INTERVAL_MS_MAX = 100, 3_600_000


def check(state: MetadataState, name: str, config: Mapping[str, str], rules: ConfigRules) -> None:
    """Checks the values that Kafka treats as an invalid request, in Kafka's order. Other invalid values
    are refused as an invalid configuration. Raises Refusal.
    """
    if not name:
        raise Refusal(ErrorCode.INVALID_REQUEST, "Subscription name can't be empty")
    for key in config:
        if not rules.is_known(RESOURCE_CLIENT_METRICS, key):
            raise Refusal(ErrorCode.INVALID_REQUEST, f"Unknown client metrics configuration: {key}")
    text = config.get(INTERVAL, "").strip()
    # a text that is not an int is refused later, as an invalid configuration
    number = int(text) if re.fullmatch(r"-?[0-9]{1,10}", text) else INTERVAL_MS_MIN
    if -(2**31) <= number < 2**31 and not INTERVAL_MS_MIN <= number <= INTERVAL_MS_MAX:
        raise Refusal(
            ErrorCode.INVALID_REQUEST,
            f"Invalid value {text} for {INTERVAL}, interval must be between {INTERVAL_MS_MIN} and {INTERVAL_MS_MAX}"
            " (1 hour)",
        )
    if name not in state.client_metrics and len(state.client_metrics) >= SUBSCRIPTIONS_MAX:
        raise Refusal(
            ErrorCode.POLICY_VIOLATION,
            f"There are already {SUBSCRIPTIONS_MAX} subscriptions, the maximum; delete some.",
        )


def configure(name: str, current: Mapping[str, str], config: dict[str, str]) -> list[Record]:
    return [] if config == current else [ClientMetricsConfigured(name, config)]
