"""`mqd cluster`: the hosts of a cluster, its controllers, and their shared secret."""

from __future__ import annotations

import os
from pathlib import Path

import click

from mqd.base.cluster_config import format_address
from mqd.cli.admission_commands import invite, key
from mqd.cli.cluster_view import ClusterState, FeatureLevels, PartitionHealth, ago
from mqd.cli.common import CliError, Settings, emit_json, emit_table, options

_DESCRIBE_CONFIGS, _UPDATE_FEATURES, _UNREGISTER, _ADD_VOTER, _REMOVE_VOTER = 32, 57, 64, 80, 81
_TIMEOUT_MS = 30_000
_LISTENER_PROPERTIES = ("cluster.seeds", "controller.listener", "inter.broker.listener")
_CLOSED_TEXT = (
    'no other host can join, because this one was started without --cluster-seeds: see "One host grows to three" in'
    " docs/operations.md"
)


@click.group(short_help="Hosts, controllers and the key of a cluster.")
def command() -> None:
    """Hosts, controllers and the key of a cluster."""


command.add_command(key)
command.add_command(invite)


# -- status ----------------------------------------------------------------------------------------


def _is_closed(settings: Settings, nodes: list[int]) -> bool:
    """Whether the broker is the only host of its cluster, and does not listen for other hosts.
    Raises CliError.
    """
    if len(nodes) != 1:
        return False
    from mqd.cli.kafka_request import Broker, check
    from mqd.cluster.metadata.rules.configs import RESOURCE_BROKER
    from mqd.protocol.messages import DescribeConfigsRequest

    resource = DescribeConfigsRequest.Resource(
        resource_type=RESOURCE_BROKER, resource_name=str(nodes[0]), configuration_keys=list(_LISTENER_PROPERTIES)
    )
    with Broker(settings.bootstrap) as broker:
        (broker_config,) = broker.request(_DESCRIBE_CONFIGS, DescribeConfigsRequest(resources=[resource])).results
    check(f"broker {nodes[0]}", broker_config.error_code, broker_config.error_message)
    values = {entry.name: entry.value for entry in broker_config.configs}
    return "cluster.seeds" in values and not any(values.values())


def _is_healthy(settings: Settings) -> bool:
    """Whether every broker is active, every voter has fetched recently, and every replica is in
    sync. False also while no broker responds.
    """
    try:
        state, partitions = ClusterState(settings), PartitionHealth(settings)
    except CliError:
        return False
    return (
        not state.voter_status.silent_or_behind
        and not any(broker.is_fenced for broker in state.brokers)
        and not partitions.leaderless_names
        and not partitions.not_in_sync
    )


def _wait_until_healthy(settings: Settings, seconds: float) -> None:
    """Raises CliError on timeout."""
    import time

    deadline = time.monotonic() + seconds
    while not _is_healthy(settings):
        if time.monotonic() > deadline:
            raise CliError(f"after {seconds:g} s something is still missing; mqd cluster status shows what")
        time.sleep(0.25)  # polling: the state depends on other hosts


