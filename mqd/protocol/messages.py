"""The message classes, made when first asked for:
`from mqd.protocol.messages import MetadataRequest, MetadataResponse`.

Each is a msgspec.Struct with the fields of every version; encoding leaves out what the version
lacks, decoding gives such fields their default. Nested structs hang on their message:
`MetadataResponse.Topic(name="t", partitions=[MetadataResponse.Partition(...)])`. All arguments are
optional and positional arguments follow the order of the schema; write keywords. Field names, types
and defaults: mqd/protocol/schema, in the notation of schema/language.py.
"""

from __future__ import annotations

import msgspec

from mqd.protocol.schema import APIS
from mqd.protocol.schema.language import Field, Message, Struct

_KEYS = {api.name + kind: (api.key, kind) for api in APIS.values() for kind in ("Request", "Response")}
_messages: dict[str, Message] = {}
_owners: dict[type, tuple[Message, Struct]] = {}

__all__ = sorted(_KEYS)  # noqa: PLE0605


def _annotation(field: Field) -> object:
    return list | None if field.is_array else object


def _make_class(name: str, struct: Struct, namespace: dict[str, object]) -> type:
    fields = []
    for field in struct.fields:
        default = msgspec.field(default_factory=list) if field.mutable_default else field.default
        fields.append((field.name, _annotation(field), default))
    return msgspec.defstruct(name, fields, namespace=namespace, module=__name__, gc=False)


def _make(name: str) -> type:
    key, kind = _KEYS[name]
    message = APIS[key].message(kind)
    nested = {struct.name: _make_class(f"{name}.{struct.name}", struct, {}) for struct in message.structs.values()}
    root = _make_class(name, message.root, dict(nested))
    for struct in message.structs.values():
        _owners[nested[struct.name]] = (message, struct)
    _owners[root] = (message, message.root)
    _messages[name] = message
    return root


def __getattr__(name: str) -> type:
    if name not in _KEYS:
        raise AttributeError(f"no Kafka message named {name!r} in mqd.protocol.schema")
    made = globals()[name] = _make(name)
    return made


def __dir__() -> list[str]:
    return [*globals(), *_KEYS]


def message_class(api_key: int, kind: str) -> type:
    """The class of an API's "Request" or "Response". Raises KeyError for an unknown key."""
    name = APIS[api_key].name + kind
    return globals().get(name) or __getattr__(name)


def owner_of(cls: type) -> tuple[Message, Struct]:
    """The message a class belongs to and the struct it stands for. Raises KeyError when it is no
    message class.
    """
    return _owners[cls]


def message_of(cls: type) -> Message:
    return _owners[cls][0]
