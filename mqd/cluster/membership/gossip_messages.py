"""Gossip messages: updates, datagrams with updates, the states that two hosts exchange over TCP, and
the seal, which proves that the sender of a datagram has the cluster key.

A datagram on the wire (at most DATAGRAM_BYTES_MAX bytes, so that it fits into an Ethernet frame):

    offset  bytes  content
    0       4      b"mqg1"; later formats have a different last character, and are ignored
    4       32     HMAC-SHA256 over all that follows, key = derived from the cluster key and the cluster id
    36      n      a Packet in msgpack

All of this input comes from peers: Seal.open() raises Refused for data that is too long, not sealed
with the key, or not a Packet. Limits on strings, lists and numbers are part of the types. Fields may
be added at the end of a struct: hosts of an earlier version ignore them, and hosts of a later version
use the defaults.

An incarnation is one number of two parts, life * LIFE_UNIT + refutation. The life is the number of
the host's starts, kept on disk; refutations are counted in memory. The incarnation of a restarted
host is therefore always above earlier statements about it.
"""

import hashlib
import hmac
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Raw

MAGIC = b"mqg1"
MAC_BYTES = 32
HEAD_BYTES = len(MAGIC) + MAC_BYTES
DATAGRAM_BYTES_MAX = 1400
BODY_BYTES_MAX = DATAGRAM_BYTES_MAX - HEAD_BYTES
# maximum for one update, so that it fits into a datagram after the longest header
UPDATE_BYTES_MAX = 700
UPDATE_COUNT_MAX = 128  # in one datagram
MEMBER_COUNT_MAX = 4097  # in one state: the sender plus its table (Settings.member_count_max)
STATE_BYTES_MAX = 8 << 20
LIFE_UNIT = 1 << 24  # incarnations per life: a life has fewer refutations than this
LIFE_MAX = (1 << 38) - 1
NODE_NONE = -1

Node = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
NodeOrNone = Annotated[int, Meta(ge=NODE_NONE, le=(1 << 31) - 1)]
Directory = Annotated[bytes, Meta(min_length=16, max_length=16)]
Incarnation = Annotated[int, Meta(ge=0, le=(LIFE_MAX + 1) * LIFE_UNIT - 1)]
Life = Annotated[int, Meta(ge=0, le=LIFE_MAX)]
Count = Annotated[int, Meta(ge=0, le=(1 << 62) - 1)]
Epoch = Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)]
Host = Annotated[str, Meta(min_length=1, max_length=255)]
Port = Annotated[int, Meta(ge=1, le=65535)]
ShortText = Annotated[str, Meta(max_length=64)]
Rack = Annotated[str, Meta(max_length=249)]
ProbeId = Annotated[int, Meta(ge=0, le=(1 << 62) - 1)]

Identity = tuple[int, bytes]  # node id, directory id: a host with a wiped directory counts as another host


def life_of(incarnation: int) -> int:
    return incarnation // LIFE_UNIT


class Refused(ValueError):
    """A datagram or state is not accepted, and no part of it may be used. The text is the reason, for a
    counter or the debug log.
    """


# -- updates ---------------------------------------------------------------------------------------


class Alive(msgspec.Struct, tag="a", array_like=True, frozen=True):
    """A host's description of itself, valid until a higher incarnation. `host`, `port`: those of its
    controller listener (TCP and UDP). Capacities are hints, 0 = not given.
    """

    node_id: Node
    directory_id: Directory
    incarnation: Incarnation
    host: Host
    port: Port
    rack: Rack | None = None
    version: ShortText = ""
    worker_count: Count = 0
    cpu_count: Count = 0
    memory_bytes: Count = 0
    disk_bytes: Count = 0
    token: Count = 0  # random per process: distinguishes two processes of one incarnation


class Suspect(msgspec.Struct, tag="s", array_like=True, frozen=True):
    """`by` got no response from the host. Suspicions from different hosts count as confirmations."""

    node_id: Node
    directory_id: Directory
    incarnation: Incarnation
    by: Node