@command.command("status")
@options
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="First wait until every broker is in service and every replica is in sync; fail after SECONDS.",
)
def status(settings: Settings, wait_s: float | None) -> None:
    """Show an overview of the cluster: its id, its active controller, its brokers, and what is
    missing.
    """
    if wait_s is not None:
        _wait_until_healthy(settings, wait_s)
    from mqd.cli import offline_replicas as offline

    state, partitions = ClusterState(settings), PartitionHealth(settings)
    serving = [broker for broker in state.brokers if not broker.is_fenced]
    in_service = [broker.broker_id for broker in serving]
    addresses = {broker.broker_id: format_address(broker.host, broker.port) for broker in serving}
    not_served = offline.offline_replicas(partitions.leaderless, addresses)
    fenced = [broker.broker_id for broker in state.brokers if broker.is_fenced]
    voter_status = state.voter_status
    if settings.json:
        emit_json(
            {
                "cluster_id": state.cluster_id,
                "controller": state.quorum.leader_id,
                "epoch": state.quorum.leader_epoch,
                "high_watermark": state.quorum.high_watermark,
                "voters": state.voters,
                "brokers": in_service,
                "fenced": fenced,
                "voters_not_heard_from": voter_status.silent,
                "voters_behind": voter_status.behind,
                "voter_losses_tolerated": voter_status.losses_allowed,
                "partitions": partitions.count,
                "partitions_without_leader": partitions.leaderless_names,
                "partitions_not_in_sync": partitions.not_in_sync,
                "not_served": [
                    {"partition": replica.partition, "node": replica.node, "directories": list(replica.directories)}
                    for replica in not_served
                ],
            }
        )
        return
    click.echo(f"cluster {state.cluster_id}")
    click.echo(
        f"active controller: node {state.quorum.leader_id}, epoch {state.quorum.leader_epoch}, metadata up to offset"
        f" {state.quorum.high_watermark}"
    )
    click.echo(f"voters: {_nodes_text(state.voters)}{voter_status.text()}")
    click.echo(
        f"brokers in service: {_nodes_text(in_service)}" + (f"; fenced: {_nodes_text(fenced)}" if fenced else "")
    )
    if _is_closed(settings, in_service + fenced):
        click.echo(_CLOSED_TEXT)
    for line in partitions.lines():
        click.echo(line)
    for replica in not_served:
        click.echo(f"  {replica.text()}")


def _nodes_text(nodes: list[int]) -> str:
    return ", ".join(map(str, nodes)) or "none"


@command.command("brokers")
@options
def brokers(settings: Settings) -> None:
    """List the brokers: where clients reach them, whether they are in service, their role in the
    quorum.
    """
    state = ClusterState(settings)
    roles = {replica["node"]: replica["role"] for replica in state.replicas()}
    rows = [
        {
            "node": broker.broker_id,
            "address": format_address(broker.host, broker.port),
            "rack": broker.rack,
            "state": "fenced" if broker.is_fenced else "in service",
            "quorum": roles.get(broker.broker_id, "-"),
        }
        for broker in state.brokers
    ]
    if settings.json:
        emit_json(rows)
    else:
        emit_table(
            ("NODE", "ADDRESS", "RACK", "STATE", "QUORUM"),
            [
                (broker["node"], broker["address"], broker["rack"] or "-", broker["state"], broker["quorum"])
                for broker in rows
            ],
        )


@command.command("controller")
@options
def controller(settings: Settings) -> None:
    """Show the quorum of controllers as its leader sees it: voters and observers, and how far each
    has fetched.
    """
    state = ClusterState(settings)
    replicas = state.replicas()
    if settings.json:
        emit_json(
            {
                "leader": state.quorum.leader_id,
                "epoch": state.quorum.leader_epoch,
                "high_watermark": state.quorum.high_watermark,
                "replicas": replicas,
            }
        )
        return
    rows = [
        (
            replica["node"],
            replica["role"],
            replica["listener"] or "-",
            replica["lag"] if replica["lag"] >= 0 else "-",
            ago(replica["last_caught_up_ms"], state.voter_status.now_ms),
            replica["directory"],
        )
        for replica in replicas
    ]
    click.echo(f"epoch {state.quorum.leader_epoch}, committed up to offset {state.quorum.high_watermark}")
    emit_table(("NODE", "ROLE", "LISTENER", "LAG", "CAUGHT UP", "DIRECTORY"), rows)


# -- voters ----------------------------------------------------------------------------------------


def _directory_id(settings: Settings, node: int, directory: str | None) -> bytes:
    """The metadata directory's id: the given one, or the only one of this node in the quorum.
    Raises CliError.
    """
    from base64 import urlsafe_b64decode

    if directory is not None:
        try:
            directory_id = urlsafe_b64decode(directory + "=" * (-len(directory) % 4))
        except ValueError:
            directory_id = b""
        if len(directory_id) != 16:
            raise CliError(f"{directory!r} is not a directory id; mqd cluster controller shows all directory ids")
        return directory_id
    state = ClusterState(settings)
    replicas = [replica for replica in state.replicas() if replica["node"] == node]
    if not replicas and _is_closed(settings, [broker.broker_id for broker in state.brokers]):
        raise CliError(f"the quorum does not know node {node}; {_CLOSED_TEXT}")
    if not replicas:
        raise CliError(f"the quorum does not know node {node}; mqd cluster controller shows which nodes it knows")
    if len(replicas) > 1:
        raise CliError(
            f"node {node} is known to the quorum with several directories"
            f" ({', '.join(replica['directory'] for replica in replicas)}); choose one with --directory"
        )
    return _directory_id(settings, node, replicas[0]["directory"])


