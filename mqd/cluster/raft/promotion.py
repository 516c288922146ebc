"""Automatic promotion to voter: a cluster that has grown from one host to three gets three voters,
one at a time.

Pure. No voter is ever removed automatically, and a number of voters that an operator has chosen is
kept: two founding voters, four, five or more, and those left after a removal. Only a single voter
grows to three, via two. Whether that growth is in progress follows from the voter sets
in the metadata log (log_memory.py: their course), which every controller has, whichever one began
it.
"""

from collections.abc import Iterable

from mqd.cluster.metadata.records import BrokerState
from mqd.cluster.raft.identity import directory_bytes
from mqd.cluster.raft.messages import GROWING, SHRUNK, VOTERS_TARGET, ReplicaKey, Voter, Voters


def key_of(broker: BrokerState) -> ReplicaKey | None:
    """The quorum identity of a registered broker. None: the version that registered it did not
    supply one.
    """
    try:
        return ReplicaKey(broker.node_id, directory_bytes(broker.directory_id))
    except ValueError:
        return None


def candidates(voters: Voters, brokers: Iterable[BrokerState], course: int) -> list[Voter]:
    """Hosts in service, reachable by the others and not voters yet; lowest node id first. Empty if
    there are not enough hosts for three, or if no growth is wanted. `course`: the history of the
    number of voters. Two voters are growing if one of them was added; two founding voters, or one or
    two that are left, are deliberate.
    """
    count = len(voters)
    if count >= VOTERS_TARGET or course == SHRUNK or (count == 2 and course != GROWING):
        return []
    nodes = {voter.node_id for voter in voters}
    fit = []
    for broker in sorted(brokers, key=lambda one: one.node_id):
        key = key_of(broker)
        if (
            key is not None
            and not broker.fenced
            and not broker.draining
            and not broker.in_controlled_shutdown
            and broker.controller_host
            and broker.node_id not in nodes
        ):
            fit.append(Voter(key, broker.controller_host, broker.controller_port))
    return fit if len(fit) + count >= VOTERS_TARGET else []


def moved(voters: Voters, brokers: Iterable[BrokerState]) -> Voter | None:
    """A voter whose registration has a different address than the quorum knows."""
    by_key = {voter.key: voter for voter in voters}
    for broker in brokers:
        key = key_of(broker)
        voter = by_key.get(key) if key is not None else None
        if (
            voter is not None
            and broker.controller_host
            and (voter.host, voter.port) != (broker.controller_host, broker.controller_port)
        ):
            return Voter(voter.key, broker.controller_host, broker.controller_port)
    return None