class Dead(msgspec.Struct, tag="d", array_like=True, frozen=True):
    """According to `by` the suspicion was not refuted in time. Only a hint: only the controller fences."""

    node_id: Node
    directory_id: Directory
    incarnation: Incarnation
    by: Node


class Left(msgspec.Struct, tag="l", array_like=True, frozen=True):
    """The host has announced its departure."""

    node_id: Node
    directory_id: Directory
    incarnation: Incarnation


class Load(msgspec.Struct, tag="o", array_like=True, frozen=True):
    """A host's load; the load with the highest (life, number) is the newest."""

    node_id: Node
    directory_id: Directory
    life: Life
    number: Count
    broker_epoch: Annotated[int, Meta(ge=-1, le=(1 << 62) - 1)] = -1
    metadata_version: Annotated[int, Meta(ge=-1, le=(1 << 62) - 1)] = -1
    cpu_permille: Annotated[int, Meta(ge=0, le=1 << 20)] = 0  # 1000 = one core fully used, so up to 1000 * cpu_count
    disk_used_bytes: Count = 0
    in_bytes_per_s: Count = 0
    out_bytes_per_s: Count = 0
    leader_count: Count = 0
    replica_count: Count = 0


Update = Alive | Suspect | Dead | Left | Load

# -- datagrams -------------------------------------------------------------------------------------


class Ping(msgspec.Struct, tag="p", array_like=True, frozen=True):
    """The response, Ack, goes to the address in the message, not to the datagram's source."""

    probe_id: ProbeId
    host: Host
    port: Port


class Ack(msgspec.Struct, tag="k", array_like=True, frozen=True):
    probe_id: ProbeId


class PingRequest(msgspec.Struct, tag="r", array_like=True, frozen=True):
    """Ping the target for the sender. Send Ack to host:port when the target responds, or Nack if it has
    not responded after `wait_ms`, both with this probe id.
    """

    probe_id: ProbeId
    host: Host
    port: Port
    target_node_id: Node
    target_directory_id: Directory
    target_life: Life
    target_host: Host
    target_port: Port
    wait_ms: Annotated[int, Meta(ge=1, le=10_000)]


class Nack(msgspec.Struct, tag="n", array_like=True, frozen=True):
    probe_id: ProbeId


Body = Ping | Ack | PingRequest | Nack


class Packet(msgspec.Struct, array_like=True, frozen=True):
    """Addressed to one life of one host and numbered by its sender, so that a replay to any host has no
    effect.
    """

    to_directory_id: Directory
    to_life: Life  # 0: not known; then only a Ping gets a response
    node_id: Node
    directory_id: Directory
    incarnation: Incarnation
    sequence: Count  # rises within a life
    controller_epoch: Epoch  # epoch of the newest active controller that the sender knows; -1: none
    controller_id: NodeOrNone
    body: Body | None
    updates: Annotated[list[Update], Meta(max_length=UPDATE_COUNT_MAX)] = []


class PacketOut(msgspec.Struct, array_like=True, frozen=True):
    """Like Packet, but with encoded updates, which are encoded once and sent several times."""

    to_directory_id: bytes
    to_life: int
    node_id: int
    directory_id: bytes
    incarnation: int
    sequence: int
    controller_epoch: int
    controller_id: int
    body: Body | None
    updates: list[Raw]


# -- states, over TCP ------------------------------------------------------------------------------


class MemberEntry(msgspec.Struct, array_like=True, frozen=True):
    """One member as the sender of a state sees it. `state`: "alive", "suspect", "dead" or "left"."""

    alive: Alive
    state: Annotated[str, Meta(max_length=8)]
    incarnation: Incarnation
    load: Load | None = None


