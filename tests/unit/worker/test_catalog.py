"""A worker's reactions to messages of the controller."""

import asyncio
import itertools
from pathlib import Path
from types import SimpleNamespace

import msgspec

from mqd import native
from mqd.base.listeners import Listener
from mqd.cluster.host.messages import Image, PartitionImage, TopicImage
from mqd.worker.assignments import ClusterView, settings_of
from mqd.worker.catalog import Catalog, Changes
from mqd.worker.open_partitions import OpenPartition
from mqd.worker.options import listener_flags, log_options, reactor_options, retention_policy
from mqd.worker.partitions import PartitionSet
from tests.unit.worker.test_strays import PlainFiles

A, B = b"a" * 16, b"b" * 16


def partition(index: int, slot: int, owner: int = 0, log_dir: int = 0, leader_epoch: int = 0) -> PartitionImage:
    return PartitionImage(index, slot, owner, log_dir, 1, leader_epoch, [1], [1])


def topic(name: str, topic_id: bytes, *partitions: PartitionImage, **config: str) -> TopicImage:
    return TopicImage(name, topic_id, list(partitions), {key.replace("_", "."): value for key, value in config.items()})


def image(*topics: TopicImage, version: int = 1, **broker_config: str) -> Image:
    return Image(
        version, "cluster", 1, [], list(topics), {key.replace("_", "."): value for key, value in broker_config.items()}
    )


def slots(changes: Changes) -> dict[str, list[int]]:
    names = ("close", "delete", "open", "set_epoch", "set_options")
    return {name: [owned.slot for owned in getattr(changes, name)] for name in names if getattr(changes, name)}


def test_an_image_opens_owned_partitions_and_names_all() -> None:
    changes = Catalog(0).on_image(image(topic("t", A, partition(0, 5), partition(1, 6, owner=1))))
    assert slots(changes) == {"open": [5]}
    assert [put.name for put in changes.put_topics] == ["t"]


def test_the_same_image_again_changes_nothing() -> None:
    catalog = Catalog(0)
    catalog.on_image(image(topic("t", A, partition(0, 5), retention_ms="1")))
    assert catalog.on_image(image(topic("t", A, partition(0, 5), retention_ms="1"), version=2)) == Changes()


def test_an_image_removes_partitions_that_it_does_not_contain() -> None:
    catalog = Catalog(0)
    catalog.on_image(image(topic("t", A, partition(0, 5)), topic("u", B, partition(0, 6, owner=1))))
    changes = catalog.on_image(image(version=2))
    assert slots(changes) == {"delete": [5]}
    assert sorted(gone.name for gone in changes.forget_topics) == ["t", "u"]


def test_a_topic_recreated_under_the_same_name_removes_the_old_one_first() -> None:
    for reported in (lambda c, t: c.on_topic_put(t), lambda c, t: c.on_image(image(t))):
        catalog = Catalog(0)
        catalog.on_image(image(topic("t", A, partition(0, 5))))
        changes = reported(catalog, topic("t", B, partition(0, 7)))
        assert slots(changes) == {"delete": [5], "open": [7]}
        assert [gone.topic_id for gone in changes.forget_topics] == [A]


def test_more_partitions_open_only_the_new_ones() -> None:
    catalog = Catalog(0)
    catalog.on_topic_put(topic("t", A, partition(0, 5)))
    changes = catalog.on_topic_put(topic("t", A, partition(0, 5), partition(1, 6)))
    assert slots(changes) == {"open": [6]}
    assert [len(put.partitions) for put in changes.put_topics] == [2]


def test_epoch_and_configuration_change_in_place() -> None:
    catalog = Catalog(0)
    catalog.on_topic_put(topic("t", A, partition(0, 5)))
    assert slots(catalog.on_topic_put(topic("t", A, partition(0, 5, leader_epoch=3)))) == {"set_epoch": [5]}
    assert slots(catalog.on_topic_put(topic("t", A, partition(0, 5, leader_epoch=3), retention_ms="7"))) == {
        "set_options": [5]
    }
    assert slots(catalog.on_broker_config({"log.retention.ms": "9"})) == {"set_options": [5]}
    assert catalog.on_broker_config({"log.retention.ms": "9"}) == Changes()


def test_an_unplaced_partition_waits_for_its_slot() -> None:
    catalog = Catalog(0)
    assert slots(catalog.on_topic_put(topic("t", A, partition(0, -1)))) == {}
    assert slots(catalog.on_topic_put(topic("t", A, partition(0, 4)))) == {"open": [4]}


def test_a_failed_partition_is_retried_by_the_next_image_only() -> None:
    catalog = Catalog(0)
    catalog.on_image(image(topic("t", A, partition(0, 5), partition(1, 6))))
    catalog.record_failure((A, 0))
    assert [owned.index for owned in catalog.failed_partitions()] == [0]
    assert slots(catalog.on_topic_put(topic("t", A, partition(0, 5), partition(1, 6), retention_ms="7"))) == {
        "set_options": [6]
    }
    assert slots(catalog.on_image(image(topic("t", A, partition(0, 5), partition(1, 6), retention_ms="7")))) == {
        "open": [5]
    }
    assert catalog.failed_partitions() == []


def test_a_failure_for_lack_of_space_is_retried_automatically() -> None:
    catalog = Catalog(0)
    catalog.on_image(image(topic("t", A, partition(0, 5), partition(1, 6))))
    catalog.record_failure((A, 0), is_transient=True)
    catalog.record_failure((A, 1))
    assert slots(catalog.retry()) == {"open": [5]}
    assert catalog.retry() == Changes()
    catalog.record_failure((A, 0), is_transient=True)
    catalog.on_topic_removed(A)
    assert catalog.retry() == Changes()


