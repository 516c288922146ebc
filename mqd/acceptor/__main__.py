"""`python -m mqd.acceptor`: accepts connections, and answers the requests that the reactors do not
handle. The data directory comes from MQD_DATA_DIR.

Exit status: 0 after a clean shutdown (on request, by SIGTERM, or because the keeper or supervisord
ended), otherwise 1; supervisord then restarts the process. Nothing is lost by a restart: the keeper
holds the listening sockets; the workers hold the connections and the requests not yet answered.
"""

import gc

gc.disable()  # no garbage collection while modules load: it took an eighth of the start-up time

import asyncio
import contextlib
import os
import signal
import socket
import sys
from functools import partial
from typing import Any

from mqd import native
from mqd.acceptor import authentication, dispatch
from mqd.acceptor.accepting import Acceptor
from mqd.acceptor.broker import Broker
from mqd.acceptor.broker_state import Origin
from mqd.acceptor.certificates import Certificates
from mqd.acceptor.checks import Checks
from mqd.acceptor.connection_limits import ConnectionLimits
from mqd.acceptor.controller_client import ControllerClient
from mqd.acceptor.dead_letters import PRODUCE, DeadLetters
from mqd.acceptor.handlers.cluster import api_versions
from mqd.acceptor.handlers.records import list_offsets
from mqd.acceptor.interbroker import queue_deletion, share_states
from mqd.acceptor.interbroker.client import Peers
from mqd.acceptor.interbroker.server import SERVED_APIS, InterbrokerServer
from mqd.acceptor.link import Link
from mqd.acceptor.local import relay as relaying
from mqd.acceptor.local.clients import LocalClients
from mqd.acceptor.local.principals import LocalPrincipals
from mqd.acceptor.metadata import Metadata
from mqd.acceptor.metrics.observer import Observer
from mqd.acceptor.schedules import TimerStarter, start_by_supervisord
from mqd.acceptor.transactions import create_coordinators
from mqd.base import logging, paths, watchdog
from mqd.base.listeners import parse_listeners
from mqd.cluster.membership import credentials
from mqd.native import ProcessState
from mqd.security import confinement
from mqd.security.audit import Audit
from mqd.shm import rendezvous
from mqd.shm.attach import KeeperClient, KeeperError

# Loaded modules are never freed: later collections need not examine them.
gc.freeze()
gc.enable()


def _listeners(client: KeeperClient) -> list[tuple[str, str, int]]:
    """(name, host, port) of each listener as bound, in the order of listener ids."""
    names = [listener.name for listener in parse_listeners(client.config)]
    return [(name, host, port) for name, (host, port) in zip(names, client.welcome.listeners, strict=True)]


