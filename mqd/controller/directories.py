"""Identity of the entries of log.dirs. Each directory stores its identity in meta.properties
(Kafka's file). A partition thus finds its directory again when log.dirs is reordered or a disk is
mounted elsewhere, and an empty mount point is not taken for the missing disk.
"""

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from mqd import native
from mqd.base import logging
from mqd.base.blocking_queries import in_thread
from mqd.cluster.metadata.rules.placement import Directory

T = TypeVar("T")

META_PROPERTIES = "meta.properties"
RESPONSE_S = 5.0  # a file system that does not respond for this long is treated as hung
log = logging.get("controller.directories")


class DirectoryRefused(RuntimeError):
    """A log directory belongs to another broker or cluster; the message names the remedy."""


def read_properties(path: Path) -> dict[str, str]:
    """The properties in the file. Raises OSError."""
    lines = (line.strip() for line in path.read_text(errors="replace").splitlines())
    return {
        name.strip(): value.strip()
        for name, _, value in (line.partition("=") for line in lines if line and line[0] not in "#!")
    }


def identify(
    paths: Iterable[str],
    cluster_id: str,
    node_id: int,
    last_paths: Mapping[str, str],
    used_ids: set[str],
    new_id: Callable[[], str],
) -> list[Directory]:
    """One Directory for each path, in order. `last_paths`: directory id -> last known path; `used_ids`: ids
    of directories that hold partitions.

    A directory is unusable if it cannot be read, or if it is empty where one with partitions is
    expected: its partitions are offline, everything else continues. Raises DirectoryRefused.
    """
    return _refuse_copies([_identify_one(path, cluster_id, node_id, last_paths, used_ids, new_id) for path in paths])


async def identify_in_time(
    paths: Iterable[str],
    cluster_id: str,
    node_id: int,
    last_paths: Mapping[str, str],
    used_ids: set[str],
    new_id: Callable[[], str],
) -> list[Directory]:
    """Like identify(), in threads. A directory whose file system does not respond within RESPONSE_S
    is unusable, and its partitions are offline until the next start.
    """
    all_paths = list(paths)
    responses = await query_in_time(
        [partial(_identify_one, path, cluster_id, node_id, last_paths, used_ids, new_id) for path in all_paths]
    )
    return _refuse_copies(
        [
            response.result() if response.done() else _unresponsive(path, last_paths)
            for path, response in zip(all_paths, responses)
        ]
    )


async def query_in_time(queries: Iterable[Callable[[], T]], limit_s: float | None = None) -> "list[asyncio.Future[T]]":
    """Runs queries of file systems, each in a thread of its own. Returns their futures when all are
    done, or after `limit_s` (None: RESPONSE_S); the futures of queries that hang are then not done.
    """
    responses = [in_thread(query) for query in queries]
    if responses:
        await asyncio.wait(responses, timeout=RESPONSE_S if limit_s is None else limit_s)
    return responses


def _unresponsive(path: str, last_paths: Mapping[str, str]) -> Directory:
    log.error(
        "log directory does not respond: its partitions are offline until the broker is restarted",
        directory=path,
        seconds=RESPONSE_S,
    )
    return Directory(
        next((directory_id for directory_id, last_path in last_paths.items() if last_path == path), ""), path, 0, False
    )


def _refuse_copies(entries: list[Directory]) -> list[Directory]:
    for index, directory in enumerate(entries):
        other = next(
            (other for other in entries[:index] if other.directory_id and other.directory_id == directory.directory_id),
            None,
        )
        if other is not None:
            raise DirectoryRefused(
                f"{directory.path} and {other.path} have the same directory.id: one is a copy of the other; remove one"
                " of them from log.dirs"
            )
    return entries


def _identify_one(
    path: str,
    cluster_id: str,
    node_id: int,
    last_paths: Mapping[str, str],
    used_ids: set[str],
    new_id: Callable[[], str],
) -> Directory:
    ids_of_path = [directory_id for directory_id, last_path in last_paths.items() if last_path == path]
    properties_path = Path(path) / META_PROPERTIES
    try:
        properties = read_properties(properties_path)
    except FileNotFoundError:
        missing = [directory_id for directory_id in ids_of_path if directory_id in used_ids]
        if missing:
            log.error(
                "log directory is not the one that was here: its partitions are offline. Mount the right disk and"
                " restart; or, if its records are lost permanently, write the line directory.id=... into"
                " meta.properties to begin with empty partitions",
                directory=path,
                expected_directory_id=missing[0],
                file=str(properties_path),
            )
            return Directory(missing[0], path, 0, False)
        return _claim(path, properties_path, ids_of_path[0] if ids_of_path else new_id(), cluster_id, node_id)
    except OSError as error:
        log.error(
            "log directory cannot be read: its partitions are offline until the broker is restarted",
            directory=path,
            reason=str(error),
        )
        return Directory(ids_of_path[0] if ids_of_path else "", path, 0, False)
    _check_owner(properties, properties_path, cluster_id, node_id)
    directory_id = properties.get("directory.id", "")
    if not directory_id:
        raise DirectoryRefused(
            f"{properties_path} has no directory.id; restore it from a copy, or remove {path} from log.dirs"
        )
    # an operator wrote the file, as the message above advises: the directory's replicas are empty
    is_replacement = directory_id in used_ids and "cluster.id" not in properties and not _has_partition_folder(path)
    return measure(Directory(directory_id, path, 0, True, fresh=is_replacement))


