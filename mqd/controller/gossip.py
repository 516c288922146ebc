"""Runs the core of gossip: one UDP socket and short TCP exchanges on the controller listener's
address, a timer, and the file that counts this directory's starts.

    gossip = create(profile, secrets, cluster_id, seeds, udp_socket, peers, metadata_dir)
    gossip.on_change = ...
    await gossip.start()                       joins via the seeds, in the background
    gossip.handle(ControllerKnown(...))        or LoadMeasured, UnreachableHint, SeedsChanged,
                                               Forget, ProfileChanged
    await gossip.serve(hello, reader, writer)  a connection with the handshake purpose "gossip"
                                               (Peers' on_stream), until it ends
    await gossip.stop()                        announces this host's departure first

`on_change` receives MemberChanged, ControllerSeen and DuplicateNodeId, in the loop's thread, after
the core has handled the event. All of these are hints.

A TCP exchange, after the handshake of mqd/cluster/membership/handshake.py (purpose "gossip"): the
initiator sends a 4-byte length and a State or StreamPing, and gets a length and a State or
StreamAck; then the exchange ends. Bounds: STATE_BYTES_MAX per message, SERVED_COUNT_MAX served concurrently,
exchange_ms_max each, RESOLVE_COUNT_MAX concurrent name lookups.
"""

import asyncio
import base64
import hashlib
import ipaddress
import random
import socket
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

from mqd import native
from mqd.base import clock, logging
from mqd.base.blocking_queries import in_thread
from mqd.cluster.membership import gossip_events as events
from mqd.cluster.membership.gossip import GossipCore
from mqd.cluster.membership.gossip_events import (
    LeaveDone,
    ProbeStream,
    Profile,
    PushPull,
    SendDatagram,
    Settings,
    StoreLife,
)
from mqd.cluster.membership.gossip_messages import (
    LIFE_MAX,
    MAGIC,
    STATE_BYTES_MAX,
    Refused,
    Seal,
    State,
    StreamAck,
    StreamMessage,
    StreamPing,
    decode_stream,
    encode,
)
from mqd.cluster.membership.handshake import HandshakeFailed, Hello, derive_key
from mqd.controller.peer_streams import Reader, Writer
from mqd.controller.peers import Peers

RECEIVE_BUFFER_BYTES = 1 << 20
SERVED_COUNT_MAX = 32
RESOLVE_COUNT_MAX = 64
RESOLVED_S = 60.0  # a name is looked up again after this time
RESOLVED_COUNT_MAX = 8_192
LEAVE_S_MAX = 3.0

Change = events.MemberChanged | events.ControllerSeen | events.DuplicateNodeId

log = logging.get("controller.gossip")


# -- the life (the number of this directory's starts) ----------------------------------------------


def next_life(path: Path) -> int:
    """The next life: one more than the number in the file, written there before it is used. A
    missing or damaged file counts as 0: a host that remembers a later life reports it when this
    host joins.
    """
    try:
        life = int(path.read_text())
    except (FileNotFoundError, ValueError):
        life = 0
    life = max(0, min(life, LIFE_MAX - 1)) + 1
    store_life(path, life)
    return life


def store_life(path: Path, life: int) -> None:
    """Durable on return. Raises OSError."""
    native.file_replace(path, f"{life}\n".encode())


def directory_bytes(directory_id: str) -> bytes:
    """A directory id in gossip's form: the 16 bytes encoded by its base64url text."""
    try:
        decoded = base64.urlsafe_b64decode(directory_id + "==")
    except ValueError:
        decoded = b""
    return decoded if len(decoded) == 16 else hashlib.sha256(directory_id.encode()).digest()[:16]


# -- connections -----------------------------------------------------------------------------------


async def _read(reader: Reader) -> StreamMessage:
    """Raises OSError, EOFError, Refused."""
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > STATE_BYTES_MAX:
        raise Refused(f"a message of {size} bytes; at most {STATE_BYTES_MAX} are allowed")
    return decode_stream(await reader.readexactly(size))


def _write(writer: Writer, message: StreamMessage) -> None:
    data = encode(message)
    writer.write(len(data).to_bytes(4, "big") + data)


def look_up(host: str, port: int, family: int = 0) -> "asyncio.Future[list[tuple]]":
    """The result of getaddrinfo() for datagrams. Runs in a thread of its own, so that a lookup
    that hangs does not delay others. OSError: no such name; UnicodeError: not a valid name.
    """
    flags = socket.AI_V4MAPPED if family == socket.AF_INET6 else 0  # a host may have only an IPv4 address
    try:
        return in_thread(lambda: socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM, flags=flags))
    except RuntimeError as error:  # no thread is available
        response: asyncio.Future[list[tuple]] = asyncio.get_running_loop().create_future()
        response.set_exception(OSError(str(error)))
        return response


