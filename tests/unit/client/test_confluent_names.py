"""An application only changes `confluent_kafka` to `mqd` in its imports: every module and name of
the installed confluent_kafka also exists under mqd, at run time and for mypy.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import confluent_kafka
import pytest
from confluent_kafka import cimpl

import mqd
from mqd.client import confluent

ROOT = Path(__file__).parents[3]
# Requirements of confluent_kafka's extras that the test extra does not install: large key and rule
# systems for its schema registry. verifiable_client only runs beside other programs.
NOT_INSTALLED = {"azure", "boto3", "celpy", "google.api_core", "hkdf", "hvac", "jsonata", "tink", "verifiable_client"}


def modules() -> list[str]:
    """Modules of confluent_kafka, without that prefix."""

    def ignore(_name: str) -> None:
        pass

    prefix = "confluent_kafka."
    walked = pkgutil.walk_packages(confluent_kafka.__path__, prefix, onerror=ignore)
    return [found.name.removeprefix(prefix) for found in walked]


def public(module: ModuleType) -> list[str]:
    return [name for name in vars(module) if not name.startswith("_")]


def imported(name: str) -> ModuleType | str:
    """The module, or the name of the missing one."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        return str(error.name)


def test_the_package_has_every_name() -> None:
    missing = [name for name in public(confluent_kafka) if not hasattr(mqd, name)]
    assert not missing
    assert set(confluent_kafka.__all__) <= set(mqd.__all__)  # type: ignore[attr-defined]
    assert set(public(confluent_kafka)) >= {"Producer", "SerializingProducer", "ThrottleEvent"}


@pytest.mark.parametrize("name", modules())
def test_every_module_has_every_name(name: str) -> None:
    theirs = imported(f"confluent_kafka.{name}")
    ours = imported(f"mqd.{name}")
    if isinstance(theirs, str):
        assert ours == theirs and theirs in NOT_INSTALLED  # the same package is missing for both
        return
    assert isinstance(ours, ModuleType), f"mqd.{name} cannot be imported: no {ours}"
    assert [known for known in public(theirs) if not hasattr(ours, known)] == []
    for known in set(public(theirs)) - set(confluent.CLIENTS):
        value = getattr(theirs, known)
        if isinstance(value, type) and not confluent.is_rebuilt(value.__module__.removeprefix("confluent_kafka.")):
            assert getattr(ours, known) is value, f"mqd.{name}.{known} is a second class"


