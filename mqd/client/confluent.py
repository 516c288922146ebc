"""confluent_kafka's modules under mqd's name: `from mqd.schema_registry.avro import AvroSerializer`.

`mqd` and each `mqd.<module of confluent_kafka>` export the same names as their counterparts. The
client classes (CLIENTS) are this package's own; every other name is confluent_kafka's object
itself, so that both imports give the same class.

A few modules build on a client (_REBUILT: SerializingProducer derives from Producer). Their source
is run a second time with its imports of confluent_kafka changed to mqd, just as an application
changes its own. No module of confluent_kafka is imported before it is used.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

TYPE_CHECKING = False  # `typing` costs more to import than the rest of this module
if TYPE_CHECKING:
    from typing import Any

THEIRS, OURS = "confluent_kafka", "mqd"
CLIENTS = ("AdminClient", "Consumer", "Message", "Producer", "ShareConsumer")
_REBUILT = (
    "avro",
    "deserializing_consumer",
    "deserializing_share_consumer",
    "serializing_producer",
    "schema_registry.rules.dlq.dlq_action",
)
_REBUILT_WITH_SUBMODULES = ("aio", "kafkatest")
# Modules of mqd itself: confluent_kafka is not searched for these.
OWN_MODULES = frozenset(
    [
        "_native", "acceptor", "base", "cli", "client", "cluster", "console", "controller", "coordinator",
        "keeper", "log", "monitoring", "native", "protocol", "security", "shm", "spark", "timer", "worker",
        "__main__",
    ]
)  # fmt: skip


def find(name: str, *, module: str = "") -> object:
    """Resolves `mqd.<module>.<name>`; `module` is "" for the package itself. AttributeError if
    confluent_kafka has no such name.
    """
    theirs = importlib.import_module(_join_name(THEIRS, module))
    try:
        attribute = getattr(theirs, name)
    except AttributeError:
        raise AttributeError(f"module {_join_name(OURS, module)!r} has no attribute {name!r}") from None
    if name in CLIENTS and (attribute.__module__.partition(".")[0] in (THEIRS, "cimpl")):
        return getattr(importlib.import_module("mqd.client"), name)
    if isinstance(attribute, ModuleType) and attribute.__name__.startswith(THEIRS + "."):
        return importlib.import_module(OURS + attribute.__name__.removeprefix(THEIRS))
    defining_module = getattr(attribute, "__module__", None)
    if isinstance(defining_module, str) and is_rebuilt(defining_module.removeprefix(THEIRS + ".")):
        return getattr(importlib.import_module(OURS + defining_module.removeprefix(THEIRS)), name)
    return attribute


def names(module: str = "") -> list[str]:
    """The public names of the counterpart: its __all__, or the names that do not begin with "_"."""
    theirs = importlib.import_module(_join_name(THEIRS, module))
    listed: list[str] = getattr(theirs, "__all__", None) or [name for name in vars(theirs) if name[0] != "_"]
    return sorted(listed)


def is_rebuilt(module: str) -> bool:
    """Whether `mqd.<module>` is made from confluent_kafka's source, not from its objects."""
    return module in _REBUILT or module.partition(".")[0] in _REBUILT_WITH_SUBMODULES


def install() -> None:
    """Makes the modules importable; called once, by `import mqd`."""
    # First, so that a directory on the path cannot shadow them.
    sys.meta_path.insert(0, _Finder())


class _Finder:
    def find_spec(self, fullname: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        if package != OURS or not rest or rest.partition(".")[0] in OWN_MODULES:
            return None
        import importlib.util  # only when needed: each process of the broker imports this module

        try:
            theirs = importlib.util.find_spec(_join_name(THEIRS, rest))
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == THEIRS:
                return None
            raise  # an extra of confluent_kafka is not installed
        if theirs is None:
            return None
        loader: Any = _AliasLoader(rest)
        if is_rebuilt(rest):
            from mqd.client.confluent_rebuilding import RebuildingLoader

            loader = RebuildingLoader(theirs)
        # No search path: submodules, too, are found only by this finder.
        is_package = theirs.submodule_search_locations is not None
        return ModuleSpec(fullname, loader, origin=theirs.origin, is_package=is_package)


class _AliasLoader:
    """Loads a module whose names are looked up in the counterpart when they are first used."""

    def __init__(self, rest: str) -> None:
        self._rest = rest

    def create_module(self, _spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        rest = self._rest
        module.__doc__ = importlib.import_module(_join_name(THEIRS, rest)).__doc__

        def __getattr__(name: str) -> object:
            if name == "__all__":
                return names(rest)
            if name.startswith("__"):
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            value = find(name, module=rest)
            setattr(module, name, value)
            return value

        vars(module).update(__getattr__=__getattr__, __dir__=lambda: sorted({*vars(module), *names(rest)}))


def _join_name(package: str, rest: str) -> str:
    return f"{package}.{rest}" if rest else package
