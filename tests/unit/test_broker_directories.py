"""What a host tells the controller of directories of its own that fail."""

from __future__ import annotations

from controller_world import World

from mqd.cluster import broker_core, broker_messages
from mqd.cluster import controller_messages as messages


def test_a_directory_that_fails_for_a_while_is_told_of_as_long_as_it_does_and_no_longer() -> None:
    """Also when nothing else happens in the cluster: what is told then decides on unclean elections."""
    world = World(7, 3)
    world.settle(20)
    assert world.ask(messages.CreateTopic("t", 6, 1, {}, {})).error == 0
    world.settle(20)
    core = world.hosts[2].broker

    def seen(usable: bool) -> broker_core.DirectoriesSeen:
        return broker_core.DirectoriesSeen((broker_messages.DirectoryReport("meta-2-a", "/a", 9 * usable, usable), broker_messages.DirectoryReport("meta-2-b", "/b", 9 * usable, usable)))

    def told() -> list[broker_messages.ReplicasFailed]:
        world.now_ms += 10_000
        actions = [action for step in range(1, 40) for action in core.handle(broker_core.Tick(), world.now_ms + 100 * step)]
        return [action.message for action in actions if isinstance(getattr(action, "message", None), broker_messages.ReplicasFailed)]

    assert not told()
    core.handle(seen(False), world.now_ms)
    heard = told()
    assert heard and all(message.partitions for message in heard)
    core.handle(seen(True), world.now_ms)
    assert not told()
