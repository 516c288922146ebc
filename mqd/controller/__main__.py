"""`python -m mqd.controller`: the controller of this host, a quorum of one. The data directory comes from MQD_DATA_DIR.

Exit status: 0 after a clean end (shutdown, SIGTERM, or the keeper or supervisord ended), 2 when it refuses to start (corrupt metadata, a directory of another broker),
1 when a flush failed or for a fault of its own; then supervisord starts it again.
"""

import asyncio
import signal
import sys
from base64 import urlsafe_b64encode

from mqd import native
from mqd.base import config as configuration
from mqd.base import logging, paths
from mqd.cluster import metadata_core
from mqd.cluster.config_rules import ConfigRules
from mqd.cluster.host_core import HostCore
from mqd.cluster.metadata_core import MetadataCore
from mqd.cluster.metadata_log import MetadataCorrupt, MetadataLog
from mqd.cluster.metadata_records import BrokerState
from mqd.controller import directories, quotas
from mqd.controller.directories import DirectoryRefused
from mqd.controller.server import Server
from mqd.controller.shell import Shell, new_topic_id
from mqd.shm.attach import KeeperClient, KeeperError


class Refused(RuntimeError):
    """The controller cannot start here; the message names the way out."""


def _new_id() -> str:
    return urlsafe_b64encode(new_topic_id()).rstrip(b"=").decode()


def _cluster_id(places: paths.Layout) -> str:
    try:
        return directories.read_properties(places.meta_properties).get("cluster.id", "")
    except OSError:
        return ""


def _check_identity(state_cluster_id: str, own: str, places: paths.Layout, client: KeeperClient, log_dirs: list[str]) -> None:
    if state_cluster_id and own and state_cluster_id != own:
        raise Refused(f"{places.metadata_dir} is of cluster {state_cluster_id}, {places.meta_properties} says {own}: the two do not belong together; restore one of them")
    if not state_cluster_id:
        # With empty metadata every partition would be nobody's; whoever has records must not lose their names silently.
        full = [path for path in log_dirs if directories.holds_partitions(path)]
        if full:
            raise Refused(
                f"{places.metadata_dir} is empty, but {full[0]} holds partitions: the metadata was lost. Restore {places.metadata_dir} from a copy, or move the partitions away"
            )


def _address(config: dict[str, str]) -> configuration.Listener:
    listener = configuration.parse_listeners(config)[0]
    return configuration.advertised_listeners(config).get(listener.name, listener)


async def run(client: KeeperClient, places: paths.Layout) -> int:
    log = logging.get("controller")
    config = client.config
    node_id = int(config["node.id"])
    log_dirs = [path for path in config["log.dirs"].split(",") if path]
    metadata_log = MetadataLog(places.metadata_dir)
    recovered = metadata_log.open()
    state = recovered.state
    if recovered.cut_bytes:
        log.warning("the last write to the metadata log was interrupted; its torn end was cut off", bytes=recovered.cut_bytes)
    own_cluster_id = _cluster_id(places) or state.cluster_id or _new_id()
    _check_identity(state.cluster_id, own_cluster_id, places, client, log_dirs)
    broker = state.brokers.get(node_id, BrokerState(node_id, "", 0, None, 0, 0, {}))
    used = {directory for node, directory in state.partition_counts if node == node_id}
    settled = directories.settle(log_dirs, own_cluster_id, node_id, broker.directories, used, _new_id)
    absent = used - {directory.directory_id for directory in settled}
    for directory_id in sorted(absent):
        log.error("a log directory with partitions is not in log.dirs; they are offline", directory_id=directory_id, last_seen=broker.directories.get(directory_id, "?"))
    core = MetadataCore(state, node_id, ConfigRules(config), new_topic_id, native.PARTITION_SLOT_COUNT)
    index_of = {directory.directory_id: index for index, directory in enumerate(settled) if directory.directory_id and directory.usable}
    host = HostCore(node_id, node_id, client.welcome.worker_count, native.PARTITION_SLOT_COUNT, index_of)
    shell = Shell(core, host, metadata_log, client.control, settled, quotas.burst_ns(config))
    address = _address(config)
    incarnation = client.control.generation
    await shell.start(metadata_core.BrokerStarted(address.host, address.port, config.get("broker.rack"), incarnation, own_cluster_id))
    return await _serve(client, places, shell, log)


async def _serve(client: KeeperClient, places: paths.Layout, shell: Shell, log: logging.Logger) -> int:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[str] = loop.create_future()

    def end(reason: str) -> None:
        if not ended.done():
            ended.set_result(reason)

    server = shell.server = Server(places.controller_socket, shell.on_message, shell.on_end)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, signal.Signals(number).name)

    def on_death(death) -> None:
        if death.role == "worker":
            shell.on_worker_death(death.index, death.generation)

    client.watch(loop, on_death, end, end)
    await server.start()
    ticking = loop.create_task(shell.tick())
    state = shell.core.committed
    log.info("controller serves", cluster_id=state.cluster_id, version=state.version, topics=len(state.topics), partitions=state.partition_count)
    client.ready()
    done, _ = await asyncio.wait({ended, shell.failed, ticking}, return_when=asyncio.FIRST_COMPLETED)
    ticking.cancel()
    await server.stop()
    if shell.failed in done:
        log.error("controller ends; its successor reads what the disk holds", reason=shell.failed.result())
        return 1
    if ended not in done:
        log.error("controller ends", reason=str(ticking.exception() if ticking.done() and not ticking.cancelled() else "unknown"))
        return 1
    await shell.stop()
    log.info("controller ended", reason=ended.result())
    return 0


def main() -> int:
    log = logging.setup("controller")
    places = paths.layout(paths.default_data_dir())
    try:
        client = KeeperClient.connect(places.run_dir, "controller")
    except (KeeperError, OSError) as error:
        log.error("cannot attach to the keeper", reason=str(error))
        return 1
    log = logging.setup("controller", 0, client.config)
    logging.follow(lambda: client.control.log_level)
    try:
        return asyncio.run(run(client, places))
    except (MetadataCorrupt, DirectoryRefused, Refused) as error:
        log.error(f"the controller refuses to start: {error}")
        return 2
    except (OSError, KeeperError) as error:
        log.error("the controller cannot start", reason=str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
