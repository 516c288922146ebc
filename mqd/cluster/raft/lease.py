"""The two halves of the controller's lease (docs/design/cluster.md, 3.3): a replica's promise, and
the leader's conclusion from it.

A replica that accepts a response of the leader votes for no other replica during the following P, by
its own clock. The leader learns of that promise from the next Fetch, which repeats the leader's own
stamp of the response. The promise was given after that time, so until stamp + L (L < P) no other
replica can be elected. Stamps are taken at sending, never at receipt.

Invariants
    L1  no two replicas hold a valid lease at the same time, as long as no two clock rates differ by
        more than P : L
    The lease makes responses and heartbeats fast and bounds how long a deposed leader acts. It never
    makes a write safe: the log does.
"""

from mqd.cluster.raft.events import NO_DEADLINE
from mqd.cluster.raft.messages import ReplicaKey, Voters


def majority(count: int) -> int:
    return count // 2 + 1


def majority_value(voters: Voters, values: dict[ReplicaKey, int], default: int) -> int:
    """The largest value that a majority of the voters has reached."""
    reached = sorted((values.get(voter.key, default) for voter in voters), reverse=True)
    return reached[majority(len(reached)) - 1] if reached else default


class Promise:
    """This replica's promise to a leader. It is lost with the process; a replica that may have
    given one therefore keeps it for a full P after a restart.
    """

    def __init__(self) -> None:
        self.until_ns = 0
        self.epoch = -1  # of the leader that holds it

    def give(self, epoch: int, now_ns: int, promise_ns: int) -> None:
        self.epoch = epoch
        self.until_ns = max(self.until_ns, now_ns + promise_ns)

    def release(self, epoch: int) -> None:
        """The leader of `epoch` has given up its lease. Earlier leaders held none any more when it
        was elected.
        """
        if self.epoch <= epoch:
            self.until_ns = 0

    def holds(self, now_ns: int) -> bool:
        return now_ns < self.until_ns


def lease_deadline_ns(
    key: ReplicaKey, voters: Voters, stamps: dict[ReplicaKey, int], now_ns: int, lease_ns: int
) -> int:
    """By the leader's clock; 0 = none. `stamps`: the newest stamp that each replica has repeated."""
    if len(voters) == 1 and voters[0].key == key:
        return NO_DEADLINE
    stamp = majority_value(voters, {**stamps, key: now_ns}, 0)
    return stamp + lease_ns if stamp > 0 else 0
