"""The two parts of the controller's lease (docs/design/cluster.md, 3.3): the replicas' promises, and the
lease that the leader computes from them.

A replica that accepts a response of the leader promises to vote for no other replica for a time P
(promise_ns), measured by its own clock. The leader learns of that promise from the next Fetch, which
repeats the stamp of the response: the leader's time of sending. The promise was given after that
time, so no other replica can be elected before stamp + L (lease_ns, less than P), if a majority has
promised.

Invariants
    L1  no two replicas hold a valid lease at the same time, as long as the rates of any two clocks
        differ by at most a factor of P/L
    The lease makes responses and heartbeats fast, and limits how long a deposed leader acts. Only the
    log makes a write safe.
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
    """This replica's promise to a leader, in memory only. So after a restart, a replica that may have
    given a promise acts as if it had just given one: it keeps it for the whole P.
    """

    def __init__(self) -> None:
        self.until_ns = 0
        self.epoch = -1  # epoch of the leader that has the promise

    def give(self, epoch: int, now_ns: int, promise_ns: int) -> None:
        self.epoch = epoch
        self.until_ns = max(self.until_ns, now_ns + promise_ns)

    def release(self, epoch: int) -> None:
        """Ends the promise, because the leader of `epoch` has given up its lease. When that leader was
        elected, no earlier leader still had a lease.
        """
        if self.epoch <= epoch:
            self.until_ns = 0

    def holds(self, now_ns: int) -> bool:
        return now_ns < self.until_ns


def lease_deadline_ns(
    key: ReplicaKey, voters: Voters, stamps: dict[ReplicaKey, int], now_ns: int, lease_ns: int
) -> int:
    """The end of the lease by the leader's clock; 0 = no lease. `stamps`: the newest stamp that each
    replica has repeated.
    """
    if len(voters) == 1 and voters[0].key == key:
        return NO_DEADLINE
    stamp = majority_value(voters, {**stamps, key: now_ns}, 0)
    return stamp + lease_ns if stamp > 0 else 0
