"""Which voters of the metadata quorum can be counted on, as its leader sees them, and how many more
may be lost.
"""

from __future__ import annotations

from typing import NamedTuple

from mqd.protocol.messages import DescribeQuorumResponse

# long enough that a busy host whose disk takes seconds for a flush is not reported as silent
SILENT_MS_MIN = 5_000
# a voter is silent if it has not fetched for this many times controller.quorum.fetch.timeout.ms;
# normally it fetches again within three eighths of that timeout
SILENT_FETCH_TIMEOUTS = 2


class VoterStatus(NamedTuple):
    """The lists have node ids, in ascending order. `now_ms`: the time of the response by the leader's
    clock, which also gives the times of the other voters; -1 if the leader lists no voter.
    """

    now_ms: int
    silent: list[int]  # they have not fetched lately, or never in this epoch
    # they respond, but lack records that were committed long ago (for example, because their disks
    # are full): they do not help to commit new records
    behind: list[int]
    losses_allowed: int  # how many more voters may be lost

    @property
    def silent_or_behind(self) -> list[int]:
        return self.silent + self.behind

    def text(self) -> str:
        parts = [
            f"; {label}: {', '.join(map(str, nodes))}"
            for label, nodes in (("not heard from", self.silent), ("does not keep up", self.behind))
            if nodes
        ]
        voters = "the others" if self.silent_or_behind else "them"
        return f"{''.join(parts)}; the quorum can lose {self.losses_allowed or 'none'} of {voters}"


def voter_status(quorum: DescribeQuorumResponse.PartitionData) -> VoterStatus:
    replicas = [*quorum.current_voters, *quorum.observers]
    # for itself, the leader reports the time of its response (KIP-836)
    now_ms = max(
        (max(replica.last_fetch_timestamp, replica.last_caught_up_timestamp) for replica in replicas), default=-1
    )
    silent_before_ms = max(now_ms - max(SILENT_MS_MIN, SILENT_FETCH_TIMEOUTS * quorum.fetch_timeout_ms), 0)
    voters = sorted(quorum.current_voters, key=lambda replica: replica.replica_id)
    silent = [
        replica.replica_id
        for replica in voters
        if replica.last_fetch_timestamp < silent_before_ms and replica.replica_id != quorum.leader_id
    ]
    behind = [
        replica.replica_id
        for replica in voters
        if replica.replica_id not in silent
        and (replica.log_end_offset < 0 or replica.last_caught_up_timestamp < silent_before_ms)
    ]
    return VoterStatus(now_ms, silent, behind, max(0, (len(voters) - 1) // 2 - len(silent) - len(behind)))
