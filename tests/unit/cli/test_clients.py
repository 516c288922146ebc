"""produce, consume and cat against librdkafka's own mock cluster, which needs no broker; topic
commands are tested with a real one.
"""

import io
import json
import sys
import uuid

import pytest

from mqd.cli import main as main_module

confluent_kafka = pytest.importorskip("confluent_kafka")


@pytest.fixture(scope="module")
def bootstrap():
    """Address of a mock cluster (4 partitions per topic, created on demand) in this process."""
    holder = confluent_kafka.Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "mock", "log_level": 0})
    broker = next(iter(holder.list_topics(timeout=10).brokers.values()))
    yield f"{broker.host}:{broker.port}"
    del holder


@pytest.fixture
def topic() -> str:
    return "t" + uuid.uuid4().hex[:12]


class Stdin:
    def __init__(self, data: bytes):
        self.buffer = io.BytesIO(data)

    def isatty(self) -> bool:
        return False


@pytest.fixture
def mqd(bootstrap, monkeypatch, capfdbinary):
    """mqd("consume", ..., stdin=b"") -> (exit code, stdout, stderr)"""
    monkeypatch.setenv("MQD_BOOTSTRAP", bootstrap)

    def call(*arguments: str, stdin: bytes = b"") -> tuple[int, bytes, str]:
        monkeypatch.setattr(sys, "stdin", Stdin(stdin))
        capfdbinary.readouterr()
        code = main_module._run(list(arguments))
        sys.stdout.flush()
        out, error = capfdbinary.readouterr()
        return code, out, error.decode()

    return call


def test_lines_are_produced_and_consumed(mqd, topic):
    code, output, error = mqd("produce", topic, "-p", "2", "-k", ":", "-H", "h=1", stdin=b"a:1\n\nb:2:3\nplain\n")
    assert (code, output) == (0, b"") and " written to " in error
    code, out, error = mqd("consume", topic, "-e", "-Z", "-f", "%p %o %k=%v %h\\n")
    assert (code, error) == (0, "")
    assert out == b"2 0 a=1 h=1\n2 1 b=2:3 h=1\n2 2 NULL=plain h=1\n"


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_codecs(mqd, topic, codec):
    data = b"".join(b"%d\n" % number for number in range(500))
    code, out, _ = mqd("produce", topic, "-z", codec, "-p", "0", "--format", "json", stdin=data)
    assert code == 0 and json.loads(out) | {"seconds": 0} == {
        "topic": topic,
        "records": 500,
        "bytes": len(data) - 500,
        "seconds": 0,
    }
    assert mqd("consume", topic, "-e") == (0, data, "")


def test_files_and_nulls(mqd, topic, tmp_path):
    (tmp_path / "a").write_bytes(b"one\ntwo")
    (tmp_path / "b").write_bytes(b"\xff\0three\n")
    assert mqd("produce", topic, str(tmp_path / "a"), str(tmp_path / "b"), "-p", "0")[0] == 0
    assert mqd("produce", topic, "--whole-files", str(tmp_path / "a"), "-p", "0")[0] == 0
    assert mqd("produce", topic, "-Z", "-k", "=", "-p", "0", stdin=b"gone=\n")[0] == 0
    code, out, _ = mqd("consume", topic, "-e", "--format", "json")
    shown = [json.loads(line) for line in out.splitlines()]
    assert [record.get("value", record.get("value_base64")) for record in shown] == [
        "one",
        "two",
        "/wB0aHJlZQ==",
        "one\ntwo",
        None,
    ]
    assert shown[-1]["key"] == "gone"


def test_start_and_end_positions(mqd, topic):
    for second in range(5):  # five records with timestamps a second apart
        producer = confluent_kafka.Producer({"bootstrap.servers": main_module.os.environ["MQD_BOOTSTRAP"]})
        producer.produce(topic, str(second).encode(), partition=0, timestamp=1_700_000_000_000 + second * 1000)
        producer.flush()

    def values(*arguments: str) -> bytes:
        code, out, error = mqd("consume", topic, "-p", "0", "-f", "%v", *arguments)
        assert (code, error) == (0, "")
        return out

    assert values("-e") == b"01234"
    assert values("-e", "-o", "3") == b"34"
    assert values("-e", "-o", "-2") == b"34"
    assert values("-e", "-o", "-99") == b"01234"
    assert values("-e", "-o", "end") == b""
    assert values("-n", "2") == b"01"
    assert values("-n", "2", "-o", "-2") == b"34"


def test_missing_topics_and_partitions(mqd, topic):
    assert mqd("produce", topic, stdin=b"x\n")[0] == 0
    code, out, error = mqd("consume", topic, "-p", "9", "-e")
    assert (code, out) == (1, b"") and error == f"mqd: topic {topic} has no partition 9; it has 0 to 3\n"
    code, out, error = mqd("produce", topic, "-p", "9", stdin=b"x\ny\n")
    assert (code, out) == (1, b"") and error.startswith("mqd: 2 of 2 records were not written: ")
    code, _, error = mqd("consume", "absent-" + topic, "-e")
    assert code == 1 and "mqd topic create makes one" in error
    code, _, error = mqd("consume", topic, "-X", "no.such=1", "-e")
    assert code == 1 and "no.such" in error and error.count("\n") == 1


