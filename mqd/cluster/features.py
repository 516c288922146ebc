"""Features of the cluster (KIP-584, KIP-1022): what this version of mqd can do, at which levels, and what is in force where nobody has said anything.

A level is in force for the whole cluster, is stored in the metadata log, and is what clients are told (ApiVersions 3+, `finalized`). A level may be raised here only when it works from end to end: clients change the way they speak because of it.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Feature(NamedTuple):
    name: str
    first: int  # supported levels, both inclusive; 0 can always be finalized where it is 0
    last: int
    default: int
    doc: str


FEATURES: dict[str, Feature] = {
    feature.name: feature
    for feature in (
        Feature("metadata.version", 25, 29, 29, "What the metadata may hold, in Kafka's counting: 25 is 4.0-IV3, 29 is 4.2-IV1."),
        Feature("transaction.version", 0, 2, 2, "2: every transaction bumps the producer's epoch, and the server adds partitions (KIP-890)."),
        Feature("group.version", 0, 1, 1, "1: the consumer group protocol (KIP-848)."),
    )
}


def levels(finalized: Mapping[str, int]) -> dict[str, int]:
    """The level in force of every feature; `finalized`: what the metadata log says. A stored level that this version does not know counts as the nearest it does."""
    return {name: min(max(finalized.get(name, feature.default), feature.first), feature.last) for name, feature in FEATURES.items()}
