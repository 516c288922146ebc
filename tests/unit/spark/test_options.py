"""Options of format("mqd"): accepted and refused ones, and error messages."""

from __future__ import annotations

import json
import logging

import pytest

from mqd.client.encryption.settings import Encryption
from mqd.spark.options import (
    EARLIEST,
    LATEST,
    REFUSED_BY_SINK,
    REFUSED_BY_SOURCE,
    Boundary,
    MqdOptionError,
    SparkOptions,
    kafka_settings,
    parse_assign,
    parse_offsets,
    source_options,
)

BASE = {"kafka.bootstrap.servers": "a:9092", "subscribe": "orders"}


def _refused(text: str, streaming: bool = False, **given: str) -> None:
    with pytest.raises(MqdOptionError) as error:
        source_options({**BASE, **given}, streaming)
    assert text in str(error.value), str(error.value)


def test_defaults_are_kafkas() -> None:
    stream, batch = source_options(BASE, True), source_options(BASE, False)
    assert (
        stream.starting == Boundary(symbolic=LATEST)
        and batch.starting == Boundary(symbolic=EARLIEST)
        and batch.ending == Boundary(symbolic=LATEST)
    )
    assert stream.topics == ("orders",) and stream.fail_on_data_loss and not stream.include_headers
    assert stream.max_trigger_delay_ms == 15 * 60_000 and stream.poll_timeout_s == 120 and stream.retries == 3
    assert (
        stream.max_offsets_per_trigger,
        stream.min_offsets_per_trigger,
        stream.min_partitions,
        stream.max_records_per_partition,
        stream.group_id,
    ) == (None,) * 5
    assert not stream.kafka.read_committed and stream.kafka.transport == "auto"


def test_names_are_case_insensitive() -> None:
    given = {
        "KAFKA.BOOTSTRAP.SERVERS": "a:1",
        "Subscribe": "x, y,x",
        "MAXOFFSETSPERTRIGGER": "7",
        "includeheaders": "TRUE",
        "Kafka.Isolation.Level": "READ_COMMITTED",
        "kafka.fetch.max.wait.ms": "1",
    }
    read = source_options(given, True)
    assert (
        read.topics == ("x", "y")
        and read.max_offsets_per_trigger == 7
        and read.include_headers
        and read.kafka.read_committed
    )
    assert read.kafka.others == {"fetch.max.wait.ms": "1"}


@pytest.mark.parametrize("name", REFUSED_BY_SOURCE)
def test_refused_configuration_of_the_source(name: str) -> None:
    _refused(f"Kafka option '{name}' is not supported", **{f"kafka.{name}": "x"})


@pytest.mark.parametrize("name", REFUSED_BY_SINK)
def test_refused_configuration_of_the_sink(name: str) -> None:
    with pytest.raises(MqdOptionError, match=f"'{name}' is not supported"):
        kafka_settings(SparkOptions({**BASE, f"kafka.{name}": "x"}), REFUSED_BY_SINK, "producer")


def test_encryption_of_values() -> None:
    given = {**BASE, "Encryption.Key.Provider": "file:/Keys", "encryption.topics": "orders"}
    assert source_options(given, False).kafka.encryption == Encryption("file:/Keys", ("orders",))
    assert source_options(BASE, False).kafka.encryption is None
    _refused('option No such configuration property: "encryption.key.provder"', **{"encryption.key.provder": "x"})
    _refused("leave out kafka.", **{"kafka.encryption.key.provider": "file:/keys"})
    _refused("encryption.key.provider is needed for encryption", **{"encryption.topics": "orders"})


