"""A subject: the rights of one principal from one client address on topics, transactional ids and
groups, in the form that a reactor uses (rights_table.py has the layout of the bytes).

A subject is valid for one generation of the authorizer; after a change of rules the worker compiles
it again and replaces it as a whole.
"""

import msgspec

from mqd.security.acl import ResourceType
from mqd.security.authorizer import Authorizer


class Subject(msgspec.Struct, frozen=True):
    principal: str
    host: str
    generation: int
    topics: bytes  # RightsTable.encode()
    transactional_ids: bytes
    groups: bytes


def compile_subject(authorizer: Authorizer, principal: str, host: str) -> Subject:
    return Subject(
        principal,
        host,
        authorizer.generation,
        authorizer.table(principal, host, ResourceType.TOPIC).encode(),
        authorizer.table(principal, host, ResourceType.TRANSACTIONAL_ID).encode(),
        authorizer.table(principal, host, ResourceType.GROUP).encode(),
    )
