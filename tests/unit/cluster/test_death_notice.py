"""The keeper's proof of death: who may send it, its content, the steps before it is sent, and when
none is sent.
"""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest

from mqd.base import cluster_config
from mqd.cluster.membership import death_notice
from mqd.cluster.membership.death_notice import NOTICE_BYTES_MAX, REPEATS_MS, Instructions, Notice
from mqd.cluster.membership.death_proofs import RECIPIENTS_MAX, final_notice, recipients
from mqd.cluster.metadata.records import BrokerState
from mqd.cluster.metadata.state import MetadataState
from mqd.cluster.raft.messages import ReplicaKey, Voter
from mqd.keeper import proof
from tests.ports import free_port

SECRET = b"a secret of the cluster"
NOTICE = Notice(3, 1 << 40, 7, 1 << 50)


def test_only_a_holder_of_the_key_can_send_a_notice() -> None:
    data = death_notice.seal(SECRET, "cluster", NOTICE)
    assert death_notice.unseal(SECRET, "cluster", data) == NOTICE and len(data) <= NOTICE_BYTES_MAX
    assert (
        death_notice.unseal(b"another", "cluster", data) is None and death_notice.unseal(SECRET, "other", data) is None
    )
    for place in range(len(data)):
        assert (
            death_notice.unseal(SECRET, "cluster", data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]) is None
        )
    for wrong in (
        b"",
        b"mqp1",
        data[:-1],
        data + b"\0",
        data + bytes(300),
        death_notice.seal(SECRET, "cluster", ["no", "notice"]),
    ):  # type: ignore[arg-type]
        assert death_notice.unseal(SECRET, "cluster", wrong) is None


class Control:
    """The part of native.Control that the keeper uses here."""

    generation, broker_epoch, broker_incarnation = 11, 5, 11

    def __init__(self) -> None:
        self.leases: list[tuple[int, int, int]] = []

    def set_broker(self, broker_epoch: int, incarnation: int, lease_deadline_ns: int) -> None:
        self.leases.append((broker_epoch, incarnation, lease_deadline_ns))


class Datagrams:
    """A socket that records the actions before each send."""

    def __init__(self, control: Control, fails: bool = False) -> None:
        self.control, self.fails = control, fails
        self.family = socket.AF_INET
        self.sent: list[tuple[bytes, tuple[str, int]]] = []

    def sendto(self, data: bytes, flags: int, address: tuple[str, int]) -> None:
        assert flags & socket.MSG_DONTWAIT, "the keeper does not wait"
        assert self.control.leases, "the lease is taken back first"
        self.sent.append((data, address))
        if self.fails:
            raise OSError("no way")


@pytest.fixture
def instructions() -> Instructions:
    return Instructions(11, 3, 5, 7, "cluster", (("127.0.0.1", 1), ("::1", 2)))


@pytest.mark.parametrize("fails", [False, True])
def test_the_keeper_revokes_the_lease_then_sends_the_notice_repeatedly(
    tmp_path: Path, instructions: Instructions, fails: bool
) -> None:
    death_notice.write_instructions(tmp_path, instructions)
    control, later = Control(), []
    datagrams = Datagrams(control, fails)
    assert proof.notify_voters({}, tmp_path, control, datagrams, lambda wait_s, call: later.append((wait_s, call)))
    assert control.leases == [(5, 11, 0)]
    assert [wait_s * 1000 for wait_s, _ in later] == pytest.approx(REPEATS_MS[1:])
    for _, call in later:
        call()
    assert len(datagrams.sent) == len(REPEATS_MS) * 2 and len({data for data, _ in datagrams.sent}) == 1, (
        "the same each time: what was sent later would prove something else"
    )
    found = death_notice.unseal(cluster_config.LOOPBACK_KEY, "cluster", datagrams.sent[0][0])
    assert (
        found is not None
        and (found.node_id, found.broker_epoch, found.controller_epoch) == (3, 5, 7)
        and found.sent_ms > 0
    )


def test_a_socket_of_both_address_families_reaches_ipv4_addresses() -> None:
    """A controller listener without a host has one; the recipients' addresses are plain IPv4 ones."""
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as recipient,
        socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as datagrams,
    ):
        recipient.bind(("127.0.0.1", free_port()))
        recipient.settimeout(10)
        try:
            datagrams.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            datagrams.bind(("::", free_port()))
        except OSError as error:
            pytest.skip(f"this machine has no IPv6: {error}")
        instructions = Instructions(11, 3, 5, 7, "cluster", (recipient.getsockname(),))
        proof._send_repeatedly(b"notice", instructions, datagrams, lambda seconds, send: None)
        assert recipient.recv(100) == b"notice"


@pytest.mark.parametrize(
    "change",
    [{"incarnation": 10}, {"broker_epoch": 4}, None],
    ids=["another keeper's", "another registration's", "none"],
)
def test_instructions_that_are_not_for_now_are_not_followed(
    tmp_path: Path, instructions: Instructions, change: dict | None
) -> None:
    death_notice.write_instructions(
        tmp_path, msgspec.structs.replace(instructions, **change) if change is not None else None
    )
    control = Control()
    assert (
        not proof.notify_voters({}, tmp_path, control, Datagrams(control), lambda wait_s, call: None)
        and control.leases == []
    )


