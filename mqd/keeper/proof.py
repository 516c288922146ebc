"""Notifies the voters on other hosts that processes of this host have ended
(mqd/cluster/membership/death_notice.py): the controller alone, or the controller and all workers.
Only the keeper can prove that, and perhaps no other process is left to report it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from mqd import native
from mqd.base import clock, cluster_config, logging
from mqd.cluster.membership import death_notice
from mqd.cluster.membership.death_notice import Instructions, Notice

log = logging.get("keeper")
CallLater = Callable[[float, Callable[[], None]], None]


def notify_voters(
    config: Mapping[str, str],
    run_dir: Path,
    control: native.Control,
    gossip_socket: socket.socket,
    call_later: CallLater,
    all_ended: bool = True,
) -> bool:
    """Sends a notice immediately, and repeats it a few times. Returns False if there is no
    recipient or nothing to report. Never raises, never blocks, because it runs in the keeper's own
    loop. `all_ended`: the controller and all workers have ended; otherwise only the controller has,
    which concerns other hosts only if it led the metadata quorum.
    """
    instructions = death_notice.read_instructions(run_dir, control.generation)
    if instructions is None or (
        instructions.broker_epoch != control.broker_epoch if all_ended else not instructions.led
    ):
        return False
    if all_ended:
        # end the lease first: a restarted process must not rely on it
        control.set_broker(instructions.broker_epoch, control.broker_incarnation, 0)
    try:
        secret = cluster_config.load_key(config)
    except cluster_config.ConfigError:
        return False
    notice = Notice(
        instructions.node_id,
        instructions.broker_epoch if all_ended else -1,
        instructions.controller_epoch,
        clock.boottime_ns() // 1_000_000,
        instructions.led,
    )
    _send_repeatedly(
        death_notice.seal(secret, instructions.cluster_id, notice), instructions, gossip_socket, call_later
    )
    if all_ended:
        log.warning(
            "all processes that act as the broker have ended; notifying the voters",
            broker_epoch=instructions.broker_epoch,
            controller_epoch=instructions.controller_epoch,
            led=instructions.led,
        )
    else:
        log.warning(
            "the controller that led the metadata quorum has ended; notifying the voters",
            controller_epoch=instructions.controller_epoch,
        )
    return True


def _send_repeatedly(
    data: bytes, instructions: Instructions, gossip_socket: socket.socket, call_later: CallLater
) -> None:
    def send() -> None:
        for host, port in instructions.addresses:
            # an IPv6 socket that also serves IPv4 takes IPv4 addresses only in the mapped form
            mapped = f"::ffff:{host}" if gossip_socket.family == socket.AF_INET6 and ":" not in host else host
            try:
                gossip_socket.sendto(data, socket.MSG_DONTWAIT, (mapped, port))
            except OSError:
                pass  # no route at the moment

    for wait_ms in death_notice.REPEATS_MS:
        if wait_ms:
            call_later(wait_ms / 1000, send)
        else:
            send()