async def run(client: KeeperClient, layout: paths.Layout) -> int:
    log = logging.get("acceptor")
    loop = asyncio.get_running_loop()
    end_reason: asyncio.Future[str] = loop.create_future()

    def end(reason: str) -> None:
        if not end_reason.done():
            end_reason.set_result(reason)

    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, end, signal.Signals(signal_number).name)
    metadata, first_image = Metadata(), asyncio.Event()
    limits = ConnectionLimits(client.config, [name for name, _, _ in _listeners(client)])

    def on_metadata(message) -> None:
        features = metadata.features
        metadata.apply(message)
        limits.update(metadata)
        if first_image.is_set() and metadata.features != features:
            api_versions.publish(client.control, metadata)
        first_image.set()
        for topic, partition in metadata.take_unclean_elections():
            log.error(
                "a leader was elected from outside the in-sync set; records that it lacks are lost, even"
                " acknowledged ones",
                topic=topic,
                partition=partition.index,
                leader=partition.leader,
                leader_epoch=partition.leader_epoch,
            )
        if broker.coordinators is not None:
            broker.coordinators.on_metadata(message)
        timer.on_metadata(message)

    def in_service() -> bool:
        return metadata.has_broker_in_service(broker.node_id, client.control.generation)

    controller = ControllerClient(layout.controller_socket, client.generation, on_metadata, in_service)
    broker = Broker(client.config, _listeners(client), metadata, controller, client.control)
    timer = TimerStarter(client.config, metadata, broker.node_id, layout.run_dir, start_by_supervisord)
    broker.quotas = native.Quotas(client.control)
    broker.authentication = authentication.from_config(client.config, metadata, broker.tokens, layout.data_dir)
    broker.audit = Audit(layout.logs_dir / "audit.log")
    metrics = Observer(
        broker, native.Control.attach(client.control.buffer), client.welcome.worker_count, layout.run_dir
    )
    assert client.arena is not None  # each process that answers requests has one
    link = Link(
        broker,
        client.control,
        client.endpoint,
        client.eventfds[client.endpoint_index],
        client.arena,
        client.arenas,
        client.welcome.worker_count,
        metrics,
    )
    metrics.watch_arena(lambda: link.arena_extents)
    certificates = Certificates(client.config)
    metrics.certificate_expiries_s = lambda: certificates.expiries_s
    coordinators, transactions = create_coordinators(broker, link, client.generation)
    broker.coordinators, broker.transactions = coordinators, transactions
    link.appends = coordinators.log
    checks = link.checks = Checks(transactions)
    link.share_states = coordinators.share_states
    coordinators.share_states.first_offset_since = partial(list_offsets.first_offset_since, broker)

    async def serve_client(origin: Origin, frame: bytes) -> bytes | None:
        return (await dispatch.respond(broker, origin, frame, 0, metrics)).body

    dead_letters = broker.dead_letters = DeadLetters(broker, coordinators, link, serve_client)
    coordinators.share_states.respond_to_owner = dead_letters.respond_to_owner
    handoffs = [socket.socket(fileno=fd) for fd in client.handoff_fds]
    control = client.control

    def is_running(worker: int) -> bool:
        return control.endpoint_state(worker) == ProcessState.RUNNING

    interbroker_server, peers, relay_peers, credentials_watch = None, None, None, None
    if client.cluster_sockets:
        host_credentials = credentials.load(client.config)
        credentials_watch = loop.create_task(host_credentials.watch())
        peers = Peers(metadata, broker.node_id, host_credentials)
        transactions.connect(peers)
        coordinators.share_states.peers = coordinators.queue_deletion.peers = dead_letters.peers = peers
        relay_peers = Peers(metadata, broker.node_id, host_credentials)
        broker.relaying = relaying.Relaying(broker, coordinators, relay_peers)

        async def serve(frame: bytes, node: int) -> bytes | None:
            api_key = int.from_bytes(frame[:2], "big") if len(frame) >= 2 else -1
            if api_key == relaying.ENVELOPE:
                return await relaying.serve(frame, serve_client)
            if api_key in share_states.APIS:
                return await coordinators.share_states.serve(frame)
            if api_key == queue_deletion.SHARE_STARTS:
                return await coordinators.queue_deletion.serve(frame)
            if api_key == PRODUCE:
                return await dead_letters.serve(frame)
            if api_key not in SERVED_APIS:
                return None
            outcome = await dispatch.respond(broker, Origin(peer_node=node), frame, 0)
            return outcome.body

        interbroker_server = InterbrokerServer(
            client.cluster_sockets[0], handoffs, host_credentials, metadata, broker.node_id, serve
        )
    acceptor = Acceptor(client.listeners, handoffs, control.connection_count, is_running, limits)
    servers = rendezvous.server_names(listener.getsockname()[:2] for listener in client.listeners)
    local = LocalClients(
        client.local_listener,
        handoffs,
        lambda worker: control.local_usage(worker)[0],
        is_running,
        servers,
        LocalPrincipals(client.config),
    )

    def on_death(death) -> None:
        if death.role == "worker":
            link.on_worker_death(death.index)
            coordinators.on_worker_death(death.index)

    client.watch(loop, on_death, end, end)
    receiving = loop.create_task(controller.run())
    image_wait = loop.create_task(first_image.wait())
    startup_waits: set[asyncio.Future[Any]] = {image_wait, receiving, end_reason}
    await asyncio.wait(startup_waits, return_when=asyncio.FIRST_COMPLETED)
    image_wait.cancel()
    if metadata.version >= 0 and not end_reason.done():
        api_versions.publish(control, metadata)
        port = metrics.start(client.config, broker.port)
        link.start(loop)
        coordinators.start()
        acceptor.start(loop)
        if interbroker_server is not None:
            interbroker_server.start(loop)
        local.start(loop)
        client.report_ready(f"metrics_port={port}")
        timer.start(loop)
        watchdog.start(loop, "acceptor")
        certificates_watch = loop.create_task(certificates.run())
        certificates_watch.add_done_callback(_log_failure)
        log.info(
            "the acceptor is ready",
            listeners=", ".join(f"{name}://{host}:{number}" for name, host, number in broker.listeners),
            metrics_port=port,
        )
        serving_waits: set[asyncio.Future[Any]] = {receiving, end_reason}
        await asyncio.wait(serving_waits, return_when=asyncio.FIRST_COMPLETED)
    acceptor.stop()
    if (
        interbroker_server is not None
        and peers is not None
        and relay_peers is not None
        and credentials_watch is not None
    ):
        credentials_watch.cancel()
        interbroker_server.stop()
        peers.close()
        relay_peers.close()
    local.stop()
    timer.stop()
    dead_letters.stop()
    coordinators.stop()
    link.stop()
    checks.close()
    broker.authentication.close()
    receiving.cancel()
    if not end_reason.done():
        error = receiving.exception() if receiving.done() and not receiving.cancelled() else None
        log.error("acceptor exits", reason=f"the controller's messages cannot be processed: {error!r}")
        return 1
    log.info("acceptor ended", reason=end_reason.result())
    return client.exit_status


def main() -> int:
    paths.keep_private()
    log = logging.setup("acceptor")
    layout = paths.layout(paths.default_data_dir())
    try:
        client = KeeperClient.connect(layout.run_dir, "acceptor")
    except (KeeperError, OSError) as error:
        log.error("cannot attach to the keeper", reason=str(error))
        return 1
    logging.setup("acceptor", 0, client.config)
    logging.follow(lambda: client.control.log_level)
    client.confinement = confinement.confine(client.config, layout)
    log.info("process confined", in_force=client.confinement)
    asyncio.run(_run_and_exit(client, layout))
    return 1  # not reached


def _log_failure(task: asyncio.Task[None]) -> None:
    """A failure to watch certificates does not end the acceptor."""
    if not task.cancelled() and task.exception() is not None:
        logging.get("acceptor").error(
            "changes of certificates are no longer noticed; restart the acceptor", reason=repr(task.exception())
        )


async def _run_and_exit(client: KeeperClient, layout: paths.Layout) -> None:
    """Exits without closing the loop or the interpreter, which would wait for threads that a disk or
    a name server blocks.
    """
    status = 1
    try:
        status = await run(client, layout)
    except (OSError, KeeperError) as error:
        logging.get("acceptor").error("the acceptor cannot serve", reason=str(error))
    except Exception:
        logging.get("acceptor").exception("the acceptor cannot serve")
    with contextlib.suppress(OSError):  # stderr may be a file on a full disk
        sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