@command.command("add-voter")
@options
@click.argument("node", type=click.IntRange(0))
@click.option("--directory", help="Id of its metadata directory, when the node is known with more than one.")
def add_voter(settings: Settings, node: int, directory: str | None) -> None:
    """Make NODE, an observer that has caught up, a voter of the quorum. One change at a time."""
    from mqd.cli.kafka_request import Broker, check
    from mqd.protocol.messages import AddRaftVoterRequest

    directory_id = _directory_id(settings, node, directory)
    with Broker(settings.bootstrap) as broker:
        response = broker.request(
            _ADD_VOTER, AddRaftVoterRequest(timeout_ms=_TIMEOUT_MS, voter_id=node, voter_directory_id=directory_id)
        )
    check(f"node {node}", response.error_code, response.error_message)
    _emit_voters(settings, f"node {node} is a voter")


@command.command("remove-voter")
@options
@click.argument("node", type=click.IntRange(0))
@click.option("--directory", help="Id of its metadata directory, when the node is known with more than one.")
def remove_voter(settings: Settings, node: int, directory: str | None) -> None:
    """Remove NODE from the voters of the quorum; it continues as an observer, if it is running. One
    change at a time.
    """
    from mqd.cli.kafka_request import Broker, check
    from mqd.protocol.messages import RemoveRaftVoterRequest

    if directory is None:
        voters = [
            replica
            for replica in ClusterState(settings).replicas()
            if replica["node"] == node and replica["role"] != "observer"
        ]
        if not voters:
            raise CliError(f"node {node} is not a voter; mqd cluster controller shows the voters")
        directory = voters[0]["directory"]
    directory_id = _directory_id(settings, node, directory)
    with Broker(settings.bootstrap) as broker:
        response = broker.request(_REMOVE_VOTER, RemoveRaftVoterRequest(voter_id=node, voter_directory_id=directory_id))
    check(f"node {node}", response.error_code, response.error_message)
    _emit_voters(settings, f"node {node} is no longer a voter")


# -- replicas --------------------------------------------------------------------------------------


@command.command("drain")
@options
@click.argument("node", type=click.IntRange(0))
@click.option(
    "--cancel",
    is_flag=True,
    help="Let NODE have replicas again; those that have left it return only with mqd cluster balance.",
)
@click.option("--no-wait", is_flag=True, help="Do not wait until the last replica has left.")
def drain(settings: Settings, node: int, cancel: bool, no_wait: bool) -> None:
    """Move all replicas of NODE to other brokers, and place no new ones on it, so that it can be
    stopped permanently.
    """
    from mqd.cli import moves
    from mqd.cli.kafka_request import Broker

    with Broker(settings.bootstrap) as broker:
        moves.drain(broker, node, cancel)
        if not cancel and not no_wait:
            moves.wait_until_empty(broker, node, not settings.json)
    outcome = (
        "can have replicas again"
        if cancel
        else (
            "is being drained"
            if no_wait
            else "no longer holds any replica; stop it, then remove it from the list with mqd cluster forget"
        )
    )
    if settings.json:
        emit_json({"node": node, "drain": not cancel})
    else:
        click.echo(f"node {node} {outcome}")


@command.command("forget")
@options
@click.argument("node", type=click.IntRange(0))
def forget(settings: Settings, node: int) -> None:
    """Remove NODE, which has been stopped permanently and has no replicas, from the list of
    brokers.
    """
    from mqd.cli.kafka_request import Broker, check
    from mqd.protocol.messages import UnregisterBrokerRequest

    with Broker(settings.bootstrap) as broker:
        response = broker.request(_UNREGISTER, UnregisterBrokerRequest(broker_id=node))
    check(f"node {node}", response.error_code, response.error_message)
    if settings.json:
        emit_json({"node": node, "registered": False})
    else:
        click.echo(f"node {node} is forgotten")


