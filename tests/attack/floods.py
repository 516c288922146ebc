"""Too many of everything a client may create: connections, groups, ids, rules. And a certificate
that is replaced by garbage while others connect.
"""

from __future__ import annotations

import contextlib
import random
import socket
from collections import Counter
from collections.abc import Callable

from mqd.protocol.messages import (
    CreateAclsRequest,
    DeleteAclsRequest,
    FindCoordinatorRequest,
    InitProducerIdRequest,
    JoinGroupRequest,
    OffsetCommitRequest,
)
from tests.attack.bad_input import client_hello, connected, strange_names
from tests.attack.target import ADMIN, ALICE, ALLOW, CREATE_ACLS, MALLORY, SecuredConnection, Target, rule
from tests.kafka_connection import ConnectionEnded

OFFSET_COMMIT, FIND_COORDINATOR, JOIN_GROUP, INIT_PRODUCER_ID, DELETE_ACLS = 8, 10, 11, 22, 31
AT_ONCE = 400
DENY, LITERAL, OF_TOPIC = 2, 3, 2
RULES_MAX = 10_000


def connections(target: Target, rng: random.Random, count: int) -> Counter[str]:
    """Hundreds at once to each listener; they send nothing or part of a message, or close at once."""
    outcomes: Counter[str] = Counter()
    hello = client_hello(rng)
    ports = (target.tls_port, target.sasl_port, target.mutual_port, target.metrics_port)
    held: list[socket.socket] = []
    for _ in range(count):
        try:
            one = connected(rng.choice(ports))
            one.sendall(rng.choice((b"", b"\0\0", hello, b"GET / HT")))
            held.append(one)
            outcomes["open"] += 1
        except OSError as error:
            outcomes[type(error).__name__] += 1
        if len(held) > AT_ONCE:
            held.pop(rng.randrange(len(held))).close()
    for one in held:
        one.close()
    return outcomes


def _requested(target: Target, rng: random.Random, user: str, count: int, make: Callable) -> Counter[str]:
    """`make` returns a request with its key and version; sixteen are in flight at a time."""
    outcomes: Counter[str] = Counter()
    kafka: SecuredConnection | None = None
    try:
        while outcomes.total() < count:
            try:
                kafka = kafka or target.connect(user)
                for _ in range(16):
                    kafka.send(*make())
                for _ in range(16):
                    response = kafka.receive().body
                    outcomes[f"error {getattr(response, 'error_code', 0)}"] += 1
            except (ConnectionEnded, OSError) as error:
                outcomes[type(error).__name__] += 1
                if kafka is not None:
                    kafka.close()
                kafka = None
    finally:
        if kafka is not None:
            kafka.close()
    return outcomes


def groups(target: Target, rng: random.Random, count: int) -> Counter[str]:
    """A user with rights on groups creates very many, with large metadata."""

    def join() -> tuple[int, int, object]:
        protocol = JoinGroupRequest.Protocol(name="range", metadata=bytes(rng.choice((10, 100_000))))
        group = f"good-{rng.getrandbits(40)}" + "x" * rng.choice((0, 200, 30_000))
        return (
            JOIN_GROUP,
            3,
            JoinGroupRequest(
                group_id=group,
                session_timeout_ms=6000,
                rebalance_timeout_ms=1,
                protocol_type="consumer",
                protocols=[protocol],
            ),
        )

    return _requested(target, rng, ALICE, count, join)


def offsets(target: Target, rng: random.Random, count: int) -> Counter[str]:
    def commit() -> tuple[int, int, object]:
        partitions = [
            OffsetCommitRequest.Partition(
                partition_index=0, committed_offset=1, committed_metadata="m" * rng.choice((0, 4000, 30_000))
            )
        ]
        topics = [OffsetCommitRequest.Topic(name="good", partitions=partitions)]
        group = f"good-{rng.getrandbits(40)}"
        return OFFSET_COMMIT, 7, OffsetCommitRequest(group_id=group, generation_id_or_member_epoch=-1, topics=topics)

    return _requested(target, rng, ALICE, count, commit)


