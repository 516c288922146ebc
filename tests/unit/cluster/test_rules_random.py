"""Random histories of a small cluster: the active controller's rules and the brokers' cores, with a
model of the replicas' logs (controller_world.py). A failing seed can be replayed.
"""

import pytest

from mqd.cluster.host import messages
from tests.planted import planted
from tests.tiers import quick
from tests.unit.controller.controller_world import World


def history(seed: int, steps: int) -> World:
    world = World(seed, 4, racks=seed % 3)
    world.settle(20)
    world.send_request(messages.CreateTopic("topic-9", 2, 3, {}, {}))
    for _ in range(steps):
        world.step()
        world.check()
    world.heal()
    return world


@pytest.mark.parametrize("seed", quick(range(40), range(2)))
def test_history(seed: int) -> None:
    history(seed, 500)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1_000, 2_000))
def test_long_history(seed: int) -> None:
    history(seed, 1_500)


@pytest.mark.parametrize("rule", ["R8", "R9", "L2"])
def test_a_disabled_rule_is_detected(rule: str) -> None:
    """Bugs in the other rules are detected by traces: test_rules.py."""
    for seed in range(30):
        try:
            with planted(rule):
                history(seed, 500)
        except AssertionError:
            return
    pytest.fail(f"without {rule} 30 histories were as they should be")