class State(msgspec.Struct, tag="state", array_like=True, frozen=True):
    """All members that the sender knows. `wants_response`: the sender needs the receiver's state."""

    controller_epoch: Epoch
    controller_id: NodeOrNone
    entries: Annotated[list[MemberEntry], Meta(max_length=MEMBER_COUNT_MAX)]
    wants_response: bool = True


class StreamPing(msgspec.Struct, tag="ping", array_like=True, frozen=True):
    """A probe over TCP, for networks that drop datagrams. `node_id`, `directory_id`: the probed host, which
    responds with StreamAck.
    """

    node_id: Node
    directory_id: Directory


class StreamAck(msgspec.Struct, tag="ack", array_like=True, frozen=True):
    node_id: Node
    directory_id: Directory


StreamMessage = State | StreamPing | StreamAck

encode = msgspec.msgpack.Encoder().encode
_decode_packet = msgspec.msgpack.Decoder(Packet).decode
_decode_stream = msgspec.msgpack.Decoder(StreamMessage).decode


def encode_update(update: Update) -> bytes:
    """Returns the encoded update. Raises ValueError if it is too long for a datagram: a host with such a
    long name, rack or version cannot gossip, and reports this when it starts.
    """
    data = encode(update)
    if len(data) > UPDATE_BYTES_MAX:
        raise ValueError(
            f"the gossip update has {len(data)} bytes, but at most {UPDATE_BYTES_MAX} fit into a datagram: shorten the"
            " host name, rack or version"
        )
    return data


def decode_stream(data: bytes) -> StreamMessage:
    """Raises Refused."""
    if len(data) > STATE_BYTES_MAX:
        raise Refused(f"a state of {len(data)} bytes; at most {STATE_BYTES_MAX} are allowed")
    try:
        return _decode_stream(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(f"not a gossip message: {error}") from error


class Seal:
    """Seals and opens datagrams of one cluster.

    `cluster_key`: the secret that all hosts share; empty if no listener is reachable from other
    hosts (the seal then only distinguishes clusters). Two clusters with the same key do not accept
    each other's datagrams, because the seal's key is also derived from the cluster id. `other_keys`:
    the keys that hosts may also use while the cluster's key is being changed. Datagrams do not identify
    their key; all keys are tried.
    """

    def __init__(self, cluster_key: bytes, cluster_id: str, other_keys: Sequence[bytes] = ()) -> None:
        self._cluster_id = cluster_id
        self.set_keys((cluster_key, *other_keys))

    def set_keys(self, cluster_keys: Sequence[bytes]) -> None:
        """From now on, datagrams are sealed with the first key and opened with any of them."""
        context = b"mqd gossip datagrams 1\0" + self._cluster_id.encode()
        keys = [hmac.digest(key, context, hashlib.sha256) for key in cluster_keys]
        self._hmacs = [hmac.new(key, digestmod=hashlib.sha256) for key in keys]

    @staticmethod
    def _mac(key: hmac.HMAC, body: bytes) -> bytes:
        mac = key.copy()
        mac.update(body)
        return mac.digest()

    def seal(self, packet: PacketOut) -> bytes:
        body = encode(packet)
        return MAGIC + self._mac(self._hmacs[0], body) + body

    def open(self, data: bytes) -> Packet:
        """Returns the packet if its sender has the key; the core checks for replays. Raises Refused."""
        if not HEAD_BYTES < len(data) <= DATAGRAM_BYTES_MAX:
            raise Refused(f"a datagram of {len(data)} bytes")
        if data[:4] != MAGIC:
            raise Refused("not an mqd datagram, or one of another version")
        body = data[HEAD_BYTES:]
        if not any(hmac.compare_digest(self._mac(key, body), data[4:HEAD_BYTES]) for key in self._hmacs):
            raise Refused("not sealed with this cluster's key")
        return self.parse(body)

    @staticmethod
    def parse(body: bytes) -> Packet:
        try:
            return _decode_packet(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Refused(f"not a packet: {error}") from error
