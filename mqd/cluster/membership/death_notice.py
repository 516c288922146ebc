"""Proof of death for the case that the keeper is the only process left to send it: a sealed
datagram to the other hosts, from the socket that the keeper holds for gossip.

While it runs, the controller maintains instructions for the keeper (`Orders`, a file in run/): the
recipients, and the relevant epochs. The keeper sends two facts, each as soon as the kernel has
proven it:

    the controller has ended     if it led the metadata quorum, that epoch is over: the voters need
                                 not wait until their promise to it expires (LeaderDied in
                                 mqd/cluster/raft/events.py)
    and all workers have, too    no process acts for that broker epoch: the host's lease is void,
                                 then the active controller fences the broker
                                 (ProofOfDeath in mqd/cluster/broker/messages.py); this includes a controller elected
                                 because of the first notice; the leaderships move to others without
                                 waiting for the session to end

Invariants
    N1  a process that led an epoch of the quorum never leads it again, nor does its successor: the
        statement that an epoch is over stays true, however late or often it arrives
    N2  the proof of a broker's death holds for one broker epoch, and only while no lease can have
        been granted on a heartbeat sent after it. It is accepted by the controller of the epoch
        that it names or, if that controller ended together with the broker, by the next one that
        became active (A4 in active_controller.py); and by neither after a later heartbeat
A repeated, late or lost notice is therefore harmless. The seal proves that the sender has the
cluster's key, as for every message between hosts. That the sender is that host's keeper is only its
claim, like the node id in a handshake. The receiving side is in death_proofs.py.

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
REPEATS_MS = (0, 30, 100, 300, 700)  # after the proof; repeated because datagrams get lost
ORDERS_NAME = "death-orders"


class Notice(msgspec.Struct, array_like=True, frozen=True):
    """Older versions omit the fields after the last one that they know; missing fields take their
    defaults.
    """

    node_id: int
    # -1: nothing is proven about the broker; only its controller process has ended
    broker_epoch: int
    controller_epoch: int
    # CLOCK_BOOTTIME of the dead host when all processes had ended; the same in each repetition
    sent_ms: int
    led: bool = False  # the controller process that has ended led the metadata quorum in `controller_epoch`


class Orders(msgspec.Struct, frozen=True):
    """`incarnation`: of the keeper that may follow them. `addresses`: of the other hosts, voters
    first. They are numeric, because the keeper resolves no names.
    """

    incarnation: int
    node_id: int
    broker_epoch: int
    controller_epoch: int
    cluster_id: str
    addresses: tuple[tuple[str, int], ...]
    # the process that wrote this led the quorum in `controller_epoch`; permanently true (N1)
    led: bool = False


def _mac(secret: bytes, cluster_id: str, body: bytes) -> bytes:
    key = hmac.digest(secret, b"mqd proof of death 1\0" + cluster_id.encode(), hashlib.sha256)
    return hmac.digest(key, body, hashlib.sha256)


def seal(secret: bytes, cluster_id: str, notice: Notice) -> bytes:
    body = msgspec.msgpack.encode(notice)
    return MAGIC + _mac(secret, cluster_id, body) + body


def unseal(secret: bytes, cluster_id: str, data: bytes) -> Notice | None:
    """None: not a notice of this cluster."""
    body = data[len(MAGIC) + MAC_BYTES :]
    if (
        len(data) > NOTICE_BYTES_MAX
        or data[: len(MAGIC)] != MAGIC
        or not hmac.compare_digest(_mac(secret, cluster_id, body), data[len(MAGIC) : len(MAGIC) + MAC_BYTES])
    ):
        return None
    try:
        return msgspec.msgpack.decode(body, type=Notice)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def write_orders(run_dir: Path, orders: Orders | None) -> None:
    """Replaces the file as a whole; None removes it. Need not be durable: a host that loses its
    memory has lost its keeper too. Raises OSError.
    """
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