def ids(target: Target, rng: random.Random, count: int) -> Counter[str]:
    """Requests for producer ids, with and without a transactional id, by a user without the right."""

    def request() -> tuple[int, int, object]:
        name = rng.choice((None, f"tx-{rng.getrandbits(40)}", "t" * 30_000, *strange_names(rng)))
        return INIT_PRODUCER_ID, 4, InitProducerIdRequest(transactional_id=name, transaction_timeout_ms=60_000)

    return _requested(target, rng, MALLORY, count, request)


def coordinators(target: Target, rng: random.Random, count: int) -> Counter[str]:
    def request() -> tuple[int, int, object]:
        names = [f"good-{rng.getrandbits(40)}", *strange_names(rng)]
        return FIND_COORDINATOR, 4, FindCoordinatorRequest(key_type=rng.choice((0, 1)), coordinator_keys=names[:12])

    return _requested(target, rng, MALLORY, count, request)


def rules(target: Target, rng: random.Random, count: int) -> Counter[str]:
    """Adds many rules with odd names while other clients work, then removes them."""
    outcomes: Counter[str] = Counter()
    names = iter(range(min(count * 4, RULES_MAX)))
    with target.connect(ADMIN) as admin:
        admin.socket.settimeout(60)
        while part := [number for _, number in zip(range(500), names, strict=False)]:
            made = [
                rule(
                    OF_TOPIC,
                    f"rule-{number}-" + rng.choice(("*", "\u2603", "x" * 200, ".", "\u202e")),
                    LITERAL,
                    user=rng.choice((MALLORY, "*", f"user\u00e9-{number}")),
                    permission=rng.choice((ALLOW, DENY)),
                )
                for number in part
            ]
            response = admin.call(CREATE_ACLS, 3, CreateAclsRequest(creations=made))
            outcomes.update(f"created, error {one.error_code}" for one in response.results)
        target_works(target, outcomes)
        for user in (f"User:{MALLORY}", "User:*", None):
            found = admin.call(
                DELETE_ACLS,
                3,
                DeleteAclsRequest(
                    filters=[
                        DeleteAclsRequest.Filter(
                            resource_type_filter=OF_TOPIC,
                            resource_name_filter=None,
                            pattern_type_filter=LITERAL,
                            principal_filter=user,
                            host_filter=None,
                            operation=1,
                            permission_type=1,
                        )
                    ]
                ),
            )
            outcomes["removed"] += len(found.filter_results[0].matching_acls)
    return outcomes


def nonsense(target: Target, rng: random.Random, count: int) -> Counter[str]:
    """Replaces the certificate's file by garbage, repeatedly, while clients connect."""
    outcomes: Counter[str] = Counter()
    good = target.keystore.read_bytes()
    other = target.foreign.issue("broker")
    try:
        for number in range(count):
            if number % 25 == 0:
                what = rng.choice((b"", rng.randbytes(2000), good[: rng.randrange(len(good))], other.chain_pem()))
                target.keystore.write_bytes(what)
            target_works(target, outcomes)
    finally:
        target.keystore.write_bytes(good)
    return outcomes


def target_works(target: Target, outcomes: Counter[str]) -> None:
    try:
        target.connect(ALICE).close()
        outcomes["others connect"] += 1
    except (OSError, ConnectionEnded) as error:
        outcomes[f"others: {type(error).__name__} {str(error)[:60]}"] += 1


KINDS: dict[str, Callable[[Target, random.Random, int], Counter[str]]] = {
    one.__name__: one for one in (connections, groups, offsets, ids, coordinators, rules, nonsense)
}
with contextlib.suppress(ValueError, OSError):
    import resource

    _soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(_hard, 20_000), _hard))
