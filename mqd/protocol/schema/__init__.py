"""The definitions of Kafka's messages in this project: field names, types, versions, tags and
defaults. Compiled by mqd.protocol.codec.
"""

from mqd.protocol.schema import (
    acls,
    admin,
    authentication,
    cluster,
    consumer_groups,
    groups,
    hot_path,
    interbroker,
    share_groups,
    streams_groups,
    tokens,
    topics,
    transactions,
)
from mqd.protocol.schema.language import Api

_FAMILIES = (
    acls,
    tokens,
    admin,
    authentication,
    hot_path,
    cluster,
    topics,
    groups,
    consumer_groups,
    share_groups,
    streams_groups,
    transactions,
    interbroker,
)

# Every defined API, by key.
APIS: dict[int, Api] = dict(sorted((api.key, api) for family in _FAMILIES for api in family.APIS))
# API key -> name of the module of this package that defines it.
FAMILY_NAMES: dict[int, str] = {
    api.key: family.__name__.rpartition(".")[2] for family in _FAMILIES for api in family.APIS
}

# The supported APIs of groups, share groups, streams groups and transactions.
_COORDINATOR_KEYS = (
    {8, 9, 11, 12, 13, 14, 15, 16, 24, 25, 26, 27, 28, 42, 47, 61, 65, 66, 68, 69}  # groups and transactions
    | {76, 77, 78, 79, 90, 91, 92}  # share groups
    | {88, 89}  # streams groups
)
# The APIs that a broker of this version handles and advertises.
SUPPORTED_KEYS = (
    frozenset(
        api.key for family in (hot_path, cluster, topics, admin, acls, authentication, tokens) for api in family.APIS
    )
    | _COORDINATOR_KEYS
)