class _Resolver:
    """Resolves host names to socket addresses outside the loop; numeric addresses need no
    resolution. For each name, one lookup at a time runs, and only the newest datagram waits for it.
    """

    def __init__(self, family: int, send: Callable[[bytes, tuple], None]) -> None:
        self._family, self._send = family, send
        # (host, port) -> socket address, loop time after which it is looked up again
        self._addresses: dict[tuple[str, int], tuple[tuple, float]] = {}
        self._waiting: dict[tuple[str, int], bytes] = {}
        self._lookups: dict[tuple[str, int], asyncio.Future[list[tuple]]] = {}

    def send(self, host: str, port: int, data: bytes) -> None:
        if self._family == socket.AF_INET and ":" in host:
            return  # this socket cannot reach an IPv6 address, and asyncio would close it for the attempt
        cached = self._addresses.get((host, port))
        now = asyncio.get_running_loop().time()
        if cached is not None:
            self._send(data, cached[0])
            if now < cached[1]:
                return
        elif (address := self._numeric_address(host, port)) is not None:
            self._cache_address((host, port), address, float("inf"))
            self._send(data, address)
            return
        elif (host, port) in self._waiting or len(self._waiting) < RESOLVE_COUNT_MAX:
            self._waiting[(host, port)] = data
        if len(self._lookups) < RESOLVE_COUNT_MAX and (host, port) not in self._lookups:
            response = self._lookups[(host, port)] = look_up(host, port, self._family)
            response.add_done_callback(lambda response: self._on_looked_up((host, port), response))

    def _numeric_address(self, host: str, port: int) -> tuple | None:
        try:
            number = ipaddress.ip_address(host)
        except ValueError:
            return None
        if number.version == 6:
            return (host, port, 0, 0)
        return (host, port) if self._family == socket.AF_INET else (f"::ffff:{host}", port, 0, 0)

    def _cache_address(self, name: tuple[str, int], address: tuple, until: float) -> None:
        self._addresses.pop(name, None)
        self._addresses[name] = (address, until)
        if len(self._addresses) > RESOLVED_COUNT_MAX:
            del self._addresses[next(iter(self._addresses))]

    def _on_looked_up(self, name: tuple[str, int], response: "asyncio.Future[list[tuple]]") -> None:
        error, data = response.exception(), self._waiting.pop(name, None)
        if self._lookups.pop(name, None) is None:
            return  # stopped
        if error is not None:
            log.debug("a host's name was not found", host=name[0], reason=str(error))
            return
        address = response.result()[0][4]
        self._cache_address(name, address, asyncio.get_running_loop().time() + RESOLVED_S)
        if data is not None:
            self._send(data, address)

    def stop(self) -> None:
        self._lookups.clear()


