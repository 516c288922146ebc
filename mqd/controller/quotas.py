"""Writes the metadata's quotas of users and client ids to the control segment, where workers and
the acceptor read them (native/shm/quota.h). Quotas of addresses are enforced by the acceptor alone.

Where several quotas match a client, the readers choose one for each quota key (KIP-13, KIP-55,
KIP-124, KIP-599).
"""

from collections.abc import Iterable, Mapping

from mqd import native
from mqd.base.config import broker_number
from mqd.cluster.metadata.records import Entity
from mqd.cluster.metadata.rules.settings import CLIENT_ID, IP, MUTATION, QUOTA_KEYS, REQUEST, USER, quota_window_ns
from mqd.native import QuotaKind, QuotaLevel, QuotaRule

SECOND_NS = 1_000_000_000
MUTATION_UNITS = 1_000_000  # parts of a partition mutation, so that rates far below one per second are exact
_INTERVAL_MAX = 2**64 - 1
# (user, client id) -> level. True: a named one; False: the default; None: not part of the entity
_LEVELS = {
    (True, True): QuotaLevel.USER_CLIENT,
    (True, False): QuotaLevel.USER_ANY_CLIENT,
    (True, None): QuotaLevel.USER,
    (False, True): QuotaLevel.ANY_USER_CLIENT,
    (False, False): QuotaLevel.ANY_USER_ANY_CLIENT,
    (False, None): QuotaLevel.ANY_USER,
    (None, True): QuotaLevel.CLIENT,
    (None, False): QuotaLevel.ANY_CLIENT,
}


def bursts_ns(config: Mapping[str, str]) -> list[int]:
    """The burst of each QuotaKind. For partition mutations Kafka uses a token bucket, whose
    capacity is the quota for all windows together.
    """
    bursts = [quota_window_ns(config)] * len(QUOTA_KEYS)
    bursts[QuotaKind.MUTATION] = (
        broker_number(config, "controller.quota.window.num")
        * broker_number(config, "controller.quota.window.size.seconds")
        * SECOND_NS
    )
    return bursts


BURSTS_NS = tuple(bursts_ns({}))  # for brokers that set no window


def interval(key: str, value: float | None) -> int:
    """Nanoseconds per unit, times 2^32; 0 = no limit. The unit depends on the key: a byte, a
    nanosecond of work, or a MUTATION_UNITS-th of a partition.
    """
    if value is None:
        return 0
    per_unit = 100 / value if key == REQUEST else SECOND_NS / value
    per_unit /= MUTATION_UNITS if key == MUTATION else 1
    return int(max(1, min(per_unit * 2**32, _INTERVAL_MAX)))


def rule(entity: Entity, quotas: Mapping[str, float]) -> QuotaRule:
    names = dict(entity)
    named = [None if kind not in names else names[kind] is not None for kind in (USER, CLIENT_ID)]
    level = _LEVELS[named[0], named[1]]
    return QuotaRule(
        level, names.get(USER) or "", names.get(CLIENT_ID) or "", [interval(key, quotas.get(key)) for key in QUOTA_KEYS]
    )


def publish(
    control: native.Control, client_quotas: Mapping[Entity, Mapping[str, float]], bursts: Iterable[int]
) -> None:
    rules = [rule(entity, quotas) for entity, quotas in client_quotas.items() if entity[0][0] != IP]
    control.publish_quotas(rules, list(bursts))
