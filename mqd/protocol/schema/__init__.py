"""The Kafka messages this project speaks, written down once: field names, types, versions, tags and
defaults. Compiled by mqd.protocol.codec.
"""

from mqd.protocol.schema import acls, admin, between, cluster, consumer_groups, groups, hot, topics, transactions
from mqd.protocol.schema.language import Api

_ALL = (
    *acls.APIS,
    *admin.APIS,
    *hot.APIS,
    *cluster.APIS,
    *topics.APIS,
    *groups.APIS,
    *consumer_groups.APIS,
    *transactions.APIS,
    *between.APIS,
)

# Every API written down, by key.
APIS: dict[int, Api] = {api.key: api for api in sorted(_ALL, key=lambda api: api.key)}

# Of groups and transactions: what is answered so far.
_COORDINATED = {8, 9, 11, 12, 13, 14, 15, 16, 24, 25, 26, 27, 28, 42, 47, 61, 65, 66, 68, 69}
# The part of them a broker of this version answers: what it advertises.
SUPPORTED_KEYS = (
    frozenset(api.key for api in (*hot.APIS, *cluster.APIS, *topics.APIS, *admin.APIS, *acls.APIS)) | _COORDINATED
)