def _has_partition_folder(path: str) -> bool:
    """Whether the directory contains any folder named TOPIC-PARTITION. Raises OSError."""
    with os.scandir(path) as entries:
        return any(entry.name.rpartition("-")[2].isdigit() and entry.is_dir() for entry in entries)


def _check_owner(properties: Mapping[str, str], path: Path, cluster_id: str, node_id: int) -> None:
    for name, expected in (("cluster.id", cluster_id), ("node.id", str(node_id))):
        actual = properties.get(name, expected)
        if actual != expected:
            raise DirectoryRefused(
                f"{path} has {name}={actual}, but this broker has {name}={expected}: the directory belongs to another"
                " broker; remove it from log.dirs"
            )


def _claim(path: str, properties_path: Path, directory_id: str, cluster_id: str, node_id: int) -> Directory:
    text = f"version=1\ncluster.id={cluster_id}\nnode.id={node_id}\ndirectory.id={directory_id}\n"
    try:
        os.makedirs(path, exist_ok=True)
        native.file_replace(properties_path, text.encode())
    except OSError as error:
        log.error("log directory cannot be written: no partition is placed there", directory=path, reason=str(error))
        return Directory("", path, 0, False)
    return measure(Directory(directory_id, path, 0, True))


def measure(directory: Directory) -> Directory:
    """The directory with its current free space; unusable if its file system is read-only or cannot
    be queried.
    """
    if not directory.directory_id:
        return directory
    try:
        status = os.statvfs(directory.path)
    except OSError:
        return directory._replace(free_bytes=0, usable=False)
    is_writable = not status.f_flag & os.ST_RDONLY
    return directory._replace(free_bytes=status.f_bavail * status.f_frsize, usable=is_writable)


class DirectoryMonitor:
    """Measures the file systems of log.dirs. Each is queried in a thread of its own, one query at a
    time: a caller waits RESPONSE_S at most, and a disk that hangs occupies only one thread and does
    not keep the process from ending. `entries`: as identified at the start; a directory that was
    unusable at the start stays unusable until a restart, whatever its file system reports.
    Used only in the event loop's thread.
    """

    def __init__(self, entries: Iterable[Directory]) -> None:
        self._entries = list(entries)
        self._requests: dict[int, asyncio.Future[Directory]] = {}
        self._unresponsive: set[int] = set()

    async def measure_all(self) -> list[Directory]:
        """The entries in their current state; one whose file system does not respond is unusable."""
        for index, entry in enumerate(self._entries):
            if entry.usable and index not in self._requests:
                self._requests[index] = in_thread(partial(measure, entry))
        if self._requests:
            await asyncio.wait(self._requests.values(), timeout=RESPONSE_S)
        return [self._state_of(index, entry) for index, entry in enumerate(self._entries)]

    def _state_of(self, index: int, entry: Directory) -> Directory:
        request = self._requests.get(index)
        if request is None:
            return entry
        if not request.done():
            if index not in self._unresponsive:
                self._unresponsive.add(index)
                log.error(
                    "file system does not respond: until it does, no partition is placed there, and its partitions"
                    " count as failed",
                    directory=entry.path,
                    seconds=RESPONSE_S,
                )
            return entry._replace(free_bytes=0, usable=False)
        del self._requests[index]
        if index in self._unresponsive:
            self._unresponsive.discard(index)
            log.info("file system responds again", directory=entry.path)
        return request.result()


def holds_partitions(path: str) -> bool:
    """Whether there is any partition in this directory. Called when the metadata log is empty, to
    find out whether the metadata was lost.
    """
    try:
        return any(entry.is_dir() and (Path(entry.path) / "partition.metadata").exists() for entry in os.scandir(path))
    except OSError:
        return False
