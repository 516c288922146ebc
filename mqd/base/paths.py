"""The directory layout of a broker: one data directory, and one directory for sockets.

    DATA_DIR/
      .lock              flock of the running broker; its text is the holder's pid (for messages
                         only)
      meta.properties    cluster.id, node.id, directory.id: the identity of this directory
      reserve            deleted at start to free space on a full disk: mqd/keeper/reserve.py
      authentication.seed  secret for salts of users that do not exist (a host with SASL listeners)
      generation         generation of the last keeper start
      logs/              the processes' logs (logs/mqd-worker-0.log, logs/supervisord.log)
      metadata/          the controller's metadata log
      log/               the records, unless log.dirs names other directories
      run/               sockets and files for tools: keeper.sock, controller.sock, client.sock
                         (local clients), broker.json, damage.W.json

A Unix socket's name is at most 107 bytes. If DATA_DIR/run would be too long, run is a directory of
this user in /tmp whose name depends only on DATA_DIR, so that every process and tool can derive it.
Any user can derive it too, and create it first: it is used only if it belongs to this user alone,
and a process that listens in it is trusted only if it runs as this user (see trusts()).
"""

import hashlib
import os
import stat
from pathlib import Path
from typing import NamedTuple

SHARED_DIR = Path("/tmp")
SOCKET_PATH_BYTES_MAX = 100
LONGEST_SOCKET_NAME = "controller.sock"


class Layout(NamedTuple):
    data_dir: Path
    run_dir: Path
    logs_dir: Path
    metadata_dir: Path
    log_dir: Path  # the only entry of log.dirs by default
    lock: Path
    meta_properties: Path
    generation: Path
    reserve: Path
    keeper_socket: Path
    controller_socket: Path
    broker_json: Path
    resolved_config: Path  # what `mqd up` made of file, environment and command line
    supervisor_lock: Path
    supervisor_pid: Path
    supervisor_socket: Path  # for supervisorctl
    client_socket: Path  # local clients: shared memory instead of TCP


def default_data_dir() -> Path:
    """$MQD_DATA_DIR, else $XDG_DATA_HOME/mqd, else ~/.local/share/mqd. It is the same in every
    working directory, so `mqd down` finds the broker that `mqd up` started.
    """
    override = os.environ.get("MQD_DATA_DIR")
    if override:
        return Path(override)
    home = os.environ.get("XDG_DATA_HOME") or os.path.join(os.path.expanduser("~"), ".local", "share")
    return Path(home) / "mqd"


def run_dir(data_dir: str | os.PathLike[str]) -> Path:
    """Returns the directory for the sockets of this data directory. Creates nothing. Raises
    PermissionError if another user created it.
    """
    absolute = os.path.realpath(data_dir)
    preferred = os.path.join(absolute, "run")
    if len(os.fsencode(os.path.join(preferred, LONGEST_SOCKET_NAME))) <= SOCKET_PATH_BYTES_MAX:
        return Path(preferred)
    name = hashlib.sha256(os.fsencode(absolute)).hexdigest()[:16]
    fallback = SHARED_DIR / f"mqd-{os.getuid()}-{name}"
    try:
        os.close(_open_private_directory(fallback))
    except FileNotFoundError:
        pass
    return fallback


def _open_private_directory(directory: Path) -> int:
    """Opens a directory that this user owns and no other user may write. Does not follow a link.
    Raises PermissionError, FileNotFoundError.
    """
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:  # a link, a file, or a directory that this user may not read
        raise _not_private_error(directory) from error
    status = os.fstat(fd)
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
        os.close(fd)
        raise _not_private_error(directory)
    return fd


def _not_private_error(directory: Path) -> PermissionError:
    return PermissionError(
        f"{directory} is not a directory that only this user can write: another user may have created it. Remove it, or"
        " choose a shorter --data-dir, which then holds the sockets itself"
    )


def trusts(run: Path, uid: int) -> bool:
    """Whether files and processes of user `uid` are trusted in this socket directory. Below a data
    directory every user is trusted, because its permissions decide who can write there.
    """
    return run.parent != SHARED_DIR or uid in (os.getuid(), 0)


def layout(data_dir: str | os.PathLike[str]) -> Layout:
    root = Path(os.path.realpath(data_dir))
    run = run_dir(root)
    return Layout(
        data_dir=root,
        run_dir=run,
        logs_dir=root / "logs",
        metadata_dir=root / "metadata",
        log_dir=root / "log",
        lock=root / ".lock",
        meta_properties=root / "meta.properties",
        generation=root / "generation",
        reserve=root / "reserve",
        keeper_socket=run / "keeper.sock",
        controller_socket=run / "controller.sock",
        broker_json=run / "broker.json",
        resolved_config=run / "resolved.json",
        supervisor_lock=run / "supervisord.lock",
        supervisor_pid=run / "supervisord.pid",
        # supervisord binds a temporary name first: this one, a full stop and its pid
        supervisor_socket=run / "ctl.sock",
        client_socket=run / "client.sock",
    )


def keep_private() -> None:
    """Makes the files that this process creates accessible to its own user only: they hold records,
    metadata and keys. Called at the start of every process of a broker.
    """
    os.umask(0o077)


def tighten(directory: str | os.PathLike[str], traverse_bits: int = 0) -> bool:
    """Removes other users' access to a directory of this user, except `traverse_bits` (of 0o011:
    may traverse, cannot list). Returns whether other users could read or write it until now.
    Raises OSError.
    """
    status = os.stat(directory)
    mode = 0o700 | traverse_bits
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077 == traverse_bits:
        return False
    os.chmod(directory, mode)
    return bool(status.st_mode & 0o066)


def create(places: Layout) -> None:
    """Creates the directories. Raises OSError; PermissionError if the run directory in /tmp belongs
    to another user.
    """
    keep_private()
    for directory in (places.data_dir, places.logs_dir, places.metadata_dir):
        directory.mkdir(parents=True, exist_ok=True)
    try:
        places.run_dir.mkdir(mode=0o700)
    except FileExistsError:
        pass
    fd = _open_private_directory(places.run_dir)
    try:
        os.fchmod(fd, 0o700)
    finally:
        os.close(fd)