def test_a_failed_partition_is_deleted_with_its_topic() -> None:
    catalog = Catalog(0)
    catalog.on_image(image(topic("t", A, partition(0, 5))))
    catalog.record_failure((A, 0))
    assert slots(catalog.on_topic_removed(A)) == {"delete": [5]}
    assert catalog.failed_partitions() == []
    assert catalog.on_topic_removed(A) == Changes()


def test_a_partition_that_moves_is_closed_and_opened() -> None:
    catalog = Catalog(0)
    catalog.on_topic_put(topic("t", A, partition(0, 5)))
    assert slots(catalog.on_topic_put(topic("t", A, partition(0, 5, log_dir=1)))) == {"close": [5], "open": [5]}
    assert slots(catalog.on_topic_put(topic("t", A, partition(0, 5, log_dir=1, owner=1)))) == {"close": [5]}


# -- options ---------------------------------------------------------------------------------------


def test_topic_options_override_the_brokers() -> None:
    broker = {
        "log.retention.hours": "1",
        "log.flush.on.ack": "false",
        "log.segment.bytes": "8192",
        "producer.id.count.max": "99",
    }
    options = log_options(broker, {"segment.bytes": "16384", "message.timestamp.type": "LogAppendTime"}, False)
    assert (
        options["segment_bytes"],
        options["flush_on_ack"],
        options["log_append_time"],
        options["producer_id_count_max"],
    ) == (16384, False, True, 99)
    policy = retention_policy(broker, {"retention.bytes": "1000"})
    assert (policy.retention_ms, policy.retention_bytes, policy.may_delete) == (3_600_000, 1000, True)


def test_the_defaults_are_kafkas() -> None:
    options = log_options({}, {}, False)
    assert (options["segment_bytes"], options["segment_ms"], options["flush_on_ack"], options["max_message_bytes"]) == (
        1 << 30,
        604_800_000,
        True,
        1_048_588,
    )
    assert retention_policy({}, {}).retention_ms == 604_800_000
    kept = retention_policy({}, {"schedule.to": "orders", "retention.ms": "1", "retention.bytes": "1"})
    assert (kept.retention_ms, kept.retention_bytes, kept.may_delete) == (-1, -1, True)


def test_a_log_flushes_what_replication_counts_as_flushed() -> None:
    broker = {"log.flush.on.ack": "false"}
    for internal, config in itertools.product((False, True), ({}, {"flush.on.ack": "true"}, {"flush.on.ack": "false"})):
        reported = TopicImage("t", A, [partition(0, 5)], config, internal)
        catalog, given = Catalog(0), list[tuple[int, bool]]()

        async def run(_command: object, slot: int, options: native.LogOptions) -> None:
            given.append((slot, options.flush_on_ack))

        opened = catalog.on_image(Image(1, "cluster", 1, [], [reported], broker)).open[0]
        partitions = PartitionSet(
            0,
            [],
            None,
            SimpleNamespace(set_options=None),
            SimpleNamespace(run=run),
            None,
            catalog,
            broker,
            PlainFiles(),
        )  # type: ignore[arg-type]
        partitions.open[opened.key] = OpenPartition(opened, Path(), 0, None, None)  # type: ignore[arg-type]
        asyncio.run(partitions._set_options(opened))
        assert (
            given
            == [(5, settings_of(reported, ClusterView(), broker).flush_on_ack)]
            == [(5, internal or config.get("flush.on.ack") == "true")]
        )
        assert partitions._log_options(opened).flush_on_ack == given[0][1], "when it is opened, too"


def test_reactor_options_follow_the_configuration() -> None:
    config = {
        "worker.cpus": "0,2-3",
        "io.backend": "epoll",
        "connections.max.idle.ms": "-1",
        "socket.request.max.bytes": str(64 << 20),
    }
    options = reactor_options(config, worker=4, own_arena_bytes=80 << 20, connection_count_max=640)
    assert (options["cpu"], options["backend"], options["connection_count_max"]) == (2, 2, 640)
    assert (options["request_bytes_max"], options["large_bytes"]) == (64 << 20, 64 << 20), "beside receive.arena.bytes"
    assert options["connection_idle_ms_max"] == 2**31 - 1, "never"
    assert options["authentication_bytes_max"] > 512 << 10, "sasl.server.max.receive.size and a header"
    assert all(isinstance(value, int) for value in options.values())
    assert reactor_options({}, 0, 16 << 20, 1)["cpu"] == -1


def test_rights_are_checked_if_there_is_an_authorizer() -> None:
    def rights(**config: str) -> object:
        return reactor_options({key.replace("_", "."): value for key, value in config.items()}, 0, 16 << 20, 1)[
            "rights"
        ]

    assert rights() == rights(authorizer_log_only="true") == 0
    assert rights(authorizer_class_name="standard") == 1
    assert rights(authorizer_class_name="standard", authorizer_log_only="true") == 2


def test_the_reactor_knows_listeners_with_authentication() -> None:
    listeners = [Listener("L", "", 0, protocol) for protocol in ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")]
    assert listener_flags(listeners) == [0, 1, 2, 3]


def test_messages_survive_encoding() -> None:
    reported = image(topic("t", A, partition(0, 5)))
    catalog = Catalog(0)
    assert slots(catalog.on_image(msgspec.msgpack.decode(msgspec.msgpack.encode(reported), type=Image))) == {
        "open": [5]
    }
