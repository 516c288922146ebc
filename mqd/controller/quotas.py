"""Writes the metadata's quotas to the control segment, where workers and the acceptor read them
(native/shm/quota.h).

A client id's own quota takes precedence over the default of all client ids, separately for each key
(KIP-13, KIP-257).
"""

from collections.abc import Mapping

from mqd import native
from mqd.base.config import broker_number
from mqd.cluster.metadata.records import Entity
from mqd.cluster.metadata.rules.settings import CLIENT_ID, QUOTA_KEYS, REQUEST

SECOND_NS = 1_000_000_000
BURST_NS = 10 * SECOND_NS
_DEFAULT: Entity = ((CLIENT_ID, None),)
_INTERVAL_MAX = 2**64 - 1


def burst_ns(config: Mapping[str, str]) -> int:
    """How far ahead a client may spend: Kafka measures over this many windows before it considers a
    rate too high.
    """
    return (
        (broker_number(config, "quota.window.num") - 1) * broker_number(config, "quota.window.size.seconds") * SECOND_NS
    )


def interval(key: str, value: float | None) -> int:
    """Nanoseconds per byte, or per nanosecond of work, times 2^32; 0 = no limit."""
    if value is None:
        return 0
    per_unit = 100 / value if key == REQUEST else SECOND_NS / value
    return max(1, min(int(per_unit * 2**32), _INTERVAL_MAX))


def publish(control: native.Control, client_quotas: Mapping[Entity, Mapping[str, float]], burst: int) -> None:
    default = client_quotas.get(_DEFAULT, {})

    def intervals(quotas: Mapping[str, float]) -> tuple[int, ...]:
        return tuple(interval(key, quotas.get(key, default.get(key))) for key in QUOTA_KEYS)

    rules = [
        (name, intervals(quotas))
        for ((kind, name), *rest), quotas in client_quotas.items()
        if kind == CLIENT_ID and name is not None and not rest
    ]
    control.publish_quotas(rules, intervals({}), burst)
