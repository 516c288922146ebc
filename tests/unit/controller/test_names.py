"""Host names that the controller looks up: a lookup that hangs delays nothing else."""

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from mqd.cluster.host import core as host_core
from mqd.cluster.membership import death_notice, death_proofs
from mqd.controller import gossip
from mqd.controller.host_gossip import HostGossip
from mqd.controller.shell import Shell


class Resolver:
    """Replaces getaddrinfo(). `dead`: names without a response until they are released; `unknown`:
    names that do not exist.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dead, self.unknown = {"dead.example"}, {"unknown.example"}
        self.requested: list[str] = []
        self._close_held = threading.Event()
        monkeypatch.setattr(socket, "getaddrinfo", self.look_up)

    def look_up(self, host: str, port: int, *_arguments: object, **_named: object) -> list[tuple]:
        self.requested.append(host)
        if host in self.dead:
            assert self._close_held.wait(60)
        if host in self.unknown:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (f"10.0.0.{len(host)}", port))]

    def let_go(self) -> None:
        self._close_held.set()


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch):
    found = Resolver(monkeypatch)
    yield found
    found.let_go()


def run(scenario, resolver: Resolver) -> None:
    async def bounded() -> None:
        try:
            async with asyncio.timeout(10):
                await scenario
        finally:
            resolver.let_go()  # otherwise shutdown waits for an executor's threads

    asyncio.run(bounded())


async def until(holds) -> None:
    while not holds():
        await asyncio.sleep(0.001)


def test_a_name_has_one_lookup_at_a_time_and_delays_no_other(resolver: Resolver) -> None:
    async def scenario() -> None:
        sent: list[tuple[bytes, tuple]] = []
        names = gossip._Resolver(socket.AF_INET, lambda data, address: sent.append((data, address)))
        for _ in range(100):
            names.send("dead.example", 9093, b"a")
            await asyncio.sleep(0)
        names.send("sound.example", 9093, b"b")
        names.send("sound.example", 9093, b"c")
        await until(lambda: sent)
        assert sent == [(b"c", ("10.0.0.13", 9093))] and resolver.requested.count("dead.example") == 1
        names.send("dead.example", 9093, b"d")
        resolver.let_go()
        await until(lambda: len(sent) == 2)
        assert sent[1] == (b"d", ("10.0.0.12", 9093)) and resolver.requested.count("dead.example") == 1

    run(scenario(), resolver)


def test_an_ipv6_address_does_not_end_an_ipv4_socket(resolver: Resolver) -> None:
    """asyncio closes a datagram socket for good after the TypeError of an address of another family."""

    async def scenario() -> None:
        sent: list[tuple] = []
        names = gossip._Resolver(socket.AF_INET, lambda data, address: sent.append(address))
        names.send("::1", 9093, b"a")
        names.send("127.0.0.1", 9093, b"b")
        assert sent == [("127.0.0.1", 9093)] and not names._lookups

    run(scenario(), resolver)


def test_a_name_that_is_not_found_is_looked_up_again(resolver: Resolver) -> None:
    async def scenario() -> None:
        sent: list[bytes] = []
        names = gossip._Resolver(socket.AF_INET, lambda data, address: sent.append(data))
        names.send("unknown.example", 1, b"a")
        await until(lambda: not names._lookups)
        assert not sent
        resolver.unknown.clear()
        names.send("unknown.example", 1, b"b")
        await until(lambda: sent)
        assert sent == [b"b"]

    run(scenario(), resolver)


def test_hung_lookups_delay_neither_instructions_nor_gossips_input(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = (("dead.example", 1), ("unknown.example", 2), ("sound.example", 3))
    instructions: list[death_notice.Instructions | None] = []
    monkeypatch.setattr(death_proofs, "recipients", lambda *_arguments: places)
    monkeypatch.setattr(
        death_proofs,
        "final_notice",
        lambda *_arguments: SimpleNamespace(node_id=1, broker_epoch=2, controller_epoch=3, led=True),
    )
    monkeypatch.setattr(death_notice, "write_instructions", lambda _directory, written: instructions.append(written))

    async def scenario() -> None:
        fed: list[str] = []
        one = object.__new__(HostGossip)
        one._shell = SimpleNamespace(quorum=SimpleNamespace(core=None), metadata=SimpleNamespace(committed=None))  # type: ignore[assignment]
        one._recipients, one._resolved, one._lookups = (), {}, {}
        one._incarnation, one._cluster_id, one._run_dir, one._instructions, one._final_notice = (
            1,
            "cluster",
            Path("/nowhere"),
            None,
            None,
        )
        one._gossip_controller, one._gossip_seeds, one._gossip_load = (
            (lambda: None),
            (lambda: fed.append("seeds")),
            (lambda: fed.append("load")),
        )  # type: ignore[method-assign]
        feeding = asyncio.create_task(one._update_periodically())
        await until(lambda: fed and instructions)
        assert (
            fed[:2] == ["seeds", "load"]
            and instructions[-1] is not None
            and instructions[-1].addresses == (("10.0.0.13", 3),)
        )
        resolver.let_go()
        await until(lambda: len(instructions) == 2)
        assert instructions[-1] is not None and instructions[-1].addresses == (("10.0.0.12", 1), ("10.0.0.13", 3))
        feeding.cancel()

    run(scenario(), resolver)


@pytest.mark.parametrize("fails", [False, True])
def test_a_doubt_is_recorded_at_once(resolver: Resolver, caplog: pytest.LogCaptureFixture, fails: bool) -> None:
    """Even when the loop's own threads are all busy; and if it cannot be recorded, that is
    reported.
    """

    async def scenario() -> None:
        doubted: list[int] = []

        def doubt(epoch: int) -> None:
            doubted.append(epoch)
            if fails:
                raise OSError("no space left")

        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        looking = asyncio.ensure_future(loop.getaddrinfo("dead.example", 1))
        await until(lambda: resolver.requested)
        one = object.__new__(Shell)
        one.metadata_ready = loop.create_future()
        one.metadata_ready.set_result(None)
        one.host = SimpleNamespace(handle=lambda event, now: [host_core.ReportFailures({"t-0": "a flush failed"})])  # type: ignore[assignment]
        one.on_broker = lambda event: None  # type: ignore[method-assign]
        one._published_broker = SimpleNamespace(broker_epoch=7)  # type: ignore[assignment]
        one.on_doubt = doubt
        one.on_host(None)  # type: ignore[arg-type]
        await until(lambda: doubted)
        assert doubted == [7]
        if fails:
            await until(lambda: any("could not be recorded" in record.getMessage() for record in caplog.records))
        looking.cancel()

    run(scenario(), resolver)
