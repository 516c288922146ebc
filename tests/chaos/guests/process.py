"""Clients of a secured cluster whose rights and passwords change all the time, during the faults.
One process, which tests.chaos.client starts as the role "guests".

A warden grants and revokes rights, through any host that responds, and changes and deletes
passwords. Guests send raw requests to every host, over TLS: no library hides which host served
which request, nor when. Everything is recorded in the history: `right`, `password`, `login`,
`asked` (checked by rights.py).

    python -m tests.chaos.guests.process SETTINGS     once: the rights of the other clients, their password

Times are CLOCK_MONOTONIC nanoseconds, as in history.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from mqd.protocol import messages as m
from mqd.protocol.records import Record, encode_batch
from mqd.security.acl import CLUSTER_NAME, Operation, PatternType, Permission, ResourceType
from tests.chaos.client import Client
from tests.chaos.hosts import PORT
from tests.chaos.secured import APP, APP_PASSWORD, GUARDED, GUARDED_PARTITIONS, GUESTS_PORT, connect
from tests.kafka_connection import ConnectionEnded, KafkaConnection

USERS = ("g1", "g2", "g3", "g4")
OPERATIONS = (Operation.READ, Operation.WRITE)
TIMEOUT_S = 6.0
ITERATIONS = 4096
SHA_256 = 1
OLD_PASSWORDS = 4  # that guests still try
FAILURES = (OSError, ConnectionEnded, AssertionError, ValueError)
Ask = Callable[[int, int, Any], Any]


def password_of(user: str, number: int) -> str:
    return f"{user}'s password {number}"


def of_password(user: str, password: str) -> m.AlterUserScramCredentialsRequest:
    salt = secrets.token_bytes(16)
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, ITERATIONS)
    put = m.AlterUserScramCredentialsRequest.ScramCredentialUpsertion(user, SHA_256, ITERATIONS, salt, salted)
    return m.AlterUserScramCredentialsRequest(upsertions=[put])


def of_no_password(user: str) -> m.AlterUserScramCredentialsRequest:
    gone = m.AlterUserScramCredentialsRequest.ScramCredentialDeletion(user, SHA_256)
    return m.AlterUserScramCredentialsRequest(deletions=[gone])


def rule(user: str, operation: int, kind: int, name: str, permission: int = Permission.ALLOW) -> Any:
    return m.CreateAclsRequest.AclCreation(
        resource_type=kind,
        resource_name=name,
        resource_pattern_type=PatternType.LITERAL,
        principal=f"User:{user}",
        host="*",
        operation=operation,
        permission_type=permission,
    )


def every_rule(user: str, operation: int) -> m.DeleteAclsRequest:
    """All rules that allow or deny this operation."""
    expected = m.DeleteAclsRequest.Filter(
        resource_type_filter=ResourceType.TOPIC,
        resource_name_filter=GUARDED,
        pattern_type_filter=PatternType.LITERAL,
        principal_filter=f"User:{user}",
        operation=operation,
        permission_type=Permission.ANY,
    )
    return m.DeleteAclsRequest(filters=[expected])


class Refused(ValueError):
    """A response with an error code."""


def check(response: Any) -> None:
    codes = [one.error_code for name in ("results", "filter_results") for one in getattr(response, name, ())]
    if any(codes):
        raise Refused(str(codes))


class Administrator:
    """Requests of a super user to one host, until it does not respond; then to the next."""

    def __init__(self, hosts: list[str], settings: dict[str, str]) -> None:
        self._hosts, self._settings, self._turn = hosts, settings, 0
        self._connection: KafkaConnection | None = None

    def send_request(self, api_key: int, version: int, request: Any) -> Any:
        """Raises the exceptions of FAILURES; then it is unknown whether it was done."""
        try:
            if self._connection is None:
                address = self._hosts[self._turn % len(self._hosts)]
                self._connection = connect(address, PORT, self._settings, TIMEOUT_S)
            response = self._connection.call(api_key, version, request)
            check(response)
            return response
        except FAILURES:
            self.close()
            self._turn += 1
            raise

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Guests(Client):
    """A thread for the warden and one for each host; each connection is of one guest."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self.hosts: list[str] = settings["hosts"]
        self._lock = threading.Lock()
        self._passwords: dict[str, int] = {}  # of a user: the number of the latest that may be in force
        self._value = 0

    def report(self, kind: str, **fields: Any) -> None:
        with self._lock:
            self.writer.write(kind, **fields)

    def run(self) -> int:
        threads = [threading.Thread(target=self._warden)]
        threads += [threading.Thread(target=self._visit, args=(host,)) for host in self.hosts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return 0

    def _pause(self, least: float, most: float) -> None:
        until = time.monotonic() + self.chance.uniform(least, most)
        while not self.ending and time.monotonic() < until:
            time.sleep(0.05)  # the load's own rate

    # -- the warden --------------------------------------------------------------------------------

    def _warden(self) -> None:
        admin, granted, password = Administrator(self.hosts, self.settings["operator"]), set[tuple[str, int]](), 0
        for user in USERS:
            password += 1
            self._change_password(admin, user, password)
        while not self.ending:
            user = self.chance.choice(USERS)
            if self.chance.random() < 0.25:
                password += 1
                self._change_password(admin, user, password)
            else:
                self._change_right(admin, granted, user, self.chance.choice(OPERATIONS))
            self._pause(0.2, 1.5)
        admin.close()

    @contextlib.contextmanager
    def _changing(self, kind: str, **fields: Any) -> Iterator[None]:
        begin_ns, status = time.monotonic_ns(), "info"
        self.report(kind, **fields, status="begun", begin_ns=begin_ns, end_ns=begin_ns)
        try:
            yield
            status = "ok"
        except FAILURES:
            pass  # it is unknown whether it was done
        self.report(kind, **fields, status=status, begin_ns=begin_ns, end_ns=time.monotonic_ns())

    def _change_right(self, admin: Administrator, granted: set[tuple[str, int]], user: str, operation: int) -> None:
        """Revocations last longer than grants, to check requests beyond the bound."""
        grants = (user, operation) not in granted
        fields = {"user": user, "operation": int(operation), "change": "grant" if grants else "revoke"}
        if grants and self.chance.random() < 0.7:
            return
        with self._changing("right", **fields):
            if grants:
                granted.add((user, operation))
                admin.send_request(31, 3, every_rule(user, operation))
                admin.send_request(30, 3, m.CreateAclsRequest([rule(user, operation, ResourceType.TOPIC, GUARDED)]))
            elif self.chance.random() < 0.5:
                admin.send_request(31, 3, every_rule(user, operation))
                granted.discard((user, operation))
            else:
                denial = rule(user, operation, ResourceType.TOPIC, GUARDED, Permission.DENY)
                admin.send_request(30, 3, m.CreateAclsRequest([denial]))
                granted.discard((user, operation))

    def _change_password(self, admin: Administrator, user: str, number: int) -> None:
        deletes = user in self._passwords and self.chance.random() < 0.3
        with self._changing("password", user=user, number=number, deletes=deletes):
            if deletes:
                admin.send_request(51, 0, of_no_password(user))
            else:
                admin.send_request(51, 0, of_password(user, password_of(user, number)))
                self._passwords[user] = number

    # -- the guests --------------------------------------------------------------------------------

    def _visit(self, host: str) -> None:
        while not self.ending:
            user = self.chance.choice(USERS)
            number = self._passwords.get(user, 0)
            if self.chance.random() < 0.3:
                number = max(0, number - self.chance.randrange(1, OLD_PASSWORDS * len(USERS)))
            try:
                with connect(host, GUESTS_PORT, self.settings["login"], TIMEOUT_S) as kafka:
                    login = self._log_in(kafka, host, user, number)
                    if login is not None:
                        self._send_request(kafka, host, user, login)
            except FAILURES:
                self.writer.worked(False)
            self._pause(0.1, 0.4)

    def _log_in(self, kafka: KafkaConnection, host: str, user: str, number: int) -> dict[str, int] | None:
        kafka.call(17, 1, m.SaslHandshakeRequest(mechanism="PLAIN"))
        begin_ns = time.monotonic_ns()
        proof = m.SaslAuthenticateRequest(auth_bytes=f"\0{user}\0{password_of(user, number)}".encode())
        served = kafka.call(36, 2, proof).error_code == 0
        login = {"number": number, "login_begin_ns": begin_ns, "login_end_ns": time.monotonic_ns()}
        self.report("login", host=host, user=user, served=served, **login)
        return login if served else None

    def _send_request(self, kafka: KafkaConnection, host: str, user: str, login: dict[str, int]) -> None:
        """Until the broker closes the connection, or for a while; reads continue in a fetch
        session, half of the time.
        """
        session, epoch = 0, 0 if self.chance.random() < 0.5 else -1
        for _ in range(self.chance.choice((1, 10, 100))):
            if self.ending:
                return
            operation, begin_ns, values = self.chance.choice(OPERATIONS), time.monotonic_ns(), list[str]()
            if operation is Operation.READ:
                response: Any = kafka.call(1, 11, self._fetch(session, epoch))
                if response.error_code:  # the session is gone
                    session, epoch = 0, 0
                    continue
                session, epoch = response.session_id, epoch + 1 if response.session_id else epoch
                parts = [part for one in response.responses for part in one.partitions]
                served = any(part.error_code == 0 and part.records for part in parts)
            else:
                values, request = self._produce()
                response = kafka.call(0, 9, request)
                parts = [part for one in response.responses for part in one.partition_responses]
                served = any(part.error_code == 0 for part in parts)
            denied = any(part.error_code == 29 for part in parts)
            self.report(
                "asked",
                host=host,
                user=user,
                operation=int(operation),
                served=served,
                denied=denied,
                begin_ns=begin_ns,
                end_ns=time.monotonic_ns(),
                written=[value for value, part in zip(values, parts, strict=False) if part.error_code == 0],
                refused=[value for value, part in zip(values, parts, strict=False) if part.error_code == 29],
                **login,
            )
            self.writer.worked(served or denied)
            self._pause(0.0, 0.15)

    def _fetch(self, session: int, epoch: int) -> m.FetchRequest:
        parts = [
            m.FetchRequest.Partition(partition=index, partition_max_bytes=512) for index in range(GUARDED_PARTITIONS)
        ]
        return m.FetchRequest(
            replica_id=-1,
            max_wait_ms=self.chance.choice((0, 300)),
            min_bytes=1,
            session_id=session,
            session_epoch=epoch,
            topics=[m.FetchRequest.Topic(topic=GUARDED, partitions=parts)] if epoch <= 0 else [],
        )

    def _produce(self) -> tuple[list[str], m.ProduceRequest]:
        with self._lock:
            self._value += 1
            number = self._value
        values = [f"{self.name} {number} {index}" for index in range(GUARDED_PARTITIONS)]
        parts = [
            m.ProduceRequest.PartitionData(index, encode_batch([Record(value.encode())], compression="none"))
            for index, value in enumerate(values)
        ]
        topic = m.ProduceRequest.TopicData(name=GUARDED, partition_data=parts)
        return values, m.ProduceRequest(None, -1, 3_000, [topic])


ROLES = {"guests": Guests}


def prepare(hosts: list[str], topics: list[str], operator: dict[str, str]) -> None:
    """Creates the other clients' password and rights, and a record for guests to read."""
    admin = Administrator(hosts, operator)
    expected = [(ResourceType.TOPIC, topic) for topic in topics]
    expected += [(kind, "*") for kind in (ResourceType.GROUP, ResourceType.TRANSACTIONAL_ID)]
    rules = [rule(APP, Operation.ALL, kind, name) for kind, name in [*expected, (ResourceType.CLUSTER, CLUSTER_NAME)]]
    value = encode_batch([Record(b"for guests")], compression="none")
    parts = [m.ProduceRequest.PartitionData(index, value) for index in range(GUARDED_PARTITIONS)]
    first = m.ProduceRequest(None, -1, 3_000, [m.ProduceRequest.TopicData(name=GUARDED, partition_data=parts)])
    until, left = time.monotonic() + 30, set(range(GUARDED_PARTITIONS))
    admin.send_request(51, 0, of_password(APP, APP_PASSWORD))
    admin.send_request(30, 3, m.CreateAclsRequest(rules))
    while left:  # each is led by one of the hosts
        assert time.monotonic() < until, f"no broker takes records for partitions {left} of {GUARDED}"
        for host in hosts:
            with connect(host, PORT, operator, TIMEOUT_S) as kafka:
                response: Any = kafka.call(0, 9, first)
            left -= {part.index for part in response.responses[0].partition_responses if part.error_code == 0}
    admin.close()


if __name__ == "__main__":
    prepare(*json.loads(sys.argv[1]))
