"""Callbacks of an application that does not poll: only one call waits, with the newest values."""

from __future__ import annotations

import json
from collections.abc import Callable

from confluent_kafka import KafkaError

from mqd.client.messages import local_error
from tests.unit.client.client_consumer import ConsumerWorld


def polled(world: ConsumerWorld, there: Callable[[], object]) -> None:
    while not there():
        world.consumer.poll(0.01)


def test_error_cb_gets_the_newest_error_once() -> None:
    reported: list[KafkaError] = []
    world = ConsumerWorld(0, error_cb=reported.append)
    listener, operations = world.consumer._listener, world.consumer._inbox.operations
    for number in range(1000):  # the broker is lost and found again
        listener.on_lost(local_error(KafkaError._TRANSPORT, str(number)))
        listener.on_reattached(None, None)
    assert len(operations) == 1
    polled(world, lambda: reported)
    assert [error.str() for error in reported] == ["999"] and not operations
    listener.on_lost(local_error(KafkaError._TRANSPORT, "another"))
    polled(world, lambda: len(reported) > 1)
    assert reported[1].str() == "another"
    listener.on_lost(local_error(KafkaError._TRANSPORT, "not fatal"))
    listener.on_lost(local_error(KafkaError._FATAL, "fatal", fatal=True))
    listener.on_lost(local_error(KafkaError._TRANSPORT, "of the same loss"))
    polled(world, lambda: len(reported) > 2)
    assert reported[2].fatal() and len(reported) == 3
    world.consumer.close()


def test_a_report_of_statistics_waits_alone() -> None:
    reports: list[str] = []
    world = ConsumerWorld(0, stats_cb=reports.append, statistics_interval_ms=3_600_000)
    statistics, operations = world.consumer._statistics, world.consumer._inbox.operations
    with world.consumer.control.lock:
        for number in range(1000):
            statistics.due = 0.0
            world.consumer._listener.on_turn(float(number))
        assert len(operations) == 1 and statistics.due == 999.0 + 3600
        statistics.due = float("inf")
    polled(world, lambda: reports)
    assert len(reports) == 1 and json.loads(reports[0])["type"] == "consumer"
    world.consumer.close()
