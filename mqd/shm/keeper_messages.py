"""The messages between the keeper and the processes of its host, over `run/keeper.sock`
(SOCK_SEQPACKET, one msgpack message per packet).

A process connects, sends Hello, receives Welcome with its file descriptors (SCM_RIGHTS), later
sends Ready, and then only receives notices such as Death and Shutdown. The socket stays open as
long as the process lives: its closing, together with the pidfd, proves to the keeper that the
process has died. Tools (`mqd status`) connect and send StatusQuery.
"""

import msgspec

# Exit statuses of processes. CANNOT_START: a restart would fail in the same way. KEEPER_LOST: the
# keeper has died; supervisord restarts the keeper and this process.
CANNOT_START, KEEPER_LOST = 2, 3


class Hello(msgspec.Struct, tag=True, frozen=True):
    role: str  # "acceptor" | "controller" | "worker"
    index: int  # worker index, 0 for the others
    pid: int
    abi_hash: int


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """The response to Hello. It is sent with these descriptors, in this order:

    all processes   one eventfd per endpoint
    worker          its end of the hand-off socket; the locked directories
    acceptor        its end of the hand-off socket of every worker; the listening sockets; the
                    socket of local clients; the inter-broker listener, if other hosts may connect
    controller      its TCP listener and its UDP socket, if other hosts may connect
    all processes   the shared memory segments
    """

    endpoint: int
    generation: int
    worker_count: int
    control_name: str  # POSIX shared memory name, after which this broker's semaphores are named
    arena_bytes: list[int]  # by endpoint
    keeper_pid: int
    supervisor_pid: int
    # acceptor: bound addresses (host, port) of the listening sockets
    listeners: list[tuple[str, int]]
    eventfd_count: int
    handoff_count: int
    listener_count: int
    lock_count: int
    segment_count: int  # control segment, the same read-only, links, arenas by endpoint
    config: dict[str, str]  # the broker's properties, resolved and validated
    local_listener_count: int = 0
    cluster_socket_count: int = 0
    # Address announced to other hosts; None: other hosts cannot reach this one.
    controller_listener: tuple[str, int] | None = None
    inter_broker_listener: tuple[str, int] | None = None
    tls_secret: bytes = b""  # worker: the secret from which the keys of session tickets are derived
    supervisor_is_own: bool = True  # supervisord runs nothing but this broker, and ends with it


class Refused(msgspec.Struct, tag=True, frozen=True):
    reason: str


class Ready(msgspec.Struct, tag=True, frozen=True):
    detail: str = ""
    confinement: str = ""  # restrictions in force, as text


class Waiting(msgspec.Struct, tag=True, frozen=True):
    """Sent by a process that is not ready yet: what it waits for, as text."""

    text: str


class Death(msgspec.Struct, tag=True, frozen=True):
    """Proof of death, from the kernel. `generation` is the dead process's; its successor has a
    different one.
    """

    role: str
    index: int
    endpoint: int
    generation: int
    pid: int


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    reason: str


class Leave(msgspec.Struct, tag=True, frozen=True):
    """Sent to the controller of a host in a cluster, before Shutdown: move this host's leaderships
    to other hosts, then send Left. The other processes continue in the meantime.
    """

    reason: str


class Left(msgspec.Struct, tag=True, frozen=True):
    """Sent by the controller when it has finished with Leave. It may have failed to move some
    leaderships: the shutdown continues in any case.
    """


class Probe(msgspec.Struct, tag=True, frozen=True):
    """Sent to a process that serves: its event loop answers with Alive."""


class Alive(msgspec.Struct, tag=True, frozen=True):
    pass


class ProbeQuery(msgspec.Struct, tag=True, frozen=True):
    """Sent by supervisord (mqd/keeper/systemd.py) every few seconds: have all processes answered their
    probes within `within_s`? The keeper responds immediately, and probes the processes for the next query.
    """

    within_s: float


class Probed(msgspec.Struct, tag=True, frozen=True):
    silent: list[str]  # names of the processes that have not answered


class StatusQuery(msgspec.Struct, tag=True, frozen=True):
    pass


class SetLogLevel(msgspec.Struct, tag=True, frozen=True):
    level: str  # error | warning | info | debug


class ProcessStatus(msgspec.Struct, frozen=True):
    name: str  # mqd-worker-0
    role: str
    pid: int  # 0 if it has ended
    state: str  # starting | running | dead
    started_ms: int
    restart_count: int
    confinement: str = ""


class Status(msgspec.Struct, tag=True, frozen=True):
    ready: bool
    host: str
    port: int
    started_ms: int
    data_dir: str
    processes: list[ProcessStatus]
    connections: list[int]  # per worker
    partitions: list[int]  # per worker
    log_level: str
    metrics_port: int
    local_clients: list[int] = []  # attached through shared memory, per worker; counted in connections too
    local_bytes: list[int] = []  # size of these clients' shared memory, per worker
    metrics_url: str = ""
    client_socket: str = ""  # where local clients attach; "" = nowhere


ToKeeper = Hello | Ready | Waiting | Left | Alive | ProbeQuery | StatusQuery | SetLogLevel
FromKeeper = Welcome | Refused | Death | Leave | Shutdown | Probe | Probed | Status
