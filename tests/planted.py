"""Planted bugs in the cores of the controller and the brokers: each replaces one rule where it is
defined, to prove that the simulators and the random histories find the bug that the rule prevents.

plant() breaks exactly the named rules in this process until the next call; names that are not in
RULES belong to rules elsewhere. A simulated cluster plants its own, and a fixture of
tests/sim/conftest.py removes them after each test.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

from mqd.cluster.broker.core import BrokerCore
from mqd.cluster.metadata.active_controller import ActiveController
from mqd.cluster.metadata.rules import brokers, in_sync, partitions
from mqd.protocol.errors import ErrorCode


def _begins_at_its_end(self: ActiveController, node: int, now_ms: int) -> None:
    self.sessions.on_heartbeat(node, now_ms - self._options.session_ms)
    self._unfenced_since_ms[node] = now_ms


def _of_any_state(_broker: Any, node_id: int, _epoch: int, partition: Any, _proposal: Any) -> int:
    return 0 if partition.leader == node_id else ErrorCode.NOT_LEADER_OR_FOLLOWER


_elected = partitions._elect


def _elects_uncleanly(target: partitions.Target, *given: Any) -> tuple[int, bool]:
    if target.election == partitions.ONLINE:
        target.election = partitions.UNCLEAN
    return _elected(target, *given)


def _true(*_: Any) -> bool:
    return True


def _false(*_: Any) -> bool:
    return False


# rule -> (object that defines it, its attribute, the replacement)
RULES: dict[str, list[tuple[Any, str, Any]]] = {
    "R6": [(in_sync, "_stale_error", _of_any_state)],
    "R6b": [(in_sync, "_is_comparable", _false), (ActiveController, "_is_for_this_epoch", _true)],
    "R8": [(partitions, "_eligible", lambda *_: ((), ()))],
    "R9": [(brokers, "_find_losses", lambda *_: (-1, frozenset()))],
    "R10": [(brokers, "has_applied_registration", _true), (BrokerCore, "_check_registered", lambda _: None)],
    "R13": [(partitions, "_elect", _elects_uncleanly)],
    "R14": [(partitions, "_may_complete", _true)],
    "903": [(in_sync, "_has_not_restarted", _true)],
    "L2": [(ActiveController, "_begin_session", _begins_at_its_end)],
    "proof": [(ActiveController, "_matches_session", _true)],
    "proof of any epoch": [(ActiveController, "_is_for_this_controller", _true)],
}
_KEPT = {rule: [(owner, name, getattr(owner, name)) for owner, name, _ in places] for rule, places in RULES.items()}


def plant(rules: Collection[str] = ()) -> None:
    for rule in RULES:
        for owner, name, function in (RULES if rule in rules else _KEPT)[rule]:
            setattr(owner, name, function)


@contextlib.contextmanager
def planted(*rules: str) -> Iterator[None]:
    plant(rules)
    try:
        yield
    finally:
        plant()
