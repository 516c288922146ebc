"""The settings that dedup.window.ms requires of a topic. Leaders, followers and restarted brokers
all read the ids from the topic's log, so its records must be uncompressed and have the time of
their append as their timestamp.
"""

from collections.abc import Mapping

from mqd.base.property_values import ConfigError

HEADER_BYTES_MAX = 63  # dedup_header in struct mqd_log_options, without its NUL
_REQUIRED = (("message.timestamp.type", "LogAppendTime"), ("compression.type", "uncompressed"))


def check(effective: Mapping[str, str]) -> None:
    """`effective`: the topic's own settings, and the defaults of the others. Raises ConfigError."""
    header = effective["dedup.header"]
    if not 0 < len(header.encode()) <= HEADER_BYTES_MAX or "\0" in header:
        raise ConfigError(
            f"dedup.header must have 1 to {HEADER_BYTES_MAX} bytes, none of them 0", "dedup.header", header
        )
    window_ms = effective["dedup.window.ms"]
    if window_ms == "0":
        return
    for name, value in _REQUIRED:
        if effective[name] != value:
            raise ConfigError(
                f"dedup.window.ms needs {name}={value} among the topic's own settings", "dedup.window.ms", window_ms
            )
    if "compact" in effective["cleanup.policy"]:
        raise ConfigError(
            "dedup.window.ms cannot be set with cleanup.policy=compact; use cleanup.policy=delete",
            "dedup.window.ms",
            window_ms,
        )
