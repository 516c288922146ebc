"""Which host should become a voter of the quorum by itself: a cluster of one that has grown to
three gets three voters, one at a time.

Pure. Nobody is ever removed by itself, and a number of voters that an operator has chosen is left
alone: two by their founding, four, five and more, and what is left when one was removed. Only one
voter grows to three, by way of two. That it is on the way is read from the voter sets of the
metadata log (log_memory.py: their course), which every controller has, whoever of them began it.
"""

from collections.abc import Iterable

from mqd.cluster.metadata.records import BrokerState
from mqd.cluster.raft.identity import directory_bytes
from mqd.cluster.raft.messages import GROWING, SHRUNK, VOTERS_WANTED, ReplicaKey, Voter, Voters


def key_of(broker: BrokerState) -> ReplicaKey | None:
    """Who a registered broker is in the quorum; None: it was registered by a version that did not
    say.
    """
    try:
        return ReplicaKey(broker.node_id, directory_bytes(broker.directory_id))
    except ValueError:
        return None


def candidates(voters: Voters, brokers: Iterable[BrokerState], course: int) -> list[Voter]:
    """In service, reachable by the others, no voter yet; the lowest node id first. Empty when there
    are not enough hosts for three, or when there is nothing to grow. `course`: how these voters
    came to be so many; two of whom one was added are on the way, and two that were founded, or one
    or two that are left, are a wish.
    """
    count = len(voters)
    if count >= VOTERS_WANTED or course == SHRUNK or (count == 2 and course != GROWING):
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
    return fit if len(fit) + count >= VOTERS_WANTED else []


def moved(voters: Voters, brokers: Iterable[BrokerState]) -> Voter | None:
    """A voter whose registration names another address than the quorum knows."""
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
