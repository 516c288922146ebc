"""The resources that the keeper creates once and passes to other processes: locks, sockets,
eventfds, shared memory.

They are created in an order that cannot harm a live broker: the locks first, then the sockets. Only
then are the remains of dead brokers removed, and the shared memory created.
"""

from __future__ import annotations

import os
import socket

import msgspec

from mqd import native
from mqd.base import logging
from mqd.base.clock import now_ms
from mqd.base.config import arena_bytes
from mqd.keeper import identity, sockets
from mqd.keeper.settings import CONTROL_ARENA_BYTES, Settings
from mqd.shm import locks, rendezvous, segments

log = logging.get("keeper")


class Resources(msgspec.Struct):
    generation: int
    identity: identity.Identity
    lock_fds: list[int]
    listeners: list[socket.socket]
    addresses: list[tuple[str, int]]  # bound addresses of the listeners
    cluster: sockets.ClusterSockets | None  # None: this host is not in a cluster
    keeper_socket: socket.socket
    local_listener: socket.socket | None  # None: no local clients (local.attachments.max=0)
    rendezvous: list[rendezvous.PublishedLink]  # links by which local clients find the client socket
    eventfds: list[int]
    handoffs: list[tuple[socket.socket, socket.socket]]  # by worker: acceptor's end, worker's end
    control: native.Control
    control_lock_fd: int  # its flock shows other brokers that this one is alive
    control_name: str
    arena_bytes: list[int]  # by endpoint
    segment_fds: list[int]  # in the order described at Welcome.segment_count

    @property
    def endpoint_count(self) -> int:
        return len(self.eventfds)


def _address(listener: socket.socket) -> tuple[str, int]:
    host, port = listener.getsockname()[:2]
    return host, port


def make(settings: Settings) -> Resources:
    """Creates all resources. Raises locks.DirectoryInUse, OSError, sockets.ListenError,
    identity.IdentityError, segments.SegmentError; each message names the remedy.
    """
    places, worker_count = settings.places, settings.worker_count
    lock_fds = locks.lock_directories([places.data_dir, *settings.log_dirs], places.data_dir)
    own_identity = identity.load_or_create(
        places, int(settings.config.get("node.id", "1")), "" if settings.config.get("cluster.seeds") else None
    )
    listeners = sockets.listen_all(settings.config)
    cluster = sockets.listen_cluster(settings.config)
    generation = identity.next_generation(places)
    name_prefix = segments.prefix(places.data_dir)
    if swept := segments.sweep():
        log.info("freed shared memory left behind by killed brokers", count=len(swept))
    endpoint_count = worker_count + 2
    sizes = [arena_bytes(settings.config)] * worker_count + [(CONTROL_ARENA_BYTES, CONTROL_ARENA_BYTES)] * 2
    arenas = {segments.arena_name(name_prefix, endpoint): size for endpoint, size in enumerate(sizes)}
    with segments.taking_over(name_prefix):
        control, control_lock_fd, segment_fds = _make_segments(name_prefix, settings, generation, arenas)
    addresses = [_address(listener) for listener in listeners]
    local_listener, published_links = _listen_local(settings, addresses)
    return Resources(
        generation=generation,
        identity=own_identity,
        lock_fds=lock_fds,
        listeners=listeners,
        addresses=addresses,
        cluster=cluster,
        keeper_socket=sockets.listen_keeper(places.keeper_socket),
        local_listener=local_listener,
        rendezvous=published_links,
        eventfds=[os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(endpoint_count)],
        handoffs=[sockets.handoff_pair() for _ in range(worker_count)],
        control=control,
        control_lock_fd=control_lock_fd,
        control_name=segments.control_name(name_prefix),
        arena_bytes=[size_bytes for _, size_bytes in sizes],
        segment_fds=segment_fds,
    )


def _make_segments(
    name_prefix: str, settings: Settings, generation: int, arenas: dict[str, tuple[int, int]]
) -> tuple[native.Control, int, list[int]]:
    """Creates all segments. Returns the control segment, the descriptor of its flock, and the
    descriptors for other processes. `arenas`: name -> (reserved bytes, total bytes). If it fails,
    it leaves no segment behind.
    """
    segments.clean(name_prefix)
    try:
        memory = segments.create(segments.control_name(name_prefix), native.control_size_bytes())
        control_lock_fd = segments.lock_control_segment(segments.control_name(name_prefix))
        control = native.Control.format(memory, settings.worker_count, identity.boot_id(), generation, now_ms())
        control.log_level = logging.SYSLOG_OF_LEVEL[settings.config.get("logging.level", "info")]
        links = segments.create(segments.links_name(name_prefix), native.links_size_bytes(len(arenas)))
        native.links_format(links, len(arenas))
        for name, (reserved_bytes, size_bytes) in arenas.items():
            segments.create(name, size_bytes, reserved_bytes).close()
        fds = [
            segments.open_descriptor(segments.control_name(name_prefix)),
            segments.open_descriptor(segments.control_name(name_prefix), writable=False),
            *(segments.open_descriptor(name) for name in (segments.links_name(name_prefix), *arenas)),
        ]
    except BaseException:
        segments.clean(name_prefix)
        raise
    return control, control_lock_fd, fds


def _listen_local(
    settings: Settings, addresses: list[tuple[str, int]]
) -> tuple[socket.socket | None, list[rendezvous.PublishedLink]]:
    """Returns the client socket, if there is one, and the links that announce it to clients."""
    path = settings.places.client_socket
    if int(settings.config.get("local.attachments.max", "1024")) == 0:
        path.unlink(missing_ok=True)
        return None, []
    listener = sockets.listen_local(path, int(settings.config.get("local.socket.permissions", "0600"), 8))
    published = rendezvous.publish(addresses, path)
    if not published:
        log.warning(
            "local clients cannot discover this broker through bootstrap.servers: none of the directories is writable,"
            " or another broker has links with the same names; local clients use TCP unless their mqd.socket.path is"
            " this socket",
            directories=", ".join(map(str, rendezvous.directories())),
            socket=str(path),
        )
    return listener, published


def remove(settings: Settings, resources: Resources) -> None:
    """Removes the resources at shutdown: the names first, the locks last. Processes that are still
    shutting down keep valid mappings.
    """
    for listener in resources.listeners:
        listener.close()
    if resources.cluster is not None:
        resources.cluster.close()
    rendezvous.withdraw(resources.rendezvous)
    if resources.local_listener is not None:
        resources.local_listener.close()
    resources.keeper_socket.close()
    for path in (settings.places.client_socket, settings.places.keeper_socket, settings.places.broker_json):
        path.unlink(missing_ok=True)
    segments.clean(segments.prefix(settings.places.data_dir))
    try:
        from mqd.shm import credits  # not needed before the end

        credits.remove(resources.control_name)
    except Exception as error:  # the locks must be released in any case
        log.warning("the semaphores of max.connections could not be removed", error=str(error))
    for fd in resources.lock_fds:
        os.close(fd)
