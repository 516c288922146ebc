"""Proof of death where nobody is left to bring it but the keeper: its controller and all its workers have ended at once, so no process of that host acts for its broker epoch any more.

The controller leaves orders behind while it lives (`Orders`, a file in run/): whom to tell, and the epochs that count. When the keeper has seen all of them end, it takes the host's
lease back and sends a `Notice` as a sealed datagram, from the socket that it holds for gossip, to the active controller: the broker is fenced and its leaderships go to others without
waiting for its session to end. What a notice is worth is decided there (broker_messages.ProofOfDeath): it counts for one broker epoch, one controller epoch, and not after a heartbeat that
was sent later. So one that is repeated, late or lost changes nothing.

    offset  bytes  what
    0       4      b"mqp1"
    4       32     HMAC-SHA256 over all that follows, key = derived from the cluster key and the cluster id
    36      n      a Notice in msgpack
"""

import hashlib
import hmac
import os
from pathlib import Path

import msgspec

MAGIC = b"mqp1"
MAC_BYTES = 32
NOTICE_BYTES_MAX = 200
REPEATS_MS = (0, 30, 100, 300, 700)  # after the proof: datagrams get lost
ORDERS_NAME = "death-orders"


class Notice(msgspec.Struct, array_like=True, frozen=True):
    node_id: int
    broker_epoch: int
    controller_epoch: int
    sent_ms: int  # CLOCK_BOOTTIME of the host that died, when all had ended; the same in each repetition


class Orders(msgspec.Struct, frozen=True):
    """`incarnation`: of the keeper that may follow them. `addresses`: numbers, not names; the keeper looks nothing up."""

    incarnation: int
    node_id: int
    broker_epoch: int
    controller_epoch: int
    cluster_id: str
    addresses: tuple[tuple[str, int], ...]


def _mac(secret: bytes, cluster_id: str, body: bytes) -> bytes:
    key = hmac.digest(secret, b"mqd proof of death 1\0" + cluster_id.encode(), hashlib.sha256)
    return hmac.digest(key, body, hashlib.sha256)


def seal(secret: bytes, cluster_id: str, notice: Notice) -> bytes:
    body = msgspec.msgpack.encode(notice)
    return MAGIC + _mac(secret, cluster_id, body) + body


def unseal(secret: bytes, cluster_id: str, data: bytes) -> Notice | None:
    """None: no notice of this cluster."""
    body = data[len(MAGIC) + MAC_BYTES :]
    if len(data) > NOTICE_BYTES_MAX or data[: len(MAGIC)] != MAGIC or not hmac.compare_digest(_mac(secret, cluster_id, body), data[len(MAGIC) : len(MAGIC) + MAC_BYTES]):
        return None
    try:
        return msgspec.msgpack.decode(body, type=Notice)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def write_orders(run_dir: Path, orders: Orders | None) -> None:
    """Replaced as a whole; None: there are none. Not durable, and need not be: a host that loses its memory has lost its keeper too. Raises OSError."""
    path = run_dir / ORDERS_NAME
    if orders is None:
        path.unlink(missing_ok=True)
        return
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(msgspec.json.encode(orders))
    os.replace(temporary, path)


def read_orders(run_dir: Path, incarnation: int) -> Orders | None:
    """None: there are none for this keeper."""
    try:
        orders = msgspec.json.decode((run_dir / ORDERS_NAME).read_bytes(), type=Orders)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return orders if orders.incarnation == incarnation else None
