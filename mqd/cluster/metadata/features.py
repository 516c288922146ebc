"""Features of the cluster (KIP-584, KIP-1022): the levels that this version of mqd supports, and
the current ones.

A level applies to the whole cluster, is stored in the metadata log (FeatureLevelSet), and is
advertised to clients (ApiVersions 3+, `finalized`). Clients choose their protocol by these levels, so
a new level may be added here only when it works end to end.

Hosts of two versions of mqd coexist during a rolling upgrade. These rules make that safe:

    V1  every host sends its supported levels at its registration and to each host that it connects
        to. The current level of each feature is in the range of every registered host, including
        hosts that are down: otherwise UpdateFeatures is refused
    V2  no record that needs a higher level of mqd.version than the current one is written to the
        metadata log, even if the active controller supports it: RECORD_LEVELS
    V3  a host that does not support the current levels does not take part: it is refused when it
        connects and when it registers, and refuses to start on such metadata
    V4  the level of mqd.version never falls: records that it allows may be in the log
    V5  if the log has no record of a feature, its `unset` level applies, which is the same in every
        version of mqd that has the feature: a new version has no effect until an operator raises the
        level

A host ignores unknown messages and fields from other hosts (mqd.cluster.membership.peer_messages).
In the metadata log it ignores unknown fields, but an unknown record stops it. V2 prevents both
cases: a record or field that older hosts must understand gets the next level here, and an entry in
RECORD_LEVELS.
"""

import os
from collections.abc import Mapping
from typing import NamedTuple

from mqd.cluster.metadata.records import (
    AclCreated,
    AclRemoved,
    ClientMetricsConfigured,
    DelegationTokenRemoved,
    DelegationTokenSet,
    Record,
    ScramCredentialRemoved,
    ScramCredentialSet,
)

MQD_VERSION = "mqd.version"
SHARE_VERSION = "share.version"
STREAMS_VERSION = "streams.version"
# The lowest level of mqd.version at which all hosts ...
SHARE_GROUPS_LEVEL = 4  # have share groups
DEAD_LETTERS_LEVEL = 5  # can read the state Archiving of share groups
DEDUPLICATION_LEVEL = 6  # support dedup.window.ms, as leaders and as followers
FIFO_LEVEL = 7  # support share.fifo
STREAMS_GROUPS_LEVEL = 8  # have streams groups
VIEWS_LEVEL = 9  # serve topics without partitions of their own (views)
ACKS_REPLICAS_LEVEL = 10  # support acks.replicas as leaders
# An environment variable with the highest levels that this process supports ("mqd.version=0,..."), for
# tests with hosts of two versions.
CAP_VARIABLE = "MQD_TEST_FEATURES"
# feature -> the first and last level that a host supports; a missing feature means 0 to 0
Ranges = Mapping[str, tuple[int, int]]


class Feature(NamedTuple):
    name: str
    # supported levels, both inclusive; level 0 is always allowed for a feature that starts at 0
    first: int
    last: int
    unset_level: int  # the level if the metadata log has none; never changes (V5)
    doc: str


FEATURES: dict[str, Feature] = {
    feature.name: feature
    for feature in (
        Feature(
            "metadata.version",
            25,
            29,
            29,
            "The metadata version in Kafka's numbering: 25 is 4.0-IV3, 29 is 4.2-IV1. Only Kafka's tools use it; hosts"
            " of mqd use mqd.version.",
        ),
        Feature(
            "transaction.version",
            0,
            2,
            2,
            "2: every transaction bumps the producer's epoch, and the server adds partitions (KIP-890).",
        ),
        Feature("group.version", 0, 1, 1, "1: the consumer group protocol (KIP-848)."),
        Feature(
            "kraft.version",
            0,
            1,
            0,
            "1: voters of the metadata quorum can be added and removed at run time (KIP-853). mqd allows this at"
            " either level.",
        ),
        Feature(
            "eligible.leader.replicas.version",
            0,
            1,
            0,
            "1: replicas that have all committed records may lead although they are not in sync (KIP-966). mqd"
            " allows this at either level.",
        ),
        Feature(SHARE_VERSION, 0, 1, 0, "1: share groups (KIP-932), if mqd.version is 4 or higher."),
        Feature(STREAMS_VERSION, 0, 1, 0, "1: streams groups (KIP-1071), if mqd.version is 8 or higher."),
        Feature(
            MQD_VERSION,
            0,
            10,
            0,
            "The messages between hosts of mqd and their stored records. 1: only hosts that take part in this"
            " negotiation belong to the cluster. 2: access control lists and users' credentials. 3: delegation"
            " tokens. 4: share groups. 5: dead letters. 6: deduplication. 7: share.fifo. 8: streams groups."
            " 9: views. 10: acks.replicas.",
        ),
    )
}

