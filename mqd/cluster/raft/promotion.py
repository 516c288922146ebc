"""Automatic promotion to voter: a cluster that has grown from one host to three gets three voters,
one at a time.

Pure. No voter is removed automatically. A number of voters that an operator has chosen stays as it
is: two founding voters, four or more voters, or those that remain after a removal. Only a cluster
with a single voter grows to three, via two. The trend of the voter set's size (log_memory.py)
shows whether that growth is in progress, so any controller can continue it.
"""

from collections.abc import Iterable

from mqd.cluster.metadata.records import BrokerState
from mqd.cluster.raft.identity import directory_bytes
from mqd.cluster.raft.messages import GROWING, SHRUNK, VOTERS_TARGET, ReplicaKey, Voter, Voters


def key_of(broker: BrokerState) -> ReplicaKey | None:
    """The quorum identity of a registered broker. None: the version that registered it did not send one."""
    try:
        return ReplicaKey(broker.node_id, directory_bytes(broker.directory_id))
    except ValueError:
        return None


def candidates(voters: Voters, brokers: Iterable[BrokerState], trend: int) -> list[Voter]:
    """Returns the hosts that may become voters: those in service, with an address, that are not voters
    yet; lowest node id first. Empty if there are not enough hosts for three voters, or if the number
    of voters must not grow. `trend`: how the voter set got its size. Two voters become three only if
    one of them was added (GROWING); two founding voters, or voters that remain after a removal, are
    the operator's choice.
    """
    count = len(voters)
    if count >= VOTERS_TARGET or trend == SHRUNK or (count == 2 and trend != GROWING):
        return []
    voter_nodes = {voter.node_id for voter in voters}
    eligible = []
    for broker in sorted(brokers, key=lambda broker: broker.node_id):
        key = key_of(broker)
        if (
            key is not None
            and not broker.fenced
            and not broker.draining
            and not broker.in_controlled_shutdown
            and broker.controller_host
            and broker.node_id not in voter_nodes
        ):
            eligible.append(Voter(key, broker.controller_host, broker.controller_port))
    return eligible if len(eligible) + count >= VOTERS_TARGET else []


def moved_voter(voters: Voters, brokers: Iterable[BrokerState]) -> Voter | None:
    """Returns a voter whose registered address differs from its address in the voter set, with the
    registered address; None if there is none.
    """
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
