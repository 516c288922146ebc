"""Tells the active controller on another host that every process of this one which acts as a broker has ended (mqd/cluster/death_notice.py). Only the keeper can know, and it alone is left."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from mqd import native
from mqd.base import clock, cluster_config, logging
from mqd.cluster import death_notice
from mqd.cluster.death_notice import Notice

log = logging.get("keeper")


def prove(config: Mapping[str, str], run_dir: Path, control: native.Control, datagrams: socket.socket, after: Callable[[float, Callable[[], None]], None]) -> bool:
    """At once, and repeated a few times; False when there is nobody to tell. Never raises, never blocks: it is the keeper's own loop."""
    orders = death_notice.read_orders(run_dir, control.generation)
    if orders is None or orders.broker_epoch != control.broker_epoch:
        return False
    control.set_broker(orders.broker_epoch, control.broker_incarnation, 0)  # first: whoever comes back does not act on what was granted before
    try:
        secret = cluster_config.load_key(config)
    except cluster_config.ConfigError:
        return False
    data = death_notice.seal(secret, orders.cluster_id, Notice(orders.node_id, orders.broker_epoch, orders.controller_epoch, clock.boottime_ns() // 1_000_000))

    def send() -> None:
        for host, port in orders.addresses:
            try:
                datagrams.sendto(data, socket.MSG_DONTWAIT, (host, port))
            except OSError:
                pass  # no way there at the moment

    for wait_ms in death_notice.REPEATS_MS:
        if wait_ms:
            after(wait_ms / 1000, send)
        else:
            send()
    log.warning("all processes that act as the broker have ended; the active controller is told", broker_epoch=orders.broker_epoch, controller_epoch=orders.controller_epoch)
    return True
