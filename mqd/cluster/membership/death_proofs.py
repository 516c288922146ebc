"""Handles death notices, which a host's keeper process sends when the host's controller or broker
has ended, and computes the one that this host's keeper would send. Keepers import death_notice.py,
which does not import this module.
"""

from __future__ import annotations

from mqd.cluster.broker.messages import ProofOfDeath
from mqd.cluster.membership.death_notice import Notice
from mqd.cluster.metadata.state import MetadataState
from mqd.cluster.raft.core import QuorumCore
from mqd.cluster.raft.events import LeaderDied

NOTICES_MAX = 64
RECIPIENTS_MAX = 64


def final_notice(core: QuorumCore, state: MetadataState, incarnation: int, previous: Notice | None) -> Notice | None:
    """Returns the notice that the keeper sends once this host's controller process and its broker have
    ended; the controller gives the notice to the keeper in advance. None: no other host relies on
    this one's processes yet. `previous`: the previous result.

    While no leader is known, the previous result remains valid: N1, N2.
    """
    broker = state.brokers.get(core.key.node_id)
    if broker is None or broker.incarnation != incarnation:
        return None
    if core.leader < 0:
        return previous if previous is not None and previous.broker_epoch == broker.epoch else None
    return Notice(core.key.node_id, broker.epoch, core.epoch, 0, core.is_leader)


def recipients(core: QuorumCore, state: MetadataState) -> tuple[tuple[str, int], ...]:
    """Returns the addresses of the other hosts from their last registrations: first the voters, which
    elect a leader, then the other hosts, which only look for the new leader. At most RECIPIENTS_MAX.
    """
    voters = {voter.node_id: (voter.host, voter.port) for voter in core.voters}
    brokers = {
        broker.node_id: (broker.controller_host, broker.controller_port)
        for broker in state.brokers.values()
        if broker.controller_host
    }
    nodes = [*sorted(voters), *sorted(brokers.keys() - voters.keys())]
    return tuple([brokers.get(node) or voters[node] for node in nodes if node != core.key.node_id][:RECIPIENTS_MAX])


class DeathProofs:
    """Keeps the newest notice of each node, for up to NOTICES_MAX nodes: a notice may make this host the
    active controller. Sans-I/O.
    """

    def __init__(self, node_id: int) -> None:
        self._node_id = node_id
        self._notices: dict[int, Notice] = {}

    def on_notice(self, notice: Notice) -> tuple[LeaderDied | None, ProofOfDeath | None]:
        """Returns (event for the quorum or None, proof for the active controller on this host or None)."""
        if notice.node_id == self._node_id:
            return None, None
        kept = self._notices.get(notice.node_id)
        if notice.broker_epoch >= 0 and (
            kept is None or (kept.broker_epoch, kept.sent_ms) <= (notice.broker_epoch, notice.sent_ms)
        ):
            self._notices.pop(notice.node_id, None)
            self._notices[notice.node_id] = notice
            if len(self._notices) > NOTICES_MAX:
                del self._notices[next(iter(self._notices))]
        return LeaderDied(notice.node_id, notice.controller_epoch) if notice.led else None, (
            _proof(notice) if notice.broker_epoch >= 0 else None
        )

    def on_active(self) -> list[ProofOfDeath]:
        """Returns the proofs that were kept, when this host has become the active controller."""
        return [_proof(notice) for notice in self._notices.values()]


def _proof(notice: Notice) -> ProofOfDeath:
    return ProofOfDeath(notice.node_id, notice.broker_epoch, notice.controller_epoch, notice.sent_ms, notice.led)