def test_invalid_options_are_refused() -> None:
    _refused("subscribe", subscribe=" , ")
    _refused("Only one of the following options", subscribePattern="x")
    with pytest.raises(MqdOptionError, match="One of the following options must be specified"):
        source_options({"kafka.bootstrap.servers": "a"}, False)
    with pytest.raises(MqdOptionError, match="'kafka.bootstrap.servers' must be specified"):
        source_options({"subscribe": "a"}, False)
    _refused("starting offset can't be latest", startingOffsets="latest")
    _refused("ending offset can't be earliest", endingOffsets="earliest")
    _refused("starting offset for orders-1 can't be latest", startingOffsets='{"orders":{"0":1,"1":-1}}')
    _refused("ending offset for orders-0 can't be earliest", endingOffsets='{"orders":{"0":-2}}')
    for name in ("endingOffsets", "endingOffsetsByTimestamp", "endingTimestamp"):
        _refused("ending offset not valid in streaming queries", True, **{name: "latest"})
    for name in ("minPartitions", "maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxRecordsPerPartition"):
        _refused(f"option {name}", True, **{name: "0"})
        _refused("not a whole number", True, **{name: "many"})
    _refused("higher than the maxOffsetsPerTrigger", True, minOffsetsPerTrigger="5", maxOffsetsPerTrigger="4")
    _refused("neither true nor false", failOnDataLoss="perhaps")
    _refused("not a timestamp in milliseconds", startingTimestamp="2024-01-01")
    _refused("not a duration", True, maxTriggerDelay="soon")
    _refused("is not one of error, latest", startingOffsetsByTimestampStrategy="guess")
    _refused("is not known", **{"kafka.security.protocol": "TLS"})
    _refused("does not authenticate", **{"kafka.sasl.mechanism": "PLAIN"})
    _refused("another identity", **{"kafka.security.protocol": "SSL", "transport": "shm"})
    _refused("neither read_committed", **{"kafka.isolation.level": "serializable"})
    _refused("transport", transport="pigeon")
    _refused("not a consumer group", True, groupId="")
    with pytest.raises(MqdOptionError, match="not a regular expression"):
        source_options({"kafka.bootstrap.servers": "a", "subscribePattern": "("}, False)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"a": 0}',
        '{"a": {"x": 0}}',
        '{"a": {"0": "1"}}',
        '{"a": {"0": -3}}',
        '{"a": {"0": true}}',
        '{"a": {"0": 1.5}}',
        '{"a": {"99999999999": 1}}',
    ],
)
def test_invalid_offsets(text: str) -> None:
    with pytest.raises(MqdOptionError, match="startingOffsets"):
        parse_offsets(text, "startingOffsets", minimum=-2)


@pytest.mark.parametrize("text", ["", "{}", '{"a": []}', '{"a": [-1]}', '{"a": ["0"]}', '{"a": [true]}', "null"])
def test_invalid_assignments(text: str) -> None:
    with pytest.raises(MqdOptionError, match="assign"):
        parse_assign(text)


def test_precedence_of_start_options() -> None:
    """One timestamp for all takes precedence over timestamps by partition, those over offsets."""
    given = {"startingOffsets": '{"orders":{"0":3}}'}
    assert source_options({**BASE, **given}, False).starting == Boundary(offsets={"orders": {0: 3}})
    given["startingOffsetsByTimestamp"] = '{"orders":{"0":5}}'
    assert source_options({**BASE, **given}, False).starting == Boundary(timestamps={"orders": {0: 5}})
    given["startingTimestamp"] = "7"
    assert source_options({**BASE, **given}, False).starting == Boundary(timestamp=7)
    assert source_options({**BASE, "startingOffsets": "EARLIEST"}, True).starting == Boundary(symbolic=EARLIEST)


def test_offsets_of_a_checkpoint_are_accepted() -> None:
    """mqd's name the topics' ids in addition; a user who copies them from a query's progress need
    not remove them.
    """
    text = json.dumps({"orders": {"0": 3}, "@topic_ids": {"orders": "AAAA"}})
    assert source_options({**BASE, "startingOffsets": text}, True).starting.offsets == {"orders": {0: 3}}


def test_assign_and_durations() -> None:
    given = {"kafka.bootstrap.servers": "a", "assign": '{"b":[1,0,1],"a":[2],"c":[]}', "maxTriggerDelay": "90s"}
    read = source_options(given, True)
    assert (
        read.assigned == {"a": [2], "b": [0, 1]} and read.topics == ("a", "b") and read.max_trigger_delay_ms == 90_000
    )


def test_options_without_effect_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mqd.spark"):
        source_options({**BASE, "maxOffsetsPerTrigger": "5", "kafka.group.id": "g"}, False)
    assert "maxOffsetsPerTrigger option ignored in batch queries" in caplog.text and "kafka.group.id" in caplog.text


def test_an_archive_is_for_batches_and_offsets() -> None:
    assert source_options({**BASE, "archive": "/a"}, False).archive == "/a"
    _refused("option archive is for spark.read", True, archive="/a")
    _refused("option archive needs limits by offset", archive="/a", startingTimestamp="1000")


def test_credentials_require_tcp():
    found = kafka_settings(
        SparkOptions(
            {
                **BASE,
                "kafka.security.protocol": "SASL_SSL",
                "kafka.sasl.mechanism": "SCRAM-SHA-512",
                "kafka.sasl.jaas.config": "org.apache.kafka.common.security.scram.ScramLoginModule required"
                ' username="alice" password="s3cret";',
                "kafka.ssl.truststore.location": "/ca.pem",
                "kafka.ssl.truststore.type": "PEM",
            }
        ),
        {},
    )
    assert found.transport == "tcp" and not found.others
    assert found.security == {
        "security.protocol": "SASL_SSL",
        "sasl.mechanisms": "SCRAM-SHA-512",
        "sasl.username": "alice",
        "sasl.password": "s3cret",
        "ssl.ca.location": "/ca.pem",
    }
    assert kafka_settings(SparkOptions(BASE), {}).transport == "auto"