class Gossip(asyncio.DatagramProtocol):
    """Owns the socket from start() on. Everything runs in the loop's thread."""

    def __init__(self, core: GossipCore, datagrams: socket.socket, peers: Peers, life_path: Path) -> None:
        self.core = core
        self.on_change: Callable[[Change], None] = lambda change: None
        # datagrams of other protocols; unauthenticated bytes
        self.on_other_datagram: Callable[[bytes], None] = lambda data: None
        self._socket, self._peers, self._life_path = datagrams, peers, life_path
        self._transport: asyncio.DatagramTransport | None = None
        self._resolver = _Resolver(datagrams.family, self._send)
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._served_count = 0
        self._ended = False
        self._leave_done = asyncio.Event()

    async def start(self) -> None:
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        self._transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: self, sock=self._socket)
        self.handle(events.Started())

    async def stop(self) -> None:
        """Announces this host's departure, waits until the announcement is sent, closes the socket."""
        if self._transport is None:
            return
        self.handle(events.Leave())
        try:
            async with asyncio.timeout(LEAVE_S_MAX):  # wait_for() may lose a cancellation
                await self._leave_done.wait()
        except TimeoutError:
            pass
        self.abort()

    def abort(self) -> None:
        """Ends without an announcement: other hosts must detect the departure."""
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        self._resolver.stop()
        if self._transport is not None:
            self._transport.close()

    # -- the core ----------------------------------------------------------------------------------

    def handle(self, event: events.Event) -> None:
        if self._ended:
            return
        changes: list[Change] = []
        for effect in self.core.handle(event, clock.monotonic_ms()):
            match effect:
                case SendDatagram():
                    self._resolver.send(effect.host, effect.port, effect.data)
                case PushPull():
                    self._start_task(self._exchange(effect))
                case ProbeStream():
                    self._start_task(self._probe(effect))
                case StoreLife():
                    log.warning("this directory is an old copy: other hosts know of a later start", life=effect.life)
                    store_life(self._life_path, effect.life)
                case LeaveDone():
                    self._leave_done.set()
                case _:
                    changes.append(effect)
        self._set_timer()
        for change in changes:
            self._notify(change)

    def _notify(self, change: Change) -> None:
        if isinstance(change, events.MemberChanged) and change.before != change.member.state:
            log.info(
                "a member's state has changed",
                node=change.member.node_id,
                state=change.member.state,
                before=change.before or "unknown",
                incarnation=change.member.incarnation,
            )
        elif isinstance(change, events.DuplicateNodeId):
            log.warning(
                "two hosts have the same node id",
                node=change.node_id,
                directories=",".join(directory.hex() for directory in change.directory_ids),
            )
        self.on_change(change)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(
            loop.time() + max(0, self.core.due_ms - clock.monotonic_ms()) / 1000, self.handle, events.Tick()
        )

    # -- datagrams ---------------------------------------------------------------------------------

    def datagram_received(self, data: bytes, addr: object) -> None:
        if data.startswith(MAGIC):
            self.handle(events.DatagramReceived(data))
        else:
            self.on_other_datagram(data)

    def error_received(self, exc: Exception) -> None:
        """An ICMP error for a sent datagram. It is ignored: the probe will fail anyway."""

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._ended:
            log.error("gossip's socket ended", reason=str(exc))

    def _send(self, data: bytes, address: tuple) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.sendto(data, address)

    # -- streams -----------------------------------------------------------------------------------

    def _start_task(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _request(self, host: str, port: int, message: StreamMessage, wait_ms: int) -> StreamMessage:
        """Raises OSError, EOFError, Refused, TimeoutError, HandshakeFailed."""
        async with asyncio.timeout(wait_ms / 1000):
            connection = await self._peers.open(host, port, "gossip")
            try:
                _write(connection.writer, message)
                return await _read(connection.reader)
            finally:
                connection.writer.transport.abort()

    async def _exchange(self, effect: PushPull) -> None:
        try:
            response = await self._request(
                effect.host, effect.port, self.core.state(), self.core.settings.exchange_ms_max
            )
        except (OSError, EOFError, Refused, TimeoutError, HandshakeFailed) as error:
            log.debug(
                "states were not exchanged",
                host=effect.host,
                port=effect.port,
                reason=str(error) or type(error).__name__,
            )
            self.handle(events.ExchangeFailed(effect.exchange_id))
            return
        if isinstance(response, State):
            self.handle(events.StateReceived(response, effect.exchange_id))
        else:
            self.handle(events.ExchangeFailed(effect.exchange_id))

    async def _probe(self, effect: ProbeStream) -> None:
        try:
            response = await self._request(
                effect.host, effect.port, StreamPing(effect.node_id, effect.directory_id), effect.wait_ms
            )
        except (OSError, EOFError, Refused, TimeoutError, HandshakeFailed):
            return
        if isinstance(response, StreamAck) and (response.node_id, response.directory_id) == (
            effect.node_id,
            effect.directory_id,
        ):
            self.handle(events.StreamResponded(effect.probe_id))

    async def serve(self, hello: Hello, reader: Reader, writer: Writer) -> None:
        """Answers one message, then closes the connection. Raises nothing."""
        if self._served_count >= SERVED_COUNT_MAX or self._ended:
            writer.transport.abort()
            return
        self._served_count += 1
        try:
            async with asyncio.timeout(self.core.settings.exchange_ms_max / 1000):
                message = await _read(reader)
                if isinstance(message, State):
                    # taken before the peer's state is merged: a joining peer must learn its last known state
                    own_state = self.core.state(wants_response=False)
                    self.handle(events.StateReceived(message))
                    _write(writer, own_state)
                elif isinstance(message, StreamPing) and self.core.is_for_this_host(message):
                    _write(writer, StreamAck(message.node_id, message.directory_id))
                await writer.drain()
                # the other side closes first, so that no part of the response is lost to a reset
                await reader.read(1)
        except (OSError, EOFError, Refused, TimeoutError) as error:
            log.debug("an exchange ended early", reason=str(error) or type(error).__name__)
        finally:
            self._served_count -= 1
            writer.close()


def gossip_keys(secrets: Sequence[bytes]) -> list[bytes]:
    return [derive_key(secret, "gossip") for secret in secrets]


def create(
    profile: Profile,
    secrets: Sequence[bytes],
    cluster_id: str,
    seeds: Sequence[tuple[str, int]],
    datagrams: socket.socket,
    peers: Peers,
    directory: Path,
    settings: Settings | None = None,
) -> Gossip:
    """Returns a Gossip that is not started yet. `secrets`: the cluster's secrets. Messages are sealed
    with the first one, and accepted if sealed with any of them. `directory`: the metadata directory,
    which has the file with the life. Raises OSError.
    """
    life_path = directory / "gossip-life"
    first, *others = gossip_keys(secrets)
    seal = Seal(first, cluster_id, others)
    core = GossipCore(profile, seal, settings or Settings(), random.SystemRandom(), next_life(life_path), seeds)
    return Gossip(core, datagrams, peers, life_path)