RECORD_LEVELS: dict[type[Record], int] = {
    AclCreated: 2,
    AclRemoved: 2,
    ScramCredentialSet: 2,
    ScramCredentialRemoved: 2,
    ClientMetricsConfigured: 2,
    DelegationTokenSet: 3,
    DelegationTokenRemoved: 3,
}
"""For records that were added after the first release: the lowest level of mqd.version at which they may be written."""


def _capped(features: dict[str, Feature], caps: str) -> dict[str, Feature]:
    """`caps`: as in CAP_VARIABLE. Raises ValueError."""
    capped = dict(features)
    for text in filter(None, caps.split(",")):
        name, _, level = text.partition("=")
        feature = capped[name]
        capped[name] = feature._replace(last=max(feature.first, min(feature.last, int(level))))
    return capped


FEATURES = _capped(FEATURES, os.environ.get(CAP_VARIABLE, ""))


def supported() -> dict[str, tuple[int, int]]:
    """The levels that this host supports, as sent to others."""
    return {feature.name: (feature.first, feature.last) for feature in FEATURES.values()}


def supported_levels(ranges: Ranges) -> Ranges:
    """The levels that a peer supports. A peer that sends none runs a version without mqd.version, and
    is treated as supporting the unset levels. (It sends its levels of the other features when it
    registers.)
    """
    return ranges or {feature.name: (feature.unset_level, feature.unset_level) for feature in FEATURES.values()}


def levels(finalized: Mapping[str, int]) -> dict[str, int]:
    """The current level of every feature. `finalized`: the levels in the metadata log. A stored level
    that this version does not support is replaced by the nearest supported one (only on a host that
    does not serve: V3).
    """
    return {
        name: min(max(finalized.get(name, feature.unset_level), feature.first), feature.last)
        for name, feature in FEATURES.items()
    }


def has_share_groups(current: Mapping[str, int]) -> bool:
    """`current`: the result of levels(). share.version alone does not suffice: hosts of earlier versions
    of mqd support level 1 of share.version, but have no share groups.
    """
    return current[SHARE_VERSION] >= 1 and current[MQD_VERSION] >= SHARE_GROUPS_LEVEL


def has_streams_groups(current: Mapping[str, int]) -> bool:
    """streams.version alone does not suffice: a cluster of an earlier version of mqd may be at level
    1 of streams.version without having streams groups.
    """
    return current[STREAMS_VERSION] >= 1 and current[MQD_VERSION] >= STREAMS_GROUPS_LEVEL


def dead_letters_allowed(current: Mapping[str, int]) -> bool:
    """share.version 1 suffices, although Kafka 4.4 requires 2: level 2 needs the metadata.version of
    4.4, but mqd presents itself to Kafka's tools as a cluster of 4.2.
    """
    return current[SHARE_VERSION] >= 1 and current[MQD_VERSION] >= DEAD_LETTERS_LEVEL


def in_force(finalized: Mapping[str, int]) -> dict[str, int]:
    """The current levels, including unknown features and levels that this host does not support."""
    return {name: feature.unset_level for name, feature in FEATURES.items()} | dict(finalized)


def describe_unsupported(finalized: Mapping[str, int], ranges: Ranges) -> str:
    """Describes the current levels that a host with these ranges does not support; "" = none."""
    problems = []
    for name, level in sorted(in_force(finalized).items()):
        first, last = ranges.get(name, (0, 0))
        if level and not first <= level <= last:
            problems.append(f"the level of {name} is {level}, and the host supports {first} to {last}")
    return "; ".join(problems)


def needed_level(record: Record) -> int:
    """The lowest level of mqd.version at which the record may be written (V2)."""
    return RECORD_LEVELS.get(type(record), 0)


def founding_levels() -> dict[str, int]:
    """The levels of a new cluster that differ from the unset levels."""
    return {feature.name: feature.last for feature in FEATURES.values() if feature.last != feature.unset_level}
