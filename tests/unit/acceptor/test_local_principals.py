"""The principal of a process on this host, by its user id."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading

import pytest

from mqd import native
from mqd.acceptor.local.clients import HANDOFF, HELLO, LAYOUT_MAGIC, LAYOUT_VERSION, WELCOME, LocalClients
from mqd.acceptor.local.principals import CACHE_S, LocalPrincipals
from mqd.security.acl import Operation, ResourceType
from mqd.security.authorizer import from_config
from mqd.security.principal import BROKER, user

LOGINS = {7: "alice", 8: "Bob", 9: "x" * 300}
ON = {"authorizer.class.name": "standard"}


def principals(config: dict[str, str], clock=lambda: 0.0) -> LocalPrincipals:
    return LocalPrincipals(config, own_uid=3, login_name_of=LOGINS.__getitem__, clock=clock)


def test_without_rights_no_process_is_mapped() -> None:
    assert [principals({}).find(uid) for uid in (3, 7, 99)] == ["", "", ""]


def test_a_process_is_its_user() -> None:
    found = principals(ON)
    assert [found.find(uid) for uid in (7, 8)] == ["User:alice", "User:Bob"]
    assert found.find(99) is None, "not in the user database"
    assert found.find(9) is None, "no name that a user may have"


def test_mapping_rules_decide() -> None:
    found = principals({**ON, "local.principal.mapping.rules": "RULE:a(.*)/local-$1/U"})
    assert found.find(7) == "User:LOCAL-LICE"
    assert found.find(8) is None, "no rule matches"


def test_the_brokers_own_user_has_all_rights_and_its_name_is_reserved() -> None:
    assert principals(ON).find(3) == BROKER
    rules = from_config(ON)
    assert rules is not None and rules.allows(BROKER, "127.0.0.1", Operation.WRITE, ResourceType.TOPIC, "any")
    assert user("broker") != BROKER and not user("x").startswith(BROKER.partition(":")[0] + ":")
    assert not rules.allows(user("broker"), "127.0.0.1", Operation.WRITE, ResourceType.TOPIC, "any")


def test_a_renamed_user_gets_its_new_name_after_a_while() -> None:
    now = [0.0]
    found = principals(ON, lambda: now[0])
    assert found.find(7) == "User:alice"
    LOGINS[7] = "alicia"
    try:
        assert found.find(7) == "User:alice"
        now[0] = CACHE_S
        assert found.find(7) == "User:alicia"
    finally:
        LOGINS[7] = "alice"


def hello() -> bytes:
    return HELLO.pack(LAYOUT_MAGIC, LAYOUT_VERSION, 256, native.local_abi_hash(), 1 << 20, 1 << 16, 0, b"test", b"")


@pytest.mark.parametrize("principal", ["User:alice", "", None])
def test_the_worker_is_notified_or_the_client_is_refused(principal: str | None) -> None:
    given, taken = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    uid = os.geteuid()
    known = {uid: "" if principal is None else principal.removeprefix("User:")}
    found = LocalPrincipals(ON if principal != "" else {}, own_uid=uid + 1, login_name_of=known.__getitem__)
    clients = LocalClients(None, [given], lambda _: 0, lambda _: True, (), found)
    clients._forget = lambda _: None  # type: ignore[method-assign]  # it was accepted elsewhere

    async def play() -> None:
        client.send(hello())
        clients._on_hello(ours)
        while clients._awaiting_principal:
            await asyncio.sleep(0.001)

    asyncio.run(play())
    if principal is None:
        magic, _, _, error, reason = WELCOME.unpack(client.recv(4096))
        assert magic == LAYOUT_MAGIC and error == native.E_INVALID
        assert b"local.principal.mapping.rules" in reason
        taken.setblocking(False)
        with pytest.raises(BlockingIOError):
            taken.recv(4096)
    else:
        message = taken.recv(4096)
        assert message[HANDOFF.size :].decode() == principal
        assert struct.unpack_from("<I", message)[0] == 0x31434E4F
    for one in (given, taken, client, ours):
        one.close()


def test_a_lookup_that_hangs_stops_no_other_work() -> None:
    """NSS may wait for a directory service; heartbeats and metadata must not."""
    released = threading.Event()
    given, taken = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def login(uid: int) -> str:
        assert released.wait(20)
        return "alice"

    found = LocalPrincipals(ON, own_uid=os.geteuid() + 1, login_name_of=login)
    clients = LocalClients(None, [given], lambda _: 0, lambda _: True, (), found)
    clients._forget = lambda _: None  # type: ignore[method-assign]

    async def play() -> None:
        client.send(hello())
        clients._on_hello(ours)
        assert clients._awaiting_principal == {ours}
        released.set()
        while clients._awaiting_principal:
            await asyncio.sleep(0.001)

    asyncio.run(play())
    assert taken.recv(4096)[HANDOFF.size :] == b"User:alice"
    for one in (given, taken, client, ours):
        one.close()


def test_a_login_that_is_named_like_a_super_user_is_refused():
    """The right to create accounts on this machine must not imply administration rights in the
    broker.
    """
    config = {"authorizer.class.name": "standard", "super.users": "User:admin"}
    found = LocalPrincipals(config, own_uid=3, login_name_of={1: "admin", 2: "alice"}.__getitem__)
    assert found.find(1) is None and found.find(2) == "User:alice"
