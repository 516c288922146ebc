"""`mqd up`: a broker in the foreground. Checks the settings first, then hands over to
supervisord (mqd.keeper.supervise).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mqd.base.paths import Layout, default_data_dir, layout
from mqd.cli.common import CliError, error_line, pairs

if TYPE_CHECKING:
    from mqd.cli.joining import Token
    from mqd.keeper.settings import Settings

SUPERVISORD_CONF = Path(__file__).resolve().parents[2] / "supervisord.conf"


def _listeners_with_port(config: dict[str, str], port: int) -> str:
    """Returns the property `listeners` with `port` as the first listener's port: what --port means
    when `listeners` is also configured.
    """
    from mqd.base.listeners import parse_listeners

    first, *others = parse_listeners(config)
    parts = [(first.name, first.host, port), *((other.name, other.host, other.port) for other in others)]
    return ",".join(f"{name}://{f'[{host}]' if ':' in host else host}:{number}" for name, host, number in parts)


def _load_settings(
    data_dir: Path,
    config_file: Path | None,
    overrides: dict[str, str],
    port: int | None,
    secured: bool,
    token: Token | None = None,
) -> tuple[Settings, set[str]]:
    """Returns the settings, and the names of the environment variables that contain secrets. Reads
    the file only once, because it may be a pipe. Raises ConfigError, CliError.
    """
    from mqd.base import cluster_config
    from mqd.base.config import load_broker
    from mqd.base.listeners import parse_listeners
    from mqd.cli import secure
    from mqd.keeper.settings import properties_environment, resolve

    places = layout(data_dir)
    defaults = secure.settings(places.data_dir) if secured else None
    secret_variables: set[str] = set()
    config = load_broker(config_file, properties_environment(os.environ), overrides, defaults, secret_variables)
    if port is not None:
        config["listeners"] = _listeners_with_port(config, port)
        parse_listeners(config)
    if token is not None:
        from mqd.cli import joining

        if not joining.has_joined(token, places.data_dir):
            joining.join(token, places.data_dir, secure.hosts_of(config))
    if secured:
        node_id, has_peers = int(config["node.id"]), cluster_config.listens_for_hosts(config)
        secure.prepare(places.data_dir, node_id, secure.hosts_of(config), has_peers=has_peers)
    elif secure.is_secured(places.data_dir) and not config.get("authorizer.class.name"):
        raise CliError(
            f"{places.data_dir} belongs to a broker with users and permissions: start it with --secure, or set"
            " authorizer.class.name (remove DATA_DIR/secure to open it to everyone)"
        )
    return resolve(config, places), secret_variables


def _parse_token(text: str, overrides: dict[str, str]) -> Token:
    """Parses the token of --join and adds its settings to `overrides`. Raises CliError."""
    from mqd.cli import joining

    token = joining.parse(sys.stdin.readline() if text == "-" else text)
    node_id = str(token.node_id)
    if overrides.setdefault("node.id", node_id) != node_id:
        raise CliError(f"the token is for node {node_id}, not for node {overrides['node.id']}")
    overrides.setdefault("cluster.seeds", token.seeds)
    return token


def _check_paths(places: Layout) -> None:
    paths = {"data directory": places.data_dir, "run directory": places.run_dir, "Python interpreter": sys.executable}
    for label, path in paths.items():
        if any(character in str(path) for character in '%"\n'):
            raise CliError(
                f"{path}: the path of the {label} cannot have a percent sign, a quotation mark or a line break"
                " (supervisord's configuration cannot express it)"
            )


def _preflight(settings: Settings) -> None:
    """Raises CliError if the keeper could not start. Creates the directories, and leaves nothing else
    behind.
    """
    from mqd.acceptor.metrics import token
    from mqd.base import paths
    from mqd.keeper import identity, reserve, sockets
    from mqd.security import host_identity, principal, tls_files
    from mqd.shm import locks

    places = settings.places
    _check_paths(places)
    tls_files.check(settings.config)
    host_identity.check(settings.config)
    principal.local_rules(settings.config)
    if settings.config["metrics.token.file"]:
        token.read(Path(settings.config["metrics.token.file"]))
    fds: list[int] = []
    try:
        fds = locks.lock_directories([places.data_dir, *settings.log_dirs], places.data_dir)
        reserve.release(places)
        paths.create(places)
        existing = identity.load_identity(places)
        if existing is not None:
            identity.check_node_id(existing, places, int(settings.config["node.id"]))
        for listener in sockets.listen_all(settings.config):
            listener.close()
        cluster_listener = sockets.listen_cluster(settings.config)
        if cluster_listener is not None:
            cluster_listener.close()
    except identity.IdentityError as error:
        raise CliError(str(error)) from error
    except OSError as error:
        raise CliError(error.strerror if error.strerror and not error.filename else str(error)) from error
    finally:
        for fd in fds:
            os.close(fd)


def _claim(places: Layout) -> int:
    """Takes supervisord's lock on this data directory and writes the pid to the lock file, for `mqd
    down`. Returns the lock's file descriptor. Raises CliError if another process has the lock.
    """
    from mqd.shm import locks

    fd = locks.lock_file(places.supervisor_lock)
    if fd is None:
        raise CliError(
            f"another broker is starting or stopping in {places.data_dir}; wait for it, or choose another --data-dir"
        )
    os.ftruncate(fd, 0)
    os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    return fd


def _raise_file_limit() -> None:
    """Raises the limit on open files to the hard limit: brokers open many sockets and segments."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < target:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        except (OSError, ValueError):
            pass


def _environment(settings: Settings, config_file: Path | None) -> dict[str, str]:
    """Returns the environment variables that the shipped supervisord.conf and the keeper use."""
    places = settings.places
    return {
        "MQD_DATA_DIR": str(places.data_dir),
        "MQD_RUN_DIR": str(places.run_dir),
        "MQD_CONFIG": str(config_file.absolute()) if config_file else "",
        "MQD_WORKERS": str(settings.worker_count),
        "MQD_PYTHON": sys.executable,
    }


def _print_supervisord_config(
    kind: str, settings: Settings, config_file: Path | None, overrides: dict[str, str], port: int | None
) -> None:
    """Prints the configuration with which supervisord starts this broker. Creates the directories,
    because supervisord refuses a configuration that names missing ones.
    """
    import pwd

    from mqd.base import paths
    from mqd.base.config import BROKER, from_environment
    from mqd.keeper.settings import properties_environment
    from mqd.keeper.supervisor_config import Unrepresentable, render_configuration

    if config_file is not None and not config_file.is_file():
        raise CliError(f"{config_file} is not a regular file: the broker must be able to read it at every start")
    _check_paths(settings.places)
    paths.create(settings.places)
    explicit_properties = {
        name: value for name, (value, _) in from_environment(properties_environment(os.environ)).items()
    }
    explicit_properties |= overrides
    if port is not None:
        explicit_properties["listeners"] = settings.config["listeners"]
    explicit_properties.pop("worker.count", None)  # given by MQD_WORKERS
    properties = {f"MQD_{name.upper().replace('.', '_')}": value for name, value in sorted(explicit_properties.items())}
    node_id = settings.config["node.id"]
    try:
        text = render_configuration(
            SUPERVISORD_CONF,
            kind,
            _environment(settings, config_file),
            properties,
            pwd.getpwuid(os.getuid()).pw_name,
            "mqd" if node_id == BROKER["node.id"].default else f"mqd-{node_id}",
        )
    except Unrepresentable as error:
        raise CliError(str(error)) from error
    click.echo(text, nl=False)


@click.command(short_help="Start a broker in the foreground.")
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    help="The broker's data directory.  [env: MQD_DATA_DIR; default: ~/.local/share/mqd]",
)
@click.option("--port", type=click.IntRange(0, 65535), help="Port for clients; 0: a free one.  [default: 9092]")
@click.option(
    "--workers",
    type=click.IntRange(1, 64),
    help="Worker processes.  [default: one per usable CPU, fewer if /dev/shm has too little room]",
)
@click.option(
    "--config",
    "config_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Properties file with Kafka's names.",
)
@click.option("--set", "assignments", multiple=True, metavar="NAME=VALUE", help="One property; may be repeated.")
@click.option("--node-id", type=click.IntRange(0), help="Number of this broker, unique in the cluster.  [default: 1]")
@click.option(
    "--cluster-seeds",
    metavar="HOST:PORT,...",
    help="Controller listeners of the hosts that form the cluster, the same on every host.",
)
@click.option(
    "--secure",
    "secured",
    is_flag=True,
    help="Use TLS, users and permissions; their files are created in DATA_DIR/secure if they do not exist.",
)
@click.option(
    "--join",
    "token_text",
    metavar="TOKEN",
    help="Join the cluster of the host where `mqd cluster invite` printed TOKEN; implies --secure. If TOKEN is -,"
    " it is read from standard input.",
)
@click.option(
    "--print-supervisord",
    "printed_kind",
    type=click.Choice(["include", "whole"]),
    help="Start nothing; print the configuration with which your own supervisord starts this broker: the programs"
    " alone, to be included, or a whole file.",
)
def command(
    data_dir: Path | None,
    port: int | None,
    workers: int | None,
    config_file: Path | None,
    assignments: tuple[str, ...],
    node_id: int | None,
    cluster_seeds: str | None,
    printed_kind: str | None,
    secured: bool,
    token_text: str | None,
) -> int:
    """Start a broker in the foreground.

    Prints one line that begins with "mqd ready" once it accepts clients. Ctrl-C, SIGTERM or `mqd
    down` stop it cleanly; the exit status is 130 when Ctrl-C comes before that line. Logs are in
    DATA_DIR/logs.
    """
    overrides = pairs(assignments, "--set")
    if workers is not None:
        overrides["worker.count"] = str(workers)
    if node_id is not None:
        overrides["node.id"] = str(node_id)
    if cluster_seeds is not None:
        overrides["cluster.seeds"] = cluster_seeds
    token = _parse_token(token_text, overrides) if token_text is not None else None
    secured = secured or token is not None
    from mqd.base import cluster_config
    from mqd.cli import secure
    from mqd.keeper import reserve
    from mqd.keeper import settings as keeper_settings
    from mqd.security import confinement

    settings, secret_variables = _load_settings(
        data_dir or default_data_dir(), config_file, overrides, port, secured, token
    )
    places = settings.places
    if printed_kind is not None:
        # the effective values: the file and the environment override the defaults of --secure
        defaults = {name: settings.config[name] for name in secure.settings(places.data_dir)} if secured else {}
        _print_supervisord_config(printed_kind, settings, config_file, {**defaults, **overrides}, port)
        if secure.files(places.data_dir).pending.exists():
            error_line(f"once it is ready, create its first user: mqd user admin --data-dir {places.data_dir}")
        return 0
    _preflight(settings)
    claim_fd = _claim(places)
    places.broker_json.unlink(missing_ok=True)
    keeper_settings.save(settings)
    _raise_file_limit()
    for name in secret_variables:  # the keeper reads the secrets from resolved_config; no process inherits them
        del os.environ[name]
    confinement.hide_memory(settings.config)
    os.environ.update(_environment(settings, config_file), MQD_RUN_RESOLVED=str(places.resolved_config))
    places.supervisor_socket.unlink(missing_ok=True)  # left by a killed supervisord; the new one would wait for it

    from mqd.keeper.supervise import BrokerStatus, run

    def on_ready(status: BrokerStatus) -> None:
        reserve.recreate(places)
        try:
            if secured:
                secure.make_admin(places)
        except CliError as error:  # the next start tries again
            error_line(error.message)
        host = f"[{status.host}]" if ":" in status.host else status.host
        workers_text = f"{settings.worker_count} worker{'s' if settings.worker_count != 1 else ''}"
        try:
            print(
                f"mqd ready on {host}:{status.port} (node {status.node_id}, {workers_text}, data in {places.data_dir})",
                flush=True,
            )
            if secured:
                print(secure.hint(places.data_dir), flush=True)
                listens_for_hosts = cluster_config.listens_for_hosts(settings.config)
                if listens_for_hosts and (hosts_hint := secure.hosts_hint(places.data_dir)):
                    print(hosts_hint, flush=True)
        except OSError:
            pass  # stdout is closed; the broker keeps running

    def on_waiting(text: str) -> None:
        try:
            print(f"mqd is waiting: {text}", file=sys.stderr, flush=True)
        except OSError:
            pass

    try:
        failure = run(SUPERVISORD_CONF, places, on_ready, on_waiting)
    finally:
        places.resolved_config.unlink(missing_ok=True)
        reserve.recreate(places)
        os.close(claim_fd)
    if failure is not None:
        raise CliError(failure)
    return 0
