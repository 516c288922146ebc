"""Death notices: the keeper reports the end of its host's processes to the other hosts, in a sealed
datagram from the socket that it holds for gossip.

While it runs, the controller maintains instructions for the keeper (`Instructions`, a file in run/): the
recipients, and the relevant epochs. The keeper sends two notices, each as soon as the kernel has
reported the end of the processes:

    the controller has ended     if it led the metadata quorum, that epoch is over: the voters need
                                 not wait until their promise to it expires (LeaderDied in
                                 mqd/cluster/raft/events.py)
    all workers have ended, too  no process acts for that broker epoch, so its lease is not used: the
                                 active controller, which may have been elected because of the first
                                 notice, fences the broker (ProofOfDeath in
                                 mqd/cluster/broker/messages.py), and other hosts take the leaderships
                                 without waiting for the session to end

Invariants
    N1  a process that led an epoch of the quorum never leads it again, and neither does the next
        process of its host: a notice that an epoch is over stays true, even if it is late or repeated
    N2  the proof of a broker's death is valid for one broker epoch, and only while no lease can have
        been granted for a heartbeat sent after it. The controller of the epoch in the notice accepts
        it or, if that controller ended together with the broker, the next active one (A4 in
        active_controller.py); neither accepts it after a later heartbeat
A repeated, late or lost notice is therefore harmless. The seal proves that the sender has the
cluster's key, as in every message between hosts. It does not prove that the sender is the keeper of
the host in the notice: this is trusted, like the node id in a handshake. death_proofs.py has the
receiving side.

    offset  bytes  content
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
REPEATS_MS = (0, 30, 100, 300, 700)  # a notice is sent this long after the processes' end: datagrams get lost
INSTRUCTIONS_NAME = "death-orders"  # unchanged since earlier versions: the running keeper may belong to one


class Notice(msgspec.Struct, array_like=True, frozen=True):
    """Older versions omit newer fields at the end, which then have their defaults."""

    node_id: int
    # -1: only the controller process has ended; the notice proves nothing about the broker
    broker_epoch: int
    controller_epoch: int
    # CLOCK_BOOTTIME of the dead host when all processes had ended; the same in each repetition
    sent_ms: int
    led: bool = False  # the controller process that has ended led the metadata quorum in `controller_epoch`


class Instructions(msgspec.Struct, frozen=True):
    """The keeper's instructions. Only the keeper with this `incarnation` may follow them. `addresses`: the
    other hosts, voters first; numeric, because the keeper does not resolve names.
    """

    incarnation: int
    node_id: int
    broker_epoch: int
    controller_epoch: int
    cluster_id: str
    addresses: tuple[tuple[str, int], ...]
    # the process that wrote this led the quorum in `controller_epoch` (N1)
    led: bool = False


def _mac(secret: bytes, cluster_id: str, body: bytes) -> bytes:
    key = hmac.digest(secret, b"mqd proof of death 1\0" + cluster_id.encode(), hashlib.sha256)
    return hmac.digest(key, body, hashlib.sha256)


def seal(secret: bytes, cluster_id: str, notice: Notice) -> bytes:
    body = msgspec.msgpack.encode(notice)
    return MAGIC + _mac(secret, cluster_id, body) + body


def unseal(secret: bytes, cluster_id: str, data: bytes) -> Notice | None:
    """Returns the notice; None: it is not a notice of this cluster."""
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


def write_instructions(run_dir: Path, instructions: Instructions | None) -> None:
    """Replaces the file; None removes it. The file need not be durable: the keeper does not survive a
    crash of the host either. Raises OSError.
    """
    path = run_dir / INSTRUCTIONS_NAME
    if instructions is None:
        path.unlink(missing_ok=True)
        return
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(msgspec.json.encode(instructions))
    os.replace(temporary, path)


def read_instructions(run_dir: Path, incarnation: int) -> Instructions | None:
    """Returns the instructions; None: there are none for this keeper."""
    try:
        instructions = msgspec.json.decode((run_dir / INSTRUCTIONS_NAME).read_bytes(), type=Instructions)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return instructions if instructions.incarnation == incarnation else None
