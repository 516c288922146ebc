"""Events and actions of the host core (mqd/cluster/host/core.py)."""

from collections.abc import Hashable
from typing import NamedTuple

import msgspec

from mqd.cluster.host import messages
from mqd.cluster.metadata.events import Publish
from mqd.cluster.metadata.state import MetadataState

Partition = tuple[bytes, int]  # topic id, index

# -- events ----------------------------------------------------------------------------------------


class SlotSeen(NamedTuple):
    """A used slot found in the control segment when the controller started."""

    slot: int
    topic_id: bytes
    index: int  # type: ignore[assignment]  # not tuple's method
    leader_epoch: int
    owner: int
    stale: bool  # its owner has died since the slot was assigned
    log_dir: int


class Started(msgspec.Struct, frozen=True):
    """The first event: the committed state and the contents of the control segment."""

    state: MetadataState
    slots: tuple[SlotSeen, ...]
    torn_slots: tuple[int, ...]  # slots whose identity the predecessor was writing when it died
    live_workers: dict[int, int]  # worker -> generation; also workers that have not subscribed


class StateReplaced(msgspec.Struct, frozen=True):
    """The committed state was replaced by a snapshot from the quorum's leader: all subscribers get a new
    image.
    """


class ControllerChanged(msgspec.Struct, frozen=True):
    controller_id: int  # the active controller's node id, -1 = not known


class SubscriberJoined(msgspec.Struct, frozen=True):
    client: Hashable
    subscribe: messages.Subscribe


class SubscriberLeft(msgspec.Struct, frozen=True):
    client: Hashable


class WorkerDied(msgspec.Struct, frozen=True):
    index: int
    generation: int


class WorkerApplied(msgspec.Struct, frozen=True):
    client: Hashable
    applied: messages.Applied


class CommandRequested(msgspec.Struct, frozen=True):
    """An operation that the owner of one partition carries out, without a metadata record."""

    client: Hashable
    request_id: int
    change: messages.DeleteRecords | messages.MoveReplica


class MoveEnded(msgspec.Struct, frozen=True):
    """A worker reports that a partition's files are complete in another log directory."""

    client: Hashable
    moved: messages.MoveCompleted


class CommandEnded(msgspec.Struct, frozen=True):
    client: Hashable
    done: messages.CommandDone


class DirectoriesMeasured(msgspec.Struct, frozen=True):
    free_bytes: dict[str, int]  # by directory id


class Tick(msgspec.Struct, frozen=True):
    pass


Event = (
    Started
    | Publish
    | StateReplaced
    | ControllerChanged
    | SubscriberJoined
    | SubscriberLeft
    | WorkerDied
    | WorkerApplied
    | CommandRequested
    | MoveEnded
    | CommandEnded
    | DirectoriesMeasured
    | Tick
)

# -- actions ---------------------------------------------------------------------------------------


class AssignSlot(msgspec.Struct, frozen=True):
    slot: int
    topic_id: bytes
    index: int
    owner: int
    log_dir: int
    leader_epoch: int
    # True: this host still leads the partition, and only the log directory has changed. If the slot's
    # owner has died, the slot is evidence of the death and stays unchanged until the next epoch.
    moved: bool = False


class ClearSlot(msgspec.Struct, frozen=True):
    slot: int


class Send(msgspec.Struct, frozen=True):
    client: Hashable
    message: messages.FromController


class AppliedEverywhere(msgspec.Struct, frozen=True):
    """All live workers serve this version. Goes to the control segment and to the metadata core."""

    version: int


class RaiseEpochs(msgspec.Struct, frozen=True):
    """The process that led these partitions has died. Goes to the broker core (LeadershipsLost)."""

    partitions: tuple[Partition, ...]


class ReportReplicaMoved(msgspec.Struct, frozen=True):
    """This host's replica is in `directory`. Goes to the broker core (ReplicaMoved)."""

    topic_id: bytes
    index: int
    directory: str  # its id


class ReportFailures(msgspec.Struct, frozen=True):
    """Partitions that a worker does not serve. Is logged, and goes to the broker core."""

    failures: dict[str, str]
    worker: int = -1
    # the complete set of partitions that this worker does not serve; empty: it serves all of them again
    partitions: tuple[Partition, ...] = ()


Action = AssignSlot | ClearSlot | Send | AppliedEverywhere | RaiseEpochs | ReportReplicaMoved | ReportFailures