# -- kcat's options --------------------------------------------------------------------------------


def test_cat_produces_and_consumes(mqd, topic):
    code, out, error = mqd(
        "cat", "-t", topic, "-p", "1", "-K:", "-H", "a=1", "-H", "b", "-Z", stdin=b"k1:v1\n\nk2:v2\nv3\n:v4\nk5:\n"
    )
    assert (code, out, error) == (0, b"", "% Auto-selecting Producer mode (use -P or -C to override)\n")
    code, out, error = mqd(
        "cat", "-C", "-t", topic, "-p1", "-e", "-f", "Topic %t [%p] at %o: %k|%K:%s|%S h=%h %R\\n", "-Z"
    )
    assert error == f"% Reached end of topic {topic} [1] at offset 5: exiting\n"
    head = f"Topic {topic} [1] at ".encode()
    assert out == b"".join(
        head + line + b"\n"
        for line in (
            b"0: k1|2:v1|2 h=a=1,b=NULL \0\0\0\2",
            b"1: k2|2:v2|2 h=a=1,b=NULL \0\0\0\2",
            b"2: NULL|-1:v3|2 h=a=1,b=NULL \0\0\0\2",
            b"3: NULL|-1:v4|2 h=a=1,b=NULL \0\0\0\2",
            b"4: k5|2:NULL|-1 h=a=1,b=NULL \xff\xff\xff\xff",
        )
    )
    assert mqd("cat", "-C", "-t", topic, "-p", "1", "-e", "-q", "-K:", "-o", "-2")[1] == b":v4\nk5:\n"
    assert (
        mqd("cat", "-C", "-t", topic, "-p", "1", "-q", "-O", "-K\\t", "-D", "|", "-c", "2")[1]
        == b"0\tk1\tv1|1\tk2\tv2|"
    )
    first = json.loads(mqd("cat", "-C", "-t", topic, "-p", "1", "-q", "-J", "-c", "1", "-u")[1])
    assert first | {"ts": 0} == {
        "topic": topic,
        "partition": 1,
        "offset": 0,
        "tstype": "create",
        "ts": 0,
        "broker": 1,
        "headers": ["a", "1", "b", None],
        "key": "k1",
        "payload": "v1",
    }
    assert list(first) == ["topic", "partition", "offset", "tstype", "ts", "broker", "headers", "key", "payload"]


def test_cat_files_tee_count_and_fixed_key(mqd, topic, tmp_path):
    (tmp_path / "a").write_bytes(b"one\ntwo\n")
    assert mqd("cat", "-P", "-t", topic, "-p", "0", str(tmp_path / "a"))[0] == 0
    assert mqd("cat", "-P", "-t", topic, "-p", "0", "-l", "-k", "fix", "-z", "lz4", str(tmp_path / "a"))[0] == 0
    assert mqd("cat", "-P", "-t", topic, "-p", "0", "-c", "2", "-T", stdin=b"1\n2\n3\n")[1] == b"12"
    assert mqd("cat", "-P", "-t", topic, str(tmp_path / "absent"))[0::2] == (
        1,
        f"mqd: {tmp_path / 'absent'}: No such file or directory\n",
    )
    assert (
        mqd("cat", "-C", "-t", topic, "-p", "0", "-e", "-q", "-f", "%k=%s;")[1] == b"=one\ntwo\n;fix=one;fix=two;=1;=2;"
    )


def test_cat_lists_and_queries(mqd, topic):
    assert mqd("cat", "-P", "-t", topic, "-p", "3", stdin=b"x\n")[0] == 0
    code, out, _ = mqd("cat", "-L", "-t", topic)
    lines = out.decode().splitlines()
    assert code == 0 and lines[0].startswith(f"Metadata for {topic} (from broker ") and lines[1] == " 1 brokers:"
    assert lines[3:] == [
        " 1 topics:",
        f'  topic "{topic}" with 4 partitions:',
        *(f"    partition {index}, leader 1, replicas: 1, isrs: 1" for index in range(4)),
    ]
    listed = json.loads(mqd("cat", "-L", "-J", "-t", topic)[1])
    assert listed["query"] == {"topic": topic}
    assert listed["topics"][0]["partitions"][0] == {
        "partition": 0,
        "leader": 1,
        "replicas": [{"id": 1}],
        "isrs": [{"id": 1}],
    }
    assert mqd("cat", "-Q", "-t", f"{topic}:3:-1")[1] == f"{topic} [3] offset 1\n".encode()
    assert json.loads(mqd("cat", "-Q", "-J", "-t", f"{topic}:3:-1")[1]) == {
        topic: {"topic": topic, "3": {"partition": 3, "offset": 1}}
    }


def test_cat_fails_as_kcat_does(mqd, topic):
    code, _, error = mqd("cat", "-b", "127.0.0.1:1", "-L")
    assert code == 1 and "cannot reach a broker" in error
    assert mqd("cat", "-C", "-t", "absent-" + topic, "-e")[0] == 1
    code, _, error = mqd("cat", "-P", "-t", topic, "-z", "brotli")
    assert code == 1 and "brotli" in error