@command.command("balance")
@options
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option("--dry-run", is_flag=True, help="Show what would move, without moving anything.")
@click.option("--no-wait", is_flag=True, help="Do not wait until all moves are done.")
def balance(settings: Settings, topics: tuple[str, ...], dry_run: bool, no_wait: bool) -> None:
    """Spread the replicas and leaders of all topics, or of the given ones, evenly over the brokers,
    for example after a host has joined.

    The active controller remembers the remaining moves. A new active controller only completes the
    moves in progress: in that case, run this command again; the balance continues from there.
    """
    from mqd.cli import moves
    from mqd.cli.kafka_request import Broker
    from mqd.cluster.metadata.rules.placement import BALANCE_MOVES_MAX

    with Broker(settings.bootstrap) as broker:
        before = moves.replicas_of_all(broker)
        plan = moves.balance(broker, topics, dry_run)
        if not dry_run and not no_wait:
            moves.wait(
                broker,
                plan,
                not settings.json,
                "a new active controller does not continue this balance, or the moves were cancelled;"
                " run mqd cluster balance again; it continues from here",
            )
    summary = moves.summarize(before, plan)
    if settings.json:
        emit_json(
            [{"topic": topic, "partition": index, "replicas": replicas} for (topic, index), replicas in plan.items()]
        )
    elif dry_run and plan:
        emit_table(
            ("TOPIC", "PARTITION", "REPLICAS"),
            [(topic, index, ",".join(map(str, replicas))) for (topic, index), replicas in sorted(plan.items())],
        )
        for line in summary.lines("would move", "would get"):
            click.echo(line)
    elif not plan:
        click.echo("balanced already; nothing moves")
    else:
        for line in summary.lines(*(("to move", "to get") if no_wait else ("moved", "got"))):
            click.echo(line)
        if no_wait:
            click.echo(
                "if another controller becomes active, it completes the moves in progress but starts no others:"
                " in that case, run mqd cluster balance again; it continues from there"
            )
    if plan and not settings.json and max(summary.copy_count, summary.leader_change_count) >= BALANCE_MOVES_MAX:
        click.echo(f"a plan has {BALANCE_MOVES_MAX} moves at most; when it is done, the controller makes the next plan")


def _emit_voters(settings: Settings, text: str) -> None:
    if settings.json:
        emit_json({"voters": ClusterState(settings).voters})
    else:
        click.echo(text)


# -- versions --------------------------------------------------------------------------------------


@command.command("upgrade")
@options
@click.option(
    "--dry-run", is_flag=True, help="Show what each host supports and what would be raised, without raising anything."
)
def upgrade(settings: Settings, dry_run: bool) -> None:
    """Enable the features of the newest version of mqd, once every host runs it. Until then, hosts
    of two versions work together; afterwards, hosts of the older version are refused.

    Each feature is raised to the highest level that any host supports. While some hosts do not
    support that level, the command fails and names them.
    """
    from mqd.cli.kafka_request import Broker, check
    from mqd.protocol.messages import UpdateFeaturesRequest

    levels = FeatureLevels(settings)
    raised = levels.levels_to_raise()
    if not settings.json:
        emit_table(("FEATURE", "IN FORCE", *(f"NODE {node}" for node in levels.supported)), levels.table())
    if levels.obstacles():
        raise CliError(
            f"{'; '.join(levels.obstacles())}. Upgrade first, then try again; to remove a host that is lost forever:"
            " mqd cluster forget"
        )
    if raised:
        updates = [
            UpdateFeaturesRequest.FeatureUpdateKey(feature=name, max_version_level=level, upgrade_type=1)
            for name, level in raised.items()
        ]
        with Broker(settings.bootstrap) as broker:
            response = broker.request(
                _UPDATE_FEATURES,
                UpdateFeaturesRequest(timeout_ms=_TIMEOUT_MS, feature_updates=updates, validate_only=dry_run),
            )
        check("feature levels", response.error_code, response.error_message)
    if settings.json:
        emit_json(
            {
                "in_force": levels.in_force,
                "raised": raised,
                "supported": {str(node): ranges for node, ranges in levels.supported.items()},
                "dry_run": dry_run,
            }
        )
    elif raised:
        click.echo(
            f"{'would be' if dry_run else 'are'} in force now:"
            f" {', '.join(f'{name} {level}' for name, level in raised.items())}"
        )
    else:
        click.echo("nothing to raise: every version that these hosts support is in force")


