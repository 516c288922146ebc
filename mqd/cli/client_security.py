"""How the commands authenticate and decrypt sealed values: the client's properties file of
--client-config or MQD_CLIENT_CONFIG, with Kafka's names (security.protocol, sasl.*, ssl.*) and
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
_user: ContextVar[ClientSecurity | None] = ContextVar("user", default=None)


@contextlib.contextmanager
def acting_as(user: ClientSecurity) -> Iterator[None]:
    """Within this context, this thread's clients use these credentials instead of those of the
    file. They do not use the file's encryption keys either, which belong to the process, not to this
    user.
    """
    token = _user.set(user)
    try:
        yield
    finally:
        _user.reset(token)


def with_credentials(function: Callable[[Argument], Result]) -> Callable[[Argument], Result]:
    """`function`, to be called in other threads with this thread's credentials: acting_as() has no
    effect there.
    """
    user = _user.get()

    def acting(argument: Argument) -> Result:
        token = _user.set(user)
        try:
            return function(argument)
        finally:
            _user.reset(token)

    return acting


@functools.cache
def _read(file: str) -> tuple[ClientSecurity, dict[str, str]]:
    return client.read(Path(file))


def of_file() -> ClientSecurity:
    """Raises ConfigError."""
    file = os.environ.get(VARIABLE, "")
    return _read(file)[0] if file else ClientSecurity()


def current(properties: Mapping[str, str] | None = None) -> ClientSecurity:
    """`properties`: the command's own (-X), which take precedence. Raises ConfigError."""
    chosen = _user.get()
    if chosen is None:
        chosen = of_file()
    own = client.of_properties(properties or {})
    return ClientSecurity({**chosen.settings, **own.settings})


def take_encryption(properties: dict[str, str]) -> Encryption | None:
    """Returns how values are encrypted, and removes those settings from `properties`, the command's
    own. Raises ConfigError.
    """
    file = os.environ.get(VARIABLE, "")
    given = {**(_read(file)[1] if file and _user.get() is None else {}), **properties}
    found = {name: value for name, value in given.items() if name.startswith("encryption.")}
    for name in found:
        properties.pop(name, None)
    return encryption_settings.take(found)
