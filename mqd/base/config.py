"""Configuration: the sources of values, their validation, and their precedence.

A broker's value comes from the first of: the command line, the environment (MQD_LOG_RETENTION_MS),
the file (server.properties), the default. A topic's value comes from the first of: the topic, the
broker (static, or set at run time), the default. All values stay text, as on the wire; parse_value
gives them a type (property_values.py). An unknown name or an invalid value is always an error: a
misspelt retention would delete data.

mqd/base/config_page.py prints docs/configuration.md.
"""

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from mqd.base import cluster_config, dead_letters, deduplication, listeners, views
from mqd.base.config_providers import PARAMETERS, PROVIDERS, Providers
from mqd.base.fifo import FIFO, parse_fifo
from mqd.base.kafka_names import ALIASES, HARMLESS, REFUSED
from mqd.base.offset_reset import parse_offset_reset
from mqd.base.properties import BROKER as BROKER
from mqd.base.properties import CLIENT_METRICS as CLIENT_METRICS
from mqd.base.properties import CLIENT_METRICS_MATCHED, INT_MAX, LONG_MAX
from mqd.base.properties import GROUP as GROUP
from mqd.base.properties import TOPIC as TOPIC
from mqd.base.properties import Property as Property
from mqd.base.properties_file import parse_properties
from mqd.base.property_values import ConfigError, Value, allowed_text, canonical_text, parse_value

ENVIRONMENT_PREFIX = "MQD_"
# Variables with our prefix that are not properties: those of the command line, of tests and of
# measurements.
ENVIRONMENT_RESERVED = frozenset(
    {
        "MQD_BOOTSTRAP",
        "MQD_CLIENT_CONFIG",
        "MQD_CONFIG",
        "MQD_DATA_DIR",
        "MQD_DEBUG",
        "MQD_PROFILE",
        "MQD_PYTHON",
        "MQD_WORKERS",
    }
)
_ENVIRONMENT_ORIGIN = "environment variable "
ENVIRONMENT_RESERVED_PREFIXES = ("MQD_TEST_", "MQD_CRASH_", "MQD_PERF_", "MQD_FAULT_", "MQD_RUN_")
_ARENA_EXTENT_BYTES = 65536
_LENGTH_WORD_BYTES = 4


# -- names -----------------------------------------------------------------------------------------


def property_of(table: Mapping[str, Property], name: str) -> Property:
    """The property with this name. Raises ConfigError with the closest known name."""
    if name in table:
        return table[name]
    override = listeners.override_of(name)
    if table is BROKER and override is not None:
        return _listener_property(*override)
    for prefix, why in REFUSED.items():
        if name.startswith(prefix):
            raise ConfigError(f"{name} cannot be set: {why}", name)
    if table is TOPIC and name in BROKER:
        topic_name = next((row.name for row in TOPIC.values() if row.broker_name == name), None)
        hint = f"; the topic's name for it is {topic_name}" if topic_name else ""
        raise ConfigError(f"{name} is a property of brokers, not of topics{hint}", name)
    if table is BROKER and name in TOPIC:
        broker_name = TOPIC[name].broker_name
        hint = f"; the broker's name for it is {broker_name}" if broker_name else ""
        raise ConfigError(f"{name} is a property of topics, not of brokers{hint}", name)
    close = difflib.get_close_matches(name, table, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]}?" if close else "see docs/configuration.md for the known ones"
    raise ConfigError(f"{name} is not a known property; {hint}", name)


def _listener_property(listener: str, key: str) -> Property:
    try:
        prop = property_of(BROKER, key)
    except ConfigError as error:
        raise ConfigError(f"listener.name.{listener.lower()}.{error}", key) from None
    name = listeners.override_name(listener, key)
    if not prop.per_listener:
        raise ConfigError(f"{name} cannot be set: {key} is the same for all listeners", name)
    return msgspec.structs.replace(prop, name=name)


def broker_value(config: Mapping[str, str], name: str) -> Value | None:
    """The typed value of a broker's property; its default if `config` has none; None if the
    default is "not set".
    """
    text = config.get(name, BROKER[name].default)
    return None if text is None else parse_value(BROKER[name], text)


