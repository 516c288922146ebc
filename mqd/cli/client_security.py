"""How the commands prove who they are and open sealed values: the client's properties file of
--client-config or MQD_CLIENT_CONFIG, with Kafka's names (security.protocol, sasl.*, ssl.*) and
mqd's encryption.*.
"""

import functools
import os
from collections.abc import Mapping
from pathlib import Path

from mqd.client.encryption import settings as encryption_settings
from mqd.client.encryption.settings import Encryption
from mqd.security import client
from mqd.security.client import ClientSecurity

VARIABLE = "MQD_CLIENT_CONFIG"


@functools.cache
def _read(file: str) -> tuple[ClientSecurity, dict[str, str]]:
    return client.read(Path(file))


def current(properties: Mapping[str, str] | None = None) -> ClientSecurity:
    """`properties`: the command's own (-X), which win. Raises ConfigError."""
    file = os.environ.get(VARIABLE, "")
    chosen = _read(file)[0] if file else ClientSecurity()
    own = client.of_properties(properties or {})
    return ClientSecurity({**chosen.settings, **own.settings})


def take_encryption(properties: dict[str, str]) -> Encryption | None:
    """How values are encrypted; its settings are taken out of the command's own. Raises ConfigError."""
    file = os.environ.get(VARIABLE, "")
    given = {**(_read(file)[1] if file else {}), **properties}
    found = {name: value for name, value in given.items() if name.startswith("encryption.")}
    for name in found:
        properties.pop(name, None)
    return encryption_settings.take(found)
