"""How the commands authenticate and decrypt values: by the settings in the client's properties file
(--client-config or MQD_CLIENT_CONFIG), with Kafka's names (security.protocol, sasl.*, ssl.*) and
mqd's encryption.*.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

from mqd.client.encryption import settings as encryption_settings
from mqd.client.encryption.settings import Encryption
from mqd.security import client
from mqd.security.client import ClientSecurity

Argument = TypeVar("Argument")
Result = TypeVar("Result")
VARIABLE = "MQD_CLIENT_CONFIG"
_credentials: ContextVar[ClientSecurity | None] = ContextVar("credentials", default=None)


@contextlib.contextmanager
def acting_as(credentials: ClientSecurity) -> Iterator[None]:
    """Within this context, this thread's clients use these credentials instead of those of the
    file. They do not use the file's encryption keys either, which belong to the process, not to
    this user.
    """
    token = _credentials.set(credentials)
    try:
        yield
    finally:
        _credentials.reset(token)


def with_credentials(function: Callable[[Argument], Result]) -> Callable[[Argument], Result]:
    """Returns `function` for use in other threads, with this thread's credentials: acting_as() has
    no effect in other threads.
    """
    credentials = _credentials.get()

    def with_same_credentials(argument: Argument) -> Result:
        token = _credentials.set(credentials)
        try:
            return function(argument)
        finally:
            _credentials.reset(token)

    return with_same_credentials


@functools.cache
def _read(file: str) -> tuple[ClientSecurity, dict[str, str]]:
    return client.read_properties(Path(file))


def from_file() -> ClientSecurity:
    """Raises ConfigError."""
    file = os.environ.get(VARIABLE, "")
    return _read(file)[0] if file else ClientSecurity()


def current(properties: Mapping[str, str] | None = None) -> ClientSecurity:
    """The credentials in use. `properties`: the command's own (-X), which take precedence. Raises
    ConfigError.
    """
    chosen = _credentials.get()
    if chosen is None:
        chosen = from_file()
    command_security = client.security_from_properties(properties or {})
    return ClientSecurity({**chosen.settings, **command_security.settings})


def take_encryption(properties: dict[str, str]) -> Encryption | None:
    """Returns the encryption settings of the client's file and of `properties` (the command's own,
    -X), and removes them from `properties`. Raises ConfigError.
    """
    file = os.environ.get(VARIABLE, "")
    effective = {**(_read(file)[1] if file and _credentials.get() is None else {}), **properties}
    encryption_properties = {name: value for name, value in effective.items() if name.startswith("encryption.")}
    for name in encryption_properties:
        properties.pop(name, None)
    return encryption_settings.take(encryption_properties)
