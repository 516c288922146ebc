"""How fast clients may connect, and how many connections they may have.

    connection_creation_rate      per address (quota, KIP-612): excess connections are held for a
                                  moment and closed, unanswered
    max.connection.creation.rate  per broker and per listener: above it nothing is accepted, and
                                  connections wait in the kernel's queue
    max.connections.per.ip        per address: enforced like max.connections of a listener
    max.connections               per listener: the worker that gets a connection counts it
                                  (native/shm/tally.h), and closes it if the limit is exceeded; per
                                  broker: each worker adds up the connections of all workers
                                  (server/handoff.c)

Connections from other hosts, and those of local clients, arrive on other sockets and are not
limited.
No I/O. Bound: ADDRESS_COUNT_MAX addresses; with more, their token buckets are reset.
"""

import math
from collections.abc import Mapping, Sequence

from mqd.acceptor.metadata import Metadata
from mqd.base import listeners
from mqd.base.config import broker_effective, broker_number
from mqd.base.host_names import packed_ip, parse_ip_counts
from mqd.cluster.host.messages import ClientQuota
from mqd.cluster.metadata.rules.settings import CONNECTION, IP, quota_window_ns

ADDRESS_COUNT_MAX = 65536
DELAY_S_MAX = 1.0  # after this time the limits are checked again: they may have been raised
NO_LIMIT = 2**31 - 1  # Kafka's default for each of these limits
SECOND_NS = 1_000_000_000


class TokenBucket:
    """Limits a rate per second, with a burst, as native/shm/quota.h does."""

    def __init__(self, per_s: float, burst_ns: int) -> None:
        self._cost_ns = SECOND_NS / per_s
        self._burst_ns = burst_ns
        self._arrival_ns = -math.inf  # theoretical arrival time of the next connection (GCRA)

    def wait_s(self, now_ns: int) -> float:
        """How long to wait until the next connection may be accepted; 0: it may be accepted now."""
        return max(0.0, (self._arrival_ns - now_ns - self._burst_ns) / SECOND_NS)

    def charge(self, now_ns: int) -> None:
        self._arrival_ns = max(self._arrival_ns, now_ns) + self._cost_ns

    def is_in_debt(self, now_ns: int) -> bool:
        return self._arrival_ns > now_ns


class ConnectionLimits:
    """`config`: as loaded; `listener_names`: by listener id."""

    def __init__(self, config: Mapping[str, str], listener_names: Sequence[str]) -> None:
        self._config = config
        self._burst_ns = quota_window_ns(config)
        self._applied: tuple[object, object] = (None, None)  # quotas, broker configuration
        self._broker_bucket: TokenBucket | None = None
        self._broker_per_s = NO_LIMIT
        self._listener_names = listener_names
        self._listener_buckets: list[TokenBucket | None] = [None] * len(listener_names)
        self._listener_per_s = [NO_LIMIT] * len(listener_names)
        self.listener_limits = [0] * len(listener_names)  # 0: no limit of its own
        self._limit_per_ip = NO_LIMIT
        self._limit_overrides: dict[bytes, int] = {}
        self._address_per_s: dict[bytes, float] = {}
        self._default_per_s: float | None = None
        self._address_buckets: dict[bytes, TokenBucket] = {}
        self._configure({})

    # -- settings changed at run time --------------------------------------------------------------

    def update(self, metadata: Metadata) -> None:
        """Called after each message from the controller."""
        quotas, config = self._applied
        if config is not metadata.broker_config:
            self._configure(metadata.broker_config)
        if quotas is not metadata.client_quotas:
            self._apply_quotas(metadata.client_quotas)
        self._applied = metadata.client_quotas, metadata.broker_config

    def _configure(self, dynamic: Mapping[str, str]) -> None:
        effective = broker_effective(self._config, dynamic)
        per_s = broker_number(effective, "max.connection.creation.rate")
        if per_s != self._broker_per_s:
            self._broker_per_s = per_s
            self._broker_bucket = TokenBucket(per_s, self._burst_ns) if per_s != NO_LIMIT else None
        for index, name in enumerate(self._listener_names):
            settings = listeners.own_settings(effective, name)
            self.listener_limits[index] = int(settings.get("max.connections", 0))
            per_s = int(settings.get("max.connection.creation.rate", NO_LIMIT))
            if per_s != self._listener_per_s[index]:
                self._listener_per_s[index] = per_s
                self._listener_buckets[index] = TokenBucket(per_s, self._burst_ns) if per_s != NO_LIMIT else None
        self._limit_per_ip = broker_number(effective, "max.connections.per.ip")
        self._limit_overrides = parse_ip_counts(effective.get("max.connections.per.ip.overrides", ""))

    def _apply_quotas(self, quotas: Sequence[ClientQuota]) -> None:
        """A change of rates resets the token buckets, as for client quotas."""
        rates = {quota.entity[0][1]: quota.quotas[CONNECTION] for quota in quotas if quota.entity[0][0] == IP}
        default = rates.pop(None, None)
        per_s = {packed_ip(name): rate for name, rate in rates.items() if name is not None}
        if (default, per_s) != (self._default_per_s, self._address_per_s):
            self._default_per_s, self._address_per_s = default, per_s
            self._address_buckets.clear()

    # -- connections -------------------------------------------------------------------------------

    def wait_s(self, listener_id: int, now_ns: int) -> float:
        """How long accepting on the listener must pause; 0: not at all."""
        buckets = (self._broker_bucket, self._listener_buckets[listener_id])
        return min(DELAY_S_MAX, max((bucket.wait_s(now_ns) for bucket in buckets if bucket is not None), default=0.0))

    def on_accepted(self, listener_id: int, now_ns: int) -> None:
        for bucket in (self._broker_bucket, self._listener_buckets[listener_id]):
            if bucket is not None:
                bucket.charge(now_ns)

    def address_delay_s(self, address: bytes, now_ns: int) -> float:
        """Returns 0 if the connection is admitted, and counts it. Otherwise returns how long the caller
        holds the connection before closing it: this slows down a client that reconnects immediately.
        """
        per_s = self._address_per_s.get(address, self._default_per_s)
        if per_s is None:
            return 0.0
        bucket = self._address_buckets.get(address)
        if bucket is None:
            self._make_room(now_ns)
            bucket = self._address_buckets[address] = TokenBucket(per_s, self._burst_ns)
        delay_s = min(DELAY_S_MAX, bucket.wait_s(now_ns))
        if not delay_s:
            bucket.charge(now_ns)
        return delay_s

    def _make_room(self, now_ns: int) -> None:
        if len(self._address_buckets) >= ADDRESS_COUNT_MAX:
            self._address_buckets = {
                address: bucket for address, bucket in self._address_buckets.items() if bucket.is_in_debt(now_ns)
            }
            if len(self._address_buckets) >= ADDRESS_COUNT_MAX:
                self._address_buckets.clear()

    def address_limit(self, address: bytes) -> int:
        """How many connections the address may have."""
        return self._limit_overrides.get(address, self._limit_per_ip)
