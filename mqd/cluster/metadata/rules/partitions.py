"""Changes to one partition: in-sync set, eligible leaders, leader and reassignment are decided
together (KIP-455, KIP-497, KIP-966; rules R6, R8, R14).

Only compose_change() makes a PartitionChange. Callers set a Target (a smaller in-sync set, other
replicas, another leader), and compose_change() computes the permitted change, so that after every
change (P7, checked by MetadataState.check()):
    * the leader is in the in-sync set, or there is none
    * in-sync and eligible replicas are disjoint subsets of `replicas`
    * no replica is eligible while min.insync.replicas are in sync; when the set falls below that, a
      replica that leaves it becomes eligible, unless its host may have lost unflushed records (P8)
and the leader epoch rises whenever the leader changes, a replica leaves the partition, or a
reassignment ends.

Pure functions. min.insync.replicas depends only on the metadata log (topic, then all-brokers default,
then min(2, replicas)): a host's configuration file must not decide which replicas are eligible,
because the next controller's file may differ.
"""

from collections.abc import Callable, Collection, Mapping

from mqd.cluster.metadata.records import PartitionChange, PartitionState

MIN_IN_SYNC = "min.insync.replicas"
ACKS_REPLICAS = "acks.replicas"
# value of min.insync.replicas or default.replication.factor: computed from the number of replicas or hosts
COMPUTED = -1
REPLICAS_DEFAULT = 3
ONLINE, PREFERRED, UNCLEAN = "online", "preferred", "unclean"


def default_replication_factor(host_count: int) -> int:
    return max(1, min(REPLICAS_DEFAULT, host_count))


def configured_min_in_sync(topic_config: Mapping[str, str], broker_default: Mapping[str, str]) -> int:
    """Returns the topic's min.insync.replicas, else the all-brokers value in the metadata log, else
    COMPUTED; but at least acks.replicas.
    """
    configured = int(topic_config.get(MIN_IN_SYNC) or broker_default.get(MIN_IN_SYNC) or COMPUTED)
    return max(configured, acks_replicas(topic_config) or COMPUTED)


def acks_replicas(topic_config: Mapping[str, str]) -> int:
    """acks.replicas, the number of replicas that are kept in sync (R7b); 0: all."""
    return int(topic_config.get(ACKS_REPLICAS) or 0)


def effective_min_in_sync(configured: int, replica_count: int, adding_count: int = 0) -> int:
    """The effective value for one partition: at most its number of replicas without those that a
    reassignment is still adding, so that a growing partition accepts records in the meantime.
    """
    count = max(1, replica_count - adding_count)
    return min(2, count) if configured == COMPUTED else min(max(1, configured), count)


class Target:
    """The requested state of a partition; initially its current state."""

    __slots__ = (
        "old",
        "replicas",
        "directories",
        "in_sync",
        "adding",
        "removing",
        "recovering",
        "retiring",
        "redirect",
        "replacing",
        "superseded",
        "replicas_with_losses",
        "raises_leader_epoch",
        "election",
        "keeps_leader",
        "target_leader",
        "last_known",
        "keeps_reassignment",
    )

    def __init__(self, old: PartitionState) -> None:
        self.old = old
        self.replicas, self.directories = old.replicas, old.directories
        self.in_sync = old.in_sync_replicas
        self.adding, self.removing, self.superseded = (
            old.adding_replicas,
            old.removing_replicas,
            old.superseded_replicas,
        )
        self.recovering, self.retiring, self.redirect, self.replacing = (
            old.recovering,
            old.retiring,
            old.redirect,
            old.replacing,
        )
        self.replicas_with_losses: frozenset[int] = frozenset()  # replicas that may have lost records (R9)
        self.raises_leader_epoch = False
        self.election = ONLINE
        self.keeps_leader = False  # the leader stays, even on a broker that change_to() calls `leaving`
        self.target_leader = -1  # this replica becomes the leader if it may, even if it is being removed
        self.keeps_reassignment = False  # the reassignment must not end now, even if it could
        self.last_known = old.last_known_eligible


def without(nodes: tuple[int, ...], gone: Collection[int]) -> tuple[int, ...]:
    return tuple(node for node in nodes if node not in gone)


def replicas_before(partition: PartitionState) -> tuple[int, ...]:
    """The replicas before the current reassignment, even if its target has changed: they are
    restored when the reassignment is cancelled.
    """
    return without(partition.replicas, (*partition.adding_replicas, *partition.superseded_replicas))


def compose_change(target: Target, configured_min: int, may_lead: Callable[[int], bool]) -> PartitionChange | None:
    """Returns the change that leads to the target; None if there is no change. `configured_min`:
    configured_min_in_sync(). `may_lead`: whether a broker may lead (unfenced and not shutting down).
    """
    old = target.old
    _maybe_complete_reassignment(target, configured_min)
    in_sync = target.in_sync
    minimum = effective_min_in_sync(configured_min, len(target.replicas), len(target.adding))
    eligible, last_known = _eligible(target, in_sync, minimum)
    leader, unclean = _elect(target, in_sync, eligible, may_lead)
    recovering = target.recovering
    if unclean:
        in_sync, eligible, last_known, recovering = (leader,), (), (), True
    elif leader >= 0 and leader not in in_sync:  # eligible: has all committed records
        in_sync, eligible = (leader,), without(eligible, (leader,))
        if minimum <= 1:
            eligible, last_known = (), ()
    loses_replica = target.replicas is not old.replicas and any(node not in target.replicas for node in old.replicas)
    raises_leader_epoch = target.raises_leader_epoch or leader != old.leader or loses_replica
    return _difference(old, target, in_sync, eligible, last_known, leader, recovering, raises_leader_epoch)