@pytest.mark.parametrize("content", [b"", b"{", b'{"incarnation": "x"}', bytes(range(256))])
def test_damaged_orders_are_ignored(tmp_path: Path, content: bytes) -> None:
    (tmp_path / death_notice.INSTRUCTIONS_NAME).write_bytes(content)
    assert death_notice.read_instructions(tmp_path, 11) is None


def test_instructions_are_replaced_and_removed(tmp_path: Path, instructions: Instructions) -> None:
    death_notice.write_instructions(tmp_path, instructions)
    assert death_notice.read_instructions(tmp_path, 11) == instructions
    death_notice.write_instructions(tmp_path, None)
    death_notice.write_instructions(tmp_path, None)
    assert list(tmp_path.iterdir()) == []


# -- the controller alone --------------------------------------------------------------------------


class OldNotice(msgspec.Struct, array_like=True, frozen=True):
    """The notice of the previous version."""

    node_id: int
    broker_epoch: int
    controller_epoch: int
    sent_ms: int


def test_both_versions_understand_each_other() -> None:
    old = OldNotice(3, 5, 7, 9)
    assert death_notice.unseal(SECRET, "c", death_notice.seal(SECRET, "c", old)) == Notice(3, 5, 7, 9, False)  # type: ignore[arg-type]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Notice(3, 5, 7, 9, True)), type=OldNotice) == old


@pytest.mark.parametrize("led", [True, False])
def test_the_end_of_the_controller_alone_is_announced_only_if_it_led(
    tmp_path: Path, instructions: Instructions, led: bool
) -> None:
    """The host keeps its lease: its workers are alive."""
    death_notice.write_instructions(tmp_path, msgspec.structs.replace(instructions, led=led))
    control = Control()
    control.leases.append((0, 0, 0))  # Datagrams requires an entry
    datagrams, later = Datagrams(control), []
    assert (
        proof.notify_voters({}, tmp_path, control, datagrams, lambda wait_s, call: later.append(call), all_ended=False)
        == led
    )
    assert control.leases == [(0, 0, 0)] and len(datagrams.sent) == (2 if led else 0) and bool(later) == led
    if led:
        found = death_notice.unseal(cluster_config.LOOPBACK_KEY, "cluster", datagrams.sent[0][0])
        assert found is not None and (found.node_id, found.broker_epoch, found.controller_epoch, found.led) == (
            3,
            -1,
            7,
            True,
        )


def test_all_processes_ended_with_a_leading_controller(tmp_path: Path, instructions: Instructions) -> None:
    death_notice.write_instructions(tmp_path, msgspec.structs.replace(instructions, led=True))
    datagrams = Datagrams(control := Control())
    assert proof.notify_voters({}, tmp_path, control, datagrams, lambda wait_s, call: None)
    found = death_notice.unseal(cluster_config.LOOPBACK_KEY, "cluster", datagrams.sent[0][0])
    assert found is not None and (found.broker_epoch, found.led) == (5, True)


# -- leftovers -------------------------------------------------------------------------------------


class Quorum:
    """The part of QuorumCore that last words use."""

    def __init__(self, leader: int, epoch: int) -> None:
        self.key, self.leader, self.epoch = ReplicaKey(1, b"d" * 16), leader, epoch
        self.is_leader = leader == 1
        self.voters = tuple(Voter(ReplicaKey(node, b"d" * 16), f"voter{node}", 9094) for node in (1, 2, 3))


def broker(node: int, epoch: int, incarnation: int = 4, controller_host: str = "") -> BrokerState:
    return BrokerState(
        node, "h", 9092, None, epoch, incarnation, {}, controller_host=controller_host, controller_port=7000
    )


def test_the_final_notice_has_the_current_registration_and_epoch() -> None:
    state = MetadataState()
    assert final_notice(Quorum(2, 7), state, 4, None) is None, "no other host counts on this one yet"
    state.brokers[1] = broker(1, 30)
    assert final_notice(Quorum(2, 7), state, 5, None) is None, "that was another life of it"
    following = final_notice(Quorum(2, 7), state, 4, None)
    leading = final_notice(Quorum(1, 8), state, 4, following)
    assert following == Notice(1, 30, 7, 0, False) and leading == Notice(1, 30, 8, 0, True)
    assert final_notice(Quorum(-1, 9), state, 4, leading) == leading, "between two leaders the last word is valid"
    state.brokers[1] = broker(1, 40)
    assert final_notice(Quorum(-1, 9), state, 4, leading) is None, "but not for another registration"


def test_all_hosts_are_notified_and_voters_first() -> None:
    state = MetadataState()
    state.brokers = {node: broker(node, node, controller_host=f"broker{node}") for node in (1, 3, 4, 9)}
    assert recipients(Quorum(1, 8), state) == (
        ("voter2", 9094),
        ("broker3", 7000),
        ("broker4", 7000),
        ("broker9", 7000),
    )
    state.brokers |= {node: broker(node, node, controller_host=f"broker{node}") for node in range(10, 500)}
    assert len(recipients(Quorum(1, 8), state)) == RECIPIENTS_MAX