@pytest.mark.parametrize("name", [name for name in modules() if not confluent.is_rebuilt(name)])
def test_modules_that_use_a_client_are_listed(name: str) -> None:
    """A module that is used unchanged imports neither Producer nor Consumer: it would use
    confluent_kafka's.
    """
    spec = find_spec(f"confluent_kafka.{name}") if name.partition(".")[0] != "schema_registry" else None
    path = Path(confluent_kafka.__path__[0], *name.split("."))
    source = path.with_suffix(".py") if spec is None or spec.origin is None else Path(spec.origin)
    if source.suffix != ".py":  # the extension
        return
    source = source if source.exists() else path / "__init__.py"
    found = [
        alias.name
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert not {"Producer", "Consumer"} & set(found)


def test_clients_are_ours() -> None:
    from mqd import admin, aio, avro, client  # fmt: skip
    from mqd import cimpl as extension  # type: ignore[attr-defined]  # found by __getattr__

    assert mqd.Producer is client.Producer is extension.Producer
    assert mqd.Consumer is client.Consumer is extension.Consumer
    assert mqd.AdminClient is admin.AdminClient is client.AdminClient
    assert extension.Message is client.Message and issubclass(client.Message, cimpl.Message)
    assert issubclass(mqd.SerializingProducer, mqd.Producer)
    assert issubclass(mqd.DeserializingConsumer, mqd.Consumer)
    assert issubclass(avro.AvroProducer, mqd.Producer) and issubclass(avro.AvroConsumer, mqd.Consumer)
    assert aio.AIOProducer.__module__.startswith("mqd.aio")
    assert mqd.KafkaException is confluent_kafka.KafkaException


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'mqd' has no attribute 'Produser'"):
        _ = mqd.Produser  # type: ignore[attr-defined]  # what is tested
    with pytest.raises(ImportError, match="cannot import name 'NewTopik' from 'mqd.admin'"):
        exec("from mqd.admin import NewTopik")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'mqd\.nowhere'"):
        importlib.import_module("mqd.nowhere")


def test_an_own_module_is_imported_without_confluent_kafka() -> None:
    code = "import sys; from mqd import native; assert not any('confluent' in name for name in sys.modules if '.' not in name)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_own_modules_are_listed() -> None:
    here = {path.name.partition(".")[0] for path in (ROOT / "mqd").iterdir() if path.suffix != ".pyi"}
    here -= {"__init__", "__pycache__", "_native", "py", "supervisord", "schema_registry"}
    assert here | {"_native"} == set(confluent.OWN_MODULES) - {"__main__"} | (here & {"__main__"})
    assert not confluent.OWN_MODULES & {name.partition(".")[0] for name in modules()}


def test_the_import_is_cheap() -> None:
    """No process of the broker pays for the client."""
    program = "import sys, mqd, mqd.base.clock; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-S", "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "mqd.client.confluent" in loaded
    assert not loaded & {"confluent_kafka", "ast", "typing", "asyncio", "numpy", "importlib.util"}


# -- types -----------------------------------------------------------------------------------------

STUBS = sorted((ROOT / "mqd").rglob("*.pyi"))


@pytest.mark.parametrize("stub", [path for path in STUBS if path.read_text()], ids=lambda path: path.stem)
def test_a_stub_names_what_is_there(stub: Path) -> None:
    name = ".".join(stub.relative_to(ROOT / "mqd").with_suffix("").parts).removesuffix(".__init__")
    theirs = importlib.import_module(f"confluent_kafka.{name}")
    named = {
        alias.asname
        for node in ast.parse(stub.read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {known for known in getattr(theirs, "__all__", ()) if not known.startswith("_")} <= named
    defined = {
        known
        for known, value in vars(theirs).items()
        if not known.startswith("_") and isinstance(value, type) and value.__module__ in (theirs.__name__, "cimpl")
    }
    assert defined <= named


PROGRAM = """
from mqd import AcknowledgeType, Consumer, KafkaError, KafkaException, Message, Producer, SerializingProducer
from mqd import ShareConsumer, TopicPartition
from mqd.admin import AdminClient, NewTopic
from mqd.aio import AIOProducer
from mqd.schema_registry import SchemaRegistryClient
from mqd.schema_registry.avro import AvroSerializer
from mqd.serialization import StringSerializer


def on_delivery(error: KafkaError | None, message: Message) -> None:
    if error is not None:
        raise KafkaException(error)
    print(message.topic(), message.offset())


producer = Producer({"bootstrap.servers": "127.0.0.1:9092"})
producer.produce("events", value=b"hello", on_delivery=on_delivery)
left: int = producer.flush(10)
consumer = Consumer({"bootstrap.servers": "127.0.0.1:9092", "group.id": "readers"})
consumer.assign([TopicPartition("events", 0)])
message = consumer.poll(1.0)
if message is not None and message.error() is None:
    value: bytes | None = message.value()
with ShareConsumer({"bootstrap.servers": "127.0.0.1:9092", "group.id": "workers"}) as worker:
    worker.subscribe(["events"])
    for job in worker.consume(10, timeout=1.0):
        count: int | None = job.delivery_count()
        worker.acknowledge(job, AcknowledgeType.RELEASE)
    failed = [error for error in worker.commit_sync().values() if error is not None]
AdminClient({"bootstrap.servers": "127.0.0.1:9092"}).create_topics([NewTopic("events", 3)])
SerializingProducer({"bootstrap.servers": "127.0.0.1:9092", "key.serializer": StringSerializer()})
"""
MISTAKES = {
    'consumer.poll("soon")': "arg-type",
    "from mqd import Produser": "attr-defined",
    "from mqd.admin import NewTopik": "attr-defined",
    "producer.produse": "attr-defined",
    'worker.acknowledge(job, "later")': "arg-type",
}


@pytest.mark.slow  # mypy reads the whole package
def test_mypy_accepts_a_program_and_finds_its_mistakes(tmp_path: Path) -> None:
    # An editable installation uses an import hook, which mypy does not run.
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "mqd").symlink_to(ROOT / "mqd")
    assert (ROOT / "mqd" / "py.typed").exists()
    (tmp_path / "program.py").write_text(PROGRAM + "\n".join(MISTAKES))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-error-summary", "program.py"],
        cwd=tmp_path,
        env={"MYPYPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
    )
    assert not done.stderr, done.stderr
    found = [re.fullmatch(r"program\.py:(\d+): error: .* \[(.+)\]", line) for line in done.stdout.splitlines()]
    assert all(found), done.stdout
    first = len(PROGRAM.splitlines()) + 1
    assert [(int(match[1]) - first, match[2]) for match in found if match] == list(enumerate(MISTAKES.values()))
