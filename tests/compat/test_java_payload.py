"""The Java reader of encrypted values (examples/java): it passes the test vectors, and a Java
consumer reads values sealed by mqd.Producer.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from mqd import Producer
from mqd.client.encryption.keys import format_keys, new_key
from tests.broker import Broker
from tests.compat.java_client import build_java_client
from tests.spark.support import new_topic
from tests.unit.client.encryption.vectors import FILE

pytestmark = pytest.mark.slow  # a JVM for each step
ROOT = Path(__file__).parents[2]
# codecs that the JDK cannot decompress
FOREIGN_CODECS = ("snappy", "lz4", "zstd")


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command, built as described in examples/java/README.md."""
    libraries = build_java_client() / "libraries"
    classes = tmp_path_factory.mktemp("java-payload")
    sources = [
        *sorted((ROOT / "examples" / "java" / "mqd").glob("*.java")),
        Path(__file__).parent / "java_payload/Payload.java",
    ]
    done = subprocess.run(
        ["javac", "-Xlint:all", "-Werror", "-cp", f"{libraries}/*", "-d", str(classes), *map(str, sources)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"
    return ["java", "-Xmx256m", "-XX:+UseSerialGC", quiet, "-cp", f"{classes}:{libraries}/*", "Payload"]


def _run(command: list[str], *arguments: str, text: str = "") -> list[str]:
    done = subprocess.run([*command, *arguments], input=text, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_the_vectors(java: list[str], tmp_path: Path) -> None:
    published = json.loads(FILE.read_text("utf-8"))
    keys = tmp_path / "keys"
    keys.write_text(format_keys({name: bytes.fromhex(key) for name, key in published["keys"].items()}), "utf-8")
    cases = [*published["vectors"], *published["broken"]]
    lines = [
        f"{one['topic'].encode().hex()} {'-' if one['record_key'] is None else one['record_key']} {one['envelope']}\n"
        for one in cases
    ]
    responses = _run(java, "vectors", str(keys), text="".join(lines))
    assert len(responses) == len(cases)
    for one, response in zip(cases, responses, strict=True):
        if "why" in one:
            assert response.startswith("no ") and re.search(one["why"], response), (one["name"], response)
        elif one["codec"] in FOREIGN_CODECS:
            assert "the JDK does not have codec" in response, (one["name"], response)
        else:
            assert response == f"ok {one['value']}", one["name"]


def test_a_consumer(java: list[str], shared_broker: Broker, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(format_keys({"key-1": new_key()}))
    topic = new_topic(shared_broker)
    settings = {"bootstrap.servers": shared_broker.bootstrap}
    provider = f"file:{keys}"
    sealing = {**settings, "encryption.key.provider": provider, "encryption.compression": "gzip"}
    value = "zwanzig Münzen " * 20
    with Producer({**sealing, "transport": "shm"}) as producer:
        producer.produce(topic, value, key=b"k")
        producer.produce(topic, None, key=b"k")
        producer.flush(60)
    with Producer({**sealing, "transport": "tcp"}) as producer:
        producer.produce(topic, b"short")
        producer.flush(60)
    with Producer(settings) as producer:
        producer.produce(topic, b"plain")
        producer.flush(60)
    reported = f"encryption.key.provider={provider}"
    found = _run(java, "consume", shared_broker.bootstrap, topic, "4", reported)
    assert found[:3] == [f"value {value.encode().hex()}", "value null", f"value {b'short'.hex()}"]
    assert found[3].startswith("error 3 ") and "it is not sealed" in found[3]
    text = "encryption.value.deserializer=org.apache.kafka.common.serialization.StringDeserializer"
    found = _run(
        java, "consume", shared_broker.bootstrap, topic, "4", reported, text, "encryption.plaintext.allow=true"
    )
    assert found == [f"value {value}", "value null", "value short", "value plain"]
    foreign = tmp_path / "foreign"
    foreign.write_text(format_keys({"key-2": new_key()}))
    found = _run(java, "consume", shared_broker.bootstrap, topic, "1", f"encryption.key.provider=file:{foreign}")
    assert "its key 'key-1' is not among [key-2]" in found[0]
