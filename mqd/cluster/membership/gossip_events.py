"""Events and effects of the gossip core, its settings, and its view of a member.

Usage (mqd/controller/gossip.py runs the core):

    core = GossipCore(profile, seal, settings, rng, life, seeds)
    effects = core.handle(event, now_ms)      # carry them out in order, before the next event
    core.due_ms                               # when to send the next Tick

The controller reads `core.view(node_id)`, `core.views()` and `core.controller`, and gets MemberChanged
and ControllerSeen. All of these are hints: an address to try, a reason to probe immediately. Gossip
must never elect, fence, or change an in-sync set.
"""

import msgspec

from mqd.cluster.membership.gossip_messages import NODE_NONE, Alive, Load, State

ALIVE, SUSPECT, DEAD, LEFT = "alive", "suspect", "dead", "left"


class Settings(msgspec.Struct, frozen=True):
    """Times are in milliseconds of the host's own clock."""

    probe_interval_ms: int = 500
    # how long to wait for a direct response; for the rest of the interval, other hosts probe on request
    probe_timeout_ms: int = 200
    # while a host knows this many suspects, it probes twice as often: a rack or a switch may have failed
    mass_failure_count: int = 3
    indirect_count: int = 3
    gossip_interval_ms: int = 200
    gossip_fanout: int = 3
    # an update is sent retransmit_multiplier * ceil(log10(members + 1)) times
    retransmit_multiplier: int = 4
    # the shortest suspicion lasts suspicion_multiplier * max(1, log100(members)) probe intervals
    suspicion_multiplier: int = 2
    suspicion_factor_max: int = 6  # an unconfirmed suspicion lasts this many times as long as the shortest
    confirmation_count: int = 3  # after this many confirmations a suspicion is as short as possible
    # when hosts learn of a suspicion, about this many of them probe the suspect immediately
    confirmer_count: int = 8
    # Lifeguard's S: the highest score, 0 = healthy. A host with score n probes and suspects n + 1 times
    # more slowly
    health_score_max: int = 8
    push_pull_interval_ms: int = 30_000
    reconnect_interval_ms: int = 2_000  # how often one dead member or missing seed is tried
    seed_interval_ms: int = 10_000  # minimum interval between TCP exchanges with seeds once joined
    join_interval_ms: int = 500  # doubled up to join_interval_ms_max
    join_interval_ms_max: int = 10_000
    exchange_ms_max: int = 5_000  # timeout of a push-pull
    # the interval is the larger of this and load_interval_ms_per_member * members
    load_interval_ms: int = 5_000
    load_interval_ms_per_member: int = 100
    dead_retention_ms: int = 3_600_000
    left_retention_ms: int = 120_000
    # alive, suspected, dead and left together, without this host
    member_count_max: int = 4_096
    response_rate_per_s: int = 200  # responses to all other hosts together
    response_burst: int = 200
    unknown_rate_per_s: int = 50  # responses to pings from unknown hosts
    late_ms: int = 100  # a tick that is later than this means that the process was suspended


class Profile(msgspec.Struct, frozen=True):
    """This host's description of itself: `Alive` without the incarnation. It can change at run time
    (ProfileChanged).
    """

    node_id: int
    directory_id: bytes  # 16 bytes
    host: str
    port: int
    rack: str | None = None
    version: str = ""
    worker_count: int = 0
    cpu_count: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0

    def to_alive(self, incarnation: int, token: int) -> Alive:
        return Alive(
            self.node_id,
            self.directory_id,
            incarnation,
            self.host,
            self.port,
            self.rack,
            self.version,
            self.worker_count,
            self.cpu_count,
            self.memory_bytes,
            self.disk_bytes,
            token,
        )


class MemberView(msgspec.Struct, frozen=True):
    """One member as this host sees it. `since_ms`: when it entered its state, in the core's own time."""

    profile: Alive
    state: str
    incarnation: int
    since_ms: int
    load: Load | None = None

    @property
    def node_id(self) -> int:
        return self.profile.node_id

    @property
    def directory_id(self) -> bytes:
        return self.profile.directory_id


# -- events ----------------------------------------------------------------------------------------


class Started(msgspec.Struct, frozen=True):
    """The first event."""


class Tick(msgspec.Struct, frozen=True):
    """A timer is due; an early Tick is harmless."""


