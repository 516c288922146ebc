"""The message classes: `from mqd.protocol.messages import MetadataRequest, MetadataResponse`.

Each is a msgspec.Struct with the fields of every version; encoding omits fields that the version
lacks, and decoding sets them to their defaults. Nested structs are attributes of their message:
`MetadataResponse.Topic(name="t", partitions=[MetadataResponse.Partition(...)])`. All arguments are
optional; pass them by keyword, because positional ones follow the order of the schema.

The other modules of this package are generated, one from each module of mqd/protocol/schema. Each
is imported when one of its classes is first used: most processes need few of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import msgspec

from mqd.protocol.schema import APIS, FAMILY_NAMES
from mqd.protocol.schema.language import Message, Struct

if TYPE_CHECKING:
    from mqd.protocol.messages.acls import *
    from mqd.protocol.messages.admin import *
    from mqd.protocol.messages.authentication import *
    from mqd.protocol.messages.cluster import *
    from mqd.protocol.messages.consumer_groups import *
    from mqd.protocol.messages.groups import *
    from mqd.protocol.messages.hot_path import *
    from mqd.protocol.messages.interbroker import *
    from mqd.protocol.messages.share_groups import *
    from mqd.protocol.messages.streams_groups import *
    from mqd.protocol.messages.tokens import *
    from mqd.protocol.messages.topics import *
    from mqd.protocol.messages.transactions import *

_KEYS = {api.name + kind: (api.key, kind) for api in APIS.values() for kind in ("Request", "Response")}
_messages: dict[str, Message] = {}  # parsed when they are first encoded or decoded
_messages_by_class: dict[type, tuple[Message, Struct]] = {}

__all__ = sorted(_KEYS)  # noqa: PLE0605


if not TYPE_CHECKING:  # type checkers see the names above and must reject all others

    def __getattr__(name: str) -> type[msgspec.Struct]:
        if name not in _KEYS:
            raise AttributeError(f"no Kafka message named {name!r} in mqd.protocol.schema")
        return message_class(*_KEYS[name])


def __dir__() -> list[str]:
    return [*globals(), *_KEYS]


def message_class(api_key: int, kind: str) -> type[msgspec.Struct]:
    """The class of an API's "Request" or "Response". Raises KeyError for an unknown key."""
    name = APIS[api_key].name + kind
    return globals().get(name) or _load(name, FAMILY_NAMES[api_key])


def _load(name: str, family: str) -> type[msgspec.Struct]:
    loaded_class = globals()[name] = getattr(import_module(f"{__name__}.{family}"), name)
    return loaded_class


def message_of(cls: type) -> tuple[Message, Struct]:
    """The message and the struct of a class. Raises KeyError when it is not a message class."""
    return _messages_by_class.get(cls) or _find_message(cls)


def _find_message(cls: type) -> tuple[Message, Struct]:
    name, _, nested = cls.__qualname__.partition(".")
    if not cls.__module__.startswith(f"{__name__}."):
        raise KeyError(cls)
    if name not in _messages:
        key, kind = _KEYS[name]
        _messages[name] = APIS[key].message(kind)
    message = _messages[name]
    _messages_by_class[cls] = (message, message.structs[nested] if nested else message.root)
    return _messages_by_class[cls]
