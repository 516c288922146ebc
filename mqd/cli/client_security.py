"""How the commands prove who they are: the client's properties file of --client-config or
MQD_CLIENT_CONFIG, with Kafka's names (security.protocol, sasl.*, ssl.*).
"""

import functools
import os
from collections.abc import Mapping
from pathlib import Path

from mqd.security import client
from mqd.security.client import ClientSecurity

VARIABLE = "MQD_CLIENT_CONFIG"


@functools.cache
def _read(file: str) -> ClientSecurity:
    return client.read(Path(file))[0]


def current(properties: Mapping[str, str] | None = None) -> ClientSecurity:
    """`properties`: the command's own (-X), which win. Raises ConfigError."""
    file = os.environ.get(VARIABLE, "")
    chosen = _read(file) if file else ClientSecurity()
    own = client.of_properties(properties or {})
    return ClientSecurity({**chosen.settings, **own.settings})