def broker_number(config: Mapping[str, str], name: str) -> int:
    """The value of a broker's property that is a number and always set."""
    value = broker_value(config, name)
    assert isinstance(value, int | float), f"{name} is not a number, or may be unset"
    return int(value)


def topic_value(effective: Mapping[str, str], name: str) -> Value:
    """The typed value from the result of topic_effective."""
    return parse_value(TOPIC[name], effective[name])


def topic_number(effective: Mapping[str, str], name: str) -> int:
    value = topic_value(effective, name)
    assert isinstance(value, int | float), f"{name} is not a number"
    return int(value)


def topic_list(effective: Mapping[str, str], name: str) -> list[str]:
    value = topic_value(effective, name)
    assert isinstance(value, list), f"{name} is not a list"
    return value


# -- sources ---------------------------------------------------------------------------------------


def _from_file(file: Path) -> dict[str, tuple[str, str]]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {file}: {error}") from error
    return {name: (value, f"{file} line {number}") for name, (value, number) in parse_properties(text).items()}


def from_environment(environment: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Returns property -> (value, where it was set)."""
    values = {}
    for variable, value in environment.items():
        if (
            not variable.startswith(ENVIRONMENT_PREFIX)
            or variable in ENVIRONMENT_RESERVED
            or variable.startswith(ENVIRONMENT_RESERVED_PREFIXES)
        ):
            continue
        values[variable.removeprefix(ENVIRONMENT_PREFIX).lower().replace("_", ".")] = (
            value,
            f"{_ENVIRONMENT_ORIGIN}{variable}",
        )
    return values


def load_broker(
    file: Path | None,
    environment: Mapping[str, str],
    overrides: Mapping[str, str],
    defaults: Mapping[str, str] | None = None,
    secret_variables: set[str] | None = None,
) -> dict[str, str]:
    """Returns a broker's complete configuration: every property that has a value, in canonical text.
    References are resolved (config_providers.py), and the values are checked against each other.

    `environment` is usually os.environ, `overrides` come from the command line, `defaults` from
    `mqd up --secure`; any other source overrides these. Absent from the result: properties that
    have neither a value nor a default (log.dirs, advertised.listeners, log.retention.ms...).
    `secret_variables` gets the names of the environment variables that sensitive values come from.
    Raises ConfigError, which says where the value was set.
    """
    config = {name: prop.default for name, prop in BROKER.items() if prop.default is not None}
    chosen: dict[str, str] = {}
    command_line = {name: (value, "command line") for name, value in overrides.items()}
    secure = {name: (value, "--secure") for name, value in (defaults or {}).items()}
    sources = (secure, _from_file(file) if file else {}, from_environment(environment), command_line)
    providers = _providers(sources, environment)
    for source in sources:
        for name, (text, origin) in source.items():
            if HARMLESS.get(name) == text.strip() or name.startswith(PARAMETERS):
                continue
            try:
                prop = property_of(BROKER, ALIASES.get(name, name))
                chosen[prop.name] = _resolve(prop, text, providers)
            except ConfigError as error:
                raise ConfigError(f"{origin}: {error}", error.name, error.value) from None
            if secret_variables is not None and prop.sensitive:
                variable = origin.removeprefix(_ENVIRONMENT_ORIGIN)
                secret_variables |= providers.variables_used | ({variable} - {origin})
            providers.variables_used.clear()
    config.update(chosen)
    if "large.request.memory.bytes" not in chosen:
        memory_bytes = max(int(config["large.request.memory.bytes"]), int(config["socket.request.max.bytes"]))
        config["large.request.memory.bytes"] = str(memory_bytes)
    _check_broker(config)
    return config


_Source = Mapping[str, tuple[str, str]]


def _providers(sources: tuple[_Source, ...], environment: Mapping[str, str]) -> Providers:
    settings: dict[str, str] = {}
    origin = ""
    for source in sources:
        for name, (text, setting_origin) in source.items():
            if name == PROVIDERS or name.startswith(PARAMETERS):
                settings[name], origin = text, setting_origin
    try:
        return Providers(settings, environment, parse_properties)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}", error.name, error.value) from None


def _resolve(prop: Property, text: str, providers: Providers) -> str:
    """The canonical text. Errors do not show the value of a reference, which may be a secret."""
    try:
        value = providers.resolve(text)
    except ConfigError as error:
        raise ConfigError(f"{prop.name}: {error}", prop.name, text) from None
    if value == text:
        return canonical_text(prop, text)
    try:
        return canonical_text(prop, value)
    except ConfigError:
        raise ConfigError(
            f"{prop.name} cannot be the value that {text} refers to: it must be {allowed_text(prop)}", prop.name, text
        ) from None


def without_effect(config: Mapping[str, str]) -> list[str]:
    """Returns the properties that have no effect but are set to a non-default value: they are
    logged, so that no operator relies on them.
    """
    return sorted(
        name
        for name, value in config.items()
        if name in BROKER and BROKER[name].ignored and value != BROKER[name].default
    )


# -- cross-checks ----------------------------------------------------------------------------------


def _require(ok: bool, message: str, name: str, config: Mapping[str, str]) -> None:
    if not ok:
        raise ConfigError(message, name, config.get(name))


STANDBYS, MAX_STANDBYS = "streams.num.standby.replicas", "group.streams.max.standby.replicas"
_GROUP_BOUNDS = {
    "consumer.session.timeout.ms": ("group.consumer.min.session.timeout.ms", "group.consumer.max.session.timeout.ms"),
    "consumer.heartbeat.interval.ms": (
        "group.consumer.min.heartbeat.interval.ms",
        "group.consumer.max.heartbeat.interval.ms",
    ),
    "streams.session.timeout.ms": ("group.streams.min.session.timeout.ms", "group.streams.max.session.timeout.ms"),
    "streams.heartbeat.interval.ms": (
        "group.streams.min.heartbeat.interval.ms",
        "group.streams.max.heartbeat.interval.ms",
    ),
    "share.session.timeout.ms": ("group.share.min.session.timeout.ms", "group.share.max.session.timeout.ms"),
    "share.heartbeat.interval.ms": ("group.share.min.heartbeat.interval.ms", "group.share.max.heartbeat.interval.ms"),
    "share.record.lock.duration.ms": (
        "group.share.min.record.lock.duration.ms",
        "group.share.max.record.lock.duration.ms",
    ),
}


def _check_replicas(config: Mapping[str, str], clustered: bool) -> None:
    # accepting the property without honouring it would be dangerous: acks=all would be acknowledged
    # with fewer replicas than requested
    configured = int(config["min.insync.replicas"])
    _require(
        configured != 0,
        "min.insync.replicas=0 is not allowed: the leader itself counts; set it to 1 or more, or to -1",
        "min.insync.replicas",
        config,
    )
    _require(
        configured <= 1 or clustered,
        f"min.insync.replicas={configured} cannot be met: a single host keeps only one replica of a partition;"
        " set it to 1",
        "min.insync.replicas",
        config,
    )


def _check_flush_interval(config: Mapping[str, str], on_ack: str, messages: str, interval: str) -> None:
    # records are not counted, so without flush.on.ack the property would not be honoured
    _require(
        config[on_ack] == "true" or config[messages] == str(LONG_MAX),
        f"{messages}={config[messages]} cannot be combined with {on_ack}=false: records are not counted; set"
        f" {on_ack}=true, or {interval} instead",
        messages,
        config,
    )


def _check_broker(config: Mapping[str, str]) -> None:
    def at_most(smaller: str, larger: str, why: str, margin: int = 0) -> None:
        low, high = int(config[smaller]), int(config[larger])
        _require(low + margin <= high, f"{smaller}={low} is too large for {larger}={high}: {why}", smaller, config)

    at_most(
        "socket.request.max.bytes",
        "large.request.memory.bytes",
        "such a request could never be received; raise large.request.memory.bytes or lower socket.request.max.bytes",
    )
    at_most(
        "message.max.bytes",
        "socket.request.max.bytes",
        "such a batch could never arrive; raise socket.request.max.bytes or lower message.max.bytes",
    )
    _check_flush_interval(config, "log.flush.on.ack", "log.flush.interval.messages", "log.flush.interval.ms")
    at_most("log.preallocate.bytes.min", "log.preallocate.bytes.max", "the first step must not exceed the largest")
    _require(
        int(config["receive.arena.bytes"]) % _ARENA_EXTENT_BYTES == 0,
        f"receive.arena.bytes={config['receive.arena.bytes']} must be a multiple of {_ARENA_EXTENT_BYTES}",
        "receive.arena.bytes",
        config,
    )
    free, reserve = int(config["retention.free.bytes"]), int(config["log.dirs.free.bytes.min"])
    _require(
        free < 0 or free > reserve,
        f"retention.free.bytes={free} must exceed log.dirs.free.bytes.min={reserve}: otherwise Produce is refused"
        " before any record is deleted",
        "retention.free.bytes",
        config,
    )
    scrub_ms = int(config["log.scrub.interval.ms"])
    _require(
        scrub_ms < 0 or scrub_ms >= 1000,
        f"log.scrub.interval.ms={scrub_ms} must be at least 1000, or -1 for never",
        "log.scrub.interval.ms",
        config,
    )
    for name, (low, high) in _GROUP_BOUNDS.items():
        at_most(low, f"group.{name}", "the default must be a value that groups may set")
        at_most(f"group.{name}", high, "the default must be a value that groups may set")
    for kind in ("consumer", "share", "streams"):
        heartbeat, session = f"group.{kind}.heartbeat.interval.ms", f"group.{kind}.session.timeout.ms"
        at_most(heartbeat, session, "members would be removed between two heartbeats", margin=1)
    at_most(f"group.{STANDBYS}", MAX_STANDBYS, "the default must be a value that groups may set")
    for principal in config["super.users"].split(";"):
        _require(
            not principal.strip() or re.fullmatch(r"[^:;]+:.+", principal.strip()) is not None,
            f"super.users names {principal.strip()!r}: a principal has a type and a name, such as User:admin",
            "super.users",
            config,
        )
    listeners.check_address_limits(config)
    cluster_config.check(config)
    _check_replicas(config, cluster_config.listens_for_hosts(config))
    parse_cpus(config["worker.cpus"])
    parsed = listeners.parse_listeners(config)
    listeners.check_overrides(config, parsed)
    listeners.metrics_listener(config)
    for listener in parsed:
        listeners.check_authentication(config, listener)
    for name in listeners.advertised_listeners(config):
        _require(
            name in {listener.name for listener in parsed},
            f"`advertised.listeners` contains {name}, which `listeners` does not: {config['listeners']}",
            "advertised.listeners",
            config,
        )


def parse_cpus(text: str) -> list[int]:
    """Parses "0,2-3" to [0, 2, 3], in the order of the text. Raises ConfigError."""
    cpus: list[int] = []
    for member in (member.strip() for member in text.split(",") if member.strip()):
        match = re.fullmatch(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", member)
        last = int(match[2] or match[1]) if match else -1
        if match is None or last < int(match[1]) or last > 4095:
            raise ConfigError(
                f"worker.cpus cannot be {text!r}: it must be CPU numbers and ranges such as 0,2-3", "worker.cpus", text
            )
        cpus.extend(range(int(match[1]), last + 1))
    if len(set(cpus)) != len(cpus):
        raise ConfigError(f"worker.cpus cannot be {text!r}: a CPU is listed twice", "worker.cpus", text)
    return cpus


def usable_cpu_count(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Number of CPUs that this process may use: affinity, and the cgroup's quota rounded up (cgroup
    v2 cpu.max; v1 cpu.cfs_quota_us). At least 1, at most 64.
    """
    count = len(os.sched_getaffinity(0))

    def read(name: str) -> list[str]:
        try:
            return (cgroup / name).read_text().split()
        except OSError:
            return []

    quota = read("cpu.max") or read("cpu/cpu.cfs_quota_us") + read("cpu/cpu.cfs_period_us")
    if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit() and int(quota[1]) > 0:
        count = min(count, -(-int(quota[0]) // int(quota[1])))
    return max(1, min(count, 64))


# -- effective values ------------------------------------------------------------------------------


def broker_effective(static: Mapping[str, str], dynamic: Mapping[str, str]) -> dict[str, str]:
    """Returns the configuration loaded at start, overlaid with run-time settings."""
    return {**static, **dynamic}


def validate_broker_dynamic(
    config: Mapping[str, str | None], static: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Validates properties to be set on a running broker; returns them in canonical text. The value
    None removes a property, so that its static value applies again. With `static`, also checks
    that the result is consistent with it. Raises ConfigError.
    """
    canonical: dict[str, str] = {}
    for name, text in config.items():
        prop = property_of(BROKER, name)
        if not prop.dynamic:
            raise ConfigError(
                f"{name} cannot be changed while the broker runs; set it in the configuration file and restart",
                name,
                text,
            )
        if text is not None:
            canonical[name] = canonical_text(prop, text)
    if static is not None:
        _check_broker(broker_effective(static, canonical))
    return canonical


_ScaledProperties = tuple[tuple[str, int], ...]
# Topic's property -> the broker's properties that may supply its value (the first one set wins),
# each with the factor that converts it to milliseconds (negative values mean "never").
_FALLBACKS: dict[str, _ScaledProperties] = {
    "retention.ms": (("log.retention.ms", 1), ("log.retention.minutes", 60_000), ("log.retention.hours", 3_600_000)),
    "segment.ms": (("log.roll.ms", 1), ("log.roll.hours", 3_600_000)),
    "segment.jitter.ms": (("log.roll.jitter.ms", 1), ("log.roll.jitter.hours", 3_600_000)),
    "flush.ms": (("log.flush.interval.ms", 1), ("log.flush.scheduler.interval.ms", 1)),
}


def _broker_default(broker: Mapping[str, str], prop: Property) -> str:
    for name, factor in _FALLBACKS.get(prop.name, ()):
        if name in broker:
            value = int(broker[name])
            return str(value * factor if value >= 0 else -1)
    default = prop.default
    assert default is not None  # every property of topics has one
    return broker.get(prop.broker_name, default) if prop.broker_name else default


def topic_effective(broker: Mapping[str, str], topic: Mapping[str, str]) -> dict[str, str]:
    """Every property of a topic with its effective value. `broker` is the result of
    broker_effective (or load_broker), `topic` the topic's own settings.
    """
    return {name: topic[name] if name in topic else _broker_default(broker, prop) for name, prop in TOPIC.items()}


def arena_bytes(config: Mapping[str, str]) -> tuple[int, int]:
    """Returns the shared memory of one worker for received data: (the reserved part, the total
    including the memory for large requests, which is allocated on demand).
    """
    reserved = int(config["receive.arena.bytes"])
    large = int(config["large.request.memory.bytes"]) + _LENGTH_WORD_BYTES
    return reserved, reserved + -(-large // _ARENA_EXTENT_BYTES) * _ARENA_EXTENT_BYTES


def validate_topic(
    config: Mapping[str, str | None], clustered: bool = False, request_bytes_max: int = INT_MAX
) -> dict[str, str]:
    """Validates settings of a topic; returns them in canonical text. The value None removes a
    setting, so that the broker's value applies. `clustered`: this host can create partitions with
    more than one replica. `request_bytes_max`: this host's socket.request.max.bytes. Raises
    ConfigError (INVALID_CONFIG, 40).
    """
    canonical: dict[str, str] = {}
    for name, text in config.items():
        prop = property_of(TOPIC, name)
        if text is not None:
            canonical[name] = canonical_text(prop, text)
    effective = {name: canonical.get(name, prop.default or "") for name, prop in TOPIC.items()}
    low, high = int(effective["min.compaction.lag.ms"]), int(effective["max.compaction.lag.ms"])
    _require(
        low <= high,
        f"min.compaction.lag.ms={low} must not exceed max.compaction.lag.ms={high}",
        "min.compaction.lag.ms",
        effective,
    )
    _check_flush_interval(effective, "flush.on.ack", "flush.messages", "flush.ms")
    _require(
        effective["queue.delete.on.ack"] != "true" or effective["cleanup.policy"] != "compact",
        "queue.delete.on.ack=true deletes records, which cleanup.policy=compact forbids; use cleanup.policy=delete",
        "queue.delete.on.ack",
        effective,
    )
    memory = effective["queue.unflushed.bytes"]
    _require(
        memory == "0" or effective["flush.on.ack"] != "true",
        f"queue.unflushed.bytes={memory} cannot be combined with flush.on.ack=true, which flushes each record before"
        " it is acknowledged; set flush.on.ack=false",
        "queue.unflushed.bytes",
        effective,
    )
    deduplication.check(effective)
    views.check({name: value for name, value in canonical.items() if value})
    bound = "replica.lag.max.messages"
    _require(
        effective[bound] != "0",
        f"{bound}=0 is not allowed: every follower is some records behind while records are written; set it to 1 or"
        " more, or to -1 for no bound",
        bound,
        effective,
    )
    size = int(canonical.get("max.message.bytes") or 0)
    _require(
        size <= request_bytes_max,
        f"max.message.bytes={size} is larger than socket.request.max.bytes={request_bytes_max}: such a batch could"
        " never arrive; lower it, or raise socket.request.max.bytes of the brokers",
        "max.message.bytes",
        effective,
    )
    _check_replicas(effective, clustered)
    return canonical


def group_effective(broker: Mapping[str, str], group: Mapping[str, str]) -> dict[str, str]:
    """Every property of a group with its effective value."""
    return {name: group.get(name, _broker_default(broker, prop)) for name, prop in GROUP.items()}


def validate_client_metrics(config: Mapping[str, str]) -> dict[str, str]:
    """Validates a client metrics subscription (KIP-714); returns it in canonical text.
    Raises ConfigError.
    """
    canonical = {name: canonical_text(property_of(CLIENT_METRICS, name), text) for name, text in config.items()}
    for condition in filter(None, canonical.get("match", "").split(",")):
        parameter, _, expression = condition.partition("=")
        try:
            if parameter.strip() not in CLIENT_METRICS_MATCHED or not expression or "=" in expression:
                raise ValueError
            re.compile(expression.strip())
        except (ValueError, re.error) as error:
            raise ConfigError(f"Illegal client matching pattern: {condition}", "match", condition) from error
    return canonical


def validate_group(config: Mapping[str, str | None], broker: Mapping[str, str]) -> dict[str, str]:
    """Validates settings of a group against the broker's limits; returns them in canonical
    text. Raises ConfigError.
    """
    canonical = {
        name: canonical_text(property_of(GROUP, name), text) for name, text in config.items() if text is not None
    }
    effective = group_effective(broker, canonical)
    for name in canonical.keys() & _GROUP_BOUNDS.keys():
        low, high = (broker_number(broker, bound) for bound in _GROUP_BOUNDS[name])
        _require(
            low <= int(canonical[name]) <= high,
            f"{name}={canonical[name]} must be from {low} to {high} ({' and '.join(_GROUP_BOUNDS[name])})",
            name,
            effective,
        )
    maximum, standbys = broker_number(broker, MAX_STANDBYS), int(canonical.get(STANDBYS, "0"))
    _require(
        standbys <= maximum, f"{STANDBYS}={standbys} must be at most {maximum} ({MAX_STANDBYS})", STANDBYS, effective
    )
    reset = "share.auto.offset.reset"
    try:
        parse_offset_reset(effective[reset])
    except ValueError as error:
        raise ConfigError(f"{reset}={effective[reset]} is not allowed: {error}", reset, effective[reset]) from error
    try:
        parse_fifo(effective[FIFO])
    except ValueError as error:
        raise ConfigError(f"{FIFO}={effective[FIFO]} is not allowed: {error}", FIFO, effective[FIFO]) from error
    if dlq_topic := effective[dead_letters.TOPIC]:
        problem = dead_letters.problem_of_name(dlq_topic, str(broker_value(broker, dead_letters.TOPIC_PREFIX) or ""))
        _require(not problem, problem, dead_letters.TOPIC, effective)
    backoff_name, backoff_max_name = (f"share.retry.backoff.{name}" for name in ("ms", "max.ms"))
    _require(
        int(effective[backoff_name]) <= int(effective[backoff_max_name]),
        f"{backoff_name}={effective[backoff_name]} must not be above {backoff_max_name}={effective[backoff_max_name]}",
        backoff_name if backoff_name in canonical else backoff_max_name,
        effective,
    )
    for kind in ("consumer", "share", "streams"):
        heartbeat, session = (
            int(effective[f"{kind}.{name}"]) for name in ("heartbeat.interval.ms", "session.timeout.ms")
        )
        _require(
            heartbeat < session,
            f"{kind}.session.timeout.ms={session} must be greater than {kind}.heartbeat.interval.ms={heartbeat}",
            f"{kind}.session.timeout.ms",
            effective,
        )
    return canonical
