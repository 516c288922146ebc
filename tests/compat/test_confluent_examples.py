"""The examples in confluent_kafka's README with only the import changed, and confluent_kafka's
classes that contain a client, with mqd's.

The README is that of the installed version, from its source distribution. An example's placeholders
(brokers, the address of a schema registry) are filled in, and names that it assumes
(`some_data_source`) are defined before it, as its reader would do.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tarfile
import textwrap
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import confluent_kafka
import pytest

from mqd import DeserializingConsumer, SerializingProducer
from mqd.admin import AdminClient, NewTopic
from mqd.aio import AIOConsumer, AIOProducer
from mqd.schema_registry import SchemaRegistryClient
from mqd.schema_registry.avro import AvroDeserializer, AvroSerializer
from mqd.serialization import IntegerDeserializer, IntegerSerializer
from tests.broker import Broker
from tests.ports import free_port

FETCH_S, RUN_S = 200, 60  # bound a hang
USER = {"type": "record", "name": "User", "fields": [{"name": "name", "type": "string"}]}
# Each Python example of the README, in order, by the first line that identifies it; its assumed
# names; its expected output. One also fails with confluent_kafka: its serializer needs a context
# that the example does not pass.
FAILS = "SerializationContext is required"
EXAMPLES = {
    "async def main():": ("", ""),
    "def delivery_report": (
        "some_data_source = [{'name': 'Ann', 'favorite_number': 42}]",
        "Message delivered to mytopic",
    ),
    "# 2. Configure AvroSerializer": (
        f"user_schema_str = '''{json.dumps(USER)}'''\n"
        "class User:\n    def to_dict(self): return {'name': 'Bob'}\n"
        "some_user_object = User()",
        FAILS,
    ),
    "serializer = await": (f"avro_schema, data = '''{json.dumps(USER)}''', {{'name': 'Eve'}}", ""),
    "import AsyncAvroSerializer, AsyncAvroDeserializer": ("", ""),
    "c.subscribe(": ("", "Received message: hello"),
    "a.create_topics(": ("", "Topic topic1 created"),
}


class Registry(BaseHTTPRequestHandler):
    """The part of a schema registry that a serializer uses: any schema is registered as number 1."""

    def do_POST(self) -> None:
        schema = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer({"id": 1, "version": 1, "subject": self.path.split("/")[2], **schema})

    def do_GET(self) -> None:
        self.answer([])  # no subject is associated with a topic

    def answer(self, found: object) -> None:
        response = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(response)))
        self.end_headers()
        self.wfile.write(response)

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def registry() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", free_port()), Registry) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("confluent-examples"), workers=1) as running:
        create_topics(running, "mytopic", "my-topic", "topic")
        yield running


def create_topics(broker: Broker, *names: str) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for future in admin.create_topics([NewTopic(name, 1, 1) for name in names]).values():
        future.result(20)


@pytest.fixture(scope="module")
def examples(unpacked_clients: Path) -> list[str]:
    """The README's Python examples."""
    version = confluent_kafka.__version__
    place = unpacked_clients / f"confluent-kafka-{version}"
    if not list(place.glob("*.tar.gz")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        command += ["--dest", str(place), f"confluent-kafka=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_S)
        if done.returncode != 0:
            pytest.skip(f"pip download confluent-kafka=={version}: {(done.stderr or done.stdout).strip()[-500:]}")
    with tarfile.open(next(place.glob("*.tar.gz"))) as archive:
        name = next(name for name in archive.getnames() if re.fullmatch("[^/]+/README.md", name))
        readme = archive.extractfile(name)
        assert readme is not None
        return re.findall(r"^```python\n(.*?)^```$", readme.read().decode(), re.M | re.S)


@pytest.mark.slow  # pip prepares a build of the download
@pytest.mark.parametrize("library", ["confluent_kafka", "mqd"])
def test_the_readme(library: str, examples: list[str], broker: Broker, registry: str, tmp_path: Path) -> None:
    """In order, so that the consumer finds the produced records. Running it with confluent_kafka
    shows whether a failure is mqd's.
    that a failure of ours is ours.
    """
    assert len(examples) == len(EXAMPLES), "the README has another number of examples: describe it in EXAMPLES"
    for text, (mark, (given, expected)) in zip(examples, EXAMPLES.items(), strict=True):
        assert mark in text
        program = text.replace("confluent_kafka", library)
        program = re.sub(r"mybroker1,mybroker2|mybroker\b|localhost:9092", broker.bootstrap, program)
        program = program.replace("http://localhost:8081", registry)
        program = program.replace("mygroup", f"group-{library}")
        program = program.replace("topic1", f"topic1-{library}").replace("topic2", f"topic2-{library}")
        if re.search(r"^\w.*\bawait\b", program, re.M):  # a fragment of a coroutine
            names = f"from {library}.serialization import MessageField, SerializationContext\n"
            program = (
                f"{names}async def main():\n{textwrap.indent(program, '    ')}\nimport asyncio\nasyncio.run(main())\n"
            )
        status, output = run(f"{given}\n{program}", tmp_path, until=expected if "while True" in program else None)
        assert expected.replace("topic1", f"topic1-{library}") in output, f"{program}\n{output}"
        assert (status != 0) == (expected == FAILS), f"{program}\n{output}"
        assert "ailed" not in output, f"{program}\n{output}"


def run(program: str, place: Path, until: str | None) -> tuple[int, str]:
    """Its exit status and output. With `until`: a program that loops, stopped when it has printed
    that.
    """
    (place / "example.py").write_text(program)
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, "example.py"],
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        alarm = threading.Timer(RUN_S, process.kill)
        alarm.start()
        try:
            if until is None:
                output, _ = process.communicate()
                return process.returncode, output
            assert process.stdout is not None
            output = ""
            for line in process.stdout:
                output += line
                if until in line:
                    return 0, output
            return process.wait(), output
        finally:
            alarm.cancel()
            process.kill()


# -- confluent_kafka's classes that contain a client -------------------------------------------


def test_serializers_on_shared_memory(broker: Broker) -> None:
    create_topics(broker, "serialized")
    schemas = SchemaRegistryClient.new_client({"url": "mock://serialized"})
    text = json.dumps(USER)
    settings = {"bootstrap.servers": broker.bootstrap, "transport": "shm"}
    producer = SerializingProducer(
        {**settings, "key.serializer": IntegerSerializer(), "value.serializer": AvroSerializer(schemas, text)}
    )
    assert producer.transport == "shm"
    assert producer.cluster_id(10) == AdminClient(settings).list_topics(timeout=10).cluster_id
    reports = []
    producer.produce("serialized", 7, {"name": "Ann"}, on_delivery=lambda error, message: reports.append(error))
    assert producer.flush(60) == 0 and reports == [None]
    consumer = DeserializingConsumer(
        {
            **settings,
            "group.id": "deserializing",
            "auto.offset.reset": "earliest",
            "key.deserializer": IntegerDeserializer(),
            "value.deserializer": AvroDeserializer(schemas),
        }
    )
    assert consumer.transport == "shm"
    consumer.subscribe(["serialized"])
    message = consumer.poll(20)
    consumer.close()
    producer.close()
    assert message is not None and (message.key(), message.value()) == (7, {"name": "Ann"})


def test_asyncio_on_shared_memory(broker: Broker) -> None:
    create_topics(broker, "awaited")
    settings = {"bootstrap.servers": broker.bootstrap, "transport": "shm"}

    async def there_and_back() -> list[bytes | None]:
        producer = AIOProducer(settings)
        written = await asyncio.gather(*[await producer.produce("awaited", value=b"%d" % n) for n in range(10)])
        assert [message.offset() for message in written] == list(range(10))
        await producer.close()
        consumer = AIOConsumer({**settings, "group.id": "awaiting", "auto.offset.reset": "earliest"})
        await consumer.subscribe(["awaited"])
        found: list[bytes | None] = []
        while len(found) < 10:
            found += [message.value() for message in await consumer.consume(10, timeout=20)]
        await consumer.close()
        return found

    assert asyncio.run(there_and_back()) == [b"%d" % n for n in range(10)]
