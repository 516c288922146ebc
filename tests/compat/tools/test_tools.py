"""Every story, run on mqd and on Apache Kafka: nothing differs without a reason. Slow tier."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.compat.kafka_tools import KafkaTools
from tests.compat.tools.catalogue import STORIES
from tests.compat.tools.differences import Verdict
from tests.compat.tools.sides import Sides, started
from tests.compat.tools.story import Story

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def one(kafka_tools: KafkaTools, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    with started(kafka_tools, tmp_path_factory.mktemp("one"), 1) as sides:
        yield sides


@pytest.fixture(scope="module")
def three(kafka_tools: KafkaTools, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    with started(kafka_tools, tmp_path_factory.mktemp("three"), 3) as sides:
        yield sides


def judge(sides: Sides, story: Story) -> None:
    verdict = Verdict(story.name, *sides.tell(story.tell))
    assert not verdict.unexplained, "\n".join(["differs without a reason (- Kafka, + mqd):", *verdict.unexplained])
    assert not verdict.unused, f"the table allows what does not occur: {verdict.unused}"


def of(brokers: int) -> list[Story]:
    return [story for story in STORIES.values() if story.brokers == brokers]


@pytest.mark.parametrize("story", of(1), ids=lambda story: story.name)
def test_one_broker(one: Sides, story: Story) -> None:
    judge(one, story)


@pytest.mark.parametrize("story", of(3), ids=lambda story: story.name)
def test_three_brokers(three: Sides, story: Story) -> None:
    judge(three, story)
