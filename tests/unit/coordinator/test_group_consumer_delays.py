"""Rebalances of consumer groups (KIP-848) that do not end: since when, and which member delays
them.
"""

from __future__ import annotations

import pytest

from tests.unit.coordinator.consumer_shell import ConsumerShell


@pytest.fixture
def shell() -> ConsumerShell:
    return ConsumerShell()


def test_members_that_delay_a_rebalance(shell: ConsumerShell) -> None:
    shell.enter("m1")
    assert shell.core.held_up_by() == []
    shell.advance(1_000)
    shell.enter("m2")
    (first,) = shell.core.held_up_by()
    assert (first.member_id, first.waited_for, first.seen_ms) == ("m1", "heartbeat", shell.now - 1_000)
    shell.heartbeat("m1", 1, {"a": (0, 1, 2, 3)})
    since = shell.now
    shell.advance(1_000)
    shell.heartbeat("m1", 1, {"a": (0, 1, 2, 3)})
    (first,) = shell.core.held_up_by()
    assert (first.waited_for, first.since_ms, first.client_host) == ("revocation", since, "/10.0.0.1")
    shell.heartbeat("m1", 1, {"a": (0, 1)})
    shell.heartbeat("m2", 2)
    assert shell.core.held_up_by() == []


# -- static members --------------------------------------------------------------------------------


def test_how_long_a_rebalance_has_lasted(shell: ConsumerShell) -> None:
    """From the first target that a member has not reached, whatever it sends meanwhile."""
    shell.enter("m1")
    assert shell.core.rebalance_since_ms == -1
    shell.advance(3_000)
    began = shell.now
    shell.enter("m2")
    shell.advance(3_000)
    shell.heartbeat("m1", 1, {"a": (0, 1, 2, 3)})
    shell.heartbeat("m2", 2)
    shell.enter("m3")  # another target: the same rebalance
    shell.advance(3_000)
    about = shell.core.rebalance()
    assert about is not None and about.since_ms == shell.core.rebalance_since_ms == began
    shell.restart()
    assert shell.core.rebalance_since_ms == shell.now, "at the earliest that is known"
    for member_id, epoch in (("m1", 1), ("m2", 2)):
        shell.heartbeat(member_id, -1 if member_id == "m1" else epoch)
    shell.heartbeat("m3", -1)
    shell.heartbeat("m2", shell.consumer.members["m2"].epoch)
    assert shell.core.state_name == "Stable" and shell.core.rebalance() is None
    shell.advance(3_000)
    shell.enter("m4")
    assert shell.core.rebalance_since_ms == shell.now