class DatagramReceived(msgspec.Struct, frozen=True):
    data: bytes


class StateReceived(msgspec.Struct, frozen=True):
    """The other side's state, over an authenticated TCP connection. `exchange_id`: that of this host's
    PushPull, or None if the other side began the exchange.

    If the other side began, take core.state(False) before passing in this event, and respond with it:
    a joining host must learn how the others saw it before the exchange.
    """

    state: State
    exchange_id: int | None = None


class ExchangeFailed(msgspec.Struct, frozen=True):
    exchange_id: int


class StreamResponded(msgspec.Struct, frozen=True):
    """The probed host has responded over TCP."""

    probe_id: int


class LoadMeasured(msgspec.Struct, frozen=True):
    """The newest measurements, which are sent when the load interval allows; the core adds node,
    directory, life and number.
    """

    broker_epoch: int = -1
    metadata_version: int = -1
    cpu_permille: int = 0
    disk_used_bytes: int = 0
    in_bytes_per_s: int = 0
    out_bytes_per_s: int = 0
    leader_count: int = 0
    replica_count: int = 0


class ProfileChanged(msgspec.Struct, frozen=True):
    """This host's profile has changed: any field but node_id and directory_id. The core announces it with a
    new incarnation.
    """

    profile: Profile


class ControllerKnown(msgspec.Struct, frozen=True):
    """The active controller according to the quorum. Only a higher epoch has an effect."""

    node_id: int
    epoch: int


class UnreachableHint(msgspec.Struct, frozen=True):
    """A connection to the host has ended, or a heartbeat is missing: probe it now. At most one probe per
    member is in flight.
    """

    node_id: int


class SeedsChanged(msgspec.Struct, frozen=True):
    seeds: tuple[tuple[str, int], ...]


class Forget(msgspec.Struct, frozen=True):
    """The cluster has unregistered the host: if it is dead or has left, it is removed from the members. A
    live member is not removed.
    """

    node_id: int


class Leave(msgspec.Struct, frozen=True):
    """Announces the departure to all members. LeaveDone follows, after which the process may end. From
    this event on, the core does not respond to any message.
    """


Event = (
    Started
    | Tick
    | DatagramReceived
    | StateReceived
    | ExchangeFailed
    | StreamResponded
    | LoadMeasured
    | ProfileChanged
    | ControllerKnown
    | UnreachableHint
    | SeedsChanged
    | Forget
    | Leave
)

# -- effects ---------------------------------------------------------------------------------------


class SendDatagram(msgspec.Struct, frozen=True):
    """Best effort: errors are ignored."""

    host: str
    port: int
    data: bytes


class PushPull(msgspec.Struct, frozen=True):
    """Connect over TCP, authenticate, send core.state(), read the other host's state. Report StateReceived
    or ExchangeFailed. At most EXCHANGE_COUNT_MAX are in flight.
    """

    exchange_id: int
    host: str
    port: int


class ProbeStream(msgspec.Struct, frozen=True):
    """Connect over TCP and check that the host responds (StreamPing). If it does within `wait_ms`, report
    StreamResponded.
    """

    probe_id: int
    node_id: int
    directory_id: bytes
    host: str
    port: int
    wait_ms: int


class StoreLife(msgspec.Struct, frozen=True):
    """Write `life` to disk before carrying out any later effect: other hosts know a later `life` of this
    host than the one in its directory, because the directory is an old copy.
    """

    life: int


class MemberChanged(msgspec.Struct, frozen=True):
    """A member's state or profile has changed, not only its load. `before`: its previous state, None for
    a new member.
    """

    before: str | None
    member: MemberView


class ControllerSeen(msgspec.Struct, frozen=True):
    """The active controller of the highest known epoch. core.view(node_id) has its address."""

    node_id: int
    epoch: int


class DuplicateNodeId(msgspec.Struct, frozen=True):
    """Two live hosts have the same node id; to be logged. Registration with the controller decides which
    host keeps it.
    """

    node_id: int
    directory_ids: tuple[bytes, bytes]


class LeaveDone(msgspec.Struct, frozen=True):
    pass


Effect = (
    SendDatagram | PushPull | ProbeStream | StoreLife | MemberChanged | ControllerSeen | DuplicateNodeId | LeaveDone
)

CONTROLLER_UNKNOWN = ControllerSeen(NODE_NONE, -1)