# -- the last resort -------------------------------------------------------------------------------


@command.command("force-standalone")
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Data directory of the host that continues; its broker must not be running.  [env: MQD_DATA_DIR]",
)
@click.option("--i-accept-data-loss", "accepted", is_flag=True, help="Required: without it nothing is done.")
def force_standalone(data_dir: Path | None, accepted: bool) -> None:
    """Let one host continue alone after most voters of the quorum were lost permanently.

    Choose the host with the most recent metadata: changes that only the lost voters had are lost. If
    other hosts of the cluster come back, they are refused until their data directories are emptied;
    then they join again.
    """
    from mqd.base.paths import default_data_dir, layout
    from mqd.cluster.raft.identity import MetadataCorrupt
    from mqd.cluster.raft.standalone import force_standalone as force
    from mqd.keeper.identity import load_identity
    from mqd.shm import locks

    paths = layout(data_dir or default_data_dir())
    if not accepted:
        raise CliError(
            "nothing was done: changes that only the lost voters had will be lost; to accept that, give"
            " --i-accept-data-loss"
        )
    identity = load_identity(paths)
    if identity is None:
        raise CliError(f"{paths.data_dir} is not the data directory of a broker")
    fds = locks.lock_directories([paths.data_dir], paths.data_dir)
    try:
        result = force(paths.metadata_dir, identity.node_id)
    except MetadataCorrupt as error:
        raise CliError(str(error)) from error
    finally:
        for fd in fds:
            os.close(fd)
    click.echo(
        f"node {identity.node_id} is now the only voter, in generation {result.generation}, with the metadata up to"
        f" offset {result.offset} (known to be committed: {result.known_committed_offset}); voters were"
        f" {_nodes_text(list(result.voters_before))}. Start this node. Empty the data directories of the other"
        " hosts before starting them again."
    )


# -- a local cluster -------------------------------------------------------------------------------


@command.command("local")
@click.option("--brokers", "count", type=click.IntRange(1, 9), default=3, show_default=True, help="Number of brokers.")
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory of all brokers' data.  [default: that of mqd up, with -cluster appended]",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65533),
    default=9092,
    show_default=True,
    help="Port for clients, on 127.0.0.1, 127.0.0.2, ...; the next two are used between brokers.",
)
@click.option(
    "--workers", type=click.IntRange(1, 64), default=1, show_default=True, help="Worker processes of each broker."
)
@click.option("--secure", "secured", is_flag=True, help="With TLS, users and permissions; see docs/security.md.")
@click.option(
    "--set", "assignments", multiple=True, metavar="NAME=VALUE", help="One property of every broker; may be repeated."
)
def local(
    count: int, data_dir: Path | None, port: int, workers: int, secured: bool, assignments: tuple[str, ...]
) -> None:
    """Start a cluster on this machine, in the foreground, for trying things out.

    Each broker has its own address and data directory, and is an ordinary broker: any of them can
    be stopped, killed or restarted while the cluster runs. Ctrl-C stops all.
    """
    import shlex
    import signal

    from mqd.base.paths import default_data_dir
    from mqd.cli import local_cluster

    default = default_data_dir()
    brokers = local_cluster.members(
        data_dir or default.with_name(default.name + "-cluster"), count, port, workers, secured, assignments
    )
    if secured:
        local_cluster.make_certificates(brokers)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with local_cluster.LocalCluster(brokers) as cluster:
        cluster.wait_ready()
        click.echo(local_cluster.guide(brokers))
        while (exited := cluster.wait_for_exit()) is not None:
            click.echo(
                f"broker {exited.node_id} has exited; to start it again: {shlex.join(['mqd', *exited.arguments()])}"
            )
