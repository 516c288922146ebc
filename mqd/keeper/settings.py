"""The keeper's settings: from a file that `mqd up` has written, with all properties resolved, or,
under the user's own supervisord, from the environment.

    MQD_DATA_DIR       the data directory
    MQD_CONFIG         a properties file (optional)
    MQD_WORKERS        how many workers supervisord starts; the keeper must have the same number
    MQD_RUN_RESOLVED   the file in which `mqd up` has saved the resolved properties; MQD_CONFIG and
                       MQD_WORKERS are then ignored
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from mqd.base.paths import Layout, default_data_dir, layout

# Prefixes of MQD_ variables that are not properties: supervisord.conf, the native file layer and
# the processes themselves use them.
_NOT_PROPERTIES = ("MQD_WORKERS", "MQD_PYTHON", "MQD_RUN_", "MQD_FILE_")
# arena size of the acceptor and of the controller: for responses and control records, not for the
# records of clients
CONTROL_ARENA_BYTES = 8 << 20
_CLIENT_VARIABLE = "MQD_SOCKET"  # for clients on this host (mqd/shm/rendezvous.py)


class Settings(msgspec.Struct, frozen=True):
    places: Layout
    config: dict[str, str]  # resolved: log.dirs absolute, worker.count the actual number
    worker_count: int
    log_dirs: list[str]


def properties_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the MQD_ variables that are not properties."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(_NOT_PROPERTIES) and name != _CLIENT_VARIABLE
    }


def resolve(config: dict[str, str], places: Layout, worker_count: int | None = None) -> Settings:
    """Fills in values that depend on the host and the data directory. Raises ConfigError."""
    from mqd.base.config import broker_value
    from mqd.base.property_values import ConfigError
    from mqd.security import host_identity, tls_files

    configured_dirs = config.get("log.dirs")
    log_dirs = (
        [os.path.abspath(text.strip()) for text in configured_dirs.split(",") if text.strip()]
        if configured_dirs
        else [str(places.log_dir)]
    )
    if len({os.path.realpath(directory) for directory in log_dirs}) != len(log_dirs):
        raise ConfigError(f"log.dirs names a directory twice: {configured_dirs}", "log.dirs", configured_dirs)
    if len(log_dirs) > 32:
        raise ConfigError(
            f"log.dirs names {len(log_dirs)} directories; at most 32 are allowed", "log.dirs", configured_dirs
        )
    if any("," in directory for directory in log_dirs):
        raise ConfigError(
            "a directory of log.dirs cannot have a comma in its name; choose another --data-dir or log.dirs",
            "log.dirs",
            configured_dirs,
        )
    configured = broker_value(config, "worker.count")
    count = worker_count or (configured if isinstance(configured, int) else 0) or _default_worker_count(config, places)
    config = host_identity.with_absolute_paths(tls_files.with_absolute_paths(config))
    config = {**config, "log.dirs": ",".join(log_dirs), "worker.count": str(count)}
    return Settings(places, config, count, log_dirs)


def _default_worker_count(config: dict[str, str], places: Layout) -> int:
    """One worker for each usable CPU, or fewer if there is too little shared memory for them. At
    least one, even if the memory is too small; the keeper then reports what is missing.
    """
    from mqd import native
    from mqd.base.config import broker_number, usable_cpu_count
    from mqd.shm import segments

    count, free_bytes = usable_cpu_count(), segments.free_bytes(places.data_dir)
    if free_bytes is None:
        return count
    arena_bytes = broker_number(config, "receive.arena.bytes")

    def needed_bytes(workers: int) -> int:
        fixed_bytes = native.control_size_bytes() + native.links_size_bytes(workers + 2)
        return fixed_bytes + workers * arena_bytes + 2 * CONTROL_ARENA_BYTES

    return next((workers for workers in range(count, 1, -1) if needed_bytes(workers) <= free_bytes), 1)


def save(settings: Settings) -> None:
    """Writes the file for the keeper that `mqd up` is about to start; the keeper removes it. Raises
    OSError.
    """
    temporary = settings.places.resolved_config.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(settings.config))
    os.replace(temporary, settings.places.resolved_config)


def load(environment: Mapping[str, str] = os.environ) -> Settings:
    """Raises ConfigError; OSError or msgspec.DecodeError if the resolved file is missing or
    damaged.
    """
    data_dir = environment.get("MQD_DATA_DIR")
    places = layout(data_dir or default_data_dir())
    resolved = environment.get("MQD_RUN_RESOLVED")
    if resolved:
        config = msgspec.json.decode(Path(resolved).read_bytes(), type=dict[str, str])
        Path(resolved).unlink()  # it holds passwords, and the keeper reads it only once
        return Settings(places, config, int(config["worker.count"]), config["log.dirs"].split(","))
    from mqd.base.config import load_broker

    file = environment.get("MQD_CONFIG")
    workers = environment.get("MQD_WORKERS", "")
    config = load_broker(Path(file) if file else None, properties_environment(environment), {})
    return resolve(config, places, int(workers) if workers.isdigit() else None)
