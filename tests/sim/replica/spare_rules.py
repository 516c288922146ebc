"""What a leader with acks.replicas may propose (R7b), checked as it does so.

S1  no more members than acks.replicas
S2  a set that has so many keeps them: a member leaves for a spare in one proposal, or because it
    lags (R7) and there is none
S3  a spare takes the place of a member at most once in SWAP_MS, while the leader's epoch lasts
"""

from __future__ import annotations

from typing import Any

from tests.sim.kernel import Violation
from tests.sim.replica.partition_replica import Proposal

SWAP_MS = 1000


class SpareRules:
    def __init__(self, acks_replicas: int, lag_ms_max: int) -> None:
        self.acks_replicas = acks_replicas
        self.lag_ms_max = lag_ms_max
        self.swap_count = 0
        self._seen: dict[Any, int] = {}  # leader's core -> sequence
        self._swapped: dict[Any, tuple[int, int]] = {}  # leader's core -> leader epoch, time

    def on_proposed(self, now_ms: int, place: Any, proposal: Proposal) -> None:
        core, native = place.core, place.core.native
        if self._seen.get(core) == proposal.sequence:
            return  # a repetition
        self._seen[core] = proposal.sequence
        members = {node for node, _ in proposal.in_sync}
        replicas = [native.replicas[each] for each in range(native.replica_count)]
        committed = {each.member.node_id for each in replicas if each.member.in_sync}
        if len(members) > self.acks_replicas:
            raise Violation("S1", f"{place.partition}: {sorted(members)} are proposed")
        leaving = [each for each in replicas if each.member.node_id in committed - members]
        if len(members) < self.acks_replicas <= len(committed):
            for each in leaving:
                if now_ms - each.caught_up_ms <= self.lag_ms_max:
                    raise Violation(
                        "S2", f"{place.partition}: {each.member.node_id} leaves {sorted(committed)}, no replica joins"
                    )
        if (
            len(members) == len(committed)
            and members != committed
            and not any(now_ms - each.caught_up_ms > self.lag_ms_max for each in leaving)
        ):
            self.swap_count += 1
            epoch, before_ms = self._swapped.get(core, (-1, 0))
            if epoch == core.leader_epoch and now_ms - before_ms < SWAP_MS:
                raise Violation("S3", f"{place.partition}: two exchanges within {now_ms - before_ms} ms")
            self._swapped[core] = core.leader_epoch, now_ms