def _difference(
    old: PartitionState,
    target: Target,
    in_sync: tuple[int, ...],
    eligible: tuple[int, ...],
    last_known: tuple[int, ...],
    leader: int,
    recovering: bool,
    raises_leader_epoch: bool,
) -> PartitionChange | None:
    def if_changed(new, before):
        return None if new == before else new

    placement_changed = target.replicas != old.replicas or target.directories != old.directories
    change = PartitionChange(
        index=old.index,
        raises_leader_epoch=raises_leader_epoch,
        leader=if_changed(leader, old.leader),
        in_sync_replicas=if_changed(in_sync, old.in_sync_replicas),
        eligible_leader_replicas=if_changed(eligible, old.eligible_leader_replicas),
        last_known_eligible=if_changed(last_known, old.last_known_eligible),
        replicas=target.replicas if placement_changed else None,
        directories=target.directories if placement_changed else None,
        adding_replicas=if_changed(target.adding, old.adding_replicas),
        removing_replicas=if_changed(target.removing, old.removing_replicas),
        recovering=if_changed(recovering, old.recovering),
        retiring=if_changed(target.retiring, old.retiring),
        redirect=if_changed(target.redirect, old.redirect),
        replacing=if_changed(target.replacing, old.replacing),
        superseded_replicas=if_changed(target.superseded, old.superseded_replicas),
    )
    return None if change == PartitionChange(old.index) else change


def _eligible(target: Target, in_sync: tuple[int, ...], minimum: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (eligible replicas, last known eligible replicas) for this in-sync set."""
    if len(in_sync) >= minimum:
        return (), ()
    old = target.old
    former = old.eligible_leader_replicas + old.in_sync_replicas
    candidates = [node for node in dict.fromkeys(former) if node in target.replicas and node not in in_sync]
    eligible = tuple(node for node in candidates if node not in target.replicas_with_losses)
    former_eligible = dict.fromkeys(
        (*target.last_known, *(node for node in candidates if node in target.replicas_with_losses))
    )
    return eligible, tuple(
        node for node in former_eligible if node in target.replicas and node not in in_sync and node not in eligible
    )


def _elect(
    target: Target, in_sync: tuple[int, ...], eligible: tuple[int, ...], may_lead: Callable[[int], bool]
) -> tuple[int, bool]:
    """Returns (leader or -1, whether it was elected uncleanly). R8: an in-sync replica leads; if no
    replica is in sync, an eligible one; otherwise none. The current leader stays if it may.
    """
    order, leader = target.replicas, target.old.leader
    if (
        target.election != PREFERRED
        and target.target_leader < 0
        and leader in in_sync
        and leader in order
        and may_lead(leader)
    ):
        return leader, False
    candidates = in_sync or eligible
    electable = [node for node in order if node in candidates and may_lead(node) and node not in target.removing] or [
        node for node in order if node in candidates and may_lead(node)
    ]
    if target.target_leader in order and target.target_leader in candidates and may_lead(target.target_leader):
        return target.target_leader, False
    preferred = without(order, target.removing or ())[:1]
    if target.election == PREFERRED and preferred and preferred[0] in electable:
        return preferred[0], False
    if leader in electable or (leader in in_sync and leader in order and may_lead(leader)):
        return leader, False
    if electable:
        return electable[0], False
    if target.election == UNCLEAN:
        last_known = [node for node in target.last_known if node in order and may_lead(node)]
        survivors = last_known or [node for node in order if may_lead(node)]
        if survivors:
            return survivors[0], True
    return -1, False


def _may_complete(target: Target, replicas: tuple[int, ...], in_sync: tuple[int, ...], configured_min: int) -> bool:
    """R14: whether all added replicas are in sync, and at least min.insync.replicas of the remaining
    replicas are.
    """
    enough_in_sync = len(in_sync) >= effective_min_in_sync(configured_min, len(replicas))
    return enough_in_sync and all(node in in_sync for node in target.adding)


def _maybe_complete_reassignment(target: Target, configured_min: int) -> None:
    if target.keeps_reassignment or (not target.adding and not target.removing):
        return
    replicas = without(target.replicas, target.removing)
    in_sync = without(target.in_sync, target.removing)
    if not _may_complete(target, replicas, in_sync, configured_min) or not replicas or not in_sync:
        return
    by_node = dict(zip(target.replicas, target.directories))
    target.replicas, target.directories = replicas, tuple(by_node[node] for node in replicas)
    target.in_sync, target.adding, target.removing, target.replacing, target.superseded = in_sync, (), (), -1, ()
    target.raises_leader_epoch = True
